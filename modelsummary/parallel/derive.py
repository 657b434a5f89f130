"""Which layers are split, and how: regions of column- and row-parallel layers, then what is left over."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

from torch import nn

from modelsummary.parallel.layer_plans import (
    attentions,
    in_call_order,
    parameter_shards,
    region_plans,
    split_plan,
)
from modelsummary.parallel.linear_layers import is_linear
from modelsummary.parallel.placements import Blocked
from modelsummary.parallel.plan_entries import LayerPlan, LocalAttribute
from modelsummary.parallel.record_calls import Calls
from modelsummary.parallel.redistributions import prepared_inputs, prepared_outputs, redistribution_plan
from modelsummary.parallel.regions import Region, grow, grow_stacked, is_stack
from modelsummary.record.events import Event, Value, values_in

if TYPE_CHECKING:
    from modelsummary.parallel.sequence import Chunks

__all__ = ["Derivation", "derive", "layer_plans"]


@dataclass
class Derivation:
    """What is sharded, while it is searched for.

    Attributes:
        exchanges: ranks exchange rows of parameters of which they need equal pieces, too: FSDP could not gather these.
        regions: layers that are sharded together, their activations too.
        layers: FQN -> how that module is split.
        reasons: FQN of a ``Linear`` -> why its results cannot be sharded.
        in_place: FQNs of layers whose ``inplace=True`` has to be switched off.
        copied: FQNs of layers whose result the model writes into.
        attributes: of modules, with other values on one rank.
        sizes: FQN of a module -> its calls that get the sizes of one rank.
        chunks: what is sharded along the sequence; None: nothing.
    """

    calls: Calls
    exchanges: bool = False
    regions: list[Region] = field(default_factory=list)
    layers: dict[str, LayerPlan] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    in_place: dict[str, None] = field(default_factory=dict)
    copied: dict[str, None] = field(default_factory=dict)
    attributes: list[LocalAttribute] = field(default_factory=list)
    sizes: dict[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    chunks: Chunks | None = None

    def add(self, region: Region) -> None:
        """Add a region and its layers."""
        self.regions.append(region)
        self.layers |= region_plans(region, exchanges=self.exchanges)

    def split(self, fqn: str, role: str, reason: str = "") -> None:
        """Split one module; ``reason`` says why its activations are whole on each rank."""
        self.layers[fqn] = split_plan(self.calls, fqn, role, exchanges=self.exchanges, reason=reason)

    def share(self, region: Region) -> Region:
        """Replace a region by one whose heads share replicated tensors, if there is one; return what it is now."""
        self._remove(region)
        current = _with_shared(self, region.columns[0]) or region
        self.add(current)
        return current

    def _remove(self, region: Region) -> None:
        self.regions.remove(region)
        for fqn in region.fqns:
            self.layers.pop(fqn, None)

    def gather(self, region: Region, reason: str) -> None:
        """Split only the parameters of its layers: activations and all other parameters are whole on each rank."""
        self._remove(region)
        self.reasons |= dict.fromkeys([*region.split, *([region.module] if region.module else [])], reason)
        for role, fqns in (("column", region.columns), ("row", region.rows)):
            for fqn in fqns:
                self.split(fqn, role, reason)

    def drop(self, fqn: str, reason: str) -> None:
        """Leave a layer, and everything that is sharded together with it, replicated."""
        for region in [region for region in self.regions if fqn in region.fqns]:
            self._remove(region)
            self.reasons |= dict.fromkeys(region.fqns, reason)
        if fqn in self.layers:
            del self.layers[fqn]
            self.reasons[fqn] = reason

    @property
    def attentions(self) -> list[str]:
        """FQNs of each ``nn.MultiheadAttention`` whose heads are sharded."""
        return [fqn for fqn, layer in self.layers.items() if layer.role == "heads"]


def derive(calls: Calls, *, exchanges: bool = False) -> Derivation:
    """Return which layers of a recorded model can be split, and how. ``exchanges`` is as for ``Derivation``."""
    derivation = Derivation(calls, exchanges)
    for fqn in calls.places:
        if fqn in derivation.layers or fqn not in calls.linears:
            continue
        region = grow(calls, fqn, derivation.layers)
        if region.refused is not None:
            region = _with_shared(derivation, fqn) or region
        if region.refused is not None or not _are_free(calls, region.split, region.norms):
            shares = f"{fqn} shares its weight with another module or function; a weight of its own works"
            derivation.reasons[fqn] = str(region.refused or shares)
        else:
            derivation.add(region)
    _add_stacked(derivation)
    _add_attentions(derivation)
    _add_pairs(derivation)
    _add_vocabulary(derivation)
    _keep_in_place_writes(derivation)
    _note_functions(derivation)
    return derivation


def _with_shared(derivation: Derivation, fqn: str) -> Region | None:
    """Return a region whose heads share replicated tensors that are smaller than what is sharded; else None."""
    region = grow(derivation.calls, fqn, derivation.layers, shares=True)
    width = sum(derivation.calls.features(fqn) for fqn in region.columns)
    shared = sum(stop - start for parts in region.parts.values() for start, stop in parts)
    shared += sum(size for pieces in region.pieces.values() for size, is_whole in pieces if is_whole)
    return region if region.refused is None and 0 < shared <= width else None


def _are_free(calls: Calls, *layers: Iterable[str]) -> bool:
    """Return True if the parameters of layers are taken by these layers alone."""
    fqns = set().union(*layers)
    return all(calls.holders[fqn] <= {fqn} and not _taken_by_functions(calls, fqn) for fqn in fqns)


def _taken_by_functions(calls: Calls, fqn: str) -> bool:
    """Return True if a function outside of the module takes one of its parameters."""
    return any(owner != fqn for owner in calls.users.get(fqn, ()))


def _add_stacked(derivation: Derivation) -> None:
    """Split modules whose functions take several weights: stacked experts, or projections without layers."""
    calls = derivation.calls
    for event in calls.entered:
        module = calls.modules[event.fqn]
        has_weights = (
            sum(parameter is not None and parameter.dim() == 2 for parameter in module._parameters.values()) > 1
        )
        if event.fqn in derivation.layers or not (is_stack(module) or (has_weights and event.parent is not None)):
            continue
        try:
            derivation.add(grow_stacked(calls, event.fqn))
        except Blocked as blocked:
            derivation.reasons[event.fqn] = str(blocked)


def _add_attentions(derivation: Derivation) -> None:
    """Split each ``nn.MultiheadAttention`` by its heads."""
    for fqn, reason in attentions(derivation.calls).items():
        if reason:
            derivation.reasons[fqn] = reason
        else:
            derivation.split(fqn, "heads")


# --------------------------------------------------------------------------------------------------- pairs


def _add_pairs(derivation: Derivation) -> None:
    """Split layers whose results all go to one ``Linear``, and that one, if no shards can pass between.

    The result is gathered before it and cut behind it: a fused projection whose split would cut heads apart. Both
    belong to the same module, so that nothing but its own work lies between.
    """
    calls = derivation.calls
    for fqn in reversed(calls.places):
        if fqn in derivation.layers or fqn not in calls.linears:
            continue
        sink = _only_sink(calls, fqn)
        if sink is None or sink in derivation.layers or _owner(sink) != _owner(fqn):
            continue
        takers = [calls.events[position] for position in calls.places[sink]]
        values = [value for event in takers for value in values_in((event.args, event.kwargs))]
        sources = dict.fromkeys(source for value in values for source in calls.sources(value))
        columns = [
            source for source in sources if source not in derivation.layers and _only_sink(calls, source) == sink
        ]
        columns = [column for column in columns if column in calls.linears and _owner(column) == _owner(sink)]
        if not _are_free(calls, columns, [sink]):
            continue
        derivation.reasons[sink] = derivation.reasons[fqn]
        for column in columns:
            derivation.split(column, "column", derivation.reasons[column])
        derivation.split(sink, "row", derivation.reasons[sink])


def _owner(fqn: str) -> str:
    return fqn.rpartition(".")[0]


def _only_sink(calls: Calls, fqn: str) -> str | None:
    """Return the ``Linear`` to which all results of a layer go, past functions and norms; None if there are others."""
    sinks: set[str] = set()
    seen: set[Value] = set()
    pending = [value for position in calls.places[fqn] for value in values_in(calls.events[position].result)]
    while pending:
        value = pending.pop()
        if value in calls.returned:
            return None
        for event in calls.takers.get(value, ()):
            if calls.is_linear(event):
                sinks.add(event.fqn)
                if len(sinks) > 1:
                    return None
                continue
            fresh = [result for result in values_in(event.result) if result not in seen]
            seen.update(fresh)
            pending.extend(fresh)
    return sinks.pop() if sinks else None


# ---------------------------------------------------------------------------------------------- vocabulary


def _add_vocabulary(derivation: Derivation) -> None:
    """Split embeddings of tokens by their rows, and the heads that have as many outputs.

    An embedding of tokens is indexed by an input of the model, and has more rows than columns, or as many as a
    ``Linear`` has outputs.
    """
    calls = derivation.calls
    inputs = set(values_in((calls.record.root.args, calls.record.root.kwargs)))
    shared = {fqn for region in derivation.regions for fqn in region.parts}
    free = [fqn for fqn in calls.places if fqn not in derivation.layers and fqn not in shared]
    outputs = {fqn: calls.features(fqn) for fqn in free if is_linear(calls.modules[fqn])}
    tables = [fqn for fqn in free if _is_vocabulary(calls, fqn, inputs, outputs.values())]
    rows = {calls.features(fqn) for fqn in tables}
    heads = [fqn for fqn, size in outputs.items() if size in rows]
    fits = dict.fromkeys(tables, "embedding") | dict.fromkeys(heads, "head")
    while True:
        wrong = [
            fqn
            for fqn in fits
            if _taken_by_functions(calls, fqn)
            or not all(holder in fits or holder not in calls.places for holder in calls.holders[fqn])
        ]
        if not wrong:
            break
        for fqn in wrong:
            del fits[fqn]
    for fqn, role in fits.items():
        derivation.split(fqn, role)


def _is_vocabulary(calls: Calls, fqn: str, inputs: set[Value], outputs: Collection[int]) -> bool:
    module = calls.modules[fqn]
    if not isinstance(module, nn.Embedding) or module.max_norm is not None or module.sparse:
        return False
    if module.num_embeddings <= module.embedding_dim and module.num_embeddings not in outputs:
        return False
    values = [value for position in calls.places[fqn] for value in values_in(calls.events[position].args)]
    return bool(values) and all(_comes_from(calls, value, inputs) for value in values)


def _comes_from(calls: Calls, value: Value, inputs: set[Value]) -> bool:
    """Return True if a value is made of the model's inputs by functions, without a parameter."""
    sources = calls.behind(value, through=lambda source, _: source not in inputs)
    return not value.dtype.is_floating_point and any(source in inputs for source, _ in sources)


