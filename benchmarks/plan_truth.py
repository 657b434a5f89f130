"""Planned peaks against the CPU's allocator, and planned steps against plain ones, bit for bit.

    PYTHONPATH=. python benchmarks/plan_truth.py [names] [--every 1] [--budgets 4]

For each model and budget, ``memory_plan`` is applied to the model, and a step runs under torch's profiler: its peak is
compared with the plan's. Outputs and gradients are compared with the ones of a step without a plan, from the same
random numbers; dropout is on.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from modelsummary import InputError, Statistics
from tests.memory.test_planning import MODELS as SMALL
from tests.real_memory import allocated

SHARES = (0.15, 0.4, 0.65, 0.9)  # of the way from the least peak to the one without a plan
TIMM = (
    "vit_tiny_patch16_224 deit_tiny_patch16_224 beit_base_patch16_224 cait_xxs24_224 xcit_nano_12_p16_224 mixer_s32_224"
    " resmlp_12_224 gmlp_ti16_224 convnext_atto convnextv2_atto poolformer_s12 pit_ti_224 twins_svt_small resnet18"
    " resnet26 regnetx_002 mobilenetv3_small_050 efficientnet_lite0 ghostnet_100 densenet121 dla34 tinynet_e"
    " levit_128s swin_tiny_patch4_window7_224 coat_lite_tiny crossvit_tiny_240 hiera_tiny_224 eva02_tiny_patch14_224"
)
_SMALL_CONFIG = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "vocab_size": 1000,
}
_GPT2 = {"n_embd": 128, "n_layer": 4, "n_head": 4, "vocab_size": 1000}
CONFIGS = {
    "Llama": ("LlamaForCausalLM", "LlamaConfig", _SMALL_CONFIG),
    "Mistral": ("MistralForCausalLM", "MistralConfig", {**_SMALL_CONFIG, "num_key_value_heads": 2}),
    "Qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {**_SMALL_CONFIG, "num_key_value_heads": 2}),
    "Qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**_SMALL_CONFIG, "num_key_value_heads": 2, "head_dim": 32}),
    "Gemma": ("GemmaForCausalLM", "GemmaConfig", {**_SMALL_CONFIG, "num_key_value_heads": 2, "head_dim": 32}),
    "Phi": ("PhiForCausalLM", "PhiConfig", _SMALL_CONFIG),
    "OLMo": ("OlmoForCausalLM", "OlmoConfig", _SMALL_CONFIG),
    "StableLM": ("StableLmForCausalLM", "StableLmConfig", {**_SMALL_CONFIG, "num_key_value_heads": 4}),
    "GPT-NeoX": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _SMALL_CONFIG),
    "GPT-2": ("GPT2LMHeadModel", "GPT2Config", _GPT2),
    "GPT-J": ("GPTJForCausalLM", "GPTJConfig", {**_GPT2, "rotary_dim": 16}),
    "BERT": ("BertForMaskedLM", "BertConfig", _SMALL_CONFIG),
    "RoBERTa": ("RobertaForMaskedLM", "RobertaConfig", _SMALL_CONFIG),
    "ELECTRA": ("ElectraForMaskedLM", "ElectraConfig", {**_SMALL_CONFIG, "embedding_size": 128}),
    "ALBERT": ("AlbertForMaskedLM", "AlbertConfig", {**_SMALL_CONFIG, "embedding_size": 64}),
    "DistilBERT": (
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {"dim": 128, "n_layers": 4, "n_heads": 4, "hidden_dim": 256, "vocab_size": 1000},
    ),
    "OPT": (
        "OPTForCausalLM",
        "OPTConfig",
        {**_SMALL_CONFIG, "ffn_dim": 256, "word_embed_proj_dim": 128, "max_position_embeddings": 128},
    ),
    "BLOOM": ("BloomForCausalLM", "BloomConfig", {"hidden_size": 128, "n_layer": 4, "n_head": 4, "vocab_size": 1000}),
}

Subject = tuple[str, Callable[[], tuple[nn.Module, dict[str, Tensor] | Tensor]]]


def encoder(dropout: float, *, norm_first: bool, width: int) -> tuple[nn.Module, Tensor]:
    """Return an encoder of torch, and features for it."""
    options = {"dropout": dropout, "batch_first": True, "norm_first": norm_first}
    layers = (nn.TransformerEncoderLayer(width, 4, 4 * width, **options) for _ in range(4))
    return nn.Sequential(*layers, nn.Linear(width, 50)), torch.randn(8, 64, width)


def subjects() -> Iterator[Subject]:
    """Names, and functions that make a model and its input."""
    for name, (make, shape) in SMALL.items():
        yield name, lambda make=make, shape=shape: (make(), torch.randn(shape))
    for dropout in (0.0, 0.1):
        for norm_first in (False, True):
            for width in (64, 128):
                name = f"encoder {width}, dropout {dropout}, norm {'first' if norm_first else 'last'}"
                yield name, lambda d=dropout, n=norm_first, w=width: encoder(d, norm_first=n, width=w)
    for name in CONFIGS:
        yield name, lambda name=name: transformer(name)
    for name in TIMM.split():
        yield name, lambda name=name: image_model(name)


def transformer(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a small model of transformers, and tokens with labels for it."""
    import transformers

    kind, config, settings = CONFIGS[name]
    tokens = torch.randint(3, 1000, (4, 64))
    return getattr(transformers, kind)(getattr(transformers, config)(**settings)), {
        "input_ids": tokens,
        "labels": tokens,
    }


