"""Decoders as they are called: positions, masks and shifted labels that the forward makes itself, over chunks."""

from __future__ import annotations

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from modelsummary import InputError, Statistics
from modelsummary.parallel import tokens_style
from tests.parallel import processes
from tests.parallel.cpu_rings import add_cpu_rings
from tests.parallel.test_context import LENGTH, WIDTH, WORDS, Attention, Block, Decoder

pytestmark = pytest.mark.skipif(torch.__version__ < "2.14", reason="ring attention of older versions has other names")


class MaskedAttention(nn.Module):
    """An attention that takes the mask that a function makes for the length of the sequence."""

    def __init__(self, mask_of):
        super().__init__()
        self.qkv, self.out, self.mask_of = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), mask_of
        self.register_buffer("seen", torch.ones(4 * LENGTH, 4 * LENGTH, dtype=torch.bool).tril())

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (-1, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask_of(self, x))
        return self.out(y.transpose(1, 2).flatten(2))


def _compared_positions(_module, x):
    positions = torch.arange(x.shape[1], device=x.device)
    return positions[:, None] >= positions


def _added(_module, x):
    return torch.full((x.shape[1], x.shape[1]), float("-inf"), dtype=x.dtype, device=x.device).triu(1)


def _buffer(module, x):
    return module.seen[: x.shape[1], : x.shape[1]]


def _window(_module, x):
    positions = torch.arange(x.shape[1], device=x.device)
    return (positions[:, None] >= positions) & (positions[:, None] - positions < 4)


def _before(_module, x):
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril(-1)


class Shifting(Decoder):
    """A decoder that counts positions, and shifts its labels."""

    def __init__(self, attention=Attention, reduction="mean", weight=None):
        super().__init__(attention)
        self.reduction = reduction
        self.register_buffer("weight", weight)

    def forward(self, ids, labels=None):
        positions = torch.arange(ids.shape[1], device=ids.device)
        logits = super().forward(ids, positions)
        if labels is None:
            return logits
        labels = torch.cat([labels[:, 1:], labels.new_full((labels.shape[0], 1), -100)], 1)
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), self.weight, reduction=self.reduction)
        return losses / 32 if self.reduction == "sum" else losses


class Summed(Decoder):
    """A decoder whose positions are sums of ones, from the end of the sequence."""

    def forward(self, ids, labels=None):
        positions = (torch.ones(ids.shape, dtype=torch.long, device=ids.device).cumsum(1) - 1).flip(1)
        return super().forward(ids, positions, labels)


