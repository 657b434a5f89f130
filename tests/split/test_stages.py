"""Stages in the tools that people use on modules; what they print; what they refuse."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from modelsummary import InputError, SplitError, Statistics
from modelsummary.latency import LatencyEstimate
from modelsummary.split.stage import Stage, StageScope
from modelsummary.split.verify import _difference
from tests.idioms import IDIOMS, Bert, BertOutput, Dense, Gpt2, UNet, ids, rows, some
from tests.models import Call
from tests.untouched import untouched

recent = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11),
    reason="torch 2.6 fails at this with modules of any kind",
)


@pytest.fixture
def alone(tmp_path):
    """Yield with a process group of this process only."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def run(stages, *args, **kwargs):
    """Run the stages one after the other, as users do."""
    value = stages[0](*args, **kwargs)
    for stage in stages[1:]:
        value = stage(value)
    return value


def tensors(value):
    value = vars(value) if isinstance(value, BertOutput) else value
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def gpt2():
    torch.manual_seed(0)
    model = Gpt2().eval()
    return model, Statistics(model, ids()).split(3)


@pytest.mark.parametrize("name", some("gpt2", "t5", "bert", "unet", "in place", "dense"))
def test_pickled_saved_and_copied_stages_run(name):
    torch.manual_seed(0)
    kind, inputs = IDIOMS[name]
    model = kind().eval()
    stages = Statistics(model, inputs(2, 0)).split(2)
    args = inputs(3, 1)
    expected = tensors(model(**args))
    buffer = io.BytesIO()
    torch.save(stages[:], buffer)
    buffer.seek(0)
    twins = pickle.loads(pickle.dumps(stages))
    assert all(map(torch.equal, tensors(twins(**args)), expected))
    assert not {id(each) for each in twins[0].parameters()} & {id(each) for each in model.parameters()}
    if not isinstance(stages[0], Stage):
        args = {"input": args.popitem()[1]}
    for parts in (
        pickle.loads(pickle.dumps(stages[:])),
        copy.deepcopy(stages[:]),
        torch.load(buffer, weights_only=False),
    ):
        assert all(map(torch.equal, tensors(run(parts, **args)), expected))


def test_stages_without_their_model_cannot_be_verified():
    _, stages = gpt2()
    with pytest.raises(SplitError, match="pickled without the model"):
        pickle.loads(pickle.dumps(stages)).verify(ids())


def test_paths_are_those_of_the_model():
    model, stages = gpt2()
    assert stages[0].get_submodule("h.0.c_attn") is model.h[0].c_attn
    cut = next(number for number in range(4) if isinstance(_module(stages, f"h.{number}"), StageScope))
    assert _module(stages, f"h.{cut}.mlp") is model.h[cut].mlp
    with pytest.raises(SplitError, match="was cut by the split"):
        _module(stages, f"h.{cut}")(rows(1, 2, 16))


def _module(stages, fqn):
    return stages[stages.stage_of(fqn)].get_submodule(fqn)


def test_sequence_protocol():
    _, stages = gpt2()
    assert len(stages) == 3
    assert stages[-1] is list(stages)[2]
    assert stages[1:] == [stages[1], stages[2]]
    assert "3 stages" in repr(stages)


@recent
def test_compiled_stages():
    torch.manual_seed(0)
    model = Gpt2(depth=2).eval()
    stages, expected = Statistics(model, ids()).split(2), model(ids())
    torch.compiler.reset()
    compiled = [torch.compile(stage, backend="eager", fullgraph=True) for stage in stages]
    with torch.no_grad():
        value = run(compiled, ids())
    torch.testing.assert_close(value, expected)
    torch.compiler.reset()


def test_distributed_data_parallel(alone):
    model, stages = gpt2()
    expected = model(ids())
    wrapped = [nn.parallel.DistributedDataParallel(stage) for stage in stages]
    out = run(wrapped, ids())
    assert torch.equal(out, expected)
    out.sum().backward()
    assert model.h[0].c_attn.weight.grad is not None


