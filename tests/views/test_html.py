"""The tree for notebooks: what is in the page, and what its script does in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

from modelsummary import InputError, Statistics
from tests.models import Call
from tests.untouched import untouched

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


class Page(HTMLParser):
    """Rows and what is wrong with the nesting."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.names = [], [], []
        self._in_name = False
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.open.append(tag)
        self._in_name = dict(attrs).get("class") == "ms-name" or self._in_name

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        self._in_name = self._in_name and tag != "span"

    def handle_data(self, data):
        if self._in_name and self.open[-1] == "span":
            self.names.append(data.strip())


def blocks(count, width=4):
    block = lambda: nn.Sequential(*(nn.Linear(2, 2) for _ in range(width)))  # noqa: E731
    return nn.Sequential(*(block() for _ in range(count)))


def test_a_small_model_is_all_there():
    model = nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 2)))
    with untouched(model):
        text = Statistics(model, (2, 4))._repr_html_()
    page = Page(text)
    assert [name for name in page.names if name] == [
        "Sequential", "0", "Linear", "1", "Sequential", "0", "ReLU", "1", "Linear",
    ]  # fmt: skip
    assert '"rows":{},"children":{}' in text
    # Linear 4 -> 3 for a batch of 2: 15 of 23 parameters, 24 of 36 multiply-adds
    assert re.findall(r"--share:([\d.]+)%>([\d,]+)<", text) == [
        ("100.0", "23"), ("100.0", "36"), ("65.2", "15"), ("66.7", "24"), ("34.8", "8"), ("33.3", "12"), ("34.8", "8"),
        ("33.3", "12"),
    ]  # fmt: skip
    assert "Total params: 23" in text
    assert not re.search(r"https?://|src=|@import|url\(", text)


def test_what_users_wrote_is_shown_not_run():
    evil = "<script>alert(1)</script>&\"'"
    model = Call(lambda self, x: self.get_submodule(evil)(x), **{evil: blocks(100)})
    text = Statistics(model, (1, 2))._repr_html_()
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;&amp;" in text
    many = nn.Module()
    many.forward = lambda x: x
    for number in range(500):
        many.add_module(f"{evil}{number}", nn.Identity())
    text = Statistics(many, torch.zeros(1))._repr_html_()
    assert "<script>alert" not in text
    assert "\\u003cscript\\u003ealert" in text


@pytest.mark.parametrize("model", [blocks(1000), blocks(5, 1000), nn.Sequential(*(nn.Identity() for _ in range(5000)))])
def test_large_models_stay_small(model):
    stats = Statistics(model, (1, 2))
    text = stats._repr_html_()
    assert len(stats) >= 5000
    assert len(text) < 10**6
    assert len(Page(text).names) < 1000  # the others are data until their parent is opened


def test_depth_and_columns():
    stats = Statistics(blocks(3), (1, 2), depth=1)
    assert len(re.findall(r"<details[^>]* open", stats._repr_html_())) == 1
    assert len(re.findall(r"<details[^>]* open", Statistics(blocks(3), (1, 2))._repr_html_())) == 4
    text = stats.to_html(columns=["num_params", "kernel_size"], foldable=True, units="K")
    assert "Param # (K)" in text
    assert "Kernel Shape" in text
    with pytest.raises(InputError, match="unknown column 'nope'"):
        stats.to_html(columns=["nope"], foldable=True)
    assert "Input Shape" not in Statistics(blocks(3)).to_html(columns=["num_params"], foldable=True)


def test_shares_are_parts_of_the_model():
    model = nn.Sequential(
        nn.Linear(4, 4), nn.Linear(4, 1, bias=False)
    )  # 20 and 4 of 24 parameters, 32 and 8 of 40 MACs
    text = Statistics(model, (2, 4)).to_html(columns=["num_params", "mult_adds", "output_bytes"], foldable=True)
    assert re.findall(r"--share:([\d.]+)%", text) == ["83.3", "80.0", "16.7", "20.0"]
    assert "data-value=20 " in text


def test_bundle():
    stats = Statistics(blocks(2), (1, 2))
    assert stats._repr_mimebundle_(include=None, exclude=None) == {
        "text/plain": str(stats),
        "text/html": stats.to_html(foldable=True),
    }


