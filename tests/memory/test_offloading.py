"""Saved tensors that wait on the host: the same bits, the bytes that leave, and plans that choose them."""

from __future__ import annotations

import copy
import gc
import json
import pickle
from functools import partial

import pytest
import torch
from torch import nn

from modelsummary import InputError, Statistics, apply_checkpoint
from modelsummary.devices.target import target_of
from modelsummary.memory.planning import Planner
from modelsummary.memory.step_options import step_plan
from tests.memory.test_planning import MODELS, Attention, Checkpointed, Residual, bits, images, large
from tests.models import Call
from tests.untouched import untouched

INPUT = 8 * 64 * 64 * 4  # bytes of what goes into a block, and of what each of its parts returns


def decoder(count=4):
    torch.manual_seed(0)
    return nn.Sequential(*(Attention() for _ in range(count)), nn.Linear(64, 8)), torch.randn(8, 64, 64)


def planner(stats, link=25e9, **options):
    step = step_plan("train", {"device": "cuda", **options}, stats.root)
    return Planner(stats._live, stats.root, step, target_of("A100"), "operator", lambda: None, link)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "noise"])
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_same_bits(name, is_checkpointed):
    """All that the blocks save moves, parameters, too; with a checkpoint, its inputs and what it keeps."""
    torch.manual_seed(0)
    make, size = MODELS[name]
    plain, x = make(), torch.randn(size)
    moving = copy.deepcopy(plain)
    blocks = [fqn for fqn, block in plain.named_children() if list(block.children())]
    checkpoint = blocks if is_checkpointed and name not in ("batch norm", "shared") else []
    applied = apply_checkpoint(moving, checkpoint, offload={fqn: range(100) for fqn in blocks})
    for _ in range(2):
        assert all(map(torch.equal, bits(moving, x), bits(plain, x)))
        moving.zero_grad()
        plain.zero_grad()
    applied.undo()
    assert not any("forward" in vars(module) for module in moving.modules())


def test_bytes_that_leave():
    """By hand: of four blocks, three have left when the forward ends, and the last one is on its way."""
    model, x = decoder()
    stats = Statistics(model, x)
    inputs = {str(number): [0] for number in range(4)}
    plain, moved = (stats.memory(device="cuda", checkpoint=list(inputs), offload=offload) for offload in (None, inputs))
    assert plain.held_after_forward - moved.held_after_forward == 2 * INPUT  # the first one is the input of the step
    assert moved.offloaded == 4 * INPUT
    assert moved.recomputed_macs == plain.recomputed_macs
    assert f"Moved to the host until the backward: {4 * INPUT / 1e3:.2f} kB" in str(moved)