@recent
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # torch 2.13 warns of views that a stage returns
def test_fully_shard(alone):
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    model, _ = gpt2()
    expected = model(ids())
    stages = Statistics(copy.deepcopy(model), ids()).split(3)
    mesh = dist.init_device_mesh("cpu", (1,))
    for stage in stages:
        fsdp.fully_shard(stage, mesh=mesh)
    out = run(stages, ids())
    torch.testing.assert_close(out, expected)
    out.sum().backward()


@recent
def test_distributed_checkpoint(alone, tmp_path):
    import torch.distributed.checkpoint as dcp

    model, stages = gpt2()
    for number, stage in enumerate(stages):
        dcp.save(stage.state_dict(), checkpoint_id=tmp_path / str(number))
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    for number, stage in enumerate(stages):
        state = stage.state_dict()
        dcp.load(state, checkpoint_id=tmp_path / str(number))
        stage.load_state_dict(state)
    assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())


def test_replaced_submodules_are_used():
    model = UNet().train()
    stages = Statistics(model, rows(2, 3, 16, 16)).split(3)
    converted = [nn.SyncBatchNorm.convert_sync_batchnorm(stage) for stage in stages]
    assert any(isinstance(module, nn.SyncBatchNorm) for stage in converted for module in stage.modules())
    assert not any(type(module) is nn.BatchNorm2d for stage in converted for module in stage.modules())


def test_functional_call_with_other_weights():
    _, stages = gpt2()
    zeros = {name: torch.zeros_like(each) for name, each in stages[0].named_parameters()}
    out = torch.func.functional_call(stages[0], zeros, (ids(),))
    assert not (out[0] if isinstance(out, tuple) else out).any()


def test_stages_follow_a_move_of_dtype():
    model = Dense().eval()
    stages = Statistics(model, rows(2, 3, 8, 8)).split(3)
    for stage in stages:
        stage.double()
    assert stages(rows(2, 3, 8, 8).double()).dtype is torch.float64


def test_the_table_and_the_records():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2))  # 64, 128, 32 MACs for 2 rows
    stages = Statistics(model, rows(2, 4)).split(2)
    line = "=" * 95
    assert str(stages).splitlines() == [
        line,
        "  Stage  First    Last      Calls    Params    MACs    Share    Crossing (B)    Activations (B)",
        line,
        "      0  0        0             1        40      64    28.6%              64                 64",
        "      1  1        2             2        90     160    71.4%              --                 80",
        line,
        # the mean is (64 + 128 + 32) / 2 = 112, and one layer has more than that
        "Sequential in 2 stages by macs: largest stage 160, 1.429 of the ideal",
        "Limited by 1, 57.1% of the cost: it is a single layer or operator",
        line,
    ]
    assert stages.to_records()[0] == {
        "stage": 0, "first": "0", "last": "0", "calls": 1, "params": 40, "param_bytes": 160, "buffer_bytes": 0,
        "macs": 64, "cost": 64, "share": 64 / 224, "crossing_bytes": 64, "crossing_tensors": 1, "activation_bytes": 64,
        "forward_seconds": None, "backward_seconds": None, "weight_seconds": None,
    }  # fmt: skip
    assert stages.balance == 160 / 112


def test_the_cost_column():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    text = str(Statistics(model, rows(2, 4)).split(2, by={"0": 0.25, "1": 0.5}))
    assert "Cost" in text
    assert "0.25" in text
    assert "largest stage 0.5, 1.333 of the ideal" in text  # 0.5 / ((0.25 + 0.5) / 2)


def test_verify_needs_values():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        x = torch.empty(2, 4)
    with pytest.raises(SplitError, match=r"verify compares values, and 0.weight is on meta"):
        Statistics(model, x).split(2).verify(x)
    x = rows(2, 4)
    stages = Statistics(model.to_empty(device="cpu"), x).split(2)
    with torch.device("meta"), pytest.raises(SplitError, match=r'torch.device\("meta"\) is the default device'):
        stages.verify(x)


