"""The page in a browser: what a reader does, no error in its console, and no request."""

from __future__ import annotations

import shutil
import xml.etree.ElementTree as ET

import pytest
import torch
from torch import nn

from modelsummary import Statistics
from tests.views.explorer.pages import NASTY, nasty_model

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4)

    def forward(self, x):
        return x + self.down(self.act(self.up(x)))


class Net(nn.Module):
    """Six equal blocks in a list, and a head that also sees the input."""

    def __init__(self, classes=2):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(8, classes)

    def forward(self, x):
        y = x
        for block in self.blocks:
            y = block(y)
        return self.head(torch.cat([x, y], 1))


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as library:
        browser = library.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    stats = Statistics(Net(), (3, 4))
    memory = stats.memory(optimizer="sgd")
    path = tmp_path_factory.mktemp("pages") / "net.html"
    stats.explore(path, compare=Statistics(Net(5), (3, 4)), memory=memory)
    stats.explore(path.with_name("one.html"), memory=memory)
    return path


@pytest.fixture
def page(browser):
    page = browser.new_page(viewport={"width": 1200, "height": 800})
    troubles = []
    page.on("console", lambda message: troubles.append(message.text))
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("request", lambda request: request.url.startswith(("file:", "data:")) or troubles.append(request.url))
    yield page
    page.close()
    assert troubles == []


def opened(page, path, address=""):
    page.goto(path.as_uri() + address)
    page.wait_for_selector("body[data-ready]")
    return page


@pytest.mark.parametrize("width", [860, 640, 360])
def test_the_toolbar_of_a_narrow_window_is_one_line(page, path, width):
    height = opened(page, path).locator("#bar").bounding_box()["height"]
    page.set_viewport_size({"width": width, "height": 800})
    assert page.locator("#bar").bounding_box()["height"] < 1.5 * height  # a scroll bar takes some
    assert page.evaluate("document.documentElement.scrollWidth") == width
    page.locator("#help").click()  # is scrolled into view
    assert page.locator("#keys").is_visible()


def names(page):
    return page.locator(".canvas:visible .node .name").all_text_contents()


def drawn(page, action):
    """Do something and wait for the picture that follows from it."""
    page.evaluate("delete document.body.dataset.drawn")
    action()
    page.wait_for_selector("body[data-drawn]")


def test_equal_blocks_are_one_node_and_are_unfolded_by_a_click(page, path):
    opened(page, path.with_name("one.html"), "#open=0")
    assert names(page) == ["input", "blocks.0", "cat", "head", "output"]
    assert page.locator(".badge text").all_text_contents() == ["× 6"]
    drawn(page, lambda: page.locator(".badge").dispatch_event("click"))
    assert names(page) == ["input", *(f"blocks.{number}" for number in range(6)), "cat", "head", "output"]


def test_a_block_opens_down_to_its_functions_with_its_skip_connection(page, path):
    opened(page, path.with_name("one.html"), "#open=0")
    assert page.locator(".edge.skip").count() == 1  # from the input to cat
    drawn(page, lambda: page.locator(".node .toggle").dispatch_event("click"))
    assert names(page) == ["input", "up", "act", "down", "add", "cat", "head", "output"]
    assert page.locator(".edge.skip").count() == 2
    assert "each=" not in page.url


def test_an_opened_block_is_unfolded_by_a_click_on_its_number(page, path):
    opened(page, path.with_name("one.html"), "#open=0.3")
    assert page.locator(".head .badge text").all_text_contents() == ["× 6"]
    frame, title = (page.locator(each).first.bounding_box() for each in (".frame", ".head .name"))
    assert title["x"] + title["width"] < frame["x"] + frame["width"]
    drawn(page, lambda: page.locator(".head .badge").dispatch_event("click"))
    assert names(page)[:7] == ["input", "up", "act", "down", "add", "blocks.1", "blocks.2"]


