"""``CachingAllocator``: torch's allocator of CUDA memory, replayed on sizes alone.

It takes segments from the device, cuts them into blocks, and keeps freed blocks for later requests: see ``malloc``,
``free_block``, ``should_split`` and ``try_allocate_expandable_block`` in c10/cuda/CUDACachingAllocator.cpp, with the
constants of c10/core/AllocatorConfig.h. Only the default stream is known, and the defaults of ``PYTORCH_ALLOC_CONF``
except ``expandable_segments``.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["AllocatorBlock", "CachingAllocator", "OutOfMemory", "SegmentChange"]

BLOCK = 512  # sizes are multiples of it
_MIB = 2**20
_LARGEST_SMALL = _MIB  # larger requests come from the large pool
_SMALL_SEGMENT, _LARGE_SEGMENT = 2 * _MIB, 20 * _MIB
_OWN_SEGMENT = 10 * _MIB  # requests from this size on have a segment of their own ...
_ROUND_SEGMENT = 2 * _MIB  # ... of a multiple of this
_ADDRESS_SPACE = 2**39  # of an expandable segment: more than a device has


class OutOfMemory(Exception):
    """Error of a request that the device has no memory for, though all cached segments were released.

    Attributes:
        nbytes: bytes of the segment that was wanted.
    """

    def __init__(self, nbytes: int) -> None:
        super().__init__(f"no memory for {nbytes} bytes")
        self.nbytes = nbytes


class SegmentChange(NamedTuple):
    """Memory that the allocator takes from the device, or returns to it.

    Attributes:
        action: as in torch's snapshots: ``"segment_alloc"``, ``"segment_free"``, or ``"segment_map"`` and
            ``"segment_unmap"`` for a part of an expandable segment.
        address: its first address.
        nbytes: number of bytes.
    """

    action: str
    address: int
    nbytes: int


class AllocatorBlock:
    """A contiguous part of a segment.

    Attributes:
        address: its first address.
        nbytes: its size; a request may get a larger block.
        requested: bytes that were asked for; 0 if it is free.
        is_small: whether its segment belongs to the pool of small requests.
        is_free: whether no request has it.
        is_mapped: whether there is memory behind it; False for the unused part of an expandable segment.
        before, after: its neighbours in the segment.
    """

    __slots__ = ("address", "after", "before", "is_free", "is_mapped", "is_small", "nbytes", "requested")

    def __init__(self, address: int, nbytes: int, *, is_small: bool, is_mapped: bool = True) -> None:
        self.address, self.nbytes, self.is_small, self.is_mapped = address, nbytes, is_small, is_mapped
        self.requested, self.is_free = 0, True
        self.before: AllocatorBlock | None = None
        self.after: AllocatorBlock | None = None

    @property
    def growth(self) -> int:
        """Bytes that it would have if the address space behind it was mapped."""
        return self.nbytes if self.after is None or self.after.is_mapped else self.nbytes + self.after.nbytes


class _Pool:
    """The segments for requests of one class of sizes.

    Attributes:
        free: size and address of its free blocks, sorted.
        blocks: all blocks, by address.
    """

    def __init__(self, *, is_small: bool) -> None:
        self.is_small, self.segment_bytes = is_small, _SMALL_SEGMENT if is_small else _LARGE_SEGMENT
        self.free: list[tuple[int, int]] = []
        self.blocks: dict[int, AllocatorBlock] = {}

    def add(self, block: AllocatorBlock) -> None:
        """Add a block, which is free."""
        self.blocks[block.address] = block
        if block.is_mapped:
            insort(self.free, (block.nbytes, block.address))

    def take(self, block: AllocatorBlock) -> AllocatorBlock:
        """Remove a free block from the free ones."""
        if block.is_mapped:
            del self.free[bisect_left(self.free, (block.nbytes, block.address))]
        return block

    def drop(self, block: AllocatorBlock) -> None:
        """Remove a free block that its neighbour takes over, or whose memory is returned."""
        self.take(block)
        del self.blocks[block.address]

    def best(self, nbytes: int) -> AllocatorBlock | None:
        """Return the smallest free block with as many bytes, the first one of equally large ones."""
        position = bisect_left(self.free, (nbytes, -1))
        return self.blocks[self.free[position][1]] if position < len(self.free) else None

    def best_of_expandable(self, nbytes: int) -> AllocatorBlock | None:
        """Return the smallest free block with as many bytes, where a block that can grow counts as already grown."""
        position = bisect_left(self.free, (nbytes, -1))
        candidates = (self.blocks[address] for _, address in self.free[position:])
        chosen = next(candidates, None)
        for block in candidates:
            if chosen is None or block.growth >= chosen.growth:
                break
            chosen = block
        return chosen


class CachingAllocator:
    """The memory of one device.

    Args:
        limit: bytes that the device has; None: as many as are asked for.
        expandable_segments: the option of ``PYTORCH_ALLOC_CONF``: each pool has one segment, which grows.
        first_address: of the first segment; later ones follow it.

    Attributes:
        reserved: bytes of the segments, as ``torch.cuda.memory_reserved`` reports them.
        allocated: bytes of the blocks that requests have, as ``torch.cuda.memory_allocated`` reports them.
        changes: the segments that were taken and returned, in time.
        next_address: address of the next segment, which may be set, as to an address that a device gave.

    >>> allocator = CachingAllocator()
    >>> block = allocator.allocate(3 * 2**20)
    >>> allocator.allocated, allocator.reserved
    (3145728, 20971520)
    >>> allocator.free(block)
    >>> allocator.allocated, allocator.reserved
    (0, 20971520)
    """

    def __init__(
        self, limit: int | None = None, *, expandable_segments: bool = False, first_address: int = 2**40
    ) -> None:
        self._limit, self._expands, self.next_address = limit, expandable_segments, first_address
        self._small, self._large = _Pool(is_small=True), _Pool(is_small=False)
        self.reserved = self.allocated = 0
        self.changes: list[SegmentChange] = []

    def allocate(self, nbytes: int) -> AllocatorBlock:
        """Return a block for a request of at least one byte.

        Raises:
            OutOfMemory: the limit is reached, also without the cached segments.
        """
        rounded = -(-nbytes // BLOCK) * BLOCK
        pool = self._small if rounded <= _LARGEST_SMALL else self._large
        block = pool.best_of_expandable(rounded) if self._expands else pool.best(rounded)
        if block is None:
            block = self._from_device(pool, rounded)
        pool.take(block)
        self._split(pool, block, rounded)
        block.requested, block.is_free = nbytes, False
        self.allocated += block.nbytes
        return block

    def free(self, block: AllocatorBlock) -> None:
        """Keep a block for later requests, joined with its free neighbours."""
        pool = self._pool_of(block)
        self.allocated -= block.nbytes
        block.requested, block.is_free = 0, True
        del pool.blocks[block.address]
        self._join(pool, block)
        pool.add(block)

    def segments(self) -> list[list[AllocatorBlock]]:
        """Return the blocks of each segment, or of each mapped part of an expandable one, by address."""
        blocks = (block for pool in (self._small, self._large) for block in pool.blocks.values() if block.is_mapped)
        heads = (block for block in blocks if block.before is None or not block.before.is_mapped)
        return [list(_mapped_from(head)) for head in sorted(heads, key=lambda block: block.address)]

    def _pool_of(self, block: AllocatorBlock) -> _Pool:
        return self._small if block.is_small else self._large

    # ------------------------------------------------------------------------------------------ blocks

    def _split(self, pool: _Pool, block: AllocatorBlock, nbytes: int) -> None:
        """Cut off what a request does not need, if the pool has a use for it."""
        rest = block.nbytes - nbytes
        if rest >= BLOCK if (pool.is_small or self._expands) else rest > _LARGEST_SMALL:
            pool.add(_cut(block, nbytes))

    def _join(self, pool: _Pool, block: AllocatorBlock) -> None:
        """Take over the free neighbours of a block that is in no list."""
        for neighbour in (block.before, block.after):
            if neighbour is None or not neighbour.is_free or neighbour.is_mapped != block.is_mapped:
                continue
            pool.drop(neighbour)
            if neighbour is block.before:
                block.address = neighbour.address
                _link(neighbour.before, block)
            else:
                _link(block, neighbour.after)
            block.nbytes += neighbour.nbytes

    # ------------------------------------------------------------------------------------------ segments

    def _from_device(self, pool: _Pool, nbytes: int) -> AllocatorBlock:
        """Return a free block of memory of the device; cached segments are released if it has no more."""
        try:
            return self._grown(pool, nbytes) if self._expands else self._new_segment(pool, nbytes)
        except OutOfMemory:
            self.release_cached()
            return self._grown(pool, nbytes) if self._expands else self._new_segment(pool, nbytes)

    def _reserve(self, action: str, address: int, nbytes: int) -> None:
        if self._limit is not None and self.reserved + nbytes > self._limit:
            raise OutOfMemory(nbytes)
        self.reserved += nbytes
        self.changes.append(SegmentChange(action, address, nbytes))

    def _return(self, action: str, address: int, nbytes: int) -> None:
        self.reserved -= nbytes
        self.changes.append(SegmentChange(action, address, nbytes))

    def _new_segment(self, pool: _Pool, nbytes: int) -> AllocatorBlock:
        size = pool.segment_bytes
        if nbytes >= _OWN_SEGMENT:
            size = -(-nbytes // _ROUND_SEGMENT) * _ROUND_SEGMENT
        self._reserve("segment_alloc", self.next_address, size)
        block = AllocatorBlock(self.next_address, size, is_small=pool.is_small)
        self.next_address += size
        pool.add(block)
        return block

    def _grown(self, pool: _Pool, nbytes: int) -> AllocatorBlock:
        """Return a free block of the expandable segment, after as much of it was mapped as a request needs."""
        block = self._with_space(pool, nbytes)
        if not block.is_mapped:
            block = self._map(pool, block, nbytes)
        while block.nbytes < nbytes:
            assert block.after is not None
            block = self._map(pool, block.after, nbytes - block.nbytes)
        return block

    def _with_space(self, pool: _Pool, nbytes: int) -> AllocatorBlock:
        """Return the first free or unmapped block from which on a request has address space."""
        unmapped = (block for _, block in sorted(pool.blocks.items()) if not block.is_mapped)
        for block in unmapped:
            begin = block.before if block.before is not None and block.before.is_free else block
            space, following = 0, begin
            while following is not None and following.is_free and space < nbytes:
                space += following.nbytes
                following = following.after  # type: ignore[assignment]
            if space >= nbytes:
                return begin
        block = AllocatorBlock(self.next_address, _ADDRESS_SPACE, is_small=pool.is_small, is_mapped=False)
        self.next_address += _ADDRESS_SPACE
        pool.add(block)
        return block

    def _map(self, pool: _Pool, block: AllocatorBlock, nbytes: int) -> AllocatorBlock:
        """Return an unmapped block after its first bytes, in whole units of the pool, were mapped."""
        wanted = min(nbytes, block.nbytes)
        size = -(-wanted // pool.segment_bytes) * pool.segment_bytes
        self._reserve("segment_map", block.address, size)
        pool.drop(block)
        if size < block.nbytes:
            pool.add(_cut(block, size))
        block.is_mapped = True
        self._join(pool, block)
        pool.add(block)
        return block

    def release_cached(self) -> None:
        """Return all memory that no block needs: whole segments, or whole units of expandable ones."""
        for pool in (self._large, self._small):
            for _, address in list(pool.free):
                block = pool.blocks[address]
                if self._expands:
                    self._unmap(pool, block)
                elif block.before is None and block.after is None:
                    pool.drop(block)
                    self._return("segment_free", block.address, block.nbytes)

    def _unmap(self, pool: _Pool, block: AllocatorBlock) -> None:
        unit = pool.segment_bytes
        origin = block
        while origin.before is not None:
            origin = origin.before
        offset = block.address - origin.address
        begin = origin.address + -(-offset // unit) * unit
        end = origin.address + (offset + block.nbytes) // unit * unit
        if begin >= end:
            return
        pool.drop(block)
        self._return("segment_unmap", begin, end - begin)
        if block.address < begin:
            rest = _cut(block, begin - block.address)
            pool.add(block)
            block = rest
        if block.nbytes > end - begin:
            pool.add(_cut(block, end - begin))
        block.is_mapped = False
        self._join(pool, block)
        pool.add(block)


def _cut(block: AllocatorBlock, nbytes: int) -> AllocatorBlock:
    """Shorten a block, and return the rest of it as a block of its own, which follows it."""
    rest = AllocatorBlock(
        block.address + nbytes, block.nbytes - nbytes, is_small=block.is_small, is_mapped=block.is_mapped
    )
    block.nbytes = nbytes
    _link(rest, block.after)
    _link(block, rest)
    return rest


def _link(before: AllocatorBlock | None, after: AllocatorBlock | None) -> None:
    if before is not None:
        before.after = after
    if after is not None:
        after.before = before


def _mapped_from(block: AllocatorBlock | None) -> Iterator[AllocatorBlock]:
    while block is not None and block.is_mapped:
        yield block
        block = block.after
