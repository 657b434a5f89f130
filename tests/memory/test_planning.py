"""Memory plans: peaks of real steps, the same bits as without a plan, and no plan where there cannot be one."""

from __future__ import annotations

import copy
import json
import pickle
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.flop_counter import FlopCounterMode

from modelsummary import InputError, Statistics, apply_checkpoint
from modelsummary.devices.target import target_of
from modelsummary.memory import planning
from modelsummary.memory.planning import Planner
from modelsummary.memory.step_options import step_plan
from tests.models import Call
from tests.untouched import untouched


class Attention(nn.Module):
    """A block of a decoder without dropout."""

    def __init__(self, width=64):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, width // 16, 16).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.silu(self.up(x)))


class Residual(nn.Module):
    """Convolutions with batch norm, and activations in place."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.norm, self.again, self.relu = nn.BatchNorm2d(16), nn.BatchNorm2d(16), nn.ReLU(inplace=True)

    def forward(self, x):
        return self.relu(self.again(self.two(self.relu(self.norm(self.one(x))))) + x)


class Shared(nn.Module):
    """One layer and its batch norm, called twice."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)

    def forward(self, x):
        for _ in range(2):
            x = torch.relu(self.norm(self.conv(x)))
        return x


class InPlace(nn.Module):
    """Writes into results, also through views, before and after dropout."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(64, 256), nn.Linear(256, 64), nn.Dropout(0.2)

    def forward(self, x):
        y = self.dropout(F.gelu(self.up(x)).mul_(2.0))
        z = torch.zeros_like(y)
        z[:, :128] += y[:, 128:]
        return x + self.dropout(self.down(z.add_(y).sigmoid()))


class Noise(nn.Module):
    """Random numbers of several kinds, as new tensors and in place."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        y = self.up(x)
        y = F.dropout(torch.tanh(y + torch.randn_like(y)))
        return x + self.down(F.rrelu(y * torch.rand_like(y), training=True))


def images(block):
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), *(block() for _ in range(4)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)
    )


def frozen():
    model = nn.Sequential(*(Attention() for _ in range(5)), nn.Linear(64, 100))
    model[:2].requires_grad_(False)
    return model


