"""What ranks hold over a simulated step: the readers of torch's snapshots of memory take it, and meet its peak."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
from torch.cuda import _memory_viz

from modelsummary import InputError
from modelsummary.cluster import Cluster, Plan
from tests.cluster.models import statistics

PLANS = [
    Plan(),
    Plan(shard=4, checkpoint="every"),
    Plan(data=2, sharded="optimizer", checkpoint="selective"),
    *(Plan(pipeline=2, data=2, schedule=schedule) for schedule in ("gpipe", "1f1b", "zb")),
    *(Plan(pipeline=2, virtual_stages=2, schedule=schedule) for schedule in ("interleaved1f1b", "zbv", "dualpipev")),
    Plan(pipeline=4, shard=2, checkpoint=1),
    Plan(tensor=2, pipeline=2, micro_batch=2),
]


def replayed(events):
    """Return the most bytes, and the bytes at the end, of allocations that never overlap."""
    alive, held, peak = {}, 0, 0
    for event in events:
        if event["action"] == "alloc":
            begin, end = event["addr"], event["addr"] + event["size"]
            assert all(end <= other or begin >= other + size for other, size in alive.items())
            alive[begin] = event["size"]
            held += event["size"]
            peak = max(peak, held)
        elif event["action"] == "free_completed":
            held -= alive.pop(event["addr"])
    return peak, held


@pytest.mark.parametrize("batch", [8, 64])
@pytest.mark.parametrize("plan", PLANS, ids=Plan.describe)
def test_the_peak_is_the_memory_of_each_rank(plan, batch, tmp_path):
    if plan.schedule == "dualpipev" and torch.__version__ < "2.9":
        pytest.skip("torch has the schedule since 2.9")
    step = statistics().simulate(plan, Cluster("A100"), batch)
    snapshot = pickle.loads(step.write_memory_snapshot(tmp_path / "step.pickle").read_bytes())
    assert len(snapshot["device_traces"]) == plan.pipeline
    for rank, (memory, events) in enumerate(zip(step.memory, snapshot["device_traces"], strict=True)):
        stays = memory.parameters + memory.optimizer + memory.buffers
        assert replayed(events) == (memory.total, stays)
        segments = [segment for segment in snapshot["segments"] if segment["device"] == rank]
        assert sum(segment["requested_size"] for segment in segments) == stays
        assert all(segment["allocated_size"] == _memory_viz.calc_active(segment) for segment in segments)
        times = [event["time_us"] for event in events]
        assert times == sorted(times)


@pytest.mark.skipif(not hasattr(_memory_viz, "filter_alloc_free_pairs"), reason="since torch 2.9")
def test_torch_reads_it(tmp_path):
    step = statistics().simulate(Plan(pipeline=2), Cluster("A100"), 8)
    snapshot = pickle.loads(step.write_memory_snapshot(tmp_path / "step.pickle").read_bytes())
    summary = _memory_viz.segsum(snapshot)
    assert f"segments: {len(snapshot['segments'])}\n" in summary
    stays = sum(memory.parameters + memory.optimizer + memory.buffers for memory in step.memory)
    assert f"total_allocated: {_memory_viz.Bytes(stays)}\n" in summary
    assert _memory_viz.trace(snapshot).count("Device ") == 2
    lines = _memory_viz.memory(snapshot, format_flamegraph=str).splitlines()
    assert sum(int(line.rpartition(" ")[2]) for line in lines if "active_allocated" in line) == sum(
        segment["allocated_size"] for segment in snapshot["segments"]
    )
    assert "Active Memory Timeline" in _memory_viz.trace_plot(snapshot)
    left = _memory_viz.filter_alloc_free_pairs(snapshot)["device_traces"]
    categories = {event["category"] for events in left for event in events}
    assert categories <= {"parameters", "optimizer", "buffers", "segment"}


def test_the_trace_has_the_same_bytes(tmp_path):
    step = statistics().simulate(Plan(pipeline=2), Cluster("A100"), 8)
    events = json.loads(step.write_trace(tmp_path / "step.json").read_text())["traceEvents"]
    for rank, memory in enumerate(step.memory):
        counters = [event for event in events if event["name"] == f"memory of rank {rank} (bytes)"]
        assert max(sum(event["args"].values()) for event in counters) == memory.total
        assert {"parameters", "activations"} <= set(counters[-1]["args"])
        assert counters[-1]["args"]["gradients"] == 0  # the step has ended
    with pytest.raises(InputError, match="cannot be written"):
        step.write_memory_snapshot(tmp_path / "missing" / "step.pickle")