def test_verify_finds_what_is_wrong():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4))
    x = rows(3, 4)
    stages = Statistics(model, x).split(2)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = torch.get_rng_state()
    assert stages.verify(x).compared > 4
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    wrong = stages[-1]
    wrong._modules["3"] = copy.deepcopy(model[3])
    with torch.no_grad():
        wrong._modules["3"].bias += 1
    with pytest.raises(SplitError, match="the stages differ from the model: outputs '0' differ"):
        stages.verify(x)
    wrong._modules["3"].bias = model[3].bias
    wrong._modules["3"].weight = model[3].weight
    assert stages.verify(x).gradients == 0.0
    wrong._modules["3"].weight = nn.Parameter(model[3].weight.detach())
    with pytest.raises(SplitError, match=r"gradients .*exist on one side only"):
        stages.verify(x)


def test_a_stage_says_what_it_takes():
    model = Bert().eval()
    stages = Statistics(model, {"input_ids": ids()}).split(2)
    with pytest.raises(SplitError, match=r"the stage takes \d tensor\(s\), got 5"):
        stages[1](*[rows(1)] * 5)


def test_bad_calls():
    stages = Statistics(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(2, 4)).split(2)
    with pytest.raises(InputError, match=r"backward must be .* got -1"):
        stages.predict(8, backward=-1)
    with pytest.raises(SplitError, match="argument 'input' is given by position and by name"):
        stages(torch.ones(2, 4), input=torch.ones(2, 4))
    with pytest.raises(InputError, match="state_dict must be a dict, got NoneType"):
        stages.load_state_dict(None)
    with pytest.raises(SplitError, match="no process group"):
        stages.pipeline_stage(0, "cpu")


def test_a_stage_with_a_plan_is_sliced_into_its_children():
    make, inputs = IDIOMS["unet"]
    stage = Statistics(make(), inputs(2, 0)).split(2)[0]
    assert stage[0] is next(stage.children())
    assert stage[:2] == list(stage.children())[:2]


def test_predict():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    stages = Statistics(model, rows(2, 4)).split(4, by=lambda row: 1.0)
    assert stages.predict(8, "gpipe").bubble == pytest.approx(3 / 11)
    assert stages.predict(8, "1f1b", backward=1.0).makespan == pytest.approx(22)
    assert stages.predict(8).peak_activation_bytes == [4 * 32, 3 * 32, 2 * 32, 32]


def test_predict_from_times():
    stages = Statistics(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), rows(2, 4)).split(2)
    # GPipe, one micro-batch: forwards and backwards one after the other
    assert stages.predict(1, "gpipe", seconds=[(1, 4), (2, 3)]).makespan == pytest.approx(1 + 2 + 3 + 4)
    # zero bubble: the first stage waits for the second one's gradient of the inputs alone, 1 + 2 + 0.5, then has 4
    assert stages.predict(1, "zb", seconds=[(1, 3, 1), (2, 0.5, 2.5)]).makespan == pytest.approx(1 + 2 + 0.5 + 4)
    for wrong in ([(1, 2)], [(1,), (1,)], [(1, -1), (1, 1)], 3, [(1, "2"), (1, 1)]):
        with pytest.raises(InputError, match=r"seconds must hold .* for each of the 2 stages"):
            stages.predict(1, seconds=wrong)


def test_predict_from_measured_times():
    stats = Statistics(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), rows(2, 4))
    for row, forward, backward in zip((stats["0"], stats["1"]), (1e3, 2e3), (4e3, 3e3), strict=True):
        row.latency_ms, row.backward_latency_ms = forward, backward
    stages = stats.split(2)
    assert [(each.forward_seconds, each.backward_seconds) for each in stages.facts] == [(1, 4), (2, 3)]
    assert stages.predict(1, "gpipe").makespan == pytest.approx(10)