# ------------------------------------------------------------------------------------------ in-place writes


def _keep_in_place_writes(derivation: Derivation) -> None:
    """Note layers with ``inplace=True`` that write into what a split layer returns, and split layers that others write.

    Torch refuses in-place functions on the local tensor of a ``DTensor``.
    """
    calls = derivation.calls
    writers: dict[int, list[int]] = {}
    for position, event in enumerate(calls.events):
        for storage in event.writes[0] if event.writes else ():
            writers.setdefault(storage, []).append(position)
    for fqn, layer in derivation.layers.items():
        makers = [(position, calls.events[position]) for position in calls.places.get(fqn, ())]
        if any(region.module == fqn for region in derivation.regions):
            makers = [(end - 1, event) for event, (_, end) in calls.entered.items() if event.fqn == fqn]
        for position, maker in makers if layer.role != "norm" else ():
            for value in values_in(maker.result):
                # An earlier write was into other memory, which had the same address.
                for later in (later for later in writers.get(value.storages[0], ()) if later > position):
                    _note_write(derivation, fqn, calls.events[later])


def _note_write(derivation: Derivation, fqn: str, event: Event) -> None:
    if event.is_module and vars(derivation.calls.modules[event.fqn]).get("inplace") is True:
        derivation.in_place[event.fqn] = None
    else:
        derivation.copied[fqn] = None


