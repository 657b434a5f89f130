"""Optimizers that steps name and torch lacks: what they keep between steps, and what their step allocates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["PART", "AdamW8bit", "JoinedOptimizers", "Lion", "MuonWithAdamW"]

_BLOCK = 256  # elements with one scale
PART = "optimizer"  # name of the setting of a group that tells its optimizer among several
_LEAST = 4096  # elements of a parameter whose states have 8 bits


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al., 2023, "Symbolic Discovery of Optimization Algorithms"), which keeps one momentum.

    >>> parameter = nn.Parameter(torch.ones(2))
    >>> parameter.grad = torch.tensor([1.0, -1.0])
    >>> Lion([parameter], lr=0.5, weight_decay=0.0).step()
    >>> parameter.tolist()
    [0.5, 1.5]
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient."""
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                momentum = state["exp_avg"]
                update = momentum.lerp(parameter.grad, 1 - first).sign_()
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
                momentum.lerp_(parameter.grad, 1 - second)


class AdamW8bit(torch.optim.Optimizer):
    """AdamW with states of 8 bits in blocks of 256 elements, each with a scale, as in bitsandbytes (Dettmers, 2022).

    Parameters of fewer than 4,096 elements have states of float32. The step is one kernel that allocates nothing, so
    that here it updates nothing: it stands for the memory.

    >>> parameter = nn.Parameter(torch.ones(8192))
    >>> parameter.grad = torch.ones(8192)
    >>> optimizer = AdamW8bit([parameter])
    >>> optimizer.step()
    >>> {name: state.nbytes for name, state in optimizer.state[parameter].items()}
    {'state1': 8192, 'state2': 8192, 'absmax1': 128, 'absmax2': 128}
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Make the states of parameters that have a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    self.state[parameter].update(_states(parameter))


def _states(parameter: Tensor) -> dict[str, Tensor]:
    if parameter.numel() < _LEAST:
        return {name: torch.zeros_like(parameter, dtype=torch.float32) for name in ("state1", "state2")}
    states = {name: torch.zeros_like(parameter, dtype=torch.uint8) for name in ("state1", "state2")}
    blocks = -(-parameter.numel() // _BLOCK)
    scales = {name: parameter.new_zeros(blocks, dtype=torch.float32) for name in ("absmax1", "absmax2")}
    return {**states, **scales}


class JoinedOptimizers(torch.optim.Optimizer):
    """Several optimizers that step one after the other.

    Args:
        groups: groups of parameters, each with the number of its optimizer under ``PART``.
        makers: make the optimizers of their groups.

    >>> one, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    >>> groups = [{"params": [one], PART: 0}, {"params": [other], PART: 1}]
    >>> optimizer = JoinedOptimizers(groups, [torch.optim.SGD, torch.optim.AdamW])
    >>> [type(part).__name__ for part in optimizer.parts]
    ['SGD', 'AdamW']
    """

    def __init__(self, groups: Sequence[dict[str, Any]], makers: Sequence[Callable[[Any], Any]]) -> None:
        super().__init__([{**group} for group in groups], {})
        self.parts: list[Any] = []
        for number, make in enumerate(makers):
            members = [group for group in groups if group[PART] == number]
            if members:
                part = make([{key: value for key, value in group.items() if key != PART} for group in members])
                self.state.update(part.state)  # of optimizers that make it at once
                part.state = self.state
                self.parts.append(part)
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient."""
        for part in self.parts:
            part.step()


class MuonWithAdamW(JoinedOptimizers):
    """``torch.optim.Muon`` for all matrices, and AdamW for the other parameters.

    An optimizer sees parameters, not layers: embeddings and the last layer count as matrices, with one momentum. Where
    AdamW updates them, as Muon's authors advise, their states take twice as much.

    >>> weight, bias = nn.Parameter(torch.ones(4, 2)), nn.Parameter(torch.ones(4))
    >>> weight.grad, bias.grad = torch.ones(4, 2), torch.ones(4)
    >>> optimizer = MuonWithAdamW([weight, bias])
    >>> optimizer.step()
    >>> [sorted(optimizer.state[parameter]) for parameter in (weight, bias)]
    [['momentum_buffer'], ['exp_avg', 'exp_avg_sq', 'step']]
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 1e-3) -> None:
        parameters = list(params)
        matrices = [parameter for parameter in parameters if parameter.ndim == 2]
        others = [parameter for parameter in parameters if parameter.ndim != 2]
        members = [{"params": matrices, "lr": lr, PART: 0}, {"params": others, "lr": lr, PART: 1}]
        super().__init__([group for group in members if group["params"]], [torch.optim.Muon, torch.optim.AdamW])
