"""Some hundred mutants of every format, each read in a process that may crash."""

from __future__ import annotations

import sys

import pytest

from benchmarks.fuzz_files import fuzz, seeds_in


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts seconds and memory as Linux does")
def test_mutants_end_with_a_result_or_an_error(tmp_path) -> None:
    counts, bad, _, largest = fuzz(seeds_in(tmp_path), 200, seed=34)
    assert bad == []
    assert counts.keys() <= {"read", "ModelFileError"}
    assert largest < 500 * 2**20
