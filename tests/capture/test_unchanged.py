"""After a run, shape-only or real, that returned or raised, everything is restored."""

from __future__ import annotations

import copy
import functools
import queue
import random
import sys
from collections import OrderedDict, defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import prune
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from modelsummary import ForwardError, Statistics
from modelsummary.capture.execution.real import RealExecution
from modelsummary.capture.operator_mode import Operators
from modelsummary.capture.state.held import Held
from modelsummary.capture.state.process_state import process_states
from tests.models import CachesTensors, Call, ClampsWeights, Decoder, ReplacesData
from tests.untouched import plain, untouched

EXECUTIONS = ["shape", "real"]


def draws(self, x):
    return x + torch.rand(4) + random.random() + float(np.random.rand()) + torch.rand(4, generator=self.generator)


def flips_modes(self, x):
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(True)
    torch.backends.mha.set_fastpath_enabled(True)
    self.linear.eval()
    self.train()
    return self.linear(x)


def rewires(self, x):
    """Adds and removes modules, parameters, buffers and hooks."""
    del self.linear.bias
    self.linear.register_parameter("bias", None)
    self.linear.register_buffer("extra", torch.ones(4))
    self.added = nn.Linear(4, 4)
    self.linear.register_forward_hook(lambda *args: None)
    return self.added(self.linear(x))


def weight_norm():
    with pytest.warns(FutureWarning):
        return nn.utils.weight_norm(nn.Linear(4, 4))


def pruned():
    layer = nn.Linear(4, 4)
    prune.random_unstructured(layer, "weight", 0.5)
    return layer


def frozen():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[0].weight.requires_grad_(False)
    model[0].bias.grad = torch.ones(4)
    model[1].eval()
    return model


MODELS = {
    "stores tensors": CachesTensors,
    "writes parameters": ClampsWeights,
    "batch norm": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()),
    "frozen parts": frozen,
    "random numbers": lambda: Call(draws, generator=torch.Generator().manual_seed(3)),
    "modes": lambda: Call(flips_modes, linear=nn.Linear(4, 4)),
    "rewires": lambda: Call(rewires, linear=nn.Linear(4, 4)),
    "lazy": lambda: nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.LazyLinear(3)),
    "weight norm hook": weight_norm,
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    "spectral norm hook": lambda: nn.utils.spectral_norm(nn.Linear(4, 4)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
    "pruned": pruned,
    "lstm": lambda: nn.LSTM(4, 4),
    "attention": lambda: nn.TransformerEncoderLayer(4, 2, 8),
}


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("case", MODELS)
def test_untouched_after_a_run(case, execution):
    model = MODELS[case]()
    with untouched(model):
        stats = Statistics(model, torch.ones(2, 4), execution=execution)
    assert stats.execution == execution


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_replaced_data_comes_back(execution):
    model = ReplacesData()
    with untouched(model):
        assert Statistics(model, torch.ones(2, 4), execution=execution).execution == execution


def fails(self, x):
    raise ValueError("deliberately")


@pytest.mark.parametrize("execution", ["auto", *EXECUTIONS])
@pytest.mark.parametrize("case", MODELS)
def test_untouched_after_an_exception(case, execution):
    model = nn.Sequential(MODELS[case](), Call(fails))
    with untouched(model), pytest.raises(ForwardError, match="deliberately") as caught:
        Statistics(model, torch.ones(2, 4), execution=execution)
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_untouched_after_an_interrupt(execution):
    def interrupt(self, x):
        raise KeyboardInterrupt

    model = nn.Sequential(CachesTensors(), Call(interrupt))
    with untouched(model), pytest.raises(KeyboardInterrupt):
        Statistics(model, torch.ones(2, 4), execution=execution)


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_inputs_are_not_written(execution):
    model = Call(lambda self, x, rest: x.relu_() + rest.pop("y"))
    x, rest = -torch.ones(3), {"y": torch.ones(3)}
    Statistics(model, x, rest, execution=execution)
    assert x.tolist() == [-1.0] * 3
    assert list(rest) == ["y"]


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_tensors_inside_of_objects_are_not_written(execution):
    class Batch:
        def __init__(self):
            self.x = -torch.ones(3)

    batch = Batch()
    Statistics(Call(lambda self, batch: batch.x.relu_()), batch, execution=execution)
    assert batch.x.tolist() == [-1.0] * 3


