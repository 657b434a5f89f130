"""What a notebook shows: every result is a table, and nothing in it is markup."""

from __future__ import annotations

from contextlib import redirect_stdout
from html.parser import HTMLParser
from io import StringIO

import pytest
from torch import nn

from modelsummary import DeviceSpec, ForwardError, Statistics
from modelsummary.cluster import Cluster
from tests.models import Call


class Reader(HTMLParser):
    """The cells of the tables in a page, its text, and the names of its elements."""

    def __init__(self, page):
        super().__init__()
        self.cells, self.text, self.tags, self.inside = [], "", set(), False
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.inside = tag in ("td", "th")
        if self.inside:
            self.cells.append("")

    def handle_endtag(self, tag):
        self.inside = self.inside and tag not in ("td", "th")

    def handle_data(self, data):
        self.text += f"{data} "
        if self.inside:
            self.cells[-1] += data


@pytest.fixture(scope="module")
def stats():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    model.add_module("<b>&", nn.Linear(8, 4))
    return Statistics(model, (2, 4))


SHOWN = {
    "row": (lambda stats: stats["0"], "num_params"),
    "rows": (lambda stats: stats.top(2), "<b>&"),
    "device": (lambda stats: DeviceSpec("A100"), "2.04 TB/s"),
    "cluster": (lambda stats: Cluster.preset("DGX A100", nodes=2), "network interface"),
    "memory": (lambda stats: stats.memory(optimizer="sgd"), "Parameters"),
    "checkpoint plan": (lambda stats: stats.suggest_checkpoint(10**6), "Peak without checkpointing"),
    "kernels": (lambda stats: stats.kernels("A100"), "gemm"),
    "roofline": (lambda stats: stats.roofline("A100"), "<b>&"),
    "stages": (lambda stats: stats.split(2), "<b>&"),
    "schedule": (lambda stats: stats.split(2).predict(4), "Waiting"),
    "plans": (lambda stats: stats.plan(Cluster("A100", devices_per_node=2), global_batch=8), "Bubble"),
    "parallel plan": (lambda stats: stats.parallel_plan(tensor=2), "ColwiseParallel"),
    "diff": (lambda stats: stats.diff(Statistics(nn.Linear(4, 8), (2, 4))), "Total"),
}


@pytest.mark.parametrize("what", SHOWN)
def test_a_result_is_a_table(stats, what):
    make, cell = SHOWN[what]
    result = make(stats)
    page = Reader(result._repr_html_())
    assert cell in [each.replace("\N{NO-BREAK SPACE}", " ").strip() for each in page.cells]
    assert page.tags <= {"div", "table", "thead", "tbody", "tr", "th", "td"}
    assert "<th>" not in result._repr_html_()  # notebooks would align it to the right, browsers center it
    if what in ("row", "device", "cluster"):
        assert "\n" not in repr(result)  # as part of other texts and of messages
    else:
        assert repr(result) == str(result)  # a terminal shows the table, too
    text = str(result).partition("Left out")[0]
    words = set(text.split()) - {word for word in text.split() if set(word) <= {"="}}
    assert words <= set(page.text.replace("\N{NO-BREAK SPACE}", " ").split())


def test_a_row_has_its_words_left_and_its_numbers_right(stats):
    lines = stats["0"]._repr_html_().splitlines()
    words = next(line for line in lines if "class_name" in line)
    number = next(line for line in lines if "num_params" in line)
    assert words.rpartition("<td style=")[2].startswith('"text-align: left;">Linear')
    assert '<td style="text-align: right;">' in number
    assert "40</td>" in number


def test_an_error_in_a_notebook_has_no_frame_of_the_package(stats):
    shell = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell()
    shell.user_ns["stats"] = stats
    with redirect_stdout(StringIO()) as output:
        shell.run_cell("stats.memory(optimizer='sdg')")
    text = output.getvalue()
    assert "InputError: " in text
    assert "stats.memory(optimizer='sdg')" in text
    assert "modelsummary/" not in text
    assert len(text.splitlines()) <= 4


def test_an_error_of_a_forward_in_a_notebook_has_the_frames_of_the_forward():
    model = Call(lambda self, x: self.second(self.first(x)), first=nn.Linear(4, 8), second=nn.Linear(4, 8))
    with pytest.raises(ForwardError) as caught:
        Statistics(model, (2, 4))
    text = "\n".join(caught.value._render_traceback_())
    assert "second=nn.Linear(4, 8)" in text  # the line of the lambda
    assert "RuntimeError: mat1 and mat2" in text
    assert "ForwardError: forward of second (Linear) failed" in text
    assert "modelsummary/" not in text
    assert "torch/nn/" not in text
