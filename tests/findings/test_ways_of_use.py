"""``check()`` on models as people have them: wrapped, frozen, adapted, in half precision, with hooks, raising."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from modelsummary import InputError, Statistics, StepError
from tests.findings.planted import IMAGES, TEXT, TOKENS, Block, Images, Recurrent
from tests.untouched import untouched


class LowRank(nn.Module):
    """A frozen layer with a trained product of two small matrices beside it, the second of zeros at first."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.a = nn.Linear(layer.in_features, 4, bias=False)
        self.b = nn.Linear(4, layer.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x):
        return self.layer(x) + self.b(self.a(x))


def _adapted():
    model = Block().requires_grad_(False)
    model.up, model.down = LowRank(model.up), LowRank(model.down)
    return model


def _hooked():
    model, kept = Images(), []

    def keep(_module, _arguments, output):
        kept.append(output.detach())

    model.conv1.register_forward_hook(keep)
    return model


class Averaged(nn.Module):
    """A network and a frozen copy of it, whose result is the target."""

    def __init__(self):
        super().__init__()
        self.net = Block()
        self.mean = copy.deepcopy(self.net).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            target = self.mean(x)
        return (self.net(x) - target).square().mean()


class Probe(nn.Module):
    """A head on the features of a network that runs without gradients, though its parameters are trained."""

    def __init__(self):
        super().__init__()
        self.body, self.head = Block(), nn.Linear(64, 3)

    def forward(self, x):
        with torch.no_grad():
            features = self.body(x)
        return {"logits": self.head(features)}


def _frozen_body():
    model = Images()
    for module in (model.conv1, model.norm1, model.conv2):
        module.requires_grad_(False)
    return model


def _in_memory_format():
    return Images().to(memory_format=torch.channels_last)


IMAGE = torch.randn(IMAGES)
# name -> model, input, options, codes and modules of the findings
WAYS = {
    "frozen body": (_frozen_body, IMAGES, {}, [("N603", "norm1")]),
    "frozen body in eval()": (lambda: _frozen_body().eval(), IMAGES, {}, []),
    "low-rank adapters": (_adapted, TEXT, {}, []),
    "compiled": (lambda: torch.compile(Images(), backend="eager"), IMAGES, {}, []),
    "compiled inside": (lambda: nn.Sequential(torch.compile(Block(), backend="eager"), Block()), TEXT, {}, []),
    "DataParallel": (lambda: nn.DataParallel(Images()), IMAGES, {}, []),
    "autocast": (Block, TEXT, {"autocast": torch.bfloat16}, []),
    "half": (lambda: Block().half(), TEXT, {}, []),
    "channels last": (_in_memory_format, IMAGE.to(memory_format=torch.channels_last), {}, []),
    "hook": (_hooked, IMAGES, {}, [("T802", "conv1")]),
    "frozen copy": (Averaged, TEXT, {}, []),
    "probe": (Probe, TEXT, {}, [("G102", f"body.{name}") for name in ("down", "norm", "up")]),
    "recurrent": (Recurrent, TOKENS, {}, []),
    "loss of one result": (Probe, TEXT, {"loss": lambda output: output["logits"].sum(), "select": "G104"}, []),
}


@pytest.mark.parametrize("name", WAYS)
def test_findings_are_those_of_the_model(name):
    make, inputs, options, due = WAYS[name]
    model = make()
    stats = Statistics(model, inputs)
    with untouched(model):
        findings = stats.check(**options)
    assert sorted((finding.code, finding.fqn) for finding in findings) == due
    assert max(map(len, str(findings).splitlines())) < 250


def test_a_forward_that_yields():
    class Yielding(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(64, 64)

        def forward(self, x):
            yield self.fc(x)

    with pytest.raises(InputError, match="the forward returns a generator, which runs only while somebody iterates"):
        Statistics(Yielding(), TEXT).check()


def test_a_forward_that_raises_half_way():
    class Raising(Block):
        is_broken = False

        def forward(self, x):
            self.kept = super().forward(x)
            if self.is_broken:
                raise KeyError("half-way")
            return self.kept

    model = Raising()
    stats = Statistics(model, TEXT)
    model.is_broken = True
    with untouched(model), pytest.raises(StepError, match=r"^the forward of the step failed: KeyError: 'half-way'$"):
        stats.check()
