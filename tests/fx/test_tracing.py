"""Graphs of models: they do what the model does, at other batch sizes and in the other mode, and can be edited."""

from __future__ import annotations

import copy
import importlib
import inspect
import io
import operator
import pickle
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from modelsummary import InputError, TraceError, symbolic_trace
from tests.graphs import assert_same, tensors, written
from tests.idioms import IDIOMS, in_both_modes, some
from tests.models import zeros_as_parameters
from tests.untouched import untouched
from tests.zoo.torchvision_models import swept


def traced(name, *, train=True):
    torch.manual_seed(0)
    model, inputs = IDIOMS[name][0]().train(train), IDIOMS[name][1]
    with untouched(model):
        return model, symbolic_trace(model, meta_args=inputs(3, 0)), inputs


@pytest.mark.parametrize(
    ("name", "train"),
    in_both_modes(IDIOMS.keys() - {"gpt2", "bert"}, ["experts", "unet", "lstm", "in place", "dense"]),
)
def test_a_graph_does_what_the_model_does(name, train):
    model, graph, inputs = traced(name, train=train)
    for batch in (3, 5, 2):
        for mode in (True, False):
            assert_same(model, graph, inputs(batch, batch), train=mode)


@pytest.mark.filterwarnings("ignore:Node .* does not reference an nn.Module")  # what lint says in torch 2.6
@pytest.mark.parametrize("name", some("gpt2", "t5", "experts", "unet", "in place"))
def test_nodes_know_shapes_and_paths(name):
    model, graph, inputs = traced(name)
    paths = {fqn for fqn, _ in model.named_modules()}
    for node in graph.graph.nodes:
        assert node.meta["info"].fqn in paths
        if node.op == "call_module":
            assert node.meta["info"].fqn == node.target
            assert graph.get_submodule(node.target) is model.get_submodule(node.target)
    given = {node.target: node.meta["tensor_meta"].shape for node in graph.graph.find_nodes(op="placeholder")}
    assert given == {key: value.shape for key, value in inputs(3, 0).items() if isinstance(value, torch.Tensor)}
    graph.graph.lint()


@pytest.mark.parametrize("name", ["gpt2", "t5", "bert", "unet", "in place", "dense"])
def test_copies_run(name):
    _, graph, inputs = traced(name)
    saved = io.BytesIO()
    torch.save(graph, saved)
    saved.seek(0)
    copies = [copy.deepcopy(graph), pickle.loads(pickle.dumps(graph)), torch.load(saved, weights_only=False)]
    for each in copies:
        assert each.state_dict().keys() == graph.state_dict().keys()
        assert each.graph.nodes.__len__() == len(graph.graph.nodes)
        for train in (True, False):
            results = []
            graph.load_state_dict(each.state_dict())  # as they were, before batch normalisation moved
            for module in (graph, each):
                torch.manual_seed(0)
                results.append(tensors(module.train(train)(**inputs(4, 3))))
            for own, other in zip(*results, strict=True):
                assert torch.equal(own, other)


@pytest.mark.parametrize("name", ["gpt2", "t5", "in place", "dense"])
def test_to_folder(name, tmp_path, monkeypatch):
    model, graph, inputs = traced(name)
    copied = written(graph, tmp_path, monkeypatch)
    assert_same(graph, copied, inputs(4, 3))
    shared = [{name for name, _ in each.named_parameters()} for each in (graph, copied)]
    assert shared[0] == shared[1] <= {name for name, _ in model.named_parameters(remove_duplicate=False)}


def doubled(module, args, output):
    return output * 2


