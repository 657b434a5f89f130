"""Predicted memory against hand-derived bytes, independent figures, and what torch's profiler sees of a real step."""

from __future__ import annotations

import gc
import json
import pickle
import sys
import weakref
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import modelsummary
from modelsummary import DeviceSpec, InputError, MissingExtraError, Statistics, StepError
from modelsummary.devices.target import target_of
from modelsummary.memory.fit import largest
from modelsummary.operators.tensor_bytes import inner_tensors
from modelsummary.units import scaled
from tests.capture.test_wrapped import int8
from tests.models import Call
from tests.real_memory import persistent, real_memory, sgd
from tests.untouched import untouched

MIB = 2**20


def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def test_by_hand():
    # batch 2. params 8*16 + 16 + 16*4 + 4 = 212 floats. Kept for the backward: the first linear's input is the model's,
    # its weights are parameters; ReLU keeps its result (2*16), which the second linear keeps, too.
    model = mlp()
    with untouched(model):
        memory = Statistics(model, (2, 8)).memory(optimizer="sgd-momentum")
    assert (memory.params, memory.buffers, memory.grads, memory.optimizer_state) == (848, 0, 848, 848)
    assert (memory.inputs, memory.activations) == (64, 128)
    # then the result (2*4) and the loss live; the first linear's result (2*16) does no longer
    assert memory.held_after_forward == 848 + 848 + 64 + 128 + 32 + 4
    assert memory.peak == max(point.total for point in memory.timeline)
    assert [point.phase for point in memory.timeline] == sorted(
        (point.phase for point in memory.timeline), key=["forward", "backward", "step"].index
    )
    assert memory.peak_at.total == memory.peak
    assert memory.execution == "shape"


def test_inference():
    # the input (2*8), and at most the results of two layers one after the other: 2*16 and 2*16
    memory = Statistics(mlp(), (2, 8)).memory("inference")
    assert (memory.grads, memory.optimizer_state, memory.activations) == (0, 0, 0)
    assert memory.held_after_forward == 848 + 64 + 32
    assert memory.peak == 848 + 64 + 128 + 128
    assert memory.peak_at.fqn == "1"


def test_an_inference_that_computes_gradients():
    """Forces are gradients of an energy: without gradients, no such forward runs."""

    class Forces(nn.Module):
        def __init__(self):
            super().__init__()
            self.energy = mlp()

        def forward(self, positions):
            positions = positions.requires_grad_()
            energy = self.energy(positions).sum()
            return energy, torch.autograd.grad(energy, positions)[0]

    model, x = Forces(), torch.randn(2, 8)
    with untouched(model):
        stats = Statistics(model, x)
        held_exactly(model, x, mode="inference")
        assert stats.max_batch_size(100_000, "inference") > 2
        assert stats.estimate_latency("A100") > 0
        assert stats.measure_latency(x, warmup=0, runs=1).root.latency_ms > 0
    assert not x.requires_grad


def test_a_forward_that_runs_no_operator():
    stats = Statistics(nn.Identity(), (2, 8))
    memory = stats.memory("inference")
    assert (memory.peak, memory.held_after_forward, memory.timeline) == (64, 64, [])
    assert memory.peak_at is memory.to_dict()["peak_at"] is None
    assert "Peak at" not in str(memory)
    assert stats.max_batch_size(1000, "inference") == 1000 // 32
    assert stats.measure_memory("inference").peak == 64


@pytest.mark.parametrize(
    ("optimizer", "floats"),
    [
        (None, 0),
        ("sgd", 0),
        ("sgd-momentum", 212),
        ("adam", 2 * 212 + 4),  # and a step count for each of four parameters
        ("adamw", 2 * 212 + 4),
        (torch.optim.Adagrad, 212 + 4),
        (torch.optim.Adam(mlp().parameters(), amsgrad=True), 3 * 212 + 4),
        # a row and a column for each matrix, 16+8 and 4+16, and a whole vector for each bias, 16 and 4; step counts
        ("adafactor", 24 + 20 + 20 + 4),
    ],
)
def test_optimizers(optimizer, floats):
    memory = Statistics(mlp(), (2, 8)).memory(optimizer=optimizer)
    assert memory.optimizer_state == 4 * floats
    assert memory.grads == 848


def test_groups_of_an_optimizer():
    """By hand: momentum of the second layer (16*4 + 4) alone; three states of it, and two of the first (8*16 + 16)."""
    model = mlp()
    first, second = ({"params": layer.parameters()} for layer in (model[0], model[2]))
    momentum = torch.optim.SGD([first, {**second, "momentum": 0.9}], lr=0.1)
    assert Statistics(model, (2, 8)).memory(optimizer=momentum).optimizer_state == 4 * 68
    first, second = ({"params": layer.parameters()} for layer in (model[0], model[2]))
    largest = torch.optim.Adam([first, {**second, "amsgrad": True}])
    measured = Statistics(model, torch.randn(2, 8)).measure_memory(optimizer=largest)
    assert measured.predicted.optimizer_state == 4 * (2 * 144 + 3 * 68 + 4)
    assert measured.predicted.held_after_forward == measured.held_after_forward
    assert largest.state == {}


def test_an_optimizer_whose_groups_have_settings_of_its_own():
    class Signed(torch.optim.Optimizer):
        def __init__(self, groups):
            super().__init__(groups, {"lr": 0.1})

        def step(self):
            for group in self.param_groups:
                for parameter in group["params"]:
                    if group["keeps_momentum"]:
                        self.state[parameter]["momentum"] = torch.zeros_like(parameter)

    model = mlp()
    kinds = [[each for each in model.parameters() if each.dim() == dim] for dim in (1, 2)]
    groups = [{"params": members, "keeps_momentum": members[0].dim() == 2} for members in kinds]
    assert Statistics(model, (2, 8)).memory(optimizer=Signed(groups)).optimizer_state == 4 * (8 * 16 + 16 * 4)


def test_a_function_that_returns_an_optimizer():
    class Scheduled(torch.optim.SGD):
        def __init__(self, params, n_steps):
            super().__init__(params, lr=1 / n_steps, momentum=0.9)

    stats = Statistics(mlp(), (2, 8))
    assert stats.memory(optimizer=lambda parameters: Scheduled(parameters, 100)).optimizer_state == 4 * 212
    with pytest.raises(InputError, match=r"^optimizer must return a torch.optim.Optimizer of its parameters, got \("):
        stats.memory(optimizer=lambda parameters: ())
    with pytest.raises(StepError, match=r"argument: 'n_steps'; pass another .*, or a function from parameters"):
        stats.memory(optimizer=Scheduled(stats.live.model.parameters(), 100))