class Adapted(nn.Module):
    """A frozen linear layer with a trained adapter of low rank, as of LoRA."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, 4, bias=False), nn.Linear(4, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + 2.0 * self.up(self.down(x))


def adapted(count=5):
    """Return a frozen decoder with adapters in its attention."""
    model = nn.Sequential(nn.Linear(64, 64), *(Attention() for _ in range(count)), nn.Linear(64, 100))
    model.requires_grad_(False)
    for block in model[1:-1]:
        block.qkv, block.out = Adapted(block.qkv), Adapted(block.out)
    return model


MODELS = {
    "adapters": (adapted, (8, 64, 64)),
    "decoder": (lambda: nn.Sequential(*(Attention() for _ in range(5)), nn.Linear(64, 100)), (8, 64, 64)),
    "encoder with dropout": (
        lambda: nn.Sequential(*(nn.TransformerEncoderLayer(64, 4, 256, batch_first=True) for _ in range(3))),
        (8, 64, 64),
    ),
    "frozen": (frozen, (8, 64, 64)),
    "batch norm": (lambda: images(Residual), (8, 3, 32, 32)),
    "shared": (lambda: images(Shared), (8, 3, 32, 32)),
    "in place": (lambda: nn.Sequential(*(InPlace() for _ in range(4))), (256, 64)),
    "noise": (lambda: nn.Sequential(*(Noise() for _ in range(4))), (256, 64)),
}


def bits(model, x, autocast=None):
    """Return the results of a step: output, gradients, buffers, and the state of the generator after it."""
    torch.manual_seed(7)
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        output = model(x)
    output.float().square().mean().backward()
    return [
        output,
        *(p.grad for p in model.parameters() if p.grad is not None),
        *model.buffers(),
        torch.get_rng_state(),
    ]


def assert_same(model, plan, x, **options):
    planned, plain = copy.deepcopy(model), copy.deepcopy(model)
    applied = plan.apply(planned)
    for _ in range(2):
        planned.zero_grad()
        plain.zero_grad()
        assert all(map(torch.equal, bits(planned, x, **options), bits(plain, x, **options)))
    applied.undo()
    with untouched(planned):
        assert not any("forward" in vars(module) for module in planned.modules())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("share", [0.9, 0.75])
def test_planned_steps(name, share):
    make, size = MODELS[name]
    torch.manual_seed(0)
    model, x = make(), torch.randn(size)
    stats = Statistics(model, x)
    budget = int(share * stats.memory().peak)
    if (name, share) in (("batch norm", 0.75), ("shared", 0.75)):  # the results of batch norm have to be kept
        with pytest.raises(InputError, match="is too little: with all 4 blocks recomputed") as refused:
            stats.memory_plan(budget)
        whole = stats.memory(checkpoint="every").peak
        assert f"granularity='block' takes {whole:,} bytes, but what changes the model" in str(refused.value)
        assert stats.memory_plan(whole, granularity="block").peak <= whole < budget
        return
    with untouched(model):
        plan = stats.memory_plan(budget, by="macs")
    assert plan.peak <= budget < plan.peak_without
    memory = stats.memory(checkpoint=plan.checkpoint)
    assert (memory.peak, memory.recomputed_macs) == (plan.peak, plan.recomputed_macs)
    if name not in ("batch norm", "shared"):  # convolutions have workspaces, which were not measured
        assert stats.measure_memory(checkpoint=plan.checkpoint).peak == pytest.approx(plan.peak, rel=0.005)
    assert_same(model, plan, x)


def test_whole_blocks_update_batch_norm_twice():
    """Why the results of batch norm are kept; torch's checkpoints of whole modules run it again."""
    torch.manual_seed(0)
    model, x = images(Residual), torch.randn(8, 3, 32, 32)
    stats = Statistics(model, x)
    plan = stats.suggest_checkpoint(int(0.8 * stats.memory().peak))
    with plan.apply(model):
        model(x).sum().backward()
    counts = [model.get_submodule(f"{fqn}.norm").num_batches_tracked.item() for fqn in ("1", "2", "3", "4")]
    assert max(counts) == 2


def test_autocast():
    torch.manual_seed(0)
    model, x = MODELS["decoder"][0](), torch.randn(8, 64, 64)
    stats = Statistics(model, x)
    budget = int(0.8 * stats.memory(autocast=torch.bfloat16).peak)
    plan = stats.memory_plan(budget, autocast=torch.bfloat16)
    assert plan.kept
    assert_same(model, plan, x, autocast=torch.bfloat16)


def planner(stats, granularity, device="A100", link=None):
    step = step_plan("train", {"device": "cuda"}, stats.root)
    return Planner(stats._live, stats.root, step, target_of(device), granularity, lambda: None, link)


def large(count=4):
    """Return statistics of a decoder whose kernels take longer than their dispatch on an A100."""
    with torch.device("meta"):
        return Statistics(nn.Sequential(*(Attention(512) for _ in range(count))), torch.empty(32, 1024, 512))


def test_monotonic_and_better_than_whole_blocks():
    stats = large()
    plain = stats.memory(device="cuda").peak
    finer, whole = planner(stats, "operator"), planner(stats, "block")
    budgets = [int(plain * (0.55 + 0.06 * step)) for step in range(8)]
    plans = [finer.plan(budget) for budget in budgets]
    seconds = [plan.seconds for plan in plans]
    assert seconds == sorted(seconds, reverse=True)
    assert all(plan.peak <= budget for plan, budget in zip(plans, budgets, strict=True))
    blocks = [whole.plan(budget).seconds for budget in budgets]
    assert all(operators <= block for operators, block in zip(seconds, blocks, strict=True))
    assert sum(seconds) < 0.75 * sum(blocks)


