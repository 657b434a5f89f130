"""The layers of the architecture, and what an import may cost."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import modelsummary

PACKAGE = Path(modelsummary.__file__).parent
# A module imports only modules of a lower layer, or of its own family.
LAYERS = {
    "errors": -1,
    **dict.fromkeys(["units", "enums", "stored"], 0),
    **dict.fromkeys(["layer_info", "op_costs", "dataflow", "device_spec", "memory_estimate", "program", "tiling"], 1),
    "recompute": 1.5,
    **dict.fromkeys(["capture", "views", "roofline", "summary_rows"], 2),
    "split": 2.25,
    **dict.fromkeys(["fx", "program_tree"], 2.5),
    "statistics": 3,
    **dict.fromkeys(["profiler", "sources", "integrations", "onnx", "archive"], 4),
    **dict.fromkeys(["loading", "comparing"], 4.5),
    "cli": 5,
    "__main__": 6,
}


FAMILIES = {
    **dict.fromkeys(["op_formulas", "solve_formulas", "attention_blocks"], "op_costs"),
    **dict.fromkeys(["file_statistics", "torchinfo", "run_cache"], "statistics"),
    "formatting": "summary_rows",
}


# Statistics(path) is what load() gives: the call goes up, and is imported when it is made.
UPWARD = {"modelsummary.statistics.captured imports loading"}


def _family(module: str) -> str:
    name = module.split(".")[1]
    return FAMILIES.get(name, name)


def _imports(path: Path) -> list[str]:
    """Modules of this package that a file imports, for type checkers only, too."""
    nodes = ast.walk(ast.parse(path.read_text()))
    modules = [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return [module for module in modules if module.startswith("modelsummary.")]


def test_modules_import_only_lower_layers():
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        dotted = ".".join(("modelsummary", *path.relative_to(PACKAGE).with_suffix("").parts))
        if dotted == "modelsummary.__init__":
            continue
        family = _family(dotted)
        for imported in map(_family, _imports(path)):
            if imported != family and LAYERS[imported] >= LAYERS[family]:
                wrong.append(f"{dotted} imports {imported}")
    assert set(wrong) == UPWARD


def _added(code: str, *, before: str) -> set[str]:
    """Modules that ``code`` imports beyond ``before``."""
    script = f"import sys, {before}; before = set(sys.modules); {code}; print(*set(sys.modules) - before)"
    return set(
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    )


def test_a_table_costs_no_optional_library():
    added = _added("import modelsummary; modelsummary.Statistics", before="torch, tabulate")
    optional = {"pandas", "matplotlib", "onnx", "torchvision", "IPython", "numpy", "tqdm", "squarify"}
    assert not optional & {name.split(".")[0] for name in added}
    assert "modelsummary.statistics" in added
    assert not {"modelsummary.split", "modelsummary.fx", "modelsummary.onnx", "modelsummary.views.plot"} & added


def test_modules_are_imported_when_they_are_used():
    added = _added("import modelsummary", before="lazy_loader")
    assert {name for name in added if name.startswith("modelsummary")} == {"modelsummary"}
    assert "torch" not in added


def test_public_names():
    assert set(modelsummary.__all__) == set(dir(modelsummary))
    for name in modelsummary.__all__:
        assert getattr(modelsummary, name).__doc__, name
