"""Predict published tables of serving engines, and print how far off the predictions are.

    python benchmarks/serving_truth.py [--only TEXT] [--rows] [--all] [--docs | --write]

``serving_truth.json`` has the tables: facts with their sources. No coefficient is fitted to them. A row is a load:
requests that come at once, tokens of their prompts and outputs; then what was measured. All are predicted by the
simulation of ``serving``; ``continuous`` tables with a quarter of the requests, at most 6,000, and of these only rows
with outputs of up to 1,000 tokens unless ``--all`` is passed. First tokens and times per token are compared for single
requests: of several, sources begin with one alone, or give the median over steps. Models run in bfloat16, which takes
as long as float16.

A ratio is predicted / measured time; of throughput, measured / predicted tokens per second. ``--write`` stores the
ratios in the package and writes their table in ``docs/serving.md``; ``--docs`` writes it from the stored ratios.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from latency_page import markdown_table, replaced
from tabulate import tabulate
from torch import nn

import modelsummary
from modelsummary import DeviceSpec, InputError, Statistics
from modelsummary.serving import Engine, Load
from modelsummary.serving.scheduler import serve
from modelsummary.serving.server import Server, ServingOptions

TABLES = Path(__file__).with_name("serving_truth.json")
STORED = Path(modelsummary.__file__).parent / "serving" / "published_errors.json"
PAGE = Path(__file__).parents[1] / "docs" / "serving.md"
FIGURES = {"output_tokens_per_second": "throughput", "first_token_ms": "first token", "token_ms": "time per token"}
# width, width of the MLP, layers, heads, heads of keys, words
SIZES = {
    "llama-7b": (4096, 11008, 32, 32, 32, 32000),
    "llama-2-13b": (5120, 13824, 40, 40, 40, 32000),
    "llama-2-70b": (8192, 28672, 80, 64, 8, 32000),
    "llama-3.1-8b": (4096, 14336, 32, 32, 8, 128256),
    "llama-3.3-70b": (8192, 28672, 80, 64, 8, 128256),
}
# Assumed where the sources do not say; steps take no time besides their forward.
ENGINES = {
    "LMDeploy 0.1": Engine(page_tokens=128, memory_share=0.95, token_budget=8192),
    "gpt-fast": Engine(token_budget=None),
    "TensorRT-LLM 0.6": Engine(page_tokens=128, memory_share=0.97, token_budget=None),
    "TensorRT-LLM 1.0": Engine(page_tokens=32, memory_share=0.95, token_budget=8192),
}
MOST_OUTPUT, MOST_REQUESTS = 1000, 6000
LARGEST = Engine(max_requests=1024, token_budget=8192)  # whose prices hold for all engines


class Result(NamedTuple):
    """A figure of a row with its prediction, as a ratio of times; above 1, the prediction is too slow."""

    table: dict[str, Any]
    row: list[float]
    figure: str
    ratio: float


def llama(name: str) -> nn.Module:
    """Return a Llama on meta."""
    import transformers as hf

    width, inner, layers, heads, key_heads, words = SIZES[name]
    sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": words}
    config = hf.LlamaConfig(**sizes, num_attention_heads=heads, num_key_value_heads=key_heads)
    config.max_position_embeddings = 131072
    with torch.device("meta"):
        return hf.LlamaForCausalLM(config).eval()


def rows_of(table: dict[str, Any], *, every: bool) -> list[list[float]]:
    """Return the rows that are predicted."""
    return [row for row in table["rows"] if every or table["kind"] != "continuous" or row[2] <= MOST_OUTPUT]


def results(
    table: dict[str, Any], stats: Statistics, runs: dict[Any, Any], context: int, *, every: bool
) -> Iterator[Result]:
    """Yield the figures of a table with their predictions.

    Args:
        table: the table.
        stats: its model.
        runs: of the same model, on as many devices.
        context: the longest of its tables.
        every: rows with long outputs, too.
    """
    is_continuous = table["kind"] == "continuous"
    cache_dtype = table["cache_dtype"] and getattr(torch, table["cache_dtype"])
    options = ServingOptions(
        context, tensor=table["tensor"], dtype=torch.bfloat16, weights=table["weights"], cache_dtype=cache_dtype
    )
    server = Server(stats.live, stats.root, DeviceSpec(table["device"]), options, runs)
    rows = rows_of(table, every=every)
    engine = replace(ENGINES[table["engine"]], max_requests=1024 if is_continuous else max(row[0] for row in rows))
    prices = server.prices(LARGEST, engine)[1]
    if isinstance(prices, InputError):  # no page of the cache fits
        raise prices
    for row in rows:
        requests, prompt, output = row[:3]
        if is_continuous:
            requests = min(MOST_REQUESTS, requests // 4)
        timeline = serve(Load(requests, prompt=prompt, output=output), engine, prices.pages, prices.price)
        first = min(request.first for request in timeline.requests)
        predicted = {
            "output_tokens_per_second": requests * output / timeline.seconds,
            "first_token_ms": 1e3 * first,
            "token_ms": timeline.requests[0].tpot_ms,
        }
        for figure, measured in zip(table["columns"][3:], row[3:], strict=True):
            if requests > 1 and figure != "output_tokens_per_second":
                continue
            ratio = predicted[figure] / measured
            yield Result(table, row, figure, 1 / ratio if figure == "output_tokens_per_second" else ratio)


def summary(found: list[Result]) -> list[list[Any]]:
    """Return a row per table and figure: ratios, mean error and bias."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in found:
        groups.setdefault((result.table["name"], result.figure), []).append(result)
    lines = []
    for (name, figure), group in groups.items():
        ratios = [result.ratio for result in group]
        error, bias = mean(abs(ratio - 1) for ratio in ratios), mean(ratios) - 1
        lines.append([name, figure.replace("_", " "), len(ratios), f"{error:.1%}", f"{bias:+.1%}"])
    return lines


