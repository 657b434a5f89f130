"""Placements against two independent truths, for each call that the propagations of many plans follow.

DTensor derives placements by itself where the call is repeated on meta tensors in a fake world. And what a rank is said
to hold of a result must follow from what it holds of the operands: everything else is not a number.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from modelsummary import InputError, Statistics
from modelsummary.capture.containers import tensors_of
from modelsummary.capture.templates import Attribute, OwnDevice, leaves_of, map_template
from modelsummary.parallel import rules
from modelsummary.parallel.applied_rank import fake_world
from modelsummary.parallel.placements import Partial, Placement, Shard, local_shape
from modelsummary.parallel.propagation import Propagation, sole_input
from modelsummary.parallel.record_calls import Calls
from modelsummary.parallel.regions import _Columns
from modelsummary.record.events import Event, Value
from modelsummary.record.tensors import Foreign
from tests.parallel import models, parts, training

OPTIONS: tuple[dict[str, Any], ...] = ({}, {"sequence": True}, {"loss_parallel": True})
OWN = (
    "decoder", "gpt2", "odd", "sized", "local", "fused", "llama", "t5", "bert", "mixture", "shared", "shared_bias",
    "biased", "inline", "grouped", "list", "merged", "called", "loop_stacked", "shared_stacked",
)  # fmt: skip
TRANSFORMERS = (
    "llama", "gpt2", "gemma2", "phi3", "bloom", "falcon", "mpt", "deepseek_v3", "gpt_oss", "bert", "t5", "swin",
)  # fmt: skip


@dataclass
class Followed:
    """A call, and what a propagation says of it.

    Attributes:
        taken: placement of each operand that is not whole.
        parameters: name of a parameter of the module that is called -> its placement.
        results: placements of the results.
        sizes: extents that have to divide by the number of ranks.
    """

    calls: Calls
    event: Event
    name: str
    taken: dict[Any, Placement]
    results: list[Placement | None]
    sizes: set[int] = field(default_factory=set)
    parameters: dict[str, Placement] = field(default_factory=dict)

    @property
    def placements(self) -> list[Placement | None]:
        return [*self.taken.values(), *self.parameters.values(), *self.results]

    @property
    def operands(self) -> list[tuple[tuple[int, ...], Placement]]:
        return [(self.calls.shape_of(leaf) or (), placement) for leaf, placement in self.taken.items()]

    @property
    def key(self) -> str:
        """What two calls have in common if one of them is enough."""
        shapes = [self.calls.shape_of(leaf) for leaf in self.leaves]
        return repr((self.name, shapes, self.operands, self.results, self.numbers, [*self.parameters]))

    @property
    def leaves(self) -> list[Any]:
        return list(leaves_of((self.event.args, self.event.kwargs)))

    @property
    def numbers(self) -> list[Any]:
        return [leaf for leaf in self.leaves if isinstance(leaf, (int, float, str))]

    def divides(self, n: int) -> bool:
        """Return True if the ranks divide what the propagation says that they have to."""
        module = self.calls.modules[self.event.fqn]
        owned = [(module.get_parameter(name).shape, placement) for name, placement in self.parameters.items()]
        extents = {
            size // placement.outer
            for shape, placement in (*self.operands, *owned)
            if isinstance(placement, Shard)
            for size in (
                [section.size for section in placement.pieces if not section.is_whole] or [shape[placement.dim]]
            )
        }
        return not any(size % n for size in {*self.sizes, *extents})

    def run(self, of: Callable[[Any, Placement | None], Any], device: str) -> list[Any]:
        """Return the tensors that the call returns.

        Args:
            of: returns the tensor that takes the place of one of some shape and dtype with a placement.
            device: of these tensors.
        """

        def operand(leaf: Any) -> Any:
            is_tensor = isinstance(leaf, (Value, Attribute, Foreign, Tensor))
            tensor = self.calls.tensor_of(leaf) if is_tensor else None
            if tensor is not None and self.calls.is_zeros(leaf):
                return of(torch.zeros(tuple(tensor.shape), dtype=tensor.dtype), self.taken.get(leaf))
            if tensor is not None:
                return of(tensor, self.taken.get(leaf) if isinstance(leaf, (Value, Attribute)) else None)
            if isinstance(leaf, OwnDevice):
                return torch.device(device)
            if isinstance(leaf, Attribute):
                owner, _, name = leaf.fqn.rpartition(".")
                return getattr(self.calls.modules[owner], name)
            return leaf

        args, kwargs = map_template(operand, self.event.args), map_template(operand, self.event.kwargs)
        with torch.no_grad():
            if not self.event.is_module:
                return list(tensors_of(self.event.function(*args, **kwargs)))
            module = self.calls.modules[self.event.fqn]
            state = {name: of(tensor, self.parameters.get(name)) for name, tensor in module.named_parameters()}
            state |= {name: of(tensor, None) for name, tensor in module.named_buffers()}
            return list(tensors_of(functional_call(module, state, args, kwargs)))


def followed(name: str, n: int) -> Iterator[Followed]:
    """Yield what the propagations of plans of a model say, each thing once."""
    calls: dict[str, Followed] = {}
    give, begins_or_ends = Propagation.give, _Columns.begins_or_ends

    def noting_give(self: Propagation, call: Any, placements: Any) -> None:
        now = Followed(self.calls, call.event, call.name, self.sharded(call.event), list(placements), call.sizes)
        calls.setdefault(now.key, now)
        give(self, call, placements)

    def noting_ends(self: _Columns, event: Event) -> bool:
        taken = self.sharded(event)
        if not begins_or_ends(self, event):
            return False
        linear = self.calls.linears.get(event.fqn)
        if linear is not None and sole_input(self.calls, event).dtype.is_floating_point:
            columns = isinstance(self.placement(event.result), Shard)
            result = self.placement(event.result) if columns else Partial()
            parameters: dict[str, Placement] = {linear.weight: Shard(linear.dim if columns else 1 - linear.dim)}
            if linear.bias:
                parameters[linear.bias] = Shard(0) if columns else Partial()
            if not (isinstance(result, Shard) and not result.is_plain):  # rows of pieces are no chunks of the weight
                now = Followed(self.calls, event, "linear layer", taken, [result], set(), parameters)
                calls.setdefault(now.key, now)
        return True

    with (
        mock.patch.object(Propagation, "give", noting_give),
        mock.patch.object(_Columns, "begins_or_ends", noting_ends),
    ):
        model, inputs = models.make(name)
        with training.Float64():
            stats = Statistics(model, inputs)
            for options in OPTIONS:
                try:
                    stats.parallel_plan(tensor=n, **options)
                except InputError:
                    continue
    yield from (call for call in calls.values() if call.divides(n))


# ------------------------------------------------------------------------------------------------- DTensor


def of_torch(placement: Placement | None) -> Any:
    """Return torch's placement. Pieces of unequal sizes have none."""
    from torch.distributed.tensor import placement_types as torch_placements

    if placement is None:
        return torch_placements.Replicate()
    if isinstance(placement, Partial):
        return torch_placements.Partial()
    assert not placement.pieces
    if placement.outer == 1:
        return torch_placements.Shard(placement.dim)
    return torch_placements._StridedShard(placement.dim, split_factor=placement.outer)


