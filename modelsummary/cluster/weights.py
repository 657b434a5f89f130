"""The weights that a rank holds: trained parameters, frozen ones of any dtype, and buffers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from operator import add
from typing import NamedTuple

import torch
from torch import Tensor, nn

from modelsummary.capture.inputs import CallArguments
from modelsummary.capture.step_plan import StepPlan
from modelsummary.cluster.plan import Plan, Recipe
from modelsummary.memory.estimate import CATEGORIES
from modelsummary.memory.predict import simulate_step
from modelsummary.memory.step_options import OPTIMIZERS
from modelsummary.operators.tensor_bytes import is_wrapper, nbytes_of, numel_of

__all__ = ["RankWeights", "Weight", "Weights", "weight_of"]


class Weight(NamedTuple):
    """A parameter or buffer on a rank.

    Attributes:
        elements: its elements.
        nbytes: its bytes, in the dtype in which it computes.
        kind: ``"trained"``, ``"frozen"`` or ``"buffer"``.
        has_master: the optimizer keeps a float32 copy of it.
        is_expert: experts that are divided over ranks hold it.
        rows: size of its first dimension, along which FSDP shards it; 0: as many as elements.
    """

    elements: int
    nbytes: int
    kind: str
    has_master: bool = False
    is_expert: bool = False
    rows: int = 0


def weight_of(tensor: Tensor, whole: Tensor, recipe: Recipe, kind: str, *, is_expert: bool = False) -> Weight:
    """Return a parameter or buffer of a rank.

    The recipe casts floating-point tensors. Integers, and the integers inside of a quantised weight, stay as they are.

    Args:
        tensor: on the rank.
        whole: the tensor of the model of which it is a share.
        recipe: what the model is trained with.
        kind: as in ``Weight``.
        is_expert: as in ``Weight``.

    >>> weight_of(torch.ones(2, 4), torch.ones(4, 4), Recipe(), "trained").nbytes
    16
    """
    elements, rows = tensor.numel(), (*tensor.shape, 1)[0]
    if is_wrapper(whole) or numel_of(whole) != whole.numel():
        nbytes = nbytes_of(whole) * elements // max(whole.numel(), 1)
        return Weight(elements, nbytes, kind, is_expert=is_expert, rows=rows)
    dtype = tensor.dtype
    if dtype.is_floating_point and recipe.stored_dtype is not None:
        dtype = recipe.stored_dtype
    is_narrow = dtype.is_floating_point and dtype.itemsize < torch.float32.itemsize
    has_master = kind == "trained" and recipe.master_weights and is_narrow
    return Weight(elements, elements * dtype.itemsize, kind, has_master, is_expert, rows)


@dataclass(frozen=True)
class Weights:
    """Sums over weights of a rank.

    Attributes:
        elements: elements of trained parameters.
        trained, frozen, buffers: bytes of trained and frozen parameters, and of buffers.
        masters: elements of trained parameters of which the optimizer keeps a float32 copy.
        narrow: bytes of these parameters.
        chunked: rows of parameters, and elements, trained, frozen, masters and narrow of those with so many rows.

    >>> both = Weights.of([Weight(4, 8, "trained", has_master=True), Weight(4, 4, "frozen")])
    >>> both.nbytes, both.masters, both.over(2).frozen
    (12, 4, 2)
    """

    elements: int = 0
    trained: int = 0
    frozen: int = 0
    buffers: int = 0
    masters: int = 0
    narrow: int = 0
    chunked: tuple[tuple[int, tuple[int, ...]], ...] = ()

    @classmethod
    def of(cls, weights: Iterable[Weight], *, are_experts: bool | None = None) -> Weights:
        """Return the sums over weights; with ``are_experts``, over divided experts, or over all other weights."""
        chosen = [weight for weight in weights if are_experts is None or weight.is_expert == are_experts]
        buffers = sum(weight.nbytes for weight in chosen if weight.kind == "buffer")
        parameters = [weight for weight in chosen if weight.kind != "buffer"]
        return cls._with(((weight.rows or weight.elements, _sums(weight)) for weight in parameters), buffers)

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters."""
        return self.trained + self.frozen

    @property
    def stored(self) -> int:
        """Bytes of all parameters, if the float32 copies of the optimizer are what is kept between steps."""
        return self.nbytes + 4 * self.masters - self.narrow

    def __add__(self, other: Weights) -> Weights:
        if not (other.chunked or other.buffers):  # as the experts of most models
            return self
        if not (self.chunked or self.buffers):
            return other
        return Weights._with((*self.chunked, *other.chunked), self.buffers + other.buffers)

    def times(self, count: int) -> Weights:
        """Return the sums over so many of the same.

        >>> Weights.of([Weight(6, 6, "trained", rows=2)]).times(3).over(4).trained
        9
        """
        return _times(self, count)

    def over(self, ranks: int) -> Weights:
        """Return the share of the first rank, which has the most rows of each parameter; each rank has whole buffers.

        >>> Weights.of([Weight(6, 6, "trained", rows=2), Weight(3, 3, "trained", rows=1)]).over(4).trained
        6
        """
        return _share(self, ranks)

    @classmethod
    def _with(cls, chunked: Iterable[tuple[int, tuple[int, ...]]], buffers: int) -> Weights:
        by_rows: dict[int, tuple[int, ...]] = {}
        for rows, sums in chunked:
            before = by_rows.get(rows)
            by_rows[rows] = sums if before is None else tuple(map(add, before, sums))
        totals = map(sum, zip(*by_rows.values(), strict=True)) if by_rows else (0,) * 5
        elements, trained, frozen, masters, narrow = totals
        return cls(elements, trained, frozen, buffers, masters, narrow, tuple(sorted(by_rows.items())))

    def gradient_bytes(self, recipe: Recipe) -> int:
        """Return the bytes of the gradients: in the dtype of the recipe, or else of the parameters."""
        dtype = recipe.gradient_dtype
        return self.trained if dtype is None else self.elements * dtype.itemsize

    def state_bytes(self, recipe: Recipe) -> int:
        """Return the bytes of the optimizer's states, without float32 copies of weights."""
        return self.elements * recipe.state_bytes

    def temporary_bytes(self, recipe: Recipe) -> int:
        """Return the most bytes that the optimizer's step allocates for a moment; Megatron's is one kernel."""
        if recipe.kernels == "fused":
            return 0
        return int(_temporaries(recipe.optimizer) * self.elements * recipe.state_dtype.itemsize)