def test_frozen_and_tied_parameters():
    model = mlp()
    model[0].requires_grad_(False)
    memory = Statistics(model, (2, 8)).memory(optimizer="sgd-momentum")
    assert (memory.params, memory.grads, memory.optimizer_state) == (848, 4 * 68, 4 * 68)
    tied = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    tied[1].weight = tied[0].weight
    memory = Statistics(tied, (2, 8)).memory(optimizer="sgd-momentum")
    assert (memory.params, memory.grads, memory.optimizer_state) == (256, 256, 256)


def test_a_saved_slice_keeps_its_whole_storage():
    model = Call(lambda self, x: self.a(x)[:, :2].exp(), a=nn.Linear(8, 100))
    memory = Statistics(model, (2, 8)).memory()
    assert memory.activations == 2 * 2 * 4  # exp keeps its result; the slice is no longer needed
    model = Call(lambda self, x: self.a(x)[:, :2].sin(), a=nn.Linear(8, 100))
    assert Statistics(model, (2, 8)).memory().activations == 2 * 100 * 4  # sin keeps its argument, a view


def test_dtypes_in_which_no_step_runs():
    stats, eight = Statistics(mlp(), (2, 8)), torch.float8_e4m3fn
    says = r"^dtype=torch\.float8_e4m3fn: no step trains in 8 bits alone.*recipe=Recipe"
    with pytest.raises(InputError, match=says):
        stats.memory(dtype=eight)
    with pytest.raises(InputError, match=r"^dtype=torch\.float8_e4m3fn: no forward computes in 8 bits alone"):
        stats.estimate_latency("H100", dtype=eight, backward=True)
    for dtype in (eight, torch.float32):
        with pytest.raises(InputError, match=f"^autocast must be torch.float16 .*torch.autocast ignores {dtype}$"):
            stats.memory(autocast=dtype)
    with pytest.raises(InputError, match=r"^precision=torch\.float8_e4m3fn; expected .* 16 bits or more.*torchao"):
        stats.parallel_plan(shard=2, precision=eight)
    assert stats.memory("inference", dtype=eight).params == sum(each.numel() for each in stats.live.model.parameters())


def test_foreach_optimizers_hold_the_square_roots_of_all_states():
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    nbytes, stats = 8 * 4 * 64 * 64, Statistics(model, (1, 64))
    for device, optimizer in (
        ("cpu", torch.optim.AdamW(model.parameters(), foreach=True)),
        ("cuda", torch.optim.AdamW(model.parameters(), foreach=True)),
        ("cuda", "adamw"),  # foreach is torch's choice there
    ):
        memory = stats.memory(optimizer=optimizer, device=device, workspaces=False, block_bytes=1)
        assert (memory.execution, memory.peak_at.phase) == ("shape", "step")
        # weights, gradients, two states and the roots, which torch._foreach_sqrt makes at once; input and result; steps
        assert memory.peak == pytest.approx(5 * nbytes + 2 * 4 * 64 + 8 * 4, abs=64)


@pytest.mark.parametrize("settings", [{"foreach": False}, {"fused": True}])
def test_optimizers_that_update_one_tensor_at_a_time_or_in_one_kernel(settings):
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    memory = Statistics(model, (1, 64)).memory(optimizer=optimizer, device="cuda", workspaces=False, block_bytes=1)
    roots = memory.peak - 4 * 8 * 4 * 64 * 64  # beyond weights, gradients and two states
    assert roots < 4 * 4 * 64 * 64  # at most three temporaries of one weight, and the activations


def test_what_the_states_of_an_optimizer_share_counts_once():
    class Tabled(torch.optim.Optimizer):
        """Keeps an integer of 8 bits per element, and one table of their values, as bitsandbytes does."""

        def __init__(self, parameters):
            super().__init__(parameters, {})
            self.tables = {"signed": torch.zeros(256)}

        def step(self):
            for parameter in self.param_groups[0]["params"]:
                state = self.state[parameter]
                if not state:
                    state["table"], state["eight"] = (
                        self.tables["signed"],
                        torch.zeros_like(parameter, dtype=torch.int8),
                    )

    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(3)))
    assert Statistics(model, (1, 16)).memory(optimizer=Tabled).optimizer_state == 3 * 16 * 16 + 4 * 256


def test_a_loss_that_is_not_a_function_and_a_misspelt_optimizer():
    stats = Statistics(mlp(), (2, 8))
    with pytest.raises(InputError, match=r"^loss must be a function from the model's result to a scalar, got 'mse'$"):
        stats.memory(loss="mse")
    with pytest.raises(InputError, match=r"as class, instance or list, got 'adamm'; did you mean 'adam' or 'adamw'\?$"):
        stats.memory(optimizer="adamm")


def test_dtype_and_accumulation():
    stats = Statistics(mlp(), (2, 8))
    half = stats.memory(dtype=torch.bfloat16, optimizer="sgd-momentum")
    assert (half.params, half.grads, half.optimizer_state, half.inputs, half.activations) == (424, 424, 424, 32, 64)
    once, again = stats.memory(), stats.memory(accumulates=True)
    assert again.held_after_forward == once.held_after_forward + 848
    assert again.grads == once.grads == 848


def used_and_unused():
    """A layer of 6 floats that runs, and one of 12 that does not."""
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(3, 3)])
    model.forward = model[0].forward
    return model


@pytest.mark.parametrize("accumulates", [False, True])
def test_parameters_without_a_gradient_have_no_optimizer_state(accumulates):
    # The first layer has 2*2 + 2 = 6 floats. AdamW keeps 2 x 6 of them and 2 step counts; the second layer is not used.
    stats = Statistics(used_and_unused(), (1, 2))
    memory = stats.memory(optimizer="adamw", accumulates=accumulates)
    assert (memory.params, memory.grads, memory.optimizer_state) == (4 * (6 + 12), 4 * 6, 4 * (2 * 6 + 2))
    measured = stats.measure_memory(optimizer="adamw", accumulates=accumulates)
    assert measured.held_after_forward == measured.predicted.held_after_forward == memory.held_after_forward


