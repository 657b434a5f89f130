"""Context parallelism: ranks with a chunk of the sequence do what one process does with all of it."""

from __future__ import annotations

import copy
import json
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from modelsummary import InputError, Statistics
from modelsummary.parallel import ParallelPlan
from tests.parallel import collectives, processes
from tests.parallel.cpu_rings import add_cpu_rings
from tests.parallel.models import Mlp

pytestmark = pytest.mark.skipif(torch.__version__ < "2.14", reason="ring attention of older versions has other names")
WIDTH, LENGTH, WORDS = 32, 16, 48


class Attention(nn.Module):
    """Self-attention whose call of the function is given."""

    def __init__(self, groups=4, attend=None):
        super().__init__()
        self.q, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, 8 * groups), nn.Linear(WIDTH, 8 * groups)
        self.grouped = groups < 4
        self.attend = attend or (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True))

    def forward(self, x):
        q, k, v = (each(x).unflatten(-1, (-1, 8)).transpose(1, 2) for each in (self.q, self.k, self.v))
        if self.grouped:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            y = self.attend(q, k, v)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """An attention and an MLP."""

    def __init__(self, attention):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = attention(), Mlp(WIDTH)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """A decoder with learned positions that are passed, a table of positions, or both."""

    def __init__(self, attention=Attention, rows=0, *, slices=False):
        super().__init__()
        self.embed, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(attention) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if rows:
            self.register_buffer("table", torch.linspace(-1, 1, rows * WIDTH).view(rows, WIDTH))
        self.rows, self.slices = rows, slices

    def embedded(self, ids, positions=None):
        x = self.embed(ids)
        if positions is not None:
            x = x + self.places(positions)
        if self.slices:
            return x + self.table[: ids.shape[1]]
        return x + self.table if self.rows else x

    def forward(self, ids, positions=None, labels=None):
        x = self.embedded(ids, positions)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _grouped():
    return Attention(groups=2)


def _full():
    return Attention(attend=lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=False))


class _Chosen(Decoder):
    """Features of each token are chosen, set and taken by their numbers, as routers of experts do."""

    def embedded(self, ids, positions=None):
        x = super().embedded(ids, positions)
        chosen = x.topk(2, -1).indices
        weights = x.scatter(-1, chosen, 0.0).softmax(-1).gather(-1, chosen + 1 - chosen % 2 * 2)
        return x + weights.sum(-1, keepdim=True)


MODELS = {
    "causal": lambda: Decoder(_grouped, rows=LENGTH),
    "chosen": lambda: _Chosen(_grouped, rows=LENGTH),
    "full": lambda: Decoder(_full),
}


def _inputs():
    generator = torch.Generator().manual_seed(0)
    ids, labels = torch.randint(WORDS, (2, 2, LENGTH), generator=generator)
    return ids, torch.arange(LENGTH), labels


def _plan(model, *inputs, **sizes):
    """A plan of the model in half precision, whose attention has a kernel with a ring on CUDA."""
    return Statistics(copy.deepcopy(model).bfloat16(), inputs).parallel_plan(**sizes)


def _compared(_rank, n, cases):
    """Differences of loss and gradients from one process, and the collectives that ran beside those of the plan."""
    add_cpu_rings()
    found = {}
    for name, sizes, inside in cases:
        torch.manual_seed(0)
        model, (ids, positions, labels) = MODELS[name]().double(), _inputs()
        plan = _plan(model, ids, positions, *([labels] if inside else []), **sizes)
        whole, model = processes.copies(model)
        mesh = plan.device_mesh("cpu")
        plan.apply(model, mesh)

        def loss_of(logits, labels=None):
            return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())

        expected = whole(ids, positions, labels)
        expected.backward()
        with plan.context_parallel(model, mesh, ids, positions, labels) as (some, places, targets):
            arguments = (some, places, targets) if inside else (some, places)
            loss_of_rank = partial(loss_of, labels=None if inside else targets)
            ran = collectives.of_step(model, arguments, loss_of_rank)
            loss = loss_of_rank(model(*arguments))
            loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        pairs = list(zip(whole.parameters(), model.parameters(), strict=True))
        grads = [processes.difference(one.grad, processes.whole(other.grad)) for one, other in pairs]
        found[(name, *sizes)] = {
            "loss": float((total / n - expected).abs()),
            "grad": max(grads),
            "restored": name == "full" or model.table.shape == (LENGTH, WIDTH),
            # the loop's own loss counts the tokens of all ranks
            "ran": {key: count for key, (count, _) in ran.items() if key[0] != "loss"},
            "planned": {key: count for key, (count, _) in collectives.of_plan(plan).items()},
        }
    return found