def test_to_folder_keeps_what_a_layer_is(tmp_path, monkeypatch):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.hooked, self.frozen = nn.Linear(4, 4).double(), nn.BatchNorm1d(4).double().eval()
            self.hooked.register_forward_hook(doubled)
            self.plain = torch.arange(4.0)

        def forward(self, x):
            return Pair(self.frozen(self.hooked(x)) * self.plain + torch.tensor([1.0, 2.0]).repeat(2))

    graph = symbolic_trace(Odd(), meta_args={"x": torch.rand(3, 4).double()})
    copied, x = written(graph, tmp_path, monkeypatch), torch.rand(5, 4).double()
    assert torch.equal(copied(x).first, graph(x).first)


class Listed(nn.Module):
    def forward(self, x):
        return [x[[0, 1]], x.topk(2), torch.ops.aten.relu(x), torch.ops.aten.mul.Tensor(x, x)]


def test_lists_and_operators_survive_pickling():
    graph = symbolic_trace(Listed(), meta_args={"x": torch.rand(3, 4)})
    inputs = {"x": torch.rand(5, 4)}
    assert_same(Listed(), graph, inputs)
    assert_same(Listed(), pickle.loads(pickle.dumps(graph)), inputs)
    assert isinstance(graph(**inputs)[1], torch.return_types.topk)


def test_a_layer_named_by_a_keyword_is_refused():
    class Named(nn.ModuleDict):
        def forward(self, x):
            return self["class"](x)

    with pytest.raises(TraceError, match="'class' has a keyword of Python in its name"):
        symbolic_trace(Named({"class": nn.Linear(4, 4)}), meta_args={"x": torch.rand(3, 4)})


def test_a_batch_of_one_closes_no_layer():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            positions = torch.zeros(1, 4)
            return self.layer(x) + (positions if x.shape[0] == 1 else positions.expand(x.shape[0], -1))

    model = nn.Sequential(Inner(), nn.ReLU())
    graph = symbolic_trace(model, meta_args={"input": torch.rand(3, 4)})
    assert [node.target for node in graph.graph.find_nodes(op="call_module")] == ["0.layer", "1"]
    assert_same(model, graph, {"input": torch.rand(5, 4)})
    with pytest.raises(TraceError, match="made for a batch of at least 2; a smaller batch"):
        graph(torch.rand(1, 4))


def test_the_code_reads_like_the_model():
    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x):
            y = self.body(x) * self.scale
            return F.dropout(y, 0.5, self.training).view(x.shape[0] * 2, 2)

    graph = symbolic_trace(Small(), meta_args={"x": torch.rand(3, 4)})
    lines = [line.strip().partition(";")[0] for line in graph.code.strip().splitlines()]
    assert lines == [
        "def forward(self, x):",
        "training = self.training",
        "size = x.size(0)",
        "mul_1 = size * 2",
        "check_input = modelsummary_fx_guards_check_input(x, (None, 4))",
        'body_0 = getattr(self.body, "0")(x)',
        'body_1 = getattr(self.body, "1")(body_0)',
        "scale = self.scale",
        "mul = body_1 * scale",
        "dropout = torch.nn.functional.dropout(mul, p = 0.5, training = training, inplace = False)",
        "view = dropout.view(mul_1, 2)",
        "return view",
    ]


@pytest.mark.parametrize("dims", [2, 3])
def test_control_flow_follows_the_given_values(dims):
    def forward(x):
        return x * 2 + 1 if x.dim() == 3 else x - 5

    graph = symbolic_trace(forward, meta_args={"x": torch.rand((2,) * dims)})
    targets = [node.target for node in graph.graph.find_nodes(op="call_function", target=operator.sub, sort=True)]
    assert bool(targets) == (dims == 2)
    x = torch.rand((5, *(2,) * (dims - 1)))
    assert torch.equal(graph(x), forward(x))


def test_a_loop_over_the_batch_is_bound_to_its_size():
    def forward(x):
        return torch.stack([x[number] * number for number in range(x.shape[0])])

    graph = symbolic_trace(forward, meta_args={"x": torch.rand(3, 2)})
    x = torch.rand(3, 2)
    assert torch.equal(graph(x), forward(x))
    with pytest.raises(TraceError, match=r"shape \[4, 2\], but the graph was made for \[3, 2\].*trace again"):
        graph(torch.rand(4, 2))


