"""What reading a file may cost."""

from __future__ import annotations

import pytest

from modelsummary.errors import ModelFileError
from modelsummary.files.budget import Budget


def test_steps_are_counted_together() -> None:
    budget = Budget(steps=5)
    budget.spend(2)
    budget.spend(3)
    with pytest.raises(ModelFileError, match="more than 5 steps"):
        budget.spend()


def test_bytes_are_counted_together() -> None:
    budget = Budget(bytes=100)
    budget.take(60)
    with pytest.raises(ModelFileError, match="more than 100 bytes"):
        budget.take(60)


def test_depth_is_the_number_of_open_levels() -> None:
    budget = Budget(depth=2)
    for _ in range(3):
        with budget.enter(), budget.enter():
            pass
    with budget.enter(), budget.enter(), pytest.raises(ModelFileError, match="nested more than 2 deep"), budget.enter():
        pass


def test_work_without_time_left_is_refused_at_the_next_look() -> None:
    budget = Budget(seconds=0.0, steps=10_000)
    with pytest.raises(ModelFileError, match=r"more than 0\.0 s"):
        budget.spend(1000)
