"""The code in README and docs runs, and says what it shows."""

from __future__ import annotations

import importlib.util
import inspect
import re
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

import modelsummary
from modelsummary import Statistics
from modelsummary.cli import run
from modelsummary.devices import device_table
from modelsummary.files.statistics import FileStatistics
from modelsummary.findings.ruleset import RULES
from modelsummary.operators import table
from modelsummary.split.schedule import ORDERS
from modelsummary.views.columns import COLUMNS

ROOT = Path(__file__).parents[1]


def blocks(path, language):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / path).read_text(), re.DOTALL)


TORCHINFO = pytest.param("torchinfo", marks=pytest.mark.filterwarnings("ignore:`torch.jit"))
OLD_EXPORTS = "torch 2.6 saves the weights of exported programs as a pickle, which is not read"
PAGES = "start extending usage cost formulas split parallel cluster latency memory serving hugging_face export views"
NAMES = [*f"{PAGES} files fx ci values internals".split(), TORCHINFO]


@pytest.fixture
def tables():
    """Take out again what a page adds to the tables of the package."""
    before = [(rows, dict(rows)) for rows in (table.TABLE, device_table.TABLE, RULES, COLUMNS, ORDERS)]
    yield
    for rows, entries in before:
        rows.clear()
        rows.update(entries)


@pytest.mark.usefixtures("tables")
@pytest.mark.parametrize("name", NAMES)
def test_code_runs_and_comments_are_true(name, tmp_path, monkeypatch):
    if name == "torchinfo":
        pytest.importorskip("torchinfo")
    if name == "files":
        pytest.importorskip("onnxruntime")
    if name == "hugging_face":
        pytest.importorskip("transformers")
    if name == "serving":
        pytest.importorskip("transformers", minversion="5.21")  # the cache "fp8"
    if name == "parallel" and torch.__version__ < "2.10":
        pytest.skip("the memory of a rank needs torch 2.10")
    if name == "files" and torch.__version__ < "2.11":
        pytest.skip(OLD_EXPORTS)
    monkeypatch.chdir(tmp_path)
    namespace = {}
    for block in blocks(f"docs/{name}.md", "python"):
        exec(block, namespace)
        for line in block.splitlines():
            expression, _, expected = line.partition("# ")
            if expected.startswith(("[", "'")) or expected.isdigit():
                assert repr(eval(expression, namespace)) == expected, line


