"""Runs that leave out equal calls: the record is that of runs with every call, or no call is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from modelsummary import Statistics
from modelsummary.capture.inputs import call_arguments
from modelsummary.capture.templates import map_template
from modelsummary.record import call_comparison
from modelsummary.record.copied_events import CopiedEvents
from modelsummary.record.events import Record, Value
from modelsummary.record.runs import record
from modelsummary.record.tensors import Foreign


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.eps = 1e-6

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Block(nn.Module):
    """A block with a number that it does not read."""

    def __init__(self, number):
        super().__init__()
        self.number, self.flag, self.notes = number, None, []
        self.norm, self.drop = Norm(), nn.Dropout(0.5)
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x, mask):
        return x + self.down(F.silu(self.up(x))).masked_fill(mask[:, None, None], 0.0)


class WholeBlock(Block):
    """A block with sizes that follow the batch, dropouts, and an operator in place."""

    def forward(self, x, mask):
        batch, length, _ = x.shape
        y = self.norm(x).view(batch, length, 2, 4).transpose(1, 2).reshape(batch, length, 8)
        y = F.dropout(self.up(y), 0.1, self.training)
        y = y.clone().mul_(2.0)
        return x + self.drop(self.down(F.silu(y))).masked_fill(mask[:, None, None], 0.0)


class Decoder(nn.Module):
    def __init__(self, block: type[nn.Module] = Block, n_blocks: int = 3):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList(block(number) for number in range(n_blocks))
        self.head = nn.Linear(8, 10)

    def forward(self, tokens):
        x, mask = self.embed(tokens), tokens.sum(1) < 0
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


TOKENS = torch.zeros(3, 5, dtype=torch.long)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that sets from how many calls on calls are left out; from one on, unless it is called."""
    monkeypatch.setattr(call_comparison, "_FEWEST_CALLS", 1)
    return lambda fewest: monkeypatch.setattr(call_comparison, "_FEWEST_CALLS", fewest)


def records(model: nn.Module, *args: Any) -> Iterator[Record]:
    return record(model, call_arguments(model, args, (), {}, batch_dim=None, device=None, dtypes=None), "shape")


def as_text(found: Record) -> list[str]:
    """Return everything in a record, with values and memory numbered in the order in which they appear."""
    values: dict[Value, str] = {}
    memory: dict[tuple[int, int], int] = {}

    def number(run: int, storage: int) -> int:
        return memory.setdefault((run, storage), len(memory))

    def leaf(each: Any) -> str:
        if isinstance(each, Foreign):
            return f"foreign {id(each.tensor)}"
        if not isinstance(each, Value):
            return repr(each)
        if each not in values:
            kept = [number(*pair) for pair in enumerate(each.storages)]
            facts = (each.shape, each.dtype, each.nbytes, each.requires_grad, each.sizes, each.is_dynamic, kept)
            values[each] = f"%{len(values)} {facts}"
        return values[each].partition(" ")[0] if each in values else values[each]

    for storages in found.storages_of.values():
        for run, storage in enumerate(storages):
            number(run, storage)
    lines = []
    for event in found.root.walk():
        given = repr(map_template(leaf, (event.args, event.kwargs)))
        made = repr(map_template(leaf, event.result))
        kind = (event.fqn, event.name, event.call_index, event.grad, event.macs, event.training, event.obstacle)
        rest = (event.checkpointed, event.reads_sizes, event.dtype_bound, event.is_decision, sorted(event.assigned))
        lines.append(f"{kind} {rest} {given} -> {made}")
    lines += list(values.values())
    for event in found.root.walk():
        if event.children and all(child.is_module is False for child in event.children):
            lines += [
                str([[number(run, each) for each in sorted(one)] for run, one in enumerate(child.writes)])
                for child in event.children
                if len(child.writes[0]) < 2
            ]
    assert len({value.index for value in values}) == len(values)
    facts = (found.batch_size, found.no_batch, found.no_other_mode, found.smallest_batch)
    return [*lines, str(facts)]