def test_the_address_finds_unfolded_blocks_again(page, path):
    opened(page, path.with_name("one.html"))
    page.locator(".badge").first.dispatch_event("click")
    page.wait_for_function("location.hash.includes('each=')")
    page.wait_for_function("document.querySelectorAll('.badge').length === 0")
    shown = names(page)
    page.reload()
    page.wait_for_selector("body[data-ready]")
    assert names(page) == shown


def test_too_many_nodes_are_told_in_the_picture(page, tmp_path):
    Statistics(nn.Sequential(*(nn.Linear(2, 2) for _ in range(1600)))).explore(tmp_path / "many.html")
    opened(page, tmp_path / "many.html")
    drawn(page, lambda: page.locator(".badge").dispatch_event("click"))
    assert "1,600 nodes are too many to draw" in page.locator(".canvas text").first.text_content()
    page.locator("#tree .times").click()
    page.wait_for_selector(".badge")


class Rotary(nn.Module):
    """Functions without multiply-adds."""

    def forward(self, x):
        return x.sin() + x.cos()


class Stage(nn.Module):
    """A step of a UNet: takes the time step as well as its input."""

    def __init__(self, taken, made):
        super().__init__()
        self.conv, self.time = nn.Conv2d(taken, made, 3, padding=1), nn.Linear(8, made)

    def forward(self, x, time):
        return self.conv(x) + self.time(time)[:, :, None, None]


class UNet(nn.Module):
    """Two stages down, one between, two up that also take the results of the ones down; rotary arithmetic around."""

    def __init__(self):
        super().__init__()
        self.rotary, self.time_embedding, self.conv_in = Rotary(), nn.Linear(8, 8), nn.Conv2d(3, 4, 1)
        self.down_blocks = nn.ModuleList([Stage(4, 4), Stage(4, 6)])
        self.mid_block = Stage(6, 6)
        self.up_blocks = nn.ModuleList([Stage(12, 4), Stage(8, 3)])

    def forward(self, sample, timestep):
        time = self.time_embedding(self.rotary(timestep))
        x = self.conv_in(sample)
        results = []
        for block in self.down_blocks:
            x = block(x, time)
            results.append(x)
        x = self.mid_block(x, time)
        for block in self.up_blocks:
            x = block(torch.cat([x, results.pop()], 1), time)
        return x


def test_what_goes_everywhere_is_a_label_and_no_skip_connection(page, tmp_path):
    """The time embedding goes to five blocks: a line to the first, labels at four. Two skip connections, down to up."""
    Statistics(UNet(), sample=torch.zeros(1, 3, 8, 8), timestep=torch.zeros(1, 8)).explore(tmp_path / "unet.html")
    opened(page, tmp_path / "unet.html", "#open=0")
    blocks = ["down_blocks.0", "down_blocks.1", "mid_block", "up_blocks.0", "up_blocks.1"]
    assert [name for name in names(page) if "block" in name] == blocks
    labels = page.locator("text.edge").evaluate_all("all => all.map((label) => label.firstChild.textContent)")
    assert labels == ["← time_embedding"] * 4
    assert page.locator(".edge.skip").count() == 2
    assert page.locator("#legend").text_content().endswith("skip connections← takes what goes everywhere")
    page.locator("text.edge").first.dispatch_event("click")
    assert page.locator("#facts h2").text_content() == "time_embedding"
    assert page.locator("text.edge.passed").count() == 4
    assert page.locator(".node.input .name").all_text_contents() == ["sample", "timestep"]


def test_modules_without_multiply_adds_are_shut_at_first(page, tmp_path):
    Statistics(UNet(), sample=torch.zeros(1, 3, 8, 8), timestep=torch.zeros(1, 8)).explore(tmp_path / "unet.html")
    opened(page, tmp_path / "unet.html")
    assert "down_blocks.0Stage" in page.locator(".head .name").all_text_contents()
    assert "rotary" in names(page)


