"""The page as a document, without a browser: complete, offline, and safe from names."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from modelsummary import ForwardError, InputError, ModelStatistics, Statistics
from tests.untouched import untouched
from tests.views.explorer.pages import NASTY, data_of, nasty_model


@pytest.fixture(scope="module")
def stats():
    return Statistics(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), (3, 4))


def test_the_page_is_written_and_returned(stats, tmp_path):
    page = stats.explore(tmp_path / "net.html")
    assert (tmp_path / "net.html").read_text(encoding="utf-8") == page.html
    assert str(page).startswith("<explorer page of Sequential, ")
    assert page._repr_html_().startswith('<iframe srcdoc="&lt;!DOCTYPE html&gt;')
    assert len(page.html) < 3e6


def test_the_page_loads_nothing(stats):
    """No element of the page has an address; the libraries' own code is checked in the browser."""
    html = re.sub(r"<script.*?</script>", "", stats.explore().html, flags=re.DOTALL)
    assert not re.search(r"\b(src|href)=|url\(|@import", html)


def test_names_stay_text():
    html = Statistics(nasty_model(), (1, 2)).explore().html
    assert html.count("</script>") == 4
    assert NASTY not in html
    assert NASTY in data_of(html)["models"][0]["texts"]


def test_the_data_have_one_entry_per_node(stats):
    model = data_of(stats.explore().html)["models"][0]
    count = len(model["nodes"]["parent"])
    columns = [*model["nodes"].values(), *model["facts"].values(), *(figure["own"] for figure in model["figures"])]
    assert {len(column) for column in columns} == {count} == {6}
    assert [figure["name"] for figure in model["figures"]][:2] == ["macs", "params"]
    assert sum(model["figures"][0]["own"]) == 3 * 4 * 8 + 3 * 8 * 2


def test_json_exports_and_models_without_an_input_have_the_hierarchy_only(stats):
    for each in (ModelStatistics.from_json(stats.to_json()), Statistics(nn.Sequential(nn.Linear(4, 8)))):
        model = data_of(each.explore().html)["models"][0]
        assert model["edges"]["source"] == []
        assert model["texts"][model["nodes"]["type"][1]] == "Linear"


def test_differences_name_the_nodes_of_both_models(stats):
    other = Statistics(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)), (3, 4))
    data = data_of(stats.explore(compare=other).html)
    texts = [[model["texts"][place] for place in model["nodes"]["type"]] for model in data["models"]]
    found = [
        (row["status"], *(texts[side][node] if node >= 0 else None for side, node in enumerate(row["nodes"])))
        for row in data["diff"]["rows"]
    ]
    assert found == [("changed", "ReLU", "GELU")]


def test_memory_changes_add_up_to_the_timeline(stats):
    memory = stats.memory(optimizer="adam")
    model = data_of(stats.explore(memory=memory).html)["models"][0]
    last = sum(sum(changes) for changes in model["memory"]["held"].values())
    assert last == memory.timeline[-1].total
    assert len(model["memory"]["operator"]) == len(memory.timeline)


def test_stages_and_sharding_are_groups(stats):
    model = data_of(stats.explore(stages=stats.split(2), plan=stats.parallel_plan(tensor=2)).html)["models"][0]
    shown = {title: {model["texts"][place] for place in places} for title, places in model["groups"].items()}
    assert shown == {
        "Kind": {"", "matrix product", "element-wise"},
        "Stage": {"", "stage 0", "stage 1"},
        "Sharding": {"", "ColwiseParallel", "RowwiseParallel"},
    }


def test_a_dataflow_that_cannot_be_recorded_is_a_remark():
    model = nn.Sequential(nn.LazyLinear(3))
    data = data_of(Statistics(model, (1, 2)).explore().html)["models"][0]
    assert data["edges"]["source"] == []
    assert "The dataflow is not known: " in data["remarks"][0]


class Failing(nn.Linear):
    fails = False

    def forward(self, x):
        if self.fails:
            raise ValueError("now")
        return super().forward(x)


def test_a_forward_that_raises_is_a_remark():
    model = Failing(2, 3)
    stats = Statistics(model, (1, 2))
    model.fails = True
    with untouched(model):
        data = data_of(stats.explore().html)["models"][0]
    assert "ValueError: now" in data["remarks"][0]
    with pytest.raises(ForwardError, match="ValueError: now"):
        stats.graph()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compare": "net"}, "compare must be the Statistics of a model, got str: 'net'; pass Statistics"),
        ({"memory": 3}, "memory must be a MemoryEstimate, as memory() returns it, got 3"),
        ({"stages": 2}, "stages must be the result of split() on this model, got 2"),
        ({"plan": "tensor"}, "plan must be a ParallelPlan, as parallel_plan() returns it, got 'tensor'"),
        ({"path": "/no/such/folder/net.html"}, "path='/no/such/folder/net.html' cannot be written"),
    ],
)
def test_unusable_arguments(stats, options, message):
    with pytest.raises(InputError, match=re.escape(message)):
        stats.explore(**options)


def test_memory_and_stages_of_other_models_are_refused(stats):
    other = Statistics(nn.Sequential(nn.Sequential(nn.Linear(4, 8)), nn.ReLU()), (3, 4))
    with pytest.raises(InputError, match=r"memory belongs to another model: Sequential has no module .0\.0."):
        stats.explore(memory=other.memory("inference"))
    data = ModelStatistics.from_json(stats.to_json())
    with pytest.raises(InputError, match="stages need the live model that was split"):
        data.explore(stages=stats.split(2))


def test_the_model_is_untouched(stats):
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generator = torch.random.get_rng_state()
    Statistics(model, (3, 4)).explore()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), generator)
    assert model.training
    assert not model[0]._forward_hooks


def test_the_program_holds_no_import_or_export(stats):
    program = stats.explore().html.rpartition("<script>")[2]
    assert not re.search(r"^(import|export)\b", program, flags=re.MULTILINE)


class Tied(nn.Module):
    """One layer at the beginning and at the end."""

    def __init__(self):
        super().__init__()
        self.tied, self.middle = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x):
        return self.tied(self.middle(self.tied(x)))


def test_a_layer_in_two_stages_says_so():
    stats = Statistics(Tied(), (3, 4))
    model = data_of(stats.explore(stages=stats.split(2)).html)["models"][0]
    names = [model["texts"][place] for place in model["nodes"]["name"]]
    facts = dict(zip(names, [model["texts"][place] for place in model["facts"]["Shared"]], strict=True))
    assert facts["tied"] == facts["tied (call 2)"] == "the parameters are in stages 0, 1"
    assert facts["middle"] == ""
