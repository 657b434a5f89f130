"""How sure the simulation of a server is: the errors that simulations of published tables of engines had.

``published_errors.json`` has the ratios of predicted and measured times of each table, with what its rows have in
common. ``benchmarks/serving_truth.py`` writes it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from modelsummary.cluster.published_errors import PublishedErrors, PublishedTable, error_of
from modelsummary.file_contents import packaged

__all__ = ["ServedCase", "error_of_serving", "tables_of_engines"]


class ServedCase(NamedTuple):
    """What decides which published tables a simulation is compared with.

    Attributes:
        generation: architecture of the devices.
        weights: form of the weights of products; ``"bfloat16"`` for both dtypes of two bytes.
        devices: ``"one"``, or ``"several"`` that share a model.
        figure: ``"output_tokens_per_second"``, ``"first_token_ms"`` or ``"token_ms"``.
    """

    generation: str
    weights: str = "bfloat16"
    devices: str = "one"
    figure: str = "output_tokens_per_second"


@lru_cache(maxsize=1)
def tables_of_engines() -> tuple[PublishedTable, ...]:
    """Return the published tables with the errors of their predictions.

    >>> tables_of_engines()[0].name
    'LMDeploy, Llama-2-7B'
    """
    tables = packaged("modelsummary.serving", "published_errors.json")["tables"]
    return tuple(PublishedTable(table["name"], ServedCase(**table["case"]), tuple(table["ratios"])) for table in tables)


def error_of_serving(case: ServedCase) -> PublishedErrors:
    """Return the errors of a figure on the published tables that are nearest to a case.

    >>> error_of_serving(ServedCase("ampere")).tables[0]
    'LMDeploy, Llama-2-7B'
    """
    tables = [table for table in tables_of_engines() if table.case[-1] == case.figure]
    return error_of(case, tables=tables)
