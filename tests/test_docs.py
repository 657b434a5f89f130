"""The code in README and docs runs, and says what it shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import modelsummary
from modelsummary import Statistics
from tests.test_text import TABLE, Small

ROOT = Path(__file__).parents[1]


def blocks(path, language):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / path).read_text(), re.DOTALL)


@pytest.mark.parametrize("name", ["usage", "numbers", "split", "latency", "memory", "export", "fx"])
def test_code_runs_and_comments_are_true(name):
    namespace = {}
    for block in blocks(f"docs/{name}.md", "python"):
        exec(block, namespace)
        for line in block.splitlines():
            expression, _, expected = line.partition("# ")
            if expected.startswith(("[", "'")) or expected.isdigit():
                assert repr(eval(expression, namespace)) == expected, line


def test_readme_example():
    models = pytest.importorskip("torchvision.models", exc_type=(ImportError, RuntimeError))
    block, splits, times, memory, graph = blocks("README.md", "python")
    lines = block.strip().splitlines()
    expression, expected = lines[-1].split("  # ")
    namespace = {"resnet152": models.resnet152}
    exec("\n".join(lines[:-2]), namespace)
    assert eval(expression, namespace) == int(expected)
    exec(splits.splitlines()[0], namespace)
    (table,) = (text.strip() for text in blocks("README.md", "text") if "Crossing" in text)
    assert str(namespace["stages"]) == table
    small = models.resnet18().train()
    namespace |= {"model": small, "stats": Statistics(small, (2, 3, 32, 32)), "modelsummary": modelsummary}
    namespace["train"] = lambda model: model(torch.rand(2, 3, 32, 32))
    exec(times, namespace)
    exec(memory, namespace)
    exec(graph, {**namespace, "torch": torch})


def test_the_table_in_the_readme():
    assert TABLE in (ROOT / "README.md").read_text()
    assert str(Statistics(Small(), torch.rand(1, 1, 4, 4))) == TABLE


def test_every_number_in_the_definitions_exists():
    text = (ROOT / "docs/numbers.md").read_text()
    names = re.findall(r"`([a-z_]+)`", text.partition("## Where")[0])
    known = set(dir(modelsummary.ModelStatistics)) | set(dir(modelsummary.LayerInfo("", "", "", 0, None)))
    assert {name for name in names if not name.endswith("_")} <= known | set(modelsummary.__all__)