def _check(ranks):
    for found in ranks:
        for case, result in found.items():
            assert result["loss"] <= 1e-12, case
            assert result["grad"] <= 1e-12, case
            assert result["restored"], case
            assert result["ran"] == result["planned"], case


def test_two_ranks_equal_one_process():
    cases = [("causal", {"context": 2}, True), ("full", {"context": 2, "sharded": "parameters"}, False)]
    cases += [("chosen", {"context": 2}, True)]
    _check(processes.run(_compared, 2, cases))


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        {"context": 4},
        {"context": 2, "shard": 2},
        {"context": 2, "data": 2},
        {"context": 2, "tensor": 2},
        {"context": 2, "tensor": 2, "sequence": True},
    ],
    ids=str,
)
def test_four_ranks_equal_one_process(sizes):
    _check(processes.run(_compared, 4, [(name, sizes, True) for name in MODELS]))


def test_the_memory_of_a_rank_falls_with_its_tokens():
    model, (ids, positions, labels) = Decoder(_full).bfloat16(), _inputs()
    plan = _plan(model, ids, positions, labels, context=2)
    whole = Statistics(model, (ids, positions, labels)).memory(device="cuda")
    half = Statistics(model, (ids[:, ::2], positions[::2], labels[:, ::2])).memory(device="cuda")
    rank = plan.memory()
    assert half.activations <= rank.activations < 0.7 * whole.activations
    assert rank.params == whole.params


def _mean(x):
    return x - x.mean(1, keepdim=True)


class _Stored(Decoder):
    def embedded(self, ids, positions=None):
        return self.embed(ids) + self.places.weight


class _Scaled(Decoder):
    def embedded(self, ids, positions=None):
        return self.embed(ids) / ids.shape[1]


class _Centred(Decoder):
    def embedded(self, ids, positions=None):
        return _mean(self.embed(ids))


class _CentredFeatures(Decoder):
    def embedded(self, ids, positions=None):
        x = self.embed(ids)
        return x - x.mean(-1, keepdim=True)


class _Shifted(Decoder):
    def forward(self, ids, positions=None, labels=None):
        return super().forward(ids)[:, :-1]


class _Conditional(Decoder):
    def embedded(self, ids, positions=None):
        return self.embed(ids[ids > 0].new_zeros(ids.shape))


class _Focal(Decoder):
    def forward(self, ids, positions=None, labels=None):
        loss = super().forward(ids, positions, ids)
        return (1 - (-loss).exp()) ** 2 * loss


class _Weighted(Decoder):
    def forward(self, ids, positions=None, labels=None):
        loss = super().forward(ids, positions, ids)
        self.logged = loss.detach()
        return 0.5 * loss + 0.1 * self.head.weight.pow(2).sum()


