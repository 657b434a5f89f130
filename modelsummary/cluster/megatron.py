"""The model of one rank, whose forward and backward call the collectives that Megatron's do.

It is a copy with the shapes of the rank (``parallel.rank_model``). Hooks put the collectives where tensor and sequence
parallelism have them:

- tensor parallelism: an all-reduce of what a row-parallel layer returns, and of the gradient of what column-parallel
  layers take.
- sequence parallelism (Korthikanti et al. 2022), where a recipe asks for it or experts are divided: between the regions
  of tensor parallelism each rank holds its share of the tokens. Column-parallel layers take an all-gather of them,
  row-parallel layers return a reduce-scatter. In the backward the two change places, and what column-parallel layers
  took is gathered again instead of kept.
- expert parallelism: an all-to-all of what stacked experts take, and of what they return. They are not split further
  by tensor parallelism.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from modelsummary import _torch
from modelsummary.capture.containers import map_tensors, tensors_of
from modelsummary.cluster.divided_experts import DividedExperts, exchange
from modelsummary.cluster.tensor_functions import enter, gather, join, leave, scatter, share_out, take
from modelsummary.errors import InputError
from modelsummary.parallel.plan import ParallelPlan
from modelsummary.parallel.prepared_inputs import PreparedInput
from modelsummary.parallel.rank_model import change_arguments, local_shapes, model_of_rank

__all__ = ["NO_EXPERTS", "MegatronRank", "before_call", "note_entered"]


NO_EXPERTS = DividedExperts()


class MegatronRank:
    """The model of one rank, with Megatron's collectives.

    Args:
        model: the folded model.
        plan: how its modules are split over the ranks of tensor parallelism, made without ``sequence=True``: the
            hooks here share the tokens out themselves.
        prepared: modules whose input goes to column-parallel layers alone.
        blocks: FQNs of the blocks that run, in order.
        last: FQN of the last block of the model.
        sequence: between the split layers of a block each rank holds a share of the tokens.
        gather_head: output heads return whole results.
        experts: experts that are divided over ranks.
        expert_ranks: number of these ranks.

    Attributes:
        module: the copy.
        entered: FQN of a block -> bytes of the tensors with a gradient that it takes, and that a stage takes which
            begins with it.

    Raises:
        InputError: tokens are shared out, but modules sum what is made of whole sequences.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: ParallelPlan,
        prepared: Sequence[PreparedInput],
        blocks: Sequence[str],
        *,
        last: str = "",
        sequence: bool = False,
        gather_head: bool = False,
        experts: DividedExperts = NO_EXPERTS,
        expert_ranks: int = 1,
    ) -> None:
        self.tensor = plan.tensor
        self.entered: dict[str, tuple[int, int]] = {}
        self._layers, self._blocks = plan.layers, tuple(blocks)
        self._sequence, self._gather_head = sequence, gather_head
        self._last = last
        if sequence:
            self._check_tokens()
        shapes = local_shapes(model, [*plan.layers, *experts.layers], {"tensor": plan.tensor, "expert": expert_ranks})
        sizes = {layer.fqn: layer.options["calls"] for layer in plan.layers if layer.role == "sizes"}
        counts = [attribute for attribute in plan.attributes if type(attribute.whole) is int]  # not flags
        self.module = model_of_rank(
            model, lambda parameter: shapes[id(parameter)], [*counts, *experts.attributes], sizes, plan.tensor
        )
        self._dim: int | None = None  # of the tokens that are shared out, inside of the blocks
        self._tokens = 0  # bytes of a rank's share
        # the last input that was entered, and the result
        self._shared: tuple[Any, Tensor | None] = (lambda: None, None)
        for layer in experts.layers:
            before, after = exchange(layer)
            module = self.module.get_submodule(layer.fqn)
            module.register_forward_pre_hook(before, with_kwargs=True)
            module.register_forward_hook(after)
        self._add_hooks(prepared)

    def _check_tokens(self) -> None:
        """Refuse layers that take whole sequences without being column-parallel."""
        for layer in self._layers:
            if layer.role == "gradient" or layer.options.get("sums_result"):
                raise InputError(
                    f"sequence=True is not costed for {layer.fqn} ({layer.style}), which takes the tokens of "
                    "all ranks; use sequence=False"
                )

    def _add_hooks(self, prepared: Sequence[PreparedInput]) -> None:
        if self._sequence:
            for fqn in self._blocks:
                before_call(self.module.get_submodule(fqn), self._begin)
        note_entered(self.module, self._blocks, self.entered)
        if self._sequence and self._last:
            self.module.get_submodule(self._last).register_forward_hook(self._end)
        done = {fqn for prepared_input in prepared for fqn in prepared_input.columns}
        for prepared_input in prepared:
            change_arguments(self.module.get_submodule(prepared_input.fqn), {prepared_input.position: self._enter})
        for layer in self._layers:
            module = self.module.get_submodule(layer.fqn)
            whole = bool(layer.options.get("output_layouts" if layer.role in ("column", "head") else "input_layouts"))
            if layer.role in ("column", "head") and not isinstance(module, nn.Embedding) and layer.fqn not in done:
                change_arguments(module, {0: self._enter})
            if (layer.role == "column" and whole) or (layer.role == "head" and self._gather_head):
                module.register_forward_hook(self._join)
            if layer.role == "row" and whole:
                change_arguments(module, {0: self._take})
            if layer.role in ("row", "embedding"):
                module.register_forward_hook(self._after_rows)
            if layer.role == "heads":
                self._divide_attention(module)
            if layer.role == "gradient":
                module.register_forward_hook(self._enter_parts(layer.options["parts"]))
            if layer.options.get("sums_result"):
                change_arguments(module, dict.fromkeys(layer.options["summed"], _entered))
                module.register_forward_hook(self._after_rows)

    # ----------------------------------------------------------------------------------------------- hooks

    def _begin(self, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        return self._share_out(args, kwargs) if self._dim is None else (args, kwargs)

    def _share_out(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Replace the first tensor that a block takes by the share of one rank."""
        first = next(
            (tensor for tensor in tensors_of((args, kwargs)) if tensor.requires_grad and tensor.dim() > 1), None
        )
        dims = [] if first is None else [dim for dim in range(first.dim() - 1) if first.shape[dim] % self.tensor == 0]
        if first is None or not dims:
            shape = None if first is None else tuple(first.shape)
            raise InputError(f"sequence=True: the tokens of a block's input {shape} do not divide by {self.tensor}")
        self._dim = dims[-1]
        share = share_out(first, self.tensor, self._dim)
        self._tokens = share.numel() // share.shape[-1]
        shared: tuple[Any, Any] = map_tensors(lambda tensor: share if tensor is first else tensor, (args, kwargs))
        return shared

    def _end(self, _module: nn.Module, _args: Any, out: Any) -> Any:
        """Gather what the last block returns."""
        dim, self._dim = self._dim, None
        if dim is None:
            return None

        def whole(tensor: Tensor) -> Tensor:
            return join(tensor, self.tensor, dim) if self._is_share(tensor) else tensor

        return map_tensors(whole, out)

    def _is_share(self, tensor: Tensor) -> bool:
        return tensor.dim() > 1 and tensor.numel() // tensor.shape[-1] == self._tokens

    def _divide_attention(self, module: nn.Module) -> None:
        """Let an attention compute the heads of one rank."""
        from modelsummary.parallel.styles import AttentionParallel, replace_forward

        def entered(tensor: Tensor, _layout: Any) -> Any:
            return self._enter(tensor)

        def left(tensor: Tensor, placement: Any, _layout: Any) -> Any:
            return self._after_rows(module, (), tensor) if placement.is_partial() else tensor

        style = AttentionParallel(shards={})
        replace_forward(module, style.forward_of(0, lambda module: dict(module.named_parameters()), entered, left))

    def _enter_parts(self, parts: Sequence[tuple[int, int]]) -> Any:
        """Return a hook that enters parts of a result, along its last dimension."""

        def hook(_module: nn.Module, _args: Any, out: Tensor) -> Tensor:
            pieces, position = [], 0
            for start, stop in parts:
                pieces += [out[..., position:start], _entered(out[..., start:stop])]
                position = stop
            return torch.cat([*pieces, out[..., position:]], dim=-1)

        return hook

    def _enter(self, tensor: Tensor) -> Tensor:
        """Return the input of column-parallel layers, entered once for all layers that take the same tensor."""
        before, after = self._shared
        entered = after if before() is tensor else None
        if entered is None:
            if self._dim is not None and self._is_share(tensor):
                entered = gather(tensor, self.tensor, self._dim)
            else:
                entered = _entered(tensor)
            self._shared = weakref.ref(tensor), entered
        return entered

    def _after_rows(self, _module: nn.Module, _args: Any, out: Tensor) -> Any:
        if self._dim is not None and out.numel() // out.shape[-1] == self._tokens * self.tensor:
            return scatter(out, self.tensor, self._dim)
        return leave(out)

    def _join(self, _module: nn.Module, _args: Any, out: Tensor) -> Any:
        return join(out, self.tensor, out.dim() - 1)

    def _take(self, tensor: Tensor) -> Tensor:
        return take(tensor, self.tensor, tensor.dim() - 1)


def note_entered(model: nn.Module, blocks: Iterable[str], entered: dict[str, tuple[int, int]]) -> None:
    """Note the bytes with which blocks are called, with a gradient, and for a stage that begins with the block."""

    def noting(fqn: str) -> Any:
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            tensors = map(_torch.local_part, tensors_of((args, kwargs)))
            taken = {id(tensor): tensor for tensor in tensors if tensor.is_floating_point()}
            held = sum(tensor.numel() * tensor.dtype.itemsize for tensor in taken.values() if tensor.requires_grad)
            everything = sum(tensor.numel() * tensor.dtype.itemsize for tensor in taken.values())
            entered[fqn] = held, held or everything

        return hook

    for fqn in blocks:
        before_call(model.get_submodule(fqn), noting(fqn))


def before_call(module: nn.Module, hook: Any) -> None:
    """Call a hook before the forward of a module; a ScriptModule refuses hooks by its own method, but runs them."""
    nn.Module.register_forward_pre_hook(module, hook, with_kwargs=True)


def _entered(tensor: Tensor) -> Tensor:
    return enter(tensor) if tensor.requires_grad else tensor