class Scores(nn.Module):
    """A layer, and a product of its results, which has no weights."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        y = self.layer(x)
        return x + (y @ y.transpose(-1, -2)) @ x


def measured(model, shape, backward):
    """Return statistics in which each child of a model takes 1 s forward, and so long backward."""
    stats = Statistics(model, rows(*shape))
    for index, seconds in enumerate(backward):
        stats[str(index)].latency_ms, stats[str(index)].backward_latency_ms = 1e3, 1e3 * seconds
    return stats


def test_measured_backwards_are_divided_as_their_kernels_are():
    layers = [nn.Linear(8, 8, bias=False) for _ in range(3)]
    layers[1].requires_grad_(False)
    model = nn.Sequential(*layers)
    with untouched(model):
        stages = measured(model, (2, 8), (4, 3, 5)).split(3)
    # no gradient of the input, none of a frozen weight, and two equal products
    assert [stage.weight_seconds for stage in stages.facts] == [4, 0, 2.5]
    # forwards until 3, gradients of inputs until 3 + 2.5 + 3, then the first stage's weight
    assert stages.predict(1, "zb").makespan == pytest.approx(3 + 2.5 + 3 + 4)
    assert stages.predict(1, "gpipe").makespan == pytest.approx(3 + 5 + 3 + 4)
    loaded = pickle.loads(pickle.dumps(stages))
    assert loaded.predict(1, "zb").makespan == stages.predict(1, "zb").makespan


def test_products_without_weights_give_gradients_of_inputs():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), Scores())
    with untouched(model):
        stages = measured(model, (2, 5, 8), (1, 11)).split(2, boundaries=["1"])
    layer, scores, context = 2 * 5 * 8 * 8, 2 * 5 * 5 * 8, 2 * 5 * 8 * 5  # MACs of each product's forward
    backward = 2 * (layer + scores + context)
    assert stages.facts[1].weight_seconds == pytest.approx(11 * layer / backward)


def test_a_backward_without_a_step_is_halved():
    stages = measured(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).requires_grad_(False), (2, 8), (4, 2)).split(2)
    assert [stage.weight_seconds for stage in stages.facts] == [None, None]
    assert stages.predict(1, "zb").makespan == pytest.approx(2 + 1 + 4)


def test_an_estimate_is_balanced_whatever_was_estimated_later():
    stats = Statistics(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), rows(2, 4))
    calls = {("", 0): (4.0, 8.0), ("0", 0): (1.0, 2.0), ("1", 0): (1.0, 2.0), ("2", 0): (2.0, 4.0)}
    estimate = LatencyEstimate({"forward": 4.0}, "A100 80GB", "eager", "fit: A100", 0.09, calls=calls)
    stats.estimate_latency("H100")
    for each in (estimate, pickle.loads(pickle.dumps(estimate))):
        stages = stats.split(2, by=each)
        assert [part.cost for part in stages.facts] == pytest.approx([0.002, 0.002])
        assert [part.backward_seconds for part in stages.facts] == pytest.approx([0.004, 0.004])
    estimate_of_all = stats.estimate_latency("A100", backward=True)
    costs = [part.cost for part in stats.split(3, by=estimate_of_all).facts]
    assert sum(costs) == pytest.approx(estimate_of_all.forward_ms / 1e3)
    with pytest.raises(InputError, match="expected an estimate of this model"):
        Statistics(nn.Linear(4, 4), rows(2, 4)).split(1, by=estimate)


def test_verify_leaves_attributes_as_they_were():
    def caching(self, x):
        key = x.shape[1]
        if key not in self.cache:  # with a graph: a second backward through it would fail
            self.cache[key] = self.scale * 2
        return x * self.cache[key]

    layer = Call(caching)
    layer.cache, layer.scale = {}, nn.Parameter(torch.ones(4))
    model = nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 4))
    stages = Statistics(model, rows(2, 4)).split(3)
    with untouched(model):
        assert stages.verify(rows(3, 4)).gradients == 0.0
    assert layer.cache == {}


def test_verify_takes_rounding_of_large_gradients_for_rounding():
    one = torch.tensor([1000.0, 1.0])
    assert _difference("gradients", {"weight": one}, {"weight": one + torch.tensor([0.0, 5e-3])}) == pytest.approx(5e-3)
    with pytest.raises(SplitError, match="gradients 'weight' differ"):
        _difference("gradients", {"weight": one}, {"weight": one + torch.tensor([0.0, 5e-2])})
    with pytest.raises(SplitError, match="differ"):
        _difference("outputs", {"0": torch.tensor([1000])}, {"0": torch.tensor([1001])})