def _masked():
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    return Attention(attend=lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


def _early():
    return Attention(attend=scaled_dot_product_attention)


def _products():
    return Attention(attend=lambda q, k, v: (q @ k.transpose(-1, -2)).softmax(-1) @ v)


REFUSED = [
    (_Stored, {}, r"takes a chunk of the sequence and a whole tensor of the shape \[16, 32\]; a tensor that follows"),
    (_Scaled, {}, r"div\(\) in the model computes with 16, and with 8 on the shapes of one rank"),
    (_Centred, {}, r"mean\(\) in the model works along the sequence"),
    (_Shifted, {}, r"getitem\(\) in the model works along the sequence"),
    (_Focal, {}, r"exp\(\) in the model takes a mean over the ranks; linear functions of it work"),
    (_Conditional, {}, "reads values"),
    (
        lambda: Decoder(_masked),
        {},
        "takes a mask that is not known to be causal, and torch's ring takes no other; is_causal=True",
    ),
    (lambda: Decoder(_early), {}, "blocks.0.attention calls scaled_dot_product_attention by a name of its own"),
    (lambda: Decoder(_products), {}, r"matmul\(\) in blocks.0.attention multiplies tokens by tokens"),
    (Decoder, {"context": 3}, "context=3 does not divide the 16 tokens of the recorded input"),
    (Decoder, {"pipeline": 2}, "context=2 with pipeline=2: stages are recorded with whole sequences"),
]


@pytest.mark.parametrize(("make", "sizes", "reason"), REFUSED)
def test_what_a_chunk_cannot_do_is_refused(make, sizes, reason):
    with pytest.raises(InputError, match=reason):
        _plan(make(), _inputs()[0], **{"context": 2, **sizes})


def _numbered():
    class Numbered(Decoder):
        def embedded(self, ids, positions=None):
            return self.embed(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))

    return Numbered()


class _Attending(nn.Module):
    """An encoder layer's attention, as a module that calls the function."""

    def __init__(self):
        super().__init__()
        self.attention = _full()

    def forward(self, x):
        return self.attention(x)


FOLLOWED = [  # what the refusals advise
    (_numbered, (2, LENGTH), {}),
    (Decoder, (2, LENGTH), {}),
    (_CentredFeatures, (2, LENGTH), {}),
    (_Weighted, (2, LENGTH), {}),
    (lambda: Decoder(_full), (2, LENGTH), {}),
    (Decoder, (2, 6), {"context": 3}),
    (Decoder, (2, LENGTH), {"pipeline": 1}),
    (_Attending, (2, LENGTH, WIDTH), {}),
    (_Conditional, (2, LENGTH), {"context": 1}),
]


@pytest.mark.parametrize(("make", "size", "sizes"), FOLLOWED)
def test_what_refusals_advise_works(make, size, sizes):
    floats = len(size) == 3
    inputs = torch.ones(size, dtype=torch.bfloat16) if floats else torch.ones(size, dtype=torch.long)
    plan = _plan(make(), inputs, **{"context": 2, **sizes})
    assert plan.context == sizes.get("context", 2)


@pytest.mark.parametrize(
    ("make", "length", "options"),
    [(Decoder, LENGTH, {"precision": torch.bfloat16}), (Decoder, 128, {})],
    ids=["half precision", "tokens for the kernel of float32"],
)
def test_kernels_that_refusals_advise_have_rings(make, length, options):
    plan = Statistics(make(), (2, length), dtypes=torch.long).parallel_plan(context=2, **options)
    assert plan.collectives["forward", "all_gather"][0] == 2


def test_two_pieces_for_each_rank_are_needed_if_attention_is_causal():
    with pytest.raises(InputError, match=r"into two pieces for each rank, .*; record a multiple of 4"):
        _plan(Decoder(), torch.ones(2, 6, dtype=torch.long), context=2)
    assert _plan(Decoder(), torch.ones(2, 8, dtype=torch.long), context=2).is_causal
    assert not _plan(Decoder(_full), torch.ones(2, 6, dtype=torch.long), context=2).is_causal


def test_modules_of_attention_are_refused():
    layer = nn.TransformerEncoderLayer(WIDTH, 4, batch_first=True)
    with pytest.raises(InputError, match=r"self_attn is an nn.MultiheadAttention, whose fast path calls no"):
        _plan(layer, torch.ones(2, LENGTH, WIDTH, dtype=torch.bfloat16), context=2)


