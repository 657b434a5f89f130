"""The dataflow graph: what goes where, and that names mean nothing to the languages it is written in."""

from __future__ import annotations

import pickle
import re
from itertools import combinations
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from modelsummary import InputError, SplitError, Statistics
from modelsummary.views.graph import Graph
from modelsummary.views.graph_nodes import Edge, Group, Node
from tests.models import Call
from tests.untouched import untouched


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 4))

    def forward(self, x):
        return x + self.body(self.norm(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.position = nn.Parameter(torch.zeros(4))
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        x = x + self.position
        one = self.blocks[0](x)
        two = self.blocks[1](one)
        assert two.sum().shape == ()  # a function whose result leads nowhere
        return self.head(torch.cat([one, two], dim=1))


def flow(graph):
    """Edges by the first lines of their nodes."""
    names = {node.key: node.lines[0] for node in graph.nodes}
    return [(names[edge.source], names[edge.target], edge.label) for edge in graph.edges]


def test_the_children_of_the_model():
    model = Model()
    with untouched(model):
        graph = Statistics(model, (3, 4)).graph(depth=1)
    assert flow(graph) == [
        ("input", "add", "[3, 4]"),
        ("add", "blocks.0", "[3, 4]"),
        ("blocks.0", "blocks.1", "[3, 4]"),
        ("blocks.0", "cat", "[3, 4]"),
        ("blocks.1", "cat", "[3, 4]"),
        ("cat", "head", "[3, 8]"),
        ("head", "output", "[3, 2]"),
    ]
    by_name = {node.name: node for node in graph.nodes}
    # norm 8, linear 4 x 8 + 8 and 8 x 4 + 4; 3 x 4 x 8 multiply-adds each
    assert by_name["blocks.0"].lines == ("blocks.0", "Block", "84 params, 192 MACs")
    assert by_name["add"].lines == ("add", "position")
    assert by_name["head"].kind == "module"
    assert [by_name[name].kind for name in ("input", "cat", "output")] == ["input", "function", "output"]


def test_calls_inside_are_groups():
    stats = Statistics(Model(), (3, 4))
    graph = stats.graph(depth=2)
    groups = [item for item in graph.model.items if isinstance(item, Group)]
    assert [group.label for group in groups] == ["blocks.0: Block", "blocks.1: Block"]
    assert [node.name for node in groups[0].items] == ["blocks.0.norm", "blocks.0.body", "add"]
    assert ("add", "add", "[3, 4]") in flow(graph)  # the residual, and from one block to the next
    assert [node.name for node in stats.graph(depth=None).nodes].count("blocks.1.body.1") == 1
    assert len(stats.graph(depth=None).nodes) == len(stats.graph().nodes)


def test_in_place_writes_and_second_calls():
    def forward(self, x):
        y = self.linear(x)
        y[:, 0] = 1.0
        y.relu_()
        return self.linear(y), y

    graph = Statistics(Call(forward, linear=nn.Linear(4, 4)), (2, 4)).graph()
    assert flow(graph) == [
        ("input", "linear", "[2, 4]"),
        ("linear", "setitem", "[2, 4]"),
        ("setitem", "relu", "[2, 4]"),
        ("relu", "linear (call 2)", "[2, 4]"),
        ("linear (call 2)", "output", "[2, 4]"),
        ("relu", "output", "[2, 4]"),
    ]


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_model_without_calls_is_one_node():
    whole = [("input", "Linear", "[2, 4]"), ("Linear", "output", "[2, 4]")]
    assert flow(Statistics(nn.Linear(4, 4), (2, 4)).graph()) == whole
    attention = Statistics(nn.MultiheadAttention(4, 1), [(3, 2, 4)] * 3).graph()
    assert flow(attention)[:3] == [(name, "MultiheadAttention", "[3, 2, 4]") for name in ("query", "key", "value")]
    scripted = Statistics(torch.jit.script(nn.Sequential(nn.Linear(4, 4))), (2, 4)).graph()
    assert flow(scripted) == [("input", "Sequential", "[2, 4]"), ("Sequential", "output", "[2, 4]")]


def test_several_tensors_on_one_edge():
    class Pair(nn.Module):
        def forward(self, x):
            return x + 1, {"a": x * 2, "b": x.sum(), "c": x.T}

    def forward(self, x, *, scale):
        one, more = self.pair(x * scale)
        return self.linear(one), more

    model = Call(forward, pair=Pair(), linear=nn.Linear(4, 4))
    graph = Statistics(model, {"x": torch.ones(2, 4), "scale": torch.ones(1)}).graph()
    assert ("pair", "output", "[2, 4], [], [4, 2]") in flow(graph)
    assert [node.lines[0] for node in graph.nodes if node.kind == "input"] == ["x", "scale"]
    edge = Edge("a", "b", ((1,), (2,), (3,), (4,), (5,)))
    assert edge.label == "[1], [2], [3] and 2 more"


def test_a_large_model_is_shown_as_deep_as_can_be_read():
    block = nn.Sequential(*[nn.Linear(2, 2) for _ in range(10)])
    model = nn.Sequential(*[nn.Sequential(block, nn.Linear(2, 2)) for _ in range(10)])
    stats = Statistics(model, (1, 2))
    assert len(stats.graph(fold=False).nodes) == 2 + 10 * 2
    assert len(stats.graph(depth=None, fold=False).nodes) == 2 + 10 * 11
    flat = Statistics(nn.Sequential(*[nn.Linear(2, 2) for _ in range(100)]), (1, 2))
    assert len(flat.graph(fold=False).nodes) == 102
    assert flow(flat.graph()) == [("input", "0 .. 99", "[1, 2]"), ("0 .. 99", "output", "[1, 2]")]


def test_folding_makes_room_for_deeper_levels():
    """20 equal blocks of 4 calls are too many one by one; as one, all levels fit."""
    model = nn.Sequential(*(Block() for _ in range(20)), nn.Linear(4, 4))
    stats = Statistics(model, (3, 4))
    graph = stats.graph()
    (group,) = (item for item in graph.model.items if isinstance(item, Group))
    assert group.label == "0 .. 19: 20 x Block"
    assert flow(graph) == [
        ("input", "0.norm", "[3, 4]"),
        ("0.norm", "0.body.0", "[3, 4]"),
        ("0.body.0", "0.body.1", "[3, 8]"),
        ("0.body.1", "0.body.2", "[3, 8]"),
        ("input", "add", "[3, 4]"),
        ("0.body.2", "add", "[3, 4]"),
        ("add", "20", "[3, 4]"),
        ("20", "output", "[3, 4]"),
    ]
    assert [node.lines for node in stats.graph(depth=1, fold=True).nodes][1] == (
        "0 .. 19", "20 x Block", "84 params, 192 MACs"
    )  # fmt: skip
    assert len(stats.graph(depth=1, fold=False).nodes) == 2 + 20 + 1


def test_a_folded_node_takes_and_passes_what_all_of_its_equals_do():
    """Each of four equal layers takes the same second input, and the last function takes all results."""

    class Adapter(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, y):
            return self.linear(x) + y

    def forward(self, x, y):
        results = []
        for layer in self.layers:
            x = layer(x, y)
            results.append(x)
        return torch.cat(results)

    model = Call(forward, layers=nn.ModuleList(Adapter() for _ in range(4)))
    graph = Statistics(model, [(3, 4), (3, 4)]).graph(depth=1, fold=True)
    assert flow(graph) == [
        ("input 0", "layers.0 .. 3", "[3, 4]"),
        ("input 1", "layers.0 .. 3", "[3, 4]"),
        ("layers.0 .. 3", "cat", "[3, 4]"),
        ("cat", "output", "[12, 4]"),
    ]
    assert [node.times for node in graph.nodes] == [1, 1, 4, 1, 1]


def test_an_edge_of_folded_modules_keeps_all_tensors_of_one():
    class Two(nn.Module):
        def forward(self, x, y):
            return y, x

    class Add(nn.Module):
        def forward(self, x, y):
            return x + y

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.two, self.add = Two(), Add()

        def forward(self, x):
            return self.add(*self.two(x * 2, x * 3))

    graph = Statistics(nn.Sequential(*(Both() for _ in range(3))), (2, 4)).graph(fold=True)
    assert ("0.two", "0.add", "[2, 4], [2, 4]") in flow(graph)


def test_equal_modules_in_equal_modules_fold_twice():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.ReLU()) for _ in range(3)))
    stats = Statistics(model, (1, 2))
    graph = stats.graph(fold=True)
    assert [(node.lines[0], node.times) for node in graph.nodes[1:-1]] == [("0.0 .. 1", 2), ("0.2", 1)]
    assert [edge[:2] for edge in flow(graph)] == [("input", "0.0 .. 1"), ("0.0 .. 1", "0.2"), ("0.2", "output")]
    assert "0 .. 2: 3 x Sequential" in graph.to_mermaid()
    assert graph.to_svg().count('class="behind"') == 1


