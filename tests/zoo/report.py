"""The pages of the gate: how many of how many and the kinds of reasons, and every exception with its reason."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from tabulate import tabulate

__all__ = ["exceptions_page", "page", "table"]

Result = dict[str, Any]
Judge = Callable[[Result], bool | None]
Reasons = dict[str, dict[str, list[str]]]

_SPLITS = ("split(2)", "split(4)")
_BALANCES = tuple(f"balance({n})" for n in (2, 3, 4, 8))
_PEAK = 0.03
# What a reason is about: the first pattern that is in it. The pages name the kinds in this order.
KINDS = {
    r"^(ImportError|ModuleNotFoundError)": "a library is missing",
    r"no cuts between its operators": "no cuts between its operators, in their order, are better",
    r"of the ideal": "better cuts exist",
    r"cannot run on shapes|NotImplementedError": "its operators cannot run on shapes (quantised)",
    r"needs (the )?values|depends on values": "the forward needs values of a tensor",
    r"assigns its attribute": "a module changes an attribute while it runs",
    r"calls nothing": "it calls no module or function that could be cut apart",
    r"dtype of a tensor|autocast": "it computes with the dtype of a tensor, or with the state of autocast",
    r"^held.*; peak": "bytes held after the forward and the peak differ",
    r"^held": "bytes held after the forward differ",
    r"^peak": "the peak differs",
    r"torch's own counter": "multiply-adds differ",
    r"the graph differs": "the graph differs from the model",
}


def _verdict(name: str) -> Judge:
    def judge(result: Result) -> bool | None:
        check = result["checks"].get(name)
        if check is None:  # not reached: the summary failed, or time was up
            return False
        return {"yes": True, "no": False, "none": None}.get(check["verdict"], False)

    return judge


def _fact(name: str, holds: Callable[[dict[str, Any]], bool]) -> Judge:
    def judge(result: Result) -> bool | None:
        check = result["checks"].get(name)
        if check is None:
            return False
        if check["verdict"] == "none":
            return None
        return bool(check["facts"]) and holds(check["facts"])

    return judge


def _not_refused(names: Iterable[str]) -> Judge:
    def judge(result: Result) -> bool | None:
        return all(result["checks"].get(name, {"verdict": "refused"})["verdict"] != "refused" for name in names)

    return judge


def _of_not_refused(names: Iterable[str]) -> Judge:
    def judge(result: Result) -> bool | None:
        verdicts = [result["checks"].get(name, {"verdict": "no"})["verdict"] for name in names]
        verdicts = [each for each in verdicts if each not in ("refused", "none")]
        return all(each == "yes" for each in verdicts) if verdicts else None

    return judge


def _balanced(result: Result) -> bool | None:
    """As even as the ideal, or as any cuts between the operators that ran, in their order."""
    found = [result["checks"][name] for name in _BALANCES if name in result["checks"]]
    found = [each["facts"] for each in found if each["facts"]]
    return all(each["ratio"] <= max(1.15, each["possible"]) for each in found) if found else None


def _peak(fact: str) -> Judge:
    return _fact("memory", lambda facts: abs(facts[fact] - 1) <= _PEAK)


ROWS: dict[str, tuple[Judge, str]] = {
    "summarised": (_verdict("summarised"), "100 %"),
    "on shapes": (_verdict("on shapes"), ">= 97 %"),
    "multiply-adds exact": (_verdict("macs"), "100 %"),
    "parameters exact": (_verdict("params"), "100 %"),
    "no operator uncounted": (_verdict("ledger"), ""),
    "left untouched": (_verdict("untouched"), "100 %"),
    "held after the forward exact": (_fact("memory", lambda facts: facts["held_exact"]), ">= 95 %"),
    "peak within 3 %, workspace aside": (_peak("peak_ratio_without_workspace"), ">= 95 %"),
    "peak of what the step adds within 3 %, workspace aside": (_peak("step_ratio_without_workspace"), ""),
    "peak within 3 %, workspace included": (_peak("peak_ratio"), ""),
    "split(2), split(4) not refused": (_not_refused(_SPLITS), ">= 90 %"),
    "stages are the model, where not refused": (_of_not_refused(_SPLITS), "100 %"),
    "largest stage within 1.15 for 2, 3, 4, 8, where not refused": (_of_not_refused(_BALANCES), ">= 95 %"),
    "the same, or no cuts between operators in their order are better": (_balanced, ""),
    "traced": (_not_refused(["trace"]), ""),
    "graph gives the model's result, where traced": (_of_not_refused(["trace"]), "100 %"),
    "the same on meta": (_verdict("meta"), ""),
}


def _rows(results: list[Result]) -> tuple[list[str], list[list[str]]]:
    libraries = list(dict.fromkeys(each["library"] for each in results))
    built = [each for each in results if each.get("built")]
    rows = []
    for name, (judge, wanted) in ROWS.items():
        row = [name]
        for chosen in (*([each for each in built if each["library"] == library] for library in libraries), built):
            found = [verdict for verdict in map(judge, chosen) if verdict is not None]
            row.append(f"{sum(found)} / {len(found)}")
        share = f"{100 * sum(found) / len(found):.1f} %" if found else ""
        rows.append([*row, share, wanted])
    counts = [[e for e in results if e["library"] == library] for library in libraries]
    first = ["built", *(f"{sum(bool(e.get('built')) for e in each)} / {len(each)}" for each in counts)]
    of = [max(each["of"] for each in chosen) for chosen in counts]  # models in the catalogue
    tried = ["tried", *(f"{len(each)} / {all_}" for each, all_ in zip(counts, of, strict=True))]
    tops = [_total(tried, len(results), sum(of)), _total(first, len(built), len(results))]
    return ["", *libraries, "all", "share", "wanted"], [*tops, *rows]


def _total(row: list[str], number: int, of: int) -> list[str]:
    return [*row, f"{number} / {of}", f"{100 * number / of:.1f} %" if of else "", ""]


def table(results: list[Result]) -> str:
    """Return the table for a terminal, with the exceptions beneath it."""
    headers, rows = _rows(results)
    exceptions = _exceptions(reasons_of(results), "{}", "    {}: {}")
    return "\n".join([tabulate(rows, headers, disable_numparse=True), "", *exceptions])


def reasons_of(results: list[Result]) -> Reasons:
    """Return the models of each check that is not met, alike reasons together: check -> reason -> models."""
    reasons: Reasons = {}
    for check in ("built", "finished", *dict.fromkeys(name for result in results for name in result["checks"])):
        for result in results:
            reason = _reason(result, check)
            if reason is not None:
                models = reasons.setdefault(check, defaultdict(list))
                models[reason].append(f"{result['library']} {result['model']}")
    return reasons


def _exceptions(reasons: Reasons, head: str, line: str) -> list[str]:
    lines = []
    for check, models in reasons.items():
        lines += ["", head.format(f"{check}: {sum(map(len, models.values()))}"), ""]
        lines += [line.format(", ".join(names), reason) for reason, names in sorted(models.items(), key=_by_number)]
    return lines


def kinds_of(reasons: Reasons) -> list[list[str]]:
    """Return the rows of the table of exceptions: a check, a kind of reason, and the number of models."""
    rows = []
    for check, models in reasons.items():
        counts: dict[str, int] = defaultdict(int)
        for reason, names in models.items():
            kinds = (kind for pattern, kind in KINDS.items() if re.search(pattern, reason))
            counts[next(kinds, "an error of the model, or of its configuration")] += len(names)
        rows += [[check, kind, str(count)] for kind, count in sorted(counts.items(), key=lambda entry: -entry[1])]
    return rows


def _by_number(entry: tuple[str, list[str]]) -> tuple[int, str]:
    return -len(entry[1]), entry[0]


def _reason(result: Result, check: str) -> str | None:
    if check == "built":
        return (
            None if result.get("built") else _text(result.get("reason") or result.get("error") or result.get("aborted"))
        )
    if check == "finished":
        ended = result.get("aborted") or result.get("error")
        return _text(ended) if result.get("built") and ended else None
    found = result["checks"].get(check)
    if found is None or found["verdict"] in ("yes", "none"):
        return None
    return f"{found['verdict']}: {_text(found['reason'])}" if found["verdict"] == "refused" else _text(found["reason"])


def _text(reason: str | None) -> str:
    """One line without addresses."""
    return re.sub(r"0x[0-9a-f]+", "0x...", " ".join((reason or "").split())).replace("`", "'")[:300]


def page(results: list[Result]) -> str:
    """Return the page of the documentation."""
    import torch

    headers, rows = _rows(results)
    return "\n".join(
        [
            *_INTRODUCTION.format(torch=torch.__version__, versions=_versions()).splitlines(),
            "",
            *tabulate(rows, headers, tablefmt="github", disable_numparse=True).splitlines(),
            "",
            *_DEFINITIONS.splitlines(),
            "",
            *kinds_section(reasons_of(results)),
        ]
    )


def kinds_section(reasons: Reasons) -> list[str]:
    """Return the lines of the section with the kinds of reasons."""
    rows = tabulate(kinds_of(reasons), ["check", "why not", "models"], tablefmt="github", disable_numparse=True)
    return ["## Exceptions", "", *_EXCEPTIONS.splitlines(), "", *rows.splitlines(), ""]


def exceptions_page(reasons: Reasons) -> str:
    """Return the page of the benchmarks that lists the models with their reasons."""
    lines = _exceptions(reasons, "## {}", "- {}: `{}`")
    return "\n".join(["# Exceptions of the tested models", "", *_LIST.splitlines(), *lines, ""])


def _versions() -> str:
    from importlib import metadata

    found = []
    for name in ("torchvision", "timm", "transformers", "diffusers", "torch_geometric", "segmentation_models_pytorch",
                 "peft", "torchao", "x-transformers", "open_clip_torch"):  # fmt: skip
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(f"{name} not installed")
    return ", ".join(found)


_INTRODUCTION = """\
# Tested models

