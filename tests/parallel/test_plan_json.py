"""Plans from JSON: what ``to_json`` wrote, and anything else."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from modelsummary import InputError, Statistics
from modelsummary.parallel import ParallelPlan, applying
from tests.parallel import models

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


@cache
def written():
    return json.loads(Statistics(*models.make("gpt2")).parallel_plan(tensor=2, shard=2).to_json())


def _places(data, path=()):
    """The path of each value in containers."""
    yield path
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield from _places(value, (*path, key))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_wrong_value_is_refused_in_one_line_or_the_plan_is_whole(data):
    document = copy.deepcopy(written())
    path = data.draw(st.sampled_from(list(_places(document))[1:]))
    owner = document
    for key in path[:-1]:
        owner = owner[key]
    if data.draw(st.booleans()) or not isinstance(owner, dict):
        owner[path[-1]] = data.draw(ANYTHING)
    else:
        del owner[path[-1]]
    plan, refusal = None, ""
    try:
        plan = ParallelPlan.from_json(json.dumps(document))
    except InputError as error:
        refusal = str(error)
    assert len(refusal.splitlines()) == (plan is None)
    if plan is None:
        return
    assert ParallelPlan.from_json(plan.to_json()) == plan
    assert str(plan)
    compile(plan.to_code(), "plan", "exec")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tensor": "2"}, "tensor of a plan must be int, got '2'"),
        ({"tensor": 0}, "tensor of a plan must be an integer >= 1, got 0"),
        ({"tensor": True}, "tensor of a plan must be int, got True"),
        ({"units": "blocks"}, r"units of a plan must be tuple\[tuple\[str, \.\.\.\], \.\.\.\], got 'blocks'"),
        ({"precision": "bfloat"}, "precision of a plan must be the name of a floating point dtype, got 'bfloat'"),
        ({"layers": {}}, "layers of a plan must be a list, got {}"),
        ({"layers": [{}]}, r"layers\[0\] of a plan has no 'fqn'; expected fqn, mesh, "),
        ({"stored_communication": 1}, "stored_communication of a plan must be a list, got 1"),
        ({"more": 1}, "a plan has an unknown 'more'; expected attributes, "),
        ({"mesh": {"tensor": 4}}, r"mesh of a plan must be {'shard': 2, 'tensor': 2}, as its other fields say, got"),
        ({"last_unit": ["nope"]}, r"last_unit of a plan must be one of its units, got \('nope',\)"),
        ({"averaged": float("inf")}, "this is not the JSON of a plan: .*no number Infinity"),
        ({"kept": {"nope": ["aten.mm.default#0"]}}, "kept of a plan must be of modules in its checkpoint, got {'nope'"),
        ({"kept": {"nope": ["mm"]}}, "checkpoint keeps 'mm' in 'nope', which names no operator of torch"),
        ({"unit_calls": [1]}, "unit_calls of a plan must have a number for each of units"),
    ],
)
def test_messages_name_the_field(change, message):
    with pytest.raises(InputError, match=message):
        ParallelPlan.from_json(json.dumps({**written(), **change}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"style": "loss_parallel"}, "layers of a plan must have a known style, role and mesh, got 'loss_parallel'"),
        ({"style": "ParallelStyle"}, "layers of a plan must have a known style, role and mesh, got 'ParallelStyle'"),
        ({"options": {"class": 1}}, "options of ColwiseParallel must be of input_layouts, .*, got 'class'"),
    ],
)
def test_messages_name_the_layer(change, message):
    document = copy.deepcopy(written())
    layer = next(layer for layer in document["layers"] if layer["style"] == "ColwiseParallel")
    layer.update(change)
    with pytest.raises(InputError, match=message):
        ParallelPlan.from_json(json.dumps(document))


@pytest.mark.parametrize("change", [{"phase": "later"}, {"operation": "send"}, {"group": "pipe"}])
def test_messages_name_the_collective(change):
    document = copy.deepcopy(written())
    document["stored_communication"][0].update(change)
    with pytest.raises(InputError, match="communication of a plan must have a known phase, operation and group, got"):
        ParallelPlan.from_json(json.dumps(document))


@pytest.mark.parametrize("text", ["Shard(01)", "Shard(\u0663)", "Shard(x)", 'Shard(0)"', "_StridedShard(0)"])
def test_only_placements_are_written_without_quotes(text):
    document = copy.deepcopy(written())
    layer = next(layer for layer in document["layers"] if layer["style"] == "ColwiseParallel")
    layer["options"] = {"output_layouts": text}
    assert f"output_layouts={text!r}" in ParallelPlan.from_json(json.dumps(document)).to_code()


def test_a_name_of_a_class_is_text_of_the_code():
    plan = Statistics(*models.make("decoder")).parallel_plan(tensor=2)
    plan = replace(plan, model_class='M"""\nraise ValueError\n"""')
    code = plan.to_code()
    assert ParallelPlan.from_json(plan.to_json()).to_code() == code
    exec(code, {})


def test_a_plan_has_all_its_fields_and_no_others():
    document = copy.deepcopy(written())
    for name in set(document) - {"mesh"}:
        with pytest.raises(InputError, match=f"^a plan has no '{name}'; expected "):
            ParallelPlan.from_json(json.dumps({field: document[field] for field in document if field != name}))
    document["layers"][0]["collectives"] = []
    with pytest.raises(InputError, match=r"^layers\[0\] of a plan has an unknown 'collectives'; expected "):
        ParallelPlan.from_json(json.dumps(document))


def test_switches_of_modules_come_back():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 8))
    plan = Statistics(model, (2, 8)).parallel_plan(tensor=2)
    assert [attribute.whole for attribute in plan.attributes] == [True]
    assert ParallelPlan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("field", ["checkpoint", "frozen", "conditional"])
def test_names_that_a_model_lacks_are_refused_before_anything_is_sharded(field):
    model = models.make("gpt2")[0]
    plan = replace(ParallelPlan.from_json(json.dumps(written())), **{field: ("nope",)})
    with pytest.raises(InputError, match="names 'nope', which this model does not have"):
        applying._check_model(plan, model)


@pytest.mark.parametrize("schedule", ["nonsense", ["1f1b"], None])
@pytest.mark.parametrize("sizes", [{"tensor": 2}, {"pipeline": 2}])
def test_an_unknown_schedule_is_refused(sizes, schedule):
    plan = Statistics(*models.make("decoder")).parallel_plan(**sizes)
    with pytest.raises(InputError, match=r"schedule must be one of 'gpipe', '1f1b', .*, got "):
        plan.memory(0, schedule=schedule)