def derived(call: Followed, mesh: Any, n: int) -> list[Any]:
    """Return the placements of a call's results as DTensor derives them."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.experimental import implicit_replication

    def dtensor(tensor: Any, placement: Placement | None) -> Any:
        shape = local_shape(tensor.shape, placement if isinstance(placement, Shard) else None, n)
        whole = torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="meta")
        local = torch.empty(shape, dtype=tensor.dtype, device="meta")
        sizes = {"shape": whole.shape, "stride": whole.stride()}
        return DTensor.from_local(local, mesh, [of_torch(placement)], run_check=False, **sizes)

    with warnings.catch_warnings(), implicit_replication():  # attention makes its causal mask itself
        warnings.filterwarnings("ignore", message="Found a non-scalar tensor with numel=1")
        results = call.run(dtensor, "meta")
    return [result.placements[0] for result in results]


def is_strided(call: Followed) -> bool:
    return any(isinstance(placement, Shard) and placement.outer > 1 for placement in call.taken.values())


def is_shared_head(call: Followed) -> bool:
    key_shape = call.calls.shape_of(call.leaves[1])
    return len(call.taken) < 3 and key_shape is not None and key_shape[1] == 1


def has_step(call: Followed) -> bool:
    slices = [part for part in call.event.args[1] if isinstance(part, slice)]
    return any(part.step not in (None, 1) for part in slices)


def is_gathered(_call: Followed, placements: list[Any]) -> bool:
    return all(placement.is_replicate() for placement in placements)


def is_moved(call: Followed, placements: list[Any]) -> bool:
    taken = {placement.dim for placement in call.taken.values() if isinstance(placement, Shard)}
    return all(getattr(placement, "dim", None) not in {None, *taken} for placement in placements)


# Functions, which of their calls, why DTensor says something else, and what it says then.
EXPLAINED: tuple[tuple[str, Callable[[Followed], bool], str, Callable[[Followed, list[Any]], bool]], ...] = (
    (
        "split chunk getitem",
        is_strided,
        "gathers several pieces of a dimension before it takes them apart",
        is_gathered,
    ),
    ("glu", is_strided, "exchanges the pieces of a dimension for those of another one, to take halves", is_moved),
    ("getitem", has_step, "exchanges chunks for those of another dimension before a slice with a step", is_moved),
    ("scaled_dot_product_attention", is_shared_head, "gathers queries where all heads have one key", is_gathered),
)


# -------------------------------------------------------------------------------------------------- values


def check_values(call: Followed, n: int) -> None:
    """Check that each rank can compute what it is said to hold, and that sums add up to the whole."""
    generator = torch.Generator().manual_seed(0)
    values: list[Tensor] = []

    def whole(tensor: Any, _placement: Placement | None) -> Tensor:
        shape, dtype = tuple(tensor.shape), tensor.dtype
        if isinstance(tensor, Tensor) and not isinstance(tensor, nn.Parameter):
            values.append(tensor)
        elif dtype.is_floating_point:
            values.append(torch.rand(shape, generator=generator, dtype=torch.float64).to(dtype) + 0.1)
        else:
            values.append(torch.zeros(shape, dtype=dtype))
        return values[-1].clone()

    expected = call.run(whole, "cpu")
    sums = any(isinstance(placement, Partial) for placement in call.results)
    results = []
    for rank in range(n):
        position = iter(values)

        def of_rank(tensor: Any, placement: Placement | None, rank: int = rank, position: Any = position) -> Tensor:
            value = next(position)
            if isinstance(placement, Partial):
                return parts.part(value, placement, rank, n)
            is_held = parts.held(tuple(tensor.shape), placement, rank, n)
            if not value.is_floating_point():
                return value.clone()
            return value.masked_fill(~is_held, 0 if sums else torch.nan)

        results.append(call.run(of_rank, "cpu"))
    for position, (result, placement) in enumerate(zip(expected, call.results, strict=True)):
        if isinstance(placement, Partial):
            torch.testing.assert_close(sum(of_rank[position] for of_rank in results), result)
            continue
        for rank, of_rank in enumerate(results):
            is_held = parts.held(tuple(result.shape), placement, rank, n)
            torch.testing.assert_close(of_rank[position][is_held], result[is_held], equal_nan=False)


def check(name: str, n: int) -> Counter[str]:
    """Check all calls of the plans of a model. Return how often the two say the same, and why else they differ."""
    from torch.distributed.device_mesh import init_device_mesh

    counts: Counter[str] = Counter()
    calls = list(followed(name, n))
    with fake_world(0, n):
        mesh = init_device_mesh("cpu", (n,))
        for call in calls:
            said = f"{name}: {call.event.fqn} {call.name}{call.numbers} {call.operands} -> {call.results}"
            try:
                check_values(call, n)
            except Exception as error:
                raise AssertionError(f"{said}: {error}") from error
            if any(isinstance(placement, Shard) and placement.pieces for placement in call.placements):
                counts["DTensor has no placement for pieces of unequal sizes"] += 1
                continue
            placements = derived(call, mesh, n)
            if placements == [of_torch(placement) for placement in call.results]:
                counts["equal"] += 1
                continue
            reasons = [
                reason
                for names, applies, reason, is_expected in EXPLAINED
                if call.name in names.split() and applies(call) and is_expected(call, placements)
            ]
            assert reasons, f"{said}, where DTensor says {placements}"
            counts[f"DTensor {reasons[0]}"] += 1
    return counts


def alternating(names):
    """Return each name with 2 or 4 ranks in turns; all pairs take twice as long."""
    return [(name, 2 + 2 * (row % 2)) for row, name in enumerate(names)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "n"), alternating(OWN))
def test_own_models(name, n):
    assert check(name, n)["equal"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "n"), alternating(TRANSFORMERS))
def test_transformers(name, n):
    pytest.importorskip("transformers")
    assert check(f"transformers/{name}", n)["equal"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "wrong"),
    [("transpose", Shard(0)), ("scaled_dot_product_attention", Shard(3)), ("silu", None)],
)
def test_a_wrong_rule_is_noticed(function, wrong):
    with mock.patch.dict(rules._RULES, {function: lambda _call: wrong}), pytest.raises(AssertionError, match=function):
        check("decoder", 2)
