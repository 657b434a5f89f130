"""Twenty pairs of models with one planted difference: the first place is named; equal models do not differ."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import modelsummary
from modelsummary import InputError, StepError
from tests.idioms import IDIOMS, Gpt2, Llama, UNet, ids, rows
from tests.untouched import untouched


class RoundedNorm(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.bfloat16().float()).bfloat16().float()


class Shifted(nn.Module):
    """A table of positions that is read one position too late."""

    def __init__(self, table):
        super().__init__()
        self.weight = table.weight

    def forward(self, positions):
        return F.embedding((positions + 1) % len(self.weight), self.weight)


class Block(nn.Module):
    """Attention and an MLP whose code between the layers can be changed."""

    def __init__(self, **changes):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.changes = changes

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scale = self.changes.get("scale", 1 / math.sqrt(16))
        scores = (q @ k.transpose(-1, -2)) * scale
        if self.changes.get("causal", True):
            scores = scores.masked_fill(torch.ones_like(scores).triu(1) == 1, -math.inf)
        x = x + self.changes.get("residual", 1.0) * self.out(scores.softmax(-1) @ v)
        return x + self.down(F.gelu(self.up(x), approximate=self.changes.get("gelu", "none")))


def blocks(**changes):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(**(changes if number == 1 else {})) for number in range(3)))


def _gpt2():
    torch.manual_seed(0)
    return Gpt2().eval()


def _llama():
    torch.manual_seed(0)
    return Llama().eval()


def _unet():
    torch.manual_seed(0)
    return UNet().eval()


def _set(path, make):
    """Return a change of the module at a path."""

    def change(model):
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, make(model.get_submodule(path)))

    return change


def _tensor(path, function):
    """Return a change of the parameter at a path."""

    @torch.no_grad()
    def change(model):
        owner, _, name = path.rpartition(".")
        tensor = getattr(model.get_submodule(owner), name)
        tensor.copy_(function(tensor.clone()))

    return change


def _rounded(norm):
    made = RoundedNorm(norm.normalized_shape)
    made.load_state_dict(norm.state_dict())
    return made


def _eps(eps):
    def make(norm):
        made = copy.deepcopy(norm)
        made.eps = eps
        return made

    return make


GPT2, LLAMA, UNET = (_gpt2, {"ids": ids(3)}), (_llama, {"ids": ids(3)}), (_unet, {"x": rows(2, 3, 16, 16)})
# name -> model and batch, change, FQN and side of the first difference
PAIRS = {
    "epsilon": (GPT2, _set("h.1.ln_1", _eps(1e-6)), "h.1.ln_1", "outputs"),
    "epsilon of the last norm": (GPT2, _set("ln_f", _eps(1e-4)), "ln_f", "outputs"),
    "transposed weight": (GPT2, _tensor("h.2.c_proj.weight", torch.t), "h.2.c_proj", "outputs"),
    "rounded norm": (GPT2, _set("h.1.ln_2", _rounded), "h.1.ln_2", "outputs"),
    "approximate GELU": (GPT2, _set("h.3.mlp.1", lambda _: nn.GELU("tanh")), "h.3.mlp.1", "outputs"),
    "shifted positions": (GPT2, _set("wpe", Shifted), "wpe", "outputs"),
    "heads in another order": (GPT2, _tensor("h.0.c_attn.weight", lambda w: w.roll(8, 0)), "h.0.c_attn", "outputs"),
    "a bias left out": (GPT2, _tensor("h.2.mlp.0.bias", torch.zeros_like), "h.2.mlp.0", "outputs"),
    "one element": (
        GPT2,
        _tensor("h.3.mlp.2.weight", lambda w: w + 1e-3 * torch.eye(*w.shape)),
        "h.3.mlp.2",
        "outputs",
    ),
    "mask": (GPT2, _tensor("h.1.bias", torch.ones_like), "h.1.c_proj", "inputs"),
    "scale of a norm": (LLAMA, _tensor("layers.2.norm2.weight", lambda w: w + 1), "layers.2.norm2", "outputs"),
    "epsilon of an RMS norm": (LLAMA, _set("layers.1.norm1", _eps(1e-3)), "layers.1.norm1", "outputs"),
    "rotation": (LLAMA, _tensor("rotary.inv_freq", lambda f: f * 1.01), "rotary", "outputs"),
    "keys for values": (LLAMA, _tensor("layers.3.k.weight", lambda w: w.flip(0)), "layers.3.k", "outputs"),
    "statistics": (UNET, _tensor("down1.1.running_var", lambda v: v * 1.001), "down1.1", "outputs"),
    "kernel turned": (UNET, _tensor("up2.0.weight", lambda w: w.flip(-1)), "up2.0", "outputs"),
    "scale of scores": ((blocks, rows(2, 5, 16)), {"scale": 1 / 16}, "1.out", "inputs"),
    "no mask": ((blocks, rows(2, 5, 16)), {"causal": False}, "1.out", "inputs"),
    "approximate GELU in code": ((blocks, rows(2, 5, 16)), {"gelu": "tanh"}, "1.down", "inputs"),
    "scaled residual": ((blocks, rows(2, 5, 16)), {"residual": 0.99}, "1.up", "inputs"),
}


@pytest.mark.parametrize("name", PAIRS)
def test_the_first_place(name):
    (make, batch), change, fqn, side = PAIRS[name]
    model = make()
    other = make(**change) if isinstance(change, dict) else make()
    if not isinstance(change, dict):
        change(other)
    with untouched(model), untouched(other):
        divergence = modelsummary.compare_values(model, other, batch)
    assert (divergence.first.fqn_b, divergence.first.where) == (fqn, side)
    assert divergence
    assert divergence.place in str(divergence)
    assert divergence.to_records()[0]["outputs"] > 0


def test_there_are_twenty():
    assert len(PAIRS) == 20


def test_what_differs_is_named():
    model, other = _gpt2(), _gpt2()
    _tensor("h.2.c_proj.weight", torch.t)(other)
    assert modelsummary.compare_values(model, other, ids(3)).parameters == ["weight"]
    _, other = _gpt2(), blocks(causal=False)
    divergence = modelsummary.compare_values(blocks(), other, rows(2, 5, 16))
    assert (divergence.parent, divergence.place) == ("1", "in the forward of 1, before 1.out (Linear) is called")
    assert divergence.parameters == []


@pytest.mark.parametrize("name", IDIOMS)
def test_equal_models_do_not_differ(name):
    kind, inputs = IDIOMS[name]
    torch.manual_seed(0)
    model = kind().eval()
    divergence = modelsummary.compare_values(model, copy.deepcopy(model), inputs(3, 0))
    assert not divergence
    assert {row.outputs for row in divergence.rows} == {0.0}
    assert divergence.unmatched == []


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "unet", "dense"])
def test_bfloat16_is_within_its_rounding(name):
    kind, inputs = IDIOMS[name]
    torch.manual_seed(0)
    model = kind().eval()
    divergence = modelsummary.compare_values(model, copy.deepcopy(model).bfloat16(), inputs(3, 0))
    assert not divergence
    assert 1e-4 < max(row.outputs for row in divergence.rows) < 0.05


class Ordered(nn.Linear):
    """A linear layer that adds its products one by one, as no kernel does."""

    def forward(self, x):
        result = torch.zeros(len(x), self.out_features)
        for column in range(self.in_features):
            result += x[:, column, None] * self.weight[:, column]
        return result + self.bias


def test_sums_in_another_order_do_not_differ():
    """2,304 products, as of a 3 x 3 convolution of 256 channels: more than one rounding."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2304, 64), nn.ReLU(), nn.Linear(64, 4))
    ordered = copy.deepcopy(model)
    ordered[0].__class__ = Ordered
    divergence = modelsummary.compare_values(ordered, model, torch.randn(64, 2304))
    row = next(row for row in divergence.rows if row.fqn_b == "0")
    assert not divergence
    assert 4 * torch.finfo(torch.float32).eps < row.outputs < row.allowed < 3e-6