def readme_blocks():
    """Yield the code of each section, and the output printed below it."""
    for section in (ROOT / "README.md").read_text().split("\n## "):
        for code, printed in re.findall(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", section, re.DOTALL):
            yield pytest.param(code, printed, id=section.partition("\n")[0])


@pytest.mark.parametrize(("block", "printed"), list(readme_blocks()))
def test_readme_block_runs_alone(block, printed, tmp_path, monkeypatch, capsys):
    pytest.importorskip("torchvision.models", exc_type=(ImportError, RuntimeError))
    if "torch.export.save" in block and torch.__version__ < "2.11":
        pytest.skip(OLD_EXPORTS)
    monkeypatch.chdir(tmp_path)
    namespace = {}
    exec(block, namespace)
    if printed:
        assert capsys.readouterr().out == printed
    for line in block.splitlines():
        expression, _, expected = line.partition("  # ")
        if expected == "True" or expected.isdigit():
            assert repr(eval(expression, namespace)) == expected, line


def test_readme_commands(capsys, tmp_path, monkeypatch):
    pytest.importorskip("torchvision", exc_type=(ImportError, RuntimeError))
    commands = [line for block in blocks("README.md", "sh") for line in block.splitlines() if "torchvision:" in line]
    assert commands
    monkeypatch.chdir(tmp_path)
    for line in commands:
        program, *arguments = shlex.split(line, comments=True)
        assert program == "modelsummary"
        assert run(arguments) == 0
        assert capsys.readouterr().out


def test_the_table_in_the_page_on_torchinfo(capsys):
    exec(blocks("docs/torchinfo.md", "python")[0], {})
    assert capsys.readouterr().out == blocks("docs/torchinfo.md", "text")[0]


def test_the_tables_of_large_models_fit_a_screen():
    tables = blocks("docs/tables.md", "text")
    assert len(tables) == 5
    assert all(len(table.splitlines()) <= 60 for table in tables)
    assert all(len(line) <= 120 for table in tables for line in table.splitlines())


@pytest.mark.slow
def test_the_tables_of_large_models_are_those_printed():
    for library in ("torchvision", "transformers", "segmentation_models_pytorch"):
        pytest.importorskip(library, exc_type=(ImportError, RuntimeError))
    subprocess.run([sys.executable, "tools/tables.py", "--check"], cwd=ROOT, check=True)


def test_the_tests_and_files_that_a_page_names_exist():
    text = (ROOT / "docs/internals.md").read_text()
    tests = "\n".join(path.read_text() for path in ROOT.glob("tests/**/test_*.py"))
    names = re.findall(r"`(test_\w+)`", text)
    assert len(names) > 10
    assert [name for name in names if f"def {name}(" not in tests] == []
    paths = re.findall(r"`((?:\w+/)+(?:\w+\.\w+)?)`", text)
    assert "capture/state/held.py" in paths
    assert [path for path in paths if not any((root / path).exists() for root in (ROOT, ROOT / "modelsummary"))] == []


def names_in(path):
    return re.findall(r"`([a-z_]+)`", (ROOT / path).read_text())


def test_every_number_in_the_definitions_exists():
    names = names_in("docs/numbers.md")
    known = set(dir(FileStatistics)) | set(dir(modelsummary.LayerInfo("", "", "", 0, None)))
    assert {name for name in names if not name.endswith("_")} <= known | COLUMNS.keys() | set(modelsummary.__all__)


def test_every_column_is_listed_and_every_number_defined():
    assert COLUMNS.keys() <= set(names_in("docs/usage.md"))
    defined = set(names_in("docs/numbers.md")) | set(names_in("docs/latency.md"))
    numbers = {name for name, column in COLUMNS.items() if column.kind not in ("text", "shape")} - {"mult_adds"}
    assert {name.removeprefix("self_").replace("_self_", "_") for name in numbers} <= defined | {"params"}


def test_every_page_is_in_llms_txt_under_its_title():
    text = (ROOT / "docs/llms.txt").read_text()
    tutorials = {path.name for path in (ROOT / "docs/tutorials").glob("*.ipynb")}
    assert set(re.findall(r"\(_sources/tutorials/(\w+\.ipynb)\.txt\): .", text)) == tutorials
    linked = re.findall(r"^- \[(.+)\]\(_sources/(\w+)\.md\.txt\): .", text, re.M)
    pages = {path.stem: path.read_text().partition("\n")[0] for path in (ROOT / "docs").glob("*.md")}
    assert {name: f"# {title}" for title, name in linked} | {"index": pages["index"]} == pages


def test_the_api_pages_have_every_public_name():
    pages = {path.stem: path.read_text() for path in (ROOT / "docs/api").glob("*.md")}
    text = "\n".join(pages.values())
    listed = {name.removeprefix("modelsummary.") for name in re.findall(r"^\.\. auto\w+:: ([\w.]+)", text, re.M)}
    assert set(modelsummary.__all__) - {"fx"} | set(modelsummary.fx.__all__) <= listed
    assert not [name for name in listed if re.search(r"\b_", name)]
    arguments = re.search(r":: Statistics\((.*)\)", text).group(1)  # __new__ hides those of __init__
    names = [each.partition("=")[0].lstrip("*") for each in arguments.split(", ")]
    assert names == list(inspect.signature(Statistics.__init__).parameters)[1:]
    rows = re.findall(r"^\| \[.*\]\(api/(\w+)\.md\) \| (.*) \|$", (ROOT / "docs/api.md").read_text(), re.M)
    assert {stem: re.findall(r"`(\w+)`", row) for stem, row in rows} == {
        stem: re.findall(r"^\.\. auto(?:class|function|exception):: (?:\w+\.)*(\w+)", page, re.M)
        + [name for module in re.findall(r"automodule:: (\S+)", page) for name in import_module(module).__all__]
        for stem, page in pages.items()
    }


def test_the_table_of_other_tools():
    """Those that the tests install; the script measures the others in the same way."""
    pytest.importorskip("torchinfo")
    pytest.importorskip("torchvision", exc_type=(ImportError, RuntimeError))
    spec = importlib.util.spec_from_file_location("peers", ROOT / "benchmarks/peers.py")
    peers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(peers)
    text = (ROOT / "docs/peers.md").read_text()
    cases = [case for case in peers.CASES if case[0] in ("torchinfo", "torch")]
    assert len(cases) == 4
    for _, _, name, size, theirs, ours in cases:
        there, here = peers.quietly(theirs, name, size), peers.quietly(ours, name, size)
        assert re.search(rf"{re.escape(name)}[^|]*, {'x'.join(map(str, size))} \| {there:,} \| {here:,} ", text)