def test_expand_all_opens_everything(page, path):
    """A block holds four calls, and the input, cat, head and the output stand beside."""
    opened(page, path.with_name("one.html"), "#open=0")
    drawn(page, lambda: page.keyboard.press("e"))
    assert names(page) == ["input", "up", "act", "down", "add", "cat", "head", "output"]
    assert "blocks.0" in page.locator(".head .name").first.text_content()


def test_an_address_of_another_page_with_an_unknown_view_shows_the_graph(page, path):
    opened(page, path.with_name("one.html"), "#view=changes")
    assert page.locator("body").get_attribute("data-view") == "graph"


def test_long_names_keep_their_beginning_and_their_end(page, tmp_path):
    model = nn.Sequential()
    model.add_module(f"encoder_{'x' * 60}_proj", nn.Linear(2, 2))
    Statistics(model, (1, 2)).explore(tmp_path / "long.html")
    opened(page, tmp_path / "long.html")
    for name in (names(page)[1], page.locator("#tree .name").nth(2).text_content()):
        assert name.startswith("encoder_x")
        assert name.endswith("x_proj")
        assert len(name) < 40


def test_modules_without_known_edges_stand_in_rows(page, tmp_path):
    Statistics(Net()).explore(tmp_path / "bare.html")
    opened(page, tmp_path / "bare.html")
    assert page.locator(".edge").count() == 0
    assert "edges are not known" in page.locator("#legend").text_content()


def test_a_pattern_of_calls_is_shown_once(page, tmp_path):
    """tanh(cell(x)) 400 times: the first cell owns the parameters, the 399 other calls of both are equal."""

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.Linear(4, 4)

        def forward(self, x):
            for _ in range(400):
                x = torch.tanh(self.cell(x))
            return x

    Statistics(Recurrent(), (1, 4)).explore(tmp_path / "calls.html")
    opened(page, tmp_path / "calls.html")
    assert names(page) == ["input", "cell", "tanh", "cell (call 2)", "tanh", "output"]
    assert page.locator(".badge text").all_text_contents() == ["× 399", "× 399"]


def test_search_selects_and_shows_the_module_and_the_address_finds_it_again(page, path):
    opened(page, path.with_name("one.html"), "#open=0")
    page.keyboard.press("/")
    page.keyboard.type("blocks.3 relu")
    assert page.locator("#tree .name").all_text_contents() == ["blocks.3.act"]
    drawn(page, lambda: page.keyboard.press("Enter"))
    assert page.locator("#facts h2").text_content() == "blocks.3.act"
    assert page.locator(".node.selected .name").text_content() == "act"
    opened(page, path.with_name("one.html"), page.url.partition("#")[1] + page.url.partition("#")[2])
    assert page.locator("#facts h2").text_content() == "blocks.3.act"


def test_a_module_in_several_stages_says_so(page, tmp_path):
    stats = Statistics(nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))), (3, 4))
    stats.explore(tmp_path / "stages.html", stages=stats.split(2, boundaries=["1.1"]))
    opened(page, tmp_path / "stages.html", "#open=0&at=1")
    legend = page.locator("#legend span").all_text_contents()
    assert legend == ["several stages", "stage 0"]
    assert page.locator("#facts tr", has_text="Stage").locator("td").text_content() == "stage 0, stage 1"


def test_search_takes_regular_expressions_and_folds_equal_results(page, path):
    opened(page, path.with_name("one.html"))
    search, rows = page.locator("#search"), page.locator("#tree .row")
    search.fill("relu")
    assert rows.all_text_contents() == ["blocks.0.actReLU× 6"]
    search.fill(r"^blocks\.[04]\.act$")
    assert rows.all_text_contents() == ["blocks.0.actReLU× 2"]
    search.fill("act$ (")  # no regular expression yet
    assert rows.count() == 0
    search.fill("relu")
    drawn(page, lambda: page.locator("#tree .times").click())
    assert [row[:12] for row in rows.all_text_contents()] == [f"blocks.{number}.act" for number in range(6)]


