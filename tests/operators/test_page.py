"""docs/operators.md says what the package knows."""

from __future__ import annotations

import pytest
import torch

from modelsummary.operators.table import TABLE
from tests.operators.page import PAGE, overloads, row, rows_of_page


@pytest.mark.skipif(
    f"torch {'.'.join(torch.__version__.split('.')[:2])} " not in PAGE.read_text(), reason="other torch"
)
def test_the_page_is_up_to_date():
    """Operators of libraries that are not imported here have no schema."""
    rows = {name: cells for name, cells in rows_of_page().items() if overloads(name) or "." not in name}
    assert len(rows) > 200
    assert {name: row(name) for name in rows} == rows, "run python -m tests.operators"


def test_no_operator_lacks_a_fact():
    rows = rows_of_page()
    assert {".".join(name.split(".")[:2]) for name in TABLE if overloads(name)} <= rows.keys()
    assert not [name for name, cells in rows.items() if len(cells) != 7 or not all(cells)]


def test_rows():
    assert row("aten.addmm") == ("`aten.addmm`", "own", "all", "own", "rule", "-", "-")
    assert row("aten.native_batch_norm")[3:6] == (
        "batch_norm",
        "rule device",
        "running_mean (training), running_var (training)",
    )
    assert row("aten.embedding")[1:4] == ("none", "rows", "index")
    assert row("aten.bernoulli_")[1:] == ("none", "result", "elementwise", "meta", "self", "yes")
    assert row("aten.view")[1:4] == ("none", "none", "none")
