"""The tables of LATENCY.md and docs/latency.md: what the file of errors says, and what measurements say."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("MODELSUMMARY_MEASUREMENTS", "nowhere"))


@pytest.fixture
def page(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import latency_page

    yield latency_page
    for name in ("latency_page", "single_kernels"):
        sys.modules.pop(name, None)


def test_the_tables_are_those_of_the_errors(page):
    texts = [path.read_text(encoding="utf-8") for path in page.PAGES]
    errors = json.loads(page.JSON.read_text(encoding="utf-8"))
    assert [page.written(text, errors) for text in texts] == texts
    assert [[name for name in page.tables(errors) if f"\n| {name} |" in text] for text in texts] == [
        [page.SINGLE, page.PRODUCTS, page.STEPS],
        [page.BY_DEVICE],
    ]
    errors[page.STEPS]["a100"]["bias"] += 0.02
    assert page.written(texts[0], errors) != texts[0]
    errors[page.STEPS]["a100"]["error"] += 0.02
    assert page.written(texts[1], errors) != texts[1]


def test_cells_and_columns(page):
    errors = {
        page.SINGLE: {"products": {"A100": 0.0754, "V100": 0.2}, "softmax": {"A100": 0.1}},
        page.PRODUCTS: {"ours": {"A100": 0.1}, "others": {"H100": 0.3}},
        page.STEPS: {"a100": {"count": 120, "error": 0.05, "bias": -0.013, "within 0.1": 0.82}},
    }
    tables = page.tables(errors)
    assert tables[page.SINGLE].splitlines()[2:] == ["| products | 7.5 % | 20.0 % |", "| softmax | 10.0 % | |"]
    assert tables[page.PRODUCTS].splitlines()[2:] == ["| ours | 10.0 % | |", "| others | | 30.0 % |"]
    assert tables[page.STEPS].splitlines()[-1] == "| GPT training iterations, A100 | 120 | 5.0 % | -1.3 % | 82 % |"
    assert tables[page.BY_DEVICE].splitlines()[2:] == [
        "| A100 | 7.5 to 10.0 % | 10.0 % | 5.0 % | 82.0 % |",
        "| V100 | 20.0 % | | | |",
        "| H100 | | 30.0 % | | |",
    ]


@pytest.mark.slow
@pytest.mark.skipif(not DATA.exists(), reason="needs the published measurements")
def test_measurements_give_the_errors_of_single_kernels(page):
    for name in ("numpy", "scipy"):
        pytest.importorskip(name)
    from single_kernels import without_unseen

    from modelsummary.devices.kernel_time import fits

    fit, unseen = without_unseen(DATA, fits()["coefficients"])
    stored = json.loads(page.JSON.read_text(encoding="utf-8"))[page.SINGLE]
    for group, errors in fit.errors(unseen).items():
        assert errors == pytest.approx(stored[group], abs=0.005), group
