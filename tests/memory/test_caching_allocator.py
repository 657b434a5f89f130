"""The allocator against sequences that are worked out on paper, and against what any allocator must keep."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelsummary.memory.caching_allocator import CachingAllocator, OutOfMemory

KIB, MIB = 2**10, 2**20


def sizes(allocator):
    """Return the sizes of the blocks of each segment; the ones in use are negative."""
    return [[block.nbytes if block.is_free else -block.nbytes for block in blocks] for blocks in allocator.segments()]


@pytest.mark.parametrize(
    ("nbytes", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),  # the least block, in a segment for small requests
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),  # the largest small request
        (MIB + 1, MIB + 512, 20 * MIB),  # shares a segment of 20 MiB
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),  # has its own segment
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),  # the rest, 2 MiB - 512 bytes, is more than 1 MiB and is cut off
        (11 * MIB, 12 * MIB, 12 * MIB),  # a rest of 1 MiB stays in the block
    ],
)
def test_sizes_are_rounded_and_pools_have_segments(nbytes, allocated, reserved):
    allocator = CachingAllocator()
    block = allocator.allocate(nbytes)
    assert (allocator.allocated, block.requested, allocator.reserved) == (allocated, nbytes, reserved)
    allocator.free(block)
    assert (allocator.allocated, allocator.reserved) == (0, reserved)
    assert sizes(allocator) == [[reserved]]  # joined with the rest


def test_a_dozen_requests_on_paper():
    allocator = CachingAllocator()
    a = allocator.allocate(3 * MIB)  # L1 = [-3, 17]
    b = allocator.allocate(5 * MIB)  # L1 = [-3, -5, 12]
    c = allocator.allocate(MIB)  # S1 = [-1, 1]
    d = allocator.allocate(12 * MIB)  # L1 = [-3, -5, -12]: the rest has exactly this size
    e = allocator.allocate(12 * MIB)  # L2 = [-12], a segment of its own
    assert sizes(allocator) == [[-3 * MIB, -5 * MIB, -12 * MIB], [-MIB, MIB], [-12 * MIB]]
    allocator.free(b)  # L1 = [-3, 5, -12]
    f = allocator.allocate(4 * MIB)  # the rest of 1 MiB is not more than 1 MiB: L1 = [-3, -5, -12]
    assert (f.requested, f.nbytes) == (4 * MIB, 5 * MIB)
    allocator.free(a)
    allocator.free(f)  # joined: L1 = [8, -12]
    g = allocator.allocate(6 * MIB)  # L1 = [-6, 2, -12]
    allocator.free(e)  # L2 = [12]
    h = allocator.allocate(3 * MIB // 2)  # best fit: the 2 MiB of L1, whole, not the 12 MiB of L2
    assert (h.address, h.nbytes) == (g.address + 6 * MIB, 2 * MIB)
    i = allocator.allocate(7 * MIB)  # L2 = [-7, 5]
    j = allocator.allocate(600 * KIB)  # S1 = [-1, -0.6, 0.4]
    k = allocator.allocate(600 * KIB)  # S2 = [-0.6, 1.4]
    assert allocator.reserved == (20 + 2 + 12 + 2) * MIB
    assert allocator.allocated == (6 + 2 + 12 + 7 + 1) * MIB + 1200 * KIB
    for block in (c, d, g, h, i, j, k):
        allocator.free(block)
    assert sizes(allocator) == [[20 * MIB], [2 * MIB], [12 * MIB], [2 * MIB]]
    assert [change.action for change in allocator.changes] == ["segment_alloc"] * 4
    allocator.release_cached()
    assert (allocator.reserved, allocator.segments()) == (0, [])


def test_small_rests_are_cut_off_down_to_512_bytes():
    allocator = CachingAllocator()
    allocator.allocate(MIB - 512)
    allocator.allocate(MIB)
    assert sizes(allocator) == [[512 - MIB, -MIB, 512]]
    allocator.allocate(1)
    assert sizes(allocator) == [[512 - MIB, -MIB, -512]]


def test_of_equally_large_free_blocks_the_first_is_taken():
    allocator = CachingAllocator()
    blocks = [allocator.allocate(2 * MIB) for _ in range(5)]
    for block in blocks[::2]:
        allocator.free(block)  # [2, -2, 2, -2, 2 + 10]
    assert sizes(allocator) == [[2 * MIB, -2 * MIB, 2 * MIB, -2 * MIB, 12 * MIB]]
    assert allocator.allocate(2 * MIB).address == blocks[0].address


def test_cached_segments_are_released_when_the_device_is_full():
    allocator = CachingAllocator(limit=64 * MIB)
    first, second = allocator.allocate(30 * MIB), allocator.allocate(30 * MIB)
    allocator.free(first)
    allocator.allocate(31 * MIB)  # 30 + 30 + 32 > 64: the first segment goes
    assert allocator.reserved == 62 * MIB
    assert [change.action for change in allocator.changes] == [*["segment_alloc"] * 2, "segment_free", "segment_alloc"]
    allocator.free(second)
    part = allocator.allocate(12 * MIB)  # from the second segment, which can no longer be released
    allocator.allocate(9 * MIB)
    allocator.allocate(9 * MIB)  # [-12, -9, -9]
    with pytest.raises(OutOfMemory, match=r"^no memory for 20971520 bytes$"):
        allocator.allocate(9 * MIB)  # 62 + 20 > 64
    allocator.free(part)
    with pytest.raises(OutOfMemory):
        allocator.allocate(13 * MIB)  # 12 MiB are reserved, but belong to a segment in use
    assert (allocator.reserved, allocator.reserved - allocator.allocated) == (62 * MIB, 12 * MIB)


def test_expandable_segments_grow_in_units():
    allocator = CachingAllocator(expandable_segments=True)
    first = allocator.allocate(30 * MIB)  # two units of 20 MiB
    second = allocator.allocate(30 * MIB)  # 10 MiB that are left, and 20 more
    assert (allocator.reserved, sizes(allocator)) == (60 * MIB, [[-30 * MIB, -30 * MIB]])
    small = allocator.allocate(1)
    assert allocator.reserved == 62 * MIB
    allocator.free(first)
    allocator.allocate(30 * MIB - 512)  # also the least rest is cut off
    assert sizes(allocator)[0 if small.address > second.address else 1] == [512 - 30 * MIB, 512, -30 * MIB]


def test_expandable_segments_prefer_blocks_that_cannot_grow():
    allocator = CachingAllocator(expandable_segments=True)
    first, _, last = allocator.allocate(12 * MIB), allocator.allocate(4 * MIB), allocator.allocate(4 * MIB)
    allocator.free(first)
    allocator.free(last)  # [12, -4, 4, then space to grow]
    assert allocator.allocate(3 * MIB).address == first.address  # not the smaller one, which can grow
    assert allocator.allocate(40 * MIB).address == last.address  # where 36 MiB, two units, are added
    assert allocator.reserved == 60 * MIB


def test_units_of_expandable_segments_are_released():
    allocator = CachingAllocator(limit=100 * MIB, expandable_segments=True)
    first, second, _ = allocator.allocate(50 * MIB), allocator.allocate(20 * MIB), allocator.allocate(5 * MIB)
    assert allocator.reserved == 80 * MIB
    allocator.free(first)
    allocator.allocate(60 * MIB)  # 5 MiB are left at the end: three more units, but only after two were released
    assert allocator.reserved == 100 * MIB
    assert [change.action for change in allocator.changes][-2:] == ["segment_unmap", "segment_map"]
    allocator.free(second)
    assert sum(map(len, sizes(allocator))) == 4  # 10 of the first and 20 of the second joined; 5; 60 and the rest


REQUESTS = st.one_of(
    st.integers(1, 4096), st.integers(1, 2 * MIB), st.integers(MIB, 40 * MIB), st.sampled_from([512, MIB, 10 * MIB])
)


@given(
    st.lists(st.tuples(REQUESTS, st.integers(0, 10**6), st.booleans()), max_size=60),
    st.booleans(),
    st.sampled_from([None, 64 * MIB, 300 * MIB]),
)
def test_blocks_never_overlap_and_bytes_are_conserved(steps, expandable_segments, limit):
    allocator, held = CachingAllocator(limit, expandable_segments=expandable_segments), []
    for nbytes, choice, frees in steps:
        if frees and held:
            allocator.free(held.pop(choice % len(held)))
        else:
            try:
                held.append(allocator.allocate(nbytes))
            except OutOfMemory:
                assert limit is not None
        blocks = [block for segment in allocator.segments() for block in segment]
        assert {id(block) for block in blocks if not block.is_free} == {id(block) for block in held}
        for one, other in pairwise(blocks):
            assert one.address + one.nbytes <= other.address
        for segment in allocator.segments():
            assert not any(one.is_free and other.is_free for one, other in pairwise(segment))
        assert allocator.allocated == sum(block.nbytes for block in held) <= allocator.reserved
        assert allocator.reserved == sum(block.nbytes for block in blocks)
        assert allocator.reserved == sum(
            change.nbytes if change.action in ("segment_alloc", "segment_map") else -change.nbytes
            for change in allocator.changes
        )
        assert limit is None or allocator.reserved <= limit
        assert all(block.requested <= block.nbytes and block.nbytes % 512 == 0 for block in held)
    for block in held:
        allocator.free(block)
    allocator.release_cached()
    assert (allocator.allocated, allocator.reserved) == (0, 0)


def test_a_device_gives_the_addresses_of_segments():
    allocator = CachingAllocator()
    blocks = []
    for address in (500 * MIB, 100 * MIB):  # the lowest of equally large blocks is the second
        allocator.next_address = address
        blocks.append(allocator.allocate(16 * MIB))
    assert [block.address for block in blocks] == [500 * MIB, 100 * MIB]
    for block in blocks:
        allocator.free(block)
    assert allocator.allocate(16 * MIB).address == 100 * MIB
