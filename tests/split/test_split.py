"""Splitting whole models: exactness, what the stages are, what cannot be split."""

from __future__ import annotations

import copy
from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import modelsummary
from modelsummary import ForwardError, InputError, SplitError, Statistics
from modelsummary.split.schedule import StageLoad, simulate
from tests.idioms import IDIOMS, Dense, Gpt2, InPlace, ids, in_both_modes, rows, some
from tests.models import Call
from tests.untouched import untouched


def made(name, mode=True):
    torch.manual_seed(0)
    kind, inputs = IDIOMS[name]
    return kind().train(mode), inputs


def tensors(value):
    value = vars(value) if hasattr(value, "__dataclass_fields__") else value
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def steps(forward, model, inputs, mode):
    """Run two training steps (or evaluations) with dropout. Return all outputs, gradients, parameters and buffers."""
    model.train(mode)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    torch.manual_seed(1)
    seen = []
    for step in (0, 1):
        out = tensors(forward(**inputs(3 + step, step)))
        sum((each.float() ** 2).mean() for each in out if each.requires_grad).backward()
        seen += [each.detach().clone() for each in out]
        seen += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *(each.clone() for each in model.state_dict().values()), torch.rand(1)]


@pytest.mark.parametrize(
    ("name", "mode"),
    in_both_modes(IDIOMS.keys() - {"gpt2", "bert"}, ["experts", "unet", "lstm", "in place", "dense"]),
)
def test_training_the_stages_trains_the_model(name, mode):
    model, inputs = made(name, mode)
    twin = copy.deepcopy(model)
    expected = steps(twin, twin, inputs, mode)
    for n_stages in (2, 4):
        mine = copy.deepcopy(model)
        with untouched(mine):
            stages = Statistics(mine, inputs(2, 5)).split(n_stages)
        assert len(stages) == n_stages
        assert all(isinstance(stage, nn.Sequential) for stage in stages)
        found = steps(stages, mine, inputs, mode)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, equal_nan=True)


@pytest.mark.parametrize(
    ("name", "mode"),
    in_both_modes(
        ["gpt2 with loss", "t5", "bert with all", "unet", "in place"],
        ["llama", "experts", "lstm", "transformer", "dense"],
    ),
)
def test_detached_stages_are_exact_at_other_batch_sizes_and_in_the_other_mode(name, mode):
    model, inputs = made(name, mode)
    stages = Statistics(model, inputs(2, 5)).split(3)
    for batch in (2, 5):
        for now in (mode, not mode):
            stages.train(now)
            model.train(now)
            found = stages.verify(**inputs(batch, 7))
            assert (found.outputs, found.buffers) == (0.0, 0.0)
            assert found.gradients < 1e-5


@pytest.mark.parametrize("name", some("gpt2", "t5", "experts", "unet", "lstm", "in place"))
def test_keys_are_those_of_the_model_and_tensors_its_own(name):
    model, inputs = made(name)
    stages = Statistics(model, inputs(2, 5)).split(4)
    assert list(stages.state_dict()) == list(model.state_dict())
    own = {id(each) for each in (*model.parameters(), *model.buffers())}
    for stage in stages:
        assert {id(each) for each in (*stage.parameters(), *stage.buffers())} <= own
    fresh = {key: torch.zeros_like(value) for key, value in model.state_dict().items()}
    stages.load_state_dict(fresh)
    assert all(not each.any() for each in model.state_dict().values())
    with pytest.raises(SplitError, match=r"missing \['.+'\], unexpected \['nonsense'\]"):
        stages.load_state_dict({"nonsense": torch.zeros(1)})