class Shares(torch.optim.SGD):
    """Keeps for each parameter with a gradient the parameter itself, a table that all share, and a copy."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                state = self.state[parameter]
                self.table = getattr(self, "table", torch.zeros(256))
                state.update(own=parameter.data, table=self.table, copy=torch.zeros_like(parameter))


def test_states_that_an_unused_parameter_shares_are_counted():
    memory = Statistics(used_and_unused(), (1, 2)).memory(optimizer=Shares)
    assert (memory.params, memory.optimizer_state) == (4 * (6 + 12), 4 * (256 + 6))


class Global(torch.optim.SGD):
    """Keeps a state that belongs to no parameter."""

    def step(self, closure=None):
        self.state["all"].setdefault("norms", torch.zeros(100))
        return super().step(closure)


@pytest.mark.parametrize("device", [None, "cuda"])
def test_states_that_belong_to_no_parameter_are_counted(device):
    without, memory = (Statistics(mlp(), (2, 8)).memory(optimizer=kind, device=device) for kind in ("sgd", Global))
    assert memory.optimizer_state == (512 if device else 400)
    assert memory.activations == without.activations


def test_states_that_the_optimizer_makes_at_once_are_counted():
    # Adagrad makes a sum and a step count for each of the four parameters before any of them has a gradient.
    stats = Statistics(used_and_unused(), (1, 2))
    memory = stats.memory(optimizer=torch.optim.Adagrad)
    assert (memory.grads, memory.optimizer_state) == (4 * 6, 4 * (6 + 12 + 4))
    assert stats.measure_memory(optimizer=torch.optim.Adagrad).held_after_forward == memory.held_after_forward


def values_needed(self, x):
    return self.model(x) if x.sum().item() < 1e9 else x


def test_a_gradient_that_a_hook_replaces_while_something_holds_the_old_one():
    model, old = mlp(), []

    def replace_gradient(parameter):
        old.append(parameter.grad)
        parameter.grad = parameter.grad.clone()

    for each in model.parameters():
        each.register_post_accumulate_grad_hook(replace_gradient)
    plain = Statistics(mlp(), (2, 8)).memory(optimizer="adamw")
    memory = Statistics(Call(values_needed, model=model), (2, 8)).memory(optimizer="adamw", accumulates=True)
    assert memory.execution == "real"
    assert memory.optimizer_state == plain.optimizer_state


def test_blocks():
    memory = Statistics(mlp(), (2, 8)).memory(optimizer="sgd-momentum", block_bytes=512)
    assert memory.params == 512 * 4  # 512, 64, 256 and 16 bytes
    assert Statistics(mlp(), (2, 8)).memory(device="cuda").params == 512 * 4


def test_loss():
    stats = Statistics(mlp(), (2, 8))
    memory = stats.memory(loss=lambda output: nn.functional.cross_entropy(output, torch.zeros(2, dtype=torch.long)))
    assert memory.activations > stats.memory().activations  # log-probabilities
    model = Call(lambda self, x: {"loss": self.a(x).exp().sum(), "rest": x}, a=nn.Linear(8, 4))
    assert Statistics(model, (2, 8)).memory().activations == 2 * 4 * 4
    with pytest.raises(InputError, match="must return a scalar tensor that requires a gradient"):
        stats.memory(loss=lambda output: output)


def test_rows():
    stats = Statistics(mlp(), (2, 8))
    assert stats["1"].activation_bytes is None
    memory = stats.memory(optimizer="adam")
    assert [row.self_activation_bytes for row in (stats.root, *stats)] == [0, 0, 128, 0]
    assert stats.root.activation_bytes == memory.activations
    assert stats["1"].peak_bytes == persistent(memory) + 2 * 128
    assert "Activations (B)" in stats.table(columns=["activation_bytes", "peak_bytes"])


def test_checkpointing():
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU()) for _ in range(4))
    )
    stats = Statistics(model, (128, 64))
    with untouched(model):
        every = stats.memory(checkpoint=["0", "1", "2", "3"])
        plain = stats.memory()
    one = 128 * 64 * 4
    # each block keeps four tensors (what goes into GELU, linear, GELU, and the next block); checkpointed: its input
    assert plain.activations == (4 * 4 - 1) * one
    state = torch.get_rng_state().nbytes  # of the generator: each block keeps one
    assert every.activations == 3 * one + 4 * state
    assert stats.memory(device="cuda", checkpoint=["0", "1", "2", "3"]).activations == 3 * one  # they stay on the host
    assert every.peak < plain.peak
    assert every.recomputed_macs == stats.total_mult_adds == 8 * 128 * 64 * 64
    assert f"Recomputed in the backward: {every.recomputed_macs:,} MACs" in str(every)
    # two segments of two blocks: only the input of the second is kept
    with untouched(model):
        assert stats.memory(checkpoint="sqrt") == stats.memory(checkpoint=["[0:2]", "[2:4]"])
    assert stats.memory(checkpoint="sqrt").activations == one + 2 * state
    assert stats.memory(checkpoint=["[0:2]"]).recomputed_macs == 4 * 128 * 64 * 64
    with pytest.raises(InputError, match="checkpoint names 'nonsense'"):
        stats.memory(checkpoint=["nonsense"])


def test_checkpointed_dropout():
    """To look at what autograd saved would recompute a block in the forward."""
    blocks = (Call(lambda self, x: nn.functional.dropout(self.a(x), 0.1) * 2.0, a=nn.Linear(64, 64)) for _ in range(3))
    model = nn.Sequential(*blocks)
    x = torch.randn(128, 64)
    every = Statistics(model, x).memory(checkpoint=["0", "1", "2"])
    modelsummary.apply_checkpoint(model, ["0", "1", "2"])
    measured = Statistics(model, x).measure_memory()
    assert every.held_after_forward == measured.held_after_forward
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11):  # older checkpoints free what they recompute later
        assert every.peak == pytest.approx(measured.peak, rel=0.025)


# ------------------------------------------------------------------------------- against other figures


@pytest.mark.parametrize(
    ("name", "batch", "training", "expected"),
    [
        # bytes packed by saved_tensors_hooks, the input's included: see docs
        ("mobilenet_v2", 100, True, 7_821_090_048),
        ("mobilenet_v2", 100, False, round(7458.154 * MIB)),
        ("resnet18", 100, True, 2_218_022_400),
        ("vit_b_16", 8, True, 945_285_440),
    ],
)
def test_reference_figures(name, batch, training, expected):
    models = pytest.importorskip("torchvision.models", exc_type=(ImportError, RuntimeError))
    with torch.device("meta"):
        model = models.get_model(name, weights=None).train(training)
    memory = Statistics(model, (batch, 3, 224, 224)).memory()
    # the first layer keeps the input
    assert memory.activations + memory.inputs == pytest.approx(expected, abs=1000 if not training else 0)


def check(model, x, peak_within=0.025):
    stats = Statistics(model, x)
    memory = stats.memory(optimizer="sgd-momentum", loss=lambda output: output.sum())
    held, peak = real_memory(model, x, lambda output: output.sum(), sgd)
    assert memory.held_after_forward - persistent(memory) == held["forward"]
    if peak_within is not None:
        assert memory.peak == pytest.approx(persistent(memory) + peak, rel=peak_within)


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "vit_b_16", "swin_t", "densenet121"])
@pytest.mark.slow
def test_real_steps_of_torchvision(name):
    models = pytest.importorskip("torchvision.models", exc_type=(ImportError, RuntimeError))
    batch = 8 if name in ("resnet18", "mobilenet_v2") else 2
    check(models.get_model(name, weights=None), torch.randn(batch, 3, 224, 224))


@pytest.mark.parametrize(
    "settings",
    [
        {"num_layers": 2, "batch_first": True, "dropout": 0.1},
        {"num_layers": 2, "bidirectional": True},
        {"bias": False},
        {"proj_size": 8},  # not with the fused kernel
    ],
)
@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_lstm(settings):
    layer = nn.LSTM(32, 48, **settings)
    model = Call(lambda self, x: self.lstm(self.first(x))[0], first=nn.Linear(16, 32), lstm=layer)
    measured = Statistics(model, torch.randn(6, 20, 16)).measure_memory(optimizer="sgd")
    assert measured.predicted.execution == "shape"
    assert measured.predicted.held_after_forward == measured.held_after_forward
    inference = Statistics(model, torch.randn(6, 20, 16)).measure_memory("inference")
    assert inference.predicted.held_after_forward == inference.held_after_forward


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA's own operators run")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recurrent_layers_of_an_absent_device(dtype):
    """cuDNN keeps the four gates and the cell of each step of each layer, and what the first layer passes on.

    The backward also reads the result and the two first states, of zeros. An LSTM of 2 layers, 64 steps of 32
    sequences, 1024 wide, keeps 92,274,944 bytes on an H100 (``tests/operators/test_recurrent_layers.py``), 256 more
    than this.
    """
    batch, steps, width, layers = 8, 100, 128, 2
    result, states = batch * steps * width, layers * batch * width
    kept = result * (layers * 5 + layers - 1)
    model = nn.LSTM(64, width, layers, batch_first=True)
    memory = Statistics(model, (batch, steps, 64)).memory(device="cuda", dtype=dtype, block_bytes=1)
    assert memory.activations == dtype.itemsize * (kept + result + 2 * states)
    autocast = Statistics(model, (batch, steps, 64)).memory(device="cuda", autocast=torch.bfloat16, block_bytes=1)
    assert autocast.activations >= 2 * (kept + result)
    assert "aten._cudnn_rnn.default" in [point.operator for point in memory.timeline]


def test_memory_plans_of_recurrent_blocks_count_their_kernels():
    blocks = (Call(lambda self, x: self.lstm(x)[0], lstm=nn.LSTM(128, 128, batch_first=True)) for _ in range(4))
    stats = Statistics(nn.Sequential(*blocks), (8, 100, 128))
    peak = stats.memory(device="cuda").peak
    plan = stats.memory_plan(int(0.8 * peak), device="A100")
    assert plan.peak == stats.memory(device="cuda", checkpoint=plan.checkpoint, offload=plan.offload).peak < 0.8 * peak
    one = 100 * 8 * 4 * 128 * (128 + 128)  # multiply-adds of a layer
    assert plan.recomputed_macs == len(plan.fqns) * one


def test_long_lstm(monkeypatch):
    """The kernel is asked about shorter sequences, and the rest continued."""
    stats = Statistics(nn.LSTM(32, 48), torch.randn(500, 4, 32))
    asked = stats.memory().activations
    monkeypatch.setattr("modelsummary.capture.execution.recurrent._MOST_ELEMENTS", 4 * (32 + 4 * 48) * 200)
    assert stats.memory().activations == pytest.approx(asked, rel=0.01)


@pytest.mark.parametrize(
    "options",
    [
        {"autocast": torch.bfloat16},
        {"accumulates": True},
        {"checkpoint": "every"},
        {"checkpoint": "sqrt"},
        {"checkpoint": "sqrt", "autocast": torch.bfloat16},
    ],
)
def test_options_against_real_steps(options):
    layers = (nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True) for _ in range(9))
    model = nn.Sequential(*layers)
    x = torch.randn(4, 32, 64)
    stats = Statistics(model, x)
    with untouched(model):
        measured = stats.measure_memory(optimizer="sgd-momentum", **options)
    assert measured.predicted.held_after_forward == measured.held_after_forward
    assert measured.predicted.peak == pytest.approx(measured.peak, rel=0.025)


def test_real_steps():
    check(nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 6), torch.randn(4, 32, 64))
    check(Call(lambda self, x: self.a(x) * 0.5 + self.a(x) / 3, a=nn.Linear(64, 64)), torch.randn(32, 64))
    # the backward of the norm copies a gradient inside of the operator, which is much of so small a model
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten())
    check(model, torch.randn(2, 3, 32, 32), peak_within=None)


def test_a_measured_step_that_trains_other_layers_than_the_first():
    calls = []
    model = Call(lambda self, x: (self.a, self.b)[len(calls) % 2](x), a=nn.Linear(2, 2), b=nn.Linear(2, 2))
    stats = Statistics(model, (1, 2))
    model.register_forward_hook(lambda *_: calls.append(1))
    with untouched(model):
        stats.measure_memory(optimizer="sgd")


def test_gradients_add_up_in_place():
    """Autograd adds the second gradient of a tensor into the first; a dispatch mode keeps it from doing so."""
    # When the gradients of the two branches are added (x: 64 x 64 floats, 16,384 bytes), both live; the sum takes the
    # place of the first.
    model = Call(lambda self, x: (y := self.a(x), y.sin() + y.cos())[1], a=nn.Linear(64, 64, bias=False))
    measured = Statistics(model, torch.randn(64, 64)).measure_memory()
    assert (measured.predicted.held_after_forward, measured.predicted.peak) == (
        measured.held_after_forward,
        measured.peak,
    )


def test_the_backward_of_an_index_writes_in_place():
    model = Call(lambda self, x: self.a(x)[torch.tensor([0, 2])], a=nn.Linear(8, 64, bias=False))
    measured = Statistics(model, torch.randn(64, 8)).measure_memory()
    assert (measured.predicted.held_after_forward, measured.predicted.peak) == (
        measured.held_after_forward,
        measured.peak,
    )


def test_a_closure_of_a_checkpoint_keeps_tensors():
    # the block gets a second tensor (8 x 64 floats) in a closure, which no node of autograd saves
    def forward(self, x):
        angle = x.cos()
        return torch.utils.checkpoint.checkpoint(
            lambda y: self.a(y) * angle, x, use_reentrant=False, preserve_rng_state=False
        )

    measured = Statistics(Call(forward, a=nn.Linear(64, 64)), torch.randn(8, 64)).measure_memory()
    assert measured.predicted.activations == 8 * 64 * 4
    assert measured.predicted.held_after_forward == measured.held_after_forward


def held_exactly(model, x, **options):
    """Return the predicted memory of a step, which holds after the forward what a real step does."""
    measured = Statistics(model, x).measure_memory(**options)
    assert measured.predicted.held_after_forward == measured.held_after_forward
    return measured.predicted


def test_a_result_that_nothing_uses_is_gone():
    """Its autograd node keeps its own result (here 8 x 64 floats); both die with the variable."""
    model = Call(lambda self, x: (y := self.a(x), y.exp(), self.b(y))[2], a=nn.Linear(64, 64), b=nn.Linear(64, 64))
    assert held_exactly(model, torch.randn(8, 64)).activations == 8 * 64 * 4


def test_tensors_in_plain_attributes_are_buffers():
    model = Call(lambda self, x: self.a(x) * self.scale, a=nn.Linear(8, 64))
    model.scale = torch.ones(64)
    assert held_exactly(model, torch.randn(2, 8)).buffers == 64 * 4


def test_sparse_gradients():
    """By hand: a row of 8 floats and an index of 8 bytes for each of 24 tokens; two states of 100 x 8 floats."""
    model, x = nn.Embedding(100, 8, sparse=True), torch.randint(100, (4, 6))
    with untouched(model):
        memory = held_exactly(model, x, optimizer=torch.optim.SparseAdam)
    assert (memory.grads, memory.optimizer_state) == (24 * (8 * 4 + 8), 2 * 100 * 8 * 4)
    with pytest.raises(StepError, match="Adam does not support sparse gradients"):
        Statistics(model, x).memory(optimizer="adamw")
    with pytest.raises(InputError, match=r"^the number of elements that a sparse tensor stores needs the values"):
        Statistics(model.to("meta"), x.to("meta")).memory()


def test_a_sparse_buffer():
    class Averages(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("neighbours", torch.eye(4).to_sparse())

        def forward(self, x):
            return torch.sparse.mm(self.neighbours, self.linear(x))

    memory = Statistics(Averages(), (4, 8)).memory("train")
    # 4 entries, each two indices of 8 bytes and a value of 4; 72 parameters; input and result of 4*8, and the loss
    assert memory.buffers == 4 * (2 * 8 + 4)
    assert memory.held_after_forward == 4 * 72 + 80 + 128 + 128 + 4


def test_wrapped_weights():
    """The inner tensors of a weight are parameters; only the weight that they make is an activation."""
    model = nn.Sequential(nn.Linear(16, 8, bias=False), nn.Linear(8, 4, bias=False))
    model[1].weight = int8(model[1].weight)
    memory = held_exactly(model, torch.randn(2, 16))
    assert (memory.params, memory.activations) == (16 * 8 * 4 + 8 * 4 + 4 * 4, 8 * 4 * 4)


def test_a_step_that_runs_for_real_keeps_its_parameters():
    """The optimizer's first step, which makes its state, leaves the forward a model that decides as it did."""
    forward = lambda self, x: self.b(self.a(x)) if self.a.weight.isfinite().all() and x.sum() > 0 else self.a(x)  # noqa: E731
    memory = held_exactly(Call(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 8)), torch.ones(2, 8), optimizer="adam")
    assert memory.execution == "real"
    assert memory.grads == 2 * 4 * (64 + 8)


