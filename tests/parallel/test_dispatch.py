"""Ranks with tokens of their own, which they send to each other's experts: processes equal one process in float64."""

from __future__ import annotations

import copy
import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from modelsummary import InputError, Statistics
from modelsummary.parallel import ParallelPlan
from modelsummary.parallel.expert_check import _FirstExperts
from tests.parallel import collectives, mixtures, processes
from tests.parallel.expert_models import DenseList, MixtralList, Residual
from tests.parallel.models import make
from tests.untouched import untouched

SENT = {"dispatch": "all_to_all"}
ROWS = 4 * 8 * 2 * 16 * 8  # bytes: a row of 16 features in float64 for each of 32 tokens and each of its two experts


def built(name):
    """Return a model in float64 and its inputs.

    ``"!"``: half of the tokens choose one expert, and none another one. ``"?"``: all choose experts of the first rank.
    """
    name, is_uneven, is_one_sided = name.rstrip("!?"), name.endswith("!"), name.endswith("?")
    if name in mixtures.MIXTURES:
        torch.manual_seed(3)
        return mixtures.MIXTURES[name]().double(), (torch.randn(3, 5, mixtures.DIM, dtype=torch.float64),)
    model, inputs = make(name)
    gates = [module for fqn, module in model.named_modules() if fqn.endswith("gate")] if is_uneven else []
    with torch.no_grad():
        for gate in gates:
            gate.weight[0], gate.weight[-1] = 3 * gate.weight[0].abs(), -3 * gate.weight[0].abs()
        if is_one_sided:
            model.get_parameter("mixture.gate.bias")[2:] = -1e3
    return model, inputs


def called(model, inputs):
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def batches(inputs, n):
    """Other inputs for each rank."""

    def rolled(tensor, rank):
        return tensor.roll(rank, 0) if tensor.dtype == torch.long else tensor * (1 + rank) + rank / 2

    if isinstance(inputs, dict):
        return [{name: rolled(tensor, rank) for name, tensor in inputs.items()} for rank in range(n)]
    return [tuple(rolled(tensor, rank) for tensor in inputs) for rank in range(n)]


def step(rank, n, name, sizes, *, by_code=False):
    """Return the largest difference from one process that takes all batches, and what ran and was planned."""
    model, inputs = built(name)
    whole = copy.deepcopy(model)
    plan = Statistics(model, inputs).parallel_plan(**sizes, **SENT)
    mesh = plan.device_mesh("cpu")
    planned = collectives.of_plan(plan)
    if by_code:
        namespace = {}
        exec(compile(plan.to_code(), "plan", "exec"), namespace)
        namespace["parallelize"](model, mesh)
    else:
        plan.apply(model, mesh)
    shares = batches(inputs, n)
    losses = [processes.loss_of(called(whole, share)) for share in shares]
    torch.stack(losses).mean().backward()
    with collectives.Collectives() as seen:
        loss = processes.loss_of(called(model, shares[rank]))
        seen.phase = "backward"
        loss.backward()
    parameters = dict(model.named_parameters())
    pairs = [(parameter, parameters[key]) for key, parameter in whole.named_parameters() if key in parameters]
    differences = [processes.difference(losses[rank].detach(), loss.detach())]
    assert all((one.grad is None) == (other.grad is None) for one, other in pairs)
    trained = [pair for pair in pairs if pair[0].grad is not None]
    differences += [processes.difference(one.grad, processes.whole(other.grad)) for one, other in trained]
    norms = nn.utils.clip_grad_norm_(whole.parameters(), 0.01), plan.clip_grad_norm_(model, mesh, 0.01)
    differences.append(processes.difference(*norms))
    for part in (whole, model):
        torch.optim.AdamW(part.parameters(), lr=1e-2).step()
    differences += [processes.difference(one.detach(), processes.whole(other.detach())) for one, other in pairs]
    return max(differences), seen.ran, planned


