"""The errors that simulations of published tables of engines had: their sources, and the ranges that follow."""

from __future__ import annotations

from statistics import mean

from modelsummary.cluster.published_errors import error_of
from modelsummary.serving.published import ServedCase, error_of_serving, tables_of_engines


def _source(table):
    return table.name.partition(",")[0]


def test_four_of_five_ratios_of_a_source_are_in_the_range_that_the_others_give():
    tables = [table for table in tables_of_engines() if table.case.figure == "output_tokens_per_second"]
    assert {_source(table) for table in tables} == {"LMDeploy", "gpt-fast", "TensorRT-LLM"}
    shares = []
    for table in tables:
        error = error_of(table.case, tables=[other for other in tables if _source(other) != _source(table)])
        shares.append(mean(error.low <= ratio <= error.high for ratio in table.seconds))
    assert mean(shares) >= 0.8


def test_the_figure_decides_which_tables_count():
    first = error_of_serving(ServedCase("ampere", figure="first_token_ms"))
    assert first.bias < -0.1 < error_of_serving(ServedCase("ampere")).bias
    assert first.runs == 5 + 5 + 2  # single requests on an A100