def write(found: list[Result]) -> None:
    """Store the ratios of the figures of all tables in the package."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in found:
        groups.setdefault((result.table["name"], result.figure), []).append(result)
    tables = []
    for (name, figure), group in groups.items():
        table = group[0].table
        case = {
            "generation": DeviceSpec(table["device"]).generation,
            "weights": table["weights"] or "bfloat16",
            "devices": "one" if table["tensor"] == 1 else "several",
            "figure": figure,
        }
        tables.append({"name": name, "case": case, "ratios": [round(result.ratio, 3) for result in group]})
    lines = ",\n  ".join(json.dumps(table) for table in tables)
    STORED.write_text(f'{{"tables": [\n  {lines}\n]}}\n', encoding="utf-8")


def write_page() -> None:
    """Write the table of the stored ratios into the page."""
    sources = {table["name"]: table for table in json.loads(TABLES.read_text(encoding="utf-8"))["tables"]}
    rows = []
    for table in json.loads(STORED.read_text(encoding="utf-8"))["tables"]:
        source, ratios = sources[table["name"]], table["ratios"]
        devices = f"{source['tensor']} x {source['device']}" if source["tensor"] > 1 else source["device"]
        error, bias = 100 * mean(abs(ratio - 1) for ratio in ratios), 100 * (mean(ratios) - 1)
        figure = FIGURES[table["case"]["figure"]]
        rows.append([table["name"], devices, figure, str(len(ratios)), f"{error:.1f} %", f"{bias:+.1f} %"])
    headers = ["table", "device", "figure", "rows", "error", "bias"]
    PAGE.write_text(
        replaced(PAGE.read_text(encoding="utf-8"), headers[0], markdown_table(headers, rows)), encoding="utf-8"
    )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="tables whose name contains this")
    parser.add_argument("--rows", action="store_true", help="print each row")
    parser.add_argument("--all", action="store_true", help="rows with long outputs, too")
    parser.add_argument("--docs", action="store_true", help="write the table of the docs, and predict nothing")
    parser.add_argument("--write", action="store_true", help="store the ratios, and write the table of the docs")
    options = parser.parse_args()
    if options.write and options.only:
        parser.error("--write stores all tables; leave out --only")
    if options.docs and not options.write:
        write_page()
        return
    warnings.simplefilter("ignore")
    found: list[Result] = []
    tables = [
        table for table in json.loads(TABLES.read_text(encoding="utf-8"))["tables"] if options.only in table["name"]
    ]
    ids = torch.zeros(1, 16, dtype=torch.long, device="meta")
    stats = {name: Statistics(llama(name), {"input_ids": ids}) for name in {table["model"] for table in tables}}
    runs: dict[tuple[str, int], dict[Any, Any]] = {}
    contexts: dict[tuple[str, int], int] = {}
    for table in tables:
        key = table["model"], table["tensor"]
        longest = max(int(prompt + output) for _, prompt, output, *_ in rows_of(table, every=options.all))
        contexts[key] = max(contexts.get(key, 0), longest)
    for table in sorted(tables, key=lambda table: (SIZES[table["model"]][2], table["model"], table["tensor"])):
        begin, key = time.process_time(), (table["model"], table["tensor"])
        new = list(results(table, stats[key[0]], runs.setdefault(key, {}), contexts[key], every=options.all))
        found += new
        print(f"{table['name']}: {time.process_time() - begin:.1f} s of CPU time", flush=True)
        if options.rows:
            print(*(f"  {result.row} {result.figure} {result.ratio:.3f}" for result in new), sep="\n", flush=True)
    names = [table["name"] for table in tables]
    found.sort(key=lambda result: names.index(result.table["name"]))
    headers = ["table", "figure", "rows", "error", "bias"]
    print(tabulate(summary(found), headers))
    if options.write:
        write(found)
        write_page()


if __name__ == "__main__":
    main()
