"""The examples in the package's docstrings run and print what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import modelsummary

NAMES = sorted(found.name for found in pkgutil.walk_packages(modelsummary.__path__, "modelsummary."))
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
FINDER = doctest.DocTestFinder(exclude_empty=True)


def examples():
    for name in NAMES:
        if name.endswith("__main__"):
            continue
        try:
            module = importlib.import_module(name)
        except ImportError:  # an optional library
            continue
        yield from (found for found in FINDER.find(module, name) if found.examples)


@pytest.mark.parametrize("example", list(examples()), ids=lambda example: example.name.removeprefix("modelsummary."))
def test_example(example):
    runner = doctest.DocTestRunner(optionflags=OPTIONS, verbose=False)
    said = []
    runner.run(example, out=said.append)
    if runner.failures and "MissingExtraError" in "".join(said):
        pytest.skip("needs an optional library")
    assert runner.failures == 0, "".join(said)
