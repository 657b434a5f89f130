"""A copy of a model with the shapes of one rank, whose forward and backward call the collectives of that rank.

Equal blocks are folded: only the first of them runs, and the others return their input. So a model of any depth takes the
time of its distinct blocks. Parameters have the shapes of one rank of tensor parallelism, and hooks put the collectives
where tensor and sequence parallelism have them:

- tensor parallelism: an all-reduce of what a row-parallel layer returns, and of the gradient of what column-parallel
  layers take.
- sequence parallelism (Korthikanti et al. 2022): between the regions of tensor parallelism each rank holds its share of
  the tokens. Column-parallel layers take an all-gather of them, row-parallel layers return a reduce-scatter. In the
  backward the two change places, and what column-parallel layers took is gathered again instead of kept.

The collectives are torch's own operators, so the record of a step holds them among the others, with their sizes.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from modelsummary.capture.values import map_leaves, map_tensors, tensors_of
from modelsummary.errors import InputError
from modelsummary.parallel.inputs import PreparedInput
from modelsummary.parallel.plan import ParallelPlan

__all__ = ["RankModel", "fold"]

_OPS: Any = torch.ops._c10d_functional
_GROUP = "tensor"


def _all_reduce(x: Tensor) -> Tensor:
    reduced: Tensor = _OPS.all_reduce(x, "sum", _GROUP)
    return reduced


def _all_gather(x: Tensor, ranks: int, dim: int) -> Tensor:
    rows = _OPS.all_gather_into_tensor(x.reshape(-1, x.shape[-1]), ranks, _GROUP)
    gathered: Tensor = rows.view(*x.shape[:dim], x.shape[dim] * ranks, *x.shape[dim + 1 :])
    return gathered


def _reduce_scatter(x: Tensor, ranks: int, dim: int) -> Tensor:
    rows = _OPS.reduce_scatter_tensor(x.reshape(-1, x.shape[-1]), "sum", ranks, _GROUP)
    scattered: Tensor = rows.view(*x.shape[:dim], x.shape[dim] // ranks, *x.shape[dim + 1 :])
    return scattered


def _part(x: Tensor, ranks: int, dim: int) -> Tensor:
    return x.narrow(dim, 0, x.shape[dim] // ranks)


class _Enter(torch.autograd.Function):
    """The input of column-parallel layers: its gradient is reduced."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _all_reduce(grads[0])


class _Leave(torch.autograd.Function):
    """The result of a row-parallel layer: it is reduced."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _all_reduce(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0]


class _Gather(torch.autograd.Function):
    """The input of column-parallel layers under sequence parallelism: it is gathered, its gradient reduced."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int, dim: int) -> Tensor:
        ctx.ranks, ctx.dim = ranks, dim
        return _all_gather(x, ranks, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        own = _reduce_scatter(grads[0], ctx.ranks, ctx.dim)
        _all_gather(own, ctx.ranks, ctx.dim)  # what the layers took, for the gradient of their weights
        return own, None, None


class _Scatter(torch.autograd.Function):
    """The result of a row-parallel layer under sequence parallelism."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int, dim: int) -> Tensor:
        ctx.ranks, ctx.dim = ranks, dim
        return _reduce_scatter(x, ranks, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _all_gather(grads[0], ctx.ranks, ctx.dim), None, None


class _Take(torch.autograd.Function):
    """The share of one rank of a tensor that all ranks hold: no collective, but for the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int, dim: int) -> Tensor:
        ctx.ranks, ctx.dim = ranks, dim
        return _part(x, ranks, dim).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _all_gather(grads[0], ctx.ranks, ctx.dim), None, None