def test_a_search_returns_the_cheapest_plan_that_fits(monkeypatch):
    stats = large()
    plain = stats.memory(device="cuda").peak
    first = planner(stats, "operator").plan(int(0.8 * plain))
    monkeypatch.setattr("modelsummary.memory.planning._INTERVALS", 5)  # targets are further apart than plans
    search = planner(stats, "operator")
    simulate = search._simulate

    def far_from_predicted(step, chosen):
        trace, estimate = simulate(step, chosen)
        more = -plain // 50 if chosen.kept == first.checkpoint else plain // 10
        return trace, replace(estimate, peak=estimate.peak + more)

    monkeypatch.setattr(search, "_simulate", far_from_predicted)
    plan = search.plan(int(0.8 * plain))
    assert len(search._simulated) > 2  # tighter plans were simulated, too
    assert (plan.checkpoint, plan.seconds) == (first.checkpoint, first.seconds)


def test_curve():
    stats = large()
    curve = stats.memory_curve(6, device="A100")
    assert (curve[0].fqns, curve[0].seconds) == ((), 0)
    peaks, seconds = [plan.peak for plan in curve], [plan.seconds for plan in curve]
    assert len(curve) > 3
    assert peaks == sorted(set(peaks), reverse=True)
    assert seconds == sorted(set(seconds))
    middle = curve[2]
    assert stats.memory(checkpoint=middle.checkpoint, device="cuda").peak == middle.peak
    assert stats.memory_plan(middle.peak, device="A100").seconds <= middle.seconds
    assert len(str(curve).splitlines()) == len(curve) + 3  # the case, where its times are from, titles
    assert [record["peak"] for record in curve.to_records()] == peaks
    with pytest.raises(InputError, match="points must be an integer >= 2, got 1"):
        stats.memory_curve(1)
    pytest.importorskip("matplotlib").use("agg")
    axes = curve.plot()
    assert list(axes.lines[0].get_ydata()) == seconds


class Biased(nn.Module):
    """A block that adds to its scores what all blocks of a stack get, as layers of T5 do."""

    def __init__(self, width=32):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, bias):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.out((q @ k.mT + bias).softmax(-1) @ v)


class Stacks(nn.Module):
    """Two stacks, of which each makes a bias for its blocks."""

    def __init__(self, count=6):
        super().__init__()
        self.first = nn.ModuleList(Biased() for _ in range(count))
        self.second = nn.ModuleList(Biased() for _ in range(count))

    def forward(self, x):
        for stack in (self.first, self.second):
            bias = x.detach() @ x.detach().mT
            for block in stack:
                x = block(x, bias)
        return x


@pytest.mark.parametrize("granularity", ["operator", "block"])
def test_inputs_that_several_blocks_keep_count_once(granularity):
    """A plan for the peak of another plan takes no longer, as the budget has room for that one."""
    stats = Statistics(Stacks(), (16, 64, 32))
    curve = stats.memory_curve(8, granularity=granularity)
    assert len(curve) > 4
    for plan in curve:
        assert stats.memory_plan(plan.peak, granularity=granularity).cost <= plan.cost


def test_seconds_are_the_kernels_that_run_again():
    stats = large()
    budget = int(0.7 * stats.memory(device="cuda").peak)
    plan = stats.memory_plan(budget, device="A100")
    plain, again = (
        stats.estimate_latency("A100", backward=True, **options) for options in ({}, {"checkpoint": plan.checkpoint})
    )
    assert plan.device == "A100 80GB"
    assert again.limited_by == plain.limited_by == "device"
    assert 1e-3 * (again - plain) == pytest.approx(plan.seconds, rel=0.02)
    assert f"on A100 80GB: {1e3 * plan.seconds:.2f} ms" in str(plan)


