from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.distributed.pipelining
from hypothesis import given, settings
from hypothesis import strategies as st

from modelsummary import InputError
from modelsummary.split.schedule import SCHEDULES, StageLoad, simulate


def _equal(n_stages, time=1.0):
    """Return stages that take ``time`` for the forward and each half of the backward, and hold one byte."""
    return [StageLoad(time, time, time, 0, 1)] * n_stages


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 2), (4, 8), (8, 32)])
def test_bubble_of_equal_stages(schedule, p, m):
    # Huang et al. 2019, Narayanan et al. 2019: (p - 1) / (m + p - 1)
    result = simulate(_equal(p), m, schedule)
    assert result.bubble == pytest.approx((p - 1) / (m + p - 1))
    assert result.makespan == 3 * (m + p - 1)
    assert result.busy == [3 * m] * p


@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 8), (4, 4), (8, 32)])
def test_bubble_of_the_interleaved_schedule(p, m):
    # Narayanan et al. 2021: v stages per device make the bubble v times smaller; halves take half the time
    result = simulate(_equal(2 * p, 0.5), m, "interleaved1f1b")
    assert result.bubble == pytest.approx((p - 1) / (2 * m + p - 1))


@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 8), (3, 12), (8, 32)])
def test_bubble_of_zero_bubble(p, m):
    # Qi et al. 2023, ZB-H1: each device waits (p - 1) (F + B - W) = p - 1, and holds what the first of 1F1B holds
    result = simulate(_equal(p), m, "zb")
    assert result.makespan == 3 * m + p - 1
    assert result.peak_activation_bytes == [min(p, m)] * p


def test_what_is_in_flight():
    assert simulate(_equal(4), 8, "gpipe").peak_activation_bytes == [8, 8, 8, 8]
    assert simulate(_equal(4), 8, "1f1b").peak_activation_bytes == [4, 3, 2, 1]
    assert simulate(_equal(4), 2, "1f1b").peak_activation_bytes == [2, 2, 2, 1]


def test_by_hand():
    # two stages, 1 and 2 for the forward, twice that for the backward, two micro-batches, 1F1B:
    # device 0: F0 0-1, F1 1-2, B0 7-9, B1 13-15; device 1: F0 1-3, B0 3-7, F1 7-9, B1 9-13
    result = simulate([StageLoad(1, 1, 1), StageLoad(2, 2, 2)], 2, "1f1b")
    times = [[(each.kind, each.microbatch, each.begin, each.end) for each in actions] for actions in result.actions]
    assert times == [
        [("F", 0, 0, 1), ("F", 1, 1, 2), ("B", 0, 7, 9), ("B", 1, 13, 15)],
        [("F", 0, 1, 3), ("B", 0, 3, 7), ("F", 1, 7, 9), ("B", 1, 9, 13)],
    ]
    assert result.bubble == pytest.approx(1 - (6 + 12) / 30)


def test_transfers_take_their_time():
    # 10 bytes at 5 per unit of time: 2 for the activations, 2 for their gradients
    loads = [StageLoad(1, 1, 1, 10), StageLoad(1, 1, 1)]
    assert simulate(loads, 1, "gpipe", bandwidth=5).makespan == simulate(loads, 1, "gpipe").makespan + 4