def test_a_cpu_saves_nothing():
    """Its memory is the host's: what was copied stays, and takes the bytes that a real step takes."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU()), nn.Linear(256, 64)))
    stats = Statistics(model, (512, 64))
    plain, moved = stats.memory(), stats.memory(offload={"0": [1]})
    assert moved.offloaded > 0
    assert moved.held_after_forward >= plain.held_after_forward
    measured = stats.measure_memory(offload={"0": [1]})
    assert measured.held_after_forward == pytest.approx(moved.held_after_forward, abs=64)
    assert measured.peak == pytest.approx(moved.peak, abs=64)


def test_transfers_of_one_block_are_under_way(monkeypatch):
    """What one block sends is let go while the next one sends; in the backward, as much comes back ahead."""
    from modelsummary.capture import offloading

    events = []
    for name in ("to_host", "to_device"):
        original = getattr(offloading, name)
        monkeypatch.setattr(
            offloading, name, lambda *args, name=name, original=original: events.append(name) or original(*args)
        )
    let_go = offloading.HostStorage.let_go
    monkeypatch.setattr(offloading.HostStorage, "let_go", lambda self: events.append("let_go") or let_go(self))
    model, x = decoder()
    apply_checkpoint(model, [], offload={str(number): [5] for number in range(4)})
    bits(model, x)
    sent = [event for event in events if event != "to_device"]
    assert sent == ["to_host", "to_host", "let_go", "to_host", "let_go", "to_host", "let_go"]
    assert events[len(sent) :] == ["to_device"] * 3  # the last one was still there


def test_tensors_that_are_saved_several_times_move_once():
    shared = Call(lambda self, x: self.one(x).sin() * self.two(x).cos(), one=nn.Linear(64, 64), two=nn.Linear(64, 64))
    model = nn.Sequential(nn.Linear(64, 64), shared)
    memory = Statistics(model, (1024, 64)).memory(offload={"1": range(20)})
    assert memory.offloaded == 5 * 1024 * 64 * 4 + 2 * 64 * 64 * 4  # its input, four results; two weights


@pytest.mark.parametrize("name", ["decoder", "adapters", "frozen", "batch norm", "in place", "noise"])
def test_plans(name, monkeypatch):
    """Peaks fit, the simulated step is the one of ``memory``, and the step has the same bits."""
    monkeypatch.setattr("modelsummary.memory.moving.LEAST_MOVED", 2**12)
    torch.manual_seed(0)
    make, size = MODELS[name]
    model, x = make(), torch.randn(size)
    stats = Statistics(model, x)
    plain = stats.memory(device="cuda", workspaces=False).peak
    search = planner(stats, 1e12, workspaces=False)
    for share in (0.9, 0.7):
        with untouched(model):
            plan = search.plan(int(share * plain))
        assert plan.offload
        assert plan.peak <= share * plain
        options = {"checkpoint": plan.checkpoint, "offload": plan.offload}
        memory = stats.memory(device="cuda", workspaces=False, **options)
        assert (memory.peak, memory.offloaded) == (plan.peak, plan.offloaded)
        # chosen for CUDA, whose operators are others; without attention, the CPU has the same
        if name not in ("decoder", "adapters", "frozen"):
            plain_model, planned, coded = (copy.deepcopy(model) for _ in range(3))
            plan.apply(planned)
            exec(plan.to_code(), {"model": coded})
            wanted = bits(plain_model, x)
            for other in (planned, coded):
                assert all(map(torch.equal, bits(other, x), wanted))


def test_a_fast_link_is_better_than_to_run_again():
    stats = large()
    budget = int(0.6 * stats.memory(device="cuda").peak)
    seconds = {link: planner(stats, link).plan(budget).seconds for link in (None, 1e9, 25e9, 1e13)}
    assert seconds[1e13] <= seconds[25e9] <= seconds[1e9] <= seconds[None]
    assert seconds[1e13] == 0
    plan = stats.memory_plan(budget, device="A100", offload=True)
    assert plan.seconds == seconds[25e9]
    assert json.loads(json.dumps(plan.to_dict()))["offload"] == {
        fqn: list(moved) for fqn, moved in plan.offload.items()
    }
    assert "Moved to the host in" in str(plan)
    curve = stats.memory_curve(5, device="A100", offload=25e9)
    assert curve[-1].peak <= stats.memory_curve(5, device="A100")[-1].peak


def test_what_must_not_move(monkeypatch):
    """What two blocks save, the result of the model, and what is written after it was saved."""
    monkeypatch.setattr("modelsummary.memory.moving.LEAST_MOVED", 2**12)

    def forward(self, x):
        mask = self.mask(x).sigmoid()
        for block in self.blocks:
            x = block(x * mask) * mask
        return x.exp()

    blocks = nn.ModuleList(Call(lambda self, x: self.inner(x).exp(), inner=nn.Linear(64, 64)) for _ in range(3))
    stats = Statistics(Call(forward, mask=nn.Linear(64, 64), blocks=blocks), (256, 64))
    search = planner(stats, 1e12, workspaces=False)
    moved = {
        number for block in search._blocks.values() for way in block.ways for number in (s.number for s in way.moved)
    }
    assert moved == {0}  # the input of the product; a product outside saves the exponential and the mask, too
    noise = planner(Statistics(MODELS["noise"][0](), (256, 64)), 1e12, workspaces=False)
    for block in noise._blocks.values():  # the noise of ``rrelu`` is saved before the operator draws it
        assert all(way.kept is not None or len(way.moved) <= 6 for way in block.ways)


def test_copies_of_an_applied_model():
    model, x = decoder()
    apply_checkpoint(model, ["0"], offload={"0": [0], "1": [0, 5]})
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(map(torch.equal, bits(other, x), bits(model, x)))
        assert other[0].forward.args[1] is other[1].forward.args[1] is not model[0].forward.args[1]
        model.zero_grad()


def sizes_seen(numbers):
    """Return the sizes of the tensors that hooks see around a block whose tensors of these numbers move."""
    model, x = decoder(1)
    apply_checkpoint(model, [], offload={"0": numbers})
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: sizes.append(tensor.shape) or tensor, lambda t: t):
        model(x)
    return sizes


def test_other_hooks_see_what_stays():
    sizes = sizes_seen([])
    assert sizes_seen([1]) == [sizes[0], *sizes[2:]]


def test_an_error_leaves_nothing_on_its_way():
    model, x = decoder()
    apply_checkpoint(model, [], offload={str(number): [0, 5] for number in range(4)})
    handle = model[2].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(x)
    handle.remove()
    plain, _ = decoder()
    assert all(map(torch.equal, bits(model, x), bits(plain, x)))


def test_a_host_without_memory_ends_the_step_alone(monkeypatch):
    def fails(*_):
        raise MemoryError("no memory")

    monkeypatch.setattr("modelsummary.capture.offloading.to_host", fails)
    model, x = decoder()
    apply_checkpoint(model, [], offload={"1": [0]})
    with pytest.raises(MemoryError):
        model(x)
    gc.collect()  # an error in ``__del__`` is a warning, and a failure


def test_numbers_may_come_from_any_iterable():
    model, x = decoder()
    stats = Statistics(model, x)
    moved = [stats.memory(checkpoint=["1"], offload={"1": numbers}).offloaded for numbers in ([0], iter([0]), {0})]
    assert moved == [INPUT] * 3


def test_twice_through_a_graph_and_several_forwards():
    model, x = decoder()
    plain = copy.deepcopy(model)
    apply_checkpoint(model, ["1"], offload={str(number): [0, 5, 9] for number in range(4)})
    for one in (model, plain):
        first, second = one(x).square().mean(), one(2 * x).square().mean()
        first.backward(retain_graph=one[1] is None)
        second.backward()
    assert all(map(torch.equal, *([p.grad for p in one.parameters()] for one in (model, plain))))
    apply = partial(torch.autograd.grad, inputs=[*model[2].parameters()], retain_graph=True)
    model[1].__dict__.pop("forward")  # a checkpoint that keeps results runs once
    loss = model(x).sum()
    assert all(map(torch.equal, apply(loss), apply(loss)))


def test_refusals():
    stats = Statistics(nn.Sequential(*(Attention() for _ in range(2))), (2, 8, 64))
    for options, message in [
        ({"offload": True}, "by seconds, but device=None; pass the name of an accelerator"),
        (
            {"offload": -1.0, "device": "A100"},
            "pass offload=True, or the bytes per second of the link in one direction",
        ),
        ({"offload": {"0": [1]}, "device": "A100"}, "a memory plan chooses what moves to the host"),
        ({"offload": True, "device": "TPU v5e"}, "the link of TPU v5e to its host is not known"),
        ({"offload": True, "device": "A100", "by": "macs"}, "by='macs' counts multiply-adds; pass by='latency'"),
    ]:
        with pytest.raises(InputError, match=message):
            stats.memory_plan(10**6, **options)
    for offload, message in [
        ({"7": [1]}, "offload names '7', but the model has no such module"),
        ({"0": [-1]}, "offload must give numbers of saved tensors of '0'"),
        ({"0": 3}, "offload must give numbers of saved tensors of '0', such as \\[0, 2\\], got 3"),
        ({"1[0:2]": [0]}, "offload names '1\\[0:2\\]', but the model has no such module"),
        ({0: [1]}, "offload must map names of modules to numbers of saved tensors, got 0"),
        (["0"], "offload must map names of modules to numbers of saved tensors"),
    ]:
        with pytest.raises(InputError, match=message):
            stats.memory(offload=offload)
        with pytest.raises(InputError, match=message), untouched(stats._live.model):
            apply_checkpoint(stats._live.model, ["0"], offload=offload)
    with pytest.raises(InputError, match="a compiled step moves no saved tensors to the host"):
        stats.memory("compiled", offload={"0": [1]})
    with pytest.raises(InputError, match="an inference moves no saved tensors to the host; leave out offload="):
        stats.memory("inference", offload={"0": [1]})
    own = Statistics(nn.Sequential(*(Checkpointed() for _ in range(3)), nn.Linear(64, 8)), (8, 64, 64))
    with pytest.raises(InputError, match="as the model has checkpoints of its own"):
        own.memory_plan(int(0.9 * own.memory(device="cuda").peak), device="A100", offload=True)


def test_batch_norm_moves_where_it_must_not_run_again():
    stats = Statistics(images(Residual), (64, 3, 64, 64))
    budget = int(0.8 * stats.memory(device="cuda").peak)
    with pytest.raises(InputError, match="is too little"):
        stats.memory_plan(budget, device="A100")
    plan = stats.memory_plan(budget, device="A100", offload=True)
    assert plan.peak <= budget
    assert plan.offload
    with pytest.raises(InputError, match=r"blocks recomputed and [\d,]+ bytes on the host a step takes"):
        stats.memory_plan(budget // 4, device="A100", offload=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="moves tensors of a CUDA device")
def test_on_cuda():
    """The same bits, and no more bytes than were simulated, with streams."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Attention(512) for _ in range(6))).cuda()
    x = torch.randn(16, 1024, 512, device="cuda")
    stats = Statistics(model, x)
    plan = stats.memory_plan(int(0.6 * stats.memory().peak), device="A100", offload=True)
    assert plan.offload
    grads = []
    for is_planned in (False, True):
        if is_planned:
            plan.apply(model)
            torch.cuda.reset_peak_memory_stats()
        model.zero_grad()
        model(x).sum().backward()
        if is_planned:
            assert torch.cuda.max_memory_allocated() <= 1.01 * plan.peak + sum(grad.nbytes for grad in grads[0])
        grads.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *grads))


def test_tensors_that_no_module_saves_are_refused():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    stats = Statistics(model, (4, 8))
    for method in (stats.memory, stats.measure_memory):
        with pytest.raises(InputError, match=r"saved tensor 99 of '0', which saves 1 tensor in this step"):
            method(offload={"0": [99]})
    with pytest.raises(InputError, match=r"saved tensor 4 of '', which saves 4 tensors"):
        stats.memory(offload={"": [4]})
    assert stats.memory(offload={"": [3, 4]}).offloaded > 0