def test_a_size_that_was_read_is_checked():
    def forward(x):
        return x.reshape(x.shape[0], x.shape[1] * x.shape[2])

    graph = symbolic_trace(forward, meta_args={"x": torch.rand(3, 2, 4)})
    assert graph(torch.rand(7, 2, 4)).shape == (7, 8)
    with pytest.raises(TraceError, match=r"shape \[3, 2, 5\], but the graph was made for \['any', 2, 4\]"):
        graph(torch.rand(3, 2, 5))


def test_a_forward_that_differs_by_mode_is_bound_to_it():
    class Modes(nn.Module):
        def forward(self, x):
            return x * 2 if self.training else x.exp()

    graph = symbolic_trace(Modes(), meta_args={"x": torch.rand(3)})
    x = torch.rand(3)
    assert torch.equal(graph(x), x * 2)
    with pytest.raises(TraceError, match="traced in train mode and is in eval mode"):
        graph.eval()(x)


def test_gradients_that_were_off_are_off_again():
    def forward(x):
        with torch.no_grad():
            y = x.exp()
        return x * y

    graph = symbolic_trace(forward, meta_args={"x": torch.rand(3)})
    x = torch.rand(3, requires_grad=True)
    graph(x).sum().backward()
    assert torch.equal(x.grad, x.detach().exp())
    with torch.no_grad():
        graph(x)
        assert not torch.is_grad_enabled()
    with pytest.raises(AttributeError, match="exp"):
        graph("no tensor")
    assert torch.is_grad_enabled()


@dataclass
class Pair:
    first: torch.Tensor
    second: torch.Tensor | None = None


def test_containers_and_dataclasses_come_and_go():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, batch, scale=1.0):
            x, (y, _) = batch["x"], batch["rest"]
            return {"pair": Pair(self.layer(x) * scale, y + 1), "list": [x - y, (x,)]}

    model = Nested()
    inputs = {"batch": {"x": torch.rand(3, 4), "rest": (torch.rand(3, 4), None)}}
    graph = symbolic_trace(model, meta_args=inputs, concrete_args={"scale": 2.0})
    assert_same(model, graph, {**inputs, "scale": 2.0})
    assert isinstance(graph(**inputs)["pair"], Pair)