def both(model: nn.Module, always: Callable[[int], None], *args: Any) -> Record:
    """Return the first record; check that it equals the one that runs with every call give."""
    found = next(records(model, *args))
    assert found.equal.first_of
    always(10**9)
    whole = next(records(model, *args))
    assert not whole.equal.first_of
    assert as_text(found) == as_text(whole)
    return found


@pytest.mark.parametrize("training", [True, False])
def test_only_the_first_of_equal_blocks_runs_again(always, training):
    found = both(Decoder(WholeBlock).train(training), always, TOKENS)
    assert found.equal.first_of == {"blocks.1": "blocks.0", "blocks.2": "blocks.0"}
    assert found.equal.differing == {"blocks.0": {"number"}}
    assert (found.no_batch, found.no_other_mode, found.smallest_batch) == ("", "", 1)
    assert "__getattribute__" not in vars(nn.Module)


class Scans(nn.Module):
    """A layer that, in training, goes through a sequence step by step."""

    def forward(self, x):
        return torch.stack([step * 2 for step in x.unbind(1)], 1) if self.training else x * 2


class ScansInside(Block):
    """A block with a layer that makes other calls in the other mode."""

    def __init__(self, number):
        super().__init__(number)
        self.scan = Scans()

    def forward(self, x, mask):
        return super().forward(self.scan(x), mask)


def test_a_layer_inside_that_makes_other_calls_is_one_call(always):
    found = both(Decoder(ScansInside), always, TOKENS)
    assert found.equal.first_of == {"blocks.1": "blocks.0", "blocks.2": "blocks.0"}
    scans = [event for event in found.root.walk() if event.fqn.endswith(".scan")]
    assert [(event.obstacle, event.children) for event in scans] == [
        ("makes different calls in train and in eval mode", [])
    ] * 3


TABLE = torch.ones(20, 8)


class TakesViews(Block):
    """A block that takes views of a parameter, of a table that belongs to no module, and of its input."""

    def forward(self, x, mask):
        y = x[:, :, :] + TABLE[: x.shape[1]]
        return x + self.down(y @ self.up.weight.t()).masked_fill(mask[:, None, None], 0.0)


def test_views_inside_have_the_memory_of_what_they_show(always):
    found = both(Decoder(TakesViews), always, TOKENS)
    assert found.equal.first_of == {"blocks.1": "blocks.0", "blocks.2": "blocks.0"}
    views = [event.result for event in found.root.walk() if event.name == "getitem"]  # of input, table and mask
    assert [len({value.storages for value in views[each::3]}) for each in range(3)] == [3, 1, 1]


def test_runs_with_every_call_decide_where_a_copy_fails(monkeypatch, always):
    def fails(*_: Any) -> None:
        raise KeyError("copy")

    model = Decoder()
    monkeypatch.setattr(CopiedEvents, "children", fails)
    found = next(records(model, TOKENS))
    monkeypatch.undo()
    assert not found.equal.first_of
    assert as_text(found) == as_text(next(records(model, TOKENS)))


def test_short_forwards_are_run_in_full():
    assert not next(records(Decoder(), TOKENS)).equal.first_of


class ReadsItsNumber(Block):
    def forward(self, x, mask):
        if len(x) == 1 and self.number == 2:
            x = x * 2
        return super().forward(x, mask)


class ReadsItsAttributes(Block):
    def forward(self, x, mask):
        if len(x) == 1 and vars(self)["number"] == 2:
            x = x * 2
        return super().forward(x, mask)


class ReadsItsFlag(Block):
    """A block that only ``is None`` tells from another one, in the other mode."""

    def __init__(self, number):
        super().__init__(number)
        self.flag = object() if number == 2 else None

    def forward(self, x, mask):
        if self.training and self.flag is not None:
            x = x * 2
        return super().forward(x, mask)


class HasAForward(Block):
    """A block with a forward of its own, which the instance holds."""

    def __init__(self, number):
        super().__init__(number)
        plain = self.forward

        def forward(x, mask):
            return plain(x * 2 if len(x) == 1 and number == 2 else x, mask)

        self.forward = forward