def _note_functions(derivation: Derivation) -> None:
    """Note modules that stay whole because their own functions take a weight of two dimensions, and bags of rows."""
    calls = derivation.calls
    for fqn in calls.places:
        if isinstance(calls.modules[fqn], nn.EmbeddingBag) and fqn not in derivation.layers:
            derivation.reasons[fqn] = (
                f"torch has no style for {fqn} (EmbeddingBag), which sums rows; nn.Embedding has one"
            )
    for event in calls.entered:
        fqn, module = event.fqn, calls.modules[event.fqn]
        has_weight = any(parameter is not None and parameter.dim() == 2 for parameter in module._parameters.values())
        if has_weight and fqn in calls.users.get(fqn, ()) and fqn not in derivation.layers:
            kind = "an embedding" if isinstance(module, nn.Embedding) else "a linear layer"
            why = f"{type(module).__name__} does more with its weight than {kind}; {kind} can be split"
            derivation.reasons.setdefault(fqn, why)


# --------------------------------------------------------------------------------------------------- result


def layer_plans(derivation: Derivation, blocks: Sequence[str]) -> list[LayerPlan]:
    """Return how each module is sharded, and what is done at its boundary, in the order of their calls.

    Args:
        blocks: FQNs of the repeated blocks of the model.
    """
    calls, layers, chunks = derivation.calls, derivation.layers, derivation.chunks
    prepared = prepared_inputs(calls, layers, chunks)
    columns = set(chain(*prepared.values()))
    prepared |= prepared_outputs(calls, layers, columns, blocks) if chunks is None else {}
    plans = [redistribution_plan(calls, redistribution, is_local=False) for redistribution in prepared]
    for layer in layers.values():
        plans.append(layer if chunks is None else chunks.layer(layer, takes_whole=layer.fqn in columns))
    for fqn, parts in (item for region in derivation.regions for item in region.parts.items()):
        whole = dict.fromkeys(parameter_shards(calls, fqn, "gradient"))
        plans.append(LayerPlan(fqn, "ReduceGradient", {"parts": tuple(parts)}, "gradient", whole, 0))
    plans += [LayerPlan(fqn, "CopyOutput", {}, "copy", {}, 0) for fqn in derivation.copied if fqn in layers]
    plans += [LayerPlan(fqn, "LocalSizes", {"calls": sizes}, "sizes", {}, 0) for fqn, sizes in derivation.sizes.items()]
    if chunks is not None:
        # A hook of a norm runs before the one that gathers its result.
        plans += [split_plan(calls, fqn, "norm", sequence_dim=dim) for fqn, dim in chunks.norms.items()]
        changes = sorted(chunks.redistributions, key=lambda redistribution: not redistribution.is_input)
        plans += [redistribution_plan(calls, redistribution) for redistribution in changes]
    return in_call_order(calls, plans)
