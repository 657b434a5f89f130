from __future__ import annotations

import pytest
import torch

from modelsummary.devices.kernel_table import Entry, KernelTable, Machine
from modelsummary.operators.operator_work import Work


@pytest.fixture
def machine(tmp_path, monkeypatch):
    monkeypatch.setenv("MODELSUMMARY_CACHE", str(tmp_path))
    return Machine("a cpu", 2, "2.14")


def product(m, n, k, name="aten.mm"):
    return Work(name, "gemm", torch.float32, (1, m, n, k), 2 * m * n * k, 4 * (m * n + m * k + n * k))


def filled(machine):
    table = KernelTable(machine, facts={"flops_per_second": 1e9, "bytes_per_second": 1e9, "operator": 0.0})
    for m in (64, 256):
        entry = Entry.of(product(m, 64, 64))
        bound = entry.flops / 1e9 + entry.nbytes / 1e9
        entry.visits, entry.workspace = [2 * bound], entry.nbytes
        table.add(f"mm {m}", entry)
    return table


def test_a_stored_table_is_read_again(machine):
    table = filled(machine)
    path = table.save()
    assert path == machine.path
    again = KernelTable.load(machine)
    assert (again.entries, again.facts) == (table.entries, table.facts)


def test_exact_interpolated_and_fitted(machine):
    table = filled(machine)
    work = product(64, 64, 64)
    bound = work.flops / 1e9 + work.nbytes / 1e9
    assert table.seconds("mm 64", work) == (pytest.approx(2 * bound), "measured")
    between = product(128, 64, 64)  # as inefficient as its neighbours: twice the roofline
    seconds, source = table.seconds("mm 128", between)
    assert source == "interpolated"
    assert seconds == pytest.approx(2 * (between.flops + between.nbytes) / 1e9)
    assert table.seconds(None, product(128, 64, 64, "aten.bmm"))[1] == "fit"
    unlike = Work("aten.relu", "elementwise", torch.float32, (8,), 0, 64)
    assert table.seconds(None, unlike) == (pytest.approx(64e-9), "fit")


def test_workspace_grows_with_the_bytes(machine):
    table = filled(machine)
    assert table.workspace("mm 64", product(64, 64, 64)) == product(64, 64, 64).nbytes
    assert table.workspace("mm 512", product(512, 64, 64)) == pytest.approx(product(512, 64, 64).nbytes)
    assert table.workspace("other", product(8, 8, 8, "aten.bmm")) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 1}', '{"version": 99, "machine": {}, "entries": {}}'])
def test_a_damaged_file_is_ignored_with_a_warning(machine, text):
    machine.path.parent.mkdir(parents=True)
    machine.path.write_text(text)
    with pytest.warns(UserWarning, match=machine.path.name):
        assert KernelTable.load(machine).entries == {}


@pytest.mark.parametrize("figure", ['"fast"', "NaN", "Infinity", "-1e-06"])
@pytest.mark.parametrize("place", ["facts", "visits"])
def test_a_table_with_a_wrong_figure_is_ignored(machine, place, figure):
    table = filled(machine)
    table.facts["operator"], next(iter(table.entries.values())).visits = 0.125, [0.125]
    path = table.save()
    stored = {"facts": '"operator": 0.125', "visits": '"visits": [0.125'}[place]
    path.write_text(path.read_text().replace(stored, stored.replace("0.125", figure)))
    with pytest.warns(UserWarning, match=f"{path.name} is ignored: ValueError: "):
        assert KernelTable.load(machine).entries == {}


def test_the_table_of_another_machine_is_ignored(machine):
    filled(machine).save()
    other = Machine("a cpu", 4, "2.14")
    machine.path.rename(other.path)
    with pytest.warns(UserWarning, match="another machine"):
        assert KernelTable.load(other).entries == {}


def test_the_median_of_the_visits_counts(machine):
    table = filled(machine)
    entry = Entry.of(product(8, 8, 8))
    for seconds in (4.0, 1.0, 2.0):
        entry.visit(seconds)
    table.add("mm 8", entry)
    assert entry.seconds == 2.0
    table.save()
    stored = KernelTable.load(machine)
    stored.entries["mm 8"].visit(3.0)
    assert stored.entries["mm 8"].seconds == 2.5  # of 4, 1, 2 and 3


def test_an_entry_without_sizes_is_stored(machine):
    table = KernelTable(machine)
    table.add("scalar", Entry("aten.add", "elementwise", "float32", [], 0, 4, workspace=0, visits=[1e-6]))
    table.save()
    assert KernelTable.load(machine).entries == table.entries


def test_old_visits_are_forgotten():
    entry = Entry.of(product(8, 8, 8))
    for _ in range(60):
        entry.visit(9.0)
    for _ in range(26):
        entry.visit(1.0)
    assert len(entry.visits) == 50
    assert entry.seconds == 1.0