@pytest.mark.parametrize("norm", [partial(nn.BatchNorm1d, 6), partial(nn.LayerNorm, 8), partial(nn.GroupNorm, 2, 6)])
@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_statistics_of_norms(norm, mode, dtype):
    """Their dtype is that of the weights, and a batch norm in evaluation keeps none."""
    model = nn.Sequential(nn.Conv1d(6, 6, 1), norm()).train(mode)
    measured = Statistics(model, torch.randn(4, 6, 8)).measure_memory(autocast=dtype if dtype.itemsize < 4 else None)
    assert measured.predicted.held_after_forward == measured.held_after_forward
    half = Statistics(model.to(torch.bfloat16), torch.randn(4, 6, 8, dtype=torch.bfloat16)).measure_memory()
    assert half.predicted.held_after_forward == half.held_after_forward


def test_the_model_does_not_notice():
    """A forward that asks whether it is real gets the answers of a real run."""

    def forward(self, x):
        weight, out = self.a.weight, self.a(x)
        assert not isinstance(x, torch._subclasses.FakeTensor)
        assert not torch.compiler.is_compiling()
        assert not torch.jit.is_tracing()
        for tensor in (x, weight, out, torch.zeros(2)):
            assert isinstance(tensor, torch.Tensor)
            assert tensor.device == torch.device("cpu")
            assert tensor.is_cpu
            assert not tensor.is_meta
            assert not tensor.is_cuda
        assert isinstance(weight, nn.Parameter)
        assert x.to(x.device) is x
        return out

    model, x = Call(forward, a=nn.Linear(8, 4)), torch.ones(2, 8)
    stats = Statistics(model, x, execution="shape")
    assert stats.total_mult_adds == 2 * 8 * 4
    assert stats.memory().execution == "shape"
    assert len(modelsummary.symbolic_trace(model, meta_args={"x": x}).graph.nodes) > 1