class WritesABuffer(Block):
    def forward(self, x, mask):
        if self.training:
            self.scale.mul_(2.0)
        return super().forward(x, mask) * self.scale[0]


class Assigns(Block):
    def forward(self, x, mask):
        if self.training:
            self.flag = 1
        return super().forward(x, mask)


class KeepsItsNumberInASlot(Block):
    __slots__ = ("place",)

    def __init__(self, number):
        super().__init__(number)
        self.place = number

    def forward(self, x, mask):
        return super().forward(x * 2 if len(x) == 1 and self.place == 2 else x, mask)


class ReadsABuffer(Block):
    """A block whose buffer decides, at a batch of one."""

    def __init__(self, number):
        super().__init__(number)
        self.scale[0] = number == 2

    def forward(self, x, mask):
        return super().forward(x * 2 if len(x) == 1 and self.scale[0] > 0 else x, mask)


THAT_MAY_DIFFER = [
    ReadsItsNumber,
    ReadsItsAttributes,
    ReadsItsFlag,
    HasAForward,
    WritesABuffer,
    Assigns,
    KeepsItsNumberInASlot,
    ReadsABuffer,
]


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("block", THAT_MAY_DIFFER)
def test_blocks_that_may_differ_in_another_run_all_run(block):
    assert not next(records(Decoder(block).eval(), TOKENS)).equal.first_of


class HoldsAnotherBuffer(Block):
    def __init__(self, number):
        super().__init__(number)
        self.scale[0] = number == 2


class HasALayerMore(Block):
    """A block whose optional layer may be registered as None, on which it decides at a batch of one."""

    def __init__(self, number):
        super().__init__(number)
        self.extra = nn.Linear(8, 8, bias=False)
        if number != 2:
            self.extra = None

    def forward(self, x, mask):
        return super().forward(x * 2 if len(x) == 1 and self.extra is not None else x, mask)


class IsHooked(Block):
    def __init__(self, number):
        super().__init__(number)
        if number == 2:
            self.register_forward_pre_hook(lambda module, args: (args[0] * (2 if len(args[0]) == 1 else 1), args[1]))


class HasAWiderLayer(Block):
    def __init__(self, number):
        super().__init__(number)
        if number == 2:
            self.up, self.down = nn.Linear(8, 24, bias=False), nn.Linear(24, 8, bias=False)


@pytest.mark.parametrize("block", [HoldsAnotherBuffer, HasALayerMore, IsHooked, HasAWiderLayer])
def test_a_block_that_differs_runs_and_the_others_do_not(always, block):
    found = both(Decoder(block, n_blocks=4), always, TOKENS)
    assert found.equal.first_of == {"blocks.1": "blocks.0", "blocks.3": "blocks.0"}


class TakesNumbers(Decoder):
    """A decoder that passes values that are known on shapes, on which a block decides at a batch of one."""

    class Block(Block):
        def forward(self, x, mask, which):
            return super().forward(x * 2 if len(x) == 1 and int(which) == 2 else x, mask)

    def __init__(self):
        super().__init__(self.Block)

    def forward(self, tokens):
        x, mask = self.embed(tokens), tokens.sum(1) < 0
        for number, block in enumerate(self.blocks):
            x = block(x, mask, torch.full((1,), number))
        return self.head(x)


class WritesBetween(Decoder):
    """A decoder that counts in a tensor, which it passes to its blocks."""

    def __init__(self):
        super().__init__(TakesNumbers.Block)

    def forward(self, tokens):
        x, mask, which = self.embed(tokens), tokens.sum(1) < 0, torch.zeros(1)
        for block in self.blocks:
            x = block(x, mask, which)
            which += 1
        return self.head(x)