Models that people use, built small with random weights. Each cell says for how many of how many models a check holds.

```text
python benchmarks/zoo.py --out results.jsonl --markdown
```

repeats the run; results are kept in the file, and models already in it do not run again. torch {torch}, {versions}."""

_DEFINITIONS = """\
- **built**: configurations of transformers and diffusers are made tiny by rule. Models that cannot be built do not
  count in the other rows.
- **multiply-adds exact**: equal to a real run, counted by an independent mode (`tests/zoo/counting.py`) with attention
  by its definition and recurrent layers step by step.
- **held after the forward exact, peak**: the memory of a training step with SGD and momentum, compared with the
  allocator's events in a real step on the CPU. *Workspace* is memory that a kernel allocates and frees while it runs;
  *aside* leaves it out (`tests/zoo/real_step.py`). *What the step adds* leaves parameters, buffers, inputs and
  optimizer state out of both.
- **stages are the model**: `stages.verify` finds outputs and buffers equal bit for bit, and gradients equal up to
  rounding.
- **largest stage within 1.15**: its multiply-adds divided by max(total / n, the largest operator of the real run).
- **the same on meta**: model and inputs moved to meta give the same multiply-adds, and `split(2)` the same stages."""

_EXCEPTIONS = """\
Checks that are not met, and the kinds of reasons; `benchmarks/ZOO.md` lists the models with their reasons. A split or a
graph that is refused says why, and changes nothing."""

_LIST = """\
The models of [docs/zoo.md](../docs/zoo.md) that do not meet a check, with their reasons. `python benchmarks/zoo.py
--markdown` writes this page."""
