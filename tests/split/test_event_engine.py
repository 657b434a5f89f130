"""The engine for the time of a step: cases worked by hand, and what holds for any items."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelsummary.split.event_engine import ItemGraph, Resource, periodic

KERNELS, STREAM, LINK = Resource("kernels"), Resource("stream"), Resource("link")


def rank(number):
    return Resource("rank", (number,))


def test_a_gather_ahead_of_two_layers():
    """Gathers of 2 and 5 s in one stream, layers of 4 and 1 s: the second layer waits for 1 s."""
    graph = ItemGraph()
    first = graph.add(STREAM, 0)
    second = graph.add(STREAM, 1)
    graph.add(KERNELS, 2, first)
    graph.add(KERNELS, 3, second)
    ends = graph.run([2.0, 5.0, 4.0, 1.0])
    assert ends == [0.0, 2.0, 7.0, 6.0, 8.0]
    assert graph.begins(ends) == [0.0, 0.0, 2.0, 2.0, 7.0]
    assert graph.idle(KERNELS, ends) == {STREAM: 3.0}  # 2 s before the first layer, 1 s before the second


def test_waits_are_followed_back():
    """The rank waits for a message of 1 s, and before that for the 3 s of its sender beyond its own 2 s."""
    graph = ItemGraph()
    sent = graph.add(rank(0), 0)
    message = graph.add(LINK, 1, sent)
    graph.add(rank(1), 2)
    graph.add(rank(1), 3, message)
    ends = graph.run([5.0, 1.0, 2.0, 4.0])
    assert ends[-1] == 10
    assert graph.idle(rank(1), ends) == {LINK: 1.0, rank(0): 3.0}
    assert graph.idle(rank(0), ends) == {rank(1): 4.0, LINK: 1.0}  # after its own end


def test_resources_slow_each_other_down():
    """A quarter of the kernels' speed is lost while the stream runs for 4 s: 3 of 10 s are done, 7 are left."""
    graph = ItemGraph()
    graph.add(KERNELS, 0)
    graph.add(STREAM, 1)

    def speed(running):
        return [0.75 if resource == KERNELS and STREAM in running else 1.0 for resource in running]

    assert graph.run([10.0, 4.0], speed) == [0.0, 11.0, 4.0]
    assert graph.run([1.5, 4.0], speed) == [0.0, 2.0, 4.0]


def test_processes_share_cores():
    """Three processes on two cores, of 2, 2 and 4 s: together until 3 s, with the last one's other 2 s alone."""
    graph = ItemGraph()
    for process in range(3):
        graph.add(rank(process), process)
    ends = graph.run([2.0, 2.0, 4.0], lambda running: [min(1.0, 2 / len(running))] * len(running))
    assert ends == pytest.approx([0.0, 3.0, 3.0, 5.0])


def test_what_repeats_itself_runs_for_a_few_rounds():
    counts = []

    def seconds(count):
        counts.append(count)
        return 7.0 + 3.0 * count

    assert periodic(seconds, 50, shortest=4, period=2) == 157.0
    assert counts == [4, 6]
    assert periodic(seconds, 6, shortest=4, period=2) == 25.0


ITEMS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 9), st.lists(st.integers(1, 12), max_size=3)), min_size=1, max_size=14
)


def graph_of(items):
    """Return a graph of (resource, seconds, how many items before it each one waits for)."""
    graph, seconds = ItemGraph(), []
    for number, (resource, time, distances) in enumerate(items, 1):
        graph.add(rank(resource), number - 1, *(number - distance for distance in distances if distance < number))
        seconds.append(float(time))
    return graph, seconds


@settings(max_examples=100, deadline=None)
@given(ITEMS)
def test_what_holds_for_any_items(items):
    graph, seconds = graph_of(items)
    ends = graph.run(seconds)
    begins = graph.begins(ends)
    path = [0.0]
    for number, waits_for in enumerate(graph.waits_for, 1):
        path.append(seconds[number - 1] + max((path[before] for before in waits_for), default=0.0))
        assert ends[number] == begins[number] + seconds[number - 1]
        assert begins[number] >= ends[graph.previous[number - 1]]  # a resource runs one item at a time
        assert all(begins[number] >= ends[before] for before in waits_for)
    assert max(ends) >= max(path)
    for resource in set(graph.resources):
        load = sum(time for of_item, time in zip(graph.resources, seconds, strict=True) if of_item == resource)
        idle = graph.idle(resource, ends)
        assert max(ends) == pytest.approx(load + sum(idle.values()))
        assert resource not in idle
    assert graph.run(seconds, lambda running: [1.0] * len(running)) == pytest.approx(ends)


@settings(max_examples=50, deadline=None)
@given(ITEMS, st.floats(0.25, 0.9))
def test_slower_resources_end_later(items, slowed):
    graph, seconds = graph_of(items)
    ends = graph.run(seconds, lambda running: [slowed if len(running) > 1 else 1.0] * len(running))
    fast = graph.run(seconds)
    assert all(late >= early - 1e-9 for late, early in zip(ends, fast, strict=True))
    assert max(ends) <= max(fast) / slowed + 1e-9