def test_modules_of_different_stages_stay_apart():
    stats = Statistics(nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))), (1, 2))
    graph = stats.graph(stages=stats.split(2), fold=True)
    assert [(node.lines[0], node.stage) for node in graph.nodes[1:-1]] == [("0 .. 1", 0), ("2 .. 3", 1)]


def test_stages_are_coloured_and_cut_modules_opened():
    stats = Statistics(Model(), (3, 4))
    stages = stats.split(2, boundaries=["blocks.1.body"])
    graph = stats.graph(depth=1, stages=stages)
    stage_of = {node.name: node.stage for node in graph.nodes if node.kind == "module"}
    assert stage_of == {"blocks.0": 0, "blocks.1.norm": 0, "blocks.1.body": 1, "head": 1}
    assert ":::stage0" in str(graph)
    assert "classDef stage1 fill:" in str(graph)
    assert 'fillcolor="#' in graph.to_dot()
    with pytest.raises(InputError, match=r"stages must be the result of split\(\) on this model"):
        stats.graph(stages=Statistics(Model(), (3, 4)).split(2))
    with pytest.raises(SplitError, match="pickled"):
        stats.graph(stages=pickle.loads(pickle.dumps(stages)))


MERMAID = """\
flowchart TD
  n1(["input"])
  subgraph gn2["0: Sequential"]
    n3["0.0<br/>Linear<br/>12 params, 16 MACs"]
    n4["0.1<br/>ReLU"]
  end
  n5(["output"])
  n1 -->|"[2, 2]"| n3
  n3 -->|"[2, 4]"| n4
  n4 -->|"[2, 4]"| n5"""

