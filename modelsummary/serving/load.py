"""``Load``: the requests that a server receives, with the lengths of prompts and outputs, and arrival times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import log
from random import Random
from typing import NamedTuple

from modelsummary.errors import InputError, check_integers, is_number
from modelsummary.keywords import takes_keywords

__all__ = ["Load", "LoadRequest", "LogNormal", "Uniform"]


class Uniform(NamedTuple):
    """Lengths that are equally likely.

    Attributes:
        least, most: the shortest and the longest, in tokens.

    >>> 10 <= Uniform(10, 20).draw(Random(0)) <= 20
    True
    """

    least: int
    most: int

    def draw(self, random: Random) -> int:
        """Return a random length."""
        return random.randint(self.least, self.most)

    def check(self, name: str) -> None:
        """Raise ``InputError`` unless 1 <= least <= most."""
        check_integers(**{f"least of {name}": self.least})
        check_integers(self.least, **{f"most of {name}": self.most})


class LogNormal(NamedTuple):
    """Lengths whose logarithm is normal, as of conversations: many are short, few are long.

    Attributes:
        median: the median in tokens.
        sigma: standard deviation of the natural logarithm.
        most: longer ones are cut to this length.

    >>> LogNormal(200, 0.0, 4096).draw(Random(0))
    200
    """

    median: float
    sigma: float
    most: int

    def draw(self, random: Random) -> int:
        """Return a random length."""
        return min(max(round(random.lognormvariate(log(self.median), self.sigma)), 1), self.most)

    def check(self, name: str) -> None:
        """Raise ``InputError`` unless 1 <= median <= most and sigma is from 0 to 10."""
        check_integers(**{f"most of {name}": self.most})
        if not is_number(self.median) or not is_number(self.sigma) or not 0 <= self.sigma <= 10:
            raise InputError(f"{name} must have a median >= 1 and a sigma from 0 to 10, got {self!r:.80}")
        if not 1 <= self.median <= self.most:
            raise InputError(f"{name} must have a median from 1 to most={self.most}, got {self.median!r:.80}")


class LoadRequest(NamedTuple):
    """One request of a load.

    Attributes:
        arrival: seconds after the start.
        prompt: tokens of the prompt.
        output: tokens to generate.
    """

    arrival: float
    prompt: int
    output: int


@takes_keywords()
@dataclass(frozen=True)
class Load:
    """The requests that a server receives.

    Attributes:
        requests: number of requests.
        prompt: tokens of each prompt: a number, a list with one per request, ``Uniform(least, most)``, or
            ``LogNormal(median, sigma, most)``.
        output: tokens to generate for each, likewise.
        rate: mean requests per second; the gaps between arrivals are exponential (a Poisson process). None: all arrive
            at once, or as ``arrivals`` says.
        arrivals: seconds at which the requests arrive, ascending, such as of a trace; None: by ``rate``.
        shared_tokens: first tokens that all prompts have in common; an engine keeps and computes them once, as far as
            they fill whole pages.
        seed: seed of the random numbers. Lengths do not depend on the rate, and arrivals not on lengths.

    Raises:
        InputError: a value is unusable.

    >>> Load(3, prompt=[5, 6, 7], output=2, arrivals=[0.0, 0.5, 2.0]).sample()[1]
    LoadRequest(arrival=0.5, prompt=6, output=2)
    >>> Load(1000, prompt=Uniform(100, 300), output=50, rate=10.0).sample()[-1].arrival  # about 100 seconds
    95.7...
    """

    requests: int
    prompt: int | Sequence[int] | Uniform | LogNormal
    output: int | Sequence[int] | Uniform | LogNormal
    rate: float | None = None
    arrivals: Sequence[float] | None = None
    shared_tokens: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        check_integers(requests=self.requests)
        check_integers(0, shared_tokens=self.shared_tokens, seed=self.seed)
        for name in ("prompt", "output"):
            self._check_lengths(name, getattr(self, name))
        if self.rate is not None and not (is_number(self.rate) and self.rate > 0):
            raise InputError(f"rate must be a number of requests per second > 0 or None, got {self.rate!r:.80}")
        if self.arrivals is not None:
            self._check_arrivals(self.arrivals)
        if self.shared_tokens and (shortest := min(request.prompt for request in self.sample())) <= self.shared_tokens:
            raise InputError(
                f"shared_tokens={self.shared_tokens} must be less than the tokens of each prompt; the shortest has "
                f"{shortest}"
            )

    def _check_lengths(self, name: str, lengths: object) -> None:
        if isinstance(lengths, (Uniform, LogNormal)):
            lengths.check(name)
        elif isinstance(lengths, Sequence) and not isinstance(lengths, (str, bytes)):
            if len(lengths) != self.requests:
                raise InputError(
                    f"{name} must have a length for each of {self.requests} requests, got {len(lengths)}; "
                    "for lengths at random pass Uniform(least, most)"
                )
            for index, length in enumerate(lengths):
                check_integers(**{f"{name}[{index}]": length})
        else:
            check_integers(**{name: lengths})

    def _check_arrivals(self, arrivals: Sequence[float]) -> None:
        if self.rate is not None:
            raise InputError("pass rate= or arrivals=, not both")
        if isinstance(arrivals, (str, bytes)) or not isinstance(arrivals, Sequence) or len(arrivals) != self.requests:
            raise InputError(f"arrivals must be a list of {self.requests} times, one per request, got {arrivals!r:.80}")
        if not all(is_number(time) and time >= 0 for time in arrivals) or sorted(arrivals) != list(arrivals):
            raise InputError(f"arrivals must be ascending numbers >= 0, in seconds, got {arrivals!r:.80}")

    def sample(self) -> tuple[LoadRequest, ...]:
        """Return the requests in the order in which they arrive."""
        prompts, outputs = (self._lengths(name, getattr(self, name)) for name in ("prompt", "output"))
        return tuple(map(LoadRequest, self._times(), prompts, outputs))

    def _lengths(self, name: str, lengths: int | Sequence[int] | Uniform | LogNormal) -> Sequence[int]:
        if isinstance(lengths, (Uniform, LogNormal)):
            random = Random(f"{self.seed} {name}")
            return [lengths.draw(random) for _ in range(self.requests)]
        return [lengths] * self.requests if isinstance(lengths, int) else lengths

    def _times(self) -> Sequence[float]:
        if self.arrivals is not None:
            return self.arrivals
        if self.rate is None:
            return [0.0] * self.requests
        random = Random(f"{self.seed} arrivals")
        return [time / self.rate for time in accumulate(random.expovariate(1.0) for _ in range(self.requests))]
