"""Published runs: the errors and the bias of the predictions, and the tables of CLUSTER.md and docs/cluster.md."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from modelsummary.cluster.published_errors import published_tables

ROOT = Path(__file__).parents[2]
# table -> most mean error, worst error, and distance of the mean ratio from 1: a little above what CLUSTER.md says
LIMITS = {
    "Megatron-LM 2021": (0.035, 0.07, 0.025),
    "Korthikanti 2022": (0.035, 0.07, 0.02),
    "Llama 3 405B": (0.03, 0.035, 0.02),
    "torchtitan": (0.035, 0.075, 0.035),
    "llm-foundry": (0.06, 0.08, 0.06),
    "Megatron-Bridge, 8 bits": (0.07, 0.16, 0.04),
}


@pytest.fixture(scope="module")
def benchmarks():
    """The modules of the benchmarks, which import each other by their names."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import cluster_blind
    import cluster_runs

    yield cluster_runs, cluster_blind
    sys.path.remove(str(ROOT / "benchmarks"))


def test_the_errors_in_the_docs_are_those_stored(benchmarks):
    """Both are written by ``python benchmarks/cluster_runs.py --data FOLDER --write``."""
    runs = benchmarks[0]
    page, (first, *others) = runs.PAGE.read_text(encoding="utf-8"), published_tables()
    assert runs.replaced(page, "published runs", runs.errors_table([first, *others])) == page
    slower = first._replace(seconds=tuple(1.1 * ratio for ratio in first.seconds))
    assert runs.errors_table([slower, *others]) not in page


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_published_steps(benchmarks):
    """The rows are written by ``python benchmarks/cluster_runs.py --data FOLDER --write``."""
    runs, blind = benchmarks
    details = runs.DETAILS.read_text(encoding="utf-8")
    ratios = {}
    anchors = (*runs.megatron(), *runs.korthikanti(), *runs.llama_405b())
    for run in (*anchors, *blind.torchtitan(), *blind.foundry(), *blind.bridge()):
        step = runs.predicted(run)
        ratios.setdefault(run.table, []).append(step.step_seconds / run.seconds)
        assert f"| {run.table}, {run.name} |" in details
        assert runs.with_row(details, run, step) == details
    assert ratios.keys() == LIMITS.keys()
    for table, (mean, worst, bias) in LIMITS.items():
        off = [abs(each - 1) for each in ratios[table]]
        assert sum(off) / len(off) < mean, table
        assert max(off) < worst, table
        assert abs(sum(ratios[table]) / len(off) - 1) < bias, table


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_published_bytes(benchmarks):
    """Weights, optimizer and activations by technique in figures 1 and 7 of arXiv:2205.05198."""
    ratios = [float(row[-1]) for row in benchmarks[0].memory_table()]
    assert len(ratios) == 28
    assert sum(abs(each - 1) for each in ratios) / 28 < 0.003
    assert max(abs(each - 1) for each in ratios) < 0.012
    assert abs(sum(ratios) / 28 - 1) < 0.003