class PassesADict(Decoder):
    """A decoder whose blocks, in evaluation, count in a dict that all of them are passed."""

    class Block(Block):
        def forward(self, x, mask, counts):
            counts["n"] += not self.training
            return super().forward(x * 2 if counts["n"] == 3 else x, mask)

    def __init__(self):
        super().__init__(self.Block)

    def forward(self, tokens):
        x, mask, counts = self.embed(tokens), tokens.sum(1) < 0, {"n": 0}
        for block in self.blocks:
            x = block(x, mask, counts)
        return self.head(x)


class Collects(Decoder):
    """A decoder whose blocks also return by a list, of which the model returns the sum."""

    class Block(Block):
        def __init__(self, number):
            super().__init__(number)
            self.collected = []

        def forward(self, x, mask):
            x = super().forward(x, mask)
            self.collected.append(x.mean())
            return x

    def __init__(self):
        super().__init__(self.Block)
        for block in self.blocks:
            block.collected = self.blocks[0].collected

    def forward(self, tokens):
        x = super().forward(tokens)
        return x, torch.stack(self.blocks[0].collected).sum()


class Counts(Decoder):
    """A decoder whose blocks count in a global, of which a factor is made."""

    calls = 0

    class Block(Block):
        def forward(self, x, mask):
            Counts.calls += 1
            return super().forward(x, mask)

    def __init__(self):
        super().__init__(self.Block)

    def forward(self, tokens):
        before = Counts.calls
        return super().forward(tokens) * (Counts.calls - before)


COUNTED = {"evaluations": 0}


class CountsInEvaluation(Decoder):
    """A decoder whose blocks, in evaluation alone, count in a global container."""

    class Block(Block):
        def forward(self, x, mask):
            COUNTED["evaluations"] += not self.training
            return super().forward(x, mask)

    def __init__(self):
        super().__init__(self.Block)

    def forward(self, tokens):
        before = COUNTED["evaluations"]
        return super().forward(tokens) * (1 + COUNTED["evaluations"] - before)


def _counts_in_a_closure() -> Decoder:
    """Return a decoder whose blocks, in evaluation alone, count in a variable around their class."""
    evaluations = 0

    class CountsAround(Block):
        def forward(self, x, mask):
            nonlocal evaluations
            evaluations += not self.training
            return super().forward(x, mask)

    class Counting(Decoder):
        def forward(self, tokens):
            before = evaluations
            return super().forward(tokens) * (1 + evaluations - before)

    return Counting(CountsAround)


class ReadsValues(Decoder):
    """A decoder with a view of what a block takes as its result."""

    class Block(Block):
        def forward(self, x, mask):
            super().forward(x, mask)
            return x[:, :, :]

    def __init__(self):
        super().__init__(self.Block)


WITH_EFFECTS: list[Callable[[], Decoder]]
WITH_EFFECTS = [TakesNumbers, WritesBetween, PassesADict, Collects, Counts, CountsInEvaluation, ReadsValues]
WITH_EFFECTS += [_counts_in_a_closure]


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("decoder", WITH_EFFECTS)
def test_blocks_with_other_inputs_or_effects_all_run(decoder):
    assert not next(records(decoder(), TOKENS)).equal.first_of


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("n_stages", [2, 7])
def test_stages_of_folded_blocks_are_exact(n_stages):
    """Seven stages cut inside the first block, so another block stands for the others in the comparison."""
    model = Decoder(WholeBlock, n_blocks=5)
    stages = Statistics(model, TOKENS).split(n_stages)
    assert stages.record.equal.first_of
    for batch in (1, 4):
        torch.manual_seed(0)
        assert stages.verify(torch.randint(10, (batch, 5))).outputs == 0.0
    for each in (model, *stages):
        each.eval()
    assert stages.verify(torch.randint(10, (2, 5))).outputs == 0.0


@pytest.mark.usefixtures("always")
def test_a_forward_that_raises_leaves_modules_as_they_were():
    class Raises(Decoder):
        def forward(self, tokens):
            out = super().forward(tokens)
            if len(tokens) == 1:
                raise ValueError("one is not enough")
            return out

    assert not next(records(Raises(), TOKENS)).equal.first_of
    assert "__getattribute__" not in vars(nn.Module)