def _transformer(kind, **options):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "attention_dropout": 0.0}
    sizes |= {"bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 64}
    if kind in ("gpt2", "gptj"):
        sizes |= {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "resid_pdrop": 0, "attn_pdrop": 0}
        sizes |= {"embd_pdrop": 0, "pad_token_id": None}
    config = transformers.AutoConfig.for_model(kind, **{**sizes, **options})
    model = transformers.AutoModelForCausalLM.from_config(config)
    if kind == "mixtral":
        model.set_experts_implementation("batched_mm")  # the grouped product takes no float64
    return model


def _tokens():
    generator = torch.Generator().manual_seed(0)
    ids, labels = torch.randint(3, WORDS, (2, 2, LENGTH), generator=generator)
    labels[0, 3:9] = -100  # all of one rank's, and none of another's
    return ids, labels


class Sliced(Decoder):
    """A decoder that slices a buffer and a parameter with more rows than the sequence has tokens."""

    def __init__(self):
        super().__init__(rows=2 * LENGTH, slices=True)
        self.learned = nn.Parameter(torch.randn(1, 2 * LENGTH, WIDTH))

    def embedded(self, ids, positions=None):
        return super().embedded(ids) + self.learned[:, : ids.shape[1]]

    def forward(self, ids, labels=None):
        return super().forward(ids, None, labels)


MODELS = {
    "counted": Shifting,
    "table": Sliced,
    "weighted": lambda: Shifting(weight=torch.linspace(0.5, 2, WORDS)),
    "sum": lambda: Shifting(reduction="sum"),
    "ones": Summed,
    **{
        mask.__name__.strip("_"): partial(Shifting, partial(MaskedAttention, mask))
        for mask in (_compared_positions, _added, _buffer)
    },
    "llama": lambda: _transformer("llama"),
    "qwen2": lambda: _transformer("qwen2"),
    "mistral": lambda: _transformer("mistral", sliding_window=None),
    "gpt2": lambda: _transformer("gpt2"),
    "gptj": lambda: _transformer("gptj", rotary_dim=4),
    "gemma3_text": lambda: _transformer("gemma3_text", head_dim=8),
    "mixtral": lambda: _transformer("mixtral", num_local_experts=4),  # each token goes to its experts by itself
    "gpt_neox": lambda: _transformer("gpt_neox", hidden_dropout=0.0),
    "opt": lambda: _transformer("opt", ffn_dim=64, word_embed_proj_dim=32, dropout=0.0),
}
PLAIN = ("counted", "table", "weighted", "sum", "ones", "compared_positions", "added", "buffer")
OPTIONS = {
    "": {},
    "positions": {"position_ids": torch.arange(LENGTH)[None]},
    "without cache": {"use_cache": False, "position_ids": torch.arange(LENGTH)[None]},
    "counted without cache": {"use_cache": False},
    "mask": {"attention_mask": torch.ones(2, LENGTH, dtype=torch.long)},
}


def _call(name, options, *, with_labels):
    ids, labels = _tokens()
    first = "ids" if name in PLAIN else "input_ids"
    return {first: ids, **OPTIONS[options], **({"labels": labels} if with_labels else {})}


def _plan(model, call, **sizes):
    """A plan of the model in half precision, whose attention has a kernel with a ring on CUDA."""
    return Statistics(copy.deepcopy(model).bfloat16(), call).parallel_plan(**sizes)


def _loss(out, labels):
    if labels is None:
        return out if isinstance(out, torch.Tensor) else out.loss
    logits = out if isinstance(out, torch.Tensor) else out.logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _compared(_rank, n, cases):
    """Largest differences of the mean loss and of gradients from one process."""
    add_cpu_rings()
    found = {}
    for name, options, with_labels, sizes in cases:
        torch.manual_seed(0)
        model, call, labels = MODELS[name]().double(), _call(name, options, with_labels=with_labels), _tokens()[1]
        plan = _plan(model, call, **sizes)
        whole, model = processes.copies(model)
        mesh = plan.device_mesh("cpu")
        plan.apply(model, mesh)
        expected = _loss(whole(**call), None if with_labels else labels)
        expected.backward()
        forward = model.forward
        names = [name for name, value in call.items() if isinstance(value, torch.Tensor)]
        with plan.context_parallel(model, mesh, *(call[name] for name in names), labels) as (*chunks, targets):
            out = model(**{**call, **dict(zip(names, chunks, strict=True))})
            loss = _loss(out, None if with_labels else targets)
            loss.backward()
        assert model.forward == forward
        total = loss.detach().clone()
        dist.all_reduce(total)
        pairs = list(zip(whole.parameters(), model.parameters(), strict=True))
        grads = [
            processes.difference(one.grad, processes.whole(other.grad)) for one, other in pairs if one.grad is not None
        ]
        found[(name, options, with_labels, *sizes)] = float((total / n - expected).abs()), max(grads)
    return found


def _check(n, cases):
    for found in processes.run(_compared, n, cases):
        for case, (loss, grad) in found.items():
            rounding = 1e-12 if case[0] in PLAIN else 2e-6  # transformers has norms, rotations and losses in float32
            assert loss <= rounding, case
            assert grad <= rounding, case


def test_plain_decoders_equal_one_process():
    _check(2, [(name, "", True, {"context": 2}) for name in PLAIN])


def test_decoders_of_transformers_equal_one_process():
    pytest.importorskip("transformers")
    _check(2, [("llama", "", True, {"context": 2}), ("gpt2", "", False, {"context": 2})])
    _check(2, [("mixtral", "", True, {"context": 2})])


@pytest.mark.parametrize("mask", [_window, _before])
def test_masks_that_are_not_causal_are_refused(mask):
    model = Shifting(partial(MaskedAttention, mask))
    with pytest.raises(InputError, match=r"takes a mask that is not known to be causal, .*; is_causal=True works"):
        _plan(model, _call("counted", "", with_labels=True), context=2)


def test_refusals_of_decoders_of_transformers_advise_what_works():
    call = _call("llama", "", with_labels=True)
    padded = torch.ones(2, LENGTH, dtype=torch.long)
    padded[0, :3] = 0
    with pytest.raises(InputError, match=r"takes a mask that follows from attention_mask, .*; leaving it out works"):
        _plan(_transformer("llama"), {**call, "attention_mask": padded}, context=2)
    assert _plan(_transformer("llama"), call, context=2).is_causal
    with pytest.raises(InputError, match=r"multiplies tokens by tokens, .*attn_implementation='sdpa'"):
        _plan(_transformer("llama", attn_implementation="eager"), call, context=2)
    assert _plan(_transformer("llama", attn_implementation="sdpa"), call, context=2).is_causal
    with pytest.raises(InputError, match="takes a mask that is not known to be causal"):
        _plan(_transformer("mistral", sliding_window=4), call, context=2)
    assert _plan(_transformer("mistral", sliding_window=None), call, context=2).is_causal


def test_a_batch_or_width_of_as_many_elements_is_not_taken_for_tokens():
    ids = torch.ones(LENGTH, LENGTH, dtype=torch.long)
    plan = _plan(Shifting(), {"ids": ids, "labels": ids.clone()}, context=2)
    assert plan.token_arguments == (("ids", None), ("labels", 1))
    assert [call.dim for call in plan.whole_calls if call.kind == "part"] == [0, 1]
    ids = torch.ones(2, WIDTH, dtype=torch.long)
    plan = _plan(Sliced(), {"ids": ids, "labels": ids}, context=2)
    assert [call.dim for call in plan.whole_calls] == [0, 1]


class _Returning(nn.Module):
    def forward(self, batch, mask=None):
        return batch["ids"], mask


def test_tensors_with_the_tokens_of_all_ranks_are_cut():
    """A loop that passes what it had before the context, as torch's changes tensors in place, has the same tokens."""
    model, whole = _Returning(), torch.arange(2 * LENGTH).view(2, LENGTH)
    positions = torch.tensor([0, 1, 2, 3, 12, 13, 14, 15])
    tokens = tokens_style.TokensOfRank(SimpleNamespace(size=lambda: 2), positions, {"ids": None, "mask": None}, {})
    part, batch = whole[:, positions], {"ids": whole}
    with tokens.of(model):
        ids, mask = model(batch, mask=whole)
        assert torch.equal(ids, part)
        assert torch.equal(mask, part)
        assert model({"ids": part}, mask[0])[0] is part
    assert batch["ids"] is whole
    assert "forward" not in vars(model)


def _shifted(labels):
    labels = labels.T
    return torch.cat([labels[1:], labels.new_full((1, labels.shape[1]), -100)])


class _Transposed(Decoder):
    def forward(self, ids, labels):
        logits = super().forward(ids).transpose(0, 1)
        return F.cross_entropy(logits.flatten(0, 1), _shifted(labels).flatten())


class _Labels(nn.Module):
    def forward(self, ids, labels):
        return _shifted(labels)


def test_properties_of_tensors_see_the_tokens_of_all_ranks(monkeypatch):
    ids, labels = _tokens()
    plan = _plan(_Transposed(), {"ids": ids, "labels": labels}, context=2)
    calls = [(call.function, call.kind, call.sizes, call.dim) for call in plan.whole_calls if not call.fqn]
    assert "T" in [name for name, *_ in calls]
    monkeypatch.setattr(tokens_style, "all_gather_single", lambda chunk, dim, _: torch.cat([chunk, chunk], dim))
    positions, model = torch.arange(LENGTH // 2), _Labels()
    tokens = tokens_style.TokensOfRank(
        SimpleNamespace(size=lambda: 2), positions, dict(plan.token_arguments), {"": calls}
    )
    with tokens.of(model):
        assert torch.equal(model(ids, labels), _shifted(labels)[: LENGTH // 2])


def test_the_mean_of_losses_whose_sum_half_precision_does_not_hold(monkeypatch):
    monkeypatch.setattr(tokens_style, "all_reduce", lambda count, *_: 2 * count)
    tokens = tokens_style.TokensOfRank(SimpleNamespace(size=lambda: 2), torch.arange(100), {}, {})
    logits = torch.tensor([[1000.0, 0.0]], dtype=torch.float16).repeat(100, 1).requires_grad_()
    labels, weight = torch.ones(100, dtype=torch.long), torch.tensor([1.0, 2.0], dtype=torch.float16)
    with tokens.of(nn.Identity()):
        loss = F.cross_entropy(logits, labels, weight)
    loss.backward()
    assert loss.item() == 1000  # as torch's kernel of CUDA sums it, too
    assert torch.equal(logits.grad.sum(0).round(), torch.tensor([1.0, -1.0], dtype=torch.float16))


def _refused_in_the_loop(_rank, _n):
    add_cpu_rings()
    model = _transformer("llama").double()
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    ids, labels = _tokens()
    plan = _plan(model, {"input_ids": ids, "attention_mask": mask}, context=2)
    mesh = plan.device_mesh("cpu")
    plan.apply(model, mesh)
    with plan.context_parallel(model, mesh, ids, mask, labels) as (some, seen, targets):
        with pytest.raises(
            ValueError, match=r"expected the tensors input_ids, attention_mask, .* got input_ids, labels"
        ):
            model(input_ids=some, labels=targets)
        with pytest.raises(ValueError, match="got a mask, which torch's ring does not take"):
            model(input_ids=some, attention_mask=torch.zeros_like(seen).index_fill(1, torch.arange(4), 1))
        model(input_ids=some, attention_mask=seen)
    with pytest.raises(ValueError, match="a multiple of 4 up to the 16 of the plan, got"):
        plan.context_parallel(model, mesh, torch.cat([ids, ids], 1)).__enter__()
    return True


def test_a_loop_that_differs_from_the_record_is_refused():
    pytest.importorskip("transformers")
    assert all(processes.run(_refused_in_the_loop, 2))


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
def test_calls_of_a_decoder_equal_one_process(options):
    pytest.importorskip("transformers")
    names = tuple(name for name in MODELS if name not in PLAIN) if not options else ("llama", "gpt2", "opt")
    _check(2, [(name, options, with_labels, {"context": 2}) for name in names for with_labels in (True, False)])


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"context": 4}, {"context": 2, "shard": 2}, {"context": 2, "tensor": 2}], ids=str)
def test_decoders_over_four_ranks_equal_one_process(sizes):
    pytest.importorskip("transformers")
    _check(4, [(name, "", True, sizes) for name in ("counted", "compared_positions", "llama", "gpt2", "gpt_neox")])


class PassedPositions(Decoder):
    """A decoder whose blocks shift the positions that it passes on."""

    class Block(Block):
        def forward(self, x, positions):
            following = torch.cat([positions[1:], positions[:1]])
            return super().forward(x + (following[:, None] * self.steps).sin().to(x.dtype))

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.__class__ = self.Block
            block.steps = torch.arange(WIDTH) / WIDTH

    def forward(self, ids, labels=None):
        x, positions = self.embed(ids), torch.arange(ids.shape[1], device=ids.device)
        for block in self.blocks:
            x = block(x, positions)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def _summed(_rank, n):
    """Largest differences of the sum of two losses from one process, and of gradients: blocks run again in between."""
    add_cpu_rings()
    torch.manual_seed(0)
    model, (ids, labels) = PassedPositions().double(), _tokens()
    plan = _plan(model, {"ids": ids, "labels": labels}, context=2, checkpoint="every")
    whole, model = processes.copies(model)
    mesh = plan.device_mesh("cpu")
    plan.apply(model, mesh)
    expected = whole(ids, labels) + whole(labels.abs() % WORDS, ids)
    expected.backward()
    with plan.context_parallel(model, mesh, ids, labels) as (some, targets):
        loss = model(some, targets) + model(targets.abs() % WORDS, some)
        loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    pairs = zip(whole.parameters(), model.parameters(), strict=True)
    grads = [
        processes.difference(one.grad, processes.whole(other.grad)) for one, other in pairs if one.grad is not None
    ]
    return float((total / n - expected).abs()), max(grads)


def test_two_forwards_before_a_backward_that_repeats_them():
    for differences in processes.run(_summed, 2):
        assert max(differences) <= 1e-12