def test_an_operator_without_a_kernel_on_meta():
    @torch.library.custom_op("modelsummary_tests::doubled", mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    doubled.register_autograd(lambda ctx, grad: 2 * grad)
    memory = Statistics(Call(lambda self, x: doubled(self.a(x)), a=nn.Linear(8, 4)), torch.ones(2, 8)).memory()
    assert memory.execution == "real"
    assert "doubled cannot run on shapes" in str(memory)


def test_a_step_that_needs_values_runs_for_real():
    model = Call(lambda self, x: self.a(x) if x.sum() > 0 else self.b(x), a=nn.Linear(8, 4), b=nn.Linear(8, 9))
    x = torch.ones(2, 8)
    stats = Statistics(model, x)
    with untouched(model):
        memory = stats.memory(optimizer="adam")
    assert memory.execution == "real"
    assert "needs the values of a tensor" in str(memory)
    assert memory.params == 4 * (36 + 81)
    assert memory.grads == 4 * 36
    with pytest.raises(InputError, match="must run for real"):
        stats.memory(dtype=torch.bfloat16)
    with pytest.raises(InputError, match=r"other batch sizes on shapes, but aten.* needs the values of a tensor"):
        stats.max_batch_size(10**6)


def test_measured():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2)
    x = torch.randn(4, 32, 64)
    stats = Statistics(model, x)
    with untouched(model):
        measured = stats.measure_memory(optimizer="sgd-momentum", loss=lambda output: output.sum())
    held, peak = real_memory(model, x, lambda output: output.sum(), sgd)
    before = persistent(measured.predicted)
    assert measured.held_after_forward == before + held["forward"] == measured.predicted.held_after_forward
    assert measured.peak == before + peak
    assert "Predicted / measured" in str(measured)
    inference = stats.measure_memory("inference")
    assert inference.held_after_forward == inference.predicted.held_after_forward