def test_concrete_arguments_are_no_placeholders():
    class Flags(nn.Module):
        def forward(self, x, flag=False, mask=None):
            x = x + 1 if flag else x - 1
            return x if mask is None else x * mask

    graph = symbolic_trace(Flags(), {"flag": True}, {"x": torch.rand(3)})
    assert [node.target for node in graph.graph.find_nodes(op="placeholder")] == ["x"]
    assert torch.equal(graph(torch.zeros(3)), torch.ones(3))
    graph = symbolic_trace(Flags(), meta_args={"mask": torch.rand(3), "x": torch.rand(3)})
    assert [node.target for node in graph.graph.find_nodes(op="placeholder")] == ["x", "mask"]
    assert torch.equal(graph(torch.ones(3), mask=torch.ones(3)), torch.zeros(3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"meta_args": {"y": torch.rand(2)}}, r"meta_args names 'y', but the arguments of the forward are: input"),
        (
            {"meta_args": {"input": (2, 4)}},
            r"meta_args\['input'\] must be a tensor, got \(2, 4\); pass torch.empty\(\[2, 4\]",
        ),
        ({"concrete_args": {"z": 1}, "meta_args": {"input": torch.rand(2)}}, "concrete_args names 'z'"),
        ({"concrete_args": {"input": 1}, "meta_args": {"input": torch.rand(2)}}, "'input' is in concrete_args and"),
        ({"concrete_args": {"input": torch.rand(2)}}, r"concrete_args\['input'\] holds a tensor"),
        ({}, "missing a required argument: 'input'; pass it in meta_args"),
        ({"meta_args": [torch.rand(2)]}, "meta_args must be a dict from argument names to values, got list"),
        ({"concrete_args": torch.rand(2)}, "concrete_args must be a dict from argument names to values, got Tensor"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(InputError, match=message) as raised:
        symbolic_trace(nn.Linear(2, 2), **arguments)
    assert isinstance(raised.value, ValueError)


def test_a_function_without_names_of_arguments_is_refused():
    with pytest.raises(InputError, match="has no signature with argument names; wrap it in a function"):
        symbolic_trace(torch.relu, meta_args={"input": torch.rand(2)})


def test_a_method_of_a_module_knows_its_parameters():
    layer = nn.Linear(4, 4)
    graph = symbolic_trace(layer.forward, meta_args={"input": torch.rand(3, 4)})
    assert [name for name, _ in graph.named_parameters()] == ["owner.weight", "owner.bias"]
    x = torch.rand(5, 4)
    assert torch.equal(graph(x), layer(x))


@pytest.mark.parametrize("root", [nn.Linear, 3])
def test_bad_roots(root):
    with pytest.raises(InputError, match=r"expected a torch\.nn\.Module or a function"):
        symbolic_trace(root, meta_args={"input": torch.rand(2)})


def test_what_decides_by_values_is_refused_with_the_reason():
    def forward(x):
        return x + 1 if x.sum() > 0 else x - 1

    with pytest.raises(TraceError, match="decides by values of tensors: it calls bool"):
        symbolic_trace(forward, meta_args={"x": torch.rand(3)})


def test_what_is_another_object_each_time_is_refused():
    with pytest.raises(TraceError, match=r"passes on or returns <generator object .* which a graph cannot express"):
        symbolic_trace(lambda x: (each for each in [x]), meta_args={"x": torch.rand(3)})


def test_a_forward_that_fails_says_how():
    with pytest.raises(TraceError, match="Linear could not be run: RuntimeError"):
        symbolic_trace(nn.Linear(2, 3), meta_args={"input": torch.rand(4, 5)})


def test_a_layer_may_look_at_integers():
    class Packs(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(4, 4, batch_first=True)

        def forward(self, x, lengths):
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths.tolist(), batch_first=True, enforce_sorted=False)
            return nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0]

    class Holds(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Packs()

        def forward(self, x, lengths):
            return self.inner(x, lengths) * 2

    model = Holds()
    inputs = {"x": torch.rand(2, 5, 4), "lengths": torch.tensor([3, 5])}
    graph = symbolic_trace(model, meta_args=inputs)
    assert [node.target for node in graph.graph.find_nodes(op="call_module")] == ["inner"]
    assert_same(model, graph, {"x": torch.rand(2, 5, 4), "lengths": torch.tensor([4, 5])})


def test_a_lazy_model_is_refused():
    with pytest.raises(TraceError, match="'weight' is not initialised; run the model once"):
        symbolic_trace(nn.LazyLinear(3), meta_args={"input": torch.rand(4, 5)})


def test_a_graph_can_be_edited():
    model, graph, inputs = traced("dense", train=False)
    for node in graph.graph.find_nodes(op="call_function", target=F.relu):
        with graph.graph.inserting_after(node):
            new = graph.graph.call_function(torch.sigmoid, node.args)
        node.replace_all_uses_with(new)
        graph.graph.erase_node(node)
    graph.recompile()
    assert "sigmoid" in graph.code
    x = inputs(4, 0)["x"]
    hidden = model.fc1(torch.flatten(model.features(model.conv(x)), 1))
    assert torch.equal(graph(x), F.log_softmax(model.fc2(torch.sigmoid(hidden)), 1))


def test_training_the_graph_trains_the_model():
    model, graph, _ = traced("gpt2")
    assert {id(each) for each in graph.parameters()} == {id(each) for each in model.parameters()}
    assert graph.state_dict().keys() == model.state_dict().keys()


def test_a_model_on_meta_is_traced():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    graph = symbolic_trace(model, meta_args={"input": torch.rand(2, 4, device="meta")})
    assert graph(torch.rand(3, 4, device="meta")).shape == (3, 4)


def test_what_is_made_on_the_models_device_follows_it():
    def forward(x):
        return x + torch.arange(x.shape[1], device=x.device) * torch.tensor([2.0])

    graph = symbolic_trace(forward, meta_args={"x": torch.rand(3, 4)})
    x = torch.rand(5, 4)
    assert torch.equal(graph(x), forward(x))


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.sampled_from(["add", "view", "cat", "index", "chunk", "set", "mul_", "size"]), max_size=6),
    st.integers(1, 4),
)
def test_any_sequence_of_functions(names, batch):
    def forward(x):
        for name in names:
            b = x.shape[0]
            if name == "add":
                x = 1 - x + x.T.mean(1)
            elif name == "view":
                x = x.contiguous().view(b * 2, -1).reshape(b, -1)
            elif name == "cat":
                x = torch.cat([x, x.new_zeros(b, 2)], 1)[:, 1:-1]
            elif name == "index":
                x = x[torch.arange(b - 1, -1, -1)]
            elif name == "chunk":
                one, two = x.chunk(2, 1)
                x = torch.cat([two, one], -1)
            elif name == "set":
                x = x.clone()
                x[:, 0] = float(b)
            elif name == "mul_":
                x = x.clone()
                x[:, 1:].mul_(3)
            else:
                x = x / x.shape[0] + x.numel()
        return x

    graph = symbolic_trace(forward, meta_args={"x": torch.rand(2, 8)})
    x = torch.rand(batch + 1, 8)
    try:
        found = graph(x)
    except TraceError:
        return  # bound to the traced sizes, and says so
    assert torch.equal(found, forward(x))