def test_a_decision_on_a_tensor_inside_of_an_object_needs_values():
    class Batch:
        def __init__(self):
            self.x = torch.ones(3)

    stats = Statistics(Call(lambda self, batch: batch.x if batch.x.sum() > 0 else batch.x[:1]), Batch())
    assert stats.execution == "real"


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_a_run_does_not_change_the_next_forward(execution):
    """A cache filled with meta tensors, or a changed generator, would show here."""
    model = Decoder().eval()
    ids = torch.arange(12).reshape(2, 6)
    expected = copy.deepcopy(model)(ids).logits
    Statistics(model, ids, execution=execution)
    assert torch.equal(model(ids).logits, expected)


def test_a_training_step_is_the_same_after_a_run():
    def step(model):
        torch.manual_seed(1)
        model(torch.ones(3, 4)).sum().backward()
        return [p.grad for p in model.parameters()], list(model.buffers())

    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    expected = step(copy.deepcopy(model))
    Statistics(model, (5, 4))
    Statistics(model, (5, 4), execution="real")
    for before, after in zip(expected, step(model), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_the_autograd_graph_of_the_user_stays_valid():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    loss = model(torch.rand(3, 4)).sum()
    Statistics(model, (5, 4), execution="real")
    loss.backward()


def test_hooks_of_the_user_run_and_stay():
    """Hooks are part of the forward, and the values that they collect are removed like all others."""
    outputs, times = [], np.zeros(1)
    model = nn.Sequential(nn.Linear(4, 4))

    def collect(module, args, out):
        outputs.append(out)
        times[0] += 1
        module.collected = True
        return torch.cat((out, out), 1)

    model[0].register_forward_hook(collect)
    with untouched(model):
        stats = Statistics(model, (2, 4))
    assert stats["0"].output_size == [2, 8]
    assert (outputs, times.tolist()) == ([], [0.0])


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_work_in_another_thread_is_said_to_be_missing(execution):
    norm = nn.BatchNorm1d(4)

    def elsewhere(self, x):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(self.norm, torch.rand(2, 4)).result()
            pool.submit(nn.Linear(4, 4), torch.rand(2, 4)).result()
        return self.linear(x)

    model = Call(elsewhere, linear=nn.Linear(4, 4), norm=norm)
    with untouched(model):
        stats = Statistics(model, torch.ones(2, 4), execution=execution)
    assert stats.total_mult_adds == 32
    assert stats.uncounted_ops == {"calls in another thread": 1}
    assert "Total mult-adds: >= 32" in str(stats)


# ----------------------------------------------------------------------- everything a forward can reach


@functools.lru_cache
def positions(length):
    return torch.arange(length)[:, None] * 2.0


def remembered(function):
    """Memoise a method behind a wrapper, as libraries do that switch it off while torch compiles."""
    memory = functools.lru_cache(function)

    @functools.wraps(function)
    def call(*args):
        return memory(*args)

    return call


class Slotted:
    __slots__ = ("last",)

    def __init__(self):
        self.last = None


class CallableState:
    last = None

    def __call__(self):
        return self.last


class Remembers(nn.Module):
    """Keeps tensors in every place that is not an attribute, a list or a dict of its own."""

    by_class: ClassVar[dict[str, torch.Tensor]] = {}

    @functools.lru_cache  # noqa: B019
    def offsets(self, width):
        return torch.arange(width) * 1.0

    @remembered
    def scales(self, width):
        return torch.ones(width)

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.default = defaultdict(list)
        self.in_tuple = ([], {})
        self.slotted, self.callable = Slotted(), CallableState()
        self.unregistered = [nn.BatchNorm1d(4)]
        self.random, self.numpy_random = random.Random(1), np.random.default_rng(1)
        self.queue = deque(maxlen=2)

    def forward(self, x):
        x = x * self.scales(4) + positions(4).sum() + self.offsets(4)
        self.by_class["x"] = x
        self.default["x"].append(x)
        self.in_tuple[0].append(x)
        self.in_tuple[1]["x"] = x
        self.slotted.last = self.callable.last = x
        self.unregistered[0].seen = x
        self.queue.append(x)
        return self.unregistered[0](self.linear(x)) + self.random.random() + self.numpy_random.random()


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_nothing_is_remembered_anywhere(execution):
    Remembers.by_class.clear()
    model, x = Remembers(), torch.ones(3, 4)
    norm = model.unregistered[0]
    before = copy.deepcopy(norm.state_dict()), model.random.getstate(), model.numpy_random.bit_generator.state
    with untouched(model):
        Statistics(model, x, execution=execution)
    assert model.by_class == {}
    assert model.default == {}
    assert model.in_tuple == ([], {})
    assert model.slotted.last is None
    assert model.callable.last is None
    assert not model.queue
    assert not hasattr(norm, "seen")
    assert all(torch.equal(a, b) for a, b in zip(before[0].values(), norm.state_dict().values(), strict=True))
    assert (model.random.getstate(), model.numpy_random.bit_generator.state) == before[1:]
    assert model(x).device.type == "cpu"  # no memoised function returns a meta tensor


class Cache:
    """Keys that grow, as a cache of a decoder does, and a counter written in place."""

    def __init__(self):
        self.keys = [torch.ones(2, 3)]
        self.length = torch.zeros(())

    def update(self, key):
        self.keys[0] = torch.cat((self.keys[0], key), 0)
        self.length.add_(1)
        return self.keys[0]


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_objects_passed_as_arguments_stay_as_they_are(execution):
    cache = Cache()
    first = cache.keys[0]
    stats = Statistics(Call(lambda self, x, cache: cache.update(x)), torch.rand(1, 3), cache=cache, execution=execution)
    assert stats.root.output_size == [3, 3]
    assert cache.keys[0] is first
    assert cache.length.item() == 0


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_a_backward_inside_leaves_gradients_alone(execution):
    def forward(self, x):
        with torch.enable_grad():
            self.linear(x).sum().backward()
        return x

    model = Call(forward, linear=nn.Linear(4, 4))
    model.linear.weight.grad = torch.ones(4, 4)
    with untouched(model):
        assert Statistics(model, torch.ones(1, 4), execution=execution).execution == execution


def test_written_views_and_resized_buffers_come_back():
    def forward(self, x):
        self.one.add_(1)
        self.last.add_(1)
        self.resized.resize_(7)
        return x

    model = Call(forward)
    model.register_buffer("one", torch.ones(1))
    model.register_buffer("view", model.one.expand(4))
    model.register_buffer("resized", torch.ones(2))
    model.register_buffer("last", torch.ones(3))
    with untouched(model):
        assert Statistics(model, torch.ones(1), execution="real").execution == "real"


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_a_script_module_keeps_its_state(execution):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("total", torch.zeros(3))
            self.calls = 0

        def forward(self, x):
            self.total = self.total + x[0]
            self.calls += 1
            return x + self.total

    model = torch.jit.script(Counts())
    Statistics(nn.Sequential(model), torch.ones(2, 3), execution=execution)
    assert (model.total.tolist(), model.calls) == ([0.0] * 3, 0)
    assert model(torch.ones(2, 3)).tolist() == [[2.0] * 3] * 2


def test_switches_of_torch_come_back():
    def forward(self, x):
        torch.set_default_device("meta")
        torch.use_deterministic_algorithms(True)
        torch.set_float32_matmul_precision("medium")
        return x

    Statistics(Call(forward), torch.ones(1))
    assert torch._GLOBAL_DEVICE_CONTEXT.__dict__.get("device_context") is None
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="since torch 2.9")
def test_precisions_of_float32_that_were_set_for_one_library():
    """Torch then raises if it is asked for one precision of all."""
    matmul = torch.backends.cuda.matmul

    def forward(self, x):
        torch.set_float32_matmul_precision("highest")
        return x

    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        with untouched(model := Call(forward)):
            Statistics(model, torch.ones(1))
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before
    assert torch.get_float32_matmul_precision() == "highest"