def image_model(name: str) -> tuple[nn.Module, Tensor]:
    """Return a model of timm, and images for it."""
    import timm

    model = timm.create_model(name, num_classes=10)
    return model, torch.randn(2, *model.pretrained_cfg["input_size"])


def step(model: nn.Module, inputs: dict[str, Tensor] | Tensor) -> list[Tensor]:
    """Run a step; return outputs, gradients, buffers and the state of the generator."""
    torch.manual_seed(7)
    out = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    if isinstance(inputs, dict):
        out.loss.backward()
        results = [out.loss, out.logits]
    else:
        out.sum().backward()
        results = [out]
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [tensor.detach().clone() for tensor in (*results, *gradients, *model.buffers())] + [torch.get_rng_state()]


def real_peak(model: nn.Module, inputs: dict[str, Tensor] | Tensor) -> int:
    """Return the most bytes that a step allocates over what lived before it."""

    def run() -> None:
        torch.manual_seed(7)
        out = model(**inputs) if isinstance(inputs, dict) else model(inputs)
        (out.loss if isinstance(inputs, dict) else out.sum()).backward()

    model.zero_grad(set_to_none=True)
    run()
    model.zero_grad(set_to_none=True)
    return allocated(run)[1]


def main() -> None:
    """Print a line for each model, and a summary."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--every", type=int, default=1, help="take one model in so many")
    parser.add_argument("--budgets", type=int, default=len(SHARES))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    errors: list[float] = []
    above: list[str] = []
    unequal: list[str] = []
    n_models = 0
    begin = time.process_time()
    chosen = [subject for subject in subjects() if not arguments.names or subject[0] in arguments.names]
    for name, make in chosen[:: arguments.every]:
        torch.manual_seed(0)
        model, inputs = make()
        model.train()
        stats = Statistics(model, input_data=inputs)
        stats.calibrate(backward=True)
        plain = stats.memory()
        before = plain.params + plain.buffers + plain.inputs
        start = copy.deepcopy(model.state_dict())
        expected = step(model, inputs)
        try:
            least = stats.memory_curve(2)[-1].peak
        except InputError as error:
            print(f"{name}: {error}", flush=True)
            continue
        n_models += 1
        line = []
        for share in SHARES[: arguments.budgets]:
            budget = int(least + share * (plain.peak - least))
            plan = stats.memory_plan(budget)
            model.load_state_dict(start)
            model.zero_grad(set_to_none=True)
            applied = plan.apply(model)
            is_equal = all(map(torch.equal, expected, step(model, inputs)))
            measured = real_peak(model, inputs) + before
            applied.undo()
            errors.append(measured / plan.peak - 1)
            if measured > budget:
                above.append(f"{name} at {share}: {measured:,} of {budget:,} ({measured / budget - 1:+.2%})")
            if not is_equal:
                unequal.append(f"{name} at {share}")
            line.append(f"{errors[-1]:+.2%}{'' if is_equal else ' DIFFERS'}")
        model.load_state_dict(start)
        print(f"{name}: {', '.join(line)} (plans can save {1 - least / plain.peak:.0%})", flush=True)
    mean = statistics.mean(map(abs, errors))
    print(f"{n_models} models, {len(errors)} plans: mean error {mean:.2%}, worst {max(errors, key=abs):+.2%}")
    print(f"above the budget: {len(above)}: {'; '.join(above)}")
    print(f"not equal bit for bit: {len(unequal)}: {'; '.join(unequal)}")
    print(f"{time.process_time() - begin:.0f} CPU seconds")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:  # workspaces are measured for the models of this run alone
        os.environ["MODELSUMMARY_CACHE"] = folder
        main()
