"""Styles of tensor parallelism that torch lacks, for modules whose functions take parameters.

``to_code`` copies their source, so they use torch alone.
"""

from __future__ import annotations

import math
from functools import wraps
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from modelsummary._torch import all_to_all_single_autograd, running_backward, tree_leaves
from modelsummary.parallel.expert_shards import ExpertShards
from modelsummary.parallel.function_names import Families
from modelsummary.parallel.local_sizes import LocalSizes, SizesOfRank, changed_leaves, replace_forward
from modelsummary.parallel.tokens_style import TokensOfRank, WholeCalls

__all__ = [
    "AttentionParallel",
    "AverageParallel",
    "CopyOutput",
    "ExpertDispatch",
    "ExpertListDispatch",
    "ExpertListParallel",
    "ExpertParallel",
    "ExpertShards",
    "Families",
    "LinearParallel",
    "LocalParallel",
    "LocalSizes",
    "ReduceGradient",
    "ReplicateParallel",
    "SizesOfRank",
    "TokensOfRank",
    "WholeCalls",
    "changed_leaves",
    "replace_forward",
]


class LocalParallel(ParallelStyle):
    """A module that runs on the local shards of its own parameters.

    Args:
        shards: name of a parameter -> its placement.
        once: names of parameters that only the first rank adds, because the results are summed.
        summed: positions of arguments whose gradients are summed over the ranks; names for keyword arguments.
        sums_result: the result is summed over the ranks.
        pieces: name of a parameter -> size of each piece of its sharded dimension, and True if it is whole on each
            rank. A rank has one chunk of the parameter, and in the forward it gets the rows of others that it needs.
    """

    def __init__(
        self,
        *,
        shards: dict[str, Any],
        once: tuple[str, ...] = (),
        summed: tuple[Any, ...] = (),
        sums_result: bool = False,
        pieces: Any = None,
    ) -> None:
        self.shards, self.once, self.summed, self.sums_result = shards, once, summed, sums_result
        self.pieces = pieces or {}

    def _apply(self, module: Any, device_mesh: Any) -> Any:
        source = {"src_data_rank": self.src_data_rank} if hasattr(self, "src_data_rank") else {}  # since torch 2.7
        for name in self._names():
            parameter = module.get_parameter(name)
            placement = self.shards.get(name, Replicate())
            distributed = distribute_tensor(parameter, device_mesh, [placement], **source)
            self._put(module, {name: nn.Parameter(distributed, requires_grad=parameter.requires_grad)})

        def local_forward(bound_module: Any, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
            args, kwargs = self._prepared(args, kwargs, device_mesh)
            whole = {name: self._get(bound_module, name) for name in self._names()}
            self._put(bound_module, self._local(whole, device_mesh))
            try:
                result = self._call(bound_module, forward, args, kwargs, device_mesh)
            finally:
                self._put(bound_module, whole)
            return self._finished(result, whole, device_mesh)

        replace_forward(module, local_forward)
        return module

    def _call(self, module: Any, forward: Any, args: Any, kwargs: Any, device_mesh: Any) -> Any:  # noqa: ARG002
        """Return the result on local shards."""
        return forward(*args, **kwargs)

    def _finished(self, result: Any, whole: dict[str, Any], device_mesh: Any) -> Any:  # noqa: ARG002
        """Return the result of the module from the result on local shards."""
        return self._left(result, Partial(), Replicate(), device_mesh) if self.sums_result else result

    def _entered(self, tensor: Any, layout: Any, wanted: Any, device_mesh: Any) -> Any:
        """Return what a rank computes with of an input; each has a part of the gradient of a whole one."""
        if not isinstance(tensor, DTensor):
            tensor = DTensor.from_local(tensor, device_mesh, [layout], run_check=False)
        if tensor.placements != (wanted,):  # else its backward would reduce before the gradient is scattered
            tensor = tensor.redistribute(placements=[wanted])
        return tensor.to_local(grad_placements=[Partial()] if wanted.is_replicate() else tensor.placements)

    def _left(self, tensor: Any, placement: Any, layout: Any, device_mesh: Any) -> Any:
        """Return a result in the layout that it gets, from the part of a rank."""
        dtensor = DTensor.from_local(tensor, device_mesh, [placement], run_check=False)
        return dtensor.redistribute(placements=[layout]).to_local()

    def _names(self) -> list[str]:
        """Return the names of the parameters that are distributed."""
        return [*self.shards, *self.once]

    def _get(self, module: Any, name: str) -> Any:
        """Return a parameter of a module, or of a module in it."""
        owner, _, attribute = name.rpartition(".")
        return module.get_submodule(owner)._parameters[attribute]

    def _put(self, module: Any, tensors: dict[str, Any]) -> None:
        """Replace parameters of a module, or of modules in it."""
        for name, tensor in tensors.items():
            owner, _, attribute = name.rpartition(".")
            module.get_submodule(owner)._parameters[attribute] = tensor

    def _local(self, whole: dict[str, Any], device_mesh: Any) -> dict[str, Any]:
        """Return the local tensors that replace the parameters during the forward."""
        local = {name: self._in_parts(whole[name]) for name in self.shards}
        for name, pieces in self.pieces.items():
            local[name] = self._exchanged(local[name], self.shards[name].dim, pieces, device_mesh)
        is_first = device_mesh.get_local_rank() == 0
        for name in self.once:
            local[name] = self._in_parts(whole[name]) * (1 if is_first else 0)
        return local

    def _exchanged(self, chunk: Any, dim: int, pieces: Any, device_mesh: Any) -> Any:
        """Return what this rank needs of each piece, from the chunks of all ranks; gradients go back the same way."""
        ranks, rank = range(device_mesh.size()), device_mesh.get_local_rank()
        length = -(-sum(size for size, _ in pieces) // len(ranks))

        def rows(needs: int, has: int) -> Any:
            """Return the start and number of the rows in the chunk of one rank that another one needs."""
            start, bounds = -has * length, []
            for size, is_whole in pieces:
                part = size if is_whole else size // len(ranks)
                begin = start if is_whole else start + needs * part
                bounds.append((max(begin, 0), min(begin + part, length)))
                start += size
            return [(begin, end - begin) for begin, end in bounds if begin < end]

        whole = chunk.movedim(dim, 0)
        sent = torch.cat([whole.narrow(0, *part) for other in ranks for part in rows(other, rank)])
        arrives = [sum(count for _, count in rows(rank, other)) for other in ranks]
        leaves = [sum(count for _, count in rows(other, rank)) for other in ranks]
        # What arrives is in the order of the whole parameter, as the ranks and the pieces are.
        return all_to_all_single_autograd(sent, arrives, leaves, device_mesh.get_group()).movedim(0, dim)

    def _in_parts(self, parameter: Any) -> Any:
        """Return the local tensor, whose gradient is summed over the ranks that hold the same one."""
        placements = [Partial() if placement.is_replicate() else placement for placement in parameter.placements]
        return parameter.to_local(grad_placements=placements)

    def _prepared(self, args: Any, kwargs: dict[str, Any], device_mesh: Any) -> tuple[Any, dict[str, Any]]:
        """Return the arguments, with the gradients of some of them summed over the ranks."""
        arguments: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        for name in self.summed:
            if isinstance(arguments[name], torch.Tensor) and arguments[name].is_floating_point():
                arguments[name] = self._entered(arguments[name], Replicate(), Replicate(), device_mesh)
        return tuple(arguments[position] for position in range(len(args))), {name: arguments[name] for name in kwargs}


class LinearParallel(LocalParallel):
    """A linear layer of another class than ``nn.Linear``, or one whose columns are several pieces.

    Args:
        shards: name of a parameter -> its placement.
        by_rows: it is split by rows, and its results are summed; else it is split by columns.
        pieces: as ``LocalParallel`` takes them.
        bias: name of a parameter that is added to the sum; empty if there is none.
        weight: name of the weight, whose product with the input a rank computes; empty if it runs the forward.
        input_layouts: of the input. Default: sharded along the features for rows, whole for columns.
        output_layouts: of the result. Default: whole for rows, sharded along the features for columns.
    """

    def __init__(
        self,
        *,
        shards: dict[str, Any],
        by_rows: bool = False,
        pieces: Any = None,
        bias: str = "",
        weight: str = "",
        input_layouts: Any = None,
        output_layouts: Any = None,
    ) -> None:
        super().__init__(shards=shards, sums_result=by_rows, pieces=pieces)
        self.bias, self.weight = bias, weight
        self.wanted = Shard(-1) if by_rows else Replicate()
        self.input_layouts, self.output_layouts = input_layouts or self.wanted, output_layouts

    def _names(self) -> list[str]:
        return [*self.shards, self.bias] if self.bias else [*self.shards]

    def _local(self, whole: dict[str, Any], device_mesh: Any) -> dict[str, Any]:
        local = super()._local(whole, device_mesh)
        return {**local, self.bias: torch.zeros_like(whole[self.bias].to_local())} if self.bias else local

    def _call(self, module: Any, forward: Any, args: Any, kwargs: Any, device_mesh: Any) -> Any:
        if not self.weight:
            return super()._call(module, forward, args, kwargs, device_mesh)
        local = {name: self._get(module, name) for name in self._names()}
        weight, is_transposed = local.pop(self.weight), (self.shards[self.weight].dim == 1) != self.sums_result
        x, bias = next(iter((*args, *kwargs.values()))), next(iter(local.values()), None)
        return F.linear(x, weight.t() if is_transposed else weight, bias)

    def _prepared(self, args: Any, kwargs: dict[str, Any], device_mesh: Any) -> tuple[Any, dict[str, Any]]:
        x = next(iter((*args, *kwargs.values())))
        entered = self._entered(x, self.input_layouts, self.wanted, device_mesh)
        return ((entered,), {}) if args else ((), dict.fromkeys(kwargs, entered))

    def _finished(self, result: Any, whole: dict[str, Any], device_mesh: Any) -> Any:
        if not self.sums_result and self.output_layouts is None:
            return result
        placement = Partial() if self.sums_result else Shard(-1)
        layout = self.output_layouts or Replicate()
        finished = self._left(result, placement, layout, device_mesh)
        if not self.bias:
            return finished
        parts = Replicate() if layout.is_replicate() else Partial()
        return finished + whole[self.bias].to_local(grad_placements=[parts]).to(finished.dtype)


class AttentionParallel(LocalParallel):
    """``nn.MultiheadAttention`` split by heads: each rank computes some of them.

    Args:
        shards, pieces: as ``LocalParallel`` takes them.
        input_layouts: of query, key and value. Default: whole.
        output_layouts: of the result. Default: whole.
    """

    def __init__(
        self, *, shards: dict[str, Any], pieces: Any = None, input_layouts: Any = None, output_layouts: Any = None
    ) -> None:
        super().__init__(shards=shards, pieces=pieces)
        self.input_layouts = input_layouts or (Replicate(), Replicate(), Replicate())
        self.output_layouts = output_layouts or Replicate()

    def _local(self, whole: dict[str, Any], device_mesh: Any) -> dict[str, Any]:
        local = super()._local(whole, device_mesh)
        if "out_proj.bias" in whole:  # a rank that adds it to a chunk has a part of its gradient
            parts = Replicate() if self.output_layouts.is_replicate() else Partial()
            local["out_proj.bias"] = whole["out_proj.bias"].to_local(grad_placements=[parts])
        return local

    def _call(self, module: Any, forward: Any, args: Any, kwargs: Any, device_mesh: Any) -> Any:  # noqa: ARG002
        return self._attended(module, device_mesh, *args, **kwargs)

    def _attended(
        self,
        module: Any,
        device_mesh: Any,
        /,
        query: Any,
        key: Any,
        value: Any,
        key_padding_mask: Any = None,
        need_weights: bool = True,
        attn_mask: Any = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> Any:
        """Return what the attention returns, computed with the heads of this rank."""
        local, rank = dict(module.named_parameters()), device_mesh.get_local_rank()
        tensors = {id(tensor): tensor for tensor in (query, key, value)}
        layouts = {id(tensor): layout for tensor, layout in zip((query, key, value), self.input_layouts, strict=True)}
        entered = {
            identity: self._entered(tensor, layouts[identity], Replicate(), device_mesh)
            for identity, tensor in tensors.items()
        }
        inputs = [entered[id(tensor)] for tensor in (query, key, value)]
        q, k, v = self._projected(module, local, inputs)
        if attn_mask is not None and attn_mask.dim() == 3:  # one mask per head and row of the batch
            attn_mask = attn_mask.unflatten(0, (-1, module.num_heads)).narrow(1, rank * q.shape[1], q.shape[1])
        if key_padding_mask is not None:
            key_padding_mask = key_padding_mask.view(q.shape[0], 1, 1, -1)
        is_causal = is_causal and key_padding_mask is None and not need_weights
        mask = self._added([None if is_causal else attn_mask, key_padding_mask], q.dtype)
        dropout, weights = module.dropout if module.training else 0.0, None
        if need_weights:
            scores = q @ k.transpose(-2, -1) / module.head_dim**0.5
            weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
            result = weights @ v
        else:
            result = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)
        if inputs[0].dim() == 2:
            result, weights = result.squeeze(0).transpose(0, 1), None if weights is None else weights.squeeze(0)
        else:
            result = result.transpose(1, 2) if module.batch_first else result.permute(2, 0, 1, 3)
        result = F.linear(result.flatten(-2), local["out_proj.weight"])
        result = self._left(result, Partial(), self.output_layouts, device_mesh)
        if "out_proj.bias" in local:
            result = result + local["out_proj.bias"]
        if weights is not None:
            mean, heads = weights.sum(-3) / module.num_heads, Shard(weights.dim() - 3)
            tensor, placement = (mean, Partial()) if average_attn_weights else (weights, heads)
            weights = self._left(tensor, placement, Replicate(), device_mesh)
        return result, weights

    def _projected(self, module: Any, local: dict[str, Any], inputs: Any) -> Any:
        """Return query, key and value of this rank: batch x heads x length x features of a head."""
        if "in_proj_weight" in local:
            weights = local["in_proj_weight"].chunk(3)
        else:
            weights = [local[f"{name}_proj_weight"] for name in "qkv"]
        biases = local["in_proj_bias"].chunk(3) if "in_proj_bias" in local else [None] * 3
        projected = []
        for tensor, weight, bias in zip(inputs, weights, biases, strict=True):
            heads = F.linear(tensor, weight, bias).unflatten(-1, (-1, module.head_dim))
            if tensor.dim() == 2:
                heads = heads.unsqueeze(0)
            elif not module.batch_first:
                heads = heads.transpose(0, 1)
            projected.append(heads.transpose(1, 2))
        return projected

    def _added(self, masks: Any, dtype: Any) -> Any:
        """Return the sum of masks as numbers that are added to the scores; None without a mask."""
        biases = [
            torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf")) if mask.dtype == torch.bool else mask
            for mask in masks
            if mask is not None
        ]
        return sum(biases[1:], biases[0]) if biases else None


class ExpertParallel(LocalParallel):
    """Stacked experts that are divided over the ranks: each rank runs its own on all tokens, and results are summed.

    The forward sees the numbers of the whole mixture (``ExpertShards``).

    Args:
        shards: name of a parameter -> its placement.
        shared: names of parameters that all experts share, and whose gradients are summed over the ranks.
        summed: positions of arguments whose gradients are summed over the ranks; names for keyword arguments.
    """

    alone = False  # a rank has tokens that no other one has

    def __init__(self, *, shards: dict[str, Any], shared: tuple[str, ...], summed: tuple[Any, ...]) -> None:
        super().__init__(shards=shards, summed=summed)
        self.shared, self.stacked = shared, tuple(shards)

    def _apply(self, module: Any, device_mesh: Any) -> Any:
        mesh = device_mesh["expert"] if device_mesh.ndim > 1 else device_mesh
        split = [name for name in self._names() if isinstance(self._get(module, name), DTensor)]
        for name in split:  # over the ranks of tensor parallelism, whose style takes the local tensors
            whole = self._get(module, name)
            local = whole.to_local().detach()
            if name in self.shards:
                local = local.chunk(mesh.size())[mesh.get_local_rank()].clone()
            placements = [self.shards.pop(name, Replicate()), *whole.placements]
            options = {"run_check": False, "shape": whole.shape, "stride": whole.stride()}
            distributed = DTensor.from_local(local, device_mesh, placements, **options)
            self._put(module, {name: nn.Parameter(distributed, requires_grad=whole.requires_grad)})
        self.shared = tuple(name for name in self.shared if name not in split)
        if not split:
            return super()._apply(module, mesh)
        outer = module.forward.__func__
        module.forward = MethodType(outer.__wrapped__, module)
        super()._apply(module, mesh)
        outer.__wrapped__, module.forward = module.forward.__func__, MethodType(outer, module)
        return module

    def _names(self) -> list[str]:
        return [*self.shards, *self.shared]

    def _local(self, whole: dict[str, Any], device_mesh: Any) -> dict[str, Any]:
        local = super()._local({name: whole[name] for name in self.shards}, device_mesh)
        return local | {name: whole[name].to_local(grad_placements=[Partial()]) for name in self.shared}

    def _call(self, module: Any, forward: Any, args: Any, kwargs: Any, device_mesh: Any) -> Any:
        shards = [self._get(module, name) for name in self.stacked]
        shared = [self._get(module, name) for name in self.shared]
        tensors = [
            tensor for tensor in (*args, *kwargs.values(), *module.buffers()) if isinstance(tensor, torch.Tensor)
        ]
        mode = ExpertShards(device_mesh.get_local_rank(), device_mesh.size(), shards, tensors, alone=self.alone)
        try:
            with mode:
                result = forward(*args, **kwargs)
            if self.alone:
                result = mode.sum_of(result)
                # Tokens of a rank need not reach what experts share: an empty sum makes a gradient of zeros.
                empty = [tensor.flatten()[:0].sum() for tensor in shared if tensor.requires_grad]
                return result + sum(empty).to(result.dtype) if empty else result
            return mode.whole(result, device_mesh, [*shards, *shared, *tensors])
        finally:
            mode.unmark(shards)  # without gradients, these are the tensors in the parameters


class ExpertDispatch(ExpertParallel):
    """Stacked experts that are divided over ranks with tokens of their own, which they send to each other's experts.

    A row for each token and each of its experts goes to the rank of the expert, with the weight of the expert. What the
    expert makes of both comes back, and the rank of the token adds it up. The loss is the mean over the ranks, and so
    are the gradients.

    Args:
        shards, shared: as ``ExpertParallel`` takes them.
        tokens, numbers, weights: positions or names of the arguments with the tokens, with the numbers of the experts
            that each goes to, and with the weights of these experts.
        divides: gradients of parameters are divided by the number of ranks; False: what sums them over the ranks does.
    """

    alone = True

    def __init__(
        self,
        *,
        shards: dict[str, Any],
        shared: tuple[str, ...],
        tokens: Any,
        numbers: Any,
        weights: Any,
        divides: bool = True,
    ) -> None:
        super().__init__(shards=shards, shared=shared, summed=())
        self.tokens, self.numbers, self.weights = tokens, numbers, weights
        self.divides = divides

    def _local(self, whole: dict[str, Any], device_mesh: Any) -> dict[str, Any]:
        local = super()._local(whole, device_mesh)
        for tensor in local.values():
            if tensor.grad_fn is not None and self.divides:  # it sums up the gradients of the losses of all ranks
                tensor.register_hook(lambda gradient: gradient / device_mesh.size())
        return local

    def _call(self, module: Any, forward: Any, args: Any, kwargs: Any, device_mesh: Any) -> Any:
        arguments: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        tokens, numbers, weights = (arguments[key] for key in (self.tokens, self.numbers, self.weights))
        n_tokens = tokens.shape[:-1].numel()
        n_choices = numbers.numel() // max(n_tokens, 1)
        group, n_ranks, rank = device_mesh.get_group(), device_mesh.size(), device_mesh.get_local_rank()
        n_local = self._get(module, self.stacked[0]).shape[0]
        order = numbers.flatten().argsort(stable=True)
        counts = numbers.flatten().bincount(minlength=n_local * n_ranks)
        arriving = all_to_all_single_autograd(counts, [n_local] * n_ranks, [n_local] * n_ranks, group)
        leaves, arrives = (rows.view(n_ranks, n_local).sum(1).tolist() for rows in (counts, arriving))
        origins = order // max(n_choices, 1)  # tokens of the rows
        rows = all_to_all_single_autograd(tokens.flatten(0, -2)[origins], arrives, leaves, group)
        row_weights = all_to_all_single_autograd(weights.flatten()[order], arrives, leaves, group)
        experts = torch.arange(rank * n_local, (rank + 1) * n_local, device=counts.device)
        experts = experts.repeat(n_ranks).repeat_interleave(arriving.flatten(), output_size=sum(arrives))
        if not len(rows):  # a row of ones runs, so that all ranks send gradients back; a norm of zeros would be NaN
            rows, row_weights = F.pad(rows, (0, 0, 0, 1), value=1.0), F.pad(row_weights, (0, 1))
            experts = torch.full_like(row_weights, rank * n_local, dtype=experts.dtype)
        choices = [1] * (numbers.dim() >= tokens.dim() or n_choices > 1)
        shape = [*[1] * (numbers.dim() - 1 - len(choices)), len(experts), *choices]
        arguments[self.tokens] = rows.view(*[1] * (tokens.dim() - 2), *rows.shape)
        arguments[self.numbers] = experts.view(shape).to(numbers.dtype)
        arguments[self.weights] = row_weights.view(shape)
        args = tuple(arguments[position] for position in range(len(args)))
        result = super()._call(module, forward, args, {name: arguments[name] for name in kwargs}, device_mesh)
        results = result.flatten(0, -2)
        results = results if sum(arrives) else results[:0]  # the backward of a slice copies all rows
        back = all_to_all_single_autograd(results, leaves, arrives, group)
        # index_add would keep its rows for the backward
        summed = back.new_zeros(n_tokens, back.shape[-1]).index_put((origins,), back, accumulate=True)
        return summed.view(*tokens.shape[:-1], summed.shape[-1])


class ExpertListParallel(ParallelStyle):
    """A list of experts that is divided over the ranks: each expert runs on one, and all ranks get what it returns.

    Args:
        width: last dimension of what an expert returns.
        draws: experts draw random numbers, such as masks of dropout. One rank does, from copies of its generators.
    """

    def __init__(self, *, width: int, draws: bool = False) -> None:
        self.width, self.draws = width, draws

    def _apply(self, module: Any, device_mesh: Any) -> Any:
        mesh = device_mesh["expert"] if device_mesh.ndim > 1 else device_mesh
        experts = list(module.children())
        for index, expert in enumerate(experts):
            self._share(expert, mesh, index * mesh.size() // len(experts))
        return module

    def _share(self, expert: Any, mesh: Any, owner: int) -> None:
        """Let an expert run on the rank that owns it, and return its result on all ranks."""
        fork: Any = None  # context that gives the rank of the running expert the generators of before back

        def sum_gradient(_expert: Any, args: Any) -> Any:
            nonlocal fork
            if self.draws:
                device = args[0].device
                nn.functional.dropout(args[0].detach())  # the next expert draws other numbers
                devices = [] if device.type in ("cpu", "meta") else [device]
                fork = torch.random.fork_rng(devices, device_type=device.type if devices else "cuda")
                fork.__enter__()
            whole = DTensor.from_local(args[0], mesh, [Replicate()], run_check=False)
            return whole.to_local(grad_placements=[Partial()])

        def leave(_expert: Any, _args: Any, _result: Any) -> None:
            fork.__exit__(None, None, None)

        def sum_result(_expert: Any, _args: Any, result: Any) -> Any:
            return DTensor.from_local(result, mesh, [Partial()], run_check=False).full_tensor()

        if owner != mesh.get_local_rank():
            self._empty(expert)
        expert.register_forward_pre_hook(sum_gradient, prepend=True)
        if self.draws:  # also where the expert raises, as when a checkpoint has all that it recomputes
            expert.register_forward_hook(leave, always_call=True)
        expert.register_forward_hook(sum_result)

    def _empty(self, expert: Any) -> None:
        """Let an expert of another rank return zeros, and drop its parameters."""

        def zeros(x: Any) -> Any:
            kind = x.device.type
            dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
            # The empty sum joins the graph, so that all ranks reduce the gradient of the input.
            return x.new_zeros((*x.shape[:-1], self.width), dtype=dtype) + x[:0].sum()

        expert.forward = zeros
        expert._forward_hooks.clear()
        expert._forward_pre_hooks.clear()
        for part in expert.modules():
            part._parameters.update(dict.fromkeys(part._parameters))


class ExpertListDispatch(ExpertListParallel):
    """A list of experts that is divided over ranks with tokens of their own, which they send to each other's experts.

    All ranks call all experts in the same order, some without tokens. The rank of an expert runs it on the tokens of
    all. The loss is the mean over the ranks, and so are the gradients.
    """

    def _share(self, expert: Any, mesh: Any, owner: int) -> None:
        group, n_ranks = mesh.get_group(), mesh.size()
        is_trained = any(parameter.requires_grad for parameter in expert.parameters())
        sizes: Any = None  # leading sizes of what the running expert takes, rows that leave and arrive

        def send(_expert: Any, args: Any) -> Any:
            nonlocal sizes
            rows = args[0].flatten(0, -2) if args[0].dim() > 1 else args[0][None]
            if is_trained and torch.is_grad_enabled() and not rows.requires_grad:
                rows = rows.detach().requires_grad_()  # else ranks without this expert would send no gradient back
            counts = torch.tensor([len(rows) * (rank == owner) for rank in range(n_ranks)])
            leaves, counts = counts.tolist(), counts.to(rows.device)
            arrives = all_to_all_single_autograd(counts, [1] * n_ranks, [1] * n_ranks, group).tolist()
            sizes = args[0].shape[:-1], leaves, arrives
            arrived = all_to_all_single_autograd(rows, arrives, leaves, group).movedim(0, 0)
            if arrived.requires_grad:
                arrived.register_hook(lambda gradient: gradient * n_ranks)
            return arrived

        def send_back(_expert: Any, _args: Any, result: Any) -> Any:
            lead, leaves, arrives = sizes
            if result.requires_grad:  # it sums up the gradients of the losses of all ranks
                result.register_hook(lambda gradient: gradient / n_ranks)
            back = all_to_all_single_autograd(result, leaves, arrives, group)
            return back.view(*lead, result.shape[-1])

        if owner != mesh.get_local_rank():
            self._empty(expert)
        expert.register_forward_pre_hook(send, prepend=True)
        expert.register_forward_hook(send_back)


class ReduceGradient(ParallelStyle):
    """A layer whose result, or parts of it, all heads share: their gradients are summed over the ranks.

    Args:
        parts: start and end of each part, along the last dimension, in order.
    """

    def __init__(self, *, parts: Any) -> None:
        self.parts = parts

    def _apply(self, module: Any, device_mesh: Any) -> Any:
        def sum_gradients(_module: Any, _args: Any, result: Any) -> Any:
            pieces, end = [], 0
            for start, stop in self.parts:
                whole = DTensor.from_local(result[..., start:stop], device_mesh, [Replicate()], run_check=False)
                pieces += [result[..., end:start], whole.to_local(grad_placements=[Partial()])]
                end = stop
            return torch.cat([*pieces, result[..., end:]], dim=-1)

        module.register_forward_hook(sum_gradients)
        return module


class CopyOutput(ParallelStyle):
    """A layer whose result the model writes into: torch refuses that on the local tensor of a ``DTensor``."""

    def _apply(self, module: Any, device_mesh: Any) -> Any:  # noqa: ARG002
        module.register_forward_hook(lambda _module, _args, result: result.clone())
        return module


class ReplicateParallel(ParallelStyle):
    """A model whose other parameters are whole on each rank: ``DTensor`` to optimizers, tensors to its own forward.

    Torch's ``clip_grad_norm_``, its foreach and fused optimizers and its checkpoints take either kind alone. While a
    module runs, its class's properties give the local tensors. The classes have the names of the modules' own.
    """

    def _apply(self, module: Any, device_mesh: Any) -> Any:
        source = {"src_data_rank": self.src_data_rank} if hasattr(self, "src_data_rank") else {}  # since torch 2.7
        replicated: dict[int, Any] = {}  # id of a parameter -> it, and the distributed one
        running = {"calls": 0}
        readers: dict[Any, dict[str, Any]] = {}
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is None or not self._takes(parameter) or isinstance(part, torch.jit.ScriptModule):
                    continue
                if id(parameter) not in replicated:
                    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                    whole = distribute_tensor(local.detach(), device_mesh, [Replicate()] * device_mesh.ndim, **source)
                    replicated[id(parameter)] = parameter, nn.Parameter(whole, requires_grad=parameter.requires_grad)
                part._parameters[name] = replicated[id(parameter)][1]
                readers.setdefault(part, {})[name] = self._reader(name, running)
        whole_ids = {id(whole) for _, whole in replicated.values()}
        for part in list(module.modules()):
            holds_whole = part is module or not whole_ids.isdisjoint(map(id, part.parameters()))
            if holds_whole and not isinstance(part, torch.jit.ScriptModule):
                part.__class__ = self._class_of(part, readers.get(part, {}), running)
        return module

    def _takes(self, parameter: Any) -> bool:
        """Return True for a parameter that becomes a ``DTensor``."""
        return not isinstance(parameter, DTensor)

    def _reader(self, name: str, running: dict[str, int]) -> Any:
        """Return a property that gives a parameter: as a local tensor in a forward, unless FSDP has not gathered it."""

        def read(module: Any) -> Any:
            value = module._parameters[name]
            is_whole = isinstance(value, DTensor) and value.device_mesh.ndim == 1
            # A checkpoint of the model's own repeats any function of a forward in the backward.
            return value.to_local() if is_whole and (running["calls"] or running_backward() != -1) else value

        return property(read)

    def _refuse_second_derivatives(self, result: Any) -> None:
        """Let a backward with ``create_graph=True`` raise: the collectives of ``DTensor`` are constants to it."""

        def check(gradient: Any) -> Any:
            if torch.is_grad_enabled():
                raise RuntimeError(
                    "create_graph=True: the collectives of a plan have no second derivative; use gradients of first "
                    "order, or train the model without a plan"
                )
            return gradient

        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                tensor.register_hook(check)

    def _class_of(self, module: Any, readers: dict[str, Any], running: dict[str, int]) -> Any:
        """Return a subclass of the module's class that has these properties, and counts the calls that run."""
        kind = type(module)

        def counted(method: str) -> Any:
            @wraps(getattr(kind, method))
            def call(*args: Any, **kwargs: Any) -> Any:
                running["calls"] += 1
                try:
                    result = getattr(kind, method)(*args, **kwargs)
                finally:
                    running["calls"] -= 1
                if not torch.compiler.is_compiling() and not running["calls"] and running_backward() == -1:
                    self._refuse_second_derivatives(result)
                return result

            return call

        if isinstance(module, nn.RNNBase) and readers:  # its forward reads a list of parameters
            names = list(module._flat_weights_names)
            readers["_flat_weights"] = property(
                lambda rnn: [getattr(rnn, name) for name in names], lambda _rnn, _value: None
            )
        # A checkpoint repeats the forward alone.
        methods = {method: counted(method) for method in ("__call__", "forward")}
        return type(kind.__name__, (kind,), {"__module__": kind.__module__, **methods, **readers})


class AverageParallel(ReplicateParallel):
    """A model whose parameters without dimensions, which FSDP cannot shard, are whole on each rank.

    Their gradients are averaged where they are next read, by an optimizer or a norm.

    Args:
        n_dims: number of dimensions of the mesh, of the first ones, over which FSDP averages gradients.
    """

    def __init__(self, *, n_dims: int) -> None:
        self.n_dims = n_dims

    def _takes(self, parameter: Any) -> bool:
        return not parameter.dim()

    def _reader(self, name: str, running: dict[str, int]) -> Any:
        def read(module: Any) -> Any:
            value = module._parameters[name]
            if not running["calls"]:
                return value
            sizes = value.device_mesh.shape[: self.n_dims]
            parts = [Partial()] * self.n_dims + [Replicate()] * (value.device_mesh.ndim - self.n_dims)
            local = value.to_local(grad_placements=parts)
            if local.requires_grad:
                local.register_hook(lambda grad: grad / math.prod(sizes))
            return local

        return property(read)
