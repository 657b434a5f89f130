from __future__ import annotations

import pytest
import torch

from modelsummary.capture.clock import CpuClock, EventClock, SynchronizingClock, clock_for


class Event:
    """A fake stream event: the device reaches one event per millisecond."""

    device_time = 0
    made = 0

    def __init__(self):
        Event.made += 1
        self.at = None
        self.has_come = False

    def record(self):
        Event.device_time += 1
        self.at, self.has_come = Event.device_time, False

    def synchronize(self):
        self.has_come = True

    def elapsed_time(self, other):
        assert self.has_come
        assert other.has_come
        return float(other.at - self.at)


def test_cpu():
    clock = clock_for(torch.device("cpu"))
    assert isinstance(clock, CpuClock)
    assert clock.milliseconds([1_000_000, 3_500_000, 1_000_000]) == [0.0, 2.5, 0.0]
    first, second = clock.now(), clock.now()
    assert second >= first


def test_events_are_waited_for_once_and_used_again():
    Event.made = Event.device_time = 0
    clock = EventClock(Event)
    marks = [clock.now() for _ in range(4)]
    assert not any(mark.has_come for mark in marks)  # nothing waits while the model runs
    assert clock.milliseconds(marks) == [0.0, 1.0, 2.0, 3.0]
    clock.release(marks)
    again = [clock.now() for _ in range(4)]
    assert Event.made == 4
    assert clock.milliseconds(again) == [0.0, 1.0, 2.0, 3.0]


def test_a_device_without_events_is_waited_for_at_each_mark():
    waited = []
    clock = SynchronizingClock(lambda: waited.append(1))
    assert clock.milliseconds([clock.now(), clock.now()])[1] >= 0
    assert len(waited) == 2
    assert clock.waits


@pytest.mark.gpu
def test_cuda_events():
    clock = clock_for(torch.device("cuda"))
    assert isinstance(clock, EventClock)
    x = torch.ones(4096, 4096, device="cuda")
    begin = clock.now()
    x @ x
    marks = [begin, clock.now()]
    assert clock.milliseconds(marks)[1] > 0
