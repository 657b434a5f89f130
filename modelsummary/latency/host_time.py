"""The time of the host: of Python around operators, of page faults; and what other processes took from this one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import cycle
from statistics import mean

import torch
from torch import Tensor, nn
from torch.nn import functional as F

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

__all__ = [
    "host_seconds",
    "lower_quartiles",
    "minor_faults",
    "other_operators",
    "page_seconds",
    "preemptions",
    "timed_among_others",
]

_OWN_CACHE_BYTES = 2**20  # about what the caches of a core hold
_ROUNDS = 60


def preemptions() -> int:
    """Return how often another process took a core from a thread of this process; 0 where the system does not tell."""
    return 0 if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def minor_faults() -> int:
    """Return how many pages of memory this process touched first; 0 where the system does not tell."""
    return 0 if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def page_seconds() -> float:
    """Return the seconds that the CPU needs for the first touch of a page of new memory."""
    times = []
    for _ in range(3):
        faults, begin = minor_faults(), time.thread_time()
        new = torch.empty(2**24, device="cpu").fill_(1.0)  # 64 MB: the C library maps so large a block anew
        touched, faults = time.thread_time(), minor_faults() - faults
        new.fill_(2.0)
        times.append((2 * touched - begin - time.thread_time()) / max(faults, 1))
    return max(min(times), 0.0)


def host_seconds() -> dict[str, float]:
    """Return the seconds of the CPU for views, and for what a ``"module"`` call adds to its operator.

    Other operators run before each: they push Python's data out of a core's own caches, so that a call takes several
    times as long as when it is repeated. Only a ``"next_view"``, which follows another view, finds its code there.
    """
    with torch.device("cpu"):  # whatever the default device is; not around what is timed, which it would slow down
        x = torch.rand(1, 8, 4, 4)
        # several modules of a kind, as in a model
        pairs = [pair for _ in range(2) for pair in _modules_and_operators(x)]
    seconds = timed_among_others()
    runs = [partial(module, x) for module, _ in pairs] + [operator for _, operator in pairs]
    quartiles = lower_quartiles(list(map(seconds, runs)) for _ in range(_ROUNDS))
    module = mean(quartiles[: len(pairs)]) - mean(quartiles[len(pairs) :])

    def four_views() -> Tensor:
        return x.transpose(1, 2).transpose(1, 2).transpose(1, 2).transpose(1, 2)

    view, views = lower_quartiles([seconds(lambda: x.transpose(1, 2)), seconds(four_views)] for _ in range(_ROUNDS))
    return {"view": view, "next_view": max((views - view) / 3, 0.0), "module": max(module, 0.0)}


def lower_quartiles(rounds: Iterable[Sequence[float]]) -> list[float]:
    """Return the lower quartile of each position over all rounds: a machine has slower moments.

    >>> lower_quartiles([[4.0, 10.0], [1.0, 30.0], [2.0, 20.0], [3.0, 40.0]])
    [2.0, 20.0]
    """
    return [sorted(times)[len(times) // 4] for times in zip(*rounds, strict=True)]


def timed_among_others() -> Callable[[Callable[[], object]], float]:
    """Return a function that times another one on the CPU, after an operator that changes from call to call."""
    with torch.device("cpu"):
        activations = torch.rand(_OWN_CACHE_BYTES // 4)
    others = cycle(other_operators())

    def seconds(run: Callable[[], object]) -> float:
        with torch.no_grad():
            next(others)()
            activations.clamp_(0, 1)
        begin = time.thread_time()
        run()
        return time.thread_time() - begin

    return seconds


def _modules_and_operators(x: Tensor) -> list[tuple[nn.Module, Callable[[], object]]]:
    """Return small modules, each with the operator that it calls, as ``seconds_of`` calls it."""
    aten = torch.ops.aten
    conv, norm, layer_norm = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8).eval(), nn.LayerNorm(4)
    convolve = aten.convolution.default, (x, conv.weight, conv.bias, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    statistics = norm.running_mean, norm.running_var
    normalise = aten.native_batch_norm.default, (x, norm.weight, norm.bias, *statistics, False, 0.1, 1e-5)
    by_row = aten.native_layer_norm.default, (x, [4], layer_norm.weight, layer_norm.bias, 1e-5)
    relu, gelu = (aten.relu.default, (x,)), (aten.gelu.default, (x,))
    modules = {conv: convolve, norm: normalise, layer_norm: by_row, nn.ReLU(): relu, nn.GELU(): gelu}
    pairs = [(module, partial(func, *args)) for module, (func, args) in modules.items()]
    return [*pairs, (nn.Identity(), lambda: None)]


def other_operators() -> list[Callable[[], object]]:
    """Return small calls of operators that run different code, as the operators of a model do."""
    with torch.device("cpu"):
        images, tokens, channels = torch.rand(2, 16, 12, 12), torch.rand(2, 24, 32), torch.rand(16)
        kernel, single, depthwise = torch.rand(16, 16, 3, 3), torch.rand(32, 16, 1, 1), torch.rand(16, 1, 3, 3)
        weight, heads, words = torch.rand(48, 32), torch.rand(2, 4, 24, 8), torch.zeros(2, 24, dtype=torch.long)
    return [
        lambda: F.conv2d(images, kernel, padding=1),
        lambda: F.conv2d(images, single),
        lambda: F.conv2d(images, depthwise, padding=1, groups=16),
        lambda: F.batch_norm(images, channels, channels, channels, channels),
        lambda: F.max_pool2d(images, 2),
        lambda: F.avg_pool2d(images, 2),
        lambda: F.interpolate(images, scale_factor=2),
        lambda: F.pad(images, (1, 1)),
        lambda: torch.cat([images, images], 1),
        lambda: torch.roll(images, 1, 2),
        lambda: images.mean((2, 3)),
        lambda: images + images,
        lambda: images * images,
        lambda: F.relu(images),
        lambda: F.hardswish(images),
        lambda: F.silu(images),
        lambda: F.linear(tokens, weight),
        lambda: torch.bmm(tokens, tokens.transpose(1, 2)),
        lambda: F.scaled_dot_product_attention(heads, heads, heads),
        lambda: F.layer_norm(tokens, (32,)),
        lambda: F.softmax(tokens, -1),
        lambda: F.gelu(tokens),
        lambda: torch.sigmoid(tokens),
        lambda: torch.tanh(tokens),
        lambda: tokens.sum(-1),
        lambda: tokens.pow(2),
        lambda: tokens.clamp(0, 1),
        lambda: tokens.transpose(1, 2).contiguous(),
        lambda: F.embedding(words, weight),
        tokens.nonzero,
    ]
