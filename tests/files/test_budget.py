"""What reading a file may cost."""

from __future__ import annotations

import pytest

from modelsummary.errors import ModelFileError
from modelsummary.files.budget import Budget
from modelsummary.files.program import Operation, Program, Scope, Tensor
from modelsummary.files.program_tree import ROW_BYTES, program_tree


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
    budget.check_bytes(40)
    budget.check_bytes(40)
    with pytest.raises(ModelFileError, match="more than 100 bytes"):
        budget.check_bytes(41)


def test_the_rows_of_a_tree_are_counted() -> None:
    scopes = tuple(Scope(str(number), str(number), "M") for number in range(60))
    x, y, z = (Tensor(name, (2,), (2,), "float32", 32) for name in "xyz")
    one, other = Operation("a", "Relu", scopes, [x], [y]), Operation("b", "Relu", scopes[:30], [y], [z])
    program = Program("Net", [x], [z], [one, other])
    rows = 1 + 60 + 2  # the model, the modules, the operators
    crossings = 60 + 30 + 30  # x enters all modules, y leaves the inner ones, z the outer ones
    nbytes = rows * ROW_BYTES + sum(map(len, (*(scope.fqn for scope in scopes), "a", "b"))) + crossings * 250
    program_tree(program, Budget(bytes=nbytes))
    with pytest.raises(ModelFileError, match="bytes of memory"):
        program_tree(program, Budget(bytes=nbytes - 1))
    with pytest.raises(ModelFileError, match="more than 1,000 steps"):
        program_tree(program, Budget(steps=1000))  # 60 for each row


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