def test_a_chain_reads_like_the_model():
    model = Dense().eval()
    stages = Statistics(model, (2, 3, 8, 8)).split(2, boundaries=["features.3"])
    assert [type(stage) for stage in stages] == [nn.Sequential, nn.Sequential]
    assert [name for name, _ in stages[0].named_modules()] == [
        "", "conv", "features", "features.0", "features.1", "features.2",
    ]  # fmt: skip
    assert list(stages[1]._modules) == ["features", "flatten", "fc1", "relu", "dropout", "fc2", "log_softmax"]
    assert stages[1].get_submodule("features.3") is model.features[3]
    assert "(flatten): torch.flatten(input, 1)" in repr(stages[1])
    x = rows(2, 3, 8, 8)
    assert torch.equal(stages[1](stages[0](x)), model(x))
    stages.train()
    model.train()
    assert stages.verify(x).outputs == 0.0  # functional dropout follows the mode


def test_a_tied_weight_is_one_object_in_two_stages():
    model = Gpt2()
    stages = Statistics(model, ids()).split(2)
    shared = stages.shared_parameters
    assert [(each.fqn, each.stages, each.names) for each in shared] == [
        ("wte.weight", (0, 1), ("wte.weight", "lm_head.weight"))
    ]
    assert stages[0].get_parameter("wte.weight") is stages[1].get_parameter("lm_head.weight") is model.wte.weight
    assert stages.stage_of("wte") == 0
    assert stages.stage_of("lm_head") == 1
    assert stages.stage_of("lm_head.weight") == 1
    with pytest.raises(KeyError, match=r"no stage holds 'h\.9'"):
        stages.stage_of("h.9")


def test_no_cut_where_a_later_call_writes_into_what_crosses():
    model = InPlace()
    x = rows(3, 8)
    stats = Statistics(model, x)
    most = stats.split(1).record.root  # a whole model is one stage
    assert most.fqn == ""
    with pytest.raises(SplitError, match="writes in place") as error:
        stats.split(40)
    possible = error.value.possible
    stages = stats.split(possible)
    assert stages.verify(x).outputs == 0.0
    assert stages.verify(x).gradients < 1e-6
    with pytest.raises(SplitError, match=f"{possible} are possible"):
        stats.split(possible + 1)


