"""``NumberFormats``: weights and caches as a server keeps them, in fewer bits than hidden states, and its kernels then.

The forward runs with tensors of the dtype of hidden states. The operators that read their storages tell which weights
and caches are kept in another form:

- weights are the parameters that products read, except for tables of embeddings and as many heads of the same shape,
  which quantisers leave as they are;
- of a cache, what attention reads, also from a copy, as of keys that are repeated for several heads.

Fewer bytes are moved then. Products of 8-bit floats compute at the peak of that dtype, and their other operand is cast,
too. Other formats are dequantised on the way to the multiply-adds, which have the dtype of hidden states, while
the next weights are loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import torch

from modelsummary.devices.target import Target
from modelsummary.errors import InputError
from modelsummary.keywords import choice_of, dtype_named
from modelsummary.operators.kernels import StepOperator, WorkFormats
from modelsummary.operators.operator_calls import OperatorCall, TensorSpec
from modelsummary.operators.operator_work import Work
from modelsummary.serving.run import Phase, times_of

__all__ = ["WEIGHTS", "NumberFormats", "WeightFormat", "check_device", "format_of_checkpoint", "named_formats"]


class WeightFormat(NamedTuple):
    """A form in which servers keep weights.

    Attributes:
        bits: of an element, with its part of scales and zero points.
        computes: dtype of the multiply-adds; None: of the hidden states, after the weights are dequantised.
        label: its name in engines.
    """

    bits: float
    computes: torch.dtype | None
    label: str


WEIGHTS: dict[str, WeightFormat] = {
    "fp8": WeightFormat(8, torch.float8_e4m3fn, "fp8, a scale per tensor"),
    "int8": WeightFormat(8, None, "int8, a scale per channel"),
    # AWQ and GPTQ: a scale of 16 bits and a zero point of 4 bits for each 128 elements of a channel
    "int4": WeightFormat(4 + (16 + 4) / 128, None, "int4, groups of 128"),
    "mxfp4": WeightFormat(4 + 8 / 32, None, "MXFP4, a scale of 8 bits per 32 elements"),
    "nvfp4": WeightFormat(4 + 8 / 16, None, "NVFP4, a scale of 8 bits per 16 elements"),
}


@dataclass(frozen=True)
class NumberFormats:
    """How a server keeps weights and caches.

    Attributes:
        weights: format of the weights of products; None: as the model has them.
        cache_dtype: dtype of what attention reads of a cache; None: as the forward makes it.
    """

    weights: WeightFormat | None = None
    cache_dtype: torch.dtype | None = None

    def bytes_of(self, phases: Sequence[Phase]) -> list[Phase]:
        """Return the phases of a run with the bytes of weights and caches as they are kept."""
        if self == NumberFormats():
            return list(phases)
        weights = self._saved_of_weights([operator for phase in phases for operator in phase.operators])
        return [
            replace(
                phase,
                weight_bytes=phase.weight_bytes - weights,
                cache=phase.cache._replace(
                    nbytes=phase.cache.nbytes - saved, held_bytes=phase.cache.held_bytes - saved
                ),
            )
            for phase, saved in zip(phases, map(self._saved_of_cache, phases), strict=True)
        ]

    def works_in(self, phase: Phase) -> WorkFormats | None:
        """Return the function from an operator call of a phase and its kernels to the kernels for what is kept."""
        if self == NumberFormats():
            return None
        tables = _tables(phase.operators)
        cached = {id(operator.run.call): positions for operator, positions in _read_of_cache(phase)}

        def works_of(call: OperatorCall, works: tuple[Work, ...]) -> tuple[Work, ...]:
            positions = cached.get(id(call), ())
            if not works or not (call.cost.macs or positions):
                return works
            first, *others = works
            if self.weights is not None and first.op_class == "gemm":
                first = self._product(call, first, tables)
            if self.cache_dtype is not None:
                saved = sum(self._saved(call.tensors[position]) for position in positions)
                first = first._replace(nbytes=first.nbytes - saved)
            return first, *others

        return works_of

    # ------------------------------------------------------------------------------------------ weights

    def _product(self, call: OperatorCall, work: Work, tables: frozenset[tuple[int, ...]]) -> Work:
        assert self.weights is not None
        weights = [spec for spec in call.tensors if _is_weight(spec, tables)]
        if not weights:
            return work
        others = [spec for spec in (*call.tensors, *call.outputs) if spec not in weights]
        moved = max(work.nbytes - sum(spec.nbytes for spec in others), 0)  # experts without tokens are not read
        itemsize = weights[0].dtype.itemsize
        nbytes = work.nbytes - round(moved * (1 - self.weights.bits / (8 * itemsize)))
        if self.weights.computes is None:
            return work._replace(nbytes=nbytes)
        cast = sum(spec.nbytes for spec in call.tensors if spec not in weights and spec.dtype.is_floating_point)
        nbytes -= round(cast * (1 - self.weights.computes.itemsize / itemsize))
        return work._replace(nbytes=nbytes, dtype=self.weights.computes)

    def _saved_of_weights(self, operators: Sequence[StepOperator]) -> int:
        """Return the bytes by which all weights are smaller."""
        if self.weights is None:
            return 0
        tables = _tables(operators)
        read = _read_by_products(operators)
        kept = {storage: (spec, times) for storage, spec, times in read if _is_weight(spec, tables)}
        bits = self.weights.bits
        return round(sum(times * spec.numel * (spec.dtype.itemsize - bits / 8) for spec, times in kept.values()))

    # ------------------------------------------------------------------------------------------ caches

    def _saved_of_cache(self, phase: Phase) -> int:
        """Return the bytes by which the cache after a phase is smaller; negative if it is larger."""
        if self.cache_dtype is None:
            return 0
        read: dict[int, int] = {}
        for operator, positions in _read_of_cache(phase):
            for position in positions:
                saved = times_of(operator) * self._saved(operator.run.call.tensors[position])
                read[operator.run.reads[position]] = saved
        return sum(read.values())

    def _saved(self, spec: TensorSpec) -> int:
        assert self.cache_dtype is not None
        elements = prod(size for size, step in zip(spec.shape, spec.stride, strict=True) if step)  # without repetitions
        return elements * (spec.dtype.itemsize - self.cache_dtype.itemsize)


def _tables(operators: Sequence[StepOperator]) -> frozenset[tuple[int, ...]]:
    """Return the shapes of tables of embeddings, and of heads.

    A square table of positions has the shape of other weights, of which there are more than tables.
    """
    tables: dict[tuple[int, ...], set[int]] = {}
    for operator in operators:
        if operator.run.call.rule.gathers:
            for storage, spec in zip(operator.run.reads, operator.run.call.tensors, strict=False):
                if spec.is_param:
                    tables.setdefault(spec.shape, set()).add(storage)
    others: dict[tuple[int, ...], set[int]] = {}
    for storage, spec, _ in _read_by_products(operators):
        others.setdefault(max(spec.shape, spec.shape[::-1]), set()).add(storage)
    shapes = {
        shape for shape, storages in tables.items() if len(others.get(max(shape, shape[::-1]), ())) <= len(storages)
    }
    return frozenset(shapes | {shape[::-1] for shape in shapes})


def _read_by_products(operators: Sequence[StepOperator]) -> Iterator[tuple[int, TensorSpec, int]]:
    """Yield the parameters that operators with multiply-adds read: storage, form, and for how many blocks it counts."""
    for operator in operators:
        if operator.run.call.cost.macs:
            for storage, spec in zip(operator.run.reads, operator.run.call.tensors, strict=False):
                if spec.is_param:
                    yield storage, spec, times_of(operator)


def _is_weight(spec: TensorSpec, tables: frozenset[tuple[int, ...]]) -> bool:
    return spec.is_param and len(spec.shape) > 1 and spec.dtype.is_floating_point and spec.shape not in tables


def _read_of_cache(phase: Phase) -> Iterator[tuple[StepOperator, tuple[int, ...]]]:
    """Yield the operators that read the cache for attention, each with the positions of the tensors that it reads.

    These are operators with multiply-adds, and copies for them.
    """
    multiplied = {
        storage for operator in phase.operators if operator.run.call.cost.macs for storage in operator.run.reads
    }
    for operator in phase.operators:
        run = operator.run
        is_copy = run.call.rule.facts.copies and not multiplied.isdisjoint(run.makes)
        if is_copy or run.call.cost.macs:
            yield operator, tuple([index for index, storage in enumerate(run.reads) if storage in phase.cache_storages])


def named_formats(weights: Any, cache_dtype: Any) -> tuple[str | None, torch.dtype | None]:
    """Return how a server keeps weights and caches, as ``WEIGHTS`` and torch name it.

    Args:
        weights: one of ``WEIGHTS``, or None.
        cache_dtype: a floating point dtype or its name, or None.

    Raises:
        InputError: a value is unknown.

    >>> named_formats("INT4", "e5m2")
    ('int4', torch.float8_e5m2)
    """
    return (
        None if weights is None else choice_of(weights, WEIGHTS, "weights", " or None"),
        None if cache_dtype is None else dtype_named(cache_dtype, "cache_dtype", end=" or None"),
    )


def format_of_checkpoint(quantization: Mapping[str, Any]) -> str:
    """Return the form of weights in ``WEIGHTS`` that the ``quantization_config`` of a checkpoint names.

    Args:
        quantization: the entry of a ``config.json``.

    Raises:
        InputError: the form is none of ``WEIGHTS``.

    >>> format_of_checkpoint({"quant_method": "gptq", "bits": 4, "group_size": 128})
    'int4'
    >>> groups = {"group_0": {"weights": {"num_bits": 8, "type": "float"}}}
    >>> format_of_checkpoint({"quant_method": "compressed-tensors", "config_groups": groups})
    'fp8'
    """
    method = str(quantization.get("quant_method", "")).lower()
    groups = quantization.get("config_groups") or {}
    weights = [group.get("weights") or {} for group in groups.values()] if isinstance(groups, Mapping) else []
    loaded = next((bits for bits in (4, 8) if quantization.get(f"load_in_{bits}bit")), None)
    bits = quantization.get("bits") or quantization.get("w_bit") or loaded
    forms = {"fp8": "fp8", "fbgemm_fp8": "fp8", "mxfp4": "mxfp4"}
    algorithms = {"fp8": "fp8", "nvfp4": "nvfp4"}  # of NVIDIA's ModelOpt
    name = forms.get(method) or algorithms.get(str(quantization.get("quant_algo", "")).lower())
    if name is None:
        named = {_form(group.get("num_bits"), group) for group in weights} or {_form(bits, {})}
        name = named.pop() if len(named) == 1 else None
        if name is None:
            raise InputError(
                f"quantization_config with quant_method={method!r} names {'several' if named else 'none'} of the forms "
                f"{', '.join(WEIGHTS)}; pass weights= of the nearest"
            )
    return name


def _form(bits: Any, group: Mapping[str, Any]) -> str | None:
    """Return the form of weights with so many bits, in a group of compressed tensors or of ModelOpt."""
    is_mx = group.get("group_size") == 32  # OCP's microscaling formats; NVFP4 has 16 elements to a scale
    forms = {8: "fp8", 4: "mxfp4" if is_mx else "nvfp4"} if group.get("type") == "float" else {8: "int8", 4: "int4"}
    return forms.get(int(bits)) if str(bits).isdecimal() else None


def check_device(formats: NumberFormats, name: str | None, target: Target) -> None:
    """Raise ``InputError`` if a device has no kernels for the weights or the cache.

    Args:
        formats: how they are kept.
        name: name of the format of the weights.
        target: the device.
    """
    if formats == NumberFormats():
        return
    if target.model is None:
        raise InputError(
            f"weights= and cache_dtype= are for named devices; the operators of {target.name} were measured with the "
            "weights as the model has them: pass device='H100', or a quantised model"
        )
    format_ = formats.weights
    if format_ is not None and format_.computes is not None and not target.model.spec.has(format_.computes):
        raise InputError(
            f"weights={name!r} needs products of {format_.computes}, which {target.name} does not have; pass "
            "weights='int8' or 'int4', which are dequantised, or a device with such products"
        )
