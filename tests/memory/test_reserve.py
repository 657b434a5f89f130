"""The reserve of torch's allocator for the first steps of a loop, against allocations that are worked out on paper."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.cuda import _memory_viz

from modelsummary import InputError, Statistics
from modelsummary.memory.replay import MemoryBlock, replayed
from tests.models import Call
from tests.untouched import untouched

MIB = 2**20
CUBLAS = 2 * 4 * MIB + 8 * 16 * 2**10
ON_CUDA = {"device": "cuda", "reserve": True}


def linear(width=1024, **options):
    """Return the statistics of a product of width x width weights and one row."""
    return Statistics(nn.Linear(width, width, bias=False), (1, width), **options)


def test_a_step_on_paper():
    # 4 MiB of weights in a first segment of 20 MiB, 4 KiB of inputs in one of 2 MiB. The first product: 4 KiB of
    # results, and the workspace of cuBLAS, 8.125 MiB: [-4, -8.125, 7.875]. The sum, its gradient, 4 MiB of gradients,
    # [-4, -8.125, -4, 3.875], and a workspace for the thread of the backward, in a second segment: [-8.125, 11.875].
    # The gradients are freed before the next step, which makes them at the same place.
    model = nn.Linear(1024, 1024, bias=False)
    with untouched(model):
        memory = Statistics(model, (1, 1024)).memory(optimizer="sgd", **ON_CUDA)
    reserve = memory.reserve
    assert (reserve.reserved, reserve.segments, reserve.fits) == (42 * MIB, (20 * MIB, 2 * MIB, 20 * MIB), True)
    large = 4 * MIB + 2 * CUBLAS + 4 * MIB
    assert 0 < reserve.max_allocated - large <= 5 * 4096
    assert reserve.fragmentation == reserve.reserved - reserve.max_allocated
    assert memory.peak == reserve.max_allocated  # no block is larger than what is in it
    assert memory.to_dict()["reserve"] == {
        "reserved_bytes": 42 * MIB,
        "fragmentation_bytes": reserve.fragmentation,
        "max_allocated_bytes": reserve.max_allocated,
        "fits": True,
        "limit_bytes": None,
        "expandable_segments": False,
    }
    assert "Reserved" in str(memory)
    assert "reserve" not in linear().memory().to_dict()


def test_the_state_of_the_optimizer_comes_at_the_end_of_the_first_step():
    # Adam: the weights, cuBLAS and the gradients as before: [-4, -8.125, -4, 3.875] and [-8.125, 11.875]. Then two
    # states of 4 MiB: [-8.125, -4, -4, 3.875]. The square roots of the update have a third segment: [-4, 16]
    reserve = linear().memory(optimizer="adam", **ON_CUDA).reserve
    assert reserve.segments == (20 * MIB, 2 * MIB, 20 * MIB, 20 * MIB)
    named = [(block.category, block.begin) for block in reserve.blocks if block.nbytes == 4 * MIB]
    weights, *others = sorted(named, key=lambda block: block[1])
    assert weights == ("params", 0)
    assert [category for category, _ in others].count("optimizer_state") == 2
    assert [category for category, _ in others].count("grads") == 3  # one per step
    assert others[0][0] == "grads"


def test_the_order_of_the_model_is_the_order_in_which_it_is_moved():
    inner = Call(lambda self, x: self.b(x) + self.scale, b=nn.Linear(600, 600, bias=False))
    inner.scale = nn.Parameter(torch.zeros(512, 600))
    model = Call(lambda self, x: self.first(x) * self.weight, first=inner)
    model.weight = nn.Parameter(torch.zeros(700, 1, 600).sum(1)[:512])
    model.register_buffer("table", torch.zeros(2000, 600))
    reserve = Statistics(model, (512, 600)).memory("inference", **ON_CUDA).reserve
    before = [block.nbytes for block in reserve.blocks if block.category in ("params", "buffers")]
    order = [
        tensor for module in (inner.b, inner, model) for tensor in module._parameters.values() if tensor is not None
    ]
    expected = [-(-tensor.untyped_storage().nbytes() // 512) * 512 for tensor in (*order, model.table)]
    assert before == expected


@pytest.mark.parametrize("settings", [{}, {"fused": True}])
def test_numbers_of_steps_are_on_the_host(settings):
    stats, optimizer = linear(256), torch.optim.Adam([torch.zeros(1, requires_grad=True)], **settings)
    on_device = 512 if settings else 0
    assert stats.memory(optimizer=optimizer, device="cuda").optimizer_state == 2 * 4 * 256**2 + on_device
    assert stats.memory(optimizer=optimizer).optimizer_state == 2 * 4 * 256**2 + 4  # the CPU is the host


def test_expandable_segments_and_a_limit():
    plain = linear().memory(optimizer="adam", **ON_CUDA).reserve
    expandable = linear().memory(optimizer="adam", expandable_segments=True, **ON_CUDA).reserve
    assert plain.reserved == 62 * MIB
    assert expandable.reserved == 42 * MIB  # 20 MiB at a time: 4 + 2 * 8.125 + 4 + 4 + 4 + 4 = 36.25 MiB
    tight = linear().memory(optimizer="adam", device="cuda", reserve="42MiB").reserve
    assert not tight.fits
    assert (tight.missing.category, tight.missing.nbytes) == ("temporary", 4 * MIB)
    assert "Out of memory: 44.04 MB leave no room for aten._foreach_sqrt, step, 4,194,304 bytes" in " ".join(
        str(tight).split()
    )
    assert linear().memory(optimizer="adam", device="cuda", reserve=62 * MIB).reserve.fits


def test_libraries_of_products_keep_a_workspace_in_each_thread():
    def kept(*layers, mode="train", **options):
        reserve = Statistics(nn.Sequential(*layers), (8, 64)).memory(mode, **ON_CUDA, **options).reserve
        return [block[2:4] for block in reserve.blocks if block.category == "workspace" and block.end is None]

    cublas, lt = ("cuBLAS", CUBLAS), ("cuBLASLt", MIB)
    plain, added = nn.Linear(64, 64, bias=False), nn.Linear(64, 64)
    assert kept(plain, plain) == [cublas, cublas]
    assert kept(plain, added) == [cublas, lt, cublas]  # as torch recorded on an H100
    assert kept(plain, added, mode="inference") == [cublas, lt]
    assert kept(nn.Sequential(added, nn.ReLU()), checkpoint=["0"]) == [cublas, lt, cublas, lt]  # runs again
    assert kept(nn.Linear(64, 1)) == [cublas, cublas]  # no row
    assert kept(nn.ReLU(), mode="inference") == []
    timeline = Statistics(added, (8, 64)).memory(device="cuda").timeline
    assert min(point.held[-1] for point in timeline) == 2 * CUBLAS + MIB  # all of them stay from the first step on


@pytest.mark.parametrize("beta", [1, 2])
def test_products_that_write_into_a_tensor_have_the_same_workspaces(beta):
    product = Call(lambda self, x: torch.addmm(x[0], x, x, beta=beta, out=torch.empty_like(x)))
    reserve = Statistics(product, (8, 8)).memory("inference", **ON_CUDA).reserve
    libraries = [block.name for block in reserve.blocks if block.category == "workspace" and block.end is None]
    assert libraries == (["cuBLAS", "cuBLASLt"] if beta == 1 else ["cuBLAS"])


def test_nothing_to_allocate(tmp_path):
    reserve = Statistics(nn.Flatten(), (0, 4, 4)).memory("inference", **ON_CUDA).reserve
    assert (reserve.reserved, reserve.max_allocated, reserve.segments, reserve.fits) == (0, 0, (), True)
    snapshot = pickle.loads(reserve.write_memory_snapshot(tmp_path / "step.pickle").read_bytes())
    assert snapshot == {"device_traces": [[]], "segments": []}


def test_results_are_freed_and_gradients_accumulate():
    once = linear().memory(**ON_CUDA).reserve
    grads = [block for block in once.blocks if block.category == "grads"]
    assert [block.end is None for block in grads] == [False, False, True]
    kept = linear().memory(accumulates=True, **ON_CUDA).reserve
    assert [(block.begin, block.end) for block in kept.blocks if block.category == "grads"] == [(0, None)]
    forward = linear().memory("inference", **ON_CUDA).reserve
    assert {block.category for block in forward.blocks if block.end is None and block.nbytes} == {
        "params",
        "inputs",
        "workspace",  # cuBLAS keeps it
    }


def test_unusable_arguments():
    stats = linear()
    with pytest.raises(
        InputError, match=r"^torch's allocator is replayed for CUDA devices, but the step is on cpu; pass"
    ):
        stats.memory(reserve=True)
    with pytest.raises(InputError, match=r"^reserve must be an integer >= 1 or text such as '24GB' .*, got 0$"):
        stats.memory(reserve=0, device="cuda")
    with pytest.raises(InputError, match=r"^expandable_segments=True changes what .*; pass reserve=True with it$"):
        stats.memory(expandable_segments=True, device="cuda")
    with pytest.raises(InputError, match=r"^expandable_segments must be True or False, got 1$"):
        stats.memory(expandable_segments=1, device="cuda")
    with pytest.raises(InputError, match="but the step is on cpu"):
        stats.max_batch_size("1GB", expandable_segments=True)


def test_torch_reads_the_snapshot(tmp_path):
    reserve = linear().memory(optimizer="adam", **ON_CUDA).reserve
    snapshot = pickle.loads(reserve.write_memory_snapshot(tmp_path / "step.pickle").read_bytes())
    assert sorted(segment["total_size"] for segment in snapshot["segments"]) == sorted(reserve.segments)
    summary = _memory_viz.segsum(snapshot)
    assert f"total_reserved: {_memory_viz.Bytes(reserve.reserved)}\n" in summary
    assert "Active Memory Timeline" in _memory_viz.trace_plot(snapshot)
    assert "cuBLAS" in _memory_viz.memory(snapshot, format_flamegraph=str)
    with pytest.raises(InputError, match="cannot be written"):
        reserve.write_memory_snapshot(tmp_path / "missing" / "step.pickle")


def test_the_largest_batch_fits_with_its_reserve():
    def stats(batch):
        return Statistics(nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)), (batch, 256))

    limit = 64 * MIB
    batch = stats(4).max_batch_size(limit, optimizer="sgd", device="cuda")
    fit, over = (stats(n).memory(optimizer="sgd", device="cuda", reserve=limit).reserve for n in (batch, batch + 1))
    assert (fit.fits, over.fits) == (True, False)
    assert stats(batch + 1).memory(optimizer="sgd", device="cuda").peak <= limit  # the tensors alone would fit
    with_expandable = stats(4).max_batch_size(limit, optimizer="sgd", device="cuda", expandable_segments=True)
    assert with_expandable > batch  # 4 MiB of the limit are less than a segment


BLOCKS = st.lists(
    st.tuples(st.integers(0, 30 * MIB), st.integers(0, 20), st.one_of(st.none(), st.integers(0, 20))), max_size=30
)


@given(BLOCKS, st.booleans())
def test_a_replay_holds_what_is_alive(entries, expandable_segments):
    blocks = [
        MemoryBlock(0, "temporary", str(index), nbytes, begin, None if duration is None else begin + duration)
        for index, (nbytes, begin, duration) in enumerate(entries)
    ]
    replays = replayed(blocks, expandable_segments=expandable_segments)
    alive = [block for block in blocks if block.nbytes and block.end is None]
    assert sorted(alive) == sorted(block for replay in replays for block in replay.contents.values())
    for replay in replays:
        assert replay.reserved >= replay.allocated >= replay.allocator.allocated >= sum(block.nbytes for block in alive)
        held = [block for segment in replay.allocator.segments() for block in segment if not block.is_free]
        assert sum(block.requested for block in held) == sum(block.nbytes for block in alive)