def test_a_model_that_decides_by_values_is_refused():
    def forward(self, x):
        x = self.a(x)
        return self.b(x) if x.sum() > 0 else x

    model = Call(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    stats = Statistics(model, rows(2, 4))
    with (
        untouched(model),
        pytest.raises(SplitError, match=r"the model decides by values of tensors.*one stage") as error,
    ):
        stats.split(2)
    assert error.value.possible == 1


def test_a_layer_that_decides_by_values_is_kept_whole():
    def inner(self, x):
        return self.b(x) if x.sum() > 0 else x

    model = nn.Sequential(nn.Linear(4, 4), Call(inner, b=nn.Linear(4, 4)), nn.Linear(4, 4))
    stats = Statistics(model, rows(2, 4))
    assert stats.execution == "real"
    stages = stats.split(3)
    assert [each.first for each in stages.facts] == ["0", "1", "2"]
    for seed in range(4):
        assert stages.verify(rows(2, 4, seed=seed)).outputs == 0.0
    with pytest.raises(SplitError, match=r"3 are possible.*layer '1' is called as a whole: it decides by values"):
        stats.split(4)


def test_a_check_of_a_constant_is_no_decision_by_values():
    def forward(self, x):
        positions = torch.arange(x.shape[1])
        assert (positions.diff() == 1).all()
        return self.b(self.a(x) + positions)

    model = Call(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    stages = Statistics(model, rows(2, 4)).split(2)
    assert stages.verify(rows(5, 4)).outputs == 0.0


def test_a_random_number_decides_by_values():
    def forward(self, x):
        x = self.a(x)
        return self.b(x) if torch.rand(()) < 0.5 else x

    model = Call(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    with pytest.raises(SplitError, match="decides by values"):
        Statistics(model, rows(2, 4)).split(2)


def test_python_random_numbers_are_no_constants():
    import random

    def forward(self, x):
        return self.b(self.a(x) * random.random())

    model = Call(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    with untouched(model), pytest.raises(SplitError, match="draws from Python's or numpy's random numbers"):
        Statistics(model, rows(2, 4)).split(2)


def _and_last(module, x):
    last = getattr(module, "last", None)
    module.last = x
    return x if last is None else x + last


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (lambda self, x: self.b(self.a(_and_last(self, x))), "assigns its attribute 'last'"),
        (lambda self, x: self.b(self.a(x)[self.a(x)[:, 0] > 0]).reshape(-1, 1)[: len(x[x > 0])], "depends on values"),
        (lambda self, x: self.b(torch.tensor(self.a(x).tolist())), "calls tolist"),
        (lambda self, x: _Holder(self.b(self.a(x))), "_Holder that holds tensors"),
    ],
)
def test_reasons(forward, reason):
    model = Call(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    stats = Statistics(model, rows(2, 4).abs())
    with untouched(model), pytest.raises(SplitError, match=reason):
        stats.split(2)


def test_what_depends_on_the_batch_size_is_bound_to_it():
    def forward(self, x):
        return self.b(self.a(x)) * (2 if x.shape[0] % 2 else 3)

    model = Call(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    stages = Statistics(model, rows(2, 4)).split(2)
    assert stages.verify(rows(2, 4)).outputs == 0.0
    with pytest.raises(SplitError, match=r"shape \[3, 4\], but the stages were made for \[2, 4\]"):
        stages(rows(3, 4))


class _Holder:
    def __new__(cls, tensor):  # no object can be made of its attributes alone
        return super().__new__(cls)

    def __init__(self, tensor):
        self.tensor = tensor


def test_a_layer_that_depends_on_the_batch_size_is_opened_if_it_must_be():
    def inner(self, x):
        return self.d(self.c(x)) * (2 if x.shape[0] == 1 else 3)

    model = nn.Sequential(nn.Linear(4, 4), Call(inner, c=nn.Linear(4, 4), d=nn.Linear(4, 4)), nn.Linear(4, 4))
    stats = Statistics(model, rows(1, 4))
    assert stats.split(3).verify(rows(5, 4)).outputs == 0.0
    stages = stats.split(4)  # for this batch size only
    assert stages.verify(rows(1, 4)).outputs == 0.0
    with pytest.raises(SplitError, match=r"shape \[5, 4\], but the stages were made for \[1, 4\]"):
        stages(rows(5, 4))
    assert stats.split(3).verify(rows(5, 4)).outputs == 0.0


def test_a_forward_that_does_other_things_in_the_other_mode_is_bound_to_its_mode():
    def forward(self, x):
        x = self.a(x)
        return (self.b(x), x) if self.training else self.b(x)

    model = Call(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    x = rows(2, 4)
    stages = Statistics(model, x).split(2)
    assert stages.verify(rows(5, 4)).outputs == 0.0
    stages.eval()
    with pytest.raises(SplitError, match=r"split in train mode and is in eval mode.*split again"):
        stages(x)
    stages = Statistics(model.eval(), x).split(2)
    assert torch.equal(stages(x), model(x))


def test_the_modes_of_frozen_parts_are_kept():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4), nn.BatchNorm1d(4)).train()
    model[3].eval()
    stages = Statistics(model, rows(3, 4)).split(2)
    assert stages.verify(rows(3, 4)).outputs == 0.0
    assert [module.training for stage in stages for module in stage] == [True, True, True, False]


def test_a_size_that_was_read_is_checked():
    model, inputs = made("unet")
    stages = Statistics(model, inputs(2, 0)).split(3)
    with pytest.raises(SplitError, match=r"\[2, 3, 24, 24\], but the stages were made for \['any', 3, 16, 16\]"):
        stages(rows(2, 3, 24, 24))


def test_arguments_that_were_not_recorded_are_refused():
    model, inputs = made("bert")
    stages = Statistics(model, inputs(2, 0)).split(2)
    with pytest.raises(SplitError, match="argument 'attention_mask' was recorded as None"):
        stages(input_ids=ids(), attention_mask=torch.ones(3, 10))
    with pytest.raises(SplitError, match="'output_hidden_states' was recorded as False, but is True"):
        stages(ids(), output_hidden_states=True)
    with pytest.raises(SplitError, match="argument 'nonsense' is new"):
        stages(ids(), nonsense=1)
    one, other = stages(ids()), stages(input_ids=ids(), output_hidden_states=False)
    assert torch.equal(one.pooled, other.pooled)


def test_hooks_keep_a_layer_whole():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4))
    model[0].register_forward_hook(lambda module, args, out: out * 2)
    stats = Statistics(model, rows(2, 4))
    assert stats.split(2).verify(rows(2, 4)).outputs == 0.0
    with pytest.raises(SplitError, match="layer '0' is called as a whole: it has hooks"):
        stats.split(3)


def test_autocast_inside_keeps_a_layer_whole():
    def inner(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.b(self.a(x)).float()

    model = nn.Sequential(Call(inner, a=nn.Linear(4, 4), b=nn.Linear(4, 4)), nn.Linear(4, 4))
    stats = Statistics(model, rows(2, 4))
    assert stats.split(2).verify(rows(2, 4)).outputs == 0.0
    with pytest.raises(SplitError, match="switches autocast"):
        stats.split(3)


def test_no_grad_inside_stays():
    def forward(self, x):
        with torch.no_grad():
            x = self.a(x) * 2
        return self.b(x)

    model = Call(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    stages = Statistics(model, rows(2, 4)).split(3)
    stages(rows(2, 4)).sum().backward()
    assert model.a.weight.grad is None
    assert model.b.weight.grad is not None


def test_what_is_never_called_still_has_a_home():
    model = Call(lambda self, x: self.b(self.a(x)), a=nn.Linear(4, 4), spare=nn.Linear(3, 3), b=nn.Linear(4, 4))
    model.free = nn.Parameter(torch.ones(2))
    stages = Statistics(model, rows(2, 4)).split(2)
    assert list(stages.state_dict()) == list(model.state_dict())
    assert stages.stage_of("spare.weight") == 0
    assert stages.verify(rows(2, 4)).outputs == 0.0


def test_children_may_have_any_name():
    names = ["steps", "inputs", "batch", "add", "flatten", "insert", "append", "takes"]

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            for name in names:
                setattr(self, name, nn.Linear(4, 4))
            self.gives = nn.Parameter(torch.ones(4))

        def forward(self, x):
            for name in names:
                x = getattr(self, name)(x) + x * self.gives
            return torch.flatten(input=x.view(x.shape[0], 2, 2), start_dim=1)

    stages = Statistics(Named(), rows(2, 4)).split(3)
    assert stages.verify(rows(5, 4)).outputs == 0.0
    chain = nn.Sequential()
    for name in ("flatten", "relu", "forward_"):
        chain.add_module(name, nn.Linear(4, 4))
    model = Call(lambda self, x: torch.flatten(input=self.chain(torch.relu(x)), start_dim=1), chain=chain)
    stages = Statistics(model, rows(2, 4)).split(2)
    assert stages.verify(rows(5, 4)).outputs == 0.0


def test_by_and_boundaries():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    stats = Statistics(model, rows(2, 4))
    assert [each.calls for each in stats.split(3).facts] == [2, 2, 2]
    assert [each.calls for each in stats.split(2, by={"0": 5.0, "1": 1, "2": 1, "3": 1, "4": 1, "5": 1}).facts] == [
        1,
        5,
    ]
    assert [each.calls for each in stats.split(2, by=lambda row: 5 if row.fqn == "5" else 1).facts] == [5, 1]
    assert [each.first for each in stats.split(3, boundaries=["1"]).facts] == ["0", "1", "4"]
    for by in ("flops", "params", "param_bytes", "activation_bytes"):
        assert [each.calls for each in stats.split(3, by).facts] == [2, 2, 2]


def test_costs_of_a_mapping_spread_over_what_is_inside():
    inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 12), nn.Linear(12, 4))  # 16, 48, 48 MACs a row
    model = nn.Sequential(inner, nn.Linear(4, 4))
    stages = Statistics(model, rows(2, 4)).split(2, by={"0": 7.0, "1": 1.0})
    assert [each.cost for each in stages.facts] == pytest.approx([4.0, 4.0])  # 1 + 3 of 0, 3 of 0 + 1
    stages = Statistics(model, rows(2, 4)).split(2, by={"0": 7.0, "0.0": 5.0, "1": 1.0})
    assert [each.cost for each in stages.facts] == pytest.approx([5.0, 3.0])


def test_memory():
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))  # 256 bytes each, 64 of result
    stats = Statistics(model, rows(2, 8))
    assert [each.calls for each in stats.split(2, max_memory=[320, 960]).facts] == [1, 3]
    assert [each.calls for each in stats.split(2, max_memory=640).facts] == [2, 2]
    with pytest.raises(SplitError, match="at least 4") as error:
        stats.split(2, max_memory=639)
    assert error.value.possible == 4
    with pytest.raises(SplitError, match=r"a single call.*more than 319 bytes"):
        stats.split(4, max_memory=319)


