"""The examples in the package's docstrings run and print what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from importlib.util import find_spec
from pathlib import Path

import pytest

import modelsummary

NAMES = sorted(found.name for found in pkgutil.walk_packages(modelsummary.__path__, "modelsummary."))
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
FINDER = doctest.DocTestFinder(exclude_empty=True)


def has_examples(name):
    """Look without importing: some modules need libraries that take seconds, and are imported by their test alone."""
    return not name.endswith("__main__") and ">>>" in Path(find_spec(name).origin).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", list(filter(has_examples, NAMES)))
def test_examples(name):
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"needs an optional library: {error}")
    examples = FINDER.find(module, name)
    assert any(example.examples for example in examples)
    missing = []
    for example in examples:
        runner, said = doctest.DocTestRunner(optionflags=OPTIONS, verbose=False), []
        runner.run(example, out=said.append)
        if runner.failures and "MissingExtraError" in "".join(said):
            missing.append(example.name)
            continue
        assert runner.failures == 0, "".join(said)
    if missing:
        pytest.skip(f"{', '.join(missing)} need an optional library")
