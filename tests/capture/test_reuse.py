"""What one module did serves for equal ones: the result is that of running all of them, or they are run."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from modelsummary import ForwardError, Statistics
from tests import idioms
from tests.untouched import untouched

DEPTH = 8
X = torch.zeros(2, 4)
FLAG = 0
SEEN: list[int] = []


class Block(nn.Module):
    """Three calls: its own, and those of two layers."""

    def __init__(self, width=4):
        super().__init__()
        self.first, self.second = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.second(F.relu(self.first(x)))


def stack(make, depth=DEPTH):
    return nn.Sequential(*(make() for _ in range(depth)))


def both(model, *args, **kwargs):
    """Statistics with reuse; checked to be the same as without, and to leave the model as it was."""
    with untouched(model):
        stats = Statistics(model, *args, **kwargs)
    full = Statistics(model, *args, reuse=False, **kwargs)
    assert full.reused_calls == 0
    assert stats.to_dict() == full.to_dict()
    own = set(map(id, model.modules()))  # others were made by the run
    assert [id(row.module) for row in stats if id(row.module) in own] == [
        id(row.module) for row in full if id(row.module) in own
    ]
    return stats


def test_blocks_in_a_row():
    # The first block runs, the second is recorded; the block and two layers are spared in each of the other six.
    stats = both(stack(Block), X)
    assert stats.reused_calls == 6 * 3
    assert stats.total_mult_adds == DEPTH * 2 * (4 * 8 + 8 * 4)  # batch x (in x out, twice)


def test_few_blocks_run():
    assert both(stack(Block, depth=5), X).reused_calls == 0


def test_blocks_inside_of_blocks():
    # The first outer block runs with its 8 inner ones (6 spared), so does the second (all 8 of a kind that is known);
    # of the other six everything is spared: outer, Sequential's 8 inner and 2 layers each.
    stats = both(stack(lambda: stack(Block)), X)
    assert stats.reused_calls == 6 * 3 + 8 * 3 + 6 * (1 + 8 * 3)


@pytest.mark.parametrize("training", [True, False])
def test_buffers_that_a_forward_counts(training):
    def make():
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Dropout())

    model = stack(make).train(training)
    assert both(model, X).reused_calls == 6 * 5
    assert model[7][1].num_batches_tracked == 0


class Results(Block):
    def forward(self, x, *, scale=1.0):
        y = super().forward(x) * scale
        return {"pair": (y, y[:, :1] + 1), "kept": [None, 2, "text"]}


class Holder(nn.Module):
    def __init__(self, make=Block, depth=DEPTH):
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(depth))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class KeywordsAndResults(Holder):
    def forward(self, x):
        for block in self.blocks:
            out = block(x, scale=2.0)
            assert out["kept"] == [None, 2, "text"]
            x = out["pair"][0] + out["pair"][1]
        return x


def test_keywords_and_nested_results():
    assert both(KeywordsAndResults(Results), X).reused_calls == 6 * 3


def test_signature_of_forward_is_kept():
    class Asks(KeywordsAndResults):
        def forward(self, x):
            assert list(inspect.signature(self.blocks[0].forward).parameters) == ["x", "scale"]
            return super().forward(x)

    assert both(Asks(Results), X).reused_calls == 6 * 3


def test_uncounted_operators_are_counted_again():
    class Solves(Block):
        def forward(self, x):
            return super().forward(x) + torch.linalg.cholesky_ex(x @ x.mT)[0].sum()

    stats = both(stack(Solves), X)
    assert stats.reused_calls == 6 * 3
    assert sum(stats["7"].uncounted_ops.values()) == 1


# ------------------------------------------------------------------------------- what looks equal and is not


class Indexed(Block):
    index = 0

    def __init__(self):
        super().__init__()
        Indexed.index += 1
        self.number = Indexed.index

    def forward(self, x):
        return super().forward(x) if self.number % 2 else self.second(self.first(x))


class CountsOnClass(Block):
    runs = 0

    def forward(self, x):
        CountsOnClass.runs += 1
        return super().forward(x) if CountsOnClass.runs % 3 else x + 1


class CountsInGlobal(Block):
    def forward(self, x):
        SEEN.append(1)
        return super().forward(x) if len(SEEN) % 3 else x + 1


class CountsInOwnList(Block):
    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append(1)
        return super().forward(x)


class KeepsResult(Block):
    def forward(self, x):
        self.result = super().forward(x)
        return self.result


class ReadsBuffer(Block):
    def __init__(self):
        super().__init__()
        self.register_buffer("limit", torch.tensor(3))

    def forward(self, x):
        return super().forward(x) if self.limit.item() > 2 else x + 1


class ReturnsArgument(Block):
    def forward(self, x):
        self.second(self.first(x))
        return x


class WritesArgument(Block):
    def forward(self, x):
        return x.add_(super().forward(x))


class ReturnsOwnParameter(Block):
    def forward(self, x):
        return super().forward(x) + self.first.bias[:4].sum(), self.first.weight


class AssignsThroughHelper(Block):
    def forward(self, x):
        setattr(self, "last", x.shape)  # noqa: B010
        return super().forward(x)


class Prints(Block):
    def forward(self, x):
        print(x.shape)
        return super().forward(x)


class MakesLayer(Block):
    def forward(self, x):
        return nn.Linear(4, 4, device=x.device)(super().forward(x))


def closure():
    runs = 0

    class CountsInClosure(Block):
        def forward(self, x):
            nonlocal runs
            runs += 1
            return super().forward(x) if runs % 3 else x + 1

    return CountsInClosure


@pytest.mark.parametrize(
    "make",
    [
        Indexed,
        CountsOnClass,
        CountsInGlobal,
        CountsInOwnList,
        KeepsResult,
        ReadsBuffer,
        ReturnsArgument,
        WritesArgument,
        AssignsThroughHelper,
        Prints,
        MakesLayer,
        closure(),
    ],
    ids=lambda kind: kind.__name__,
)
def test_impure_blocks_run(make):
    model = stack(make)
    full = Statistics(model, X, reuse=False)
    stats = Statistics(model, X)
    assert stats.reused_calls == 0
    assert stats.to_dict() == full.to_dict()


class Scaled(Block):
    factor = 1

    def forward(self, x):
        return super().forward(x) if self.factor == 1 and FLAG == 0 else x + 1


def helper(x, times=1):
    return x * times


class Helped(Block):
    def forward(self, x):
        return helper(super().forward(x))


class ChangesBetween(Holder):
    """A parent changes what its blocks rest on, halfway."""

    def __init__(self, make, change):
        super().__init__(make)
        self.change = change

    def forward(self, x):
        for number, block in enumerate(self.blocks):
            if number == 5:
                self.change(block)
            x = block(x)
        return x


def set_flag(_):
    global FLAG  # noqa: PLW0603
    FLAG = 1


def set_factor(_):
    Scaled.factor = 2


def set_helper(_):
    global helper  # noqa: PLW0603
    helper = _other_helper


def _other_helper(x):
    return x.clone().clone()


def set_hook(block):
    block.second.register_forward_hook(lambda module, args, output: output.clone().clone())


def set_layer(block):
    block.second = nn.Linear(8, 4, bias=False)


def set_mode(block):
    block.eval()


@pytest.mark.parametrize(
    ("make", "change", "spared"),
    [
        (Scaled, set_flag, 3),
        (Scaled, set_factor, 3),
        (Helped, set_helper, 3),
        (Block, set_hook, 5),
        (Block, set_layer, 5),
        (Block, set_mode, 5),
    ],
)
def test_changes_between_calls(make, change, spared, monkeypatch):
    """Of eight blocks, the third to the fifth are spared; from the sixth on, those that are still equal."""
    model, found = ChangesBetween(make, change), []
    for reuse in (True, False):
        with monkeypatch.context() as undo:
            undo.setattr(Scaled, "factor", 1)
            undo.setitem(globals(), "FLAG", 0)
            undo.setitem(globals(), "helper", helper)
            found.append(Statistics(model, X, reuse=reuse))
    assert found[0].to_dict() == found[1].to_dict()
    assert found[0].reused_calls == spared * 3


def test_hooks_of_the_user_see_every_call():
    model = stack(Block)
    for block in model:
        block.first.register_forward_hook(lambda module, args, output: output + 1)
    stats = both(model, X)
    assert stats.reused_calls == 0
    assert stats.root.elementwise_ops == DEPTH * 2 * (8 + 8 + 4)  # batch x (the hook, relu, the sum)


def test_forwards_of_single_modules():
    """Libraries put wrappers in the place of a module's forward, which its class does not tell."""
    model = stack(Block)
    for block in list(model)[4:]:
        block.second.forward = lambda x, forward=block.second.forward: forward(x) + 1
    stats = both(model, X)
    assert stats.reused_calls == 2 * 3
    assert stats.root.elementwise_ops == 2 * (DEPTH * (8 + 4) + 4 * 4)  # relu and the sum; in four the wrapper


