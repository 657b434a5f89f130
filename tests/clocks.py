"""A clock that stands still but for what the test lets pass, and modules that take a known time."""

from __future__ import annotations

from torch import nn


class ManualClock:
    """Milliseconds that pass by ``wait``; marks are objects of their own, as events are."""

    waits = False

    def __init__(self):
        self.time = 0.0
        self.made = self.released = 0

    def wait(self, milliseconds):
        self.time += milliseconds

    def now(self):
        self.made += 1
        return [self.time]

    def milliseconds(self, marks):
        return [mark[0] - marks[0][0] for mark in marks]

    def release(self, marks):
        self.released += len(marks)


class Takes(nn.Module):
    """Takes ``milliseconds``, calls what is in it, and takes ``after`` more."""

    def __init__(self, clock, milliseconds, *inner, after=0.0):
        super().__init__()
        self.clock, self.milliseconds, self.after = clock, milliseconds, after
        self.inner = nn.ModuleList(inner)

    def forward(self, x):
        self.clock.wait(self.milliseconds)
        for module in self.inner:
            x = module(x)
        self.clock.wait(self.after)
        return x
