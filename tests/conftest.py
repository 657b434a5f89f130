"""What all tests share: no time limits, no kernel tables of this machine, no GPU where there is none."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # pytest-xdist runs a worker on each core; torch reads it on import

import pytest
import torch
from hypothesis import settings

pytest.register_assert_rewrite("tests.untouched")
settings.register_profile("without_deadlines", settings(), deadline=None)  # machines may be busy
settings.load_profile("without_deadlines")


@pytest.fixture(autouse=True, scope="session")
def no_kernel_tables(tmp_path_factory):
    """Predictions must not depend on what was measured on this machine before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MODELSUMMARY_CACHE", str(tmp_path_factory.mktemp("kernels")))
        yield


_STATM = Path("/proc/self/statm")  # of Linux: pages, and pages in memory


def pytest_runtest_teardown(item):
    """Give back what a slow test held; two workers and their groups of processes once filled 24 GB."""
    if "slow" in item.keywords and _STATM.exists():
        pages = int(_STATM.read_text().split()[1])
        if pages * os.sysconf("SC_PAGE_SIZE") > 1.5e9:
            gc.collect()  # statistics and their models are in cycles
            getattr(ctypes.CDLL(None), "malloc_trim", int)(0)  # glibc keeps what was freed between small blocks


_hidden = 0  # modules whose objects the garbage collector does not see


def pytest_collection_finish():
    """Hide what was imported from the garbage collector: a million objects, over half a second for each collection."""
    global _hidden  # noqa: PLW0603
    _hidden = len(sys.modules)
    gc.collect()
    gc.freeze()


def pytest_runtest_logfinish():
    """Hide what a test imported, too: a library of models, or a compiler, is as much again."""
    if len(sys.modules) > _hidden + 100:
        pytest_collection_finish()


def pytest_collection_modifyitems(items):
    if not torch.accelerator.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs an accelerator"))
