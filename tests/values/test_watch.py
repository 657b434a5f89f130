"""Watching any code that runs a model: the figures, the steps, and that nothing stays behind."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from contextlib import ExitStack, contextmanager
from math import inf

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import optimizer as optimizers
from torch.utils.checkpoint import checkpoint

from modelsummary import InputError, ModelStatistics, NotLiveError, Statistics, StepError
from modelsummary._torch import dispatch_modes
from modelsummary.values import TensorStatistics, tensor_statistics
from modelsummary.views.explorer.data import Explored, model_data
from tests.idioms import IDIOMS, Gpt2, ids, rows
from tests.untouched import untouched


def watch(model, x):
    return Statistics(model, x).watch()


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


# ------------------------------------------------------------------------------------------------ figures


def _close(statistics, tensor):
    x = tensor.detach().double()
    assert statistics.mean == pytest.approx(float(x.mean()), abs=1e-6)
    assert statistics.std == pytest.approx(float(x.std(correction=0)), rel=1e-4, abs=1e-7)
    assert statistics.abs_max == pytest.approx(float(x.abs().max()))
    assert statistics.zeros == pytest.approx(float((x == 0).double().mean()))
    assert statistics.norm == pytest.approx(float(x.norm()), rel=1e-4, abs=1e-6)
    assert statistics.shape == tuple(x.shape)


def test_figures_are_the_ones_of_hooks():
    model, x = mlp(), torch.randn(5, 4, requires_grad=True)
    outputs, gradients = {}, {}
    with ExitStack() as stack:
        for name, module in model.named_modules():
            forward = module.register_forward_hook(lambda m, a, out, name=name: outputs.update({name: out.clone()}))
            backward = module.register_full_backward_hook(
                lambda m, i, o, name=name: gradients.update({name: o[0].clone()})
            )
            stack.callback(forward.remove)
            stack.callback(backward.remove)
        with watch(model, x) as values:
            model(x).square().sum().backward()
    assert [call.key for call in values.calls] == [("", 0), ("0", 0), ("1", 0), ("2", 0)]
    for call in values.calls:
        _close(call.output, outputs[call.fqn])
        _close(call.gradient, gradients[call.fqn])
    for row, (name, parameter) in zip(values.parameters, model.named_parameters(), strict=True):
        assert row.name == name
        _close(row.weight, parameter)
        _close(row.gradient, parameter.grad)


def test_the_update_ratio_of_gradient_descent():
    model, x = mlp(), torch.randn(5, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, x) as values:
        model(x).square().sum().backward()
        total = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norms = {name: (tensor.grad.norm(), tensor.detach().norm()) for name, tensor in model.named_parameters()}
        wanted = {name: 0.1 * float(gradient / weight) for name, (gradient, weight) in norms.items()}
        optimizer.step()
    assert total > 1
    assert {row.name: row.update_ratio for row in values.parameters} == pytest.approx(wanted, rel=1e-4)
    assert values.steps[0].gradient_norm == pytest.approx(1.0, rel=1e-4)  # as the optimizer got it
    assert values.log()["gradient_norm"] == values.steps[0].gradient_norm


CASES = {
    "normal": torch.randn(1000),
    "far from zero": torch.randn(100, 50) * 1e-3 + 1000,
    "integers": torch.randint(0, 5, (10,)),
    "booleans": torch.tensor([True, False, True]),
    "half": torch.randn(10, 4).half(),
    "bfloat16": torch.randn(10).bfloat16(),
    "float8": torch.randn(10).to(torch.float8_e4m3fn),
    "large": torch.full((4,), 1e30) * torch.tensor([1, -1, 1, 1]),
    "zeros": torch.zeros(5),
    "scalar": torch.tensor(3.0),
    "slice": torch.randn(4, 8, 6, 6)[:, ::2],
    "channels last": torch.randn(3, 7, 5, 6).to(memory_format=torch.channels_last),
    "expanded": torch.ones(3, 3).expand(2, 3, 3),
    "more than a sample": torch.arange(3 * 4096).float() % 2,
}


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_statistics_of_tensors(name, waits, monkeypatch):
    monkeypatch.setattr(tensor_statistics, "is_waiting", lambda device: waits)
    tensor = CASES[name]
    statistics = TensorStatistics.of(tensor)
    x = tensor.double()
    assert statistics.mean == pytest.approx(float(x.mean()), rel=1e-5, abs=1e-6)
    assert statistics.std == pytest.approx(float(x.std(correction=0)) if x.numel() > 1 else 0.0, rel=1e-3, abs=1e-7)
    assert statistics.abs_max == pytest.approx(float(x.abs().max()))
    assert statistics.zeros == pytest.approx(float((x == 0).double().mean()), abs=1e-3)
    assert statistics.is_finite
    counted = sum(statistics.histogram)
    assert counted == tensor.numel() if tensor.numel() <= 4096 else 1000 < counted <= 4096


@pytest.mark.parametrize("waits", [False, True])
def test_what_is_not_finite_is_counted_and_left_out(waits, monkeypatch):
    monkeypatch.setattr(tensor_statistics, "is_waiting", lambda device: waits)
    statistics = TensorStatistics.of(torch.tensor([float("nan"), float("inf"), -float("inf"), 2.0, -4.0]))
    assert (statistics.nans, statistics.infs, statistics.mean, statistics.abs_max) == (1, 2, -1.0, 4.0)
    assert (statistics.std, statistics.norm) == pytest.approx((3.0, 20**0.5))
    nothing = TensorStatistics.of(torch.full((2,), float("nan")))
    assert (nothing.nans, nothing.mean != nothing.mean) == (2, True)
    assert TensorStatistics.of(torch.zeros(0)).elements == 0
    assert TensorStatistics.of(torch.tensor([3 + 4j])).abs_max == 4.0


@pytest.mark.parametrize("waits", [False, True])
def test_the_largest_value_of_zeros_has_no_sign(waits, monkeypatch):
    monkeypatch.setattr(tensor_statistics, "is_waiting", lambda device: waits)
    assert str(TensorStatistics.of(torch.zeros(3)).abs_max) == "0.0"


def test_quantiles():
    x = torch.randn(5000)
    statistics = TensorStatistics.of(x)
    for share in (0.05, 0.5, 0.95):
        assert statistics.quantile(share) == pytest.approx(float(x.abs().quantile(share)), rel=0.2)


# -------------------------------------------------------------------------------------------------- steps


def test_steps_end_with_the_optimizer():
    model, x = mlp(), torch.randn(5, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    with watch(model, x) as values:
        for _ in range(20):
            for _ in range(2):  # gradients of two batches
                model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [step.number for step in values.steps] == list(range(4, 20))
    assert [call.key for call in values.calls] == [(fqn, number) for number in (0, 1) for fqn in ("", "0", "1", "2")]
    assert all(call.gradient is not None for call in values.calls)
    assert "activations/2#1/mean" in values.log(7)
    with pytest.raises(InputError, match=r"got 3; steps 4 to 19 are kept"):
        values.log(3)


def _with_closure(model, optimizers, x):
    def closure():
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    for optimizer in optimizers:
        optimizer.step(closure)


def _two_at_once(model, optimizers, x):
    model.zero_grad()
    model(x).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()


def _in_the_backward(model, optimizers, x):
    of_parameter = {
        id(parameter): optimizer for optimizer in optimizers for parameter in optimizer.param_groups[0]["params"]
    }
    handles = [
        parameter.register_post_accumulate_grad_hook(lambda parameter: of_parameter[id(parameter)].step())
        for parameter in model.parameters()
    ]
    model.zero_grad()
    model(x).square().mean().backward()
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize(
    ("step", "n_optimizers"),
    [(_with_closure, 1), (_two_at_once, 2), (_in_the_backward, 4)],
)
def test_a_step_has_the_gradients_that_its_optimizers_got(step, n_optimizers):
    """A closure makes them within the step of the optimizer, when the gradients of the step before are still there."""
    model, norms = mlp(), []
    parameters = list(model.parameters())
    groups = [parameters] if n_optimizers == 1 else [parameters[i::n_optimizers] for i in range(n_optimizers)]
    optimizers = [torch.optim.SGD(group, lr=0.1) for group in groups]
    with watch(model, (5, 4)) as values:
        for x in torch.randn(3, 5, 4):
            step(model, optimizers, x)
            norms.append(torch.stack([parameter.grad.norm() for parameter in parameters]).norm().item())
    assert [step.gradient_norm for step in values.steps] == pytest.approx(norms)
    assert [(len(step.calls), len(step.parameters)) for step in values.steps] == [(4, len(parameters))] * 3
    assert all(row.update_ratio > 0 for row in values.parameters)


def test_forwards_without_gradients_are_steps():
    model, x = mlp(), torch.randn(5, 4)
    with watch(model, x) as values, torch.no_grad():
        for _ in range(3):
            model(x)
        assert len(values.steps) == 3
    assert [len(step.calls) for step in values.steps] == [4] * 3
    assert values.parameters == []
    with watch(model, x) as values, torch.inference_mode():
        model(x)
    assert len(values.calls) == 4


def test_a_forward_without_gradients_within_a_step():
    model, x = mlp(), torch.randn(5, 4)
    with watch(model, x) as values:
        student = model(x)
        with torch.no_grad():
            teacher = model(x)
        (student - teacher + 1).square().sum().backward()
    assert len(values.steps) == 1
    assert [call.gradient is None for call in values.calls] == [False] * 4 + [True] * 4
    assert [row.gradient is None for row in values.parameters] == [False] * 4


def test_values_can_be_read_while_a_step_runs():
    model, x = mlp(), torch.randn(5, 4)
    with watch(model, x) as values:
        out = model(x)
        assert values.calls[0].gradient is None
        out.sum().backward()
        assert values.calls[0].gradient.mean == 1.0
        assert values.first_bad() is None
    assert len(values.steps) == 1


def test_shared_tied_and_frozen_parts():
    torch.manual_seed(0)
    model = Gpt2(depth=2)
    model.h[0].requires_grad_(False)
    with watch(model, ids(3)) as values:
        model(ids(3)).sum().backward()
    names = [row.name for row in values.parameters]
    assert "wte.weight" in names
    assert "lm_head.weight" not in names  # it is the same tensor
    assert not any(name.startswith("h.0") for name in names)
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, layer)
    with watch(model, rows(2, 4)) as values:
        model(rows(2, 4)).sum().backward()
    assert [call.key for call in values.calls] == [("", 0), ("0", 0), ("0", 1)]
    assert [call.gradient.mean for call in values.calls][::2] == [1.0, 1.0]


def test_a_part_that_is_called_alone():
    model, x = mlp(), torch.randn(5, 4)
    with watch(model, x) as values:
        model[0](x).sum().backward()
    assert [(call.key, call.gradient.mean) for call in values.calls] == [(("0", 0), 1.0)]
    assert [row.name for row in values.parameters] == ["0.weight", "0.bias"]


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant):
        super().__init__()
        self.first, self.blocks, self.reentrant = nn.Linear(4, 4), nn.ModuleList([mlp_block(), mlp_block()]), reentrant

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def mlp_block():
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_have_the_gradients_of_plain_ones(reentrant):
    torch.manual_seed(0)
    model, x = Checkpointed(reentrant=reentrant), torch.randn(3, 4)
    with watch(model, x) as values:
        model(x).square().sum().backward()
    plain = nn.Sequential(model.first, *model.blocks)
    with watch(plain, x) as expected:
        plain(x).square().sum().backward()
    assert len(values.calls) == len(expected.calls)
    for call, same in zip(values.calls, expected.calls, strict=True):
        assert call.output.mean == same.output.mean
        assert call.gradient.norm == pytest.approx(same.gradient.norm)


def test_autocast():
    model, x = mlp(), torch.randn(5, 4)
    with watch(model, x) as values, torch.autocast("cpu", torch.bfloat16):
        loss = model(x).float().sum()
        loss.backward()
    assert [call.output.dtype for call in values.calls] == [torch.bfloat16] * 4
    assert {row.weight.dtype for row in values.parameters} == {torch.float32}


def _whole(model):
    return torch.compile(model, backend="eager")


def _part(model):
    return nn.Sequential(OrderedDict(model.named_children()) | {"1": torch.compile(model[1], backend="eager")})


def _in_place(model):
    model[1].compile(backend="eager")
    return model


def _function(model):
    model.forward = torch.compile(model.forward, backend="eager")
    return model


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo asks for it
@pytest.mark.parametrize("compile_", [_whole, _part, _in_place, _function])
def test_compiled_models_run_eagerly(compile_):
    """The model is compiled before already; the root makes NaN in its backward."""
    model, x = nn.Sequential(nn.Linear(4, 4), Root(), nn.Linear(4, 4)), torch.randn(5, 4)
    compiled = compile_(model)
    compiled(x)
    with Statistics(compiled, x).watch() as values:
        compiled(x).sum().backward()
    assert [call.key[0] for call in values.calls] == ["", "0", "1", "2"]
    bad = values.first_bad()
    assert (bad.operator, bad.node, bad.key) == ("aten.div", "SqrtBackward0", ("1", 0))


class Root(nn.Module):
    """A root at 0."""

    def forward(self, x):
        return torch.sqrt((x - x.detach()) * x) + x


class Layer(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function

    def forward(self, x):
        return self.function(self.layer(x))


def test_a_compiled_model_of_ones_own_has_its_calls():
    """The result of torch.compile keeps the __call__ of its model, other than for the modules of torch."""
    model = Layer(lambda x: torch.sqrt(-x.abs() - 1))
    compiled = torch.compile(model, backend="eager")
    with watch(compiled, rows(5, 4)) as values:
        compiled(rows(5, 4)).sum().backward()
    assert [call.key for call in values.calls] == [("", 0), ("layer", 0)]
    assert values.first_bad().key == ("", 0)


def test_what_a_backward_replaces_is_not_final():
    """The gradient of a norm at 0 is 0 / 0, which its formula replaces by 0."""
    model = Layer(lambda x: (x * 0).norm(dim=1))
    with watch(model, rows(5, 4)) as values:
        model(rows(5, 4)).sum().backward()
    assert [(bad.operator, bad.kind, bad.is_final) for bad in values.bad] == [("aten.div", "nan", False)]
    assert values.first_bad() is None
    assert all(row.gradient.is_finite for row in values.parameters)


def test_gradients_of_gradients():
    """Autograd makes zeros without memory for some of them."""
    model, x = Layer(lambda x: (x * 0).abs().sqrt()), rows(5, 4)
    with watch(model, x) as values:
        (gradient,) = torch.autograd.grad(model(x).sum(), model.layer.weight, create_graph=True)
        gradient.sum().backward()
    assert (values.first_bad().operator, values.first_bad().phase) == ("aten.div", "backward")


def test_sparse_gradients_and_integers():
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, torch.tensor([[1, 2]])) as values:
        model(torch.tensor([[1, 2]])).sum().backward()
        optimizer.step()
    assert values.parameters[0].gradient.shape == (2, 4)
    assert values.first_bad() is None


# ---------------------------------------------------------------------------------------------- bad values


def test_an_optimizer_that_makes_inf():
    model, x = mlp(), torch.randn(5, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=float("inf"))
    with watch(model, x) as values:
        for _ in range(2):
            model(x).square().sum().backward()
            optimizer.step()
    bad = values.first_bad()
    assert (bad.operator, bad.phase, bad.step) == ("SGD.step", "optimizer", 0)
    assert "optimizer.step()" in bad.code
    assert len(bad.inputs) == 2


def test_a_parameter_that_is_nan_before():
    model, x = mlp(), torch.randn(5, 4)
    with torch.no_grad():
        model[2].weight[0, 0] = float("nan")
    with watch(model, x) as values:
        model(x)
    bad = values.first_bad()
    assert (bad.operator, bad.source, bad.kind, bad.key) == (None, "parameter '2.weight'", "nan", ("2", 0))
    assert "parameter '2.weight' held NaN" in str(bad)


def test_a_batch_that_is_nan():
    model, x = mlp(), torch.randn(5, 4)
    x[0, 0] = float("nan")
    bad = Statistics(model, x).values().first_bad()
    assert (bad.operator, bad.source) == (None, "float32[5, 4] that no operator made")


class Masked(nn.Module):
    def forward(self, x):
        return (torch.tensor([0.0, 1.0]).log() + x).softmax(-1)


def test_a_mask_is_listed_and_not_final():
    model = Masked()
    with watch(model, rows(3, 2)) as values:
        model(rows(3, 2))
    assert [(bad.operator, bad.is_final, bad.spread) for bad in values.bad] == [("aten.log", False, 1)]
    assert values.first_bad() is None
    assert values.bad[0].to_dict()["code"].startswith("return (torch.tensor([0.0, 1.0]).log()")


def test_bad_values_of_many_steps_are_bounded():
    """Each step has a mask, and every second one an input of NaN: 100 final ones and 16 steps are kept."""
    model = Masked()
    with watch(model, rows(3, 2)) as values, torch.no_grad():
        for number in range(300):
            model(torch.full((3, 2), float("nan")) if number % 2 else rows(3, 2))
    by_step = {number: [bad.operator for bad in values.bad if bad.step == number] for number in range(300)}
    assert all(by_step[number] for number in range(284, 300))
    assert [number for number in range(284) if by_step[number]] == list(range(0, 200, 2))
    assert values.first_bad().step == 0


def test_a_mask_in_a_buffer_is_remembered():
    """It may still become final, however long ago it was made."""

    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.zeros(2))
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            if self.calls == 1:
                self.mask.copy_(torch.tensor([0.0, 1.0]).log())
            return x * (self.mask if self.calls == 40 else 1.0)

    model = Late()
    with watch(model, rows(3, 2)) as values:
        with torch.no_grad():
            for _ in range(39):
                model(rows(3, 2))
        assert len(values.steps) == 16
        assert [(bad.operator, bad.step) for bad in values.bad] == [("aten.log", 0)]


def _scaled(scale, *, steps=3):
    """Train under GradScaler, whose scale overflows float16 in the backward above 65504."""
    model = nn.Linear(4, 3)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.full((1, 4), 0.5)
    with watch(model, x) as values:
        for _ in range(steps):
            with torch.autocast("cpu", torch.float16):
                loss = model(x).float().sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return values


def test_an_overflow_that_grad_scaler_skips_is_not_final():
    values = _scaled(2.0**17)  # and then 2^16, which overflows, too
    assert [(bad.kind, bad.phase, bad.is_final, bad.loss_scale) for bad in values.bad] == [
        ("inf", "backward", False, 2.0**17),
        ("inf", "backward", False, 2.0**16),
    ]
    assert values.first_bad() is None
    assert "scaled by 131,072: GradScaler skips such a step and lowers the scale" in str(values.bad[0])
    assert "2 overflows at the scale of GradScaler" in str(values)
    assert values.steps[-1].gradient_norm == pytest.approx(
        sum(row.gradient.norm**2 for row in values.parameters) ** 0.5
    )


def test_an_overflow_that_is_not_skipped_is_final():
    class Root(nn.Module):
        def forward(self, x):
            return torch.sqrt(x * 0)

    model, x = nn.Sequential(nn.Linear(4, 3), Root()), rows(5, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for scale, is_final in ((2.0, False), (1.0, True)):  # without a scale, it overflows as well
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        optimizer.zero_grad()
        with watch(model, x) as values:
            scaler.scale(model(x).sum()).backward()
            scaler.step(optimizer)
        assert (values.first_bad() is not None) is is_final
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizer.zero_grad()
    with watch(model, x) as values:
        scaler.scale(model(x).sum()).backward()
        scaler.unscale_(optimizer)
        optimizer.step()
    assert values.first_bad().loss_scale == 2.0
    assert values.first_bad().is_final


def test_errors_of_values_name_what_was_passed():
    stats = Statistics(nn.Linear(4, 3), rows(5, 4))
    with pytest.raises(InputError, match=r"^loss must be a function from the model's result to a scalar, got 1$"):
        stats.values(loss=1)
    for batch in ("x", 3, b"y"):
        with pytest.raises(InputError, match=f"^batch must hold the tensors that the forward takes, got {batch!r}; "):
            stats.values(batch)


def test_a_step_is_one_line_for_a_log():
    model, x = mlp(), rows(5, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, x) as values:
        model(x).sum().backward()
        optimizer.step()
        with torch.no_grad():
            model(x)
    trained, forward = map(str, values.steps)
    assert trained.startswith(f"step 0; gradient norm {values.steps[0].gradient_norm:.3g} over 4 parameters; update / ")
    assert forward == "step 1"
    assert str(values).splitlines()[-2] == forward


def test_values_are_columns():
    """Figures of the result and of its gradient, of the rows that ran, as torch computes them."""
    model, x = mlp(), rows(5, 4)
    stats = Statistics(model, x)
    assert "output_std is not known yet: call stats.values()" in stats.table(columns=["output_std"])
    stats.values(x)
    records = {row["fqn"]: row for row in stats.to_records()}
    hidden = model[0](x).detach()
    assert records["0"]["output_std"] == pytest.approx(float(hidden.std(correction=0)))
    assert records["0"]["output_abs_max"] == pytest.approx(float(hidden.abs().max()))
    assert records["2"]["gradient_norm"] == pytest.approx(15**0.5)  # the loss is the sum of 5 x 3 results
    assert {row["output_nans"] for row in records.values()} == {0}
    assert "3.87" in stats.table(columns=["gradient_norm"])
    assert stats.to_pandas(columns=["fqn", "output_zeros"])["output_zeros"][2] == pytest.approx(
        float((hidden.relu() == 0).double().mean())
    )
    figures = {figure["name"]: figure for figure in model_data(Explored(stats.root))["figures"]}
    assert figures["gradient_norm"]["own"][3] == pytest.approx(15**0.5, rel=1e-5)
    assert ModelStatistics.from_json(stats.to_json())["0"].values == stats["0"].values


def test_several_positional_inputs():
    class Masked(nn.Module):
        def forward(self, x, mask):
            return x * mask

    x, mask = torch.full((2, 3), 5.0), torch.tensor([[1.0], [0.0]])
    stats = Statistics(Masked(), x, mask)
    for values in (stats.values(2 * x, mask), stats.values((2 * x, mask))):
        assert values.calls[0].output.mean == 5  # 10 in one of two rows
    with pytest.raises(InputError, match="missing a required argument: 'mask'"):
        stats.values(x)


def test_a_value_that_is_not_known_is_no_figure():
    stats = Statistics(nn.Linear(4, 3), rows(5, 4))
    stats.values(torch.full((5, 4), float("nan")), backward=False)
    (row,) = stats.to_records(columns=["output_mean", "output_nans", "gradient_norm"])
    assert row == {"output_mean": None, "output_nans": 15, "gradient_norm": None}


class Replaced(nn.Module):
    """Attention whose rows may be masked as a whole; the NaN of such rows is replaced by ``replace``."""

    def __init__(self, replace):
        super().__init__()
        self.layer, self.replace = nn.Linear(4, 4), replace
        self.register_buffer("latest", torch.zeros(3, 4))

    def forward(self, x):
        scores = self.layer(x).masked_fill(torch.ones(3, 4, dtype=torch.bool), -inf)
        return self.replace(self, scores.softmax(-1)) + self.layer(x)


def _kept(model, weights):
    with torch.no_grad():
        model.latest.copy_(weights)
    return weights.nan_to_num(0.0)


def _refused(model, weights):
    raise ValueError(f"weights of {model} hold NaN: {bool(weights.isnan().any())}")


def _held(model, weights):
    model.aux = weights.sum()
    return weights.nan_to_num(0.0)


def test_a_nan_that_is_replaced_is_not_final():
    model = Replaced(lambda _, weights: weights.nan_to_num(0.0))
    with watch(model, rows(3, 4)) as values:
        model(rows(3, 4)).sum().backward()
    assert [(bad.operator, bad.is_final) for bad in values.bad] == [("aten._softmax", False)]
    assert values.first_bad() is None
    assert "later operators replaced it" in str(values.bad[0])
    assert all(row.gradient.is_finite for row in values.parameters)


def test_a_nan_that_is_kept_anywhere_is_final():
    for replace in (lambda _, weights: weights, lambda _, weights: torch.stack([weights[:1], weights[:1] * 0]), _kept):
        model = Replaced(replace)
        with torch.no_grad(), watch(model, rows(3, 4)) as values:
            model(rows(3, 4))
        assert values.first_bad().operator == "aten._softmax"
    model = Replaced(_kept)
    watching, model.replace = watch(model, rows(3, 4)), _refused
    with pytest.raises(ValueError, match="hold NaN: True"), watching as values:
        model(rows(3, 4))
    assert values.first_bad().operator == "aten._softmax"
    model = Replaced(_held)
    with watch(model, rows(3, 4)) as values:
        (model(rows(3, 4)).sum() + model.aux).item()
    assert values.first_bad().operator == "aten._softmax"


def test_a_mask_of_zero_times_infinity():
    model = Masks()
    bad = Statistics(model, rows(3, 3)).values().first_bad()
    assert (bad.operator, bad.takes_inf, bad.key) == ("aten.mul", True, ("", 0))
    assert "an infinite number is among its arguments; times 0 it is NaN" in str(bad)
    assert str(bad).startswith("aten.mul made NaN in the forward of (model) (Masks)\n")


class Masks(nn.Module):
    def forward(self, x):
        return (x + (1 - torch.ones(3, 3).tril()) * -inf).softmax(-1)


def test_what_is_outside_of_the_model():
    model = mlp()
    with watch(model, torch.randn(5, 4)) as values:
        (model(torch.randn(5, 4)) * 0).log().neg().sum().item()
    assert str(values.first_bad()).startswith("aten.log made Inf in the forward, outside of the model\n")


def test_watches_nest():
    model, x = mlp(), torch.randn(5, 4)
    stats = Statistics(model, x)
    with stats.watch() as outer, stats.watch() as inner:
        model(x).sum().backward()
    with stats.watch() as alone:
        model(x).sum().backward()
    keys = [call.key for call in alone.calls]
    assert [call.key for call in outer.calls] == keys == [call.key for call in inner.calls]


# --------------------------------------------------------------------------------------------- left behind


@contextmanager
def nothing_left(model):
    hooks = [len(optimizers._global_optimizer_pre_hooks), len(optimizers._global_optimizer_post_hooks)]
    modes, called, hidden = list(dispatch_modes()), nn.Module.__call__, torch.backends.mha.get_fastpath_enabled()
    yield
    assert hooks == [len(optimizers._global_optimizer_pre_hooks), len(optimizers._global_optimizer_post_hooks)]
    assert (list(dispatch_modes()), nn.Module.__call__) == (modes, called)
    assert torch.backends.mha.get_fastpath_enabled() == hidden


@pytest.mark.parametrize("name", ["gpt2", "llama", "unet", "lstm", "transformer", "in place", "experts"])
def test_the_model_is_untouched_by_a_watched_forward(name):
    kind, inputs = IDIOMS[name]
    torch.manual_seed(0)
    model, arguments = kind().eval(), inputs(3, 0)
    stats = Statistics(model, arguments)
    plain = model(**arguments)
    kept = copy.deepcopy(model.state_dict())
    with nothing_left(model), stats.watch():
        watched = model(**arguments)
    torch.testing.assert_close(watched, plain, rtol=0, atol=0) if name != "in place" else None
    assert all(torch.equal(kept[key], value) or name == "in place" for key, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._backward_hooks for module in model.modules())


def test_the_training_is_the_same():
    x, target = torch.randn(8, 4), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])

    def trained(watched):
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with Statistics(model, x).watch() if watched else ExitStack():
            for _ in range(3):
                optimizer.zero_grad()
                F.cross_entropy(model(x), target).backward()
                optimizer.step()
        return list(model.parameters())

    for plain, watched in zip(trained(False), trained(True), strict=True):
        assert torch.equal(plain, watched)


class Raises(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        x = torch.sqrt(-self.layer(x).abs() - 1)
        if torch.is_grad_enabled() and x.isnan().any():
            raise ValueError("the model stops at NaN")
        return x


def test_exceptions_leave_nothing_behind():
    model = Raises()
    stats = Statistics(model.eval(), torch.ones(2, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with untouched(model), nothing_left(model):
        with pytest.raises(ValueError, match="stops at NaN"), stats.watch() as values:
            model(torch.ones(2, 4))
        assert values.first_bad().operator == "aten.sqrt"
        with pytest.raises(KeyError), stats.watch():
            raise KeyError("in the loop")
        with pytest.raises(RuntimeError, match="closure"), stats.watch() as values:
            optimizer.step(_raising)
        with pytest.raises(StepError, match="stops at NaN"):
            stats.values(torch.ones(2, 4))


def _raising():
    raise RuntimeError("closure")


@pytest.mark.parametrize("backward", [True, False])
def test_a_forward_that_raises_is_at_fault_itself(backward):
    """Nothing else than the batch, or the model, would change that; the values until then can be seen."""
    model = mlp()
    stats = Statistics(model, (5, 4))
    message = (
        "the forward of the step failed: RuntimeError: mat1 and mat2 shapes cannot be multiplied (5x3 and 4x8); "
        "call the model in a with block of watch() to see the values until then, or pass another batch"
    )
    narrow = torch.randn(5, 3)
    with untouched(model), pytest.raises(StepError) as raised:
        stats.values(narrow, backward=backward)
    assert str(raised.value) == message
    assert message.endswith(f"; {raised.value.remedy}")


def test_refusals():
    stats = Statistics(mlp(), (5, 4))
    watching = stats.watch()
    with watching:
        pass
    with pytest.raises(InputError, match="has been entered before"), watching:
        pass
    with pytest.raises(InputError, match="on meta"):
        Statistics(nn.Linear(2, 2, device="meta"), (1, 2)).watch()
    with pytest.raises(InputError, match="on meta"):
        Statistics(nn.Linear(2, 2, device="meta"), (1, 2)).values()
    with pytest.raises(NotLiveError):
        pickle.loads(pickle.dumps(stats)).watch()


# ---------------------------------------------------------------------------------------------- an accelerator

_WAITS = "item tolist cpu numpy __bool__ __float__ __int__ __index__ nonzero".split()


def test_an_accelerator_is_waited_for_once_per_step(monkeypatch):
    model, x = Gpt2(depth=2), ids(3)
    stats = Statistics(model, x)
    optimizer = torch.optim.AdamW(model.parameters())
    waits = []
    monkeypatch.setattr(tensor_statistics, "is_waiting", lambda device: True)
    for name in _WAITS:
        original = getattr(torch.Tensor, name)

        def counted(self, *args, name=name, original=original):
            waits.append(name)
            return original(self, *args)

        monkeypatch.setattr(torch.Tensor, name, counted)

    def step():
        model(x).sum().backward()
        optimizer.step()

    step()
    waits.clear()
    step()
    before = len(waits)  # the optimizer's own
    waits.clear()
    with stats.watch() as values:
        for number in range(1, 4):
            step()
            assert len(waits) <= number * (before + 1)
    assert len(waits) <= 3 * (before + 1)
    assert len(values.steps) == 3
    assert values.calls[0].output.std > 0
    assert values.parameters[0].update_ratio > 0


def test_bad_values_are_found_when_numbers_come_late(monkeypatch):
    monkeypatch.setattr(tensor_statistics, "is_waiting", lambda device: True)
    model = Masked()
    with watch(model, rows(3, 2)) as values:
        model(rows(3, 2))
    assert values.first_bad() is None
    model = Raises()
    stats = Statistics(model.eval(), torch.ones(2, 4))
    with pytest.raises(ValueError, match="stops at NaN"), stats.watch() as values:
        model(torch.ones(2, 4))
    assert values.first_bad().operator == "aten.sqrt"


# ------------------------------------------------------------------------------------------------ output


def test_output():
    pandas = pytest.importorskip("pandas")
    model, x = mlp(), torch.randn(5, 4)
    values = Statistics(model, x).values(x)
    assert isinstance(values.to_pandas(), pandas.DataFrame)
    kinds = {record["kind"] for record in values.to_records()}
    assert kinds == {"activation", "gradient", "weight", "parameter gradient"}
    assert "all values are finite" in str(values)
    assert "(model)" in values._repr_html_()
    again = pickle.loads(pickle.dumps(values))
    assert str(again) == str(values)
    assert repr(again.to_dict()) == repr(values.to_dict())


def test_reading_a_watch_instead_of_its_values():
    watching = Statistics(nn.Linear(4, 2), (1, 4)).watch()
    with pytest.raises(AttributeError, match=r"has no attribute 'first_bad'; write with stats\.watch\(\) as values"):
        watching.first_bad()  # type: ignore[attr-defined]


def test_a_watch_around_nothing():
    with Statistics(nn.Linear(2, 2), (1, 2)).watch() as values:
        pass
    assert str(values) == "nothing ran"
    with pytest.raises(InputError, match="nothing ran while values were watched: call the model inside"):
        values.first_bad()
