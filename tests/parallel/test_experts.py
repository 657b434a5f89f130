"""Experts that are divided by their number: stacked in parameters, and lists of modules."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from modelsummary import InputError, Statistics
from modelsummary.parallel import ParallelPlan
from modelsummary.parallel.applied_rank import rank_of, sharded_copy
from tests.parallel import mixtures, processes
from tests.parallel.expert_models import LoopExperts, LoopStacked, MixtralList, Residual, SharedStacked
from tests.parallel.models import Experts, make


def plan_of(name: str, **sizes: int) -> ParallelPlan:
    model, inputs = make(name)
    return Statistics(model, inputs).parallel_plan(**sizes)


@pytest.fixture(scope="module")
def stacked():
    return plan_of("mixture", expert=2, dispatch="all_reduce")


@pytest.fixture(scope="module")
def listed():
    return plan_of("list", expert=2, dispatch="all_reduce")


def test_stacked_experts_by_number(stacked):
    (layer,) = stacked.layers
    assert (layer.fqn, layer.style, layer.mesh) == ("mixture.experts", "ExpertParallel", "expert")
    names = ("gate_up", "gate_up_bias", "down", "down_bias")
    assert layer.shards == dict.fromkeys(names, 0)
    # The forward takes tokens, numbers of experts, and weights; the numbers have no gradient.
    assert layer.options == {"shards": dict.fromkeys(names, "Shard(0)"), "shared": (), "summed": (0, 2)}
    assert layer.params == 2 * (16 * 16 + 16 + 16 * 8 + 16)
    assert stacked.attributes == ()  # the forward sees the numbers of the whole mixture
    # 4 x 8 tokens of 16 features, and two weights for each, in float64.
    assert stacked.collectives == {
        ("forward", "all_reduce"): (1, 32 * 16 * 8),
        ("backward", "all_reduce"): (2, 32 * 16 * 8 + 32 * 2 * 8),
    }
    assert stacked.params_per_rank == stacked.params - layer.params
    assert stacked.mesh_shape == {"expert": 2}


def test_ranks_of_experts_have_the_same_tokens(stacked):
    """``cluster.Plan`` sends tokens to experts of other ranks by default: see ``test_dispatch``."""
    assert plan_of("mixture", expert=2) == stacked
    with pytest.raises(InputError, match="dispatch must be one of 'all_to_all', 'all_reduce', got 'all_gather'"):
        plan_of("mixture", dispatch="all_gather")
    assert plan_of("mixture", tensor=2, dispatch="all_to_all") == plan_of("mixture", tensor=2)


def test_parameters_that_experts_share():
    (layer,) = plan_of("shared", expert=2, dispatch="all_reduce").layers
    assert layer.options["shared"] == ("norm.weight",)
    assert layer.shards["norm.weight"] is None
    assert layer.params == 2 * (16 * 16 + 16 + 16 * 8 + 16) + 16


def test_experts_in_a_list(listed):
    (layer,) = listed.layers
    assert (layer.fqn, layer.style, layer.options) == ("blocks.1.mlp.experts", "ExpertListParallel", {"width": 16})
    expert = 3 * 16 * 32 + 32 + 32 + 16
    assert layer.params == 2 * expert
    assert listed.params - listed.params_per_rank == 2 * expert
    # Each of 32 tokens goes to two experts.
    (count, nbytes) = listed.collectives["forward", "all_reduce"]
    assert nbytes == 2 * 32 * 16 * 8
    assert count <= 4
    assert listed.collectives["backward", "all_reduce"] == (count, nbytes)


def test_the_table_and_the_code(stacked, listed):
    assert "mixture.experts  ExpertParallel" in str(stacked)
    assert "Expert parallel, forward: 1 x all_reduce, 4.1 kB" in str(stacked)
    for plan in (stacked, listed):
        code = plan.to_code()
        compile(code, "plan", "exec")
        assert "modelsummary" not in code
        assert ParallelPlan.from_json(plan.to_json()) == plan.without_model()


def test_the_memory_of_a_rank(stacked):
    whole = Statistics(*make("mixture")).memory(optimizer="adamw")
    saved = 4 * (16 * 16 + 16 + 16 * 8 + 16) // 2 * 8
    found = stacked.memory(0, optimizer="adamw")
    assert whole.params - found.params == saved
    assert whole.optimizer_state - found.optimizer_state == 2 * saved


def test_a_number_of_ranks_that_does_not_divide_is_refused():
    message = r"expert=3 does not divide the 4 experts of mixture.experts; pass one of 1, 2, 4, which divide all"
    with pytest.raises(InputError, match=message):
        plan_of("mixture", expert=3, dispatch="all_reduce")
    with pytest.raises(InputError, match=r"expert=3 does not divide the 4 experts of blocks.1.mlp.experts"):
        plan_of("list", expert=3, dispatch="all_reduce")
    with pytest.raises(InputError, match="Decoder has no experts that can be divided"):
        plan_of("decoder", expert=2, dispatch="all_reduce")
    with pytest.raises(InputError, match=r"the forward of ListDecoder reads values \(where\(\) in blocks.1.mlp\)"):
        plan_of("list", tensor=2, expert=2, dispatch="all_reduce", sequence=True)


def test_experts_take_whole_sequences_that_are_gathered_before_them():
    plan = plan_of("mixture", tensor=2, expert=2, dispatch="all_reduce", sequence=True)
    layers = {(layer.fqn, layer.style): layer for layer in plan.layers}
    assert layers["mixture.experts", "ExpertParallel"].mesh == "expert"
    assert layers["mixture", "PrepareModuleInput"].options["desired_input_layouts"] == ("Replicate()",)
    assert layers["mixture", "PrepareModuleOutput"].options["desired_output_layouts"] == ("Shard(1)",)


class Around(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.gate, self.experts = nn.Linear(16, 4), experts

    def forward(self, x):
        weight, index = self.gate(x).softmax(-1).topk(2, dim=-1)
        return self.experts(x, index, weight)


class Rectified(Experts):
    """The sum over experts goes through a function that is not linear."""

    def forward(self, x, index, weight):
        return super().forward(x, index, weight).relu()


class NextBias(Experts):
    """Each expert adds the bias of the next one."""

    def forward(self, x, index, weight):
        y = torch.einsum("td,tkod->tko", x, self.gate_up[index]) + self.gate_up_bias[(index + 1) % self.n]
        return torch.einsum("tko,tk->to", torch.tanh(y), weight)


class Maximum(Experts):
    """Only the largest result of all experts counts."""

    def forward(self, x, index, weight):
        y = torch.einsum("td,eod->teo", x, self.gate_up) * weight.sum() + index.sum()
        return y.amax(1)


class Kept(Experts):
    """Results stay in an attribute."""

    def forward(self, x, index, weight):
        self.last = super().forward(x, index, weight)
        return self.last * 1


class Reads(Experts):
    """What an expert makes decides what is computed."""

    def forward(self, x, index, weight):
        y = super().forward(x, index, weight)
        return y if bool(y.sum()) else -y


class Hidden(Experts):
    """The backward of a function is not that of torch."""

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(_ctx, x):
            return x * 2

        @staticmethod
        def backward(_ctx, gradient):
            return gradient.flip(0) * 2

    def forward(self, x, index, weight):
        y = self.Doubled.apply(torch.einsum("td,tkod->tko", x, self.gate_up[index]))
        return torch.einsum("tko,tk->to", y, weight)


@pytest.mark.parametrize(
    ("experts", "reason"),
    [
        (Rectified, "relu() takes a sum over the ranks; functions that are linear in it work"),
        (Maximum, "amax() works along the experts, or tokens of several experts; other dimensions work"),
        (Kept, "keeps results of experts in an attribute; returning them works"),
        (Reads, "item() reads values of a part of the experts"),
        (Hidden, "a tensor that a compiled or custom function made; functions of torch can be followed"),
    ],
    ids=["rectified", "maximum", "kept", "reads", "hidden"],
)
def test_what_is_not_a_sum_over_experts_is_refused(experts, reason):
    with pytest.raises(InputError, match="has no experts that can be divided") as refused:
        Statistics(Around(experts(4, 16, 8)), torch.randn(6, 16)).parallel_plan(expert=2, dispatch="all_reduce")
    assert reason in str(refused.value)


def test_a_parameter_that_cannot_be_divided_stays_whole():
    (layer,) = (
        Statistics(Around(NextBias(4, 16, 8)), torch.randn(6, 16)).parallel_plan(expert=2, dispatch="all_reduce").layers
    )
    assert layer.shards == {"gate_up": 0, "gate_up_bias": None, "down": 0, "down_bias": 0}


def _differences(_rank, _n, names, sizes, clips=True):
    """Largest difference of results, losses, gradients and parameters after a step, for each mixture."""
    found = {}
    for name in names:
        torch.manual_seed(3)
        dtype = torch.float32 if name in mixtures.GROUPED else torch.float64
        model = (mixtures.MIXTURES | mixtures.GROUPED)[name]().to(dtype)
        x = torch.randn(3, 5, mixtures.DIM, dtype=dtype)
        whole, model = processes.copies(model)
        plan = Statistics(model, (x,)).parallel_plan(**sizes)
        plan.apply(model, plan.device_mesh("cpu"))
        found[name] = max(processes.compare(whole, model, (x,)).values())
        if clips:
            parts = [nn.utils.clip_grad_norm_(each.parameters(), 1.0) for each in (whole, model)]
            found[name] = max(found[name], processes.difference(*map(processes.whole, parts)))
    return found


def _check(results):
    for found in results:
        wrong = {name: worst for name, worst in found.items() if worst > (1e-5 if name in mixtures.GROUPED else 1e-9)}
        assert wrong == {}


def test_a_few_mixtures_over_two_processes():
    names = ("ScaleBuffer", "GptFast", "Switch", "Titan", "Skips")
    _check(processes.run(_differences, 2, names, {"expert": 2, "dispatch": "all_reduce"}))


@pytest.mark.slow
@pytest.mark.parametrize("number", [2, 4])
def test_mixtures_over_processes(number):
    # Before torch 2.15, the grouped product takes float32 on the CPU, but not on meta: such a plan is refused.
    names = [*mixtures.MIXTURES, *(mixtures.GROUPED if torch.__version__ >= "2.15" else ())]
    _check(processes.run(_differences, number, names, {"expert": number}))


def test_products_of_einsum_are_split_by_the_width_of_experts():
    x = torch.randn(15, mixtures.DIM)
    (layer,) = Statistics(mixtures.MIXTURES["GptFast"](), (x,)).parallel_plan(tensor=2).layers[-1:]
    assert (layer.style, layer.shards) == ("LocalParallel", {"w1": 1, "w3": 1, "w2": 2})


def test_experts_in_a_loop_are_split_by_their_width():
    (layer,) = Statistics(mixtures.MIXTURES["BiasRows"](), torch.randn(15, mixtures.DIM)).parallel_plan(tensor=2).layers
    assert layer.shards == {"up": 2, "down": 1, "bias": None}
    _check(processes.run(_differences, 2, ["BiasRows", "Threshold"], {"tensor": 2}))
    with pytest.raises(InputError, match="tensor=2: no layer of Routed can be split"):  # biases in a list of their own
        Statistics(mixtures.MIXTURES["BiasList"](), torch.randn(15, mixtures.DIM)).parallel_plan(tensor=2)


@pytest.mark.slow
def test_experts_by_number_and_by_width_over_processes():
    names = ["GptFast", "Clamped", "AllGathered", "AllThenChosen", "Outside", "ScaleBuffer", "NumberFactor", "BiasRows"]
    _check(processes.run(_differences, 2, names, {"tensor": 2}))
    _check(processes.run(_differences, 4, names[:2], {"tensor": 2, "expert": 2, "dispatch": "all_reduce"}, False))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("NextExpert", "matmul() takes results of different experts; results of the same experts work"),
        ("FlatRows", "tanh() takes a sum over the ranks; functions that are linear in it work"),
    ],
)
def test_mixtures_that_are_refused(name, reason):
    with pytest.raises(InputError, match=re.escape(reason)):
        Statistics(mixtures.REFUSED[name](), torch.randn(15, mixtures.DIM)).parallel_plan(
            expert=2, dispatch="all_reduce"
        )


def test_a_list_of_experts_and_another_module_is_refused_with_that_module():
    model = mixtures.Listed()
    with pytest.raises(InputError, match=r"experts: experts.drop differs from the experts of experts; a list"):
        Statistics(model, torch.randn(15, mixtures.DIM)).parallel_plan(expert=2, dispatch="all_reduce")


class Dropped(nn.Sequential):
    """An expert that draws masks: by a layer, and by a function."""

    def __init__(self, width):
        super().__init__(nn.Linear(width, 24), nn.Dropout(0.3), nn.Linear(24, width))

    def forward(self, x):
        return F.dropout(super().forward(x), 0.3, self.training)


class DroppedStacked(LoopExperts):
    """Stacked experts that draw masks: by a layer, and by a function."""

    def __init__(self, width):
        super().__init__(width)
        self.drop = nn.Dropout(0.3)

    def forward(self, x, chosen, weight):
        out = torch.zeros_like(x)
        for number in range(self.number):
            rows, place = torch.where(chosen == number)
            y = self.drop(F.relu(x[rows] @ self.up[number])) @ self.down[number]
            out = out.index_add(0, rows, F.dropout(y, 0.3, self.training) * weight[rows, place, None])
        return out


def draws_apart(expert):
    """Let an expert draw from generators of its own, which begin behind a mask for what it takes."""
    forward = expert.forward

    def apart(x):
        F.dropout(x.detach())
        with torch.random.fork_rng(devices=[]):
            return forward(x)

    expert.forward = apart


def _masked(_rank, _n, kind):
    """Largest difference of results and gradients in training from one process, and what is drawn afterwards."""
    torch.manual_seed(1)
    model, x = Residual(LoopStacked if kind == "stacked" else MixtralList), torch.randn(2, 6, 16, dtype=torch.float64)
    if kind == "stacked":
        model.mixture.experts = DroppedStacked(16)
    else:
        model.mixture.experts = nn.ModuleList(Dropped(16) for _ in range(4))
    whole, model = processes.copies(model.double().train())
    for expert in whole.mixture.experts if kind == "list" else ():
        draws_apart(expert)
    plan = Statistics(model.train(kind == "stacked"), x).parallel_plan(expert=2, dispatch="all_reduce")
    plan.apply(model, plan.device_mesh("cpu"))
    torch.manual_seed(7)
    result = whole(x) + F.dropout(x)[..., :4]
    result.square().sum().backward()
    torch.manual_seed(7)
    other = model.train()(x) + F.dropout(x)[..., :4]
    other.square().sum().backward()
    gradients = dict(whole.named_parameters())
    pairs = [(gradients[name].grad, processes.whole(each.grad)) for name, each in model.named_parameters()]
    return max(processes.difference(*pair) for pair in [(result, other), *pairs]), torch.rand(1).item()


@pytest.mark.parametrize("kind", ["stacked", "list"])
def test_experts_draw_masks_and_all_ranks_go_on_alike(kind):
    (one, drawn), (other, drawn_elsewhere) = processes.run(_masked, 2, kind)
    assert max(one, other) <= 1e-12
    assert drawn == drawn_elsewhere


def test_an_expert_that_raises_gives_the_generators_back():
    """Otherwise the ranks would draw different numbers in the steps after it."""

    def failing(_x):
        raise RuntimeError(f"with {torch.rand(1).item()}")

    model = Residual(MixtralList)
    model.mixture.experts = nn.ModuleList(Dropped(16) for _ in range(4))
    plan = Statistics(model, torch.randn(2, 6, 16)).parallel_plan(expert=2, dispatch="all_reduce")
    with rank_of(plan, 0, 2, "a rank"), sharded_copy(plan, model, None) as (twin, _):
        twin.mixture.experts[0].forward = failing
        before = torch.get_rng_state()
        with pytest.raises(RuntimeError, match="with"):
            twin.mixture.experts[0](torch.ones(2, 16, device="meta"))
        assert torch.equal(torch.get_rng_state(), before)


def test_layers_that_stacked_experts_hold_are_whole():
    model = nn.Sequential(SharedStacked(16), nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)))
    plan = Statistics(model, torch.randn(2, 6, 16)).parallel_plan(expert=2, dispatch="all_reduce", tensor=2)
    assert [(layer.fqn, layer.mesh) for layer in plan.layers] == [("0", "expert"), ("1.0", "tensor"), ("1.2", "tensor")]
    reason = "0 holds it, whose experts are divided; a layer beside them can be split"
    assert {plan.replicated[f"0.{name}.0"] for name in ("written", "added")} == {reason}


def test_layers_of_a_stack_are_not_experts():
    with pytest.raises(InputError, match="Sequential has no experts that can be divided"):
        Statistics(nn.Sequential(nn.ModuleList([nn.Linear(4, 4)] * 2)[0], nn.Softmax(-1)), (2, 4)).parallel_plan(
            expert=2, dispatch="all_reduce"
        )


def test_embeddings_of_positions_are_not_experts():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.positions = nn.Embedding(8, 4), nn.Parameter(torch.zeros(1, 6, 4))

        def forward(self, ids):
            return self.embed(ids) + self.positions[:, : ids.shape[1]]

    with pytest.raises(InputError, match=r"Positions has no experts that can be divided; leave expert out$"):
        Statistics(Positions(), (2, 3), dtypes=torch.long).parallel_plan(expert=2, dispatch="all_reduce")


def test_the_width_of_experts_in_a_list():
    plan = plan_of("list", tensor=2)  # which tokens go to an expert depends on values: the forward runs on real data
    found = {layer.fqn: layer for layer in plan.layers}
    for number in range(4):
        names = [f"blocks.1.mlp.experts.{number}.{name}" for name in ("w1", "w3", "w2")]
        assert [found[name].role for name in names] == ["column", "column", "row"]
        assert found[names[0]].options == {}
    # The attention reads sizes, which may be sizes of shards: its activations are whole.
    assert found["blocks.1.attention.wq"].options == {"output_layouts": "Replicate()"}


def test_an_expert_without_tokens_is_split_like_the_others():
    model, _ = make("list")
    plan = Statistics(model, torch.zeros(1, 1, dtype=torch.long)).parallel_plan(tensor=2)
    found = [next(layer for layer in plan.layers if layer.fqn == f"blocks.1.mlp.experts.{n}.w2") for n in range(4)]
    assert len({(layer.style, str(layer.shards), layer.params) for layer in found}) == 1
