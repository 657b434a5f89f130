"""Trace events: valid, nested, and with the measured durations."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from modelsummary import InputError, Statistics
from modelsummary.memory.estimate import CATEGORIES, MemoryEstimate, TimelinePoint
from modelsummary.views.chrome_trace import trace_events
from tests.trees import SPECS, tree
from tests.untouched import untouched


def timed(spec, unit=1e-6):
    """Return a tree whose times are its numbers of parameters, in nanoseconds."""
    root = tree(spec)
    for row in root.walk():
        row.self_latency_ms, row.backward_self_latency_ms = row.self_params * unit, row.self_params * unit / 2
        row.latency_ms, row.backward_latency_ms = row.num_params * unit, row.num_params * unit / 2
    return root


def spans(events, thread=1):
    """Return FQN -> start and end in whole nanoseconds."""
    bars = [event for event in events if event["ph"] == "X" and event["tid"] == thread]
    return {
        event["args"]["fqn"]: (round(1e3 * event["ts"]), round(1e3 * event["ts"]) + round(1e3 * event["dur"]))
        for event in bars
    }


def check_format(events):
    """Check the requirements of the trace event format."""
    for event in events:
        assert event["ph"] in "XCM"
        assert event["pid"] == 1
        assert event["ts"] >= 0
        assert isinstance(event["name"], str)
        assert event["ph"] != "X" or event["dur"] >= 0
        if event["ph"] == "C":
            assert all(type(value) is int for value in event["args"].values())
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            assert set(event["args"]) == {"name"}


def test_forward_and_backward_by_hand():
    root = timed((20, [(300, []), (0, [(40, []), (50, [])])]))
    events = trace_events(root)
    check_format(events)
    assert spans(events) == {"": (0, 410), "0": (0, 300), "1": (300, 390), "1.0": (300, 340), "1.1": (340, 390)}
    # half the time, in the other direction, after the forward: own work comes first
    assert spans(events, thread=2) == {
        "": (410, 615), "1": (420, 465), "1.1": (420, 445), "1.0": (445, 465), "0": (465, 615),
    }  # fmt: skip
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == ["Row", "forward", "backward"]


def test_a_row_that_was_not_timed_gives_way_to_what_is_in_it():
    root = timed((20, [(300, [(50, [])]), (40, [])]))
    root.children[0].self_latency_ms = None
    assert spans(trace_events(root)) == {"": (0, 110), "0.0": (0, 50), "1": (50, 90)}
    root.self_latency_ms = None
    assert spans(trace_events(root)) == {}


@settings(deadline=None)
@given(SPECS)
def test_bars_nest_and_add_up(spec):
    root = timed(spec)
    events = trace_events(root)
    for thread in (1, 2):
        found = spans(events, thread)
        for row in root.walk():
            begin, end = found[row.fqn]
            inside = sorted(found[child.fqn] for child in row.children)
            assert all(begin <= start and stop <= end for start, stop in inside)
            assert all(stop <= start for (_, stop), (start, _) in pairwise(inside))
            own = round(1e6 * (row.self_latency_ms if thread == 1 else row.backward_self_latency_ms))
            assert end - begin == own + sum(stop - start for start, stop in inside)
    assert spans(events)[""] == (0, root.num_params)


def memory(points):
    zeros = dict.fromkeys(("params", "buffers", "grads", "optimizer_state", "inputs", "activations"), 0)
    return MemoryEstimate(
        "train", "cpu", None, **zeros, held_after_forward=0, peak=0,
        timeline=[
            TimelinePoint("op", fqn, phase, (number,) * len(CATEGORIES)) for number, (fqn, phase) in enumerate(points)
        ],
    )  # fmt: skip


def test_memory_stands_where_the_modules_run():
    root = timed((20, [(300, []), (0, [(40, []), (50, [])])]))
    points = [("0", "forward"), ("0", "forward"), ("1.0", "forward"), ("1.1", "forward"), ("", "forward")]
    points += [("", "backward"), ("1.1", "backward"), ("0", "backward"), (None, "step"), (None, "step")]
    counters = [event for event in trace_events(root, memory(points)) if event["ph"] == "C"]
    times = [round(1e3 * event["ts"]) for event in counters]
    assert times[:5] == [0, 150, 300, 340, 390]
    assert times[5:8] == [410, 420, 465]  # where the backward track has them
    assert times[9] - times[8] == 1000  # the time of the optimizer is unknown
    assert [event["args"]["params"] for event in counters] == list(range(10))
    assert set(counters[0]["args"]) == set(CATEGORIES)


@settings(deadline=None)
@given(SPECS, st.lists(st.tuples(st.sampled_from(["", "0", "1", "0.0"]), st.sampled_from(["forward", "backward"]))))
def test_counters_never_hide_one_another(spec, points):
    points = sorted(points, key=lambda point: point[1], reverse=True)
    counters = [event for event in trace_events(timed(spec), memory(points)) if event["ph"] == "C"]
    times = [round(1e3 * event["ts"]) for event in counters]
    assert len(times) == len(points)
    assert all(before < after for before, after in pairwise(times))


def test_a_measured_model(tmp_path):
    model = nn.Sequential(nn.Sequential(nn.Linear(64, 64), nn.ReLU()), nn.Linear(64, 4))
    with untouched(model):
        stats = Statistics(model, (8, 64)).measure_latency(runs=3, warmup=1, backward=True)
        estimate = stats.memory(optimizer="adam")
        path = stats.to_chrome_trace(tmp_path / "trace.json", memory=estimate)
    assert path == tmp_path / "trace.json"
    events = json.loads(path.read_text())["traceEvents"]
    check_format(events)
    bars = {event["args"]["fqn"]: event for event in events if event["ph"] == "X" and event["tid"] == 1}
    assert bars[""]["dur"] == pytest.approx(1e3 * stats.root.latency_ms, abs=0.01)
    assert bars["0.0"]["args"] == {
        "fqn": "0.0", "class": "Linear", "call": 0, "input_shape": [8, 64], "output_shape": [8, 64],
        "params": 4160, "macs": 32768, "self_ms": stats["0.0"].self_latency_ms,
    }  # fmt: skip
    counters = [event for event in events if event["ph"] == "C"]
    assert max(sum(event["args"].values()) for event in counters) == estimate.peak


def test_memory_alone_and_hostile_names(tmp_path):
    model = nn.Sequential()
    model.add_module('<script>"\n', nn.Linear(4, 4))
    stats = Statistics(model, (2, 4))
    path = stats.to_chrome_trace(str(tmp_path / "a.json"), memory=stats.memory())
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "C"}
    stats.measure_latency(runs=1, warmup=0).to_chrome_trace(path)
    assert [event["name"] for event in json.loads(path.read_text())["traceEvents"]][-1] == '<script>" '


def test_errors(tmp_path):
    stats = Statistics(nn.Linear(4, 4), (2, 4))
    with pytest.raises(InputError, match=r"call measure_latency\(\) first, or pass memory="):
        stats.to_chrome_trace(tmp_path / "a.json")
    with pytest.raises(InputError, match=r"memory must be a MemoryEstimate.*, got 5"):
        stats.to_chrome_trace(tmp_path / "a.json", memory=5)
    with pytest.raises(InputError, match="memory belongs to another model: this one has no module 'other'"):
        stats.to_chrome_trace(tmp_path / "a.json", memory=memory([(None, "step"), ("other", "forward")]))
    stats.measure_latency(runs=1, warmup=0)
    with pytest.raises(InputError, match=r"missing/a\.json.* cannot be written: .*No such file"):
        stats.to_chrome_trace(tmp_path / "missing" / "a.json")
    with pytest.raises(InputError, match="path=3 cannot be written"):
        stats.to_chrome_trace(3)
    assert not list(tmp_path.iterdir())