@pytest.fixture
def deterministic():
    """Make sums deterministic: MViT reads a parameter at indices, and threads vary the order in its gradient."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


LARGE = 30_000_000  # parameters: from here on the same code as in smaller models
PARTS = 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "part"), [*(("", part) for part in range(PARTS)), (".segmentation", None), (".video", None)]
)
def test_torchvision(kind, part, deterministic):
    pytest.importorskip("torchvision", exc_type=(ImportError, RuntimeError))
    from torchvision.models import get_model, list_models

    failed = {}
    names = swept(list_models(module=importlib.import_module(f"torchvision.models{kind}")))
    for name in names if part is None else names[part::PARTS]:
        options = {"weights_backbone": None} if "segmentation" in kind else {}
        options |= {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
        with zeros_as_parameters():
            model = get_model(name, weights=None, **options)
        is_large = sum(each.numel() for each in model.parameters()) > LARGE
        if not is_large:
            model = get_model(name, weights=None, **options)
        model.train()
        size = (3, 224, 224) if name.startswith(("vit", "maxvit")) else (3, 64, 64)
        size = (3, 299, 299) if name == "inception_v3" else size
        size = (3, 16, 224, 224) if name.startswith(("mvit", "s3d")) else (3, 8, 32, 32) if "video" in kind else size
        (key,) = inspect.signature(model.forward).parameters
        try:
            graph = symbolic_trace(model, meta_args={key: torch.rand(2, *size)})
            if is_large:
                continue
            batch = 1 if "video" in kind else 3  # 16 frames of 224 x 224 take gigabytes
            assert_same(model, graph, {key: torch.rand(batch, *size)}, train=True)
            if name not in ("googlenet", "inception_v3", "s3d"):  # other outputs; s3d takes six seconds for each mode
                assert_same(model, graph, {key: torch.rand(min(batch, 2), *size)}, train=False)
        except (AssertionError, TraceError) as error:
            failed[name] = error
    assert not failed
