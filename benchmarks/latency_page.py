"""Measure how well published measurements are met, and write the tables of LATENCY.md and docs/latency.md.

    python benchmarks/latency_page.py [DATA_FOLDER] [--models 90] [--cache FOLDER]

With ``DATA_FOLDER``, as of ``fit_kernels.py``: the errors of single float32 kernels, which a fit without a V100 makes,
and of whole steps with the coefficients of the package go into ``latency_errors.json``. ``fit_products.py`` puts the
errors of half-precision products there. The tables follow from this file alone; a test compares them with the pages.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

JSON = Path(__file__).with_name("latency_errors.json")
PAGES = Path(__file__).with_name("LATENCY.md"), Path(__file__).parents[1] / "docs" / "latency.md"
SINGLE, PRODUCTS, STEPS = "single kernels, float32", "products of bfloat16 numbers", "whole steps, half precision"
BY_DEVICE = "mean errors on"
_NAMES = {"V100": "a V100, no row in the fit"}
_STEPS = {
    "infer": "timm inference, RTX 3090",
    "train": "timm training, RTX 3090",
    "infer nhwc": "timm inference in channels last, RTX 3090",
    "train nhwc": "timm training in channels last, RTX 3090",
    "compiled": "timm inference, compiled, RTX 4090",
    "a100": "GPT training iterations, A100",
}
_HEADERS = {
    "count": "not in the fit",
    "error": "mean error",
    "bias": "bias",
    "within 0.1": "within 10 %",
    "within 0.2": "within 20 %",
    "roofline": "roofline",
}


def tables(errors: Mapping[str, Any]) -> dict[str, str]:
    """Return the tables of the pages by their first headers.

    >>> print(tables({SINGLE: {"softmax": {"A100": 0.0773}}, PRODUCTS: {}, STEPS: {}})[SINGLE])
    | single kernels, float32 | A100 |
    |---|---|
    | softmax | 7.7 % |
    """
    shares = {
        name: {
            group: {_NAMES.get(device, device): _percent(error) for device, error in row.items()}
            for group, row in errors[name].items()
        }
        for name in (SINGLE, PRODUCTS)
    }
    steps = {_STEPS[name]: {_HEADERS[key]: _cell(key, row[key]) for key in row} for name, row in errors[STEPS].items()}
    by_header = {**shares, STEPS: steps, BY_DEVICE: _by_device(errors)}
    return {name: _table(name, rows) for name, rows in by_header.items()}


def _by_device(errors: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return the ranges of the errors of each device: over kinds of kernels, tables of products and kinds of steps."""
    steps = {_STEPS[name]: row for name, row in errors[STEPS].items()}
    ranges: dict[str, dict[str, list[float]]] = {}
    for name in (SINGLE, PRODUCTS):
        for row in errors[name].values():
            for device, error in row.items():
                ranges.setdefault(device, {}).setdefault(name, []).append(error)
    for name, row in steps.items():
        cells = ranges.setdefault(name.rpartition(", ")[2], {})
        cells.setdefault(STEPS, []).append(row["error"])
        cells.setdefault(_HEADERS["within 0.1"], []).append(row["within 0.1"])
        if "roofline" in row:
            ranges.setdefault("roofline", {}).setdefault(STEPS, []).append(row["roofline"])
    if "roofline" in ranges:
        ranges["a roofline, all devices"] = ranges.pop("roofline")
    return {device: {name: _range(shares) for name, shares in row.items()} for device, row in ranges.items()}


def _range(shares: Sequence[float]) -> str:
    least, most = _percent(min(shares)), _percent(max(shares))
    return most if least == most else f"{least.removesuffix(' %')} to {most}"


def _table(name: str, rows: Mapping[str, Mapping[str, str]]) -> str:
    headers = list(dict.fromkeys(header for row in rows.values() for header in row))
    cells = [[label, *(row.get(header, "") for header in headers)] for label, row in rows.items()]
    return markdown_table([name, *headers], cells)


def markdown_table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of a page.

    >>> print(markdown_table(["a", "b"], [["1", ""]]))
    | a | b |
    |---|---|
    | 1 | |
    """
    return "\n".join([_line(headers), "|" + "---|" * len(headers), *map(_line, rows)])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |".replace("  |", " |")


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _cell(key: str, value: float) -> str:
    if key == "count":
        return f"{value:,.0f}"
    if key == "bias":
        return f"{100 * value:+.1f} %"
    return f"{value:.0%}".replace("%", " %") if key.startswith("within") else _percent(value)


def written(page: str, errors: Mapping[str, Any]) -> str:
    """Return the text of a page with its tables as the errors have them."""
    for name, table in tables(errors).items():
        page = replaced(page, name, table) if f"\n| {name} |" in page else page
    return page


def replaced(page: str, name: str, table: str) -> str:
    """Return a text with another table instead of the one whose first header is ``name``.

    >>> replaced("Before.\\n\\n| a | b |\\n|---|---|\\n\\nAfter.", "a", "| a |\\n|---|")
    'Before.\\n\\n| a |\\n|---|\\n\\nAfter.'
    """
    begin = page.index(f"\n| {name} |") + 1
    return page[:begin] + table + page[page.index("\n\n", begin) :]


def measured(folder: Path, count: int, cache: Path | None) -> dict[str, Any]:
    """Return the errors of single kernels, by a fit without a V100, and of whole steps."""
    import numpy as np
    from single_kernels import error_of, without_unseen
    from whole_steps import TABLES, check_a100, device_of, is_held_out, roofline_step, step_ratios, timm_models

    from modelsummary.devices.kernel_time import fits

    coefficients = fits()["coefficients"]
    fit, unseen = without_unseen(folder, copy.deepcopy(coefficients))
    steps = {}
    for name, models in timm_models(folder, count, cache).items():
        others = [step for step in models if is_held_out(step[0])]
        ratios = step_ratios(others, device_of(TABLES[name], coefficients))
        roofline = np.array([roofline_step(step, TABLES[name].device) for step in others])
        steps[name] = {**_summary(ratios), "roofline": error_of(roofline)}
    steps["a100"] = _summary(check_a100(folder, coefficients))
    return {SINGLE: fit.errors(unseen), STEPS: steps}


def _summary(ratios: Any) -> dict[str, float]:
    off = abs(ratios - 1)
    within = {f"within {limit}": float((off < limit).mean()) for limit in (0.1, 0.2)}
    return {"count": len(ratios), "error": float(off.mean()), "bias": float(ratios.mean() - 1), **within}


def save(errors: Mapping[str, Any]) -> None:
    """Put errors into the file, and its tables into the pages."""
    from fit_kernels import rounded

    stored = {**json.loads(JSON.read_text(encoding="utf-8")), **rounded(errors)}
    JSON.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    for page in PAGES:
        page.write_text(written(page.read_text(encoding="utf-8"), stored), encoding="utf-8")


def main() -> None:
    """Measure if there are measurements, and write the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="of the measurements; default: the tables alone")
    parser.add_argument("--models", type=int, default=90, help="of each table of timm")
    parser.add_argument("--cache", type=Path, help="folder that keeps the operators of the models of timm")
    options = parser.parse_args()
    save(measured(options.folder, options.models, options.cache) if options.folder else {})


if __name__ == "__main__":
    main()
