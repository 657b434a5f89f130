"""Tables of text."""

import io
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelsummary.tables import Report, Screen, screen_of_output, table

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
    assert report.shortened(24).rows == [["enc….attention", 12345678]]  # the last name stays whole if it has room
    assert report.shortened(20).rows == [["encod…tion", 12345678]]
    assert report.shortened(1).rows == [["enco…ion", 12345678]]
    assert report.shortened(100) == report


@given(
    rows=CELLS,
    headers=st.tuples(TEXTS, TEXTS, TEXTS),
    width=st.integers(45, 120),
    align=st.sampled_from(["llr", "lpr"]),
)
def test_a_report_is_not_wider_than_its_page_and_names_what_it_lacks(rows, headers, width, align):
    lines = ["some words " * 30]
    report = Report(rows, [*headers[:2], "Other"], align, above=lines, below=lines, optional=["Other"])
    text = report.text(Screen(width))
    assert all(len(line) <= width for line in text.splitlines() if not line.startswith("Left out"))
    assert " ".join(text.split()).count(lines[0].strip()) == 2
    assert ("Left out" in text) == (len(report.fitted(Screen(width)).headers) < 3)


def test_the_last_numbers_go_where_not_all_have_room():
    report = Report([["encoder.layers.0", 10**9, 10**9, 10**9]], ["Name", "One", "Two", "Three"], "lrrr", sections=[])
    assert report.fitted(Screen(52)).headers == report.headers
    assert report.fitted(Screen(51)).headers == ["Name", "One", "Two"]  # rather than a name of less than 16 characters
    fitted = report.fitted(Screen(40))
    assert fitted.headers == ["Name", "One", "Two"]
    assert fitted.sections == [["Left out, as 40 characters have no room: Three"]]
    assert report.fitted(Screen(10)).headers == ["Name", "One"]


def test_long_words_of_prose_are_cut():
    report = Report([["a", f"by {'w' * 60} twice"]], ["Name", "Why"], "lp")
    assert max(map(len, report.text(Screen(40)).splitlines())) <= 40
    assert "twice" in report.text(Screen(40))


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "cp437", "utf-8"])
def test_a_page_has_only_characters_of_its_encoding(encoding):
    report = Report([["│    └─Linear ≥ 8 é"]], ["Layer"], "l", sections=[["×"]]).text(Screen(20, encoding))
    assert report.encode(encoding).decode(encoding) == report
    assert ("│" in report) == (encoding in ("cp437", "utf-8"))
    assert "Linear" in report


class _WritesAlone:
    def write(self, text):
        return len(text)


def _closed():
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [None, _closed(), _WritesAlone()])
def test_reports_do_not_need_a_terminal(monkeypatch, stream):
    monkeypatch.setattr(sys, "stdout", stream)
    assert screen_of_output() == Screen()


def test_equal_blocks_are_one_row():
    rows = [["layers.0.fc", "8"], ["layers.0.bias", "1"], ["layers.1.fc", "8"], ["layers.1.bias", "2"]]
    folded = Report(rows, ["Layer", "n"], "lr").folded("Layer", most=3)
    assert folded.rows == [["layers.*.fc x 2", "8"], ["layers.0.bias", "1"], ["layers.1.bias", "2"]]


def test_an_empty_column_gives_its_room_to_the_title_of_another_one():
    report = Report([["1 x 2", "", 8]], ["Tensor x replicas", "Weights", "Requests"], "llr")
    assert "Weights" in report.fitted(Screen(80)).text()
    narrow = report.fitted(Screen(31)).text().splitlines()
    assert narrow == ["Tensor x replicas      Requests", "1 x 2                         8"]
