"""The steps of a forward, and which tensors each takes from which, against models written out by hand."""

from __future__ import annotations

import torch
from torch import nn

from modelsummary import Statistics
from modelsummary.views.explorer.data import Explored, model_data
from modelsummary.views.explorer.nodes import MOST_CHILDREN, nodes_of
from tests.models import Call


class Residual(nn.Module):
    """relu(fc(x)) + x, with a size that is read and not used."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        x.sum()  # nothing uses this
        return torch.relu(self.fc(x)) + x


def flow(model, *size):
    stats = Statistics(model, size)
    steps = stats._dataflow().steps
    names = [step.inside.fqn if step.kind == "module" else step.name for step in steps]
    return [(names[number], sorted(names[source] for source in step.takes)) for number, step in enumerate(steps)]


def test_a_skip_connection_leads_past_the_layers_and_unused_functions_are_left_out():
    assert flow(Residual(), 2, 4) == [
        ("input", []),
        ("fc", ["input"]),
        ("relu", ["fc"]),
        ("add", ["input", "relu"]),
        ("output", ["add"]),
    ]


def test_a_tensor_written_in_place_comes_from_the_function_that_wrote_it():
    class InPlace(nn.Module):
        def forward(self, x):
            y = x * 2
            y.add_(1)
            return y.relu()

    assert flow(InPlace(), 2, 4)[2:4] == [("add", ["mul"]), ("relu", ["add"])]


def test_a_model_that_is_one_layer_is_one_step():
    assert flow(nn.Linear(4, 2), 1, 4) == [("input", []), ("Linear", ["input"]), ("output", ["Linear"])]


def test_functions_stand_between_the_modules_in_the_order_of_the_calls():
    stats = Statistics(nn.Sequential(Residual(), nn.ReLU()), (2, 4))
    nodes = nodes_of(stats.root, stats._dataflow().steps)
    assert [(node.kind, node.name) for node in nodes] == [
        ("module", "Sequential"),
        ("input", "input"),
        ("module", "0"),
        ("module", "fc"),
        ("function", "relu"),
        ("function", "add"),
        ("module", "1"),
        ("output", "output"),
    ]
    assert [node.index for node in nodes] == list(range(8))


def test_multiply_adds_of_functions_are_taken_out_of_their_module():
    """3x4 times 4x5 is 60; fc is 3x4 times 4x4 = 48."""

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.weight = nn.Parameter(torch.ones(4, 5))

        def forward(self, x):
            return self.fc(x) @ self.weight

    stats = Statistics(Both(), (3, 4))
    data = model_data(Explored(stats.root, stats._dataflow()))
    names = [data["texts"][place] for place in data["nodes"]["name"]]
    own = dict(zip(names, data["figures"][0]["own"], strict=True))
    assert (own["Both"], own["fc"], own["matmul"]) == (0, 48, 60)
    assert sum(own.values()) == stats.total_macs == 108


def test_blocks_in_different_stages_are_not_equal():
    stats = Statistics(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), (2, 4))
    stages = stats.split(2)
    equal = [node.equal for node in Explored(stats.root, stats._dataflow(stages)).nodes if node.type == "Linear"]
    assert equal[0] == equal[1] != equal[2] == equal[3]


def test_a_level_with_many_different_nodes_has_ranges():
    layers = [
        nn.Linear(1, 1, bias=bool(number.bit_count() % 2)) for number in range(400)
    ]  # no pattern comes three times
    for given in ((1, 1), None):
        nodes = nodes_of(Statistics(nn.Sequential(*layers), given).root)
        assert max(len(node.children) for node in nodes) <= MOST_CHILDREN
        ranges = [node for node in nodes if node.kind == "range"]
        assert len({node.equal for node in ranges}) == len(ranges)
    assert sum(len(node.children) for node in ranges) == 400
    last = ranges[0].children[-1].name
    assert (ranges[0].name, ranges[0].type) == (f"0 … {last}", f"{int(last) + 1} nodes")


def test_a_repeated_pattern_needs_no_ranges():
    layers = [nn.Linear(1, 1, bias=bool(number % 2)) for number in range(400)]
    nodes = nodes_of(Statistics(nn.Sequential(*layers), (1, 1)).root)
    assert len(nodes[0].children) == 400


def test_many_constants_in_a_row_are_a_range():
    def forward(self, x):
        for number in range(1, 6):
            x = x + torch.ones(4) * number
        return x

    def early(self, x):
        ones = [torch.ones(number, 1) for number in range(1, 6)]
        return sum((one.sum() for one in ones), x)

    for model, names in ((early, ["input", "ones … ones"]), (forward, ["input", "ones"])):
        stats = Statistics(Call(model), (2, 4))
        shown = nodes_of(stats.root, stats._dataflow().steps)[0].children
        assert [node.name for node in shown][:2] == names


class Several(nn.Module):
    def forward(self, sample, timestep, *others, scale):
        return (sample + timestep + others[0]) * scale


def test_inputs_have_the_names_of_the_arguments():
    tensors = [torch.zeros(2)] * 3
    several = Statistics(Several(), *tensors, scale=torch.ones(2))._dataflow()
    assert [step.name for step in several.steps if step.kind == "input"] == ["sample", "timestep", "input 2", "scale"]
    named = Statistics(nn.Linear(4, 2), input=torch.zeros(1, 4))._dataflow()
    assert [step.name for step in named.steps if step.kind == "input"] == ["input"]
