"""Models of libraries: silence on sound ones, their true findings, and nothing but the defects planted in them."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from modelsummary import Statistics
from tests.findings.in_libraries import DEFECTS, IN_HALF, plant, plant_values

SIZE = (2, 3, 224, 224)


def codes(model, inputs, **options):
    return [(finding.code, finding.fqn) for finding in Statistics(model, inputs).check(**options)]


def on_meta(make, **options):
    with torch.device("meta"):
        return make(**options)


def test_sound_models_of_torchvision():
    models = pytest.importorskip("torchvision.models", exc_type=(ImportError, RuntimeError))
    for name in ("resnet18", "mobilenet_v3_small"):
        assert codes(on_meta(getattr(models, name)), SIZE) == []


def test_defects_in_torchvision():
    models = pytest.importorskip("torchvision.models", exc_type=(ImportError, RuntimeError))
    assert codes(on_meta(models.vgg11_bn), SIZE) == [("N601", f"features.{i}") for i in (0, 4, 8, 11, 15, 18, 22, 25)]
    swin = codes(on_meta(models.swin_t), SIZE)  # it multiplies, masks and normalises scores itself
    assert [code for code, _ in swin] == ["S503"] * 12


def test_timm():
    timm = pytest.importorskip("timm")
    for name in ("vit_tiny_patch16_224", "convnext_atto", "regnetx_002"):
        assert codes(on_meta(timm.create_model, model_name=name), SIZE) == []


def test_transformers():
    transformers = pytest.importorskip("transformers")
    ids = {"input_ids": torch.zeros(2, 64, dtype=torch.long, device="meta")}
    bert = transformers.BertConfig(num_hidden_layers=2)
    assert codes(on_meta(transformers.BertModel, config=bert), ids) == []
    gpt2 = on_meta(transformers.GPT2LMHeadModel, config=transformers.GPT2Config(n_layer=2))
    assert codes(gpt2, ids) == []
    assert codes(gpt2.to(torch.bfloat16), ids) == [("S501", "lm_head")]  # a vocabulary of 50257
    llama = transformers.LlamaConfig(num_hidden_layers=2, hidden_size=256, num_attention_heads=4, vocab_size=1000)
    assert codes(on_meta(transformers.LlamaForCausalLM, config=llama), ids, ignore="U202") == []
    # a loss on the logits alone leaves out a head that the model also returns
    labels = torch.zeros(2, 64, dtype=torch.long, device="meta")

    def loss(output):
        return F.cross_entropy(output["logits"].flatten(0, 1), labels.flatten())

    assert codes(on_meta(transformers.LlamaForCausalLM, config=llama), ids, select="G", loss=loss) == []


def _resnet():
    models = pytest.importorskip("torchvision.models", exc_type=(ImportError, RuntimeError))
    model = on_meta(models.resnet101)
    fqns = [fqn for fqn, module in model.named_modules() if type(module).__name__ == "Bottleneck"]
    return model, fqns, lambda block: block.conv3.out_channels, SIZE


def _vit():
    model = on_meta(pytest.importorskip("timm").create_model, model_name="vit_tiny_patch16_224")
    return model, [f"blocks.{i}.{name}" for i in range(12) for name in ("attn", "mlp")], lambda _: 192, SIZE


def _bert():
    transformers = pytest.importorskip("transformers")
    model = on_meta(transformers.BertModel, config=transformers.BertConfig(num_hidden_layers=10))
    fqns = [f"encoder.layer.{i}.{name}" for i in range(10) for name in ("attention.output", "output")]
    return model.train(), fqns, lambda _: 768, {"input_ids": torch.zeros(2, 64, dtype=torch.long, device="meta")}


@pytest.mark.parametrize("make", [_resnet, _vit, _bert])
@pytest.mark.parametrize(("defects", "options"), [(DEFECTS, {}), (IN_HALF, {"autocast": torch.bfloat16})])
def test_planted_in_libraries(make, defects, options):
    model, fqns, width, inputs = make()
    due = plant(model, fqns[: len(defects)], width, defects)
    assert set(codes(model, inputs, **options)) == due


def _alexnet():
    models = pytest.importorskip("torchvision.models", exc_type=(ImportError, RuntimeError))
    return models.alexnet(), "features.0", "features.3", ("features.8", "features.10"), SIZE


def _small_vit():
    model = pytest.importorskip("timm").create_model("vit_tiny_patch16_224")
    return model, "blocks.0.mlp.fc1", "blocks.1.mlp.fc1", ("blocks.2.mlp.fc1", "blocks.2.mlp.fc2"), SIZE


def _small_bert():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(num_hidden_layers=3, hidden_size=64, num_attention_heads=4, intermediate_size=128)
    up, down = (f"encoder.layer.{{}}.{name}.dense" for name in ("intermediate", "output"))
    inputs = {"input_ids": torch.zeros(2, 64, dtype=torch.long)}
    return transformers.BertModel(config), up.format(0), up.format(1), (up.format(2), down.format(2)), inputs


@pytest.mark.parametrize("make", [_alexnet, _small_vit, _small_bert])
def test_values_planted_in_libraries(make):
    model, constant, large, zeros, inputs = make()
    assert codes(model, inputs, select="P") == []
    due = plant_values(model, constant, large, zeros)
    assert set(codes(model, inputs, select="P")) == due
