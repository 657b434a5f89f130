"""Run TorchScript in a child process with limits on time, memory and files.

The code of a file is checked first (``script_code``); the limits contain anything that the check overlooks. The child's
standard streams are discarded, so a ``print`` in the file has no effect. The result returns as JSON, not as a pickle.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from modelsummary.errors import InputError
from modelsummary.files.program import GivenSizes, Operation, Program, Scope, Tensor

__all__ = ["run_script"]

_SECONDS = 120
_MEMORY = 16 * 2**30  # bytes of address space; torch alone takes several GiB
_LARGEST_RESULT = 256 * 2**20
_CHILD = "from modelsummary.files.torch.script_run import child; child()"


def run_script(path: Path, sizes: GivenSizes, dtypes: Mapping[str | int, torch.dtype]) -> Program:
    """Run the TorchScript module in a file on inputs of these sizes; return its operators.

    Args:
        path: the file.
        sizes: sizes of the inputs, in the order of the arguments or by name.
        dtypes: dtypes of some inputs; default: the dtype of the first floating point parameter.

    Raises:
        InputError: the module raises, ends its process, or exceeds the limits on time or memory.
    """
    given = [[name, list(size), str(dtypes[name]) if name in dtypes else None] for name, size in sizes.items()]
    request = json.dumps({"path": str(path.resolve()), "inputs": given})
    failed = f"{str(path)!r} does not run on {[list(each) for each in sizes.values()]}"
    command = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {_CHILD}"]
    try:
        done = subprocess.run(command, input=request.encode(), capture_output=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise InputError(f"{failed} within {_SECONDS} s") from None
    if done.returncode or len(done.stdout) > _LARGEST_RESULT:
        raise InputError(f"{failed}: its process ended with {done.returncode}")
    answer = json.loads(done.stdout)
    if "error" in answer:
        raise InputError(f"{failed}: {answer['error']}")
    return _program(answer)


def child() -> None:
    """Answer one request on the standard streams; output of the module is discarded."""
    import os

    request = json.loads(sys.stdin.buffer.read())
    answers = os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    from modelsummary.files.torch.script_record import recorded

    sizes = {name: size for name, size, _ in request["inputs"]}
    dtypes = {name: getattr(torch, text.removeprefix("torch.")) for name, _, text in request["inputs"] if text}
    _limit()
    try:
        answer = _plain(recorded(request["path"], sizes, dtypes))
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        answer = {"error": lines[-1][:200]}
    answers.write(json.dumps(answer).encode())
    answers.close()
    os._exit(0)


def _limit() -> None:
    """Limit memory, time and files of this process, on systems that support it."""
    try:
        import resource
    except ImportError:  # Windows: only time is limited
        return
    for what, most in (
        (resource.RLIMIT_AS, _MEMORY),
        (resource.RLIMIT_CPU, 4 * _SECONDS),
        (resource.RLIMIT_FSIZE, 0),  # no file can be written
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(what)[1]
        resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


_TENSOR = ("name", "shape", "size", "dtype", "bits", "kind", "trainable")
_OPERATION = tuple(
    each.name
    for each in fields(Operation)
    if each.name not in ("scopes", "inputs", "outputs", "attributes", "macs_expr")
)


def _plain(program: Program) -> dict[str, Any]:
    """Return a program as lists, numbers and strings; tensors and scopes are numbered."""
    tensors: dict[Tensor, int] = {}
    scopes: dict[Scope, int] = {}

    def places(found: Any, known: dict[Any, int]) -> list[int]:
        return [known.setdefault(each, len(known)) for each in found]

    operations = [
        [
            places(each.scopes, scopes),
            places(each.inputs, tensors),
            places(each.outputs, tensors),
            {name: getattr(each, name) for name in _OPERATION},
        ]
        for each in program.operations
    ]
    plain = {
        "name": program.name,
        "inputs": places(program.inputs, tensors),
        "outputs": places(program.outputs, tensors),
        "operations": operations,
        "owned": [[places(around, scopes), places(found, tensors)] for around, found in program.owned],
    }
    described = [[getattr(each, name) for name in _TENSOR] for each in tensors]
    return {**plain, "tensors": described, "scopes": [list(each) for each in scopes]}


def _program(plain: Mapping[str, Any]) -> Program:
    """Return the program that ``_plain`` described."""
    tensors = [Tensor(name, tuple(shape), tuple(size), *rest) for name, shape, size, *rest in plain["tensors"]]
    scopes = [Scope(*each) for each in plain["scopes"]]
    operations = [
        Operation(
            scopes=tuple(scopes[place] for place in around),
            inputs=[tensors[place] for place in inputs],
            outputs=[tensors[place] for place in outputs],
            **facts,
        )
        for around, inputs, outputs, facts in plain["operations"]
    ]
    return Program(
        plain["name"],
        [tensors[place] for place in plain["inputs"]],
        [tensors[place] for place in plain["outputs"]],
        operations,
        owned=[(tuple(scopes[n] for n in around), [tensors[n] for n in found]) for around, found in plain["owned"]],
    )
