"""``nn.MultiheadAttention`` and what is built of it, split by heads."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from modelsummary import InputError, Statistics
from tests.parallel import collectives, processes


class Cross(nn.Module):
    """Attention of one sequence to another one, with masks, weights and layouts as the caller wants."""

    def __init__(self, heads=4, **options):
        super().__init__()
        self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 16)
        self.attention = nn.MultiheadAttention(16, heads, **options)

    def forward(self, x, y, **options):
        y = self.two(y)
        result, weights = self.attention(self.one(x), y, y, **options)
        return result if weights is None else (result, weights)


class Latents(nn.Module):
    """A parameter as the query."""

    def __init__(self, **options):
        super().__init__()
        self.query = nn.Parameter(torch.randn(3, 16))
        self.attention = nn.MultiheadAttention(16, 4, kdim=8, vdim=8, **options)

    def forward(self, x):
        return self.attention(self.query, x, x, need_weights=False)[0]


def encoder(**options):
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=not layer.norm_first)


def decoder(**options):
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 32, **options), 2)


class Classifier(nn.Module):
    """Two layers of an encoder between an embedding and a head."""

    def __init__(self, **options):
        super().__init__()
        self.embed, self.encoder, self.head = nn.Embedding(40, 16), encoder(**options), nn.Linear(16, 40)

    def forward(self, ids):
        return self.head(self.encoder(self.embed(ids)))


class Translator(nn.Module):
    """Encoder and decoder, whose attentions take the encoder's result."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(40, 16), nn.Linear(16, 40)
        self.transformer = nn.Transformer(16, 4, 1, 1, 32, batch_first=True)

    def forward(self, source, target):
        return self.head(self.transformer(self.embed(source), self.embed(target)))


SEQUENCES = {"pre-norm": lambda: Classifier(norm_first=True), "post-norm": Classifier, "translator": Translator}


def make_sequence(name):
    torch.manual_seed(0)
    ids = torch.arange(32).view(4, 8) * 7 % 40
    return SEQUENCES[name]().double().eval(), (ids, ids) if name == "translator" else (ids,)


def tensor(*shape):
    return torch.linspace(-1, 1, torch.Size(shape).numel(), dtype=torch.float64).sin().mul(9).sin().view(shape)


def cases():
    torch.manual_seed(0)
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    causal = nn.Transformer.generate_square_subsequent_mask(6)
    source, target = tensor(2, 6, 16), tensor(2, 5, 16)
    pair = {"x": tensor(2, 5, 8), "y": source}
    return {
        "encoder": (encoder(), {"src": source}),
        "padded": (encoder(norm_first=True), {"src": source, "src_key_padding_mask": padding}),
        "causal": (encoder(), {"src": source, "mask": causal, "is_causal": True}),
        "decoder": (decoder(batch_first=True), {"tgt": target, "memory": source}),
        "sequence first": (decoder(), {"tgt": target.transpose(0, 1), "memory": source.transpose(0, 1)}),
        "mean of weights": (Cross(batch_first=True), pair),
        "weights of heads": (Cross(batch_first=True), {**pair, "average_attn_weights": False}),
        "no bias": (Cross(batch_first=True, bias=False), {**pair, "need_weights": False}),
        "mask of heads": (Cross(batch_first=True), {**pair, "need_weights": False, "attn_mask": tensor(8, 5, 6)}),
        "masks": (Cross(batch_first=True), {**pair, "attn_mask": tensor(5, 6) > 0.9, "key_padding_mask": padding}),
        "one sequence": (Cross(), {name: each[0] for name, each in pair.items()}),
        "other widths": (Cross(batch_first=True, kdim=16, vdim=16), pair),
        "query of parameters": (Latents(), {"x": tensor(5, 8)}),
    }


def plan_of(name, **sizes):
    model, inputs = cases()[name]
    return Statistics(model.double().eval(), inputs).parallel_plan(**sizes)


def test_an_encoder_is_split_by_heads():
    plan = plan_of("encoder", tensor=2)
    first, *others = [layer for layer in plan.layers if layer.role == "heads"]
    assert [layer.fqn for layer in (first, *others)] == ["layers.0.self_attn", "layers.1.self_attn"]
    assert first.shards == {"in_proj_weight": 0, "in_proj_bias": 0, "out_proj.weight": 1, "out_proj.bias": None}
    assert first.params == (48 * 16 + 48 + 16 * 16) // 2 + 16
    styles = {layer.fqn: layer.style for layer in plan.layers}
    assert (styles["layers.0.linear1"], styles["layers.0.linear2"]) == ("ColwiseParallel", "RowwiseParallel")
    # Results of 2 x 6 tokens of 16 features of 8 bytes: two in each layer; the input of the model takes no gradient.
    activation = 2 * 6 * 16 * 8
    expected = {("forward", "all_reduce"): (4, 4 * activation), ("backward", "all_reduce"): (3, 3 * activation)}
    assert plan.collectives == expected
    code = plan.to_code()
    compile(code, "plan", "exec")
    assert "class AttentionParallel(LocalParallel)" in code
    assert ("use_nested_tensor", True, False) in {(each.name, each.whole, each.local) for each in plan.attributes}


