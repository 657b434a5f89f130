"""Read parameters and modules of TorchScript from its pickle and its code, without running either."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from modelsummary.errors import ModelFileError
from modelsummary.files.budget import Budget
from modelsummary.files.program import Program, Scope, Stored, Tensor
from modelsummary.files.torch.archive import Archive
from modelsummary.files.torch.script_code import Code, ScriptClass
from modelsummary.files.torch.script_pickle import ScriptObject, ScriptTensor, read_pickle
from modelsummary.files.weights.stored import DEEPEST, LONGEST_NAME

__all__ = ["ScriptFile", "check_storage", "tensors_in"]

_NOTE = "sizes and multiply-adds of TorchScript need a run: load(path, input, run=True), or --run"


class ScriptFile:
    """The modules in an archive, and the tensors that they register.

    Attributes:
        code: the code of the archive.
        model, constants: the values of ``data.pkl`` and ``constants.pkl``.
        scopes: the modules around each module and itself, by the id of its object.
        tensors: how the tensors of the file are listed.
    """

    def __init__(self, archive: Archive, budget: Budget) -> None:
        self.archive, self.budget = archive, budget
        self.code = Code(archive, budget)
        self.scopes: dict[int, tuple[Scope, ...]] = {}
        self.tensors: dict[ScriptTensor, Tensor] = {}
        self.owned: list[tuple[tuple[Scope, ...], list[Tensor]]] = []

    def program(self) -> Program:
        """Return a program without operators."""
        self.model, self.constants = self._pickle("data.pkl"), self._pickle("constants.pkl")
        if not isinstance(self.model, ScriptObject):
            raise ModelFileError("data.pkl must hold a module")
        self._add_modules(self.model)
        held = [self.listed(name, tensor, "buffer") for name, tensor in tensors_in("constants", self.constants)]
        owned = {tensor for _, tensors in self.owned for tensor in tensors}
        unused = [tensor for tensor in held if tensor not in owned]
        return Program(_name_of(self.model), [], [], [], unused, owned=self.owned, stored=self.stored(), notes=[_NOTE])

    def stored(self) -> Stored:
        """Return the elements and bytes of all storages that tensors use, each counted once."""
        return self.archive.stored({tensor.storage: tensor.dtype.itemsize for tensor in self.tensors})

    def _pickle(self, name: str) -> Any:
        return read_pickle(self.archive.read_data(name), name.removesuffix(".pkl"), self.budget)

    def _add_modules(self, model: ScriptObject) -> None:
        """Add the module and all modules inside it, each once, depth first."""
        seen: set[int] = set()
        pending: list[tuple[ScriptObject, tuple[Scope, ...]]] = [(model, ())]
        while pending:
            module, scopes = pending.pop()
            if id(module) in seen:
                continue
            seen.add(id(module))
            if len(scopes) > DEEPEST:
                raise ModelFileError(f"modules are nested more than {DEEPEST} deep")
            self.budget.spend()
            self.scopes[id(module)] = scopes
            kind = self.code.script_class(module.class_name) or ScriptClass(module.class_name)
            tensors: list[Tensor] = []
            inner: list[tuple[ScriptObject, tuple[Scope, ...]]] = []
            for name, value in _attributes(module):
                if isinstance(value, ScriptTensor):
                    if name in kind.parameters or name in kind.buffers:
                        tensors.append(self.listed(name, value, "parameter" if name in kind.parameters else "buffer"))
                elif isinstance(value, ScriptObject) and self._is_module(value):
                    fqn = f"{scopes[-1].fqn}.{name}" if scopes else name
                    inner.append((value, (*scopes, Scope(fqn, fqn, _name_of(value)))))
                elif isinstance(value, ScriptObject) or not isinstance(module.state, dict):
                    tensors += [self.listed(path, tensor, "buffer") for path, tensor in tensors_in(name, value)]
            self.owned.append((scopes, tensors))
            pending += reversed(inner)

    def _is_module(self, value: ScriptObject) -> bool:
        kind = self.code.script_class(value.class_name)
        return kind is not None and kind.base == "Module"

    def listed(self, name: str, tensor: ScriptTensor, kind: Any = "buffer") -> Tensor:
        """Return how a tensor is listed, the first time under this name. Raise ``ModelFileError`` if it is cut off."""
        if tensor not in self.tensors:
            check_storage(name, tensor, self.archive)
            dtype = str(tensor.dtype).removeprefix("torch.")
            trains = kind == "parameter" and tensor.requires_grad
            self.tensors[tensor] = Tensor(
                name, tensor.size, tensor.size, dtype, 8 * tensor.dtype.itemsize, kind, trains
            )
        return self.tensors[tensor]


def check_storage(name: str, tensor: ScriptTensor, archive: Archive) -> None:
    """Raise ``ModelFileError`` if the storage of a tensor in an archive is shorter than its size needs."""
    there = archive.size(tensor.storage)
    if tensor.bytes_needed > there:
        needs = f"needs {tensor.bytes_needed:,} bytes by its size, and has {there:,}"
        raise ModelFileError(f"tensor {name[:80]!r} {needs}")


def _name_of(module: ScriptObject) -> str:
    return module.class_name.rpartition(".")[2]


def _attributes(module: ScriptObject) -> Iterator[tuple[str, Any]]:
    """Yield names and values of a module's attributes; if its own ``__setstate__`` makes them, yield the state."""
    if isinstance(module.state, dict):
        yield from ((str(name), value) for name, value in module.state.items())
    else:
        yield "state", module.state


def tensors_in(name: str, value: Any) -> Iterator[tuple[str, ScriptTensor]]:
    """Yield the tensors in a value other than a module, with their paths as names; each container is read once.

    Raises:
        ModelFileError: a path is too long, or has too many parts.
    """
    seen: set[int] = set()
    pending = [(name, value)]
    while pending:
        path, entry = pending.pop()
        if len(path) > LONGEST_NAME or path.count(".") > DEEPEST:
            limit = f"at most {LONGEST_NAME} characters and {DEEPEST} dots"
            raise ModelFileError(f"the name of a value in a pickle must have {limit}, got {path[:80]!r}")
        if isinstance(entry, ScriptTensor):
            yield path, entry
            continue
        if id(entry) in seen:
            continue
        seen.add(id(entry))
        prefix = f"{path}." if path else ""
        inner = entry.state if isinstance(entry, ScriptObject) else entry
        if isinstance(inner, dict):
            pending += [(f"{prefix}{key}", item) for key, item in reversed(inner.items())]
        elif isinstance(inner, (list, tuple)):
            pending += [(f"{prefix}{index}", item) for index, item in reversed(list(enumerate(inner)))]
        elif isinstance(inner, ScriptObject):
            pending.append((path, inner))