def test_measured_times_of_equal_blocks_are_added(page, tmp_path):
    """Equal blocks take times of their own, so a row of them is their sum, and no part takes more than the whole."""
    stats = Statistics(Net(), (3, 4))
    stats.measure_latency(warmup=0, runs=1)
    stats.explore(tmp_path / "times.html")
    opened(page, tmp_path / "times.html", "#view=table&colour=latency")
    row = page.locator(".changes tr", has_text="blocks.0.up × 6").locator("td").all_text_contents()
    amount, unit = next(cell for cell in row if cell.endswith(("ms", "us", "µs"))).split()
    added = sum(stats[f"blocks.{number}.up"].latency_ms for number in range(6))
    assert float(amount) * (1 if unit == "ms" else 1e-3) == pytest.approx(added, rel=0.01)
    opened(page, tmp_path / "times.html", "#at=blocks&colour=latency")
    shares = page.locator("#facts .bars .value").all_text_contents()
    assert 0 < sum(float(text.split("· ")[1].removesuffix("%").strip()) for text in shares) <= 101


def test_changes_stand_in_the_order_of_the_model(page, path):
    opened(page, path, "#view=changes")
    assert page.locator(".changes th[aria-sort]").count() == 0


def test_the_table_of_all_nodes_sorts_and_follows_the_search(page, path):
    """Multiply-adds of three inputs: 3 * 384 = 1,152 in a layer of six blocks, 3 * 8 * 2 = 48 in the head."""
    opened(page, path.with_name("one.html"), "#view=table")
    column = page.locator(".changes td:first-child")
    assert column.all_text_contents()[:3] == ["Net", "input", "blocks"]
    drawn(page, lambda: page.locator(".changes th button", has_text="Multiply-adds").click())
    assert column.all_text_contents()[:4] == ["Net", "blocks", "blocks.0 × 6", "blocks.0.up × 6"]
    drawn(page, lambda: page.locator(".changes th button", has_text="Multiply-adds").click())
    assert column.all_text_contents()[-1] == "Net"
    drawn(page, lambda: page.locator("#search").fill("linear"))
    assert column.all_text_contents() == ["head", "blocks.0.up × 6", "blocks.0.down × 6"]
    row = page.locator(".changes tr", has_text="head")
    assert row.locator("td").all_text_contents() == ["head", "Linear", "48", "18", "[3, 2]", "weight [2, 8], bias [2]"]
    assert "sort=-Multiply-adds" in page.url
    row.click()
    page.wait_for_selector("body[data-view=graph]")
    assert page.locator("#facts h2").text_content() == "head"


def test_bookmarks_stay_in_the_address(page, path):
    opened(page, path.with_name("one.html"), "#at=blocks.2.up")
    page.keyboard.press("b")
    assert page.locator("#tree .selected .name").text_content() == "★ up"
    page.reload()
    page.wait_for_selector("body[data-ready]")
    page.locator("#tree .row").first.click()
    page.locator("#facts section", has_text="Bookmarks").locator("a").click()
    assert page.locator("#facts h2").text_content() == "blocks.2.up"
    page.locator("#facts button", has_text="Remove bookmark").click()
    assert "marks" not in page.url


def test_figures_colours_and_links(page, path):
    """A block has 3 * (4 * 16 + 16 * 4) = 384 multiply-adds, six of them 2,304."""
    opened(page, path.with_name("one.html"), "#open=0&at=blocks.0")
    text = page.locator("#facts").inner_text()
    assert "384" in text
    assert "2.30 K" in text
    assert page.locator("#legend span").all_text_contents() == ["Multiply-adds: 0  2.30 K", "skip connections"]
    assert page.locator("#facts td span", has_text="2.30 K").get_attribute("title") == "2,304"
    drawn(page, lambda: page.select_option("#colour", "Type"))
    assert page.locator("#legend span").all_text_contents() == ["Block", "cat", "Linear", "skip connections"]
    drawn(page, lambda: page.select_option("#colour", "Kind"))
    kinds = ["matrix product", "several kinds", "views and copies", "skip connections"]
    assert page.locator("#legend span").all_text_contents() == kinds
    drawn(page, lambda: page.select_option("#size", "params"))
    widths = {
        group.locator(".name").text_content(): float(group.locator(".shape").last.get_attribute("width"))
        for group in page.locator(".node").all()
    }
    assert widths["blocks.0"] > widths["head"]
    page.locator("#facts a", has_text="input").click()
    assert page.locator("#facts h2").text_content() == "input"


