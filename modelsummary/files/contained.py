"""Run code of other libraries on an untrusted file where it can do no harm: in a child process with limits.

The shape inference of onnx is C++ that ends the process on some graphs, and torch restores an exported program with
formulas and operators that a file chooses. Neither can be interrupted. A child is a copy of this process, which takes
milliseconds: it has limits on seconds and memory, its output is discarded, and the kernel denies it to write, make or
remove files, to start programs and to connect to other machines. Where a process cannot be copied safely (macOS,
Windows) the function runs here, without limits.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import io
import logging
import os
import pickle
import select
import signal
import struct
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from modelsummary import errors
from modelsummary.errors import ModelFileError, ModelSummaryError
from modelsummary.files.budget import Budget

__all__ = ["contained", "limit_seconds"]

T = TypeVar("T")

_NO_MEMORY = 77  # exit status of a child
_LENGTH = 8  # bytes of the length of an answer
_MODULES = ("modelsummary.files.program", "collections", "sympy.", "torch.utils._sympy.")
# Landlock (linux/landlock.h): the numbers of its system calls, alike on all processors, and the rights of each version.
_CREATE_RULESET, _RESTRICT_SELF = 444, 446
_READ = 0b1100  # rights to read files and folders; all others write, make, remove or execute
_RIGHTS = {1: 13, 2: 14, 3: 15, 5: 16}  # version -> number of rights on files
_NETWORK_SINCE = 4
_TCP = 0b11  # to bind and to connect
_NO_NEW_PRIVILEGES = 38  # of prctl; the kernel asks for it first
_PATIENCE = 20  # seconds of the clock for one of the processor: the machine may be busy
_limited: set[int] = set()  # this process, if it is a child with limits


def contained(function: Callable[[], T], budget: Budget) -> T:
    """Return what a function returns in a child process: plain data, a ``Program``, or formulas.

    Args:
        function: what to run; it may use any object of this process, and changes none of them.
        budget: the seconds and bytes that the child may take.

    Raises:
        ModelFileError: the function takes more than the budget, or ends its process.
        ModelSummaryError: the function raises it.

    >>> contained(lambda: sum(range(10)), Budget())
    45
    >>> import os
    >>> contained(os.abort, Budget())
    Traceback (most recent call last):
    modelsummary.errors.ModelFileError: a library that reads it ends its process (SIGABRT)
    """
    if not sys.platform.startswith("linux"):
        return function()
    tempfile.gettempdir()  # libraries ask for it when they are imported; a child could not look for it by writing
    receiver, sender = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads: the child uses none
        child = os.fork()
    if not child:
        _run(function, sender, budget)
    os.close(sender)
    answer = b""
    try:
        answer = _received(receiver, time.monotonic() + _PATIENCE * budget.seconds)
    finally:
        os.close(receiver)
        if not answer:
            os.kill(child, signal.SIGKILL)
        _, status, used = os.wait4(child, 0)
    budget.elapse(used.ru_utime + used.ru_stime)
    if not answer:
        _refuse(os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, budget)
    try:
        kind, value = _Plain(io.BytesIO(answer)).load()
    except (pickle.UnpicklingError, AttributeError, TypeError, ValueError) as error:
        raise ModelFileError(f"what a library reads from it is not plain data: {error}") from None
    if kind is not None:
        raise getattr(errors, kind)(value)
    result: T = value
    return result


def _received(receiver: int, end: float) -> bytes:
    """Return the answer of a child; empty if the child ends without one, or at the end of its time."""
    parts, missing = [], _LENGTH
    is_length = True
    while missing:
        ready, _, _ = select.select([receiver], [], [], max(end - time.monotonic(), 0))
        part = os.read(receiver, min(missing, 2**20)) if ready else b""
        if not part:
            return b""
        parts.append(part)
        missing -= len(part)
        if not missing and is_length:
            parts, missing, is_length = [], int.from_bytes(b"".join(parts), "little"), False
    return b"".join(parts)


def _refuse(status: int, seconds: float, budget: Budget) -> NoReturn:
    if status in (-signal.SIGPROF, -signal.SIGKILL):
        budget.refuse_time(seconds)
    if status == _NO_MEMORY:
        raise ModelFileError(f"reading it takes more than {budget.bytes:,} bytes of memory")
    how = signal.Signals(-status).name if status < 0 else f"status {status}"
    raise ModelFileError(f"a library that reads it ends its process ({how})")


# ------------------------------------------------------------------------------------------- in the child


def limit_seconds(budget: Budget) -> None:
    """Give a function that runs contained only the seconds that are left of a budget, such as of a part of the file."""
    if os.getpid() in _limited:
        signal.setitimer(signal.ITIMER_PROF, budget.seconds_left)


def _run(function: Callable[[], Any], sender: int, budget: Budget) -> NoReturn:
    """Write the pickled result of a function and end the process, whatever happens."""
    status = 1
    try:
        _limit(budget)
        answer: tuple[str | None, Any]
        try:
            answer = (None, function())
        except MemoryError:
            raise
        except ModelSummaryError as error:
            answer = (type(error).__name__, str(error))
        except Exception as error:  # any error of a library on a broken file
            answer = ("ModelFileError", f"a library that reads it fails: {errors.in_short(error)}")
        data = pickle.dumps(answer, pickle.HIGHEST_PROTOCOL)
        with os.fdopen(sender, "wb") as stream:
            stream.write(len(data).to_bytes(_LENGTH, "little") + data)
        status = 0
    except MemoryError:
        status = _NO_MEMORY
    finally:
        os._exit(status)


def _limit(budget: Budget) -> None:
    """Limit the time, memory and files of this process, and discard its output."""
    import resource

    _limited.add(os.getpid())
    gc.disable()  # objects of the other process are not to be finalized twice
    faulthandler.disable()
    logging.disable()
    warnings.simplefilter("ignore")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    pages = int(Path("/proc/self/statm").read_text().split()[5])  # files that are mapped to be read count nothing
    memory = pages * resource.getpagesize() + budget.bytes
    for what, most in ((resource.RLIMIT_DATA, memory), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(what)[1]
        resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    _deny_writing()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    limit_seconds(budget)
    budget.restart()


def _deny_writing() -> None:
    """Deny this process all rights on files but reading, and TCP; kernels without Landlock (before 5.13) deny nothing.

    A limit on the size of files does not suffice: opening a file can empty it.
    """
    libc = ctypes.CDLL(None)
    version = libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return
    rights = (1 << max(n_rights for since, n_rights in _RIGHTS.items() if since <= version)) - 1
    attributes = struct.pack("=Q", rights & ~_READ)
    if version >= _NETWORK_SINCE:
        attributes += struct.pack("=Q", _TCP)
    ruleset = libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    if ruleset < 0 or libc.syscall(_RESTRICT_SELF, ruleset, 0):
        raise OSError("Landlock refused its own rules")
    os.close(ruleset)


class _Plain(pickle.Unpickler):
    """A reader of pickles of plain data, programs and formulas; it calls nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        kind = super().find_class(module, name) if module.startswith(_MODULES) else None
        if not isinstance(kind, type):
            raise pickle.UnpicklingError(f"{module}.{name} is not plain data")
        return kind
