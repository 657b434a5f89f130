"""The memory of compiled steps against hand-derived bytes, and against real steps of the same compiler."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from modelsummary import InputError, Statistics, StepError
from modelsummary.capture.containers import tensors_of
from modelsummary.capture.step import loss_of
from tests.untouched import untouched

pytestmark = [
    pytest.mark.skipif(torch.__version__ < "2.11", reason="the compiler takes no tensors of other classes"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of torch's compiler
]


def storages_by_address(tensors):
    strided = (tensor for tensor in tensors if tensor.layout is torch.strided)
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in strided}


def compiled_for_real(model, args, kwargs):
    """The bytes that a real compiled step on the CPU keeps: what graphs pass to their backwards, and autograd saves.

    The graphs are Inductor's, whose operators run one by one.
    """
    from torch._inductor.compile_fx import compile_fx

    torch._dynamo.reset()
    kept, alive, n_graphs = {}, [], 0

    def keep(tensor):
        if isinstance(tensor, torch.Tensor):
            alive.append(tensor)  # so that no address is used again
            kept.update(storages_by_address([tensor]))
        return tensor

    def inner_compile(graph, _, *, is_backward=False, **__):
        names = [node.name for node in graph.graph.nodes if node.op == "placeholder"]

        def call(inputs):
            nonlocal n_graphs
            n_graphs += not is_backward
            for name, tensor in zip(names, inputs, strict=True):
                if is_backward and not name.startswith("tangents"):
                    keep(tensor)
            return torch.fx.Interpreter(graph).boxed_run(inputs)

        call._boxed_call = True
        return call

    def backend(graph, inputs):
        return compile_fx(graph, inputs, inner_compile=inner_compile)

    given = storages_by_address([*model.parameters(), *model.buffers(), *tensors_of((args, kwargs))])
    with torch._functorch.config.patch(enable_autograd_cache=False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = loss_of(torch.compile(model, backend=backend)(*args, **kwargs), None)
        loss.backward()
    model.zero_grad()
    torch._dynamo.reset()
    return sum(nbytes for address, nbytes in kept.items() if address not in given), n_graphs


def check_against_real(model, args=(), kwargs=None):
    kwargs = kwargs or {}
    with untouched(model):
        memory = Statistics(model, list(args) or kwargs).memory("compiled")
    assert (sum(storage.nbytes for storage in memory.saved), len(memory.graphs)) == compiled_for_real(
        model, args, kwargs
    )
    return memory


class Chain(nn.Module):
    def __init__(self, breaks=False):
        super().__init__()
        self.first, self.last, self.breaks = nn.Linear(8, 16), nn.Linear(16, 4), breaks

    def forward(self, x):
        x = self.first(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.last(x.sin().cos())


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x):
        query, key, value = self.qkv(x).view(*x.shape[:2], 3, 4, 16).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(100, 32), nn.Linear(32, 100, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return {"loss": self.head(self.embedding(tokens).tanh()).logsumexp(-1).mean()}


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        self.last = nn.Linear(64, 8)

    def forward(self, x, scale=2.0):
        return self.last(checkpoint(self.block, x, use_reentrant=False).sin() * scale)


def test_by_hand():
    # batch 2. Eager: the results of the first linear, sin and cos, 2*16 floats each. Compiled: the backward of the last
    # linear reads the result of cos, and sin is computed again from the result of the first linear.
    stats = Statistics(Chain(), (2, 8))
    memory = stats.memory("compiled", optimizer="sgd-momentum")
    assert stats.memory().activations == 3 * 128
    assert memory.activations == 2 * 128
    assert [(storage.operator, storage.nbytes) for storage in memory.saved] == [("aten.addmm", 128), ("aten.cos", 128)]
    assert (memory.params, memory.buffers, memory.grads, memory.optimizer_state) == (848, 0, 848, 848)
    assert memory.held_after_forward == 848 + 848 + 64 + 2 * 128 + 2 * 4 * 4 + 4  # state, input; result, and loss
    assert (memory.mode, memory.execution, memory.graphs) == ("compiled", "shape", [2 * 128])
    assert "Memory of one compiled training step on cpu" in str(memory)
    assert memory.to_dict()["graphs_bytes"] == [256]


def test_each_graph_apart():
    memory = check_against_real(Chain(breaks=True), (torch.randn(2, 8),))
    assert memory.graphs == [128, 128]
    assert "2 compiled graphs keep 128 B, 128 B" in str(memory)


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (Attention, lambda: torch.randn(2, 16, 64)),
        (Tied, lambda: torch.randint(0, 100, (4, 8))),
        (Checkpointed, lambda: torch.randn(16, 64)),
        (
            lambda: nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.ReLU(), nn.Linear(8, 2)),
            lambda: torch.randn(4, 8),
        ),
        (
            lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout()),
            lambda: torch.randn(2, 3, 8, 8),
        ),
    ],
    ids=["attention", "tied", "checkpointed", "frozen", "convolution"],
)
def test_kept_as_by_a_real_step(make, inputs):
    check_against_real(make(), (inputs(),))


def test_a_recurrent_layer_is_not_compiled():
    memory = check_against_real(nn.LSTM(8, 8), (torch.randn(4, 2, 8),))
    assert memory.graphs == []
    assert memory.activations == Statistics(nn.LSTM(8, 8), (4, 2, 8)).memory().activations


def test_the_users_budget_decides():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)) for _ in range(3)))
    stats = Statistics(model, (16, 64))
    whole = stats.memory("compiled")
    assert whole.recomputed_macs == 0
    with torch._functorch.config.patch(activation_memory_budget=0.0):
        none = stats.memory("compiled")
    assert none.activations == 0
    assert none.recomputed_macs == 3 * 16 * 64 * 64  # all products: the backwards of GELU read their results
    assert stats.memory("compiled").activations == whole.activations


def test_options():
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    stats = Statistics(model, (16, 64))
    plain = stats.memory("compiled")
    halved = stats.memory("compiled", dtype=torch.bfloat16)
    assert (2 * halved.params, 2 * halved.activations) == (plain.params, plain.activations)
    assert stats.memory("compiled", checkpoint=["1"]).activations < plain.activations
    again = stats.memory("compiled", checkpoint=["0"])
    assert again.recomputed_macs == 16 * 64 * 256
    assert stats.memory("compiled", autocast=torch.bfloat16).params == plain.params
    assert stats.memory("compiled", accumulates=True).peak == plain.peak + plain.grads


def test_rows_keep_what_an_eager_step_says():
    stats = Statistics(Chain(), (2, 8))
    stats.memory()
    before = [(row.activation_bytes, row.peak_bytes) for row in stats.root.walk()]
    stats.memory("compiled")
    assert [(row.activation_bytes, row.peak_bytes) for row in stats.root.walk()] == before


def test_what_the_user_compiled_stays_compiled():
    model, graphs = Chain(breaks=True), []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled, x = torch.compile(model, backend=backend), torch.ones(2, 8)
    with torch.no_grad():
        compiled(x)
        assert len(graphs) == 2
        Statistics(compiled, (3, 8)).memory("compiled")
        compiled(x)
    assert len(graphs) == 2


class Refused(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        x = self.linear(x)
        return x @ torch.ones(3, 3) if torch.compiler.is_compiling() else x


def test_compilers_that_take_no_tensors_of_other_classes(monkeypatch):
    from torch._dynamo.variables import builder

    monkeypatch.delattr(builder, "infer_subclass_type")  # as in torch 2.6
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    stats = Statistics(model, (2, 4))
    with untouched(model), pytest.raises(InputError, match=r"needs torch >= 2.11, got .*; pass execution='real'"):
        stats.memory("compiled")
    monkeypatch.undo()
    assert stats.memory("compiled").peak > 0


def test_what_cannot_be_compiled_is_refused():
    model = Refused()
    stats = Statistics(model, (2, 8))
    with untouched(model), pytest.raises(StepError) as error:
        stats.memory("compiled")
    assert str(error.value) == (
        "torch.compile cannot compile the forward: RuntimeError: a and b must have same reduction dim, but got [2, 8] "
        "X [3, 3]; mode='train' predicts an eager step"
    )
    with pytest.raises(InputError, match="mode must be 'train', 'compiled' or 'inference', got 'eager'"):
        stats.memory("eager")


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        x = self.linear(x)
        return x * 2 if x.sum().item() > 0 else x


def test_a_step_that_needs_values_runs_for_real():
    model = Branching()
    with untouched(model):
        memory = Statistics(model, (4, 8)).memory("compiled")
    assert (memory.execution, memory.mode) == ("real", "compiled")


def test_a_batch_that_fits():
    model = nn.Sequential(nn.Linear(8, 256), nn.GELU(), nn.Dropout(), nn.Linear(256, 8))
    stats = Statistics(model, (2, 8))
    batch = stats.max_batch_size("100KB", "compiled")
    peaks = [Statistics(model, (size, 8)).memory("compiled").peak for size in (batch, batch + 1)]
    assert peaks[0] <= 100_000 < peaks[1]


# -------------------------------------------------------------------------------------------------- models of others


@pytest.mark.slow
def test_measured():
    """Kernels that Inductor compiles keep the same bytes."""
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.BatchNorm1d(256), nn.Linear(256, 8))
    stats = Statistics(model, (16, 64))
    with untouched(model):
        measured = stats.measure_memory("compiled", optimizer="adamw")
    assert measured.held_after_forward == measured.predicted.held_after_forward
    assert measured.peak == pytest.approx(measured.predicted.peak, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["alexnet", "resnet18", "squeezenet1_1"])
def test_torchvision(name):
    models = pytest.importorskip("torchvision.models")
    check_against_real(getattr(models, name)(weights=None), (torch.randn(2, 3, 64, 64),))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "config"),
    [("LlamaForCausalLM", "LlamaConfig"), ("MistralForCausalLM", "MistralConfig"), ("BertForMaskedLM", "BertConfig")],
)
def test_transformers(model, config):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    sizes |= {} if model.startswith("Bert") else {"num_key_value_heads": 2}
    tokens = torch.randint(0, 90, (2, 16))
    inputs = {"input_ids": tokens, "labels": tokens}
    language_model = getattr(transformers, model)(getattr(transformers, config)(**sizes, vocab_size=100))
    check_against_real(language_model, kwargs=inputs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"), [("vit_tiny_patch16_224", {"depth": 2}), ("convnext_atto", {"depths": (1, 1, 1, 1)})]
)
def test_timm(name, options):
    timm = pytest.importorskip("timm")
    check_against_real(timm.create_model(name, **options), (torch.randn(2, 3, 224, 224),))


def test_results_inside_of_a_kernel_take_no_memory():
    """Each layer is a product and a kernel, whose two intermediate results do not exist.

    When the first kernel of the backward runs, there are the input, the weight, the product (kept), the result, its
    gradient, which is copied as the loss broadcasts one element, and what the kernel writes; then the product may go.
    Scalars are the loss, and its gradient.
    """
    rows, width = 1024, 64
    model = nn.Sequential(nn.Linear(width, width, bias=False), nn.GELU(), nn.Tanh(), nn.SiLU())
    memory = Statistics(model, (rows, width)).memory("compiled")
    tensor, weight = 4 * rows * width, 4 * width * width
    assert memory.peak - (5 * tensor + weight) == 8
    assert memory.activations == tensor
