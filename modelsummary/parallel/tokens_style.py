"""The tokens of one rank of context parallelism, and the functions that need the tokens of all ranks.

``to_code`` copies its source, so it uses torch alone.
"""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from modelsummary._torch import all_gather_single, all_reduce
from modelsummary.parallel.local_sizes import changed_leaves, replace_forward

__all__ = ["TokensOfRank", "WholeCalls"]


class TokensOfRank(TorchFunctionMode):
    """Takes the cross-entropy of a rank's tokens as its share of the whole one, and lets functions see all tokens.

    The mean over the ranks of what they get is the cross-entropy that one process computes, and so are its gradients.

    Args:
        group: process group of the ranks that share out the sequence.
        positions: numbers of this rank's tokens in the sequence.
        arguments: names of the tensors that the model takes -> the dimension along which a function needs the tokens of
            all ranks; None if none does. Tensors with all tokens are cut to the tokens of this rank.
        calls: FQN of a module -> what its forward calls: name of the function, what happens to it, positions of numbers
            that count tokens among its arguments, and the dimension of the tokens in its result. ``"part"``: it gets
            the tokens of all ranks, and this rank takes its part of the result; ``"whole"``: it takes all of it;
            ``"own"``: the call stays as it is; ``"causal"``: attention is causal instead of taking a mask.
    """

    def __init__(self, group: Any, positions: Any, arguments: Any, calls: Any) -> None:
        super().__init__()
        self.group, self.positions, self.arguments, self.calls = group, positions, arguments, calls
        self.n_ranks = group.size()
        self.running: list[Any] = []
        # Tensor of this rank -> the tensor of all ranks. A checkpoint of an earlier call of the model repeats functions
        # of the tensors that it keeps.
        self.wholes = WeakTensorKeyDictionary()

    @contextmanager
    def of(self, model: Any) -> Any:
        """Return a context in which a model has the tokens of this rank."""
        forwards, attend = [], F.scaled_dot_product_attention
        self.attend = attend
        try:
            for fqn in dict.fromkeys(["", *self.calls]):
                module = model.get_submodule(fqn)
                signature = None if fqn else inspect.signature(module.forward)
                forward = vars(module).get("forward")
                forwards.append((module, forward))
                is_checkpointed = isinstance(forward, partial)  # by the plan: it repeats the forward inside
                if is_checkpointed:
                    module.forward = forward.args[0]
                replace_forward(module, self._around(self.calls.get(fqn, ()), signature))
                if is_checkpointed:
                    module.forward = partial(forward.func, module.forward, **forward.keywords)
            F.scaled_dot_product_attention = self._attend
            with self:
                yield
        finally:
            F.scaled_dot_product_attention = attend
            self.wholes.clear()
            for module, forward in forwards:
                del module.forward
                if forward is not None:
                    module.forward = forward

    def _around(self, calls: Any, signature: Any) -> Any:
        def around(_module: Any, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
            if signature is not None:
                args, kwargs = self._taken(signature, args, kwargs)
            with WholeCalls(self, calls) as mode:
                self.running.append(mode)
                try:
                    return forward(*args, **kwargs)
                finally:
                    self.running.pop()

        return around

    def _taken(self, signature: Any, args: Any, kwargs: Any) -> Any:
        """Return the arguments of the model; gather the tensors of which a function needs the tokens of all ranks.

        Tensors that are passed with the tokens of all ranks are cut: this rank takes its part.
        """
        tensors = {}
        for name, value in signature.bind_partial(*args, **kwargs).arguments.items():
            tensors.update(value if isinstance(value, dict) else {name: value})
        tensors = {name: value for name, value in tensors.items() if isinstance(value, torch.Tensor)}
        if tensors.keys() != self.arguments.keys():
            raise ValueError(
                f"expected the tensors {', '.join(self.arguments)}, with which the plan was made, got "
                f"{', '.join(tensors) or 'none'}; make the plan with the arguments of the training loop"
            )
        order, parts = None, {}
        for name, gathered_dim in self.arguments.items():
            whole = part = tensors[name]
            dim = min(1, whole.dim() - 1) if gathered_dim is None else gathered_dim
            is_whole = dim >= 0 and whole.shape[dim] == len(self.positions) * self.n_ranks
            if is_whole:
                part = parts[id(whole)] = whole.index_select(dim, self.positions)
            if gathered_dim is not None:
                order = self._gathered(self.positions, 0).argsort() if order is None else order
                gathered = self._gathered(part, dim).index_select(dim, order)  # of all ranks, or of none
                self.wholes[part] = whole if is_whole else gathered

        def cut(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: cut(inner) for name, inner in value.items()} if parts else value
            return parts.get(id(value), value)

        return tuple(map(cut, args)), {name: cut(value) for name, value in kwargs.items()}

    def whole_of(self, leaf: Any) -> Any:
        """Return the tensor of all ranks for a tensor of this rank; None for anything else."""
        return self.wholes.get(leaf) if isinstance(leaf, torch.Tensor) else None

    def _gathered(self, chunk: Any, dim: int) -> Any:
        """Return the chunks of all ranks, in the order of the ranks."""
        return all_gather_single(chunk.contiguous(), dim, self.group)

    def _attend(self, query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Attend without a mask that is the causal one: torch's ring takes none."""
        if attn_mask is not None:
            if not self.running or not self.running[-1].is_causal:
                raise ValueError(
                    "expected an attention without a mask, as when the plan was made, got a mask, which torch's ring "
                    "does not take; pass sequences without padding"
                )
            attn_mask, args, kwargs = None, args[:1], {**kwargs, "is_causal": True}
        return self.attend(query, key, value, attn_mask, *args, **kwargs)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__name__", "") != "cross_entropy":
            return function(*args, **kwargs)
        names = "input target weight size_average ignore_index reduce reduction label_smoothing".split()
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        reduction = arguments.get("reduction", "mean")
        if reduction not in ("mean", "sum") or not arguments.get("reduce") is arguments.get("size_average") is None:
            return function(*args, **kwargs)
        arguments = {name: self._in_range(value) for name, value in arguments.items()}
        losses = function(**{**arguments, "reduction": "sum"}) * self.n_ranks
        return losses if reduction == "sum" else losses / self._n_counted(arguments)

    def _in_range(self, value: Any) -> Any:
        """Return a tensor of float16 in float32, as sums over tokens leave its range; anything else as it is."""
        return value.float() if getattr(value, "dtype", None) == torch.float16 else value

    def _n_counted(self, arguments: Any) -> Any:
        """Return over how many tokens of all ranks a mean is taken, or the sum of their weights."""
        target, weight = arguments["target"], arguments.get("weight")
        target = target.to_local() if hasattr(target, "to_local") else target
        if target.is_floating_point():  # probabilities of classes
            counted = target.new_tensor(target.numel() // arguments["input"].shape[min(1, target.dim() - 1)])
        else:
            counts = target != arguments.get("ignore_index", -100)
            counted = counts.sum() if weight is None else (weight[target * counts] * counts).sum()
        return all_reduce(counted.detach(), "sum", self.group)


class WholeCalls(TorchFunctionMode):
    """Lets functions that one call of a module's forward calls see the tokens of all ranks.

    Args:
        tokens: of the rank.
        calls: of the module, as ``TokensOfRank`` takes them.
    """

    def __init__(self, tokens: Any, calls: Any) -> None:
        super().__init__()
        self.tokens = tokens
        self.pending: dict[str, list[Any]] = {}
        for name, *call in reversed(calls):
            self.pending.setdefault(name, []).append(call)
        self.is_causal = self.pending.pop("scaled_dot_product_attention", None) is not None

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, tokens = kwargs or {}, self.tokens
        name = getattr(function, "__name__", "").strip("_")
        if name == "get":  # of a property
            name = getattr(function.__self__, "__name__", "")
        pending = self.pending.get(name)
        if not pending or tokens.running[-1] is not self:  # a module inside has calls of its own
            return function(*args, **kwargs)
        kind, sizes, dim = pending[-1]
        leaves: list[Any] = []
        changed_leaves(leaves.append, (args, kwargs))
        is_whole = any(tokens.whole_of(leaf) is not None for leaf in leaves)
        counts = [leaves[at] for at in sizes if at < len(leaves)]
        if not is_whole and counts != [len(tokens.positions)] * max(1, len(sizes)):
            return function(*args, **kwargs)
        pending.pop()
        if kind == "own":
            return function(*args, **kwargs)
        for at in sizes:
            leaves[at] *= tokens.n_ranks
        pairs = [(leaf, tokens.whole_of(leaf)) for leaf in leaves]
        wholes = iter([leaf if whole is None else whole for leaf, whole in pairs])
        args, kwargs = changed_leaves(lambda _: next(wholes), (args, kwargs))
        whole = function(*args, **kwargs)
        result = whole.index_select(dim, tokens.positions) if kind == "part" else whole
        if not whole.requires_grad:
            tokens.wholes[result] = whole.detach()  # of its own: a result that is whole would keep itself
        return result