def test_recomputed_macs_are_what_a_real_step_does_again():
    """A checkpoint stops early: the last product of a block is not run again."""
    torch.manual_seed(0)
    model, x = MODELS["in place"][0](), torch.randn(256, 64)  # torch's counter does not know attention on the CPU
    stats = Statistics(model, x)
    plan = stats.memory_plan(int(0.55 * stats.memory().peak))
    flops = []
    for checkpoint in ({}, plan.checkpoint, ["0", "1"]):
        with FlopCounterMode(display=False) as counter, apply_checkpoint(model, checkpoint):
            model(x).sum().backward()
        flops.append(counter.get_total_flops())
    assert 2 * plan.recomputed_macs == flops[1] - flops[0] > 0
    assert 2 * stats.memory(checkpoint=["0", "1"]).recomputed_macs == flops[2] - flops[0]


class Stream(nn.Module):
    """Writes into its input, which a checkpoint around it would have kept."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x.add_(self.down(F.gelu(self.up(x.clone()))))


def test_a_stream_that_is_written_in_place():
    model = nn.Sequential(nn.Linear(64, 64), *(Stream() for _ in range(3)), nn.Linear(64, 8))
    stats = Statistics(model, (64, 64))
    for granularity in ("operator", "block"):
        with untouched(model), pytest.raises(InputError, match=r"with 0 of 3 blocks recomputed .* '1' .* in.?place"):
            stats.memory_plan(int(0.9 * stats.memory().peak), granularity=granularity)


class Checkpointed(nn.Module):
    """A block with a checkpoint of its own."""

    def __init__(self):
        super().__init__()
        self.inner = Attention()

    def forward(self, x):
        return torch_checkpoint.checkpoint(self.inner, x, use_reentrant=False)


def test_why_nothing_can_be_recomputed():
    frozen = nn.Sequential(*(Attention().requires_grad_(False) for _ in range(3)), nn.Linear(64, 8))
    for model, reason in [
        (
            nn.Sequential(*(Checkpointed() for _ in range(3)), nn.Linear(64, 8)),
            "as the model has checkpoints of its own;",
        ),
        (
            frozen,
            "as '0' has no backward, as neither its parameters nor its input need a gradient; pass a larger budget",
        ),
    ]:
        stats = Statistics(model, (8, 64, 64))
        with untouched(model), pytest.raises(InputError, match=f"with 0 of 3 blocks recomputed .* bytes, {reason}"):
            stats.memory_plan(int(0.9 * stats.memory().peak))


def test_a_frozen_block_is_no_reason_why_others_free_too_little():
    model = frozen()
    stats = Statistics(model, (8, 64, 64))
    with (
        untouched(model),
        pytest.raises(InputError, match=r"with 3 of 5 .* takes .* bytes; '0' has no backward, as"),
    ):
        stats.memory_plan(int(0.3 * stats.memory().peak))


@pytest.mark.parametrize("name", ["decoder", "adapters", "frozen", "encoder with dropout", "in place", "noise"])
@pytest.mark.parametrize("device", [None, "A100"])
def test_predicted_figures_are_the_simulated_ones(name, device):
    """So a plan takes one simulated step, and a curve two, whatever the number of blocks."""
    make, size = MODELS[name]
    stats = Statistics(make(), size)
    plain = stats.memory(device=device and "cuda", optimizer="adamw").peak
    step = step_plan("train", {"device": device and "cuda", "optimizer": "adamw"}, stats.root)
    steps = []
    planner = Planner(stats._live, stats.root, step, device and target_of(device), "operator", lambda: steps.append(1))
    before = len(steps)
    # of the bytes without the workspaces of cuBLAS, which no plan lowers
    nbytes = stats.memory(device=device and "cuda", optimizer="adamw", workspaces=False).peak
    for share in (0.02, 0.04, 0.06, 0.08):
        budget = plain - int(share * nbytes)
        plan = planner.plan(budget)
        assert plan.fqns
        assert plan.peak <= budget
    assert len(steps) - before <= 4
    del steps[:]
    curve = planner.curve(12)
    assert len(steps) <= 2 < len(curve)
    for plan in curve:
        memory = stats.memory(checkpoint=plan.checkpoint, device=device and "cuda", optimizer="adamw")
        assert (memory.peak, memory.recomputed_macs) == (plan.peak, plan.recomputed_macs)


@pytest.mark.parametrize("name", ["decoder", "frozen", "encoder with dropout", "batch norm", "stacks"])
def test_one_step_shows_what_each_kind_of_block_does_alone(name, monkeypatch):
    """A step in which all kinds of blocks run again shows the same figures as a step for each kind."""
    make, size = {**MODELS, "stacks": (Stacks, (16, 64, 32))}[name]
    stats = Statistics(make(), size)
    step = step_plan("train", {"optimizer": "adamw"}, stats.root)
    together, alone = [], []
    at_once = Planner(stats._live, stats.root, step, None, "operator", lambda: together.append(1))
    tell_apart = planning.reruns_of
    monkeypatch.setattr(
        "modelsummary.memory.planning.reruns_of",
        lambda *steps: tell_apart(*steps) if len(steps[-1]) == 1 else None,
    )
    one_by_one = Planner(stats._live, stats.root, step, None, "operator", lambda: alone.append(1))
    assert len(together) == 2  # without checkpoints, and with all of them
    assert name == "batch norm" or len(alone) > 3
    assert [block.ways for block in at_once._blocks.values()] == [block.ways for block in one_by_one._blocks.values()]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft asks transformers under a former name
def test_adapters_of_peft():
    """The input of the first block needs no gradient, so it is not like the others; the embedding is frozen."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=4, vocab_size=100, **sizes))
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))
    tokens = torch.randint(100, (4, 64))
    stats = Statistics(model, input_data={"input_ids": tokens, "labels": tokens})
    budget = int(0.7 * stats.memory(optimizer="adamw").peak)
    with untouched(model):
        plan = stats.memory_plan(budget, optimizer="adamw")
    memory = stats.memory(checkpoint=plan.checkpoint, optimizer="adamw")
    assert (memory.peak, memory.recomputed_macs) == (plan.peak, plan.recomputed_macs)
    assert plan.peak <= budget
    steps = []
    for applied in (False, True):
        with plan.apply(model) if applied else nullcontext():
            torch.manual_seed(0)
            loss = model(input_ids=tokens, labels=tokens).loss
            model.zero_grad()
            loss.backward()
        steps.append([loss, *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    assert len(steps[0]) == 1 + 4 * 4
    assert all(map(torch.equal, *steps))


def test_one_block_called_several_times():
    torch.manual_seed(0)
    model = Call(lambda self, x: self.layers[0](self.layers[0](self.layers[0](x))), layers=nn.ModuleList([Attention()]))
    x = torch.randn(8, 64, 64)
    stats = Statistics(model, x)
    plan = stats.memory_plan(int(0.8 * stats.memory().peak))
    assert plan.fqns == ("layers.0",)
    assert_same(model, plan, x)


def test_code():
    torch.manual_seed(0)
    model, x = MODELS["in place"][0](), torch.randn(256, 64)
    stats = Statistics(model, x)
    plan = stats.memory_plan(int(0.6 * stats.memory().peak))
    by_code, applied = copy.deepcopy(model), copy.deepcopy(model)
    exec(plan.to_code(), {"model": by_code})
    plan.apply(applied)
    assert all(map(torch.equal, bits(by_code, x), bits(applied, x)))
    restored = pickle.loads(pickle.dumps(applied))
    restored.zero_grad()
    applied.zero_grad()
    assert all(map(torch.equal, bits(restored, x), bits(applied, x)))
    assert json.loads(json.dumps(plan.to_dict()))["kept"] == {fqn: list(names) for fqn, names in plan.kept.items()}
    assert f"Kept in {', '.join(plan.kept)}" in str(plan) or len(set(plan.kept.values())) > 1


def test_a_failing_step_leaves_the_plan_applied():
    model = nn.Sequential(*(Attention() for _ in range(2)))
    applied = apply_checkpoint(model, {"0": ["aten.addmm.default#0"]})
    with pytest.raises(RuntimeError), applied:
        model(torch.randn(1, 2, 63))
    assert not any("forward" in vars(module) for module in model.modules())
    applied.undo()


def test_names_of_results_that_no_operator_makes():
    model = nn.Sequential(*(Attention() for _ in range(2)))
    stats = Statistics(model, (2, 8, 64))
    assert stats.memory(checkpoint={"0": ["aten.addmm.default#3"]}).peak > 0
    for name, message in [
        ("aten.addmm.default#4", "keeps 'aten.addmm.default#4' in '0', which calls aten.addmm.default 4 times"),
        ("aten.mm.default#0", "which calls aten.mm.default 0 times; names hold for the device, dtypes and sizes"),
    ]:
        for method in (stats.memory, stats.estimate_latency):
            options = {} if method == stats.memory else {"device": "A100", "backward": True}
            with untouched(model), pytest.raises(InputError, match=message):
                method(checkpoint={"0": [name]}, **options)
    for names in (["aten.nonsense.default#0"], ["aten.addmm.default"], "aten.addmm.default#0", [1]):
        with (
            untouched(model),
            pytest.raises(InputError, match="in '0', which names no operator of torch and the number"),
        ):
            apply_checkpoint(model, {"0": names})


def test_a_block_that_the_step_does_not_call():
    def forward(self, x):
        for block in self.blocks[: 3 if torch.is_grad_enabled() else 4]:
            x = block(x)
        return x

    model = Call(forward, blocks=nn.ModuleList(Attention() for _ in range(4)))
    stats = Statistics(model, (8, 64, 64))
    plain = stats.memory().peak
    with untouched(model):
        plan = stats.memory_plan(int(0.8 * plain))
    assert plan.peak <= 0.8 * plain
    assert set(plan.fqns) <= {"blocks.0", "blocks.1", "blocks.2"}


def test_a_model_without_blocks():
    stats = Statistics(nn.Linear(64, 64), (8, 64))
    with pytest.raises(InputError, match=r"^budget_bytes=1,000 is too little: a step takes .*, and the model has no"):
        stats.memory_plan(1000)


def test_refusals():
    stats = Statistics(nn.Sequential(*(Attention() for _ in range(2))), (2, 8, 64))
    for options, message in [
        ({"granularity": "layer"}, "granularity must be 'operator' or 'block', got 'layer'"),
        ({"by": "time"}, "by must be 'latency', predicted for the device, or 'macs', got 'time'"),
        ({"checkpoint": ["0"]}, "a memory plan chooses the modules to recompute; leave out checkpoint="),
        ({"device": "A1OO"}, "no accelerator 'A1OO' in the table"),
        ({"budget": 1}, "unknown option 'budget' of a step"),
    ]:
        with pytest.raises(InputError, match=message):
            stats.memory_plan(10**6, **options)
    with pytest.raises(InputError, match="budget_bytes=1,000 is too little"):
        stats.memory_plan(1000)


def test_a_step_that_fits_is_not_searched(monkeypatch):
    make, size = MODELS["decoder"]
    stats = Statistics(make(), size)
    peak = stats.memory(device="cuda").peak
    monkeypatch.setattr(planning, "Planner", None)
    plan = stats.memory_plan(peak, device="A100")
    assert (plan.fqns, plan.peak, plan.recomputed_macs, plan.seconds) == ((), peak, 0, 0.0)
