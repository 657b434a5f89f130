"""A forward that runs on the experts of one rank, with the numbers of the whole mixture.

``to_code`` copies the class, so it uses torch alone.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.overrides import TorchFunctionMode

from modelsummary._torch import tree_leaves, tree_map
from modelsummary.parallel.function_names import Families

__all__ = ["ExpertShards"]


class ExpertShards(TorchFunctionMode):
    """A mode in which functions take the chunks of experts that one rank holds.

    The forward sees the shapes and numbers of the whole mixture. A tensor is whole, or of one of three kinds:

    - ``"shard"``: the ranks hold equal chunks of a dimension.
    - ``"rows"``: of the whole shape; what belongs to experts of other ranks has no meaning. If that is all, the tensor
      has a shape alone, on meta, and nothing is computed.
    - ``"sum"``: the ranks' tensors add up to it.

    A function without a rule for what it takes raises ``ExpertShards.Refused``.

    Args:
        rank, ranks: of the group that shares out the experts.
        shards: tensors whose first dimension is shared out.
        protected: tensors into which only whole tensors may be written.
        strict: refuse functions that hide what they call.
        alone: all tokens go to the experts of this rank, which therefore has the whole sum, and all rows count. By
            default all ranks take the same tokens, and the first one adds what is added once.
    """

    class Refused(NotImplementedError):
        """The function cannot take a part of the experts."""

    class LocalPart:
        """What a tensor is on one rank.

        Args:
            kind: ``"shard"``, ``"rows"`` or ``"sum"``.
            dim: dimension of a shard.
            mask: of the rows that count, of the shape of the tensor; True: all, None: none.
        """

        def __init__(self, kind: str, dim: int = 0, mask: Any = True) -> None:
            self.kind, self.dim, self.mask = kind, dim, mask

    FACTS = frozenset(
        """
        shape size dim ndim ndimension numel nelement len dtype device is_cuda is_cpu is_mps is_meta is_sparse
        is_quantized is_floating_point is_complex is_leaf is_nested is_inference requires_grad layout is_contiguous
        element_size itemsize nbytes grad_fn get_device stride storage_offset names untyped_storage retain_grad grad
        register_hook
        """.split()
    )
    READS = frozenset("__bool__ __float__ __int__ __long__ __index__ __complex__ __contains__ __array__".split())
    SCALES = frozenset("mul imul rmul multiply div truediv itruediv idiv true_divide divide".split())
    LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    SHAPED_LIKE = frozenset("to type_as view_as reshape_as expand_as".split())
    WRITES = frozenset("setitem copy index_add scatter_add index_put index_copy".split())

    def __init__(
        self,
        rank: int,
        ranks: int,
        shards: list[Any],
        protected: list[Any] | None = None,
        *,
        strict: bool = False,
        alone: bool = False,
    ) -> None:
        super().__init__()
        self.rank, self.ranks = rank, ranks
        self.alone, self.adds = alone, alone or rank == 0  # this rank adds to a sum what is added to it once
        self.device = shards[0].device
        self.skips = False  # an expert of another rank, or what the first rank adds, was left out
        self.sums: dict[int, Any] = {}  # id of memory into which sums were written -> the memory
        self.masks: dict[Any, Any] = {}
        self.sorted: set[int] = set()  # ids of the memory of masks of rows that are sorted by their expert
        self.protected = {self._memory(tensor): tensor for tensor in (*shards, *(protected or ()))}
        self.seen = {id(tensor): tensor for tensor in (*shards, *(protected or ()))} if strict else None
        for shard in shards:
            shard._experts = self.LocalPart("shard")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = self._tensors((args, kwargs))
        if self.seen is not None:
            self._check_seen(func, tensors)
        if any(self._part(tensor) is not None for tensor in tensors):
            result = self._run(func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        if self.seen is not None:
            self.seen.update({id(tensor): tensor for tensor in self._tensors(result)})
        return result

    # ---------------------------------------------------------------------------------------------- kinds

    @staticmethod
    def _tensors(value: Any) -> list[Any]:
        return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]

    @staticmethod
    def _memory(tensor: Any) -> int:
        return int(tensor.untyped_storage()._cdata)

    def _check_seen(self, func: Any, tensors: list[Any]) -> None:
        """Refuse what was made by code that the mode does not see: it may be made of experts."""
        assert self.seen is not None
        for tensor in tensors:
            if tensor.grad_fn is not None and (
                id(tensor) not in self.seen or isinstance(tensor.grad_fn, torch.autograd.function.BackwardCFunction)
            ):
                raise self.Refused(
                    f"{self._name(func)[0]}() takes a tensor that a compiled or custom function made; functions of "
                    "torch can be followed"
                )

    def _part(self, tensor: Any) -> Any:
        """Return what a tensor is on this rank; None: whole."""
        if self.sums and self._memory(tensor) in self.sums:
            return self.LocalPart("sum")
        return getattr(tensor, "_experts", None)

    def _marked(self, result: Any, kind: str, dim: int = 0, mask: Any = True) -> Any:
        for tensor in self._tensors(result):
            tensor._experts = self.LocalPart(kind, dim, mask)
        return result

    def shape(self, tensor: Any) -> torch.Size:
        """Return the shape that a tensor has in the whole mixture."""
        part, shape = self._part(tensor), list(tensor.shape)
        if part is not None and part.kind == "shard":
            shape[part.dim] *= self.ranks
        return torch.Size(shape)

    def _like(self, tensor: Any) -> Any:
        """Return a whole tensor of the same shape, dtype and device without memory of its own."""
        return torch.zeros((), dtype=tensor.dtype, device=self.device).expand(self.shape(tensor))

    def _chunk(self, name: str, tensor: Any, dim: int, n_experts: int) -> Any:
        """Return what of a whole tensor goes with the experts of this rank: a chunk, or what all experts share."""
        if tensor.shape[dim] == n_experts:
            size = n_experts // self.ranks
            return tensor.narrow(dim, self.rank * size, size)
        if tensor.shape[dim] != 1:
            raise self.Refused(f"{name}() spreads one expert over several; as many elements as experts work")
        return tensor

    def sum_of(self, tensor: Any) -> Any:
        """Return the tensor that this rank adds to the sum over the ranks."""
        part = self._part(tensor)
        if part is None:
            self.skips = self.skips or not self.adds
            return tensor if self.adds else torch.zeros_like(tensor)
        if part.kind == "shard":
            size, shape = tensor.shape[part.dim], list(tensor.shape)
            lengths = (self.rank * size, (self.ranks - self.rank - 1) * size)
            zeros = [tensor.new_zeros([*shape[: part.dim], length, *shape[part.dim + 1 :]]) for length in lengths]
            return torch.cat([zeros[0], tensor, zeros[1]], part.dim)
        if part.kind == "sum" or part.mask is True:
            return tensor
        return self._like(tensor) if part.mask is None else tensor.masked_fill(~part.mask, 0)

    def _begin_sum(self, target: Any) -> None:
        """Let a whole tensor, into which a part is written, be the sum over the ranks."""
        base = target if target._base is None else target._base
        if self._memory(target) in self.protected:
            raise self.Refused("results of experts are written into an argument or buffer; a new tensor works")
        if base.numel() * base.element_size() != base.untyped_storage().nbytes():
            raise self.Refused(
                "results of experts are written into a part of another tensor; a tensor of its own works"
            )
        if not self.adds:
            self.skips = True
            base.zero_()
        self.sums[self._memory(target)] = target.untyped_storage()

    # ---------------------------------------------------------------------------------------------- rules

    def _name(self, func: Any) -> tuple[str, bool]:
        """Return the name of a function, and whether it writes into its first argument."""
        raw = getattr(func, "__name__", str(func)).split(".")[0]
        if raw == "__get__":
            return func.__self__.__name__, False
        writes = raw.endswith("_") and (
            not raw.endswith("__") or raw in ("__iadd__", "__isub__", "__imul__", "__itruediv__")
        )
        return ("item" if raw in self.READS else raw.strip("_")), writes

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        name, writes = self._name(func)
        if kwargs.get("out") is not None:
            raise self.Refused(f"{name}(out=...) writes parts of experts; a function that returns its result works")
        func, args, kwargs = self._by_position(func, args, kwargs)
        if name in self.SHAPED_LIKE:
            args = (args[0], *(self._like(argument) if self._is_part(argument) else argument for argument in args[1:]))
            if not self._is_part(args[0]):
                return func(*args, **kwargs)
        if name.startswith("new_") or name.endswith("_like"):
            return func(*tree_map(lambda leaf: self._like(leaf) if self._is_part(leaf) else leaf, args), **kwargs)
        is_pair = name in ("max", "min") and len(args) > 1 and isinstance(args[1], torch.Tensor)
        rules = (
            (self.FACTS, self._fact),
            (self.WRITES, self._write),
            (Families.GROUPED, self._grouped),
            (Families.JOINS, self._joined),
            (set() if is_pair else Families.REDUCES | Families.ALONG, self._along),
            (Families.PRODUCTS | {"rmatmul"}, self._product),
            (Families.VIEWS, self._taken),
            (Families.ELEMENTWISE | {"max", "min"}, self._elementwise),
        )
        for names, rule in rules:
            if name in names:
                is_begun = writes and name in Families.ELEMENTWISE and not self._is_part(args[0])
                return (self._added if is_begun else rule)(func, name, args, kwargs)
        what = "reads values of" if name in ("item", "tolist", "numpy") else "takes"
        raise self.Refused(f"{name}() {what} a part of the experts; elementwise functions, views and products work")

    @staticmethod
    def _by_position(func: Any, args: Any, kwargs: Any) -> Any:
        """Return a call with its tensors by position, and the dimension under one name."""
        names = {"axis": "dim", "keepdims": "keepdim"}
        kwargs = {names.get(name, name): value for name, value in kwargs.items()}
        orders = {torch.where: ("condition", "input", "other"), torch.Tensor.where: ("input", "condition", "other")}
        for position, name in enumerate(orders.get(func, ("input", "other"))):
            if len(args) == position and name in kwargs:
                args = (*args, kwargs.pop(name))
        if func is torch.Tensor.where:
            func, args = torch.where, (args[1], args[0], args[2])
        return func, args, kwargs

    def _is_part(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and self._part(value) is not None

    def _fact(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        part = self._part(args[0])
        is_size = part.kind == "shard" and name in ("shape", "size", "numel", "nelement", "len")
        tensor = self._like(args[0]) if is_size or part.mask is None else args[0]
        return func(tensor, *args[1:], **kwargs)

    def _absent(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Return the shapes of a result for experts of other ranks."""
        if "dropout" in name:  # so that all ranks draw the same random numbers afterwards
            func(torch.zeros(args[0].shape, dtype=args[0].dtype, device=self.device), *args[1:], **kwargs)

        def on_meta(value: Any) -> Any:
            is_tensor = isinstance(value, torch.Tensor)
            return torch.empty_like(value, device="meta", requires_grad=False) if is_tensor else value

        with torch.no_grad():
            result = func(*tree_map(on_meta, args), **tree_map(on_meta, kwargs))
        return self._marked(result, "rows", mask=None)

    def _kinds(self, name: str, tensors: list[Any]) -> set[str]:
        kinds = {part.kind for tensor in tensors if (part := self._part(tensor)) is not None}
        if "shard" in kinds and len(kinds) > 1:
            raise self.Refused(f"{name}() takes chunks of experts and rows of tokens; one kind works")
        return kinds

    def _common_mask(self, name: str, masks: list[Any]) -> Any:
        """Return the mask of a result from the masks of what it is made of, which must be the same."""
        expanded = iter(torch.broadcast_tensors(*(mask for mask in masks if isinstance(mask, torch.Tensor))))
        first, *others = [next(expanded) if isinstance(mask, torch.Tensor) else mask for mask in masks]
        for mask in others:
            if mask is first:
                continue
            if not (isinstance(mask, torch.Tensor) and isinstance(first, torch.Tensor)):
                raise self.Refused(f"{name}() takes results of different experts; results of the same experts work")
            is_view = self._memory(mask) == self._memory(first) and mask.storage_offset() == first.storage_offset()
            strides = [
                [step for step, size in zip(tensor.stride(), tensor.shape, strict=False) if size > 1]
                for tensor in (mask, first)
            ]
            if is_view and strides[0] == strides[1]:
                continue
            if self._is_shape(mask):  # rows sorted by their expert: a product of groups, and numbers of experts
                is_equal = (self._memory(mask) in self.sorted) != (self._memory(first) in self.sorted)
            else:
                is_equal = torch.equal(mask, first)
            if not is_equal:
                raise self.Refused(f"{name}() takes results of different experts; results of the same experts work")
        return first

    @staticmethod
    def _mask_along(mask: Any, term: str, labels: str) -> Any:
        """Return a mask with other dimensions, of which each has a label; dimensions that it lacks have one element."""
        if not isinstance(mask, torch.Tensor):
            return mask
        mask = mask[tuple(slice(None) if label in labels else 0 for label in term)]
        left = [label for label in term if label in labels]
        mask = mask.permute([left.index(label) for label in labels if label in left])
        return mask[tuple(slice(None) if label in left else None for label in labels)]

    # --------------------------------------------------------------------------------- functions of dimensions

    def _combined(
        self, name: str, call: Any, operands: Any, terms: Any, result_labels: str, *, sums: bool = False
    ) -> Any:
        """Call a function on the chunks or rows of this rank.

        Args:
            call: of the operands.
            terms: a label for each dimension of each operand.
            result_labels: of the result; ``?``: of a dimension along which the function works, if it keeps it.
            sums: it sums over the labels that the result lacks.
        """
        parts = {position: part for position, operand in enumerate(operands) if (part := self._part(operand))}
        along = f"{name}() works along the experts, or tokens of several experts; other dimensions work"
        if "shard" in self._kinds(name, operands):
            labels = {terms[position][part.dim] for position, part in parts.items()}
            if len(labels) > 1:
                raise self.Refused(f"{name}() takes experts along different dimensions; the same dimension works")
            (label,) = labels
            if label not in result_labels and not sums:
                raise self.Refused(along)
            whole = next(self.shape(operands[position])[part.dim] for position, part in parts.items())
            local = [
                operand
                if position in parts or label not in term
                else self._chunk(name, operand, term.index(label), whole)
                for position, (operand, term) in enumerate(zip(operands, terms, strict=True))
            ]
            result = call(*local)
            if label not in result_labels:
                return self._marked(result, "sum")
            return self._marked(result, "shard", self._labels_of(result, result_labels).index(label))
        masks = {position: part.mask for position, part in parts.items()}
        summed = {
            label
            for position, mask in masks.items()
            for dim, label in enumerate(terms[position] if isinstance(mask, torch.Tensor) else "")
            if label not in result_labels and mask.shape[dim] > 1 and mask.stride(dim)
        }
        if summed and not sums:
            raise self.Refused(along)
        kept = result_labels.replace("?", "") + "".join(sorted(summed))
        mask = self._common_mask(name, [self._mask_along(mask, terms[at], kept) for at, mask in masks.items()])
        if mask is None:
            return self._absent(call, name, operands, {})
        if summed:
            return self._marked(
                call(*(self.sum_of(operand) if at in parts else operand for at, operand in enumerate(operands))), "sum"
            )
        result = call(*operands)
        mask = self._mask_along(mask, kept, self._labels_of(result, result_labels))
        for tensor in self._tensors(result):
            self._marked(tensor, "rows", mask=mask if mask is True else mask.expand(tensor.shape))
        return result

    def _labels_of(self, result: Any, result_labels: str) -> str:
        return result_labels if self._tensors(result)[0].dim() == len(result_labels) else result_labels.replace("?", "")

    def _elementwise(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        operands = self._tensors((args, kwargs))
        kinds = self._kinds(name, operands)
        if "sum" in kinds:
            return self._linear(func, name, args, kwargs)
        result = self.LETTERS[: max(operand.dim() for operand in operands)]
        terms = [result[len(result) - operand.dim() :] for operand in operands]
        try:
            return self._combined(name, self._of_tensors(func, args, kwargs), operands, terms, result)
        except self.Refused:
            if name not in Families.TERMS or "shard" in kinds:
                raise
        return self._linear(func, name, args, kwargs)

    @staticmethod
    def _of_tensors(func: Any, args: Any, kwargs: Any) -> Any:
        """Return a call as a function of the tensors that it takes."""

        def call(*tensors: Any) -> Any:
            left = iter(tensors)
            replaced = tree_map(lambda leaf: next(left) if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs))
            return func(*replaced[0], **replaced[1])

        return call

    def _linear(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Call a function that is linear in sums over the ranks."""
        sums = [tensor for tensor in self._tensors((args, kwargs)) if self._is_part(tensor)]
        if self._name(func)[1] and self._part(args[0]).kind != "sum":
            raise self.Refused(f"{name}() adds a sum over the ranks to results of single experts; a new tensor works")
        if name in Families.TERMS or name == "where":
            terms = args[1:] if name == "where" else args

            def share(value: Any) -> Any:
                if isinstance(value, torch.Tensor):
                    return self.sum_of(value)
                return value if self.adds else type(value)(0)

            if name == "where" and self._is_part(args[0]):
                raise self.Refused("where() chooses by a sum over the ranks; a whole condition works")
            result = func(*args[: len(args) - len(terms)], *map(share, terms), **kwargs)
        else:
            first = sums[0] is args[0]
            fits = name in Families.LINEAR or name in ("mul", "multiply", "rmul") or (first and name in self.SCALES)
            fits = fits and not kwargs.get("rounding_mode")
            if name == "dropout":
                p = self._argument(args, kwargs, 1, "p", 0.5)
                fits = fits or not (p and self._argument(args, kwargs, 2, "training", True))
            fits = fits or (first and name == "masked_fill" and self._argument(args, kwargs, 2, "value") == 0)
            if not fits or len(sums) > 1:
                raise self.Refused(f"{name}() takes a sum over the ranks; functions that are linear in it work")
            result = func(*args, **kwargs)
            if not result.is_floating_point():
                raise self.Refused(f"{name}() makes integers of a sum over the ranks; floating point numbers work")
        return self._marked(result, "sum")

    @staticmethod
    def _argument(args: Any, kwargs: Any, position: int, name: str, default: Any = None) -> Any:
        return args[position] if len(args) > position else kwargs.get(name, default)

    def _added(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Write a part into a whole tensor, by adding it."""
        if name not in Families.TERMS:
            raise self.Refused(f"{name}() writes a part of the experts into a whole tensor; adding results works")
        self._begin_sum(args[0])
        return self._linear(func, name, args, kwargs)

    def _write(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Follow functions that write into a tensor, such as ``target[...] = value``, or add rows to it."""
        target, writes = args[0], name == "setitem" or self._name(func)[1]
        position = {"copy": 1, "setitem": 2, "index_put": 2}.get(name, 3)
        keyword = next((keyword for keyword in ("source", "src", "values", "tensor") if keyword in kwargs), position)
        arguments: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        value = arguments.pop(keyword)
        part = self._part(target)
        if any(map(self._is_part, self._tensors([*arguments.values()][1:]))):
            raise self.Refused(f"{name}() writes at places that differ between ranks; places that are whole work")
        if part is not None and part.kind == "rows" and not self._is_part(value) and part.mask is not None and writes:
            return func(*args, **kwargs)
        if part is not None and part.kind != "sum":
            raise self.Refused(f"{name}() writes into a part of the experts; writing into a new tensor works")
        if writes and part is None:
            self._begin_sum(target)
        arguments[0] = target if writes else self.sum_of(target)
        arguments[keyword] = self.sum_of(value) if isinstance(value, torch.Tensor) else value if self.adds else 0
        args = tuple(arguments[index] for index in range(len(args)))
        result = func(*args, **{key: arguments[key] for key in kwargs})
        return result if writes else self._marked(result, "sum")

    # ----------------------------------------------------------------------------------------------- views

    def _moved(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Call a function that moves elements on rows, and on their masks alike."""
        masks = {self._part(tensor).mask for tensor in self._tensors((args, kwargs)) if self._is_part(tensor)}
        if masks == {None} and name != "getitem":
            return self._absent(func, name, args, kwargs)

        def present(value: Any) -> Any:
            return self._like(value) if self._is_part(value) and self._part(value).mask is None else value

        def mask_of(value: Any) -> Any:
            if not self._is_part(value):
                return value
            mask = self._part(value).mask
            is_mask = isinstance(mask, torch.Tensor)
            return mask if is_mask else torch.full((), mask is True, device=self.device).expand(value.shape)

        result = func(*tree_map(present, args), **tree_map(present, kwargs))
        if masks == {None}:  # a mask among the indices says the size by its values
            return self._marked(torch.empty_like(result, device="meta"), "rows", mask=None)
        if masks == {True}:
            return self._marked(result, "rows")
        moved = func(*tree_map(mask_of, args), **tree_map(mask_of, kwargs))
        for tensor, mask in zip(self._tensors(result), self._tensors(moved), strict=False):
            tensor._experts = self.LocalPart("rows", mask=mask)
        return result

    def _taken(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Follow functions that move or take elements of one tensor."""
        tensor, *others = args
        part = self._part(tensor)
        if part is None or any(map(self._is_part, self._tensors((others, kwargs)))):
            raise self.Refused(f"{name}() takes sizes or numbers that differ between ranks; whole ones work")
        if any(isinstance(argument, torch.dtype) for argument in (*others, *kwargs.values())):
            raise self.Refused(f"{name}() reads the memory of a part of the experts as another dtype; to() works")
        if part.kind == "sum":
            return self._marked(func(*args, **kwargs), "sum")
        if part.kind == "rows":
            return self._moved(func, name, args, kwargs)
        if name == "getitem":
            return self._items_of_shard(tensor, part.dim, others[0])
        if name in Families.LOOKUPS:
            return self._selected(name, tensor, part.dim, args, kwargs)
        return self._view_of_shard(func, name, tensor, part.dim, others, kwargs)

    def _view_of_shard(self, func: Any, name: str, tensor: Any, dim: int, others: Any, kwargs: Any) -> Any:
        whole = self.shape(tensor)
        if name in Families.MOVES:
            result = (
                self._squeezed(tensor, dim, others, kwargs) if name == "squeeze" else func(tensor, *others, **kwargs)
            )
            return self._marked(result, "shard", self.moved(lambda probe: func(probe, *others, **kwargs), whole, dim))
        if name in Families.RESHAPES | Families.EXPANDS:
            after = list(func(torch.empty(whole, device="meta"), *others, **kwargs).shape)
            if name in Families.EXPANDS:
                axis = dim + len(after) - len(whole)
                after[axis] //= self.ranks
                return self._marked(tensor.expand(after), "shard", axis)
            lead, passed = math.prod(whole[:dim]), 1
            for axis, size in enumerate(after):
                if passed == lead and size > 1 and size % self.ranks == 0:
                    after[axis] = size // self.ranks
                    return self._marked(tensor.reshape(after), "shard", axis)
                passed *= size
            raise self.Refused(f"{name}() cuts across the experts; a view that keeps experts apart works")
        if name in ("repeat", "tile"):
            raise self.Refused(f"{name}() repeats experts; expand() along another dimension works")
        taken = self.dims_of(name, (None, *others), kwargs, len(whole))
        if dim not in taken:
            result = func(tensor, *others, **kwargs)
            return self._marked(result, "shard", dim - (name in ("unbind", "select") and taken.pop() < dim))
        if name == "unbind":
            return tuple(self._expert(tensor, dim, index) for index in range(whole[dim]))
        if name == "select":
            return self._expert(tensor, dim, int(self._argument((None, *others), kwargs, 2, "index")))
        raise self.Refused(f"{name}() works along the experts; taking experts by their number works")

    @staticmethod
    def moved(func: Any, shape: Any, moving_dim: int) -> int:
        """Return where a function of one tensor moves a dimension: sizes that differ show it.

        >>> ExpertShards.moved(lambda tensor: tensor.permute(2, 0, 1), (4, 1, 3), 0)
        1
        """
        sizes = [2 + dim if size > 1 or dim == moving_dim else 1 for dim, size in enumerate(shape)]
        return list(func(torch.empty(sizes, device="meta")).shape).index(2 + moving_dim)

    @staticmethod
    def _squeezed(tensor: Any, dim: int, others: Any, kwargs: Any) -> Any:
        """Remove dimensions of one element, but not the experts: a rank may have one."""
        named = others[0] if others else kwargs.get("dim", tuple(range(tensor.dim())))
        dims = {axis % tensor.dim() for axis in (named if isinstance(named, (tuple, list)) else (named,))} - {dim}
        return tensor.squeeze(tuple(dims)) if dims else tensor.view(tensor.shape)

    def _expert(self, tensor: Any, dim: int, index: int) -> Any:
        """Return one expert: its chunk on the rank that holds it, and its shape elsewhere."""
        local, whole = tensor.shape[dim], self.shape(tensor)[dim]
        if not -whole <= index < whole:
            raise IndexError(f"expert {index} of {whole}")
        index = index % whole - self.rank * local
        if 0 <= index < local:
            return self._marked(tensor.select(dim, index), "rows")
        self.skips = True
        shape = [size for axis, size in enumerate(tensor.shape) if axis != dim]
        return self._marked(torch.empty(shape, dtype=tensor.dtype, device="meta"), "rows", mask=None)

    # --------------------------------------------------------------------------------------------- indexing

    def _items_of_shard(self, tensor: Any, dim: int, index: Any) -> Any:
        items = list(index) if isinstance(index, tuple) else [index]
        items = [torch.tensor(item, device=self.device) if isinstance(item, list) else item for item in items]
        lookups = [item for item in items if isinstance(item, torch.Tensor)]
        if any(lookup.dtype in (torch.bool, torch.uint8) for lookup in lookups):
            raise self.Refused("getitem() takes experts by a mask; numbers of experts work")
        n_left = tensor.dim() - sum(item is not None and item is not Ellipsis for item in items)
        dots = next((position for position, item in enumerate(items) if item is Ellipsis), len(items))
        items[dots : dots + 1] = [slice(None)] * n_left
        positions = [position for position, item in enumerate(items) if item is not None]
        at, whole = positions[dim], self.shape(tensor)[dim]
        item = items[at]
        if isinstance(item, torch.Tensor) and item.dim() == 0 and not self._is_shape(item):
            item = int(item)
        if isinstance(item, int):
            expert = self._expert(tensor, dim, item)
            rest = tuple(items[:at] + items[at + 1 :])
            return self._moved(torch.Tensor.__getitem__, "getitem", (expert, rest), {}) if rest else expert
        if isinstance(item, torch.Tensor):
            return self._by_numbers(tensor, dim, items, at)
        if item.indices(whole) != (0, whole, 1) or lookups:
            raise self.Refused("getitem() takes some of the experts; taking experts by their number works")
        items[at] = slice(None)
        return self._marked(tensor[tuple(items)], "shard", sum(not isinstance(item, int) for item in items[:at]))

    @staticmethod
    def _is_shape(tensor: Any) -> bool:
        return tensor.is_meta or type(tensor).__name__ == "FakeTensor"

    def _by_numbers(self, tensor: Any, dim: int, items: list[Any], at: int) -> Any:
        """Return what a tensor of numbers takes of the experts: rows, of which this rank has its own."""
        numbers, local, whole = items[at], tensor.shape[dim], self.shape(tensor)[dim]
        begin = self.rank * local
        if self.alone:
            items[at] = (numbers - begin) % whole  # numbers may count from the end
            return self._marked(tensor[tuple(items)], "rows")
        shifted = numbers.where(numbers >= 0, numbers + whole) - begin
        result = tensor[
            tuple(shifted.clamp(0, local - 1) if position == at else item for position, item in enumerate(items))
        ]
        region = (self._memory(numbers), numbers.storage_offset(), numbers.shape, numbers.stride())
        key = (*region, numbers._version, begin, local)
        if key not in self.masks:
            self.masks[key] = (numbers, (shifted >= 0) & (shifted < local))  # the memory of the numbers is kept
        mask = self.masks[key][1]
        if sum(isinstance(item, torch.Tensor) for item in items) == 1:
            after = sum(not isinstance(item, int) for item in items[at + 1 :])
            mask = mask.view(*mask.shape, *[1] * after)
        else:  # the lookups of several tensors are one
            kept = [item for item in items if item is not None]
            shape = [
                size if isinstance(item, (int, torch.Tensor)) else 1
                for item, size in zip(kept, self.shape(tensor), strict=False)
            ]
            experts = torch.arange(whole, device=numbers.device).view(
                [-1 if axis == dim else 1 for axis in range(tensor.dim())]
            )
            lookup = tuple(slice(None) if isinstance(item, slice) else item for item in items)
            taken = experts.expand(shape)[lookup]
            mask = (taken >= begin) & (taken < begin + local)
        return self._marked(result, "rows", mask=mask.expand(result.shape))

    def _selected(self, name: str, tensor: Any, dim: int, args: Any, kwargs: Any) -> Any:
        """Follow functions that take elements by a tensor of numbers along one dimension."""
        if name == "take_along_dim":
            index, axis = self._argument(args, kwargs, 1, "indices"), self._argument(args, kwargs, 2, "dim")
        else:
            axis, index = self._argument(args, kwargs, 1, "dim"), self._argument(args, kwargs, 2, "index")
        if axis is None or axis % tensor.dim() != dim:
            raise self.Refused(f"{name}() takes elements of all experts by numbers; slices and integers work")
        if name == "index_select":
            items = [slice(None)] * tensor.dim()
            items[dim] = index
            return self._by_numbers(tensor, dim, items, dim)
        local = tensor.shape[dim]
        shifted = index - self.rank * local
        if self.alone:
            return self._marked(tensor.take_along_dim(shifted, dim), "rows")
        result = tensor.take_along_dim(shifted.clamp(0, local - 1), dim)
        return self._marked(result, "rows", mask=((shifted >= 0) & (shifted < local)).expand(result.shape))

    # ------------------------------------------------------------------------------ reductions and products

    def _along(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Follow functions that work along dimensions."""
        tensor = args[0]
        part = self._part(tensor)
        if part is None or sum(map(self._is_part, self._tensors((args, kwargs)))) > 1:
            raise self.Refused(f"{name}() takes several parts of the experts; whole weights work")
        if part.kind == "sum":
            if name not in ("sum", "mean"):
                raise self.Refused(f"{name}() takes a sum over the ranks; functions that are linear in it work")
            return self._marked(func(*args, **kwargs), "sum")
        dims = self.dims_of(name, args, kwargs, tensor.dim())
        operands, letters = self._tensors((args, kwargs)), self.LETTERS[: tensor.dim()]
        terms = [letters if operand is tensor else "" for operand in operands]
        result_labels = "".join("?" if dim in dims else label for dim, label in enumerate(letters))
        call, sums = self._of_tensors(func, args, kwargs), name in ("sum", "mean")
        result = self._combined(name, call, operands, terms, result_labels, sums=sums)
        if name == "mean" and part.kind == "shard" and part.dim in dims:
            return self._marked(result / self.ranks, "sum")
        return result

    @staticmethod
    def dims_of(name: str, args: Any, kwargs: Any, ndim: int) -> set[int]:
        """Return the dimensions along which a function of ``ALONG``, ``REDUCES`` or ``TAKES`` works, counted from 0.

        >>> ExpertShards.dims_of("topk", ("scores", 2), {}, 3)
        {2}
        """
        if name in ("layer_norm", "rms_norm"):
            return set(range(ndim - len(args[1] if len(args) > 1 else kwargs["normalized_shape"]), ndim))
        second = "topk norm normalize chunk split split_with_sizes tensor_split repeat_interleave roll".split()
        has_first = name in Families.TAKES and name not in ("flip", "roll", "repeat_interleave")
        default = {"topk": -1, "sort": -1, "argsort": -1, "glu": -1, "normalize": 1}.get(name, 0 if has_first else None)
        named = next((kwargs[word] for word in ("dim", "axis", "dims") if word in kwargs), default)
        position = 2 if name in second else 1
        along = args[position] if len(args) > position else named
        if name == "flip" and isinstance(along, int):
            along = args[1:]
        if isinstance(along, bool):  # sort(True), var(False)
            along = default
        if along is None or along == ():
            return set(range(ndim))
        return {axis % ndim for axis in (along if isinstance(along, (tuple, list)) else (along,))}

    def _product(self, _func: Any, name: str, args: Any, kwargs: Any) -> Any:
        operands, terms, result, call, bias = self._written_out(name, args, kwargs)
        kinds = self._kinds(name, operands)
        if not kinds:
            product = call(*operands)
        elif "sum" not in kinds:
            product = self._combined(name, call, operands, terms, result, sums=True)
        elif sum(map(self._is_part, operands)) > 1:
            raise self.Refused(f"{name}() multiplies sums over the ranks; one sum works")
        else:
            product = self._marked(call(*operands), "sum")
        if bias is None:
            return product
        return (
            self._elementwise(torch.add, "add", (product, bias), {})
            if self._is_part(product) or self._is_part(bias)
            else product + bias
        )

    def _written_out(self, name: str, args: Any, kwargs: Any) -> Any:
        """Return operands, a label for each dimension of each, labels of the result, the product, and what is added."""
        added: Any = None
        if name == "einsum":
            equation, *operands = args
            operands = list(operands[0]) if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
            if not isinstance(equation, str):
                raise self.Refused("einsum() without an equation as a text; a text works")
        elif name in ("addmm", "baddbmm"):
            equation, (added, *operands) = "", args
            if kwargs.get("beta", 1) != 1 or kwargs.get("alpha", 1) != 1:
                raise self.Refused(f"{name}() with beta or alpha; 1 works")
        else:
            second = "weight" if name == "linear" else "mat2"
            equation, operands = "", [args[0], self._argument(args, kwargs, 1, second)]
            added = self._argument(args, kwargs, 2, "bias")
        if name == "rmatmul":
            operands.reverse()
        terms, result = self.labels(name, [operand.dim() for operand in operands], equation)
        if any(len(set(term)) < len(term) for term in terms):
            raise self.Refused("einsum() takes a diagonal; each label once in a term works")
        if name != "einsum":
            product = torch.nn.functional.linear if name == "linear" else torch.matmul
            return operands, terms, result, product, added
        written = f"{','.join(terms)}->{result}"
        return operands, terms, result, lambda *factors: torch.einsum(written, *factors), None

    @staticmethod
    def labels(name: str, ndims: list[int], equation: str = "") -> Any:
        """Return a label for each dimension of the factors of a product, and the labels of its result.

        Args:
            name: ``"einsum"``, ``"linear"``, or anything else for a product of matrices.
            ndims: of the factors.

        >>> ExpertShards.labels("einsum", [4, 3], "... i d, ... j d -> ... i j")
        (['abid', 'bjd'], 'abij')
        """
        letters = ExpertShards.LETTERS
        if name == "einsum":
            written, arrow, result = equation.replace(" ", "").partition("->")
            terms = written.split(",")
            sizes = [ndim - len(term) + 3 if "..." in term else 0 for term, ndim in zip(terms, ndims, strict=False)]
            dots = "".join(letter for letter in letters if letter not in equation)[: max(sizes)]
            if not arrow:
                once = sorted(label for label in set(written) - set(",.") if written.count(label) == 1)
                result = "".join(["..." if dots else "", *once])
            terms = [term.replace("...", dots[len(dots) - size :]) for term, size in zip(terms, sizes, strict=False)]
            return terms, result.replace("...", dots)
        if name == "linear":
            first = letters[: ndims[0]]
            second = "Z" * (ndims[1] - 1) + first[-1]
            return [first, second], first[:-1] + second[:-1]
        batch = letters[: max(*ndims, 2) - 2]
        leads = [batch[len(batch) - ndim + 2 :] if ndim > 2 else "" for ndim in ndims]
        result = batch + "Y" * (ndims[0] > 1) + "Z" * (ndims[1] > 1)
        return [leads[0] + "YX"[-min(ndims[0], 2) :], leads[1] + "XZ"[: min(ndims[1], 2)]], result

    def _grouped(self, func: Any, _name: str, args: Any, kwargs: Any) -> Any:
        """Follow ``grouped_mm`` of rows that are sorted by their expert."""
        x, weight = args[:2]
        ends = self._argument(args, kwargs, 2, "offs")
        others = [argument for key, argument in kwargs.items() if key != "offs"]
        part = self._part(weight)
        is_sorted = part is not None and part.kind == "shard" and part.dim == 0 and x.dim() == 2 and weight.dim() == 3
        if (
            ends is None
            or not is_sorted
            or self._is_part(ends)
            or any(argument is not None for argument in (*args[3:], *others))
        ):
            raise self.Refused(
                "grouped_mm() takes other groups than one for each expert; rows that are sorted by experts work"
            )
        local = weight.shape[0]
        begin = self.rank * local
        if self.alone:  # the first rows are for its experts
            return self._marked(func(x, weight, offs=ends[begin : begin + local]), "rows")
        key = (id(ends), ends._version)
        if key not in self.masks:
            start = ends[begin - 1] if begin else torch.zeros_like(ends[0])
            row = torch.arange(x.shape[0], device=x.device if self._part(x) is None else self.device)
            inside = (row >= start) & (row < ends[begin + local - 1])
            n_rows = max(x.shape[0], 1)
            self.masks[key] = (
                ends,
                inside,
                (row + start) % n_rows,
                (row - start) % n_rows,
                ends[begin : begin + local] - start,
            )
            self.sorted.add(self._memory(inside))
        _, inside, order, inverse, group_ends = self.masks[key]
        if self._is_part(x):
            if self._part(x).kind != "rows" or self._part(x).mask is None:
                raise self.Refused("grouped_mm() takes a part of the experts; rows that are sorted by experts work")
            self._common_mask("grouped_mm", [self._part(x).mask, inside[:, None].expand(x.shape)])
        # Rows of other ranks go last, where no group ends. Neither their results nor their gradients are written.
        first = x.masked_fill(~inside[:, None], 0)[order]
        result = func(first, weight, offs=group_ends.to(ends.dtype))[inverse].masked_fill(~inside[:, None], 0)
        return self._marked(result, "rows", mask=inside[:, None].expand(result.shape))

    def _joined(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        tensors = list(args[0] if args else kwargs["tensors"])
        others, kinds = args[1:], self._kinds(name, tensors)
        kwargs = {key: value for key, value in kwargs.items() if key != "tensors"}
        parts = [self._part(tensor) for tensor in tensors]
        dim = self._argument(args, kwargs, 1, "dim", 0)
        ndim = max(tensor.dim() for tensor in tensors)
        if "shard" in kinds:
            dims = {part.dim if part is not None else -1 for part in parts}
            dim = dim % (ndim + (name == "stack"))
            if len(dims) > 1 or name in ("vstack", "hstack") or (dim in dims and name != "stack"):
                raise self.Refused(f"{name}() joins along the experts, or with whole tensors; other dimensions work")
            return self._marked(
                func(tensors, *others, **kwargs), "shard", dims.pop() + (name == "stack" and dim <= parts[0].dim)
            )
        if kinds == {"rows"} and None not in parts and name not in ("vstack", "hstack"):
            return self._moved(func, name, (tensors, *others), kwargs)
        return self._marked(func([self.sum_of(tensor) for tensor in tensors], *others, **kwargs), "sum")

    # ----------------------------------------------------------------------------------------------- results

    def kind(self, tensor: Any) -> str:
        """Return ``"shard"``, ``"rows"`` or ``"sum"``; empty for a whole tensor."""
        part = self._part(tensor)
        return "" if part is None else part.kind

    @staticmethod
    def unmark(shards: list[Any]) -> None:
        """Forget what tensors are."""
        for shard in shards:
            shard.__dict__.pop("_experts", None)

    def whole(self, results: Any, mesh: Any, entered: list[Any]) -> Any:
        """Return the results of a forward, the same on all ranks.

        Args:
            entered: tensors whose gradients the ranks add up.
        """
        entered = [tensor for tensor in entered if tensor.requires_grad]

        def joined(tensor: Any) -> Any:
            # An empty sum joins the graph, so that all ranks reduce all gradients.
            return (
                tensor + sum(source.flatten()[:0].sum() for source in entered).to(tensor.dtype) if entered else tensor
            )

        def finished(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            part = self._part(value)
            if part is None:
                return joined(value.detach()) if value.requires_grad and not self.adds else value
            placement = Shard(part.dim) if part.kind == "shard" else Partial()
            local = value if part.kind == "shard" else self.sum_of(value)
            local = joined(local) if self.skips and local.is_floating_point() else local
            return DTensor.from_local(local, mesh, [placement], run_check=False).full_tensor()

        return tree_map(finished, results)
