"""Keep freed memory in the process, so that measured calls find pages that were touched before."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["kept_memory"]

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # names of parameters of mallopt
_SETTINGS = (
    "GLIBC_TUNABLES",
    *(f"MALLOC_{name}_" for name in ("TRIM_THRESHOLD", "TOP_PAD", "MMAP_THRESHOLD", "MMAP_MAX")),
)
_LARGEST_THRESHOLD = 2**25  # bytes; glibc maps larger blocks anew at every allocation
_DEFAULT_MAPPINGS = 2**16


@contextmanager
def kept_memory() -> Iterator[None]:
    """Let glibc keep the memory that is freed inside; do nothing with other C libraries, or if the user has set glibc.

    By default, glibc gives large blocks back to the system when they are freed. Their next use costs a page fault per
    4 KB, in a convolution with a large result more time than the convolution itself, and the cost depends on how the
    kernel touches its pages. Afterwards glibc has its defaults again, with the thresholds of a process that has freed
    a block of 32 MB. The settings hold for all threads. Uses do not nest: the end of the inner one
    ends both.

    >>> with kept_memory():
    ...     torch.zeros(2, 2).sum()
    tensor(0.)
    """
    if not _is_glibc() or any(name in os.environ for name in _SETTINGS):
        yield
        return
    libc = ctypes.CDLL(None)
    # glibc adapts its thresholds to freed blocks until mallopt is called; this is the end of the adaptation.
    torch.empty(_LARGEST_THRESHOLD - 2**14, dtype=torch.uint8, device="cpu")
    try:
        libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(_MMAP_MAX, 0)
        yield
    finally:
        libc.mallopt(_TRIM_THRESHOLD, 2 * _LARGEST_THRESHOLD)
        libc.mallopt(_MMAP_MAX, _DEFAULT_MAPPINGS)
        libc.malloc_trim(0)


def _is_glibc() -> bool:
    try:
        return str(os.confstr("CS_GNU_LIBC_VERSION")).startswith("glibc")
    except (AttributeError, ValueError, OSError):  # another system
        return False