def test_a_link_carries_one_message_at_a_time():
    # forwards of 1, messages of 3: the third message begins at 7, and the last forward at 10
    loads = [StageLoad(1, 1, 1, message=3), StageLoad(1, 1, 1)]
    actions = simulate(loads, 3, "gpipe").actions[1]
    assert [(each.begin, each.end) for each in actions[:3]] == [(4, 5), (7, 8), (10, 11)]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(*[st.integers(1, 9)] * 3), min_size=1, max_size=5),
    st.integers(1, 9),
    st.sampled_from(["gpipe", "1f1b", "zb"]),
)
def test_no_schedule_breaks_the_rules(times, m, schedule):
    loads = [StageLoad(*each, crossing_bytes=3) for each in times]
    result = simulate(loads, m, schedule, bandwidth=2.0)
    done = {(each.kind, each.stage, each.microbatch): each for actions in result.actions for each in actions}
    backward = "I" if schedule == "zb" else "B"
    for actions in result.actions:
        assert all(one.end <= other.begin for one, other in pairwise(actions))
    for stage in range(len(loads)):
        for number in range(m):
            forward, back = done["F", stage, number], done[backward, stage, number]
            assert back.begin >= forward.end
            if stage:
                assert forward.begin >= done["F", stage - 1, number].end + 1.5
                assert done[backward, stage - 1, number].begin >= back.end + 1.5
    total = sum(map(sum, times))
    assert max(map(sum, times)) * m <= result.makespan <= total * m + 3.0 * m * len(loads)
    # a flow shop of equal jobs: sum of all + (m - 1) x the slowest is what GPipe's forwards take
    forwards = [done["F", len(loads) - 1, m - 1].end]
    if schedule == "gpipe":
        slowest = max(*(each[0] for each in times), 1.5 if len(loads) > 1 else 0.0)  # or the link between two stages
        assert forwards == [sum(each[0] for each in times) + 1.5 * (len(loads) - 1) + (m - 1) * slowest]


def test_the_picture_and_the_table():
    result = simulate(_equal(2), 2, "1f1b")
    assert result.timeline(18).splitlines() == ["  0 0011....aaaa..bbbb", "  1 ..00aaaa11bbbb...."]
    assert str(result).splitlines()[-1] == "1f1b, 2 micro-batches: step 9, bubble 33.3%"
    costs = simulate([StageLoad(1e6, 1e6, 1e6)] * 2, 2, "1f1b", unit="macs")
    assert str(costs).splitlines()[-1] == "1f1b, 2 micro-batches: step 9,000,000 macs, bubble 33.3%"
    times = simulate([StageLoad(1e-3, 1e-3, 1e-3)] * 2, 2, "1f1b", unit="s")
    assert str(times).splitlines()[-1] == "1f1b, 2 micro-batches: step 9.00 ms, bubble 33.3%"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"schedule": "fastest"}, "schedule must be one of 'gpipe', .* got 'fastest'"),
        ({"n_microbatches": 0}, "n_microbatches must be an integer >= 1, got 0"),
        ({"bandwidth": 0}, "bandwidth must be .* got 0"),
        ({"stages_per_device": 2}, "stages_per_device must be 1 for '1f1b', got 2"),
        ({"schedule": "interleaved1f1b"}, "needs a multiple of 2 stages, at least 2, got 3"),
        ({"schedule": "interleaved1f1b", "stages_per_device": 1, "n_microbatches": 7}, ""),
    ],
)
def test_bad_arguments(arguments, message):
    given = {"n_microbatches": 4, "schedule": "1f1b", **arguments}
    if not message:
        assert simulate(_equal(3), **given).makespan > 0
        return
    with pytest.raises(InputError, match=message):
        simulate(_equal(3), **given)


def test_uneven_rounds_are_refused():
    with pytest.raises(InputError, match="n_microbatches=7 does not give; pass a multiple of 3"):
        simulate(_equal(6), 7, "interleaved1f1b")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_all_names_run(schedule):
    if schedule == "dualpipev" and torch.__version__ < "2.9":
        with pytest.raises(InputError, match=r"'dualpipev' needs torch >= 2.9, got 2\.\d"):
            simulate(_equal(4), 4, schedule)
    else:
        assert simulate(_equal(4), 4, schedule).schedule == schedule


@pytest.mark.parametrize("bandwidth", ["100GB/s", float("nan"), True, [1e9]])
def test_bandwidth_that_is_no_number(bandwidth):
    with pytest.raises(InputError, match="bandwidth must be a finite number > 0 in bytes per unit of time, got "):
        simulate([StageLoad(1.0, 1.0, 1.0)] * 2, n_microbatches=2, bandwidth=bandwidth)
