"""Named dimensions of a model's inputs: which sizes may change, and which change together."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from torch import nn

from modelsummary.capture.inputs import CallArguments, InputTensor
from modelsummary.errors import FormulaError, InputError, close_to

__all__ = ["Dimension", "DimensionNames", "Place", "find_dimensions", "held_elements", "resized"]

DimensionNames = Mapping[str, Mapping[int, str]]
"""Input -> position in its shape -> name, as ``dynamic_axes`` of ``torch.onnx.export``."""

_IMAGE = ("height", "width")
_SIDE = "image_size"  # height and width of a model that takes square images only
_STEPS = (1, 2, 4, 7, 8, 14, 16, 28, 32, 64)
_SUFFIX = re.compile(r"_?(input_)?(ids|values|features|mask|embeds)$")


class Place(NamedTuple):
    """A position in the shape of an input."""

    argument: int | str
    tensor_index: int
    dim: int


@dataclass(frozen=True)
class Dimension:
    """A size that several inputs may share.

    Attributes:
        name: the symbol in formulas.
        size: the recorded size.
        places: positions in the shapes of the inputs.
        step: distance of the sizes that the model accepts; 32 for a model that takes multiples of 32.

    >>> height = Dimension("height", 64, (Place(0, 0, 2),), step=32)
    >>> height.at(0), height.at(3), height.number(64)
    (32, 128, 1)
    """

    name: str
    size: int
    places: tuple[Place, ...]
    step: int = 1

    @property
    def first(self) -> int:
        """The smallest size >= 1 that is a multiple of ``step`` away from the recorded one."""
        return (self.size - 1) % self.step + 1

    def at(self, number: int) -> int:
        """Return the size with this number; the first has number 0."""
        return self.first + number * self.step

    def number(self, size: int) -> int:
        """Return the number of a size."""
        return (size - self.first) // self.step


Accepts = Callable[[Mapping[Dimension, int]], str | None]
"""Return None if the model runs with these sizes, else why it does not."""


def find_dimensions(
    model: nn.Module, call: CallArguments, batch_dim: int | None, accepts: Accepts, names: DimensionNames | None
) -> list[Dimension]:
    """Return the dimensions of the inputs that the model accepts at other sizes.

    Args:
        batch_dim: position of the batch; None: 0.
        names: names of dimensions; None: by the kind of the inputs.

    Raises:
        InputError: ``names`` is unusable.
        FormulaError: the model accepts no other size of a named dimension, or of any dimension.
    """
    inputs = _inputs(model, call)
    if names is not None:
        return [_required(dimension, accepts) for dimension in _explicit(inputs, names)]
    dimensions: list[Dimension] = []
    refusals: list[str] = []
    for group in _by_kind(inputs, batch_dim or 0):
        for alternative in group:
            stepped = [_stepped(dimension, accepts) for dimension in alternative]
            refusals += [refusal for refusal in stepped if isinstance(refusal, str)]
            accepted = [dimension for dimension in stepped if isinstance(dimension, Dimension)]
            dimensions += [replace(dimension, name=_unused(dimension, dimensions, inputs)) for dimension in accepted]
            if accepted:
                break
    if not dimensions:
        reason = f": {refusals[0]}" if refusals else ", as its inputs have none that may change"
        raise FormulaError(f"the model accepts no other size of any input dimension{reason}")
    return dimensions


def resized(call: CallArguments, sizes: Mapping[Dimension, int]) -> CallArguments:
    """Return the arguments with other sizes of dimensions."""
    position_sizes = _wanted(sizes)
    return call.with_shapes(lambda tensor: _shape(tensor, position_sizes))


def held_elements(call: CallArguments, sizes: Mapping[Dimension, int]) -> int:
    """Return the elements of the inputs that hold values at other sizes, which are not floating point."""
    position_sizes = _wanted(sizes)
    return sum(prod(_shape(tensor, position_sizes)) for tensor in call.described() if not tensor.is_floating)


def _wanted(sizes: Mapping[Dimension, int]) -> dict[Place, int]:
    return {position: size for dimension, size in sizes.items() for position in dimension.places}


def _shape(tensor: InputTensor, sizes: Mapping[Place, int]) -> tuple[int, ...]:
    places = (Place(tensor.argument, tensor.tensor_index, dim) for dim in range(len(tensor.shape)))
    return tuple(sizes.get(position, size) for position, size in zip(places, tensor.shape, strict=True))


def _inputs(model: nn.Module, call: CallArguments) -> dict[str, InputTensor]:
    """Return the tensors among the arguments by the names of their arguments."""
    try:
        parameters = list(inspect.signature(model.forward).parameters)
    except (TypeError, ValueError):  # a ScriptModule's forward has no signature
        parameters = []
    tensors: dict[str, InputTensor] = {}
    for tensor in call.described():
        name = tensor.argument
        if isinstance(name, int):
            name = parameters[name] if name < len(parameters) else str(name)
        tensors[f"{name}[{tensor.tensor_index}]" if tensor.tensor_index else name] = tensor
    return tensors


def _explicit(inputs: Mapping[str, InputTensor], names: DimensionNames) -> list[Dimension]:
    """Return the dimensions that the user named. Raise ``InputError`` if they do not fit the inputs."""
    if not isinstance(names, Mapping):
        raise InputError(f"dimensions must map inputs to positions and names, got {names!r:.80}")
    dimensions: dict[str, Dimension] = {}
    for name, symbols in names.items():
        tensor = inputs.get(name)
        if tensor is None:
            raise InputError(f"no input is called {name!r}; the inputs are {', '.join(inputs)}{close_to(name, inputs)}")
        if not isinstance(symbols, Mapping):
            raise InputError(
                f"dimensions[{name!r}] must map positions to names, such as {{0: 'batch'}}, got {symbols!r}"
            )
        for dim, symbol in symbols.items():
            is_name = isinstance(symbol, str) and symbol.isidentifier()
            if type(dim) is not int or not 0 <= dim < len(tensor.shape) or not is_name:
                raise InputError(
                    f"dimensions[{name!r}] must map positions 0 to {len(tensor.shape) - 1} to identifiers, "
                    f"got {{{dim!r}: {symbol!r}}}"
                )
            position, size = Place(tensor.argument, tensor.tensor_index, dim), tensor.shape[dim]
            dimension = dimensions.get(symbol, Dimension(symbol, size, ()))
            if dimension.size != size:
                raise InputError(f"dimension {symbol!r} has the sizes {dimension.size} and {size}; give them two names")
            dimensions[symbol] = replace(dimension, places=(*dimension.places, position))
    return list(dimensions.values())


def _by_kind(inputs: Mapping[str, InputTensor], batch_dim: int) -> Iterator[list[list[Dimension]]]:
    """Yield groups of dimensions; of each group, the first list counts in which the model accepts a dimension."""
    tensors = [tensor for tensor in inputs.values() if len(tensor.shape) > batch_dim]
    pictures = [image for image in tensors if _is_picture(image)]
    if tensors and tensors[0] not in pictures:
        size = tensors[0].shape[batch_dim]
        batch_places = tuple(_place(image, batch_dim) for image in tensors if image.shape[batch_dim] == size)
        yield [[Dimension("batch", size, batch_places)]]
    lines: dict[int, list[tuple[Place, str]]] = {}
    sides: dict[tuple[str, int], list[Place]] = {}
    for tensor in tensors:
        for dim, role in _roles(tensor, batch_dim):
            if role in _IMAGE:
                sides.setdefault((role, tensor.shape[dim]), []).append(_place(tensor, dim))
            else:
                lines.setdefault(tensor.shape[dim], []).append((_place(tensor, dim), role))
    for size, places in lines.items():
        shared = Dimension(places[0][1], size, tuple(position for position, _ in places))
        yield [[shared], [Dimension(role, size, (position,)) for position, role in places]]
    separate = [Dimension(role, size, tuple(places)) for (role, size), places in sides.items()]
    for size in dict.fromkeys(dimension.size for dimension in separate):
        square = [dimension for dimension in separate if dimension.size == size]
        yield [
            square,
            [Dimension(_SIDE, size, tuple(position for dimension in square for position in dimension.places))],
        ]


def _place(tensor: InputTensor, dim: int) -> Place:
    return Place(tensor.argument, tensor.tensor_index, dim)


def _is_picture(tensor: InputTensor) -> bool:
    """Return True for one image without a batch, (channels, height, width), as detectors take them."""
    return tensor.is_floating and len(tensor.shape) == 3 and tensor.shape[0] in (1, 3) and min(tensor.shape[1:]) > 16


def _roles(tensor: InputTensor, batch_dim: int) -> list[tuple[int, str]]:
    """Return the positions that may change, each with the usual name."""
    rank = len(tensor.shape)
    if _is_picture(tensor):
        return [(1, "height"), (2, "width")]
    if not tensor.is_floating:
        roles = {1: [], 4: [(2, "sequence"), (3, "sequence")]}.get(rank, [(1, "sequence")])
    elif rank == 4:
        roles = [(2, "height"), (3, "width")]
    elif rank == 5:
        roles = [(1, "frames"), (2, "frames"), (3, "height"), (4, "width")]
    else:
        roles = [(1, "sequence"), (2, "length")][: rank - 1] if rank != 2 else [(1, "length")]
    return [(dim if dim != batch_dim else 0, role) for dim, role in roles if rank > 1]


def _unused(dimension: Dimension, others: Sequence[Dimension], inputs: Mapping[str, InputTensor]) -> str:
    """Return a name that no dimension has: with the name of the input in front."""
    taken = {other.name for other in others}
    if dimension.name not in taken:
        return dimension.name
    argument, index, _ = dimension.places[0]
    source = next(
        name for name, tensor in inputs.items() if (tensor.argument, tensor.tensor_index) == (argument, index)
    )
    stem = re.sub(r"\W+", "_", _SUFFIX.sub("", source) or source).strip("_")
    name = f"{stem}_{dimension.name}"
    return name if name not in taken else f"{name}_{dimension.places[0].dim}"


def _stepped(dimension: Dimension, accepts: Accepts) -> Dimension | str:
    """Return the dimension with the smallest step of which the model accepts two larger sizes, or two smaller ones.

    Return why it does not accept the first step if there is none. Smaller sizes count, as the recorded one may be the
    largest; one size does not, as a stride rounds the next one off.
    """
    refusal = ""
    for step in _STEPS:
        for sign in (1, -1):
            sizes = [dimension.size + sign * step, dimension.size + 2 * sign * step]
            if min(sizes) < 1:
                continue
            reasons = ((size, accepts({dimension: size})) for size in sizes)
            refused = next(((size, reason) for size, reason in reasons if reason is not None), None)
            if refused is None:
                return replace(dimension, step=step)
            refusal = refusal or f"at {dimension.name}={refused[0]}, {refused[1]}"
    return refusal


def _required(dimension: Dimension, accepts: Accepts) -> Dimension:
    """Return the dimension with its step. Raise ``FormulaError`` if the model accepts no other size."""
    stepped = _stepped(dimension, accepts)
    if isinstance(stepped, str):
        raise FormulaError(f"the model accepts no other size of {dimension.name!r} than {dimension.size}: {stepped}")
    return stepped
