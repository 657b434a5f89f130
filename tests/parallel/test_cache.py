"""Models that return a cache of keys and values, as those of transformers do by default."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from modelsummary import Statistics
from tests.parallel import processes, training
from tests.parallel.models import _hf

KINDS = ("LlamaForCausalLM", "Gemma2ForCausalLM", "GPT2LMHeadModel")


def model_of(kind, use_cache=True):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "GPT2LMHeadModel":
        config = transformers.GPT2Config(
            vocab_size=64, n_embd=32, n_layer=2, n_head=4, use_cache=use_cache, bos_token_id=0, eos_token_id=1
        )
        return transformers.GPT2LMHeadModel(config).double().eval()
    return _hf(kind, use_cache=use_cache, num_key_value_heads=2, head_dim=16).double().eval()


def ids():
    return torch.arange(32).view(4, 8) * 7 % 48


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_is_the_same_with_a_cache(kind):
    with_cache, without = (
        Statistics(model_of(kind, use_cache), {"input_ids": ids()}).parallel_plan(tensor=2)
        for use_cache in (True, False)
    )
    assert with_cache.collectives == without.collectives
    assert with_cache.params_per_rank == without.params_per_rank
    assert not [layer.reason for layer in with_cache.layers if layer.reason]


def test_keys_leave_the_model_sharded_only_in_a_cache():
    class Attention(nn.Module):
        def __init__(self, name):
            super().__init__()
            self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))
            self.name = name

        def forward(self, x, past=None):
            q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
            if past is not None:
                k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
            a = nn.functional.scaled_dot_product_attention(q, k, v)
            return {"y": self.out(a.transpose(1, 2).flatten(2)), self.name: (k, v)}

    cached, returned = (Statistics(Attention(name), (2, 6, 16)).parallel_plan(tensor=2) for name in ("past", "keys"))
    assert {layer.fqn: layer.reason for layer in cached.layers} == dict.fromkeys(("q", "k", "v", "out"), "")
    assert "the model would return a sharded tensor" in returned.replicated["k"]


def _generated(_rank, _n):
    results = {}
    for kind in KINDS:
        model = model_of(kind)
        plan = Statistics(model, {"input_ids": ids()}).parallel_plan(tensor=2)
        whole, model = processes.copies(model)
        plan.apply(model, plan.device_mesh("cpu"))
        with torch.no_grad():
            tokens = [
                each.generate(ids()[:, :3], max_new_tokens=4, do_sample=False, pad_token_id=0)
                for each in (whole, model)
            ]
            logits = []
            for each in (whole, model):
                first = each(ids()[:, :6])
                name = "cache" if "cache" in first else "past_key_values"  # the former since transformers 5.24
                following = each(ids()[:, 6:], **{name: first[name]})
                logits.append(torch.cat([first.logits, following.logits], 1))
        losses = [each(ids(), labels=ids()).loss for each in (whole, model)]
        for loss in losses:
            loss.backward()
        own = dict(model.named_parameters())
        gradients = max(
            processes.difference(parameter.grad, processes.whole(own[name].grad))
            for name, parameter in whole.named_parameters()
        )
        results[kind] = (torch.equal(*tokens), processes.difference(*logits), gradients)
    return results


@pytest.mark.slow
def test_two_processes_generate_as_the_model():
    for result in processes.run(_generated, 2):
        assert set(result) == set(KINDS)
        for kind, (is_equal, logits, gradients) in result.items():
            assert is_equal, kind
            assert max(logits, gradients) <= 1e-6, kind  # the models compute positions and the loss in float32


def test_activations_are_whole_whose_keys_go_through_later_stages():
    plan = Statistics(model_of("LlamaForCausalLM"), {"input_ids": ids()}).parallel_plan(tensor=2, pipeline=2)
    reasons = {layer.fqn: layer.reason for layer in plan.layers if layer.fqn.endswith("k_proj")}
    assert (
        "goes to the stage that begins with model.layers.1; a model that is called without a cache, or pipeline=1"
        in (reasons["model.layers.0.self_attn.k_proj"])
    )
    assert reasons["model.layers.1.self_attn.k_proj"] == ""  # its keys stay in the last stage


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "schedule"),
    [
        ({"tensor": 2, "sequence": True}, ""),
        ({"shard": 2}, ""),
        ({"pipeline": 2}, "1f1b"),
        ({"tensor": 2, "shard": 2}, ""),
        ({"tensor": 2, "data": 2}, ""),
        ({"tensor": 2, "pipeline": 2}, "1f1b"),
    ],
)
def test_models_with_a_cache_train_like_one_process(sizes, schedule):
    pytest.importorskip("transformers")
    n = math.prod(size for size in sizes.values() if size is not True)
    for rank in processes.run(training.compared, n, "transformers/llama", sizes, schedule):
        assert rank.get("difference", 1.0) <= 1e-9, rank