class _Share(torch.autograd.Function):
    """The share of one rank of the tokens; the layer that made them returns it by a reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int, dim: int) -> Tensor:
        ctx.shape = x.shape
        return x.new_empty([size // ranks if place == dim else size for place, size in enumerate(x.shape)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0].new_empty(ctx.shape), None, None


class _Join(torch.autograd.Function):
    """The whole of a tensor whose last dimension is sharded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int, dim: int) -> Tensor:
        ctx.ranks, ctx.dim = ranks, dim
        return _all_gather(x, ranks, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _part(grads[0], ctx.ranks, ctx.dim).clone(), None, None


def fold(model: nn.Module, same: Mapping[str, str]) -> nn.Module:
    """Return a copy of a model, with parameters on meta, in which blocks return their input.

    Args:
        model: the model; the copy shares its buffers.
        same: FQN of a block that does not run -> FQN of the equal block that runs before it.

    Raises:
        InputError: the model cannot be copied.
    """
    twin = _copy(model, lambda parameter: tuple(parameter.shape))
    _pass_through(twin, same)
    return twin


def _copy(model: nn.Module, shape_of: Callable[[nn.Parameter], tuple[int, ...]]) -> nn.Module:
    memo: dict[int, Any] = {id(each): each for each in model.buffers()}
    for each in model.parameters():
        made = torch.empty(shape_of(each), dtype=each.dtype, device="meta")
        memo[id(each)] = nn.Parameter(made, requires_grad=each.requires_grad)
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise InputError(f"the model cannot be copied, which simulating a plan needs: {error!r:.200}") from error


def _pass_through(twin: nn.Module, same: Mapping[str, str]) -> None:
    kept: dict[str, list[Any]] = {fqn: [] for fqn in same.values()}
    for fqn, notes in kept.items():
        block = twin.get_submodule(fqn)
        block.register_forward_hook(_keep(notes), with_kwargs=True)
    for fqn, first in same.items():
        twin.get_submodule(fqn).forward = _PassThrough(kept[first])  # type: ignore[method-assign]


def _keep(notes: list[Any]) -> Any:
    def hook(_module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        place = _hidden_place(args, kwargs, out)
        notes[:] = [place, map_tensors(weakref.ref, out)]

    return hook


def _hidden_place(args: Any, kwargs: Any, out: Any) -> tuple[int, int]:
    """Return the number of the tensor that a block passes on, among what it takes and among what it returns."""
    given, made = list(tensors_of((args, kwargs))), list(tensors_of(out))
    for number, result in enumerate(made):
        for place, tensor in enumerate(given):
            if tensor.shape == result.shape and tensor.dtype == result.dtype and tensor.dtype.is_floating_point:
                return place, number
    raise InputError("equal blocks must return a tensor of the size that they take")


class _PassThrough:
    """The forward of a folded block: it returns what it takes, in the form in which the block that ran returned."""

    def __init__(self, notes: list[Any]) -> None:
        self._notes = notes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        (place, number), form = self._notes
        hidden = list(tensors_of((args, kwargs)))[place]
        count = -1

        def put(reference: Any) -> Any:
            nonlocal count
            if not isinstance(reference, weakref.ref):
                return reference
            count += 1
            return hidden if count == number else reference()

        return map_leaves(put, form)

    def __deepcopy__(self, memo: Any) -> _PassThrough:
        return self


class RankModel:
    """The copy of a model that one rank runs.

    Args:
        model: the folded model.
        plan: how its modules are split over the ranks of tensor parallelism.
        prepared: modules whose input goes to column-parallel layers alone.
        blocks: FQNs of the blocks that run, in order.
        last: FQN of the last block of the model.
        sequence_parallel: between the split layers of a block each rank holds a share of the tokens.
        gather_head: output heads return whole results.

    Attributes:
        module: the copy.
        entered: FQN of a block -> bytes of the tensors with a gradient that it takes.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: ParallelPlan,
        prepared: Sequence[PreparedInput],
        blocks: Sequence[str],
        *,
        last: str = "",
        sequence_parallel: bool = False,
        gather_head: bool = False,
    ) -> None:
        self.tensor = plan.tensor
        self.entered: dict[str, int] = {}
        self._layers, self._blocks = plan.layers, tuple(blocks)
        self._sequence_parallel, self._gather_head = sequence_parallel, gather_head
        self._last = last
        cut = self._cut(model)
        self.module = _copy(model, lambda each: _local_shape(each.shape, cut.get(id(each)), plan.tensor))
        for attribute in plan.attributes:
            if attribute.name != "inplace":
                setattr(self.module.get_submodule(attribute.fqn), attribute.name, attribute.local)
        self._dim: int | None = None  # of the tokens that are shared out, inside of the blocks
        self._tokens = 0  # bytes of a rank's share
        self._shared: tuple[Any, Any] = (lambda: None, lambda: None)  # the last input that was entered, and the result
        self._add_hooks(prepared)

    def _cut(self, model: nn.Module) -> dict[int, int]:
        """Return the dimension along which each split parameter is cut, by the id of the parameter."""
        return {
            id(model.get_parameter(f"{layer.fqn}.{name}" if layer.fqn else name)): dim
            for layer in self._layers
            for name, dim in layer.shards.items()
            if dim is not None
        }

    def _add_hooks(self, prepared: Sequence[PreparedInput]) -> None:
        for fqn in self._blocks:
            block = self.module.get_submodule(fqn)
            block.register_forward_pre_hook(self._begin(fqn), with_kwargs=True)
        if self._sequence_parallel and self._last:
            self.module.get_submodule(self._last).register_forward_hook(self._end)
        done = {fqn for each in prepared for fqn in each.columns}
        for each in prepared:
            self.module.get_submodule(each.fqn).register_forward_pre_hook(self._before(each.position), with_kwargs=True)
        for layer in self._layers:
            module = self.module.get_submodule(layer.fqn)
            whole = bool(layer.options.get("output_layouts" if layer.role in ("column", "head") else "input_layouts"))
            if layer.role in ("column", "head") and not isinstance(module, nn.Embedding) and layer.fqn not in done:
                module.register_forward_pre_hook(self._before(0), with_kwargs=True)
            if (layer.role == "column" and whole) or (layer.role == "head" and self._gather_head):
                module.register_forward_hook(self._join)
            if layer.role == "row" and whole:
                module.register_forward_pre_hook(self._take)
            if layer.role in ("row", "embedding"):
                module.register_forward_hook(self._after_rows)

    # ----------------------------------------------------------------------------------------------- hooks

    def _begin(self, fqn: str) -> Any:
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> Any:
            if self._sequence_parallel and self._dim is None:
                args, kwargs = self._share_out(args, kwargs)
            held = {id(each): each for each in tensors_of((args, kwargs)) if each.requires_grad}
            self.entered[fqn] = sum(each.numel() * each.dtype.itemsize for each in held.values())
            return args, kwargs

        return hook

    def _share_out(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Replace the first tensor that a block takes by the share of one rank."""
        first = next((each for each in tensors_of((args, kwargs)) if each.requires_grad and each.dim() > 1), None)
        dims = [] if first is None else [dim for dim in range(first.dim() - 1) if first.shape[dim] % self.tensor == 0]
        if first is None or not dims:
            shape = None if first is None else tuple(first.shape)
            raise InputError(f"sequence_parallel=True: the tokens of a block's input {shape} do not divide by {self.tensor}")
        self._dim = dims[-1]
        own = _Share.apply(first, self.tensor, self._dim)  # type: ignore[no-untyped-call]
        self._tokens = own.numel() // own.shape[-1]
        return map_tensors(lambda each: own if each is first else each, (args, kwargs))  # type: ignore[no-any-return]

    def _end(self, _module: nn.Module, _args: Any, out: Any) -> Any:
        """Gather what the last block returns."""
        dim, self._dim = self._dim, None
        if dim is None:
            return None

        def whole(tensor: Tensor) -> Tensor:
            if not self._is_share(tensor):
                return tensor
            gathered: Tensor = _Join.apply(tensor, self.tensor, dim)  # type: ignore[no-untyped-call]
            return gathered

        return map_tensors(whole, out)

    def _is_share(self, x: Tensor) -> bool:
        return x.dim() > 1 and x.numel() // x.shape[-1] == self._tokens

    def _before(self, position: int | str) -> Any:
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> Any:
            if isinstance(position, str):
                return args, {**kwargs, position: self._enter(kwargs[position])}
            return (*args[:position], self._enter(args[position]), *args[position + 1 :]), kwargs

        return hook

    def _enter(self, x: Tensor) -> Tensor:
        """Return the input of column-parallel layers, entered once for all layers that take the same tensor."""
        before, after = self._shared
        entered: Tensor | None = after() if before() is x else None
        if entered is None:
            if self._dim is not None and self._is_share(x):
                entered = _Gather.apply(x, self.tensor, self._dim)  # type: ignore[no-untyped-call]
            else:
                entered = _Enter.apply(x) if x.requires_grad else x  # type: ignore[no-untyped-call]
            assert entered is not None
            self._shared = weakref.ref(x), weakref.ref(entered)
        return entered

    def _after_rows(self, _module: nn.Module, _args: Any, out: Tensor) -> Any:
        if self._dim is not None and out.numel() // out.shape[-1] == self._tokens * self.tensor:
            return _Scatter.apply(out, self.tensor, self._dim)  # type: ignore[no-untyped-call]
        return _Leave.apply(out)  # type: ignore[no-untyped-call]

    def _join(self, _module: nn.Module, _args: Any, out: Tensor) -> Any:
        return _Join.apply(out, self.tensor, out.dim() - 1)  # type: ignore[no-untyped-call]

    def _take(self, _module: nn.Module, args: Any) -> Any:
        x, *others = args
        return (_Take.apply(x, self.tensor, x.dim() - 1), *others)  # type: ignore[no-untyped-call]




def _local_shape(shape: Sequence[int], dim: int | None, ranks: int) -> tuple[int, ...]:
    return tuple(size // ranks if place == dim else size for place, size in enumerate(shape))
