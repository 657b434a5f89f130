"""Code of graphs in which regions run under activation checkpointing.

A node is in a region if ``node.meta["activation_checkpoint"]`` holds its number: ``(0,)``, or ``(0, 1)`` for region 1
inside region 0. The code of a region is a function ``checkpoint_0`` (``checkpoint_0_1``) in the forward.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from textwrap import indent
from typing import Any

import torch.utils.checkpoint  # noqa: F401 (the generated code uses it)
from torch.fx import Node
from torch.fx.graph import CodeGen, PythonCode

from modelsummary import _torch

__all__ = ["MARK", "CheckpointCodeGen", "region_of"]

MARK = "activation_checkpoint"
_COUNTER = re.compile(r"# COUNTER: (\d+)\n")
_DELETED = re.compile(r";  ((?:\w+ = )+)None$")
_INDENT = "    "


def region_of(node: Node) -> tuple[int, ...]:
    """Return the numbers of the regions around a node, outermost first."""
    mark = node.meta.get(MARK, ())
    return (mark,) if isinstance(mark, int) else tuple(mark or ())


class CheckpointCodeGen(CodeGen):
    """The code generator of ``torch.fx``, with marked regions as functions run by ``checkpoint`` (non-reentrant)."""

    def _gen_python_code(self, nodes: Any, *args: Any, **kwargs: Any) -> PythonCode:
        around = self._body_transformer

        def transform(body: list[str]) -> list[str]:
            body = around(body) if around is not None else body
            if any(map(region_of, nodes)):
                body = _with_regions(list(nodes), body)
            if not any(node.target is _torch.set_grad_enabled for node in nodes):
                return body
            restoring = "with torch.set_grad_enabled(torch.is_grad_enabled()):\n"  # also if the code raises
            return [restoring, indent("".join(body), _INDENT)]

        with _torch.swapped(self, "_body_transformer", transform):
            return super()._gen_python_code(nodes, *args, **kwargs)


def _with_regions(nodes: list[Node], body: list[str]) -> list[str]:
    """Return the code with the lines of each region in a function. A counter of torch precedes the lines of a node."""
    begin, *rest = _COUNTER.split("".join(body))
    numbers = list(map(int, rest[::2]))
    lines = list(zip(numbers, rest[1::2], strict=True))
    taken: set[str] = {node.name for node in nodes}
    return [begin, *_nested(nodes, lines, 0, taken)]


def _nested(nodes: list[Node], lines: Sequence[tuple[int, str]], depth: int, taken: set[str]) -> Iterable[str]:
    """Yield the code of these lines, with the regions at ``depth`` and deeper as functions."""
    for region, group in groupby(lines, key=lambda line: _number_at(nodes[line[0]], depth)):
        inside = list(group)
        if region is None:
            yield from (f"# COUNTER: {counter}\n{text}" for counter, text in inside)
            continue
        members = [nodes[counter] for counter, _ in inside]
        yield from _region(members, list(_nested(nodes, inside, depth + 1, taken)), depth, taken)


def _number_at(node: Node, depth: int) -> int | None:
    region = region_of(node)
    return region[depth] if len(region) > depth and node.op not in ("placeholder", "output") else None


def _region(members: list[Node], code: list[str], depth: int, taken: set[str]) -> Iterable[str]:
    region_nodes = set(members)
    inputs = list(
        dict.fromkeys(source for node in members for source in node.all_input_nodes if source not in region_nodes)
    )
    outputs = [node for node in members if any(user not in region_nodes for user in node.users)]
    name = _free("_".join(["checkpoint", *map(str, region_of(members[0])[: depth + 1])]), taken)
    lines = [line for line in "".join(code).split("\n") if line]
    deleted = {
        variable for line in lines if (match := _DELETED.search(line)) for variable in match[1].split(" = ") if variable
    }
    parameters = ", ".join(node.name for node in inputs)
    yield f"def {name}({parameters}):\n"
    yield from (f"{_INDENT}{line}\n" for line in lines)
    results = ", ".join(node.name for node in outputs)
    yield f"{_INDENT}return {results}\n"
    call = (
        f"torch.utils.checkpoint.checkpoint({', '.join([name, *(node.name for node in inputs)])}, use_reentrant=False)"
    )
    deleted_inputs = [node.name for node in inputs if node.name in deleted]  # delete them here too, or they stay alive
    deletion = f";  {' = '.join([*deleted_inputs, 'None'])}" if deleted_inputs else ""
    yield f"{results + ' = ' if results else ''}{call}{deletion}\n"


def _free(name: str, taken: set[str]) -> str:
    """Return ``name``, or ``name_part1`` ... for the further parts of a region that is not contiguous."""
    count, free = 0, name
    while free in taken:
        count += 1
        free = f"{name}_part{count}"
    taken.add(free)
    return free