def test_an_attention_gathers_chunks_of_the_sequence_once():
    model, inputs = make_sequence("pre-norm")
    plan = Statistics(model, inputs).parallel_plan(tensor=2, sequence=True)
    attention = next(layer for layer in plan.layers if layer.role == "heads")
    assert attention.options["input_layouts"] == ("Shard(1)",) * 3
    assert attention.options["output_layouts"] == "Shard(1)"
    # As in Megatron: a layer gathers before its attention and before its MLP, and reduces and scatters after both.
    # Activations are 4 x 8 tokens of 16 features of 8 bytes. The embedding scatters, and the head gathers; its logits
    # have 40 features.
    activation = 4 * 8 * 16 * 8
    assert plan.collectives == {
        ("forward", "all_gather"): (6, 5 * activation + 4 * 8 * 40 * 8),
        ("forward", "reduce_scatter"): (5, 5 * activation),
        ("backward", "all_gather"): (5, 5 * activation),
        ("backward", "reduce_scatter"): (5, 5 * activation),
    }


def test_what_keeps_an_attention_whole_is_said():
    class Own(nn.MultiheadAttention):
        def forward(self, query, key, value, **options):
            return super().forward(query * 2, key, value, **options)

    def replicated(attention):
        model = Cross(batch_first=True)
        model.attention = attention
        model.mlp = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))
        model.forward = lambda x, y: model.mlp(Cross.forward(model, x, y, need_weights=False))
        return Statistics(model, (tensor(2, 5, 8).float(), tensor(2, 6, 16).float())).parallel_plan(tensor=2).replicated

    added = nn.MultiheadAttention(16, 4, batch_first=True, add_bias_kv=True)
    assert "add_bias_kv, add_zero_attn" in replicated(added)["attention"]
    assert replicated(Own(16, 4, batch_first=True))["attention"] == (
        "Own overrides the forward of nn.MultiheadAttention; the forward of torch can be split"
    )


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(
        InputError, match=r"tensor=8 does not divide the 4 heads of layers.0.self_attn; pass one of 1, 2, 4"
    ):
        plan_of("encoder", tensor=8)


def test_an_attention_that_fsdp_could_not_gather_exchanges_rows():
    plan = plan_of("encoder", tensor=2, shard=2)
    (attention, *_) = (layer for layer in plan.layers if layer.role == "heads")
    assert set(attention.options["shards"].values()) == {"Shard(0)", "Shard(1)", "Replicate()"}
    pieces = ((16, False),) * 3  # queries, keys and values
    assert attention.options["pieces"] == {"in_proj_weight": pieces, "in_proj_bias": pieces}


def test_memory_of_a_rank():
    plan = plan_of("encoder", tensor=2)
    assert plan.memory(0).params == 8 * plan.params_per_rank


def _compared(_rank, _n):
    found = {}
    for name, (example, inputs) in cases().items():
        whole, model = processes.copies(example.double().eval())
        plan = Statistics(model, inputs).parallel_plan(tensor=2)
        plan.apply(model, plan.device_mesh("cpu"))
        ran = collectives.of_step(model, inputs, processes.loss_of)
        with torch.no_grad():  # where torch would take its fused kernels, and nested tensors
            outs = [each(**inputs) for each in (whole, model)]
        one, other = (out[0] if isinstance(out, tuple) else out for out in outs)
        padded = inputs.get("src_key_padding_mask", torch.zeros(one.shape[:1], dtype=torch.bool))
        alone = processes.difference(one[~padded], other[~padded])
        found[name] = (processes.compare(whole, model, inputs), alone, ran, collectives.of_plan(plan))
    return found


@pytest.mark.slow
def test_two_processes_are_the_model():
    for found in processes.run(_compared, 2):
        assert len(found) == 13
        for name, (differences, alone, ran, planned) in found.items():
            assert differences["output"] <= 1e-12, name
            assert differences["grad"] <= 1e-12, name
            assert differences["step"] <= 1e-10, name
            assert alone <= 1e-12, name
            assert ran == planned, name


def _in_chunks(_rank, _n):
    found = {}
    for name in SEQUENCES:
        model, inputs = make_sequence(name)
        whole, model = processes.copies(model)
        plan = Statistics(model, inputs).parallel_plan(tensor=2, sequence=True)
        plan.apply(model, plan.device_mesh("cpu"))
        ran = collectives.of_step(model, inputs, processes.loss_of)
        found[name] = (processes.compare(whole, model, inputs), ran, collectives.of_plan(plan))
    return found


@pytest.mark.slow
def test_chunks_of_the_sequence_are_the_model():
    for found in processes.run(_in_chunks, 2):
        assert set(found) == set(SEQUENCES)
        for name, (differences, ran, planned) in found.items():
            assert max(differences.values()) <= 1e-10, name
            assert max(differences["output"], differences["grad"]) <= 1e-12, name
            assert ran == planned, name


def test_biases_of_an_attention_with_a_width_of_its_own_for_keys():
    # The biases of queries, keys and values alone are one parameter.
    for bias in (True, False):
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8), Latents(bias=bias))
        plan = Statistics(model, torch.randn(5, 8)).parallel_plan(tensor=2, shard=2)
        (attention,) = (layer for layer in plan.layers if layer.fqn == "3.attention")
        assert list(attention.options.get("pieces", ())) == ["in_proj_bias"] * bias
        assert not plan.replicated
