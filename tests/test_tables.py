"""Tables of text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelsummary.tables import Report, table

TEXTS = st.text(alphabet="abc .", max_size=30)
CELLS = st.lists(st.tuples(TEXTS, TEXTS, st.integers(0, 10**12)), max_size=4)


def test_spaces_in_cells_are_kept_and_numbers_stand_as_given():
    assert table([["  a", "1.50"], ["b", "12"]], ["", "n"], "lr").splitlines() == [
        "        n",
        "  a  1.50",
        "b      12",
    ]


def test_without_rows_the_totals_stand_below_the_header():
    report = Report([], ["Name", "n"], "lr", sections=[["one", "two"]], totals=["Total", 3])
    lines = report.text().splitlines()
    rule = "=" * len(lines[1])
    assert lines == [rule, "Name      n", rule, "Total     3", rule, "one", "two", rule]


def test_styles_for_documents():
    assert table([["a", 1]], ["x", "y"], "lr", "pipe").splitlines()[1] == "|:----|----:|"


@pytest.mark.parametrize("sections", [None, [["a line"]]])
@given(rows=CELLS, headers=st.tuples(TEXTS, TEXTS, TEXTS), width=st.integers(1, 120))
def test_a_table_is_not_wider_than_asked(sections, rows, headers, width):
    """A title takes two characters more than it has. Texts and their titles are cut down to eight, numbers are not."""
    report = Report(rows, headers, "llr", sections=sections).leaving_out(width, headers[1]).shortened(width)
    numbers = max([len(report.headers[-1]) + 2, *(len(str(row[-1])) for row in rows)])
    least = (8 + 2) * (len(report.headers) - 1) + numbers
    assert report.width <= max(width, least)
    assert all(len(line) <= report.width for line in report.text().splitlines() if line != "a line")


def test_a_text_that_is_cut_has_its_beginning_and_its_end():
    report = Report([["encoder.layers.0.attention", 12345678]], ["Name", "n"], "lr")
    assert report.shortened(24).rows == [["encoder…ention", 12345678]]
    assert report.shortened(1).rows == [["enco…ion", 12345678]]
    assert report.shortened(100) == report
