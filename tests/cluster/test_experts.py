"""Expert parallelism: bytes, parameters and seconds derived by hand for a small mixture."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from modelsummary import InputError, SplitError, Statistics
from modelsummary.cluster import Cluster, Plan, Recipe, StepModel, StepSimulator
from modelsummary.cluster.parts import AFTER
from modelsummary.cluster.search import candidates, find_plans
from modelsummary.cluster.timing import TimeModel
from modelsummary.cluster.weights import Weights
from tests.cluster.models import Attention
from tests.parallel.models import OLD, make

WIDTH, INNER, EXPERTS, CHOSEN, LENGTH, BATCH, LAYERS, WORDS = 32, 64, 8, 2, 16, 2, 4, 64
TOKENS = BATCH * LENGTH
ONE_BLOCK = EXPERTS * 3 * WIDTH * INNER  # parameters of the experts of a block
OTHERS = 2 * WORDS * WIDTH + LAYERS * (WIDTH + WIDTH * EXPERTS)  # embedding and head; norms and routers
ROWS = 2 * TOKENS * CHOSEN * WIDTH  # bytes of a row for each token and each of its experts
ROW_ELEMENTS = (ROWS // 2,)
WEIGHTS = 2 * TOKENS * CHOSEN  # bytes of their weights
COUNTS = 8 * EXPERTS  # bytes of the numbers of rows for each expert
THERE_AND_BACK = [("forward", size) for size in (COUNTS, ROWS, WEIGHTS, ROWS)]
THERE_AND_BACK += [("backward", size) for size in (ROWS, WEIGHTS, ROWS)]
GROUPED, NOT_GROUPED = hasattr(torch, "_grouped_mm"), "torch has no grouped_mm before 2.8"
grouped_mm = pytest.mark.skipif(not GROUPED, reason=NOT_GROUPED)


class Experts(nn.Module):
    """Stacked experts, whose tokens are sorted by their expert."""

    def __init__(self):
        super().__init__()
        self.number = EXPERTS
        self.gate_up = nn.Parameter(torch.empty(EXPERTS, WIDTH, 2 * INNER))
        self.down = nn.Parameter(torch.empty(EXPERTS, INNER, WIDTH))

    def forward(self, x, chosen, weight):
        numbers = chosen.flatten()
        order = numbers.argsort()
        rows = order // chosen.shape[-1]
        counts = torch.histc(numbers.float(), bins=self.number, min=0, max=self.number - 1)
        ends = counts.cumsum(0).to(torch.int32)
        gate, up = torch._grouped_mm(x[rows], self.gate_up, offs=ends).chunk(2, -1)
        y = torch._grouped_mm(F.silu(gate) * up, self.down, offs=ends)
        return torch.zeros_like(x).index_add(0, rows, y * weight.flatten()[order][:, None])


class WeightedExperts(Experts):
    """Experts whose weights come before their second product, with biases, as Megatron and DeepEP have them."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.empty(EXPERTS, WIDTH))

    def forward(self, x, chosen, weight):
        numbers = chosen.flatten()
        order = numbers.argsort()
        rows, weight = order // chosen.shape[-1], weight.flatten()[order][:, None]
        ends = torch.histc(numbers.float(), bins=self.number, min=0, max=self.number - 1).cumsum(0).to(torch.int32)
        y = F.glu(torch._grouped_mm(x[rows], self.gate_up, offs=ends)) * weight
        y = torch._grouped_mm(y, self.down, offs=ends) + self.bias[numbers[order]] * weight
        return torch.zeros_like(x).index_add(0, rows, y)


class Block(nn.Module):
    def __init__(self, experts=Experts):
        super().__init__()
        self.norm, self.router = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = experts()

    def forward(self, x):
        flat = self.norm(x).flatten(0, 1)
        weight, chosen = self.router(flat).softmax(-1).topk(CHOSEN, -1)
        return x + self.experts(flat, chosen, weight).view_as(x)


class AttentionBlock(Block):
    def __init__(self):
        super().__init__()
        self.attention = Attention(fused=True)

    def forward(self, x):
        return super().forward(x + self.attention(x))


class Mixture(nn.Module):
    def __init__(self, block=Block):
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids):
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture(scope="module")
def stats():
    if not GROUPED:
        pytest.skip(NOT_GROUPED)
    with torch.device("meta"):
        return Statistics(Mixture(), torch.zeros(BATCH, LENGTH, dtype=torch.long))