def test_bytes_that_may_cross():
    model = nn.Sequential(nn.Linear(4, 100), nn.Linear(100, 2), nn.Linear(2, 4), nn.Linear(4, 4))
    stats = Statistics(model, rows(2, 4))
    assert [each.crossing_bytes for each in stats.split(2).facts] == [800, 0]
    stages = stats.split(3, max_crossing_bytes=100)
    assert [each.last for each in stages.facts] == ["1", "2", "3"]
    with pytest.raises(SplitError, match="because more than 10 bytes cross"):
        stats.split(2, max_crossing_bytes=10)


def test_of_equal_bottlenecks_the_quicker_wins():
    # five equal layers in three stages: 2 2 1, 2 1 2 and 1 2 2 have the same bottleneck; the first drains soonest
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    assert [each.calls for each in Statistics(model, rows(2, 4)).split(3).facts] == [2, 2, 1]
    times = [simulate([StageLoad(c, c, c) for c in costs], 6).makespan for costs in ([2, 2, 1], [2, 1, 2], [1, 2, 2])]
    assert times[0] < min(times[1:])


def test_single_tensor_cuts():
    model, inputs = made("unet")
    stats = Statistics(model, inputs(2, 0))
    assert max(each.crossing_tensors for each in stats.split(4).facts) > 1
    assert {each.crossing_tensors for each in stats.split(3, single_tensor_cuts=True).facts[:-1]} == {1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_stages": 0}, "n_stages must be an integer >= 1, got 0"),
        ({"n_stages": 2.0}, r"n_stages must be .* got 2\.0"),
        ({"n_stages": 2, "by": "speed"}, "by must be one of macs, .* got 'speed'"),
        ({"n_stages": 2, "by": 3}, "by must be one of macs, .* got 3"),
        ({"n_stages": 2, "by": "latency"}, "nothing was measured or estimated"),
        ({"n_stages": 2, "by": {"9": 1}}, "'9', but no layer of this name"),
        ({"n_stages": 2, "by": {"0": -1}}, "by must give '0' a cost >= 0, got -1"),
        ({"n_stages": 2, "by": lambda row: 0}, "cost of 0"),
        ({"n_stages": 2, "by": lambda row: 1 / 0}, "failed for '0' with ZeroDivisionError"),
        ({"n_stages": 2, "by": lambda: 1}, "failed for '0' with TypeError"),
        ({"n_stages": 2, "boundaries": "1"}, "must be a list of layer names, got one name"),
        ({"n_stages": 2, "boundaries": 3}, "boundaries must be a list of layer names, got 3"),
        ({"n_stages": 2, "boundaries": [None]}, r"boundaries must be a list of layer names, got \[None\]"),
        ({"n_stages": 2, "boundaries": ["7"]}, "'7', but no layer of this name was called"),
        ({"n_stages": 2, "boundaries": ["0"]}, "where the first stage begins anyway"),
        ({"n_stages": 2, "boundaries": ["1", "2"]}, "2 boundaries make 3 stages"),
        ({"n_stages": 2, "max_memory": -1}, "max_memory must be .* got -1"),
        ({"n_stages": 2, "max_memory": [1, 2, 3]}, "3 entries for 2 stages"),
        ({"n_stages": 2, "max_memory": float("nan")}, "max_memory must be .* got nan"),
        ({"n_stages": 2, "max_crossing_bytes": -1}, "max_crossing_bytes must be .* got -1"),
        ({"n_stages": 2, "max_crossing_bytes": "x"}, "max_crossing_bytes must be .* got 'x'"),
        ({"n_stages": 2, "single_tensor_cuts": "no"}, "single_tensor_cuts must be .* got 'no'"),
    ],
)
def test_bad_wishes(arguments, message):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    with untouched(model), pytest.raises(InputError, match=message):
        Statistics(model, rows(2, 4)).split(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"by": "mac"}, "by must be one of .* got 'mac'; did you mean 'macs'"),
        ({"by": "latency"}, "nothing was measured"),
        ({"by": {"l1": 1}}, "'l1', but no layer of this name"),
        ({"boundaries": ["layer.1.x"]}, "'layer.1.x', but no layer of this name was called; did you mean 'layer.1'"),
    ],
)
def test_misspelt_names_are_refused_before_anything_is_recorded(arguments, message, monkeypatch):
    def record(*args):
        raise AssertionError("recorded")
        yield

    monkeypatch.setattr("modelsummary.record.runs.record", record)
    stats = Statistics(nn.Sequential(OrderedDict(layer=nn.Sequential(nn.Linear(4, 4), nn.ReLU()))), rows(2, 4))
    with pytest.raises(InputError, match=message):
        stats.split(2, **arguments)
    with pytest.raises(ForwardError, match="AssertionError: recorded"):
        stats.split(2)