def test_what_cannot_be_measured():
    with pytest.raises(InputError, match="but the model is on meta"):
        Statistics(nn.Linear(2, 2, device="meta"), (1, 2)).measure_memory()
    with pytest.raises(InputError, match="leave out device and dtype"):
        Statistics(nn.Linear(2, 2), (1, 2)).measure_memory(dtype=torch.float64)


@pytest.mark.gpu
def test_cuda():
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))).cuda()
    measured = Statistics(model, torch.randn(512, 1024, device="cuda")).measure_memory(optimizer="adamw")
    assert measured.predicted.held_after_forward == pytest.approx(measured.held_after_forward, rel=0.03)
    assert measured.predicted.peak == pytest.approx(measured.peak, rel=0.03)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cpu", "meta", "cuda"])
def test_the_device_that_is_asked_for_may_be_here(device):
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8)).to(device)
    stats = Statistics(model, (32, 64))
    on_cuda = stats.memory(optimizer="adamw", device="cuda")
    assert on_cuda.peak == stats.memory(optimizer="adamw", device="cuda:0").peak
    assert stats.estimate_latency("H100", backward=True, optimizer="adamw") > 0
    autocast = stats.memory(device="cuda", autocast=torch.bfloat16)
    assert autocast.activations < on_cuda.activations


# ------------------------------------------------------------------------------------------- batch size


def test_max_batch_size():
    stats = Statistics(mlp(), (2, 8))
    batch = stats.max_batch_size(100_000, optimizer="adam")
    memory = [Statistics(mlp(), (size, 8)).memory(optimizer="adam").peak for size in (batch, batch + 1)]
    assert memory[0] <= 100_000 < memory[1]
    assert stats.max_batch_size(1000) == 0
    assert stats["1"].activation_bytes is None
    with pytest.raises(InputError, match=r"memory_bytes must be an integer >= 1 or text .*, got 0"):
        stats.max_batch_size(0)


def test_a_loss_for_one_batch_size():
    labels = torch.zeros(6, dtype=torch.long)
    with pytest.raises(StepError, match=r"this is a batch of 2, .*: make labels from the result, or pass them to the"):
        Statistics(mlp(), (6, 8)).max_batch_size(10**5, loss=lambda out: nn.functional.cross_entropy(out, labels))


def test_max_batch_size_of_an_object():
    @dataclass
    class Batch:
        x: torch.Tensor
        number: int

    def model(of):
        return Call(lambda self, batch: self.linear(of(batch)), linear=nn.Linear(8, 4))

    inside, plain = model(lambda batch: batch.x), model(lambda batch: batch)
    batch = Statistics(inside, [Batch(torch.ones(2, 8), 3)]).max_batch_size(10_000)
    assert batch == Statistics(plain, torch.ones(2, 8)).max_batch_size(10_000) > 2
    with pytest.raises(InputError, match=r"no input has elements along dimension 0, the batch: sizes \[\(0, 8\)\]"):
        Statistics(plain, torch.ones(0, 8)).max_batch_size(10_000)


def test_a_batch_of_one_may_be_impossible():
    stats = Statistics(nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64)), (4, 8))
    assert stats.max_batch_size(10**5) > 2
    assert stats.max_batch_size(1000) == 0


@given(st.integers(0, 50), st.integers(1, 20), st.integers(0, 5000), st.integers(1, 10))
def test_largest(offset, slope, limit, steps):
    def peak(number):
        return offset + slope * (number // steps * steps)

    found = largest(peak, limit)
    assert found == max((number for number in range(1, 6000) if peak(number) <= limit), default=0)


# ---------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "eval"}, "mode must be 'train', 'compiled' or 'inference', got 'eval'$"),
        ({"mode": "AdamW"}, "got 'AdamW'; an optimizer goes by name: optimizer='AdamW'"),
        ({"mode": torch.optim.SGD}, "an optimizer goes by name: optimizer=<class 'torch.optim.sgd.SGD'>"),
        ({"optimizer": "sdg"}, "optimizer must be one of 'sgd'.*, got 'sdg'"),
        ({"optimizer": 3}, "optimizer must be .* got 3"),
        ({"device": "vulkan"}, "device='vulkan' is not available on this machine; leave device out"),
        ({"device": "nowhere"}, "device must name a torch device, got 'nowhere'"),
        ({"dtype": torch.long}, r"dtype must be a floating point .* got torch\.int64"),
        ({"checkpoint": "0"}, r"got one name; pass \['0'\]"),
        ({"checkpoint": ["[1:4]"]}, r"'\[1:4\]', but the container has children 0 to 2"),
        ({"checkpoint": ["[1:1]"]}, "but the container has children 0 to 2"),
        ({"checkpoint": ["0[0:1]"]}, "but a Linear is not an nn.Sequential"),
        ({"checkpoint": ["[0:2]", "[1:3]"]}, "overlaps another segment"),
        ({"autocast": "bfloat"}, "autocast must be a floating point .* got 'bfloat'; did you mean 'bfloat16'"),
        ({"block_bytes": 0}, "block_bytes must be an integer >= 1, got 0"),
    ],
)
def test_bad_arguments(arguments, message):
    model = mlp()
    with untouched(model), pytest.raises(InputError, match=message):
        Statistics(model, (2, 8)).memory(**arguments)


def test_nothing_to_differentiate():
    model = mlp().requires_grad_(False)
    with untouched(model), pytest.raises(InputError, match="requires a gradient; run the forward alone"):
        Statistics(model, (2, 8)).memory()
    with pytest.raises(InputError, match="live model and an input"):
        Statistics(model).memory()


def test_a_forward_that_raises():
    def forward(self, x):
        self.calls += 1
        if self.calls > 1:
            raise ValueError("enough")
        return self.a(x)

    model = Call(forward, a=nn.Linear(8, 4))
    model.calls = 0
    stats = Statistics(model, (2, 8))
    model.calls = 5
    with untouched(model), pytest.raises(StepError, match="enough"):
        stats.memory()


