"""The step of a cluster, derived by hand for equal stages."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from modelsummary import DeviceSpec, InputError, Statistics, StepError
from modelsummary.cluster import Cluster, Plan, Recipe, StepModel, StepSimulator
from modelsummary.cluster.collectives import Network
from modelsummary.cluster.parts import AFTER
from modelsummary.cluster.pipeline import StepItems, WeightUpdate, in_flight
from modelsummary.cluster.stage_times import StageTimer
from modelsummary.cluster.timing import TimeModel, UnitSeconds
from modelsummary.cluster.weights import Weights, weight_of
from modelsummary.memory.estimate import CATEGORIES
from modelsummary.split.schedule import SCHEDULES, StageLoad, simulate
from tests.as_called.ways import group
from tests.cluster.models import LAYERS, LENGTH, WIDTH, gpt, statistics, step_model
from tests.parallel.models import Decoder
from tests.untouched import untouched

PER_DEVICE = {"interleaved1f1b": 2, "zbv": 2, "dualpipev": 2}


def plan_of(schedule, p):
    return Plan(pipeline=p, virtual_stages=PER_DEVICE.get(schedule, 1), schedule=schedule)


def items_of(loads, plan, m, updates=None):
    """Return the items of a step that does nothing after its last backward, unless ``updates`` say what."""
    return StepItems(plan, m, loads, updates or [WeightUpdate()] * plan.pipeline)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 64)])
def test_bubble(schedule, p, m):
    seconds = items_of([StageLoad(1.0, 1.0, 1.0)] * p, plan_of(schedule, p), m).seconds()
    assert seconds == pytest.approx(3 * (m + p - 1))


@pytest.mark.parametrize("v", [1, 2, 4])
def test_interleaving_divides_the_bubble(v):
    p, m = 4, 16
    schedule = "interleaved1f1b" if v > 1 else "1f1b"
    plan = Plan(pipeline=p, virtual_stages=v, schedule=schedule)
    seconds = items_of([StageLoad(1 / v, 1 / v, 1 / v)] * p * v, plan, m).seconds()
    assert seconds - 3 * m == pytest.approx(3 * (p - 1) / v)


@settings(max_examples=30, deadline=None)
@given(
    schedule=st.sampled_from([each for each in SCHEDULES if each != "dualpipev" or torch.__version__ >= "2.9"]),
    p=st.integers(2, 4),
    rounds=st.integers(2, 12),
    seconds=st.lists(st.floats(0.5, 2.0), min_size=8, max_size=8),
    transfer=st.floats(0.0, 0.3),
)
def test_repeating_schedules_are_not_simulated_in_full(schedule, p, rounds, seconds, transfer):
    plan, m = plan_of(schedule, p), p * rounds
    loads = [StageLoad(each, each, each, 0, 1, transfer) for each in seconds[: plan.stages]]
    whole, items = simulate(loads, m, schedule), items_of(loads, plan, m)
    assert items.seconds() == pytest.approx(whole.makespan, rel=0.02)
    part = items.simulation
    assert items_of(loads, plan, part.n_microbatches).seconds() == pytest.approx(part.makespan, rel=1e-12)
    assert part.peak_activation_bytes == whole.peak_activation_bytes
    held = [max(map(sum, in_flight(schedule, p, plan.virtual_stages, m, rank))) for rank in range(plan.pipeline)]
    assert held == whole.peak_activation_bytes
    assert items.least_seconds() <= whole.makespan * (1 + 1e-9)
    updates = [WeightUpdate(0.3 * rank, 1.0 + rank) for rank in range(p)]
    after = items_of(loads, plan, m, updates)
    assert after.least_seconds() <= after.seconds() * (1 + 1e-9)
    for rank, busy in enumerate(whole.busy):
        lost = after.causes(rank)
        assert sum(lost.values()) + busy + updates[rank].optimizer == pytest.approx(after.seconds(), rel=1e-6)


def test_what_a_rank_waits_for():
    """Two stages of 1 and 2 s, backwards as long as forwards, messages of 0.5 s, one micro-batch, then gradients.

    Rank 0: F 0-1; its gradient arrives when rank 1 has ended at 1.5 + 2 + 2 = 5.5 and 0.5 s later; B 6-7; gradients
    7-8. Rank 1 reduces its own from 5.5 to 8.5, which both optimizers wait for.
    """
    loads = [StageLoad(1, 0.5, 0.5, message=0.5), StageLoad(2, 1, 1)]
    items = items_of(loads, plan_of("1f1b", 2), 1, [WeightUpdate(1, 0.25), WeightUpdate(3, 0.25)])
    assert items.seconds() == 8.75
    assert items.causes(0) == {"pipeline": 1.0, "bubble": 4.0, "gradients": 1.5}
    assert items.causes(1) == {"pipeline": 0.5, "bubble": 1.0, "gradients": 3.0}
    rows = {(span.row, span.name): (span.begin, span.end) for span in items.spans()}
    assert rows["link 1 to 0", "message"] == (5.5, 6.0)
    assert rows["gradients 1", "reduction of gradients"] == (5.5, 8.5)
    assert rows["rank 0", "optimizer"] == (8.5, 8.75)


def test_zero_bubble_gains_what_gradients_of_weights_take():
    """ZB-H1 fills bubbles with the gradients of weights: nothing where layers are frozen."""

    def gained(train):
        model, ids = gpt(8)
        model.requires_grad_(train)
        model.tokens.requires_grad_(True)
        stats = Statistics(model, ids)
        simulator = StepSimulator(
            StepModel(stats.live, stats.root, Recipe(host_seconds=0.0)), Cluster("A100"), 8, LENGTH
        )
        plain, zero = (simulator.items(Plan(pipeline=2, schedule=schedule)) for schedule in ("1f1b", "zb"))
        return plain.loads, plain.seconds() - zero.seconds()

    loads, seconds = gained(True)
    assert 0.2 * loads[0].backward < loads[0].backward_weight < loads[0].backward / 2
    assert seconds > 0
    loads, seconds = gained(False)
    assert [load.backward_weight for load in loads[1:]] == pytest.approx([0.0], abs=1e-4)
    assert seconds == pytest.approx(0, abs=1e-4)


@pytest.fixture(scope="module")
def simulator():
    return StepSimulator(step_model(), Cluster("A100", nodes=2), 32, LENGTH)


def test_causes_add_up_and_figures_follow(simulator):
    step = simulator.simulate(Plan(tensor=2, pipeline=2, data=4, micro_batch=2))
    assert step.microbatches == 4
    assert step.step_seconds == pytest.approx(sum(step.seconds_by_cause.values()))
    assert step.tokens_per_second == pytest.approx(32 * LENGTH / step.step_seconds)
    assert step.mfu == pytest.approx(step.model_flops / (step.step_seconds * 16 * 312e12))
    assert step.device_hours(step.tokens_per_second * 3600) == pytest.approx(16)
    for tokens in (-1, True, float("nan"), "1"):
        with pytest.raises(InputError, match="tokens must be a number >= 0, got"):
            step.device_hours(tokens)
    assert step.model_flops == 32 * 3 * 2 * statistics().total_macs
    assert step.hfu == step.mfu


def test_one_stage_has_no_bubble(simulator):
    for batch in (1, 2, 4):
        assert simulator.simulate(Plan(data=8, micro_batch=batch)).seconds_by_cause["bubble"] == 0


def test_a_recorded_batch_of_0_is_refused():
    stats = Statistics(nn.Linear(4, 4), (0, 4))
    with pytest.raises(InputError, match="the recorded input has a batch of 0, which no step has; record a batch of 1"):
        stats.simulate(Plan(), Cluster("A100"), 4)


def test_a_dtype_without_a_peak_names_the_recipe():
    stats, recipe = Statistics(nn.Linear(4, 4), (2, 4)), Recipe(precision=torch.bfloat16)
    message = (
        r"the peak of V100 with torch\.bfloat16 is not known; pass a Recipe with precision= one of torch\.float16, "
    )
    for run in (
        lambda: stats.simulate(Plan(), Cluster("V100"), 4, recipe=recipe),
        lambda: stats.plan(Cluster("V100"), 8),
    ):
        with pytest.raises(InputError, match=message):
            run()


def test_recomputation_adds_its_forward(simulator):
    plain, full = (simulator.simulate(Plan(checkpoint=each)) for each in (None, "every"))
    one = simulator.simulate(Plan(checkpoint=1))
    added = full.seconds_by_cause["recomputation"]
    assert plain.seconds_by_cause["recomputation"] == 0
    assert one.seconds_by_cause["recomputation"] == pytest.approx(added / LAYERS)
    block = simulator.model.parts(Plan())["blocks.0"]
    assert full.hardware_flops - full.model_flops == 32 * LAYERS * block.repeated_flops
    kept, entered = block.kept_bytes, block.entered_bytes
    plain_held, held = plain.moments[0].backward, full.moments[0].backward
    assert plain_held.activations - held.activations == LAYERS * (kept - entered)
    assert held.recomputed == kept - entered


def test_zero_shards_what_it_says(simulator):
    by_zero = [
        simulator.simulate(Plan(data=1 if sharded else 4, shard=4 if sharded else 1, sharded=sharded)).memory[0]
        for sharded in range(4)
    ]
    params = by_zero[0].parameters // 2
    assert by_zero[0].gradients == 4 * params  # float32
    assert by_zero[0].optimizer == 12 * params  # two states and the master weights
    assert [each.optimizer for each in by_zero] == [12 * params, 3 * params, 3 * params, 2 * params]
    assert [each.gradients for each in by_zero] == [4 * params, 4 * params, params, params]
    assert [each.parameters for each in by_zero] == [2 * params, 2 * params, 2 * params, params]  # float32 under FSDP
    block = 12 * WIDTH**2 + 13 * WIDTH
    root = params - LAYERS * block
    kept = {name: part.kept_bytes for name, part in simulator.model.parts(Plan()).items()}
    # The root stays gathered. Of a block, parameters and gradients; those of the one before it, gathered ahead; and in
    # float32 the gradients that are being reduced, when activations of what follows are gone.
    gathered = 2 * 2 * root + max(
        2 * 3 * block - kept[AFTER],
        (2 * 3 + 4) * block - kept["blocks.0"] - kept[AFTER],
        (2 * 2 + 4) * block - kept["blocks.0"] - kept[AFTER],
    )
    assert [each.gathered for each in by_zero] == [0, 0, 2 * block, gathered]


def test_memory_of_a_schedule_is_that_of_its_simulation(simulator):
    for schedule in ("1f1b", "gpipe", "zb", "interleaved1f1b"):
        plan = replace(plan_of(schedule, 2), micro_batch=4)
        step = simulator.simulate(plan)
        loads = [StageLoad(1, 1, 1, 0, each.kept_bytes) for each in simulator.stages(plan)]
        whole = simulate(loads, step.microbatches, schedule)
        assert [each.activations for each in step.memory] == whole.peak_activation_bytes


def test_the_ends_of_a_pipeline_reduce_the_weight_that_they_share(simulator):
    apart = Plan(pipeline=2, micro_batch=4)
    items = simulator.items(apart)
    tied = [each.tied.elements for each in simulator.stages(apart)]
    assert tied == [64 * 32, 64 * 32]  # the embedding, which is the head as well
    seconds = simulator.time_model.network.seconds("all_reduce", 4 * tied[0], simulator.time_model.network.group(2))
    assert [each.gradients for each in items.updates] == pytest.approx([seconds, seconds])
    assert simulator.items(Plan(micro_batch=4)).updates[0].gradients == 0


def test_collectives_take_units_and_memory_bandwidth_from_kernels(simulator):
    """One of 108 units per 12 GB/s, and twice what passes over the links, of 2,039 GB/s.

    Lee et al. 2025 (https://arxiv.org/abs/2507.03114), means over GPT and Llama on 4 devices: kernels take 1.189 of
    their seconds if communication overlaps, and kernels and communication one after the other 1.102 times that.
    """
    time_model = simulator.time_model
    network = time_model.network
    inside, across = network.group(8), network.group(2, 8)
    speed = network.cluster.link_bandwidth * 0.827 * (1 - 0.4915 / 8) / 1e9  # 233 GB/s inside a node, as fitted
    of_inside, of_across = 20 / 108 + 2 * speed / 2039, 2 / 108 + 2 * 22.5 / 2039  # 22.5 GB/s of one network interface
    for taken, expected in ((inside, of_inside), (across, of_across)):
        assert network.units_taken(taken) + network.bandwidth_taken(taken) == pytest.approx(expected)
    published = 0.189 / (1.189 * 1.102 - 1)  # of the seconds of communication
    for device in ("A100", "H100"):
        four = Network(Cluster(device, devices_per_node=4))
        lost = four.units_taken(four.group(4)) + four.bandwidth_taken(four.group(4))
        assert published - 0.25 < lost < published
    plan = Plan(data=2, shard=8)
    # a unit gathers, the other computes meanwhile: 10 s, of which a share of 4 s is lost; before that, 1 s for itself
    units = [UnitSeconds(1.0, 10.0), UnitSeconds(4.0, 1.0)]
    assert time_model.over_units(units, plan) == pytest.approx(1 + 10 + 4 * of_inside + 1)
    in_turn = TimeModel(simulator.time_model.cluster, Recipe(overlap_gradients=False))
    assert in_turn.over_units(units, plan) == pytest.approx(16)
    units = [UnitSeconds(1.0, 1.0), UnitSeconds(4.0, 1.0)]
    assert time_model.over_units(units, plan) == pytest.approx(1 + 4 + 1)  # it waits for the gather anyway
    # while the second unit computes, both groups communicate side by side: the first one's scatter, then its replicas
    units = [UnitSeconds(0, 1.0, 4.0, 3.0), UnitSeconds(0, 20.0)]
    assert time_model.over_units(units, plan) == pytest.approx(1 + 20 + 4 * of_inside + 3 * of_across)


@settings(max_examples=20, deadline=None)
@given(count=st.integers(5, 12), times=st.tuples(*[st.floats(0.1, 2.0)] * 4), head=st.floats(0.1, 5.0))
def test_equal_units_run_for_a_period(simulator, count, times, head):
    """A rank's pass over many equal units takes what running all of them takes."""
    plan, units = Plan(data=2, shard=8), [UnitSeconds(head, head), *[UnitSeconds(*times)] * count]
    whole = [unit._replace(compute=unit.compute + 1e-12 * index) for index, unit in enumerate(units)]  # none are equal
    time_model = simulator.time_model
    assert time_model.over_units(units, plan) == pytest.approx(time_model.over_units(whole, plan), rel=0.02)


def on_slowest(spent, slowest):
    """Return the seconds of a pass whose kernels take so many times as long."""
    return sum(seconds * (slowest if cause == "compute" else 1) for cause, seconds in spent.items())


def test_ranks_keep_the_pace_of_the_slowest_board(simulator):
    """The expected maximum of 2, 8 and 512 normal numbers: 0.564, 1.424 and 3.04 standard deviations."""
    time_model = simulator.time_model
    deviations = [(time_model.slowest(ranks) - 1) / (0.08 / 6) for ranks in (1, 2, 8, 512)]
    assert deviations == pytest.approx([0, 0.564, 1.424, 3.04], rel=0.05)
    one, two, all_ranks = (simulator.simulate(Plan(data=each)).seconds_by_cause for each in (1, 2, 16))
    assert two["compute"] * 16 / one["compute"] / 8 == pytest.approx(time_model.slowest(2))
    assert all_ranks["compute"] * 16 / one["compute"] == pytest.approx(time_model.slowest(16))
    own = Cluster(DeviceSpec("mine", {torch.bfloat16: 1e12}, 1e11), link_bandwidth=1e11, memory_bytes=2**34)
    equal = StepSimulator(step_model(), own, 32, LENGTH)
    assert equal.time_model.slowest(512) == 1


def test_fsdp_copies_and_waits_without_overlap(simulator):
    plan = Plan(shard=4)
    (load,), time_model = simulator.items(plan).loads, simulator.time_model
    (stage,), group = simulator.stages(plan), time_model.groups(plan)["gradients"]
    root, block = stage.root.shared.nbytes, stage.units[1].weights.total.nbytes
    assert root + LAYERS * block == stage.weights.total.nbytes  # the blocks, and the root with the weight of both ends
    of_root, of_block = (time_model.network.seconds("all_gather", nbytes, group) for nbytes in (root, block))
    slowest = time_model.slowest(4)
    copies = time_model.moved("copies", 2 * root) + LAYERS * time_model.moved("copies", 2 * block)
    forward = on_slowest(stage.forward, slowest) + slowest * copies
    hidden = of_root + time_model.moved("copies", 2 * root)  # no other kernels run while the root is gathered
    assert of_root < load.forward - forward < hidden + of_block + LAYERS * of_block * 20 / 108
    waits = StepModel(statistics().live, statistics().root, Recipe(overlap_gradients=False))
    alone = StepSimulator(waits, time_model.cluster, 32, LENGTH)
    assert alone.items(plan).loads[0].forward == pytest.approx(forward + of_root + LAYERS * of_block)


@pytest.mark.parametrize("sharded", ["optimizer", "parameters"])
def test_replicas_reduce_the_shards_that_their_nodes_scatter(sharded):
    """Two nodes of eight: gathers stay inside a node, and an eighth of the gradients crosses."""
    own = {"link_bandwidth": 100e9, "network_bandwidth": 10e9, "link_latency": 0.0, "network_latency": 0.0}
    cluster = Cluster("A100", nodes=2, **own, link_efficiency=1.0, network_efficiency=1.0)
    model = StepModel(statistics().live, statistics().root, Recipe(overlap_gradients=False))
    simulator = StepSimulator(model, cluster, 32, LENGTH)
    plan = Plan(data=2, shard=8, sharded=sharded)
    stage, items = simulator.stages(plan)[0], simulator.items(plan)
    n, root, units = (
        stage.weights.total.elements,
        stage.root.shared.elements,
        LAYERS + 1 if sharded == "parameters" else 1,
    )
    base = simulator.time_model.network._base
    gather = units * base + 7 / 8 * 2 * n / 100e9
    scatter = units * base + 7 / 8 * 4 * n / 100e9
    between = units * base + 2 * 1 / 2 * 4 * n / 8 / 10e9
    time_model = simulator.time_model
    if sharded == "parameters":
        slowest = time_model.slowest(16)
        out, into = (
            [slowest * time_model.moved("copies", each * of) for of in (root, (n - root) // LAYERS)] for each in (4, 6)
        )
        (load,) = items.loads
        assert load.forward == pytest.approx(on_slowest(stage.forward, slowest) + gather + out[0] + LAYERS * out[1])
        held = stage.weights.total.over(8)
        adding = slowest * time_model.moved("accumulation", held.trained + 2 * held.gradient_bytes(model.recipe))
        again = LAYERS * (base + out[1]) + 7 / 8 * 2 * (n - root) / 100e9  # the root stays gathered
        copied = into[0] + LAYERS * into[1]
        backward = on_slowest(stage.backward, slowest) + adding + again + scatter + between + copied
        assert load.backward == pytest.approx(backward)
        assert items.updates[0].gradients == 0
    else:
        assert items.updates[0].gradients == pytest.approx(gather + scatter + between)
    memory = simulator.simulate(plan).memory[0]
    share = -(-n // 8)  # two states and the float32 weights, which under FSDP are the shards
    assert memory.optimizer == (8 if sharded == "parameters" else 12) * share
    assert memory.parameters == (4 * share if sharded == "parameters" else 2 * n)


@pytest.mark.skipif(torch.__version__ < "2.10", reason="FSDP of older versions does not run without data")
def test_ends_of_the_model_are_units_unless_they_share_a_weight():
    """Embedding and head of 1,000 x 32 weights; as torchtitan shards them, and tied in the root."""
    plan, cluster = Plan(shard=8, micro_batch=4), Cluster("A100")
    for ties, n_units, largest in ((False, 4, 1_000 * 32 + 32), (True, 3, 1_000 * 32 + 32)):
        model = Decoder(1_000, 32, 2)
        if ties:
            model.head.weight = model.embed.weight
        stats = Statistics(model, torch.zeros(4, 8, dtype=torch.long))
        simulator = StepSimulator(StepModel(stats.live, stats.root, Recipe()), cluster, 32, 8)
        (stage,) = simulator.stages(plan)
        gathered = [unit for unit in (stage.root, *(unit.weights for unit in stage.units)) if unit.total.nbytes]
        assert (len(gathered), max(unit.shared.elements for unit in gathered)) == (n_units, largest)
        units = stats.parallel_plan(shard=8)
        assert len(units.units) + units.root_gathers == n_units
        gathers = [each for each in units.communication if each.operation == "all_gather"]
        assert max(each.nbytes // each.count for each in gathers) == 4 * largest


@pytest.mark.skipif(torch.__version__ < "2.10", reason="FSDP of older versions does not run without data")
@pytest.mark.parametrize("dtype", [torch.float32, None])
@pytest.mark.parametrize("ties", [False, True])
def test_fsdp_gathers_the_unit_before_and_reduces_the_one_after(ties, dtype):
    """A token, so that activations are small."""
    vocabulary = 200 if ties else 1_000
    model, ends = Decoder(vocabulary, 32, 4), 32 * vocabulary + 32
    if ties:
        model.head.weight = model.embed.weight
    block = sum(weight.numel() for weight in model.blocks[0].parameters())
    stats = Statistics(model, torch.zeros(1, 1, dtype=torch.long))
    recipe = Recipe(kernels="eager", gradient_dtype=dtype, master_weights=dtype is not None)
    step = stats.simulate(Plan(shard=8), Cluster("A100"), 8, recipe=recipe)
    reduced = 2 if dtype is None else 4
    with_root = 2 * 2 * ends + (3 * 2 + reduced) * block  # its parameters and gradients: it stays gathered
    of_head = (2 + reduced) * ends + 2 * block  # its gradients, in both dtypes, while the last block is gathered
    expected = with_root if ties else of_head
    gathered = step.memory[0].gathered
    assert 0.97 * expected < gathered <= expected
    timeline = step.parallel_plan().memory(optimizer="adamw").timeline
    held = [dict(zip(CATEGORIES, point.held, strict=True)) for point in timeline]
    whole = 2 * ends if ties else 0  # of the root, which autograd keeps as it does activations
    assert max(point["temporary"] for point in held) == pytest.approx(expected - whole, rel=0.05)


def test_ranks_that_shard_hold_parts_of_parameters_by_default():
    assert Plan(shard=16) == Plan(shard=16, sharded="parameters") == Plan(shard=16, sharded=3)
    assert hash(Plan(shard=16)) == hash(Plan(shard=16, sharded=3))
    assert Plan(data=16).sharded is None


def test_a_step_that_raises_says_why():
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

        def forward(self, x):
            if torch.is_grad_enabled() and x.dtype is torch.bfloat16:
                raise ValueError("no half precision here")
            return self.layers(x)

    stats = Statistics(Fails(), (4, 8))
    for plan in (Plan(), Plan(tensor=2)):
        with pytest.raises(StepError, match=r"^the forward of the step failed: ValueError: no half precision here$"):
            stats.simulate(plan, Cluster("A100"), 8)


class Scripted(nn.Sequential):
    """Two linear layers with a function in TorchScript, or with a linear layer in TorchScript."""

    def __init__(self, *, has_weights):
        inner = nn.Linear(8, 8) if has_weights else nn.ReLU()
        super().__init__(nn.Linear(8, 8), torch.jit.script(inner), nn.Linear(8, 8))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_weights_in_torchscript_are_refused_and_functions_run():
    models = [Scripted(has_weights=True), Scripted(has_weights=False)]
    scripted, function = (Statistics(model, torch.ones(4, 8)) for model in models)
    with (
        untouched(models[0]),
        pytest.raises(InputError, match=r"^1 is TorchScript, .*; pass the model before torch.jit"),
    ):
        scripted.simulate(Plan(micro_batch=4), Cluster("A100"), 4)
    with untouched(models[1]):
        memory = function.simulate(Plan(micro_batch=4), Cluster("A100"), 4).memory[0]
    assert memory.parameters == 2 * 2 * (8 * 8 + 8)


@pytest.mark.filterwarnings("ignore")
def test_a_model_that_is_sharded_already_is_refused():
    parallel = pytest.importorskip("torch.distributed.tensor.parallel")
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with group() as mesh:
        parallel.parallelize_module(model, mesh, {"1": parallel.ColwiseParallel()})
        stats = Statistics(model, torch.ones(4, 8))
        with pytest.raises(
            InputError, match=r"^1.weight is sharded already .*; pass the model before parallelize_module"
        ):
            stats.simulate(Plan(micro_batch=4), Cluster("A100"), 4)


@pytest.mark.parametrize("name", ["item", "mask"])
def test_a_forward_that_needs_values_says_so_without_another_device(name):
    class Chooses(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            return out[out[:, 0] > 0] if name == "mask" else out if out.sum() > 0 else -out

    stats = Statistics(Chooses(8, 8), torch.ones(4, 8))
    with pytest.raises(InputError, match=r"^aten.* needs the values of a tensor, but plans are simulated on shapes"):
        stats.simulate(Plan(micro_batch=4), Cluster("A100"), 4)
    with pytest.raises(InputError, match=r"^aten.* needs the values of a tensor, but plans are simulated on shapes"):
        stats.simulate(Plan(tensor=2), Cluster("A100", devices_per_node=2), 4)


def test_messages_between_nodes_take_the_network():
    """Four stages of four ranks in nodes of eight: only the middle boundary leaves a node."""
    simulator = StepSimulator(step_model(), Cluster("A100", nodes=2), 32, LENGTH)
    network, nbytes = simulator.time_model.network, 2 * LENGTH * 32
    inside, across = (network.send(nbytes, is_inside=each) for each in (True, False))
    items = simulator.items(Plan(tensor=4, pipeline=4, checkpoint="every"))
    assert [each.message for each in items.loads] == [inside, across, inside, 0.0]
    # ranks 0 to 5 send to ranks 6 to 11, of which two are in their node
    items = StepSimulator(step_model(), Cluster("A100", nodes=2), 36, LENGTH).items(Plan(data=6, pipeline=2))
    assert items.loads[0].message == across
    # interleaved stages go back from the last rank to the first one
    interleaved = Plan(tensor=4, pipeline=4, virtual_stages=1, schedule="interleaved1f1b")
    assert [each.message for each in simulator.items(interleaved).loads] == [inside, across, inside, 0.0]
    around = simulator.items(Plan(tensor=4, pipeline=3, virtual_stages=2, schedule="interleaved1f1b")).loads
    assert [each.message for each in around] == [inside, across, across, inside, across, 0.0]


@pytest.mark.skipif(torch.__version__ < "2.9", reason="torch has the schedule since 2.9")
def test_stages_on_one_rank_send_nothing():
    items = StepSimulator(step_model(), Cluster("A100"), 32, LENGTH).items(
        Plan(pipeline=2, virtual_stages=2, schedule="dualpipev")
    )
    assert [each.message > 0 for each in items.loads] == [True, False, True, False]


def test_each_boundary_has_its_own_bytes():
    """Blocks that halve their width: each stage takes what its first block takes."""

    class Halves(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.up, self.down = nn.Linear(width, width), nn.Linear(width, width // 2)

        def forward(self, x):
            return self.down(torch.relu(self.up(x)))

    layers = nn.Sequential(nn.Linear(64, 64), *(Halves(64 >> number) for number in range(4)))
    stats = Statistics(layers, (2, 64))
    model = StepModel(stats.live, stats.root, Recipe())
    stages = StepSimulator(model, Cluster("A100"), 8, 0).stages(Plan(pipeline=4, micro_batch=2))
    assert [each.crossing_bytes for each in stages] == [0, *(2 * 2 * width for width in (32, 16, 8))]


def test_eight_bits_are_of_products_alone():
    """Memory and messages are as in bfloat16; products are faster, and their operands are cast."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(4)))
        stats = Statistics(model, (4096, 4096))
    cluster, plan = Cluster("H100"), Plan(shard=2, micro_batch=4096)
    half, eight = (
        stats.simulate(plan, cluster, 8192, recipe=Recipe(precision=dtype))
        for dtype in (torch.bfloat16, torch.float8_e4m3fn)
    )
    assert eight.memory == half.memory
    assert eight.model_flops == half.model_flops
    assert eight.peak_flops == cluster.device.peak(torch.float8_e4m3fn) > half.peak_flops
    assert 0.5 < eight.seconds_by_cause["compute"] / half.seconds_by_cause["compute"] < 0.95
    part = StepModel(stats.live, stats.root, Recipe(precision=torch.float8_e4m3fn)).parts(Plan(micro_batch=4096))["2"]
    n = 4096**2
    assert sorted((work.op_class, work.nbytes, times) for work, times in part.works["forward"]) == [
        ("elementwise", 3 * n, 2),  # both operands
        ("gemm", 4 * n, 1),  # two operands of a byte, and a result of two
        ("reduction", 2 * n, 2),  # the largest absolute value of both operands
    ]
    # (cast in the forward, in the backward): gradients are an operand of two products; a compiled pass casts them once;
    # Transformer Engine keeps the cast input for the backward, and casts weights once per step
    for kernels, casts in {"eager": (2, 4), "compiled": (2, 3), "fused": (1, 1)}.items():
        model = StepModel(stats.live, stats.root, Recipe(precision=torch.float8_e4m3fn, kernels=kernels))
        works = model.parts(Plan(micro_batch=4096))["2"].works
        counted = [sum(times for work, times in works[name] if work.name == "cast") for name in ("forward", "backward")]
        assert tuple(counted) == casts
        # the input of the layer, which is the result of another one and which nothing else reads, in 16 or 8 bits
        assert model.parts(Plan(micro_batch=4096))["2"].kept_bytes == (n if kernels == "fused" else 2 * n)
    with pytest.raises(
        InputError, match=r"does not apply Recipe\(precision=torch\.float8_e4m3fn\): convert the layers with t"
    ):
        eight.to_code()
    with pytest.raises(InputError, match=r"the peak of A100 80GB with torch\.float8_e4m3fn is not known"):
        stats.simulate(plan, Cluster("A100"), 8192, recipe=Recipe(precision=torch.float8_e4m3fn))


def test_gradients_are_reduced_in_buckets_while_the_backward_runs():
    """Two layers of 1,200 x 3,000: 27.5 MiB of float32 gradients are two buckets."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1200, 3000, bias=False), nn.ReLU(), nn.Linear(3000, 1200, bias=False))
    stats, plan = Statistics(model, (8, 1200)), Plan(data=2, micro_batch=8)
    cluster = Cluster("A100", nodes=2, devices_per_node=1, network_bandwidth=1e9, network_efficiency=1.0)
    simulator = StepSimulator(StepModel(stats.live, stats.root, Recipe()), cluster, 16, 0)
    items, network = simulator.items(plan), simulator.time_model.network
    nbytes = 4 * 2 * 1200 * 3000
    assert 25 * 2**20 < nbytes < 2 * 25 * 2**20
    bucket = network.seconds("all_reduce", nbytes / 2, network.group(2))
    backward = items.loads[0].backward
    assert bucket > backward  # the first bucket follows half of the backward, and hides the other half
    assert items.updates[0].gradients == pytest.approx(2 * bucket - backward / 2)
    alone = StepModel(stats.live, stats.root, Recipe(overlap_gradients=False))
    at_once = StepSimulator(alone, cluster, 16, 0).items(plan).updates[0].gradients
    assert at_once == pytest.approx(network.seconds("all_reduce", nbytes, network.group(2)))


def test_stages_by_cost_and_by_hand():
    """A head of 512 x 4,096 that takes as long as eight blocks of 512 x 512: 10 and 2 of 12 blocks."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(512, 512, bias=False)

        def forward(self, x):
            return torch.relu(self.layer(x))

    class Tower(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(12))
            self.head = nn.Linear(512, 4096, bias=False)

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    with torch.device("meta"):
        stats = Statistics(Tower(), (4, 512))
    simulator = StepSimulator(StepModel(stats.live, stats.root, Recipe()), Cluster("A100"), 16, 0)

    def dealt(blocks):
        stages = simulator.stages(Plan(pipeline=2, micro_batch=4, blocks=blocks))
        return [sum(unit.is_block for unit in stage.units) for stage in stages]

    assert dealt("even") == [6, 6]
    assert dealt("cost") == [10, 2]
    assert dealt((7, 5)) == dealt([7, 5]) == [7, 5]
    assert dealt((12, 0)) == [12, 0]
    with pytest.raises(InputError, match=r"blocks=\(6, 5\) are 11 blocks, but the model has 12; pass numbers that add"):
        dealt((6, 5))
    with pytest.raises(InputError, match="14 stages need 14 blocks or more, but the model has 12; use fewer"):
        simulator.stages(Plan(pipeline=2, virtual_stages=7, schedule="interleaved1f1b", blocks="cost"))
    step = stats.simulate(Plan(pipeline=2, micro_batch=4, blocks=(7, 5)), Cluster("A100"), 16)
    assert "blocks=(7, 5)" in step.obstacle


def test_a_faster_network_is_faster():
    model, plan = step_model(), Plan(data=16)
    slow, fast = (
        StepSimulator(model, Cluster("A100", nodes=2, network_bandwidth=each), 16, LENGTH).simulate(plan).step_seconds
        for each in (1e9, 50e9)
    )
    assert fast < slow


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan(tensor=32), "the plan is for 32 ranks .tensor 32., but the cluster has 16 devices"),
        (Plan(data=3), "global_batch=32 cannot be dealt to data x shard = 3 ranks .* pass a multiple of 3"),
        (Plan(pipeline=8), "8 stages need 6 blocks or more, but the model has 4; use fewer stages"),
        (Plan(context=2), "context=2 needs a model whose attention is scaled_dot_product_attention"),
        (Plan(tensor=3), r"tensor=3 does not divide"),
        (
            Plan(pipeline=2, virtual_stages=2, data=8, micro_batch=4, schedule="interleaved1f1b"),
            "a multiple of pipeline",
        ),
    ],
)
def test_what_does_not_fit_together(simulator, plan, message):
    with pytest.raises(InputError, match=message):
        simulator.simulate(plan)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Plan(tensor=0), "tensor must be an integer >= 1, got 0"),
        (lambda: Plan(sharded=4), "sharded must be one of 'optimizer', 'gradients', 'parameters' .*, or None, got 4"),
        (lambda: Plan(sharded=1.0), "sharded must be one of .*, or None, got 1.0"),
        (lambda: Plan(shard=2.0), "shard must be an integer >= 1, got 2.0"),
        (lambda: Plan(shard=2, sharded=0), "sharded=0 shards nothing over shard=2 ranks; pass data=2 for whole copies"),
        (lambda: Plan(shard=4, expert=3), "expert=3 must divide tensor x context x shard x data = 4"),
        (
            lambda: Plan(data=2, shard=2, expert=2),
            "data=2 copies of shards are not costed with expert=2; pass shard=4 and data=1",
        ),
        (lambda: Plan().microbatches(4.0), "global_batch must be an integer >= 1, got 4.0"),
        (lambda: Plan(checkpoint="some"), "checkpoint must be None, 'every', .* got 'some'$"),
        (lambda: Plan(schedule="best"), "schedule must be one of 'gpipe', .* got 'best'"),
        (lambda: Plan(sequence=True), "sequence=True shards activations .*; pass tensor >= 2"),
        (lambda: Plan(pipeline=2, schedule="zbv"), "schedule='zbv' has virtual_stages=2, got 1"),
        (lambda: Plan(virtual_stages=2), "schedule='1f1b' has virtual_stages=1, got 2"),
        (lambda: Recipe(optimizer="lion"), "optimizer must be one of 'sgd', .* got 'lion'"),
        (lambda: Recipe(precision=torch.int8), "precision must be a floating point torch.dtype"),
        (
            lambda: Recipe(attention="fast"),
            "attention must be None or one of 'flash1', 'flash2', 'flash3', 'cudnn', 'efficient', got 'fast'",
        ),
        (lambda: Recipe(copies_per_token=-1), "copies_per_token must be a number >= 0 or None, got -1"),
        (lambda: Recipe(host_seconds=-1), "host_seconds must be a number >= 0 or None, got -1"),
        (lambda: Recipe(overlap_experts="no"), "overlap_experts must be True or False, got 'no'"),
        (
            lambda: Recipe(state_dtype=None),
            "state_dtype must be a floating point torch.dtype, or its name such as 'bfloat16', got None",
        ),
        (lambda: Recipe(loss=3), "loss must be a function from the model's result to a scalar, got 3"),
        (
            lambda: Plan(blocks="equal"),
            "blocks must be 'even', 'cost' or the number .* of each of 1 stages, got 'equal'",
        ),
        (lambda: Plan(pipeline=2, blocks=(3,)), r"the number of blocks of each of 2 stages, got \(3,\)"),
        (lambda: Plan(pipeline=2, blocks=(3, True)), r"number of blocks of each of 2 stages, got \(3, True\)"),
        (lambda: Plan(sequence=2), "sequence must be True or False, got 2"),
        (lambda: Recipe(early_stop=1), "early_stop must be True, False or None, got 1"),
        (lambda: Recipe(kernels="fast"), "kernels must be one of 'eager', 'fused', 'compiled', got 'fast'"),
    ],
)
def test_unusable_values(make, message):
    with pytest.raises(InputError, match=message):
        make()


@pytest.mark.parametrize(
    ("length", "message"),
    [
        (0, "sequence_length must be an integer >= 1, got 0"),
        (16, r"sequence_length=16 needs a first input of tokens \(batch x length \[x features\]\); pass None"),
    ],
)
def test_a_length_that_no_input_has_is_refused(length, message):
    stats = Statistics(nn.Linear(8, 8), (2, 8))
    with pytest.raises(InputError, match=message):
        stats.simulate(Plan(), Cluster("A100"), 8, sequence_length=length)


def test_operators_of_unknown_work_are_named(simulator):
    class Solving(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.last(torch.linalg.solve(self.layer(x), x))

    model = nn.ModuleList(Solving() for _ in range(3))
    step = Statistics(nn.Sequential(*model), (2, 4, 4)).simulate(Plan(micro_batch=2), Cluster("A100"), 4)
    assert dict(step.uncounted_ops)["aten._linalg_solve_ex"] == 3  # in the forwards
    assert str(step).splitlines()[-1].startswith("Not counted: aten._linalg_solve_ex")
    assert not simulator.simulate(Plan()).uncounted_ops


class MovedBytes(TorchDispatchMode):
    """Adds up the bytes that operators read, each tensor once, and write; scalars are left out."""

    def __init__(self):
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        written = args[0] if func._schema.name.endswith("_") else out
        for tensors in (tree_leaves((args, kwargs or {})), tree_leaves(written)):
            self.nbytes += sum({id(each): each.nbytes for each in tensors if getattr(each, "ndim", 0)}.values())
        return out


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("sgd", lambda params: torch.optim.SGD(params, foreach=True)),
        ("sgd-momentum", lambda params: torch.optim.SGD(params, momentum=0.9, foreach=True)),
        ("adam", lambda params: torch.optim.Adam(params, foreach=True)),
        ("adamw", lambda params: torch.optim.AdamW(params, foreach=True)),
    ],
)
def test_an_optimizer_moves_the_bytes_of_its_kernels(simulator, name, make):
    """The second step of torch's own optimizer, behind the clipping of the gradients' norm."""
    params = [nn.Parameter(torch.ones(2**20)) for _ in range(4)]
    optimizer = make(params)
    for _ in range(2):
        for param in params:
            param.grad = torch.ones(2**20)
        with MovedBytes() as moved:
            nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
            optimizer.step()
    weights = Weights.of(weight_of(param, param, Recipe(precision=None), "trained") for param in params)
    recipe = Recipe(precision=None, optimizer=name, kernels="eager")
    time_model = simulator.time_model
    eager, fused = (
        StageTimer(TimeModel(time_model.cluster, of_kernels)).optimizer(weights)
        for of_kernels in (recipe, replace(recipe, kernels="fused"))
    )
    assert fused < eager == pytest.approx(time_model.moved("optimizer", moved.nbytes), rel=1e-6)


def test_megatron_passes_through_its_buffers_of_gradients(simulator):
    """What torch's own operators move when a buffer is set to zero, checked by its norm, and averaged over copies."""
    params = [nn.Parameter(torch.ones(2**20)) for _ in range(4)]
    weights = Weights.of(weight_of(param, param, Recipe(precision=None), "trained") for param in params)
    for averages in (False, True):
        with MovedBytes() as moved:
            buffer = torch.zeros(2**22)
            torch.linalg.vector_norm(buffer)
            if averages:
                buffer *= 0.5
        seconds = _timer(simulator, "fused").buffers(weights, averages=averages)
        assert seconds == pytest.approx(simulator.time_model.moved("buffers", moved.nbytes), rel=1e-6)
    assert _timer(simulator, "compiled").buffers(weights, averages=True) == 0


def _timer(simulator, kernels):
    return StageTimer(TimeModel(simulator.time_model.cluster, Recipe(precision=None, kernels=kernels)))


def test_checkpoints_that_do_not_stop_early_are_not_applied():
    stats, plan = Statistics(Decoder(64, 32, 2), torch.zeros(1, 16, dtype=torch.long)), Plan(checkpoint="every")
    whole, plain = (
        stats.simulate(plan, Cluster("A100"), 8, recipe=Recipe(early_stop=stops)) for stops in (False, None)
    )
    assert whole.hardware_flops > plain.hardware_flops > plain.model_flops == whole.model_flops
    assert whole.obstacle.startswith("parallel_plan does not apply Recipe(early_stop=False): its checkpoints stop")
    assert not plain.obstacle
