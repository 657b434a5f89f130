"""Code of other libraries on untrusted files, in a child process."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time

import pytest

from modelsummary import InputError, ModelFileError
from modelsummary.files.budget import Budget
from modelsummary.files.contained import contained, limit_seconds
from modelsummary.files.program import Operation, Program, Tensor

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux copies processes safely")


def endless() -> None:
    while True:
        pass


def huge() -> int:
    return len(bytearray(2**30))


def test_results_are_plain_data() -> None:
    tensor = Tensor("x", (2, "n"), (2, 1), "float32", 32)
    program = Program("Net", [tensor], [tensor], [Operation("relu", "Relu", (), [tensor], [tensor], {"a": [1, 2.5]})])
    copy = contained(lambda: program, Budget())
    assert copy is not program
    assert copy.operations[0].inputs[0] is copy.inputs[0]
    assert copy.operations[0].attributes == {"a": [1, 2.5]}


def test_a_child_knows_the_folder_for_temporary_files(monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert contained(tempfile.gettempdir, Budget()) == tempfile.gettempdir()


def test_other_classes_are_not_restored() -> None:
    with pytest.raises(ModelFileError, match="stat_result is not plain data"):
        contained(lambda: os.stat("."), Budget())


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (endless, r"more than 0\.2 s"),
        (huge, "more than 1,048,576 bytes of memory"),
        (os.abort, "ends its process \\(SIGABRT\\)"),
        (lambda: 1 // 0, "fails: ZeroDivisionError"),
    ],
)
def test_what_a_child_does_wrong_is_an_error(function, message) -> None:
    with pytest.raises(ModelFileError, match=message):
        contained(function, Budget(seconds=0.2, bytes=2**20))


def _has_landlock(version: int) -> bool:
    return ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1) >= version


@pytest.mark.skipif(not _has_landlock(4), reason="the kernel has no Landlock that knows of networks")
def test_a_child_writes_nothing_starts_nothing_and_connects_to_nothing(tmp_path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    with socket.create_server(("127.0.0.1", 0)) as server:
        attempts = [
            lambda: victim.write_text(""),
            lambda: os.close(os.open(victim, os.O_WRONLY | os.O_TRUNC)),
            lambda: os.truncate(victim, 0),
            victim.unlink,
            lambda: victim.rename(tmp_path / "other"),
            (tmp_path / "new").mkdir,
            lambda: (tmp_path / "link").symlink_to(victim),
            lambda: subprocess.run(["true"], check=True),
            lambda: socket.create_connection(server.getsockname(), timeout=1),
        ]
        for attempt in attempts:
            with pytest.raises(ModelFileError, match="PermissionError"):
                contained(attempt, Budget())
        assert contained(victim.read_text, Budget()) == "precious"
    assert [path.name for path in tmp_path.iterdir()] == ["victim"]
    assert victim.read_text() == "precious"


def test_errors_keep_their_class() -> None:
    def wrong() -> None:
        raise InputError("a size does not fit")

    with pytest.raises(InputError, match="a size does not fit"):
        contained(wrong, Budget())


def test_a_child_writes_no_file_and_prints_nothing(capfd, tmp_path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("data")

    def write() -> None:
        print("out")
        os.system("echo out")
        with victim.open("a") as file:
            file.write("more")

    with pytest.raises(ModelFileError, match=r"File too large|SIGXFSZ"):
        contained(write, Budget())
    assert victim.read_text() == "data"
    assert capfd.readouterr() == ("", "")


def test_the_time_of_a_child_counts() -> None:
    def work() -> None:
        end = time.process_time() + 0.2
        while time.process_time() < end:
            pass

    budget = Budget(seconds=10)
    contained(work, budget)
    assert budget.seconds_left < 9.9


def test_a_child_can_take_the_seconds_of_a_part_of_the_file() -> None:
    def work() -> None:
        limit_seconds(Budget(seconds=0.1))
        endless()

    with pytest.raises(ModelFileError, match=r"more than 0\.\d s"):
        contained(work, Budget(seconds=100))
    limit_seconds(Budget(seconds=0.01))  # changes nothing outside of a child
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass


def test_children_of_threads() -> None:
    results: list[int] = []
    threads = [threading.Thread(target=lambda: results.append(contained(lambda: 7, Budget()))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [7] * 4