def test_equal_rows_are_one_row():
    """30 blocks of 4 equal layers: the model, a block, a layer. Figures are of one, the bars behind them of all."""
    stats = Statistics(blocks(30), (1, 2))
    text = stats._repr_html_()
    assert [name for name in Page(text).names if name] == ["Sequential", "0 .. 29", "Sequential", "0 .. 3", "Linear"]
    assert re.findall(r"--share:([\d.]+)%>([\d,]+)<", text) == [
        ("100.0", "720"), ("100.0", "480"), ("100.0", "24"), ("100.0", "16"), ("100.0", "6"), ("100.0", "4"),
    ]  # fmt: skip
    assert text.count('class="ms-times"') == 1  # the layers in all blocks are shown one by one after the blocks
    assert 'title="Show them one by one">× 30</button>' in text
    every = stats.to_html(foldable=True, fold=False)
    assert "×" not in every
    assert len([name for name in Page(every).names if name]) == 2 * (1 + 30 + 120) - 1


def test_small_trees_are_folded_on_request():
    stats = Statistics(blocks(2, 3), (1, 2))
    assert "×" not in stats._repr_html_()
    assert "× 2</button>" in stats.to_html(foldable=True, fold=True)
    assert stats.to_html().count("<tr>") == 1 + 9
    assert stats.to_html(fold=True).count("<tr>") == 1 + 3


def test_measured_times_of_equal_rows_are_their_mean():
    stats = Statistics(nn.Sequential(nn.ReLU(), nn.ReLU()), (1, 2))
    for row, milliseconds in zip(stats.root.walk(), (4.0, 1.0, 3.0), strict=True):
        row.latency_ms = milliseconds
    text = stats.to_html(columns=["latency_ms"], foldable=True, fold=True)
    assert re.findall(r"--share:([\d.]+)%>([\d.]+)<", text) == [("100.0", "4.000"), ("100.0", "2.000")]


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_in_a_browser(tmp_path):
    stats = Statistics(nn.Sequential(nn.Linear(2, 2), blocks(200), nn.Linear(2, 2, bias=False)), (1, 2))
    act = """<script>
      const all = (selector) => [...document.querySelectorAll(selector)];
      const names = () => all(".ms-body .ms-name").map((each) => each.firstChild.textContent.trim());
      const said = {before: names()};
      const press = (text) => all(".ms-times").find((each) => each.textContent === text).click();
      const heads = document.querySelectorAll(".ms-head button");
      press("× 200");
      said.unfolded = names().length;
      heads[3].click();
      said.most = names()[1];
      heads[3].click();
      said.least = names()[1];
      heads[3].click();
      said.order = names().slice(0, 4);
      const inner = document.querySelector(".ms-body > details > details > details");
      inner.open = true;
      setTimeout(() => {
        said.inner = names().slice(2, 6);
        press("× 4");
        said.each = names().slice(3, 8);
        said.focused = document.activeElement.textContent;
        press("fold");
        said.folded = names();
        document.title = JSON.stringify(said);
      }, 50);
    </script>"""
    page = tmp_path / "page.html"
    page.write_text(f"<!doctype html><meta charset=utf-8><title></title><body>{stats._repr_html_()}{act}</body>")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    flags += ["--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}"]
    command = [CHROMIUM, *flags, "--virtual-time-budget=3000", "--dump-dom", page.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    title = re.search("<title>(.*?)</title>", dom)
    assert title is not None
    said = json.loads(title.group(1))
    assert said["before"] == ["Sequential", "0", "1", "0 .. 199", "0 .. 3", "2"]
    assert said["unfolded"] == 4 + 200 + 1  # the first of the blocks is open, as the row of all was
    assert (said["most"], said["least"]) == ("1", "2")  # 200 blocks; the layer without a bias
    assert said["order"] == ["Sequential", "0", "1", "0"]
    assert said["inner"] == ["1", "0", "0 .. 3", "1"]
    assert said["each"] == ["0", "0", "1", "2", "3"]
    assert said["focused"] == "fold"
    assert said["folded"] == said["before"]  # the first "fold" is of the blocks