@pytest.mark.parametrize("view", ["treemap", "icicle", "roofline", "memory"])
def test_every_view_draws_the_selection_and_copies_as_a_picture(page, path, view):
    opened(page, path.with_name("one.html"), f"#view={view}&at=blocks.0.up")
    marked = page.locator(".span" if view == "memory" else ".canvas .selected")
    assert marked.count() >= 1
    with page.expect_download() as found:
        page.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject(); }")
        page.locator("#copy-svg").click()
    root = ET.parse(found.value.path()).getroot()
    assert root.tag.endswith("svg")
    assert len(list(root.iter())) > 10


@pytest.mark.parametrize("view", ["treemap", "icicle"])
def test_equal_blocks_are_one_area_until_they_are_unfolded(page, path, view):
    """A block has two layers of 3 * 4 * 16 = 192 multiply-adds, six blocks have 1,152 in each."""
    opened(page, path.with_name("one.html"), f"#view={view}&at=blocks.0")
    texts = page.locator(".part text").all_text_contents()
    assert "0 × 6" in texts
    assert texts.count("1.15 K") == 2
    drawn(page, lambda: page.keyboard.press("u"))
    assert {"0", "5"} <= set(page.locator(".part text").all_text_contents())


@pytest.mark.parametrize("colour", ["", "params", "Kind"])
def test_the_legend_has_every_colour_of_an_icicle(page, path, colour):
    opened(page, path.with_name("one.html"), f"#view=icicle&size=params&colour={colour}")
    fills = page.locator(".part:not(.outer) rect").evaluate_all("all => all.map((rect) => rect.style.fill)")
    outer = page.locator(".part.outer rect").evaluate_all("all => all.map((rect) => rect.style.fill)")
    legend = page.locator("#legend i").evaluate_all("all => all.map((box) => box.style.background)")
    assert set(outer) == {""}
    if colour == "params":  # the ramp ends at the darkest part
        assert any(fill in legend[0] for fill in fills)
    else:
        assert set(fills) == set(legend)


def test_phases_and_peak_of_the_memory_are_named_beside_the_areas(page, path):
    opened(page, path.with_name("one.html"), "#view=memory")
    titles = page.locator("svg text.title")
    assert {"forward", "backward", "step"} <= set(titles.all_text_contents())
    top = page.locator(".content path").nth(2).bounding_box()["y"]
    assert all(titles.nth(number).bounding_box()["y"] < top for number in range(2, titles.count()))


def test_points_of_the_roofline_have_names_and_those_above_it_a_reason(page, tmp_path):
    """Three layers at 10^17 FLOP/s and more, faster than any device."""
    stats = Statistics(Net(), (3, 4))
    for row in stats.root.walk():
        row.latency_ms = row.self_latency_ms = 1e-12
    stats.explore(tmp_path / "fast.html")
    opened(page, tmp_path / "fast.html", "#view=roofline")
    assert "head" in page.locator(".point-name").all_text_contents()
    boxes = [name.bounding_box() for name in page.locator(".point-name").all()]
    assert not any(
        a["x"] < b["x"] + b["width"] and b["x"] < a["x"] + a["width"] and abs(a["y"] - b["y"]) < 10
        for number, a in enumerate(boxes)
        for b in boxes[:number]
    )
    assert "3 above the roof: the time is of a faster device" in page.locator("#legend").text_content()


