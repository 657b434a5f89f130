"""Models of libraries: silence on sound ones, their true findings, and defects planted in them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from modelsummary import Statistics

SIZE = (2, 3, 224, 224)


def codes(model, inputs, **options):
    return [(finding.code, finding.fqn) for finding in Statistics(model, inputs).check(**options)]


def on_meta(make, **options):
    with torch.device("meta"):
        return make(**options)


def planted_in(model, head, inputs):
    """Plant a spare layer, a frozen head that is detached, and an unread result; return what is found of them."""
    layer = model.get_submodule(head)

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.other = layer, nn.Linear(layer.out_features, 4, device="meta")

        def forward(self, x):
            y = self.layer(x)
            y.expand(4096, *y.shape).exp()
            return y + self.other(y).detach().mean()

    model.set_submodule(head, Head())
    model.spare = nn.Linear(3, 3, device="meta")
    return set(codes(model, inputs, select=["G", "U201", "U203"]))


def planted(head):
    return {("G103", f"{head}.other"), ("U201", "spare"), ("U203", head)}


def test_sound_models_of_torchvision():
    models = pytest.importorskip("torchvision.models", exc_type=(ImportError, RuntimeError))
    for name in ("resnet18", "mobilenet_v3_small"):
        assert codes(on_meta(getattr(models, name)), SIZE) == []


def test_defects_in_torchvision():
    models = pytest.importorskip("torchvision.models", exc_type=(ImportError, RuntimeError))
    assert codes(on_meta(models.vgg11_bn), SIZE) == [("N601", f"features.{i}") for i in (0, 4, 8, 11, 15, 18, 22, 25)]
    swin = codes(on_meta(models.swin_t), SIZE)  # it multiplies, masks and normalises scores itself
    assert [code for code, _ in swin] == ["S503"] * 12
    assert planted_in(on_meta(models.resnet18), "fc", SIZE) == planted("fc")


def test_timm():
    timm = pytest.importorskip("timm")
    for name in ("vit_tiny_patch16_224", "convnext_atto", "regnetx_002"):
        assert codes(on_meta(timm.create_model, model_name=name), SIZE) == []
    assert planted_in(on_meta(timm.create_model, model_name="vit_tiny_patch16_224"), "head", SIZE) == planted("head")


def test_transformers():
    transformers = pytest.importorskip("transformers")
    ids = {"input_ids": torch.zeros(2, 64, dtype=torch.long, device="meta")}
    bert = transformers.BertConfig(num_hidden_layers=2)
    assert codes(on_meta(transformers.BertModel, config=bert), ids) == []
    gpt2 = on_meta(transformers.GPT2LMHeadModel, config=transformers.GPT2Config(n_layer=2))
    assert codes(gpt2, ids) == []
    assert codes(gpt2.to(torch.bfloat16), ids) == [("S501", "lm_head")]  # a vocabulary of 50257
    llama = transformers.LlamaConfig(num_hidden_layers=2, hidden_size=256, num_attention_heads=4, vocab_size=1000)
    model = on_meta(transformers.LlamaForCausalLM, config=llama)
    assert codes(model, ids, ignore="U202") == []
    assert planted_in(model, "lm_head", ids) == planted("lm_head")
    # a loss on the logits alone leaves out a head that the model also returns
    labels = torch.zeros(2, 64, dtype=torch.long, device="meta")

    def loss(output):
        return F.cross_entropy(output["logits"].flatten(0, 1), labels.flatten())

    assert codes(on_meta(transformers.LlamaForCausalLM, config=llama), ids, select="G", loss=loss) == []
