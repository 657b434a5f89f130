"""Read parameters and modules of TorchScript from its pickle and its code, without running either."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from modelsummary.errors import InputError, ModelFileError
from modelsummary.files.budget import Budget
from modelsummary.files.program import GivenSizes, Program, Scope, Stored, Tensor
from modelsummary.files.statistics import FileStatistics
from modelsummary.files.torch.archive import Archive
from modelsummary.files.torch.script_code import Code, ScriptClass
from modelsummary.files.torch.script_pickle import ScriptObject, ScriptTensor, read_pickle

__all__ = ["load_torchscript"]

_DEEPEST = 100  # modules within modules
_BEST_PACKED = 6  # times as long is code without its packing; comments pack better, and do nothing
_DEEPEST_CALL = 60  # calls within calls
_STEPS = 4_000_000
_LARGEST_PICKLE = 32 * 2**20  # bytes
_NOTE = "sizes and multiply-adds of TorchScript need a run: load(path, input, run=True), or --run"


def load_torchscript(
    path: Path, sizes: GivenSizes, dtypes: Mapping[str | int, torch.dtype], *, run: bool
) -> FileStatistics:
    """Return the statistics of the TorchScript module in a file: modules, parameters and buffers.

    Args:
        path: the file.
        sizes: sizes of the inputs, in the order of the arguments or by name.
        dtypes: dtypes of some inputs; default: the dtype of the first floating point parameter.
        run: interpret the module's code on inputs of these sizes, to count its operators.

    Raises:
        InputError: only one of ``sizes`` and ``run`` was given, or the module does not run on these sizes.
        ModelFileError: the file is broken or only a pickle, or its code does more than compute.
    """
    archive = Archive(path)
    if "constants.pkl" not in archive.names:
        if any(name.startswith("models/") for name in archive.names):
            raise ModelFileError(f"{str(path)!r} is an exported program; rename it to .pt2")
        raise ModelFileError(
            f"{str(path)!r} is a pickle, which can run any code and is not read; pass the model to Statistics"
        )
    if run:
        if not sizes:
            raise InputError(f"run=True needs the sizes of the inputs of {str(path)!r}: load(path, input, run=True)")
    elif sizes:
        raise InputError(f"input= needs a run of {str(path)!r}, which is code; pass run=True (--run) to run it")
    budget = _budget_of(archive)
    reader = _Reader(archive, budget)
    try:
        listed = reader.program()
    except ModelFileError as error:
        raise ModelFileError(f"{str(path)!r}: {error}") from None
    if run:
        from modelsummary.files.torch.script_run import ScriptFile, run_script

        file = ScriptFile(
            reader.code, reader.model, reader.constants, reader.scopes, reader.tensors, listed.stored.nbytes
        )
        program = run_script(file, sizes, dtypes, budget)
        program.owned, program.stored = listed.owned, listed.stored
        return FileStatistics(program, path)
    return FileStatistics(listed, path)


class _Reader:
    """A reader of the modules in an archive and of the tensors that they register."""

    def __init__(self, archive: Archive, budget: Budget) -> None:
        self.archive, self.budget = archive, budget
        self.code = Code(archive, budget)
        self.scopes: dict[int, tuple[Scope, ...]] = {}  # of each module, by the id of its object
        self.tensors: dict[ScriptTensor, Tensor] = {}
        self.owned: list[tuple[tuple[Scope, ...], list[Tensor]]] = []

    def program(self) -> Program:
        """Return a program without operators."""
        self.model, self.constants = self._pickle("data.pkl"), self._pickle("constants.pkl")
        if not isinstance(self.model, ScriptObject):
            raise ModelFileError("data.pkl must hold a module")
        self._add_modules(self.model)
        held = [self._known(name, each, "buffer") for name, each in _tensors_in("constants", self.constants)]
        notes = [_NOTE]
        own = [each for each in held if each not in {tensor for _, found in self.owned for tensor in found}]
        return Program(_name_of(self.model), [], [], [], own, owned=self.owned, stored=self._stored(), notes=notes)

    def _stored(self) -> Stored:
        """Return the elements and bytes of all storages that tensors use, each counted once."""
        itemsizes = {tensor.storage: tensor.dtype.itemsize for tensor in self.tensors}
        sizes = {storage: self.archive.size(storage) for storage in itemsizes}
        return Stored(sum(size // itemsizes[storage] for storage, size in sizes.items()), sum(sizes.values()))

    def _pickle(self, name: str) -> Any:
        if self.archive.size(name) > _LARGEST_PICKLE:
            raise ModelFileError(
                f"{name} has {self.archive.size(name):,} bytes; more than {_LARGEST_PICKLE:,} are not read"
            )
        return read_pickle(self.archive.read(name), name.removesuffix(".pkl"), self.budget)

    def _add_modules(self, model: ScriptObject) -> None:
        """Add the module and all modules inside it, each once, depth first."""
        seen: set[int] = set()
        pending: list[tuple[ScriptObject, tuple[Scope, ...]]] = [(model, ())]
        while pending:
            module, scopes = pending.pop()
            if id(module) in seen:
                continue
            seen.add(id(module))
            if len(scopes) > _DEEPEST:
                raise ModelFileError(f"modules are nested more than {_DEEPEST} deep")
            self.budget.spend()
            self.scopes[id(module)] = scopes
            kind = self.code.script_class(module.class_name) or ScriptClass(module.class_name)
            found: list[Tensor] = []
            inner: list[tuple[ScriptObject, tuple[Scope, ...]]] = []
            for name, value in _attributes(module):
                if isinstance(value, ScriptTensor):
                    if name in kind.parameters or name in kind.buffers:
                        found.append(self._known(name, value, "parameter" if name in kind.parameters else "buffer"))
                elif isinstance(value, ScriptObject) and self._is_module(value):
                    fqn = f"{scopes[-1].fqn}.{name}" if scopes else name
                    inner.append((value, (*scopes, Scope(fqn, fqn, _name_of(value)))))
                elif isinstance(value, ScriptObject) or not isinstance(module.state, dict):
                    found += [self._known(place, each, "buffer") for place, each in _tensors_in(name, value)]
            self.owned.append((scopes, found))
            pending += reversed(inner)

    def _is_module(self, value: ScriptObject) -> bool:
        kind = self.code.script_class(value.class_name)
        return kind is not None and kind.base == "Module"

    def _known(self, name: str, found: ScriptTensor, kind: Any) -> Tensor:
        if found not in self.tensors:
            there = self.archive.size(found.storage)
            if found.bytes_needed > there:
                needs = f"needs {found.bytes_needed:,} bytes by its size, and has {there:,}"
                raise ModelFileError(f"tensor {name[:80]!r} {needs}")
            dtype = str(found.dtype).removeprefix("torch.")
            trains = kind == "parameter" and found.requires_grad
            self.tensors[found] = Tensor(name, found.size, found.size, dtype, 8 * found.dtype.itemsize, kind, trains)
        return self.tensors[found]


def _budget_of(archive: Archive) -> Budget:
    """Return what reading and running the program in an archive may cost, in all passes together."""
    is_code = {name: name.endswith((".py", ".pkl")) for name in archive.names}
    code = sum(min(archive.size(name), _BEST_PACKED * archive.packed_size(name)) for name in is_code if is_code[name])
    stored = sum(archive.size(name) for name in is_code if not is_code[name])
    return Budget(
        seconds=1.5 + 2e-6 * code + 2e-8 * stored,
        steps=_STEPS + 2 * code,
        bytes=256 * 2**20 + 2 * stored,
        depth=_DEEPEST_CALL,
    )


def _name_of(module: ScriptObject) -> str:
    return module.class_name.rpartition(".")[2]


def _attributes(module: ScriptObject) -> Iterator[tuple[str, Any]]:
    """Yield names and values of a module's attributes; if its own ``__setstate__`` makes them, yield the state."""
    if isinstance(module.state, dict):
        yield from ((str(name), value) for name, value in module.state.items())
    else:
        yield "state", module.state


def _tensors_in(name: str, value: Any) -> Iterator[tuple[str, ScriptTensor]]:
    """Yield the tensors in a value other than a module, each once, with their paths in it as names."""
    seen: set[int] = set()
    pending = [(name, value)]
    while pending:
        place, each = pending.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, ScriptTensor):
            yield place, each
            continue
        inner = each.state if isinstance(each, ScriptObject) else each
        if isinstance(inner, dict):
            pending += [(f"{place}.{key}", item) for key, item in reversed(inner.items())]
        elif isinstance(inner, (list, tuple)):
            pending += [(f"{place}.{number}", item) for number, item in reversed(list(enumerate(inner)))]
        elif isinstance(inner, ScriptObject):
            pending.append((place, inner))