def test_random_numbers_are_the_same():
    torch.manual_seed(0)
    model = Gpt2().train()
    assert not modelsummary.compare_values(model, copy.deepcopy(model), ids(3))


class Renamed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.second(self.first(x).relu())


def test_names_match_by_structure_or_by_mapping():
    torch.manual_seed(0)
    model, other = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), Renamed()
    other.first.load_state_dict(model[0].state_dict())
    other.second.load_state_dict(model[2].state_dict())
    x = torch.randn(3, 4)
    divergence = modelsummary.compare_values(model, other, x)
    assert not divergence
    assert [(row.fqn_a, row.fqn_b) for row in divergence.rows] == [("", ""), ("0", "first"), ("2", "second")]
    assert divergence.unmatched == ["1"]
    crossed = modelsummary.compare_values(model, other, x, mapping={"0": "second", "2": "first"})
    assert crossed.first.fqn_b == "first"
    with pytest.raises(InputError, match="mapping names '3', but model_a has no such module"):
        modelsummary.compare_values(model, other, x, mapping={"3": "first"})


def test_refusals():
    model = nn.Linear(4, 4)
    with pytest.raises(InputError, match=r"model_b must be a torch\.nn\.Module, got dict"):
        modelsummary.compare_values(model, {}, torch.ones(1, 4))
    with pytest.raises(InputError, match="batch must hold tensors with values, got"):
        modelsummary.compare_values(model, model, (1, 4))
    with pytest.raises(InputError, match="model_b has tensors on meta"):
        modelsummary.compare_values(model, nn.Linear(4, 4, device="meta"), torch.ones(1, 4))
    with pytest.raises(InputError, match="mapping must be a dict of FQNs"):
        modelsummary.compare_values(model, model, torch.ones(1, 4), mapping=["0"])
    with pytest.raises(StepError, match="the forward of model_b failed"):
        modelsummary.compare_values(model, nn.Linear(5, 4), torch.ones(1, 4))