def test_global_hooks_see_every_call():
    model, seen = stack(Block), []
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: seen.append(module))
    try:
        assert Statistics(model, X).reused_calls == 0
    finally:
        handle.remove()
    assert len(seen) == 1 + DEPTH * 3


class SeesOperators(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class SeesFunctions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [SeesOperators, SeesFunctions])
def test_modes_see_every_operator(mode):
    with mode():
        assert Statistics(stack(Block), X).reused_calls == 0


def test_shared_modules():
    class Shares(Block):
        def __init__(self, is_shared):
            super().__init__(4)
            self.second = nn.Linear(8, 4)
            self.third = self.second if is_shared else nn.Linear(8, 4)

        def forward(self, x):
            y = self.first(x)
            return self.second(y) + self.third(y)

    stats = both(nn.Sequential(*(Shares(number % 2) for number in range(12))), X)
    assert stats.reused_calls == 0 + 5 * 4 + 4 * 4  # each kind on its own; the first to run runs unrecorded


def test_one_block_again_and_again():
    block = Block()

    class Repeats(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([block, *(Block() for _ in range(5))])

        def forward(self, x):
            for _ in range(5):
                x = self.blocks[0](x)
            return x

    assert both(Repeats(), X).reused_calls == 3 * 3


def test_values_after_spared_writes():
    """The counters of spared norms are unknown, so a forward that reads one makes the whole run a full one."""

    class ReadsCounter(Holder):
        def forward(self, x):
            x = super().forward(x)
            return x * 2 if self.blocks[-1][1].num_batches_tracked.item() == 1 else x

    model = ReadsCounter(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    stats = both(model, X)
    assert (stats.execution, stats.reused_calls) == ("shape", 0)
    assert stats.root.elementwise_ops > stats.root.children[0].elementwise_ops


def test_failures_are_those_of_a_full_run():
    model = nn.Sequential(*stack(Block), nn.Linear(5, 5))
    errors = []
    for reuse in (True, False):
        with pytest.raises(ForwardError) as caught:
            Statistics(model, X, reuse=reuse)
        errors.append((str(caught.value), caught.value.partial.to_dict()))
    assert errors[0] == errors[1]
    assert "8 (Linear)" in errors[0][0]


@pytest.mark.parametrize(
    ("model", "args"),
    [
        (idioms.Gpt2(depth=8), [idioms.ids()]),
        (idioms.Llama(depth=8), [idioms.ids()]),
        (idioms.T5(depth=8), [idioms.ids(), idioms.ids(length=7)]),
        (idioms.MixtureOfExperts(depth=8), [idioms.rows(6, 8)]),
    ],
)
def test_idioms(model, args):
    both(model, *args)


LAYERS = [Block, Indexed, KeepsResult, ReturnsArgument, WritesArgument, ReadsBuffer, Scaled, Helped, Prints]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(LAYERS), min_size=6, max_size=24))
def test_any_order(kinds):
    both(nn.Sequential(*(kind() for kind in kinds)), X)


@pytest.mark.slow
def test_torchvision():
    models = pytest.importorskip("torchvision.models")
    spared = 0
    for name in models.list_models(module=models):
        options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
        with torch.device("cpu" if name.startswith("regnet") else "meta"):  # a RegNet computes its widths
            model = models.get_model(name, weights=None, **options).to("meta")
        size = 299 if name == "inception_v3" else 224
        for training in (True, False):
            model.train(training)
            x = torch.empty(2, 3, size, size, device="meta")
            stats, full = (Statistics(model, x, reuse=reuse) for reuse in (True, False))
            assert stats.to_dict() == full.to_dict(), name
            spared += stats.reused_calls
    assert spared > 10_000