def test_kernels_without_a_ring_are_refused():
    with pytest.raises(InputError, match=r"or in float32 with multiples of 64 tokens on each rank"):
        Statistics(Decoder(), _inputs()[:1]).parallel_plan(context=2)


class _Upcast(Block):
    def forward(self, x):
        return x + self.attention(self.norm1(x.float()))


def test_a_step_that_does_not_run_anyway_is_not_blamed_on_the_ring():
    """FSDP casts the parameters of a norm, and the forward makes its input float32."""
    model = Decoder()
    for block in model.blocks:
        block.__class__ = _Upcast
    with pytest.raises(InputError, match=r"does not run on shapes, without context parallelism either: .* one dtype"):
        Statistics(model, _inputs()[:1]).parallel_plan(context=2, precision=torch.bfloat16)


def test_a_model_without_a_sequence_is_refused():
    with pytest.raises(InputError, match="context=2: Linear has no sequence to cut"):
        Statistics(nn.Linear(4, 4), (2, 4)).parallel_plan(context=2)
    with pytest.raises(InputError, match="calls no scaled_dot_product_attention"):
        Statistics(nn.Sequential(nn.Linear(4, 4)), (2, 8, 4)).parallel_plan(context=2)


def _refused_on_the_cpu(_rank, _n):
    model, (ids, *_) = Decoder(), _inputs()
    plan = _plan(model, ids, context=2)
    before = {name: id(each) for name, each in model.named_parameters()}
    with pytest.raises(InputError, match="no ring of the attention kernel that torch runs on 'cpu'"):
        plan.apply(model, plan.device_mesh("cpu"))
    assert {name: id(each) for name, each in model.named_parameters()} == before
    return True


def test_the_cpu_is_refused():
    processes.stop()  # processes of another test have rings of the CPU
    assert all(processes.run(_refused_on_the_cpu, 2))


def _entered_with_other_lengths(_rank, _n):
    add_cpu_rings()
    model, (ids, positions, labels) = MODELS["causal"](), _inputs()
    plan = _plan(model, ids, positions, context=2)
    mesh = plan.device_mesh("cpu")
    plan.apply(model, mesh)
    attend = F.scaled_dot_product_attention
    with (
        pytest.raises(ValueError, match=r"a multiple of 4 up to the 16 of the plan, got \[15, 16, 16\]"),
        plan.context_parallel(model, mesh, ids[:, 1:], positions),
    ):
        pass
    with pytest.raises(KeyError), plan.context_parallel(model, mesh, ids, labels):
        raise KeyError
    assert model.table.shape == (LENGTH, WIDTH)
    assert F.scaled_dot_product_attention is attend
    assert ids.shape == (2, LENGTH)
    return True


def test_nothing_is_left_behind_an_error():
    assert all(processes.run(_entered_with_other_lengths, 2))


def test_a_stored_plan_is_the_same():
    model = MODELS["causal"]()
    plan = _plan(model, *_inputs()[:2], context=2, shard=2)
    assert plan.tables == (("table", 0),)
    assert plan.is_causal
    assert not _plan(model, *_inputs()[:2], shard=2).is_causal  # says nothing without ranks of context
    stored = ParallelPlan.from_json(plan.to_json())
    assert stored == plan
    assert stored.to_code() == plan.to_code()
    with pytest.raises(InputError, match=r"tokens of a plan with context=2 must be an integer >= 1, got 0$"):
        ParallelPlan.from_json(json.dumps(plan.to_dict() | {"tokens": 0}))
    namespace = {}
    exec(plan.to_code(), namespace)
    assert callable(namespace["share_tokens"])
    assert "one piece from the beginning and one from the end of the sequence, and its rows of table" in str(plan)


def test_without_context_a_loop_gets_its_tensors():
    plan = Statistics(nn.Linear(4, 4), (2, 8, 4)).parallel_plan()
    x = torch.ones(2, 8, 4)
    with plan.context_parallel(nn.Linear(4, 4), None, x) as (same,):
        assert same is x