TURNED = {
    "gradients": lambda: torch.set_grad_enabled(False),
    "autocast": lambda: torch.set_autocast_enabled("cpu", True),
    "attention backends": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "default device": lambda: torch.set_default_device("meta"),
    "fused attention layers": lambda: torch.backends.mha.set_fastpath_enabled(False),
    "deterministic algorithms": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "cudnn": lambda: setattr(torch.backends.cudnn, "benchmark", True),
    "float32 products": lambda: torch.set_float32_matmul_precision("high"),
    "anomaly detection": lambda: torch.autograd.set_detect_anomaly(True),
    "recursion limit": lambda: sys.setrecursionlimit(sys.getrecursionlimit() + 100),
    "torch rng": lambda: torch.manual_seed(7),
    "hooks of all modules": lambda: register_module_forward_hook(lambda *_: None),
    "python rng": lambda: random.seed(7),
    "numpy rng": lambda: np.random.seed(7),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_every_state_of_the_process_comes_back():
    """The forward changes each state of the list, one after the other."""
    names = {state.name for state in process_states()}
    assert names - {"cuda rng", "xpu rng", "mps rng"} == TURNED.keys()
    for name, turn in TURNED.items():
        (state,) = (each for each in process_states() if each.name == name)
        before = state.read()
        try:
            turn()
            assert plain(state.read()) != plain(before), name
        finally:
            state.write(before)
        model = Call(lambda self, x, turn=turn: (turn(), x)[1])
        with untouched(model):
            Statistics(model, torch.ones(1))


def test_a_second_attempt_starts_afresh():
    def forward(self, x):
        self.calls += 1
        y = self.linear(x.requires_grad_())
        return torch.autograd.grad(y.sum() * self.calls, x)[0] if self.calls == 1 else x

    model = Call(forward, linear=nn.Linear(4, 4))
    model.calls = 0
    with untouched(model):
        assert Statistics(model, torch.ones(2, 4)).total_mult_adds == 2 * 32


def test_queues_of_other_threads_are_left_alone():
    """Items that a worker puts into a queue while the model runs stay there."""
    model = Call(lambda self, x: (self.queue.put(1), x)[1])
    model.queue = queue.Queue()
    Statistics(model, torch.ones(1))
    assert model.queue.qsize() == 1


def test_ordered_and_overridden_dictionaries_come_back():
    class Attributes(dict):
        __getattr__ = dict.__getitem__
        __setattr__ = dict.__setitem__

        def copy(self):
            raise AssertionError

    def forward(self, x):
        self.ordered.move_to_end("a")
        self.ordered["c"] = x
        self.attributes.a = x
        return x

    model = Call(forward)
    model.ordered, model.attributes = OrderedDict(a=1, b=2), Attributes(a=1)
    with untouched(model):
        Statistics(model, torch.ones(1))
    assert list(model.ordered.items()) == [("a", 1), ("b", 2)]


def test_only_what_changed_is_written():
    """Another thread may read the model during the run: a container is never empty in between."""

    class Emptied(Exception):
        pass

    class Telling(dict):
        def clear(self):
            raise Emptied

    contents = {"a": 1}
    held = Held()
    held.save([contents])
    assert [container for _, container, _ in held._containers] == [contents]
    held._containers = [(Telling, container, saved) for _, container, saved in held._containers]
    held.put_back()
    contents["b"] = 2
    with pytest.raises(Emptied):
        held.put_back()


CACHE: dict[int, torch.Tensor] = {}


class Act:
    def __init__(self):
        self.seen = None

    def bound(self, x):
        self.seen = x
        return x

    @staticmethod
    def free(state, x):
        state["x"] = x
        return x


class Unset:
    __slots__ = ("value",)


class Settings(OrderedDict):
    def __init__(self, first):
        super().__init__()
        self["first"] = first


class HoldsFunctions(nn.Module):
    """A forward may leave state in functions, class attributes and globals."""

    scale = None
    calls = 0

    def __init__(self):
        super().__init__()
        held = []
        self.bound, self.partial = Act().bound, functools.partial(Act.free, {})
        self.closure = lambda x: (held.append(x), x)[1]
        self.held = lambda: held
        self.unset, self.settings = Unset(), Settings(1)
        self.weak = WeakKeyDictionary()
        self.array = np.zeros(2)

    @staticmethod
    @functools.lru_cache
    def table(n):
        return torch.arange(n)

    def forward(self, x):
        type(self).calls += 1
        if HoldsFunctions.scale is None:
            HoldsFunctions.scale = torch.ones(4)
        if 4 not in CACHE:
            CACHE[4] = torch.arange(4.0)
        self.unset.value = x
        self.weak[self] = x
        self.array[0] += 1
        self.settings["second"] = x
        return self.closure(self.partial(self.bound(x))) * CACHE[4] * HoldsFunctions.scale + self.table(4)


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_functions_classes_and_globals_are_put_back(execution):
    model = HoldsFunctions()
    Statistics(model, torch.ones(2, 4), execution=execution)
    assert (HoldsFunctions.scale, HoldsFunctions.calls, CACHE) == (None, 0, {})
    assert model.bound.__self__.seen is None
    assert model.partial.args == ({},)
    assert model.held() == []
    assert not hasattr(model.unset, "value")
    assert not model.weak
    assert model.array.tolist() == [0.0, 0.0]
    assert dict(model.settings) == {"first": 1}
    model(torch.ones(2, 4))  # fails if a meta tensor is left
    HoldsFunctions.scale, HoldsFunctions.calls = None, 0
    CACHE.clear()


FORWARDS = 0


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_counters_outside_of_the_model_are_put_back(execution):
    """In a closure, and in a global name that a forward assigns."""
    forwards = 0

    class Counts(nn.Module):
        def forward(self, x):
            nonlocal forwards
            global FORWARDS, MADE  # noqa: PLW0603
            forwards += 1
            FORWARDS += 1
            MADE = x
            return x

    Statistics(Counts(), torch.ones(2), execution=execution)
    assert (forwards, FORWARDS, "MADE" in globals()) == (0, 0, False)


TABLES = {}


def table_of(n):
    if n not in TABLES:
        TABLES[n] = torch.arange(float(n))
    return TABLES[n]


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_tables_that_functions_fill_are_put_back(execution):
    """In the closure of a forward, and in the globals of a function that it calls, also from a lambda."""
    held = {}

    class Tabled(nn.Module):
        def forward(self, x):
            held.setdefault(4, torch.ones(4))
            scale = lambda n: x * table_of(n) * held[n]  # noqa: E731
            return scale(4)

    model = Tabled()
    Statistics(model, torch.ones(2, 4), execution=execution)
    assert (held, TABLES) == ({}, {})
    assert model(torch.ones(1, 4)).tolist() == [[0.0, 1.0, 2.0, 3.0]]
    TABLES.clear()


def test_tensors_written_where_no_operator_is_seen():
    def forward(self, x):
        self.count.numpy()[0] = 6
        self.sparse.mul_(2)
        return x

    model = Call(forward)
    model.register_buffer("count", torch.zeros(2))
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    Statistics(model, torch.ones(1), execution="real")
    assert model.count.tolist() == [0.0, 0.0]
    assert torch.equal(model.sparse.to_dense(), torch.eye(3))


@pytest.mark.parametrize("length", [4, 2**19])  # copied before the run; and, too large for that, when it is written
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_arrays_written_through_tensors(length, execution):
    def forward(self, x):
        tensor = torch.from_numpy(self.array)
        return x + tensor.mul_(2)[0]

    model = Call(forward)
    model.array = np.ones(length)
    model.words = np.array(["a"] * length)  # nothing for torch
    Statistics(model, torch.ones(1), execution=execution)
    assert (model.array == 1).all()


def test_a_tensor_passed_twice_stays_one_tensor():
    model = Call(lambda self, q, k: self.a(q) if q is k else self.b(q), a=nn.Linear(4, 4), b=nn.Linear(4, 5))
    x = torch.ones(2, 4)
    for execution in EXECUTIONS:
        stats = Statistics(model, (x, x), execution=execution)
        assert (stats.root.output_size, stats.total_input_bytes) == ([2, 4], 32)


def test_a_buffer_made_in_inference_mode_comes_back():
    with torch.inference_mode():
        buffer = torch.zeros(3)

    def forward(self, x):
        with torch.inference_mode():
            self.buffer.add_(1)
        return x

    model = Call(forward)
    model.register_buffer("buffer", buffer)
    for execution in EXECUTIONS:
        with untouched(model):
            Statistics(model, torch.ones(1), execution=execution)


@pytest.mark.parametrize(("execution", "owner"), [("shape", Held), ("real", Held), ("real", RealExecution)])
def test_an_interruption_while_the_model_is_put_back(execution, owner, monkeypatch):
    put_back = RealExecution._put_back if owner is RealExecution else Held.put_back
    interruptions = iter([KeyboardInterrupt])

    def interrupted(self):
        for error in interruptions:
            raise error
        put_back(self)

    model = CachesTensors()
    monkeypatch.setattr(owner, put_back.__name__, interrupted)
    with untouched(model), pytest.raises(KeyboardInterrupt):
        Statistics(model, torch.ones(2, 4), execution=execution)
    assert next(interruptions, None) is None


@pytest.mark.parametrize("place", ["__enter__", "__exit__"])
def test_an_interruption_while_a_mode_begins_or_ends(place, monkeypatch):
    original = getattr(Operators, place)

    def interrupted(self, *args):
        if place == "__enter__":
            original(self)
        raise KeyboardInterrupt

    model = CachesTensors()
    with untouched(model):
        monkeypatch.setattr(Operators, place, interrupted)
        with pytest.raises(KeyboardInterrupt):
            Statistics(model, torch.ones(2, 4))
        monkeypatch.undo()
        assert not _get_current_dispatch_mode_stack()