def test_a_boundary_inside_of_a_whole():
    model = nn.Sequential(nn.Linear(4, 4), nn.MultiheadAttention(4, 1))
    model = Call(lambda self, x: self.b(self.a(x), x, x)[0], a=nn.Linear(4, 4), b=nn.MultiheadAttention(4, 1))
    with pytest.raises(InputError, match=r"'b\.out_proj', but it is inside 'b'"):
        Statistics(model, rows(2, 4)).split(2, boundaries=["b.out_proj"])


def test_splitting_needs_an_input():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(SplitError, match="live model and an input"):
        Statistics(model).split(2)


def test_after_an_interruption_it_splits():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    stats = Statistics(model, (2, 4))

    def stop(*_):
        raise KeyboardInterrupt

    hook = model[1].register_forward_hook(stop)
    with untouched(model), pytest.raises(KeyboardInterrupt):
        stats.split(2)
    hook.remove()
    assert [len(stage) for stage in stats.split(2)] == [1, 1]


def test_a_lazy_model_is_refused():
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4))
    with untouched(model), pytest.raises(SplitError, match=r"'0\.weight' is not initialised"):
        Statistics(model, rows(2, 4)).split(2)


def test_a_model_on_meta_can_be_split():
    with torch.device("meta"):
        model = Gpt2(width=512, heads=8, depth=8)
    stages = Statistics(model, ids().to("meta")).split(4)
    assert stages.balance < 1.1
    assert all(parameter.is_meta for stage in stages for parameter in stage.parameters())


def test_the_public_name():
    assert modelsummary.Stages.__name__ == "Stages"


def test_a_model_that_changed_is_recorded_again():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    x = torch.rand(2, 8)
    stats = Statistics(model, x)
    stats.split(2)
    model.append(nn.Linear(8, 8))
    first, second = stats.split(2)
    assert torch.equal(second(first(x)), model(x))
    model[1] = nn.Tanh()
    first, second = stats.split(2)
    assert torch.equal(second(first(x)), model(x))
