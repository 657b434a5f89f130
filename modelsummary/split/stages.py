"""``Stages``: a model cut into ``nn.Sequential`` parts that together are the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, overload

import torch
from tabulate import tabulate
from torch import nn

from modelsummary.dataflow import Record
from modelsummary.errors import LayerNotFoundError, SplitError
from modelsummary.split.stage import Inputs, Stage
from modelsummary.split.verify import Verification, verify
from modelsummary.units import PREFIXES, auto_prefix

__all__ = ["SharedParameter", "StageFacts", "Stages"]


@dataclass(frozen=True)
class StageFacts:
    """What is known of a stage.

    Attributes:
        first, last: names of the first and the last call.
        calls: modules and functions that the stage calls.
        params: elements of its parameters; one that several stages hold counts in each.
        param_bytes, buffer_bytes: bytes of its parameters and buffers.
        macs: multiply-adds of one forward.
        cost: what was balanced, in the user's unit.
        share: of the cost of all stages, 0 to 1.
        crossing_bytes: bytes of the tensors that cross from this stage into the next, for the recorded batch.
        crossing_tensors: how many.
        activation_bytes: bytes of the tensors that its calls make.
    """

    first: str
    last: str
    calls: int
    params: int
    param_bytes: int
    buffer_bytes: int
    macs: int
    cost: float
    share: float
    crossing_bytes: int
    crossing_tensors: int
    activation_bytes: int


@dataclass(frozen=True)
class SharedParameter:
    """A parameter that several stages hold: one object here, to be reduced where the stages are apart.

    Attributes:
        fqn: its first name in the model.
        stages: numbers of the stages.
        names: its name in each of these.
    """

    fqn: str
    stages: tuple[int, ...]
    names: tuple[str, ...]


class Stages(Sequence[nn.Sequential]):
    """The stages of a model, in order; called, they are the model.

    Each stage is an ``nn.Sequential`` with the model's own modules, parameters and buffers under their own names.
    Training a stage trains the model.

    Attributes:
        facts: what is known of each stage.
        by: what was balanced.
        ideal: the smallest cost of the dearest stage that any cut could have: the mean, or the dearest call.
        record: of the forward that was cut.
        crossing: meta tensors like those that enter each stage, of the recorded batch; last those in the result.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: Sequence[nn.Sequential],
        facts: Sequence[StageFacts],
        inputs: Inputs,
        *,
        by: str,
        ideal: float,
        crossing: Sequence[Sequence[torch.Tensor]],
        record: Record,
    ) -> None:
        self._model: nn.Module | None = model
        self._stages = list(stages)
        self._inputs = inputs
        self.facts = list(facts)
        self.by = by
        self.ideal = ideal
        self.crossing = [tuple(each) for each in crossing]
        self.record = record
        self._class_name = type(model).__name__
        self._keys = list(model.state_dict(keep_vars=True))

    # ------------------------------------------------------------------------------------- sequence

    def __len__(self) -> int:
        return len(self._stages)

    @overload
    def __getitem__(self, index: int) -> nn.Sequential: ...
    @overload
    def __getitem__(self, index: slice) -> list[nn.Sequential]: ...
    def __getitem__(self, index: int | slice) -> nn.Sequential | list[nn.Sequential]:
        return self._stages[index]

    def __iter__(self) -> Iterator[nn.Sequential]:
        return iter(self._stages)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the stages one after the other: what the model returns."""
        first = self._stages[0]
        if isinstance(first, Stage):
            value = first(*args, **kwargs)
        else:
            value = first(*self._inputs.bind(args, kwargs).values())
        for stage in self._stages[1:]:
            value = stage(*value) if isinstance(value, tuple) else stage(value)
        return value

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_model": None, "record": None}

    @property
    def model(self) -> nn.Module:
        """The model that was split. Raises ``SplitError`` where it is gone, after pickling."""
        if self._model is None:
            raise SplitError("these stages were pickled without the model they were made of; call split() again")
        return self._model

    def verify(self, *args: Any, **kwargs: Any) -> Verification:
        """Run the model and the stages on these inputs, forward and backward, and compare everything.

        The stages run detached from one another, as in a pipeline. Gradients, buffers and random generators are
        afterwards as before.

        Returns:
            The largest differences: 0.0 where all is bit-equal. (Gradients may differ by rounding: tensors that cross
            into several stages sum theirs in another order.)

        Raises:
            SplitError: something differs by more than rounding, or is missing.
        """
        return verify(self.model, self, self._inputs, args, kwargs)

    # ------------------------------------------------------------------------------------ parameters

    @property
    def shared_parameters(self) -> list[SharedParameter]:
        """Parameters that more than one stage holds."""
        holders: dict[int, dict[int, str]] = {}
        for number, stage in enumerate(self._stages):
            for name, parameter in stage.named_parameters(remove_duplicate=False):
                holders.setdefault(id(parameter), {}).setdefault(number, name)
        return [
            SharedParameter(min(held.values(), key=self._position), tuple(held), tuple(held.values()))
            for held in holders.values()
            if len(held) > 1
        ]

    def _position(self, fqn: str) -> int:
        return self._keys.index(fqn) if fqn in self._keys else len(self._keys)

    def state_dict(self) -> dict[str, Any]:
        """That of the model: every key once, in the model's order."""
        found: dict[str, Any] = {}
        for stage in self._stages:
            found.update(stage.state_dict())
        return {key: found[key] for key in [*self._keys, *found] if key in found}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of the model. Raises ``SplitError`` if its keys are not those of the model."""
        own = {key for stage in self._stages for key in stage.state_dict(keep_vars=True)}
        if own != set(state_dict):
            missing, unexpected = sorted(own - set(state_dict)), sorted(set(state_dict) - own)
            raise SplitError(f"the state dict does not fit: missing {missing[:3]}, unexpected {unexpected[:3]}")
        for stage in self._stages:
            stage.load_state_dict({key: state_dict[key] for key in stage.state_dict(keep_vars=True)})

    def stage_of(self, fqn: str) -> int:
        """Number of the (first) stage that holds a module, parameter or buffer of the model.

        Raises:
            LayerNotFoundError: no stage holds it.
        """
        for number, stage in enumerate(self._stages):
            names = (each for each, _ in (*stage.named_modules(), *stage.named_parameters(), *stage.named_buffers()))
            if fqn and fqn in names:
                return number
        raise LayerNotFoundError(f"no stage holds {fqn!r}; it must be the name of a called module or of a parameter")

    def train(self, mode: bool = True) -> Stages:
        """Set the mode of all stages."""
        for stage in self._stages:
            stage.train(mode)
        return self

    def eval(self) -> Stages:
        """``train(False)``."""
        return self.train(False)

    # ----------------------------------------------------------------------------------------- views

    @property
    def balance(self) -> float:
        """Cost of the dearest stage, as a multiple of ``ideal``."""
        return max(each.cost for each in self.facts) / self.ideal

    def to_records(self) -> list[dict[str, Any]]:
        """A dict for each stage."""
        return [{"stage": number, **asdict(each)} for number, each in enumerate(self.facts)]

    def __str__(self) -> str:
        headers = ["Stage", "First", "Last", "Calls", "Params", "MACs", "Share", "Crossing (B)", "Activations (B)"]
        if self.by not in ("macs", "flops", "params"):
            headers.insert(6, f"Cost ({self.by})" if self.by != "cost" else "Cost")
        rows = []
        for number, each in enumerate(self.facts):
            row: list[Any] = [number, each.first, each.last, each.calls, f"{each.params:,}", f"{each.macs:,}"]
            if len(headers) == 10:
                row.append(f"{each.cost:,.6g}" if each.cost != int(each.cost) else f"{int(each.cost):,}")
            crossing = f"{each.crossing_bytes:,}" if number < len(self.facts) - 1 else "--"
            rows.append([*row, f"{each.share:.1%}", crossing, f"{each.activation_bytes:,}"])
        align = ["right", "left", "left", *["right"] * (len(headers) - 3)]
        table = tabulate(rows, headers, tablefmt="plain", colalign=align, disable_numparse=True).splitlines()
        line = "=" * max(map(len, table))
        summary = [f"{self._class_name} in {len(self)} stage(s) by {self.by}: {self._balance_line()}"]
        for each in self.shared_parameters:
            summary.append(f"Shared: {each.fqn} by the stages {', '.join(map(str, each.stages))}")
        return "\n".join([line, table[0], line, *table[1:], line, *summary, line])

    def _balance_line(self) -> str:
        dearest = max(each.cost for each in self.facts)
        prefix = auto_prefix(dearest)
        return f"dearest stage {dearest / PREFIXES[prefix]:.4g}{prefix}, {self.balance:.3f} of the ideal"

    __repr__ = __str__
