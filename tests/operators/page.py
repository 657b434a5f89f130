"""docs/operators.md: the matrix of operators and facts, written from what the package knows of each operator."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from modelsummary.operators.operator_rules import OpRule, op_rule
from modelsummary.operators.table import TABLE

PAGE = Path(__file__).parents[2] / "docs/operators.md"
HEADERS = ("Operator", "Multiply-adds", "Bytes", "Kernels", "Shapes", "Writes", "Random")
_INTRODUCTION = """# Operators

What is known of each operator that launches kernels in the fixed models of the [gate](zoo.md), and of each with a row
in the table of `operators/`. The page is generated with torch {version} (`python -m tests.operators`); tests compare it
with the package and the models.

- **Multiply-adds**: by a formula of this package (`own`) or of `torch`; `none` if nothing of it is a product; `not
  counted` if it is in the ledger.
- **Bytes**: `all` of arguments and result; `rows` that it selects; `result` where it does not read what it overwrites.
- **Kernels**: the class of the kernel of a device, or `own` if its family lists several classes, sizes or layouts;
  `none` for views, allocations and questions about metadata. Of `other`, only bytes and multiply-adds are known.
- **Shapes**: by a `rule` of this package, or by torch's `meta` kernel; `device` where the layout depends on the device.
- **Writes**: arguments that are written in place; `(training)` if the schema does not say so.

"""


def overloads(name: str) -> list[object]:
    """Return the overloads of an operator by its name, such as ``aten.add``."""
    namespace, _, base = name.rpartition(".")
    packet = getattr(getattr(torch.ops, namespace, None), base, None) if namespace else None
    return [] if packet is None else [getattr(packet, overload) for overload in packet.overloads()]


def row(name: str) -> tuple[str, ...]:
    """Return the cells of an operator."""
    funcs = [func for func in overloads(name) if not str(func).endswith(("out", "_out"))] or overloads(name)
    rules = [op_rule(func) for func in funcs] or [OpRule(name, TABLE[name], matrix_like=True)]
    rule = next((each for each in rules if each.facts.macs is not None), rules[0])
    counted = "not counted" if rule.matrix_like else "none"
    if rule.facts.macs is not None:
        rows = (TABLE.get(each) for each in (name, name.removesuffix("_"), *map(str, funcs)))
        counted = "own" if any(row is not None and row.macs is not None for row in rows) else "torch"
    moved = "rows" if rule.gathers else "result" if rule.overwrites else "all"
    kernels = "product" if rule.facts.macs is not None and not rule.facts.depends_on_views else rule.op_class
    kernels = "own" if rule.facts.kernels is not None else kernels
    shapes = ["rule" if any(each.facts.shape for each in rules) else "meta"]
    shapes += ["device"] * any(each.facts.result or each.facts.cpu_result for each in rules)
    names = rule.signature.names
    writes = [names[key] if isinstance(key, int) else key for key in rule.writes]
    writes += [f"{written} (training)" for written in rule.facts.writes_in_training]
    launches_nothing = not rule.launches_kernel
    return (
        f"`{name}`",
        "none" if launches_nothing else counted,
        "none" if launches_nothing else moved,
        "none" if launches_nothing else kernels,
        " ".join(shapes),
        ", ".join(writes) or "-",
        "yes" if rule.is_random else "-",
    )


def page(names: Iterable[str]) -> str:
    """Return the page for these operators and those of the table."""
    bare = {".".join(name.split(".")[:2]) for name in (*TABLE, *names)}
    known = sorted(name for name in bare if name in TABLE or overloads(name))
    lines = [HEADERS, ("---",) * len(HEADERS), *map(row, known)]
    version = ".".join(torch.__version__.split(".")[:2])
    return _INTRODUCTION.format(version=version) + "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def rows_of_page() -> dict[str, tuple[str, ...]]:
    """Return the rows of the stored page by operator."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    cells = [tuple(cell.strip() for cell in line.strip("| ").split(" | ")) for line in lines]
    return {row[0].strip("`"): row for row in cells}