DOT = """\
digraph "Sequential" {
  node [shape=box, style="rounded,filled", fillcolor=white]
  n1 [label="input", shape=oval]
  subgraph cluster_gn2 {
    label="0: Sequential"
    n3 [label="0.0\\nLinear\\n12 params, 16 MACs"]
    n4 [label="0.1\\nReLU"]
  }
  n5 [label="output", shape=oval]
  n1 -> n3 [label="[2, 2]"]
  n3 -> n4 [label="[2, 4]"]
  n4 -> n5 [label="[2, 4]"]
}"""


def test_what_it_looks_like():
    graph = Statistics(nn.Sequential(nn.Sequential(nn.Linear(2, 4), nn.ReLU())), (2, 2)).graph()
    assert str(graph) == graph.to_mermaid() == MERMAID
    assert graph.to_dot() == DOT
    assert repr(graph) == "<graph of Sequential: 4 nodes, 3 edges>"
    assert graph._repr_mimebundle_() == {"text/plain": repr(graph), "image/svg+xml": graph.to_svg()}


def rectangles(svg):
    """Left, top, right and bottom of each group, and of each node."""
    found = {"group": [], "node": []}
    for each in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}rect"):
        if "class" in each.attrib:
            x, y, width, height = (float(each.attrib[name]) for name in ("x", "y", "width", "height"))
            found[each.attrib["class"]].append((x, y, x + width, y + height))
    return found["group"], found["node"]


@pytest.mark.parametrize("depth", [1, 2, None])
def test_in_a_picture_no_boxes_overlap_and_groups_hold_their_nodes(depth, tmp_path):
    graph = Statistics(Model(), (3, 4)).graph(depth)
    svg = graph.save(tmp_path / "graph.svg").read_text()
    groups, nodes = rectangles(svg)
    assert len(nodes) == len(graph.nodes)
    assert svg.count('<path class="edge"') == len(graph.edges)

    def apart(one, other):
        return one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]

    def holds(group, node):
        return group[0] <= node[0] and group[1] <= node[1] and group[2] >= node[2] and group[3] >= node[3]

    assert all(apart(*pair) for pair in combinations(nodes, 2))
    assert all(apart(group, node) or holds(group, node) for group in groups for node in nodes)
    inside = [each for each in graph.model.items if isinstance(each, Group)]
    held = sorted(sum(holds(group, node) for node in nodes) for group in groups)
    assert held[-len(inside) :] == sorted(len(list(each.nodes())) for each in inside) if inside else not groups


def test_tensors_flow_downwards_in_a_picture():
    """input, then the two branches beside each other, then their sum."""
    model = Call(lambda self, x: self.one(x) + self.two(x), one=nn.Linear(4, 4), two=nn.Linear(4, 4))
    _, nodes = rectangles(Statistics(model, (3, 4)).graph().to_svg())
    top = [node[1] for node in nodes]
    assert top[0] < top[1] == top[2] < top[3] < top[4]
    middle = [(node[0] + node[2]) / 2 for node in nodes]
    assert middle[1] < middle[0] < middle[2]
    assert middle[0] == pytest.approx(middle[3], abs=0.1) == pytest.approx(middle[4], abs=0.1)


