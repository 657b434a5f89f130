"""Keeping memory: what glibc does inside and afterwards, and that nothing happens elsewhere."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from contextlib import suppress

import pytest

from modelsummary.latency import kept_memory as room
from modelsummary.latency.kept_memory import kept_memory

TRIM_THRESHOLD, MMAP_MAX = -1, -4  # malloc.h


@pytest.fixture
def said(monkeypatch):
    """Return what a C library that only listens is told."""
    heard = []

    class Library:
        def mallopt(self, name, value):
            heard.append((name, value))

        def malloc_trim(self, pad):
            heard.append(("trim", pad))

    for name in room._SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(room, "_is_glibc", lambda: True)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Library())
    return heard


def test_the_defaults_come_back_also_after_an_exception(said):
    with suppress(ValueError), kept_memory():
        assert said == [(TRIM_THRESHOLD, 2**31 - 1), (MMAP_MAX, 0)]
        raise ValueError
    # 65,536 mappings are glibc's default; the other threshold is twice the 32 MB above which it maps each block
    assert said[2:] == [(TRIM_THRESHOLD, 2**26), (MMAP_MAX, 65536), ("trim", 0)]


def test_an_interrupt_at_the_beginning_leaves_nothing_behind(said, monkeypatch):
    class Interrupted:
        def mallopt(self, name, value):
            said.append((name, value))
            if (name, value) == (MMAP_MAX, 0):
                raise KeyboardInterrupt

        def malloc_trim(self, pad):
            pass

    monkeypatch.setattr(ctypes, "CDLL", lambda _: Interrupted())
    with pytest.raises(KeyboardInterrupt), kept_memory():
        pass
    assert said[2:] == [(TRIM_THRESHOLD, 2**26), (MMAP_MAX, 65536)]


@pytest.mark.parametrize("name", ["GLIBC_TUNABLES", "MALLOC_MMAP_MAX_"])
def test_settings_of_the_user_stay(said, monkeypatch, name):
    monkeypatch.setenv(name, "1")
    with kept_memory():
        pass
    assert said == []


def test_another_c_library_is_left_alone(said, monkeypatch):
    monkeypatch.setattr(room, "_is_glibc", lambda: False)
    with kept_memory():
        pass
    assert said == []


FAULTS = """
import resource, torch
from modelsummary.latency.kept_memory import kept_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.zeros(10_000_000)  # 40 MB: 9,766 pages
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

usual = faults()
with kept_memory():
    print(usual, min(faults() for _ in range(5)))  # the heap may have several places for it
"""


@pytest.mark.skipif(not room._is_glibc(), reason="another C library")
def test_a_large_block_is_touched_once():
    """In a process of its own: after a failed allocation, glibc may serve a thread from mappings that it returns."""
    out = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True).stdout
    usual, again = map(int, out.split())
    assert again < max(usual / 10, 100)  # huge pages are few