def test_plot(monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    memory = Statistics(mlp(), (2, 8)).memory(optimizer="adam")
    axes = memory.plot()
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "params", "optimizer state", "grads", "inputs", "activations", "temporary", "workspace",
    ]  # fmt: skip
    # the top of the stack is what lives: its highest point the peak
    top = max(path.vertices[:, 1].max() for collection in axes.collections for path in collection.get_paths())
    assert top == pytest.approx(memory.peak / 1e3)
    at = memory.peak_at
    where = f"{at.operator} of {at.fqn}" if at.fqn else at.operator
    assert f"{scaled(memory.peak, 'B')}: {where}" in [text.get_text() for text in axes.texts]
    scaling = Call(lambda self, x: self.fc(x) * self.one, fc=nn.Linear(100, 100))
    scaling.register_buffer("one", torch.ones(1))  # 4 bytes, at a peak of 41.6 kB
    legend = Statistics(scaling, (1, 100)).memory("inference").plot().get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["params", "inputs", "temporary"]
    assert memory.plot(axes) is axes
    matplotlib.pyplot.close("all")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot")
    with pytest.raises(MissingExtraError, match=r"pip install 'torch-modelsummary\[plot\]'"):
        memory.plot()


def test_the_function():
    measured = modelsummary.measure_memory(mlp(), (2, 8), optimizer="sgd")
    assert measured.held_after_forward == measured.predicted.held_after_forward


def test_it_is_plain_data():
    memory = Statistics(mlp(), (2, 8)).memory(optimizer="adam")
    assert pickle.loads(pickle.dumps(memory)) == memory
    assert json.loads(json.dumps(memory.to_dict()))["peak_at"]["phase"] in ("forward", "backward", "step")
    assert "Optimizer state (Adam)" in str(memory)
    assert "Optimizer state (no optimizer)" in str(Statistics(mlp(), (2, 8)).memory())


def imports_between(self, x):
    def activate(hidden):
        import keeps_its_callers  # noqa: F401

        return hidden.relu()

    return self.last(activate(self.first(x)))


def test_an_import_in_a_forward_keeps_no_tensors(tmp_path, monkeypatch):
    """A frame that refers to itself stays until the next collection, and with it the local tensors of its callers."""
    (tmp_path / "keeps_its_callers.py").write_text("import sys\n(lambda: (own := sys._getframe(), own)[0])()\n")
    monkeypatch.syspath_prepend(tmp_path)
    model = Call(imports_between, first=nn.Linear(16, 32), last=nn.Linear(32, 64))
    stats = Statistics(model, (8, 16))
    monkeypatch.delitem(sys.modules, "keeps_its_callers")
    parameters = 16 * 32 + 32 + 32 * 64 + 64
    # at the last layer: its argument and its result beside parameters and input, but no longer the first one's result
    expected = 4 * (parameters + 8 * 16 + 8 * 32 + 8 * 64)
    assert [stats.memory("inference").peak for _ in range(2)] == [expected, expected]


def test_linear_layers_add_their_bias_in_place():
    layer = nn.Linear(8, 32)
    by_layer = Call(lambda self, x: self.layer(x.mT), layer=layer)
    by_hand = Call(lambda self, x: x.mT @ self.layer.weight.T + self.layer.bias, layer=layer)
    held, copied, product = 4 * (8 * 32 + 32) + 4 * 2 * 8 * 16, 4 * 2 * 16 * 8, 4 * 2 * 16 * 32
    assert Statistics(by_layer, (2, 8, 16)).memory("inference").peak == held + copied + product
    assert Statistics(by_hand, (2, 8, 16)).memory("inference").peak == held + 2 * product  # the copy is freed


def test_recurrent_layers_add_the_bias_of_the_inputs_in_place():
    stats = Statistics(nn.RNN(16, 32), (6, 2, 16))
    # the inputs' products of all steps, the hidden state of each, their stack; a state is added to its step's products
    products, states = 6 * 2 * 32, 6 * 2 * 32
    before = 16 * 32 + 32 * 32 + 2 * 32 + 6 * 2 * 16 + 2 * 32  # parameters, input, first state
    peak = stats.memory("inference").peak
    assert peak == stats.measure_memory("inference").peak == 4 * (before + products + 2 * states)


class Replaces(nn.Module):
    """A model that replaces a layer after its call, and calls the new one."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.second(self.first(x))
        self.second = nn.Linear(4, 4, device=x.device)
        return self.second(x)


def test_a_layer_that_the_forward_replaces():
    model = Replaces()
    with untouched(model):
        stats = Statistics(model, (2, 4))
        memory = stats.memory(optimizer="sgd")
        stats.estimate_latency("A100", backward=True)
    assert stats.total_macs == 3 * 2 * 4 * 4
    assert memory.params == 2 * 20 * 4


class Adds(nn.Module):
    """A model that adds a layer in its first forward."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x):
        if not hasattr(self, "second"):
            self.second = nn.Linear(4, 4)
        return self.second(self.first(x))


def test_a_layer_that_the_first_forward_adds():
    model = Adds()
    stats = Statistics(model, (2, 4))
    assert (stats.total_params, stats.total_macs) == (40, 64)
    for verb in (stats.memory, lambda: stats.estimate_latency("A100"), lambda: stats.parallel_plan(shard=2)):
        with pytest.raises(InputError, match="the forward adds module 'second'; run the model once"):
            verb()
    model(torch.zeros(2, 4))
    assert Statistics(model, (2, 4)).memory().params == 2 * 20 * 4


def state_bytes(model, x, make_optimizer):
    """Bytes of the optimizer's state after a real step."""
    optimizer = make_optimizer(model.parameters())
    model(x).sum().backward()
    optimizer.step()
    states = [each for state in optimizer.state.values() for each in state.values() if isinstance(each, torch.Tensor)]
    storages = [inner.untyped_storage() for each in states for inner in inner_tensors(each)]
    return sum({each._cdata: each.nbytes() for each in storages}.values())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("library", "name"), [("bitsandbytes.optim", "AdamW8bit"), ("torchao.optim", "AdamW8bit")])
