"""Graphs of what was summarised."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

from modelsummary import InputError, LayerNotFoundError, Statistics, TraceError
from modelsummary.fx.profile_table import rows_of
from tests.graphs import assert_same
from tests.idioms import IDIOMS
from tests.untouched import untouched


@pytest.mark.parametrize("name", ["gpt2", "t5", "unet", "experts"])
def test_nodes_and_rows_lead_to_one_another(name):
    torch.manual_seed(0)
    model, inputs = IDIOMS[name][0](), IDIOMS[name][1](3, 0)
    stats = Statistics(model, inputs)
    with untouched(model):
        graph = stats.graph_module()
    assert_same(model, graph, IDIOMS[name][1](5, 1))
    assert sum(row["fwd_macs"] for row in rows_of(graph)) == stats.total_mult_adds
    for node in graph.graph.nodes:
        row = node.meta["layer_info"]
        assert row in [stats.root, *stats]
        assert node in stats.nodes_of(graph, row.fqn)
        if node.op == "call_module" and name != "experts":
            assert node.meta["info"].macs == row.macs
    assert stats.nodes_of(graph, "") == list(graph.graph.nodes)
    with pytest.raises(LayerNotFoundError):
        stats.nodes_of(graph, "nowhere")


def test_sizes_and_positional_arguments():
    stats = Statistics(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), (2, 4))
    graph = stats.graph_module()
    assert [node.target for node in graph.graph.nodes] == ["input", "0", "1", "output"]
    assert graph(torch.rand(7, 4)).shape == (7, 8)
    assert graph.graph.output_node().meta["info"].accumulate_size > 0


def test_a_module_called_twice_has_two_rows():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, *given):
            return self.layer(given[0]) + self.layer(given[1])

    stats = Statistics(Twice(), (torch.rand(2, 4), torch.rand(2, 4)))
    graph = stats.graph_module()
    calls = list(graph.graph.find_nodes(op="call_module", target="layer"))
    assert [node.meta["layer_info"].call_index for node in calls] == [0, 1]


def test_a_graph_of_packed_sequences():
    """They cannot run on shapes, and a ``PackedSequence`` takes nothing but tensors."""

    class Packs(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(3, 4, batch_first=True)

        def forward(self, x, lengths):
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
            return nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0]

    model, inputs = Packs(), (torch.rand(2, 5, 3), torch.tensor([5, 2]))
    graph = Statistics(model, inputs).graph_module()
    assert torch.equal(graph(*inputs), model(*inputs))
    (lstm,) = graph.graph.find_nodes(op="call_module", target="lstm")
    assert lstm.meta["info"].macs == 7 * 4 * (3 + 4) * 4  # 5 + 2 steps of four gates
    assert lstm.meta["tensor_meta"][0][0].shape == (7, 4)


def test_a_graph_needs_the_model():
    stats = pickle.loads(pickle.dumps(Statistics(nn.Linear(4, 4), (2, 4))))
    with pytest.raises(InputError, match="a graph module needs the live model and an input"):
        stats.graph_module()


def test_a_graph_that_is_impossible_says_why():
    class Decides(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    stats = Statistics(Decides(), torch.rand(3))
    with pytest.raises(TraceError, match="decides by values"):
        stats.graph_module()


def test_graphs_and_memory_agree_on_what_is_kept_for_the_backward():
    """A graph counts the saved inputs, too: 3 x 1 x 8 x 8 floats, which the first convolution keeps."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    stats = Statistics(model, (3, 1, 8, 8))
    *_, last = stats.graph_module().graph.nodes
    assert last.meta["info"].accumulate_size == stats.memory().activations + 4 * 192