_NONE = Weights()


@cache
def _temporaries(optimizer: str) -> float:
    """Return how many tensors like the parameter torch's kernels for an optimizer allocate for a moment, at most."""
    layer = nn.Linear(1024, 1024, bias=False, device="meta")
    call = CallArguments((torch.empty(1, 1024, device="meta"),), {}, None)
    plan = StepPlan(make_optimizer=OPTIMIZERS[optimizer], device=torch.device("cuda"), workspaces=False)
    points, temporary = simulate_step(layer, call, plan).timeline, CATEGORIES.index("temporary")
    held = [point.held[temporary] for point in points if point.phase == "step"]
    return (max(held) - min(held)) / layer.weight.nbytes


@lru_cache(maxsize=4096)
def _times(weights: Weights, count: int) -> Weights:
    chunked = ((rows, tuple(count * value for value in sums)) for rows, sums in weights.chunked)
    return Weights._with(chunked, count * weights.buffers)


@lru_cache(maxsize=4096)
def _share(weights: Weights, ranks: int) -> Weights:
    shares = []
    for rows, sums in weights.chunked:
        longest = -(-rows // ranks)
        shares.append((longest, tuple(longest * value // max(rows, 1) for value in sums)))
    return Weights._with(shares, weights.buffers)


def _sums(weight: Weight) -> tuple[int, ...]:
    """Return the elements, trained and frozen bytes, masters and narrow bytes of a parameter."""
    if weight.kind == "frozen":
        return 0, 0, weight.nbytes, 0, 0
    masters = (weight.elements, weight.nbytes) if weight.has_master else (0, 0)
    return weight.elements, weight.nbytes, 0, *masters


@dataclass(frozen=True)
class RankWeights:
    """What a rank holds of a part of the model, such as of a unit that FSDP gathers at once.

    Attributes:
        shared: its weights without divided experts.
        experts: weights of experts that are divided over ranks.

    >>> both = RankWeights.of([Weight(4, 8, "trained"), Weight(6, 12, "trained", is_expert=True)])
    >>> both.total.nbytes, (both + both.times(2)).experts.nbytes
    (20, 36)
    """

    shared: Weights = Weights()
    experts: Weights = Weights()

    @classmethod
    def of(cls, weights: Iterable[Weight]) -> RankWeights:
        """Return the sums over weights."""
        held = tuple(weights)
        return cls(Weights.of(held, are_experts=False), Weights.of(held, are_experts=True))

    @cached_property
    def total(self) -> Weights:
        """All weights."""
        return self.shared + self.experts

    def __add__(self, other: RankWeights) -> RankWeights:
        return RankWeights(self.shared + other.shared, self.experts + other.experts)

    def times(self, count: int) -> RankWeights:
        """Return the sums over so many of the same."""
        return RankWeights(self.shared.times(count), self.experts.times(count))

    def sharded(self, plan: Plan) -> Weights:
        """Return the weights if each is held by one of the ranks that have the same ones."""
        return self.shared.over(plan.shards) + self.experts.over(plan.expert_copies)

    def of_several(self, has_shards: bool, has_copies: bool) -> Weights:
        """Return the weights that several ranks have, which they gather if they are sharded.

        Args:
            has_shards: several ranks have the same parameters.
            has_copies: several ranks have the same experts.
        """
        return (self.shared if has_shards else _NONE) + (self.experts if has_copies else _NONE)