def test_optimizers_of_8_bits(library, name):
    kind = getattr(pytest.importorskip(library, exc_type=(ImportError, RuntimeError)), name)
    model, x = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 64)), torch.randn(4, 128)
    with untouched(model):
        found = [Statistics(model, x).memory(optimizer=each) for each in (kind, kind(model.parameters(), lr=1e-4))]
    real = state_bytes(model, x, kind)
    assert [each.optimizer_state for each in found] == [real, real]
    # 2 bytes for each of the 128 * 256 and 256 * 64 weights, more for the scales of blocks; small tensors keep floats
    assert 2 * 49152 < real < 2.2 * 49152


def test_inference_mode_around():
    model, x = mlp(), torch.randn(2, 8)
    expected = Statistics(model, x).memory(optimizer="sgd")
    with torch.inference_mode(), untouched(model):
        assert Statistics(model, x).memory(optimizer="sgd") == expected


def test_tensors_that_the_loss_holds():
    """A teacher takes its bytes once, and keeps none of its results for the backward."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    teacher = nn.Sequential(nn.Linear(64, 1000), nn.ReLU(), nn.Linear(1000, 8)).requires_grad_(False)
    x, labels = torch.randn(4, 64), torch.randn(4, 8)
    stats = Statistics(model, x)
    plain = stats.measure_memory(loss=lambda output: (output - teacher(x)).square().mean() + (output - labels).mean())
    weights = sum(parameter.nbytes for parameter in teacher.parameters())
    assert plain.predicted.inputs == x.nbytes + labels.nbytes + weights
    assert plain.predicted.peak == plain.peak + labels.nbytes + weights  # a measurement does not know that these exist


def test_labels_that_autograd_saves_count_once():
    """By hand: 4 x 8 log-probabilities, 4 labels of 8 bytes, the sum of weights, the loss; and 4 x 8 results."""
    model, labels = nn.Linear(8, 8, bias=False), torch.tensor([1, 2, 3, 4])
    memory = Statistics(model, (4, 8)).memory(loss=lambda output: nn.functional.cross_entropy(output, labels))
    before = 4 * 8 * 8 + 4 * 8 * 4
    assert (memory.params + memory.inputs, memory.held_after_forward) == (
        before + labels.nbytes,
        before + labels.nbytes + 2 * 4 * 8 * 4 + 4 + 4,
    )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    ("loss", "nbytes"),
    [
        ("mse_loss", 4 * 4 * 16),
        ("smooth_l1_loss", 4 * 4 * 16),
        ("soft_margin_loss", 4 * 4 * 16),
        ("binary_cross_entropy", 4 * 4 * 16),
        ("huber_loss", 4),
    ],
)
def test_losses_in_the_storage_of_their_elements(loss, nbytes, reduction):
    """Torch reduces all but the last in place: a storage that is resized keeps its bytes."""

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 16)

        def forward(self, x, target):
            return getattr(nn.functional, loss)(self.linear(x).sigmoid(), target, reduction=reduction)

    memory = held_exactly(Loss(), (torch.randn(4, 8), torch.rand(4, 16)))
    if reduction != "none":
        sigmoid, total = 4 * 4 * 16, 4
        assert memory.held_after_forward - memory.params - memory.inputs == sigmoid + nbytes + total


def test_numbers_that_autograd_keeps_are_in_the_memory_of_the_host():
    """By hand: a double for each factor on the CPU."""
    model = Call(lambda self, x: self.a(x) * 0.5 * 2.0, a=nn.Linear(8, 64))
    assert held_exactly(model, torch.randn(2, 8)).activations == 2 * 8
    assert Statistics(model, (2, 8)).memory(device="cuda").activations == 0


def test_a_loss_that_the_model_keeps():
    def forward(self, x):
        self.loss = self.a(x).square().mean()

    model = Call(forward, a=nn.Linear(8, 8))
    with pytest.raises(InputError, match=r"^nothing in the model's result requires a gradient; .*or pass loss="):
        Statistics(model, (2, 8)).memory()
    assert Statistics(model, (2, 8)).memory(loss=lambda _: model.loss).grads == 4 * 72


def test_rows_without_operators():
    """By hand: a product of 16 x 64 floats and its bias; what lives when a call begins lives while it does nothing."""
    stats = Statistics(nn.Sequential(nn.Linear(64, 64), nn.Identity(), nn.ReLU(), nn.Identity()), (16, 64))
    stats.memory()
    weights, vectors = 4 * (64 * 64 + 64), 4 * 16 * 64
    assert [row.peak_bytes - weights - vectors for row in stats.root.walk()] == [
        2 * vectors,
        vectors,
        vectors,
        2 * vectors,
        vectors,  # the result of the product is not kept
    ]


def test_an_accelerator_goes_by_its_name():
    stats = Statistics(nn.Linear(8, 8), (4, 8))
    on_cuda = stats.memory(device="cuda", optimizer="adamw")
    assert [stats.memory(device=device, optimizer="adamw").peak for device in ("a100", DeviceSpec("T4"))] == [
        on_cuda.peak
    ] * 2
    with pytest.raises(InputError, match=r"torch device, got 'gpu9'.* or an accelerator: no accelerator 'gpu9'"):
        stats.memory(device="gpu9")


def test_an_optimizer_steps_the_parameters_that_it_holds():
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    stats, elsewhere = Statistics(model, (4, 64)), nn.Linear(2, 2)
    whole, head, other = (torch.optim.AdamW(part.parameters(), lr=1e-2) for part in (model, model[2], elsewhere))
    optimizers = {"class": "adamw", "whole": whole, "head": head, "other": other}
    states = {name: stats.memory(optimizer=optimizer).optimizer_state for name, optimizer in optimizers.items()}
    size = 4 * 2 * (256 * 10 + 10) + 4 * 2  # two moments, and the number of steps of each parameter
    assert states == {"class": states["whole"], "whole": states["whole"], "head": size, "other": states["whole"]}
    assert stats.memory(optimizer=head).grads == stats.memory(optimizer=whole).grads
    assert stats.measure_memory(optimizer=head).peak == pytest.approx(stats.memory(optimizer=head).peak, abs=64)
    steps = [stats.estimate_latency("A100", backward=True, optimizer=optimizer) for optimizer in (whole, head)]
    times = [step.optimizer_ms for step in steps]
    a_parameter = 1e3 * target_of("A100").model.host_seconds["parameter"]  # which the host steps
    assert times[0] - times[1] == pytest.approx(2 * a_parameter)
    assert not head.state
    kept = weakref.ref(head)
    del head, optimizers, steps
    gc.collect()
    assert kept() is None  # nor its states, which may be large


def test_an_inference_has_no_optimizer():
    with pytest.raises(InputError, match=r"an inference has no optimizer; leave out optimizer=, or pass mode='train'$"):
        Statistics(mlp(), (2, 8)).memory("inference", optimizer="adam")
