"""Graphs of ``torch.fx`` and exported programs. All names hold from torch 2.6 to 2.14."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from torch.fx.graph_module import _format_import_block as format_imports

from modelsummary._torch.swapping import swapped

__all__ = ["export_serializer", "format_imports", "serialized_dtypes", "tensor_metadata", "type_hints_once"]


def tensor_metadata(tensor: Any) -> Any:
    """Return the ``TensorMetadata`` of a tensor, which nodes have as ``meta["tensor_meta"]``."""
    from torch.fx.passes.shape_prop import _extract_tensor_metadata

    return _extract_tensor_metadata(tensor)


def serialized_dtypes() -> dict[int, Any]:
    """Return the dtypes by their numbers in exported programs."""
    dtypes: dict[int, Any] = export_serializer()._SERIALIZE_TO_TORCH_DTYPE
    return dtypes


def export_serializer() -> Any:
    """Return the module that reads exported programs. It is imported here because the import is slow."""
    from torch._export.serde import serialize

    return serialize


@contextmanager
def type_hints_once() -> Iterator[None]:
    """Run the body while the module that reads exported programs asks for the types of each class once, not per object.

    That is half of the time of reading a program. The name ``typing`` in the module is another one meanwhile.
    """
    serializer = export_serializer()
    typing_module = getattr(serializer, "typing", None)
    if typing_module is None:
        yield
        return
    hints: dict[Any, Any] = {}

    def get_type_hints(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls not in hints:
            hints[cls] = typing_module.get_type_hints(cls, *args, **kwargs)
        return hints[cls]

    cached_typing = ModuleType("typing")
    cached_typing.__dict__.update(vars(typing_module), get_type_hints=get_type_hints)
    with swapped(serializer, "typing", cached_typing):
        yield
