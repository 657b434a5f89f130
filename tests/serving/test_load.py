"""Loads: arrival times and lengths."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import exp
from statistics import fmean, median

import pytest

from modelsummary import InputError
from modelsummary.serving import Load, LogNormal, Uniform

MANY = Load(20_000, prompt=Uniform(100, 300), output=LogNormal(200, 0.5, 10_000), rate=4.0)


def test_poisson_arrivals():
    """Gaps with mean 1 / rate, of which exp(-1) are longer than the mean."""
    times = [request.arrival for request in MANY.sample()]
    gaps = [after - before for before, after in pairwise(times)]
    assert fmean(gaps) == pytest.approx(0.25, rel=0.03)
    assert fmean(gap > 0.25 for gap in gaps) == pytest.approx(exp(-1), rel=0.03)


def test_random_lengths():
    sample = MANY.sample()
    prompts, outputs = [request.prompt for request in sample], [request.output for request in sample]
    assert (min(prompts), max(prompts)) == (100, 300)
    assert fmean(prompts) == pytest.approx(200, rel=0.02)
    assert median(outputs) == pytest.approx(200, rel=0.02)
    assert fmean(outputs) == pytest.approx(200 * exp(0.5**2 / 2), rel=0.02)
    assert max(request.output for request in replace(MANY, output=LogNormal(200, 0.5, 250)).sample()[:99]) == 250


def test_a_seed_repeats_a_load_and_a_rate_scales_it():
    assert MANY.sample() == replace(MANY).sample()
    assert MANY.sample() != replace(MANY, seed=1).sample()
    fast = replace(MANY, rate=8.0).sample()
    assert [request.arrival for request in fast] == [request.arrival / 2 for request in MANY.sample()]
    assert [request[1:] for request in fast] == [request[1:] for request in MANY.sample()]
    assert {request.arrival for request in replace(MANY, rate=None).sample()} == {0.0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"requests": 0}, "requests must be an integer >= 1, got 0"),
        ({"prompt": 0}, "prompt must be an integer >= 1, got 0"),
        ({"prompt": [1]}, "prompt must have a length for each of 2 requests, got 1"),
        ({"output": [1, 2.5]}, r"output\[1\] must be an integer >= 1, got 2.5"),
        ({"output": "12"}, "output must be an integer >= 1, got '12'"),
        ({"prompt": Uniform(5, 4)}, "most of prompt must be an integer >= 5, got 4"),
        ({"output": LogNormal(9, 11, 10)}, "output must have a median >= 1 and a sigma from 0 to 10"),
        ({"output": LogNormal(0, 1, 10)}, "output must have a median from 1 to most=10, got 0"),
        ({"output": LogNormal(500, 1, 10)}, "output must have a median from 1 to most=10, got 500"),
        ({"rate": 0}, "rate must be a number of requests per second > 0 or None, got 0"),
        ({"rate": 1.0, "arrivals": [0, 1]}, "pass rate= or arrivals=, not both"),
        ({"arrivals": [1, 0]}, "arrivals must be ascending numbers >= 0"),
        ({"arrivals": [1]}, "arrivals must be a list of 2 times, one per request"),
        ({"shared_tokens": 4}, "shared_tokens=4 must be less than the tokens of each prompt; the shortest has 4"),
    ],
)
def test_unusable_loads(options, message):
    with pytest.raises(InputError, match=message):
        Load(**{"requests": 2, "prompt": 4, "output": 4, **options})
