"""Tables of text."""

from modelsummary.tables import ruled_table, table


def test_spaces_in_cells_are_kept_and_numbers_stand_as_given():
    assert table([["  a", "1.50"], ["b", "12"]], ["", "n"], "lr").splitlines() == [
        "        n",
        "  a  1.50",
        "b      12",
    ]


def test_without_rows_the_totals_stand_below_the_header():
    lines = ruled_table([], ["Name", "n"], "lr", [["one", "two"]], totals=["Total", 3]).splitlines()
    rule = "=" * len(lines[1])
    assert lines == [rule, "Name      n", rule, "Total     3", rule, "one", "two", rule]


def test_styles_for_documents():
    assert table([["a", 1]], ["x", "y"], "lr", "pipe").splitlines()[1] == "|:----|----:|"