@pytest.fixture(scope="module")
def model(stats):
    return StepModel(stats.live, stats.root, Recipe())


@pytest.fixture(scope="module")
def simulator(model):
    return StepSimulator(model, Cluster("A100", nodes=2, devices_per_node=4), 32, LENGTH)


def part(model, expert):
    return model.parts(Plan(data=expert, expert=expert, micro_batch=BATCH))["blocks.0"]


def expert_elements(block):
    return Weights.of(block.weights.values(), are_experts=True).elements


@pytest.mark.parametrize("expert", [1, 2, 4, 8])
def test_experts_are_divided_and_their_tokens_are_not_fewer(model, expert):
    block = part(model, expert)
    assert Weights.of(block.weights.values()).elements == WIDTH + WIDTH * EXPERTS + ONE_BLOCK // expert
    assert expert_elements(block) == (ONE_BLOCK // expert if expert > 1 else 0)
    assert block.flops == 2 * TOKENS * (WIDTH * EXPERTS + CHOSEN * 3 * WIDTH * INNER)
    groups = {work.sizes[:2] for work, _ in block.works["forward"] if work.name == "aten._grouped_mm"}
    assert groups == {(EXPERTS // expert, TOKENS * CHOSEN * expert // EXPERTS)}
    assert [(each.phase, each.nbytes) for each in block.collectives] == (THERE_AND_BACK if expert > 1 else [])
    assert {(each.operation, each.group) for each in block.collectives} <= {("all_to_all", "expert")}


@grouped_mm
def test_weights_before_the_second_product():
    with torch.device("meta"):
        stats = Statistics(Mixture(partial(Block, WeightedExperts)), torch.zeros(BATCH, LENGTH, dtype=torch.long))
    own = StepModel(stats.live, stats.root, Recipe())
    assert own.number_of_experts == EXPERTS
    divided = part(own, 4)
    assert expert_elements(divided) == (ONE_BLOCK + EXPERTS * WIDTH) // 4
    assert [(each.phase, each.nbytes) for each in divided.collectives] == THERE_AND_BACK


def test_rows_are_taken_and_added_up_on_both_sides(model):
    """A rank takes a row for each expert of its tokens, and the experts take the rows that came, sorted by expert."""
    for expert, taken, added in (
        (1, 1, {"aten.index_add": (TOKENS * WIDTH,)}),
        (4, 2, {"aten.index_add": ROW_ELEMENTS, "aten.index_put": (TOKENS * WIDTH,)}),
    ):
        works = part(model, expert).works["forward"]
        assert sum(count for work, count in works if (work.name, work.sizes) == ("aten.index", ROW_ELEMENTS)) == taken
        names = ("aten.index_add", "aten.index_put")
        assert {work.name: work.sizes for work, _ in works if work.name in names} == added


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_dispatcher_that_reads_tokens_needs_no_copies_of_rows(stats, phase):
    """The gather before rows are sent, the sum behind the results, and what their gradients take fall away.

    Where the dispatcher sorts rows by expert, the ranks of the experts do not copy them either.
    """

    def copies(dispatcher):
        works = part(StepModel(stats.live, stats.root, Recipe(dispatcher=dispatcher)), 4).works[phase]
        copying = ("aten.index", "aten.index_select", "aten.index_put", "aten.index_add")
        rows = [work.name for work, count in works for _ in range(count) if work.sizes[0] >= TOKENS * WIDTH]
        return Counter(name for name in rows if name in copying)

    assert copies("nccl") - copies("deepep") == Counter({"aten.index": 1, "aten.index_put": 1})
    assert copies("nccl").total() == 4
    assert not copies("hybridep")


def test_a_dispatcher_sends_a_copy_to_each_rank_that_has_an_expert():
    """Of two experts, half of the pairs on two ranks are on one of them: 1.5 ranks on average."""
    assert Recipe(dispatcher="deepep").copies_of(2, 2) == Recipe(dispatcher="hybridep").copies_of(2, 2) == 1.5
    assert Recipe().copies_of(2, 2) == 2
    assert Recipe(dispatcher="deepep", copies_per_token=1).copies_of(2, 2) == 1


def test_seconds_of_an_exchange():
    """A rank keeps its own share of the rows; the rest leaves by the links of its node, or by the network."""
    cluster = Cluster("A100", nodes=2, devices_per_node=4, link_efficiency=1.0, network_efficiency=1.0)
    network = StepSimulator(StepModel(*_tiny()), cluster, 8, 0).time_model.network
    nbytes = 2**30
    inside = network.seconds("all_to_all", nbytes, network.group(4))
    across = network.seconds("all_to_all", nbytes, network.group(8))
    assert inside == pytest.approx(3 / 4 * nbytes / 300e9, rel=0.02)
    assert across == pytest.approx(4 / 8 * nbytes / 25e9, rel=0.02)  # meanwhile 3 / 8 go through the links


def _tiny():
    stats = Statistics(nn.Linear(4, 4), (2, 4))
    return stats.live, stats.root, Recipe()


def test_waiting_for_experts_is_a_cause_and_recomputation_repeats_it(stats):
    cluster = Cluster("A100", devices_per_node=4, link_bandwidth=1e6)
    recipe = Recipe(host_seconds=0.0)
    plain, full = (
        stats.simulate(Plan(data=4, expert=4, micro_batch=2, checkpoint=each), cluster, 8, recipe=recipe)
        for each in (None, "every")
    )
    network = StepSimulator(StepModel(*_tiny()), cluster, 8, 0).time_model.network

    def sent(rows, weights, counts, share=1.0):
        """Seconds of so many exchanges in each layer, of which only a share of the bytes leaves a rank."""
        exchanges = ((rows, ROWS), (weights, WEIGHTS), (counts, COUNTS))
        group = network.group(4)
        return LAYERS * sum(times * network.seconds("all_to_all", share * nbytes, group) for times, nbytes in exchanges)

    assert plain.seconds_by_cause["expert"] == pytest.approx(sent(4, 2, 1))
    # the results of the experts end the block, so torch's recomputation, which stops before, does not send them again
    assert full.seconds_by_cause["expert"] == pytest.approx(sent(5, 3, 2))
    megatron = stats.simulate(full.plan, cluster, 8, recipe=Recipe(host_seconds=0.0, kernels="fused"))
    assert megatron.seconds_by_cause["expert"] == pytest.approx(sent(6, 3, 2))
    fewer = stats.simulate(plain.plan, cluster, 8, recipe=Recipe(host_seconds=0.0, copies_per_token=1))
    assert fewer.seconds_by_cause["expert"] == pytest.approx(sent(4, 2, 1, 1 / CHOSEN))
    assert plain.model_flops == full.model_flops == 3 * 2 * 8 / BATCH * stats.total_macs
    assert plain.step_seconds == pytest.approx(sum(plain.seconds_by_cause.values()))


@pytest.mark.parametrize("bandwidth", [1e6, 300e9])
def test_exchanges_overlap_with_the_pass_of_another_micro_batch(model, bandwidth):
    """The rank waits for what takes longer than both passes compute, and NCCL takes a share of their speed."""
    cluster = Cluster("A100", devices_per_node=4, link_bandwidth=bandwidth)
    times, other_times = (
        TimeModel(cluster, Recipe(host_seconds=0.0, overlap_experts=overlaps)) for overlaps in (False, True)
    )
    plan = Plan(data=4, expert=4, micro_batch=BATCH)
    plain, beside = times.part(part(model, 4), plan), other_times.part(part(model, 4), plan)
    exchanging, computing = (plain.forward[name] + plain.backward[name] for name in ("expert", "compute"))
    network, group = times.network, times.groups(plan)["expert"]
    taken = network.units_taken(group) + network.bandwidth_taken(group)
    left = max(exchanging - computing, taken * exchanging)
    assert beside.forward["expert"] + beside.backward["expert"] == pytest.approx(left)
    for one, other in ((plain.forward, beside.forward), (plain.backward, beside.backward)):
        assert one["compute"] == other["compute"]


@pytest.mark.parametrize("expert", [2, 4])
def test_memory_of_experts(simulator, expert):
    copies = 8 // expert  # ranks that hold the same experts
    own = LAYERS * ONE_BLOCK // expert
    by_zero = [
        simulator.simulate(
            Plan(data=1 if sharded else 8, shard=8 if sharded else 1, expert=expert, sharded=sharded, micro_batch=2)
        ).memory[0]
        for sharded in range(4)
    ]
    whole, sharded = OTHERS + own, OTHERS // 8 + own // copies
    assert [each.parameters for each in by_zero] == [2 * whole] * 3 + [4 * sharded]  # float32 under FSDP
    assert [each.gradients for each in by_zero] == [4 * whole] * 2 + [4 * sharded] * 2
    assert [each.optimizer for each in by_zero] == [12 * whole] + [12 * sharded] * 2 + [8 * sharded]
    unit = WIDTH + WIDTH * EXPERTS + ONE_BLOCK // expert
    parts = simulator.model.parts(Plan(data=8, expert=expert, micro_batch=2))
    head, block = parts[AFTER].kept_bytes, parts["blocks.0"].kept_bytes
    # Of a block parameters and gradients, the parameters of the block before it, and in float32 the gradients of the
    # one that was before in the backward: those of the head, or of another block, whose activations are gone then.
    last = 2 * 3 * unit + 4 * WORDS * WIDTH - head
    gathered = max(last, (2 * 3 + 4) * unit - head - block, (2 * 2 + 4) * unit - head - block)
    assert [each.gathered for each in by_zero] == [0, 0, 2 * unit, gathered]


def test_experts_of_one_rank_are_not_reduced(simulator):
    """With as many expert ranks as copies each expert has one rank, which neither reduces nor gathers it."""
    network = simulator.time_model.network
    plan = Plan(data=8, expert=8, micro_batch=2)
    (stage,) = simulator.stages(plan)
    nbytes = 4 * stage.weights.experts.elements
    assert (nbytes, stage.weights.shared.elements) == (4 * LAYERS * ONE_BLOCK // 8, OTHERS)
    alone = simulator.time_model.over_copies("all_reduce", 4 * OTHERS, nbytes, plan)
    assert alone == network.seconds("all_reduce", 4 * OTHERS, network.group(8))
    halves = Plan(data=8, expert=4, micro_batch=2)
    both = simulator.time_model.over_copies("all_reduce", 4 * OTHERS, nbytes, halves)
    assert both == alone + network.seconds("all_reduce", nbytes, network.group(2, 4))


@grouped_mm
def test_experts_beside_tensor_and_sequence_parallelism():
    with torch.device("meta"):
        stats = Statistics(Mixture(AttentionBlock), torch.zeros(BATCH, LENGTH, dtype=torch.long))
    model = StepModel(stats.live, stats.root, Recipe())
    alone, both = (
        model.parts(Plan(tensor=2, data=2, sequence=True, expert=each, micro_batch=BATCH))["blocks.0"]
        for each in (2, 4)
    )
    sent = {each.nbytes for each in both.collectives if each.group == "expert"}
    assert sent == {ROWS // 2, WEIGHTS // 2, COUNTS}  # half of the tokens
    assert expert_elements(both) == ONE_BLOCK // 4  # whole experts, though tensor parallelism splits the attention
    gathers = [each for each in both.collectives if each.group == "tensor"]
    assert gathers == [each for each in alone.collectives if each.group == "tensor"]
    assert {each.nbytes for each in gathers} == {2 * TOKENS * WIDTH}  # of the attention alone
    assert len(gathers) == 5


APPLIED = {"dispatch": "all_reduce"}  # the ranks of expert have the same tokens


@pytest.mark.skipif(OLD, reason="tensor parallelism of older versions takes one dimension")
@pytest.mark.parametrize("name", ["mixture", "shared"])
@pytest.mark.parametrize(
    "sizes", [{"expert": 2}, {"expert": 2, "tensor": 2}, {"expert": 4, "tensor": 2, "sequence": True}, {"expert": 4}]
)
def test_ranks_that_sum_results_of_experts_cost_what_is_applied(name, sizes):
    """Bytes of collectives and of parameters equal the parallel plan's, which equal a run over processes."""
    stats = Statistics(*make(name))
    recipe = Recipe(precision=None, gradient_dtype=None, kernels="eager")
    model = StepModel(stats.live, stats.root, recipe)
    plan, applied = Plan(**sizes, **APPLIED, micro_batch=4), stats.parallel_plan(**sizes, **APPLIED)
    moved = Counter()
    for part_name, part in model.parts(plan).items():
        for each in part.collectives:
            moved[each.group, each.phase, each.operation] += model.counts.get(part_name, 1) * each.nbytes
    planned = Counter()
    for each in applied.communication:
        planned[each.group, each.phase, each.operation] += each.nbytes
    assert moved == planned
    assert moved["expert", "forward", "all_reduce"] == 4 * 8 * 16 * 8  # tokens x features x bytes of float64
    step = stats.simulate(plan, Cluster("A100"), 4, recipe=recipe)
    assert step.plan.devices == applied.world_size
    assert step.parallel_plan() == applied
    memory, rank = applied.memory(optimizer="sgd", device="cuda", block_bytes=1), step.memory[0]
    assert (rank.parameters, rank.buffers) == (memory.params, memory.buffers)


@pytest.mark.skipif(OLD, reason="FSDP of older versions needs data")
@pytest.mark.parametrize(
    ("trained", "n_backward", "n_weights"), [(".", 2, 1), (".embed.", 2, 1), (".experts.", 1, 0), (".gate.", 1, 1)]
)
def test_ranks_that_send_tokens_move_what_is_applied(trained, n_backward, n_weights):
    """Rows to experts and back, their weights and numbers, by hand. Frozen parts need no gradients."""
    model, inputs = make("mixture")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in f".{name}")
    stats, sizes = Statistics(model, inputs), {"expert": 2, "shard": 2, "dispatch": "all_to_all"}
    parts = StepModel(stats.live, stats.root, Recipe(precision=None)).parts(Plan(**sizes, micro_batch=4))
    moved, planned = Counter(), Counter()
    for collective in (collective for part in parts.values() for collective in part.collectives):
        moved[collective.phase] += collective.nbytes
    for collective in stats.parallel_plan(**sizes).communication:
        if collective.operation == "all_to_all":
            planned[collective.phase] += collective.nbytes
    rows = 4 * 8 * 2 * 16 * 8  # tokens x experts of each x features x bytes of float64
    forward, backward = 2 * rows + rows // 16 + 4 * 8, n_backward * rows + (n_weights * rows) // 16
    assert moved == planned == Counter({"forward": forward, "backward": backward})


@pytest.mark.skipif(OLD, reason="FSDP of older versions needs data")
def test_shards_of_experts_whose_results_are_summed():
    """FSDP shards the experts of a rank as it shards the other layers, and stages divide them."""
    stats, recipe = Statistics(*make("mixture")), Recipe(precision=None, gradient_dtype=None, kernels="eager")
    step = stats.simulate(Plan(expert=2, shard=2, **APPLIED, micro_batch=4), Cluster("A100"), 8, recipe=recipe)
    memory = stats.parallel_plan(expert=2, shard=2, **APPLIED).memory(optimizer="sgd", block_bytes=1)
    assert step.memory[0].parameters == memory.params
    assert step.seconds_by_cause["expert"] > 0


def test_ranks_of_an_all_reduce_are_a_dimension_of_their_own():
    times = TimeModel(Cluster("A100", nodes=4, devices_per_node=8))
    plan = Plan(tensor=2, expert=4, shard=2, data=2, **APPLIED)
    assert (plan.devices, plan.split_ranks, plan.dispatch_ranks, plan.expert_copies) == (32, 8, 1, 8)
    groups = times.groups(plan)
    assert (groups["tensor"].nodes, groups["expert"].nodes, groups["shards"].nodes) == (1, 1, 2)
    assert times.groups(Plan(tensor=8, expert=4, **APPLIED))["expert"].nodes == 4
    assert Plan(expert=4, shard=4).devices == 4  # their ranks are ranks of shard


def test_only_what_is_sent_to_experts_overlaps_and_has_copies():
    """Options on exchanges of tokens leave an all-reduce as it is."""
    plain, other = (
        StepSimulator(StepModel(*_recorded("mixture"), recipe), Cluster("A100"), 4, 8).simulate(
            Plan(expert=2, **APPLIED, micro_batch=4)
        )
        for recipe in (Recipe(), Recipe(overlap_experts=True, copies_per_token=0.5))
    )
    assert plain.seconds_by_cause == other.seconds_by_cause


def _recorded(name):
    stats = Statistics(*make(name))
    return stats.live, stats.root


@pytest.mark.parametrize("memory_bytes", [10**9, 2_000_000])
def test_the_search_divides_experts_as_trying_everything_does(model, memory_bytes):
    cluster = Cluster("A100", devices_per_node=4, nodes=2, memory_bytes=memory_bytes)
    simulator = StepSimulator(model, cluster, 32, LENGTH)
    space = {
        "tensor": [1],
        "pipeline": [1, 2],
        "sharded": [None, "optimizer", "parameters"],
        "micro_batch": [1, 2],
        "checkpoint": [None],
    }
    plans = list(candidates(simulator, space))
    assert {plan.expert for plan in plans} == {1, 2, 4, 8}
    steps = {plan: simulator.simulate(plan) for plan in plans}
    for plan, step in steps.items():
        assert simulator.least_state_bytes(plan) <= step.memory_bytes == simulator.memory_bytes(plan)
        assert simulator.items(plan).least_seconds() <= step.step_seconds * (1 + 1e-9)
    fitting = sorted(step.step_seconds for step in steps.values() if step.fits)
    found = find_plans(simulator, {**space, "limit": 4})
    assert [step.step_seconds for step in found[:4]] == pytest.approx(fitting[:4])
    assert found.fitting == len(fitting)


def test_a_search_for_applicable_plans_divides_experts(model):
    cluster = Cluster("A100", devices_per_node=4)
    simulator = StepSimulator(model, cluster, 32, LENGTH, lambda **_sizes: None)
    space = {"tensor": [1], "pipeline": [1], "sharded": [None], "micro_batch": [1], "checkpoint": [None]}
    found = find_plans(simulator, {**space, "applicable": True})
    assert {step.plan.expert for step in found} == {1, 2, 4}


@pytest.mark.parametrize(
    ("make_plan", "message"),
    [
        (lambda: Plan(expert=2), "expert=2 must divide tensor x context x shard x data = 1"),
        (lambda: Plan(tensor=2, expert=2), "expert=2 with tensor=2 needs sequence=True"),
        (lambda: Plan(expert=0), "expert must be an integer >= 1, got 0"),
        (lambda: Plan(dispatch="deepep"), "dispatch must be one of 'all_to_all', 'all_reduce', got 'deepep'"),
    ],
)
def test_unusable_plans(make_plan, message):
    with pytest.raises(InputError, match=message):
        make_plan()


def test_plans_that_send_tokens_are_applied(stats, simulator):
    asked = []
    own = StepSimulator(simulator.model, simulator.time_model.cluster, 32, LENGTH, lambda **sizes: asked.append(sizes))
    for plan in (Plan(data=8, expert=2, micro_batch=2), Plan(shard=8, expert=4, micro_batch=2)):
        own.simulate(plan).obstacle  # noqa: B018
    assert [(sizes["shard"], sizes.get("data"), sizes["expert"], sizes["dispatch"]) for sizes in asked] == [
        (1, 2, 2, "all_to_all"),
        (4, None, 4, "all_to_all"),
    ]


def test_what_cannot_be_divided(stats):
    with pytest.raises(InputError, match="expert=16 does not divide the 8 experts of"):
        stats.simulate(Plan(data=16, expert=16), Cluster("A100", nodes=2), 16)
    with pytest.raises(InputError, match="expert=2: Sequential has no experts that can be divided"):
        Statistics(nn.Sequential(nn.Linear(4, 4)), (2, 4)).simulate(Plan(data=2, expert=2), Cluster("A100"), 4)


@pytest.mark.skipif(OLD, reason="FSDP of older versions needs data")
def test_experts_in_a_list():
    """Each takes all tokens, and its rank those of all ranks: as many rows as one rank would have."""
    listed = Statistics(*make("dense_list"))
    sent, summed = (
        listed.simulate(Plan(data=data, expert=2, dispatch=dispatch), Cluster("A100"), 4)
        for data, dispatch in ((2, "all_to_all"), (1, "all_reduce"))
    )
    assert sent.seconds_by_cause["expert"] > 0
    assert summed.seconds_by_cause["expert"] > 0
    model = StepModel(listed.live, listed.root, Recipe(precision=None))
    alone, divided = (model.parts(Plan(data=2, expert=expert, micro_batch=2)) for expert in (1, 2))
    assert sum(part.flops for part in divided.values()) == sum(part.flops for part in alone.values())
    plan = listed.parallel_plan(data=2, expert=2, dispatch="all_to_all")
    planned = sum(item.nbytes for item in plan.communication if item.operation == "all_to_all")
    assert sum(each.nbytes for part in divided.values() for each in part.collectives) == planned


def test_a_model_that_cannot_be_recorded_has_no_experts_to_divide(stats, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise SplitError("refused")

    own = StepModel(stats.live, stats.root, Recipe())
    assert own.number_of_experts == 8
    own = StepModel(stats.live, stats.root, Recipe())
    monkeypatch.setattr("modelsummary.cluster.step_model.record_once", refuse)
    assert own.number_of_experts == 1
