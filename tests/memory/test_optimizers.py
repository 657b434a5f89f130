"""What optimizers by name keep between steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from modelsummary import InputError, Statistics
from modelsummary.memory.optimizers import Lion
from tests.models import Call
from tests.real_memory import allocated, persistent

WEIGHT, BIAS = 128 * 64, 128


def _expected():
    """Bytes of the states of a weight of 128 x 64 and a bias of 128."""
    yield "lion", "Lion", 4 * (WEIGHT + BIAS)  # one momentum
    yield "AdamW_8bit", "AdamW8bit", 2 * WEIGHT + 2 * 4 * WEIGHT // 256 + 8 * BIAS  # scales; a small one in float32
    if hasattr(torch.optim, "Muon"):
        yield "muon", "Muon and AdamW", 4 * WEIGHT + 8 * BIAS + 4  # one momentum; AdamW and its number of steps


@pytest.mark.parametrize(("name", "kind", "nbytes"), list(_expected()))
def test_states_have_the_bytes_of_their_definition(name, kind, nbytes):
    memory = Statistics(nn.Linear(64, 128), (4, 64)).memory(optimizer=name)
    assert (memory.optimizer, memory.optimizer_state, memory.execution) == (kind, nbytes, "shape")


def test_lion_is_the_one_of_its_paper():
    """Two steps by hand: the sign of 0.9 m + 0.1 g, and m = 0.99 m + 0.01 g."""
    parameter = nn.Parameter(torch.tensor([1.0]))
    optimizer = Lion([parameter], lr=0.1, weight_decay=0.5)
    parameter.grad = torch.tensor([2.0])
    optimizer.step()  # m = 0.02
    assert parameter.item() == pytest.approx(1.0 * 0.95 - 0.1)
    parameter.grad = torch.tensor([-0.1])
    optimizer.step()  # 0.9 * 0.02 - 0.1 * 0.1 is positive
    assert parameter.item() == pytest.approx(0.85 * 0.95 - 0.1)
    assert optimizer.state[parameter]["exp_avg"].item() == pytest.approx(0.99 * 0.02 - 0.001)


def test_the_time_of_an_unknown_kernel_is_refused():
    with pytest.raises(InputError, match="8-bit optimizers is not known, so memory\\(\\) predicts their states"):
        Statistics(nn.Linear(64, 128), (4, 64)).estimate_latency("A100", backward=True, optimizer="adamw-8bit")


def test_several_optimizers_step_one_after_the_other():
    """Those of a generator and a critic, with a group of other settings; the truth is a real step."""
    model = Call(
        lambda self, x: self.critic(self.generator(x).relu()), generator=nn.Linear(64, 128), critic=nn.Linear(128, 8)
    )
    groups = [{"params": [model.generator.weight], "amsgrad": True}, {"params": [model.generator.bias]}]
    optimizers = [torch.optim.AdamW(groups), torch.optim.SGD(model.critic.parameters(), 0.1, momentum=0.9)]
    x = torch.randn(4, 64)
    memory = Statistics(model, x).memory(optimizer=optimizers)
    assert memory.optimizer == "AdamW and SGD"
    assert memory.optimizer_state == 4 * (3 * WEIGHT + 2 * BIAS + 2) + 4 * (128 * 8 + 8)  # two numbers of steps

    def step():
        output = model(x)
        output.sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        return output

    step()
    model.zero_grad()
    assert memory.peak == pytest.approx(persistent(memory) + allocated(step)[1], abs=64)


def test_a_list_of_names_is_refused():
    with pytest.raises(InputError, match="of any library, as class, instance or list, got \\['adam'\\]"):
        Statistics(nn.Linear(64, 128), (4, 64)).memory(optimizer=["adam"])
