"""Names from a model or a file in every output: nothing acts on a terminal, runs in a page, or is a formula."""

from __future__ import annotations

import csv
import io
import shutil
import sys
import unicodedata
import xml.etree.ElementTree as ET

import pytest
from torch import nn

from modelsummary import Statistics
from modelsummary.errors import harmless

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
RUNS = "window.ran=1"
NAMES = [
    *("\x1b[31mred", "\x1b]0;title\x07", "\x9b2J", "\u202eabc", "\u2066a\u2069", "a\nb", "a\r\nb", "a\tb", "\x08\x08"),
    *("=cmd|'/c calc'!A0", "=1+1", "+1", "-1+2", "@SUM(1)", "\t=1", "\u2028x", "\u200bx", "\ufeffx", "\ud800", "\x7f"),
    *(f"</script><script>{RUNS}</script>", f"<script>{RUNS}</script>", f"<img src=x onerror={RUNS}>", "<!--", "]]>"),
    *(f'"onmouseover="{RUNS}', f"'onload='{RUNS}", f"javascript:{RUNS}", f"<svg onload={RUNS}>", "&lt;script&gt;"),
    *(f"</style><script>{RUNS}</script>", f"</title><script>{RUNS}</script>", f"`${{{RUNS}}}`", "{{constructor}}"),
    *("\\u003cscript\\u003e", "\\input{x}", "$x$", "a|b", "`x`", f"<iframe srcdoc='<script>{RUNS}</script>'>"),
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in NAMES:
            kind = type(name.encode(errors="replace").decode(), (nn.Linear,), {})
            self.add_module(name.replace(".", "_"), kind(4, 4))

    def forward(self, x):
        for module in self.children():
            x = module(x)
        return x


@pytest.fixture(scope="module")
def stats() -> Statistics:
    assert len(NAMES) == 40
    return Statistics(Net(), (2, 4))


def acting(text: str) -> set[str]:
    """Characters that act on a terminal, other than ends of lines and tabs."""
    return {
        each for each in text if each not in "\r\n\t" and unicodedata.category(each) in ("Cc", "Cf", "Cs", "Zl", "Zp")
    }


@pytest.mark.parametrize(
    "written",
    [
        str,
        lambda stats: stats.to_csv(),
        lambda stats: stats.to_markdown(),
        lambda stats: stats.to_latex(),
        lambda stats: stats.to_html(),
        lambda stats: stats.to_html(foldable=True),
        lambda stats: stats.latency_report(),
        lambda stats: stats.profile_report(),
        lambda stats: repr(list(stats)),
        lambda stats: str(stats.memory(optimizer="sgd")),
        lambda stats: str(stats.diff(stats)),
        lambda stats: str(stats.split(2)),
        lambda stats: stats.graph().to_svg(),
        lambda stats: stats.graph().to_dot(),
        lambda stats: stats.graph().to_mermaid(),
    ],
)
def test_no_text_has_controls(stats, written) -> None:
    assert acting(written(stats)) == set()


def test_an_estimate_has_the_characters_of_its_screen(monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    model = type("Caf\xe9\x1b[31m", (nn.Linear,), {})(4, 4)
    estimate = Statistics(model, (2, 4)).estimate_latency("A100")
    assert str(estimate).startswith("Caf?\\x1b[31m, [2, 4], float32, forward, eager on A100 80GB: ")


def test_data_keep_the_names(stats) -> None:
    assert {row["name"] for row in stats.to_records()} - {""} == {name.replace(".", "_") for name in NAMES}


def test_csv_has_no_formulas_and_keeps_numbers(stats) -> None:
    rows = list(csv.DictReader(io.StringIO(stats.to_csv(columns=["name", "class_name", "macs"]))))
    texts = [row[column] for row in rows for column in ("name", "class_name")]
    assert not [text for text in texts if text.lstrip()[:1] in tuple("=+-@")]
    assert [row["macs"] for row in rows[1:]] == ["32"] * 40  # 2 x 4 x 4


def test_pictures_are_xml(stats) -> None:
    assert ET.fromstring(stats.graph().to_svg()).tag.endswith("svg")


def test_harmless_keeps_other_text() -> None:
    text = "├─ Linéar 層\u00a0\t1\n🙂"
    assert harmless(text) == text


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_pages_run_nothing(stats, tmp_path) -> None:
    sync_api = pytest.importorskip("playwright.sync_api")
    stats.explore(tmp_path / "explorer.html", memory=stats.memory(optimizer="sgd"))
    (tmp_path / "graph.svg").write_text(stats.graph().to_svg())
    pages = {
        "tree.html": stats.to_html(foldable=True),
        "table.html": stats.to_html(),
        "memory.html": stats.memory(optimizer="sgd")._repr_html_(),
        "stages.html": stats.split(2)._repr_html_(),
        "row.html": list(stats)[-1]._repr_html_(),
    }
    for name, html in pages.items():
        (tmp_path / name).write_text(f"<!DOCTYPE html><meta charset=utf-8>{html}")
    with sync_api.sync_playwright() as library:
        browser = library.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for name in ("explorer.html", "graph.svg", *pages):
            page = browser.new_page()
            troubles: list[str] = []
            page.on(
                "request", lambda request, seen=troubles: request.url.startswith("file:") or seen.append(request.url)
            )
            page.on("pageerror", lambda error, seen=troubles: seen.append(str(error)))
            page.goto((tmp_path / name).as_uri())
            if name == "explorer.html":
                page.wait_for_selector("body[data-ready]")
            page.evaluate("document.querySelectorAll('*').forEach(e => e.dispatchEvent(new Event('mouseover')))")
            assert (name, page.evaluate("window.ran === undefined"), troubles) == (name, True, [])
            assert page.locator("img, iframe").count() == 0
            page.close()
        browser.close()