def check(results, n_rows=64):
    """Compare numbers with one process; collectives with the plan: as often, and as many bytes over all ranks.

    A plan takes the first rank, which gets what is left of rows that four experts cannot share evenly.
    """
    for worst, ran, planned in results:
        assert worst <= 1e-12
        assert {key: count for key, (count, _) in ran.items()} == {key: count for key, (count, _) in planned.items()}
    for key, (_, nbytes) in results[0][2].items() if n_rows % 4 == 0 else ():
        assert sum(ran[key][1] for _, ran, _ in results) == len(results) * nbytes


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("mixture!", {"expert": 2, "shard": 2}),
        ("mixture?", {"expert": 2, "shard": 2}),
        ("mixtral_list!", {"expert": 2, "data": 2}),
        ("shared", {"expert": 2, "data": 2}),  # a norm of all experts
        ("switch_dict", {"expert": 2, "shard": 2}),
        ("Written", {"expert": 2, "data": 2}),
    ],
)
def test_two_processes_equal_one(name, sizes):
    check(processes.run(step, 2, name, sizes), n_rows=30 if name == "Written" else 64)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        {"expert": 2, "shard": 4},
        {"expert": 2, "data": 4},
        {"expert": 4, "data": 4},
        {"expert": 2, "data": 2, "shard": 2},
        {"expert": 2, "shard": 4, "checkpoint": "every"},
    ],
)
def test_four_processes_equal_one(sizes):
    for name in ("mixture!", "mixtral_list!"):
        check(processes.run(step, 4, name, sizes))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["hf_mixtral", *(f"transformers/{name}" for name in ("qwen3_moe", "olmoe", "deepseek_v3"))]
)
def test_published_mixtures(name):
    """As they are called by default, with a cache; DeepSeek's has shared experts."""
    pytest.importorskip("transformers")
    for worst, *_ in processes.run(step, 2, name, {"expert": 2, "shard": 2}):
        assert worst <= 1e-12


@pytest.mark.slow
def test_mixtures_of_strangers():
    sent = []
    for name in mixtures.MIXTURES:
        try:
            Statistics(*built(name)).parallel_plan(expert=2, data=2, **SENT)
        except InputError:
            continue
        sent.append(name)
        assert max(worst for worst, *_ in processes.run(step, 2, name, {"expert": 2, "data": 2})) <= 1e-12
    assert len(sent) >= 15


def test_code_does_the_same():
    check(processes.run(_by_code, 2))


def _by_code(rank, n):
    return step(rank, n, "mixture", {"expert": 2, "shard": 2}, by_code=True)


@pytest.fixture(scope="module")
def plan():
    return Statistics(*make("mixture")).parallel_plan(expert=2, shard=2, **SENT)


def test_the_plan(plan):
    (layer,) = plan.layers
    assert (layer.style, layer.mesh) == ("ExpertDispatch", "expert")
    assert {name: layer.options[name] for name in ("tokens", "numbers", "weights")} == {
        "tokens": 0,
        "numbers": 1,
        "weights": 2,
    }
    assert (plan.world_size, plan.mesh_shape, plan.unit_dims) == (2, {"shard": 1, "expert": 2}, (("shard", "expert"),))
    sent = [item for item in plan.communication if item.operation == "all_to_all"]
    assert {(item.phase, item.dtype, item.count, item.nbytes) for item in sent} == {
        ("forward", "int64", 1, 4 * 8),  # how many rows go to each of four experts
        ("forward", "float64", 3, 2 * ROWS + ROWS // 16),  # rows of 16 features there and back, and their weights
        ("backward", "float64", 3, 2 * ROWS + ROWS // 16),
    }
    # Half of the experts, and half of the rows of everything else; FSDP pads rows that do not divide.
    assert plan.params_per_rank == layer.params + sum(
        -(-len(parameter) // 2) * parameter[0].numel()
        for name, parameter in make("mixture")[0].named_parameters()
        if not name.startswith("mixture.experts.")
    )
    assert ParallelPlan.from_json(plan.to_json()) == plan.without_model()
    assert "modelsummary" not in plan.to_code()


def test_a_stored_plan_with_another_dispatch(plan):
    document = json.loads(plan.to_json())
    changed = {**document, "dispatch": "all_reduce", "mesh": {"shard": 2, "expert": 2}}
    with pytest.raises(InputError, match="must be the one of its layers, got 'all_reduce' and 'ExpertDispatch'"):
        ParallelPlan.from_json(json.dumps(changed))


def test_the_memory_of_a_rank(plan):
    rank = plan.memory(0, optimizer="sgd")
    assert rank.params == plan.params_per_rank * 8


def test_ranks_that_share_experts_are_fewer():
    sizes = {"expert": 2, **SENT}
    plans = [Statistics(*make("mixture")).parallel_plan(**sizes, **ranks) for ranks in ({"data": 4}, {"shard": 8})]
    assert [plan.mesh_shape for plan in plans] == [
        {"data": 2, "shard": 1, "expert": 2},
        {"shard": 4, "expert": 2},
    ]
    assert [plan.world_size for plan in plans] == [4, 8]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({}, "needs a multiple of 2 for data, got 1: ranks of expert have tokens of their own, .* pass data=2, or"),
        ({"shard": 3}, "needs a multiple of 2 for shard, got 3"),
        ({"data": 2, "tensor": 2}, "does not apply expert=2 with dispatch='all_to_all' and tensor=2: .* pass tensor=1"),
        ({"data": 2, "pipeline": 2}, "and pipeline=2"),
    ],
)
def test_ranks_that_do_not_fit(sizes, message):
    with pytest.raises(InputError, match=message):
        Statistics(*make("mixture")).parallel_plan(expert=2, **SENT, **sizes)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Capacity", "is not the weighted sum of what its experts make of each token by itself, as with a capacity"),
        ("Normalised", "is not the weighted sum of what its experts make of each token by itself"),
        ("Penalty", "does not return a row for each token"),
        ("Titan", "expected one: the weights of these experts; a router outside of the module works"),
    ],
)
def test_experts_that_need_all_tokens(name, message):
    model, inputs = built(name)
    with untouched(model), pytest.raises(InputError, match=message):
        Statistics(model, inputs).parallel_plan(expert=2, data=2, **SENT)


