"""Properties of torch's functions, by their names."""

from __future__ import annotations

from modelsummary import _torch

__all__ = [
    "ASKS_GRADIENTS",
    "HOOKS_TENSORS",
    "READS_FACTS",
    "READS_SIZE",
    "TAKES_APART",
    "TAKES_SHAPE",
    "is_question",
    "keeps_first",
]

_PROPERTIES = frozenset(
    name for name, value in vars(_torch.TensorBase).items() if type(value).__name__ == "getset_descriptor"
)
# The result has the shape of the argument and does not depend on its values.
TAKES_SHAPE = frozenset(
    "zeros_like ones_like empty_like full_like rand_like randn_like new_zeros new_ones new_empty new_full".split()
)
READS_SIZE = frozenset("shape size __len__ numel nelement stride storage_offset nbytes".split())
_FACTS = (
    "dim ndimension get_device is_contiguous is_floating_point is_complex is_signed is_conj is_neg is_inference"
    " is_pinned is_same_size is_set_to is_shared is_tensor is_storage element_size type result_type can_cast"
    " promote_types has_names dim_order is_distributed broadcast_shapes is_coalesced"
    " __hash__ __repr__ __str__ __format__ __dir__"  # code that prints a tensor does not decide by its values
)
# They return properties of a tensor other than its values.
READS_FACTS = READS_SIZE | _PROPERTIES | frozenset(_FACTS.split())
ASKS_GRADIENTS = frozenset("requires_grad grad_fn is_leaf retains_grad".split())
HOOKS_TENSORS = frozenset("register_hook register_post_accumulate_grad_hook retain_grad".split())
_SHAPED_BY_FIRST = frozenset(
    "index_add index_copy index_fill index_put scatter scatter_add scatter_reduce masked_fill masked_scatter".split()
)
TAKES_APART = frozenset("__iter__ unbind split chunk tensor_split split_with_sizes".split())


def is_question(name: str) -> bool:
    """Return True if a function that returns no tensor returns values of one.

    >>> is_question("item"), is_question("size")
    (True, False)
    """
    return name not in READS_FACTS and name not in HOOKS_TENSORS and name != "__set__"


def keeps_first(name: str) -> bool:
    """Return True if the result of a function always has the shape of its first argument.

    >>> keeps_first("add_"), keeps_first("add")
    (True, False)
    """
    return name in _SHAPED_BY_FIRST or (name.endswith("_") and not name.startswith("__"))