def test_what_the_doctor_found_and_the_values_are_colours(page, tmp_path):
    stats = Statistics(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4)), torch.ones(3, 4))
    stats.check()
    stats.values()
    stats.explore(tmp_path / "checked.html")
    opened(page, tmp_path / "checked.html")
    options = page.locator("#colour option").all_text_contents()
    assert "Findings" in options
    assert any("std" in option for option in options)


def test_the_graph_copies_as_png(page, path):
    opened(page, path.with_name("one.html"))
    with page.expect_download() as found:
        page.evaluate("() => { navigator.clipboard.write = () => Promise.reject(); }")
        page.locator("#copy-png").click()
    assert found.value.path().read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_two_models_with_their_differences(page, path):
    opened(page, path)
    assert page.locator(".canvas").count() == 2
    assert page.locator(".node.changed .name").all_text_contents() == ["head", "head"]
    page.locator("[data-view=changes]").click()
    rows = page.locator(".changes tr").all_text_contents()
    assert any("head" in row and "+27" in row for row in rows)  # (8 + 1) * 3 more parameters
    page.locator(".changes tr", has_text="head").click()
    assert page.locator("#facts h2").text_content() == "head"
    assert page.locator(".node.selected").count() == 2


def test_differences_by_keyboard(page, path):
    opened(page, path)
    page.keyboard.press("n")
    assert page.locator("#facts h2").text_content() == "head"
    page.keyboard.press("6")
    page.locator(".changes tr", has_text="head").focus()
    page.keyboard.press("Enter")
    assert page.locator("body").get_attribute("data-view") == "graph"


def test_blocks_that_differ_in_the_same_way_stay_one(page, tmp_path):
    before, after = Net(), Net()
    for block in after.blocks:
        block.act = nn.GELU()
    Statistics(before, (3, 4)).explore(tmp_path / "alike.html", compare=Statistics(after, (3, 4)))
    opened(page, tmp_path / "alike.html")
    assert page.locator(".badge text").all_text_contents() == ["× 6", "× 6"]
    assert page.locator(".node.changed .name").all_text_contents() == ["act", "act"]


def test_keys(page, path):
    opened(page, path.with_name("one.html"), "#open=0")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    assert page.locator("#facts h2").text_content() == "blocks"
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.locator("#facts h2").text_content() == "blocks.0"
    drawn(page, lambda: page.keyboard.press("f"))
    assert page.locator("#crumbs").text_content() == "Net › blocks › 0"
    assert names(page) == ["input", "cat", "up", "act", "down", "add"]  # what it is connected to, then its inside
    drawn(page, lambda: page.keyboard.press("Backspace"))
    assert page.locator("#crumbs").text_content() == ""
    drawn(page, lambda: page.keyboard.press("d"))
    assert page.locator("html").get_attribute("data-theme") == "dark"
    drawn(page, lambda: page.keyboard.press("2"))
    assert page.locator("body").get_attribute("data-view") == "treemap"


def test_names_with_markup_stay_text(page, tmp_path):
    Statistics(nasty_model(), (1, 2)).explore(tmp_path / "nasty.html")
    opened(page, tmp_path / "nasty.html")
    assert page.locator("#tree .name", has_text="<script>").get_attribute("title") == NASTY
    page.locator("#tree .row", has_text="script").click()
    assert page.locator("#facts h2").text_content() == NASTY
    assert page.locator("img").count() == 0


def test_a_page_in_a_frame_as_in_a_notebook(page, tmp_path):
    frame = Statistics(nn.Sequential(nn.Linear(2, 2)), (1, 2)).explore()._repr_html_()
    (tmp_path / "notebook.html").write_text(f"<!DOCTYPE html><body>{frame}</body>", encoding="utf-8")
    page.goto((tmp_path / "notebook.html").as_uri())
    inside = page.frame_locator("iframe")
    inside.locator("body[data-ready]").wait_for()
    inside.locator("#tree .name", has_text="output").click()
    assert inside.locator("#facts h2").text_content() == "output"
