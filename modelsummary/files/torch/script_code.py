"""Parse the code of TorchScript, a subset of Python, as data; nothing of it is compiled or run by Python.

Python's parser takes much time and memory on hostile text, and overflows on deep nesting. So the text is scanned first:
what the subset lacks is refused, and so are deep brackets and long chains. Definitions are parsed when asked for.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field

from modelsummary.errors import ModelFileError
from modelsummary.files.budget import Budget
from modelsummary.files.torch.archive import Archive

__all__ = ["Code", "ScriptClass"]

_DEEPEST = 100  # brackets within brackets, and parts of a chain such as a.b(c)[d]
_BYTES_PER_TOKEN = 1500  # of the syntax tree: the most that a short name with a comma takes
_HEAD = re.compile(r"^(?:class|def) (\w+)", re.MULTILINE)
_METHOD = re.compile(r"^  def (\w+)", re.MULTILINE)
_TEXT_OR_COMMENT = re.compile(r'"(?:[^"\\\n]|\\[^\n])*"|\'(?:[^\'\\\n]|\\[^\n])*\'|#[^\n]*')
# Outside of texts, which are now single quotation marks: operators, and words that nest without brackets.
_NOT_IN_SUBSET = re.compile(
    r'[\w"]"|[;@!$?`~^|&%/*<\\\']|(?<!-)>|(?<!\de)(?<!\.e)\+|-\s*-|==|:=|(?<!\d)\d{400}'
    r"|\b(?:lambda|not|and|or|is|await|async|yield|elif|import|global|nonlocal|try|except|assert|raise|del)\b"
    r"|\belse\b(?!:)"
)
_NESTING = re.compile(r"[()\[\]{},:=\n]|\.(?=\s*[A-Za-z_])")
_CLOSES = {")": "(", "]": "[", "}": "{"}


@dataclass(slots=True)
class ScriptClass:
    """A class in the code of an archive.

    Attributes:
        name: full name, such as ``__torch__.torch.nn.modules.linear.Linear``.
        base: ``"Module"``, ``"NamedTuple"``, ``"Enum"``, ``"Interface"``, or ``""``.
        parameters, buffers: names of the tensors that a module registers.
        fields: names of the annotated attributes, in order.
        values: name -> expression of constants and of the members of an enumeration.
    """

    name: str
    base: str = ""
    parameters: frozenset[str] = frozenset()
    buffers: frozenset[str] = frozenset()
    fields: list[str] = field(default_factory=list)
    values: dict[str, ast.expr] = field(default_factory=dict)


class Code:
    """The definitions in the code of an archive, each parsed when it is asked for.

    Attributes:
        archive: the archive with the code.

    >>> Code.parsed("x = torch.add(y, 1)", Budget())[0].targets[0].id
    'x'
    """

    def __init__(self, archive: Archive, budget: Budget) -> None:
        self.archive, self._budget = archive, budget
        self._texts: dict[str, Mapping[str, str]] = {}  # by module
        self._methods: dict[str, dict[str, str]] = {}  # by class
        self._classes: dict[str, ScriptClass | None] = {}
        self._functions: dict[str, ast.FunctionDef | None] = {}

    def script_class(self, name: str) -> ScriptClass | None:
        """Return the class of a full name; None if the archive has none."""
        if name not in self._classes:
            text = self._text(name)
            self._classes[name] = self._read_class(name, text) if text.startswith("class ") else None
        return self._classes[name]

    def function(self, name: str) -> ast.FunctionDef | None:
        """Return the function of a full name; None if the archive has none."""
        if name not in self._functions:
            text = self._text(name)
            self._functions[name] = self._read_function(text) if text.startswith("def ") else None
        return self._functions[name]

    def method(self, script_class: ScriptClass, name: str) -> ast.FunctionDef | None:
        """Return a method of a class; None if it has none of this name."""
        key = f"{script_class.name} {name}"
        if key not in self._functions:
            text = self._methods.get(script_class.name, {}).get(name)
            self._functions[key] = None if text is None else self._read_function("if 0:\n" + text, is_method=True)
        return self._functions[key]

    def _text(self, name: str) -> str:
        """Return the text of a definition; an empty one if there is none."""
        module, _, last = name.rpartition(".")
        if module not in self._texts:
            entry = f"code/{module.replace('.', '/')}.py"
            source = ""
            if entry in self.archive.names:
                self._budget.take(2 * self.archive.size(entry))
                source = self.archive.read(entry).decode(errors="replace")
            self._texts[module] = _divided(source, _HEAD)
        return self._texts[module].get(last, "")

    def _read_class(self, name: str, text: str) -> ScriptClass:
        first = _METHOD.search(text)
        head, rest = (text, "") if first is None else (text[: first.start()], text[first.start() :])
        self._methods[name] = _divided(rest, _METHOD)
        body = self.parsed(head.rstrip() + ("\n  pass" if head.rstrip().endswith(":") else ""), self._budget)
        if len(body) != 1 or not isinstance(body[0], ast.ClassDef):
            raise ModelFileError(f"the code of {name[:80]!r} is not a class")
        bases = [base.id for base in body[0].bases if isinstance(base, ast.Name)]
        script_class = ScriptClass(name, bases[0] if bases else "")
        for statement in body[0].body:
            _add_attribute(script_class, statement)
        return script_class

    def _read_function(self, text: str, is_method: bool = False) -> ast.FunctionDef:
        body = self.parsed(text, self._budget)
        if is_method and body and isinstance(body[0], ast.If):
            body = body[0].body
        if len(body) != 1 or not isinstance(body[0], ast.FunctionDef):
            raise ModelFileError(f"the code {text[:80]!r} is not a function")
        return body[0]

    @staticmethod
    def parsed(text: str, budget: Budget) -> list[ast.stmt]:
        """Return the statements of a text.

        Raises:
            ModelFileError: the text has what TorchScript does not have, or is nested too deep.
        """
        budget.spend(len(text) // 8)
        tokens = _check(text)
        budget.spend(5 * tokens)
        budget.take(_BYTES_PER_TOKEN * tokens)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of escapes that Python does not know
                return ast.parse(text).body
        except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as error:
            line = str(error.text or "") if isinstance(error, SyntaxError) else text
            raise ModelFileError(f"the code {line.strip()[:80]!r} is not TorchScript") from None


def _divided(source: str, heads: re.Pattern[str]) -> dict[str, str]:
    """Return the texts of the definitions in a source, by name."""
    starts = list(heads.finditer(source))
    ends = [*(start.start() for start in starts[1:]), len(source)][: len(starts)]
    texts: dict[str, str] = {}
    for start, end in zip(starts, ends, strict=True):
        if start[1] in texts:
            raise ModelFileError(f"the code defines {start[1][:80]!r} twice")
        texts[start[1]] = source[start.start() : end]
    return texts


def _check(text: str) -> int:
    """Return the number of separators in a text; raise ``ModelFileError`` for other languages and deep nesting."""
    plain = _TEXT_OR_COMMENT.sub(lambda match: "" if match[0][0] == "#" else '"', text)
    refused = _NOT_IN_SUBSET.search(plain)
    if refused is not None:
        around = plain[max(0, refused.start() - 30) : refused.end() + 10]
        raise ModelFileError(f"the code has {refused[0][:40]!r} in {around!r}, which TorchScript does not write")
    opened: list[str] = []
    chains = [0]
    tokens = 0
    for match in _NESTING.finditer(plain):
        token = match[0]
        tokens += 1
        if token in "([{":
            chains[-1] += 1
            opened.append(token)
            chains.append(0)
        elif token in _CLOSES:
            if not opened or opened.pop() != _CLOSES[token]:
                raise ModelFileError("the code has brackets that do not match")
            chains.pop()
        elif token == ".":
            chains[-1] += 1
        elif token != "\n" or not opened:
            chains[-1] = 0
        if len(opened) > _DEEPEST or chains[-1] > _DEEPEST:
            raise ModelFileError(f"the code is nested more than {_DEEPEST} deep")
    return tokens


def _add_attribute(script_class: ScriptClass, statement: ast.stmt) -> None:
    """Add what a statement in the body of a class says."""
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        script_class.fields.append(statement.target.id)
        if statement.value is not None:
            script_class.values[statement.target.id] = statement.value
    elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        name = statement.targets[0].id
        if name == "__parameters__":
            script_class.parameters = _texts_in(statement.value)
        elif name == "__buffers__":
            script_class.buffers = _texts_in(statement.value)
        else:
            script_class.values[name] = statement.value


def _texts_in(node: ast.expr) -> frozenset[str]:
    items = node.elts if isinstance(node, ast.List) else []
    return frozenset(item.value for item in items if isinstance(item, ast.Constant) and isinstance(item.value, str))
