"""The layers of the architecture, and what an import may cost."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator

import pytest

import modelsummary
from tests.sources import PACKAGE, parsed

# A module imports only packages of lower layers, and its own.
LAYERS = [
    ["errors"],
    ["_torch"],
    ["keywords", "extras"],
    ["file_contents"],
    ["units", "tables"],
    ["layer_info", "progress"],
    ["equality", "subject"],
    ["operators"],
    ["devices"],
    ["capture"],
    ["record", "memory"],
    ["latency"],
    ["split", "parallel", "fx", "views", "formulas"],
    ["cluster", "values", "findings"],
    ["serving"],
    ["statistics"],
    ["files", "torchinfo", "profiler", "integrations"],
    ["tiling"],
    ["onnx", "cli"],
    ["__main__"],
]
LAYER_OF = {name: number for number, names in enumerate(LAYERS) for name in names}


def _imports(tree: ast.Module) -> list[str]:
    """Packages of the library that a file imports, for type checkers only, too."""
    nodes = ast.walk(tree)
    modules = [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return [module.split(".")[1] for module in modules if module.startswith("modelsummary.")]


def test_modules_import_only_lower_layers():
    wrong = []
    for path, tree in parsed().items():
        own = path.relative_to(PACKAGE).with_suffix("").parts[0]
        if own != "__init__":
            higher = [name for name in _imports(tree) if name != own and LAYER_OF[name] >= LAYER_OF[own]]
            wrong += [f"{path.relative_to(PACKAGE)} imports {name}" for name in higher]
    assert wrong == []


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def _run_in(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a file that run: all but the imports for type checkers."""
    pending = [tree]
    while pending:
        node = pending.pop()
        yield node
        children = [*node.orelse] if _is_for_types(node) else ast.iter_child_nodes(node)
        pending.extend(children)


def _graph() -> dict[str, set[str]]:
    """Return module -> modules of its room that it imports, also inside functions; imports for types do not count.

    A package is imported before its modules, but waits for none of them if they name each other.
    """
    paths = {path.relative_to(PACKAGE.parent).with_suffix("").as_posix(): path for path in parsed()}
    modules = {name.removesuffix("/__init__").replace("/", "."): path for name, path in paths.items()}
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        graph[module] = set()
        for node in _run_in(parsed()[path]):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("modelsummary."):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                graph[module].update(name if name in modules else node.module for name in names)
    return {
        module: {name for name in names if name.split(".")[:2] == module.split(".")[:2]} - {module}
        for module, names in graph.items()
    }


def _without_ends(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the part of a graph from which every path leads into a cycle, or is in one."""
    while ends := {module for module, names in graph.items() if not names}:
        graph = {module: names - ends for module, names in graph.items() if module not in ends}
    return graph


def test_a_room_has_no_cycle_of_imports():
    rooms = _without_ends(_graph())
    cycles = {module for module in rooms if module in set().union(*rooms.values())}
    assert cycles == set()


def test_cycles_are_seen():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}
    assert _without_ends(graph) == {"a": {"b"}, "b": {"c"}, "c": {"b"}}
    tree = ast.parse("if TYPE_CHECKING:\n    import a\ndef f():\n    import b")
    assert [node.names[0].name for node in _run_in(tree) if isinstance(node, ast.Import)] == ["b"]


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


def test_a_table_of_common_layers_imports_no_compiler():
    """The meta kernels of some activations import ``torch._dynamo``, which takes ten times as long as the table."""
    code = (
        "from torch import nn; import modelsummary; layers = [nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU(), nn.SiLU(), "
        "nn.ReLU(), nn.Tanh(), nn.Sigmoid(), nn.Dropout(), nn.Softmax(-1)]; "
        "modelsummary.Statistics(nn.Sequential(*layers), torch.zeros(2, 4))"
    )
    added = _added(code, before="torch")
    assert "modelsummary.statistics" in added
    assert "torch._dynamo" not in added


def test_modules_are_imported_when_they_are_used():
    added = _added("import modelsummary", before="lazy_loader")
    assert {name for name in added if name.startswith("modelsummary")} == {"modelsummary"}
    assert "torch" not in added


def test_the_command_imports_torch_when_it_runs():
    added = _added("import modelsummary.cli", before="tabulate")
    assert "modelsummary.cli.commands" in added
    assert "torch" not in added


def test_public_names():
    assert len(modelsummary.__all__) <= 40
    assert set(modelsummary.__all__) == set(dir(modelsummary))
    for name in modelsummary.__all__:
        assert getattr(modelsummary, name).__doc__, name


def test_unknown_names_are_refused():
    with pytest.raises(AttributeError, match="nonsense"):
        modelsummary.nonsense  # noqa: B018
