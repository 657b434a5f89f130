"""What the tests of this room share: no process waits after the last test."""

from __future__ import annotations

import pytest

from tests.parallel import processes


@pytest.fixture(autouse=True, scope="session")
def no_process_waits():
    yield
    processes.stop()