def test_a_graph_is_saved_in_the_format_of_the_ending(tmp_path):
    graph = Statistics(Model(), (3, 4)).graph()
    assert graph.save(tmp_path / "graph.dot").read_text() == f"{graph.to_dot()}\n"
    assert graph.save(f"{tmp_path}/graph.mmd").read_text() == f"{graph}\n"
    with pytest.raises(InputError, match=r"path must end in \.svg, \.dot, \.gv, \.mmd, got 'graph\.pdf'; .* Graphviz"):
        graph.save("graph.pdf")


@settings(deadline=None)
@given(st.text(max_size=30))
def test_names_mean_nothing_to_the_languages(name):
    node = Node("n1", "module", name, (name, "Linear"))
    graph = Graph(Group("model", name, [Group("g2", name, [node])]), [])
    header, group, line, end = graph.to_mermaid().split("\n")
    for text, quoted in ((group, r'  subgraph g2\["(.*)"\]'), (line, r'    n1\["(.*)<br/>Linear"\]')):
        (found,) = re.fullmatch(quoted, text).groups()
        assert not set(found) & set("\"<>&`'{}|\\$%*")
        assert re.sub(r"#(\d+);", lambda code: chr(int(code[1])), found) == "".join(
            char if char.isprintable() else " " for char in name
        )
    assert (header, end) == ("flowchart TD", "  end")
    shown = "".join(char if char.isprintable() else " " for char in name)
    svg = ElementTree.fromstring(graph.to_svg())
    assert [each.text or "" for each in svg.iter("{http://www.w3.org/2000/svg}text")] == [shown, shown, "Linear"]
    lines = graph.to_dot().split("\n")
    assert len(lines) == 7
    (quoted,) = re.fullmatch(r'    n1 \[label="((?:[^"\\]|\\.)*)"\]', lines[4]).groups()
    assert re.sub(r"\\(.)", r"\1", quoted.removesuffix("\\nLinear")).replace("&amp;", "&") == "".join(
        char if char.isprintable() else " " for char in name
    )


def test_hostile_modules():
    model = nn.Sequential()
    for name in ("<script>alert(1)</script>", 'a"]; b', "x\ny", "`md`", "end"):
        model.add_module(name, nn.Linear(2, 2))
    graph = Statistics(model, (1, 2)).graph()
    assert len(graph.edges) == 6
    assert "<script>" not in str(graph)
    assert '"a#34;]#59; b<br/>Linear<br/>6 params, 4 MACs"' in str(graph)
    assert r'label="a\"]; b\nLinear\n6 params, 4 MACs"' in graph.to_dot()


def test_errors():
    with pytest.raises(SplitError, match="is not initialised"):
        Statistics(nn.Sequential(nn.LazyLinear(2)), (3, 4)).graph()
    with pytest.raises(InputError, match="a graph of the dataflow needs the live model and an input"):
        Statistics(Model()).graph()
    with pytest.raises(InputError, match="needs the live model"):
        pickle.loads(pickle.dumps(Statistics(Model(), (3, 4)))).graph()
    with pytest.raises(InputError, match="depth must be an integer >= 1, or None for all levels, got 0"):
        Statistics(Model(), (3, 4)).graph(0)
    with pytest.raises(InputError, match=r"stages must be the result of .* got 2"):
        Statistics(Model(), (3, 4)).graph(stages=2)


def test_a_forward_that_depends_on_values_has_a_graph():
    def forward(self, x):
        return self.linear(x) if x.sum() > 0 else x

    graph = Statistics(Call(forward, linear=nn.Linear(4, 4)), torch.ones(2, 4)).graph()
    assert flow(graph) == [("input", "linear", "[2, 4]"), ("linear", "output", "[2, 4]")]


@pytest.mark.parametrize("name", ["resnet18", "densenet121", "googlenet", "swin_t"])
def test_models_of_torchvision(name):
    models = pytest.importorskip("torchvision.models", exc_type=(ImportError, RuntimeError))
    options = {"init_weights": False} if name == "googlenet" else {}
    stats = Statistics(getattr(models, name)(weights=None, **options).eval(), (1, 3, 64, 64))
    for depth in (1, None):
        graph = stats.graph(depth)
        into = {edge.target for edge in graph.edges}
        assert all(node.key in into for node in graph.nodes if node.kind in ("module", "output"))
        order = {node.key: number for number, node in enumerate(graph.nodes)}
        assert all(order[edge.source] < order[edge.target] for edge in graph.edges)