class Skipping(MixtralList):
    """Experts without tokens are not called, which another rank may call."""

    def forward(self, x):
        flat = x.flatten(0, 1)
        weight, chosen = self.gate(flat).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            if len(rows):
                out = out.index_add(0, rows, expert(flat[rows]) * weight[rows, place, None])
        return out.view_as(x)


def test_a_list_whose_calls_depend_on_values():
    model = Residual(Skipping).double()
    with pytest.raises(InputError, match="an expert without tokens is not called, and its rank waits"):
        Statistics(model, torch.randn(2, 6, 16, dtype=torch.float64)).parallel_plan(expert=2, data=2, **SENT)


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.drop = nn.Linear(16, 16), nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.layer(x))


class Centred(Expert):
    """The mean over its tokens would be over the tokens of all ranks."""

    def forward(self, x):
        y = super().forward(x)
        return y - y.mean(0, keepdim=True)


class Summing(Expert):
    """It takes batch x length x features, and would get rows."""

    def forward(self, x):
        return super().forward(x).cumsum(1) if x.dim() == 3 else super().forward(x)


class Noisy(Expert):
    def forward(self, x):
        return super().forward(x) * torch.rand_like(x)


def listed(mixture, expert):
    model = Residual(mixture).double()
    model.mixture.experts = nn.ModuleList(expert() for _ in range(4)).double()
    return Statistics(model, torch.randn(2, 6, 16, dtype=torch.float64))


@pytest.mark.parametrize(
    ("mixture", "expert"),
    [(MixtralList, Centred), (DenseList, Centred), (DenseList, Summing), (MixtralList, Noisy)],
)
def test_lists_of_experts_that_need_all_tokens(mixture, expert):
    stats = listed(mixture, expert)
    with (
        untouched(stats.live.model),
        pytest.raises(InputError, match=r"experts\.0 is not what it makes of each token by"),
    ):
        stats.parallel_plan(expert=2, data=2, **SENT)


class Balancing(MixtralList):
    def forward(self, x):
        if self.gate(x.flatten(0, -2)).topk(2).indices.amax() < 2:
            raise ValueError("no token takes the last experts")
        return super().forward(x)


def test_a_forward_that_refuses_its_first_experts():
    model, inputs = Residual(Balancing).double(), torch.randn(2, 6, 16, dtype=torch.float64)
    message = "raises with all tokens at the first experts .*no token takes the last experts"
    with untouched(model), pytest.raises(InputError, match=message):
        Statistics(model, inputs).parallel_plan(expert=2, data=2, **SENT)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_dropout_takes_each_token_by_itself():
    (layer,) = listed(MixtralList, Expert).parallel_plan(expert=2, data=2, **SENT).layers
    assert layer.style == "ExpertListDispatch"


class Dropping(mixtures.Loop):
    def expert(self, i, x):
        return F.dropout(super().expert(i, x), 0.5, self.training)


def test_dropout_of_stacked_experts():
    model, inputs = mixtures.Routed(Dropping()), torch.randn(3, 5, mixtures.DIM)
    (layer,) = Statistics(model, inputs).parallel_plan(expert=2, data=2, **SENT).layers
    assert layer.style == "ExpertDispatch"


def test_only_scores_choose_experts():
    """Numbers of experts that are sorted are as many as experts, too, of one token that goes to all."""
    with _FirstExperts({4}):
        assert torch.tensor([3, 1, 2, 0]).argsort().tolist() == [3, 1, 2, 0]
        assert torch.tensor([0.1, 0.2, 0.4, 0.3]).argsort().tolist() == [0, 1, 2, 3]
