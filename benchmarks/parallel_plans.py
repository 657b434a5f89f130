"""Compare tensor plans with the plans in transformers, and sharded models with whole ones.

    python -m benchmarks.parallel_plans agree --out agree.jsonl   # beside base_model_tp_plan, every tiny architecture
    python -m benchmarks.parallel_plans experts        # experts beside base_model_ep_plan
    python -m benchmarks.parallel_plans units          # FSDP units beside _no_split_modules
    python -m benchmarks.parallel_plans equal          # outputs, gradients and a step of AdamW, two processes, float64
    python -m benchmarks.parallel_plans divided        # the same with experts divided over the two processes
    python -m benchmarks.parallel_plans agree gemma    # these architectures only

Each appends to its file (``--out``) a line per architecture; architectures in it are not compared again.
``equal`` and ``divided`` also compare the collectives, and take names such as ``timm/vit_tiny_patch16_224``, too.
``tests/zoo`` builds the tiny architectures.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from modelsummary import Statistics
from modelsummary.parallel.derive import Derivation, derive
from modelsummary.parallel.placements import Shard
from modelsummary.parallel.record_calls import TRACE_RULES, Calls
from modelsummary.record.events import values_in
from modelsummary.record.runs import record_once
from tests.parallel import collectives, models, processes, training
from tests.zoo import transformers_models

STYLES = {
    "colwise": "column",
    "colwise_gather_output": "column*",
    "rowwise": "row",
    "rowwise_split_input": "row*",
    "replicated_with_grad_allreduce": "norm",
    "embedding_rowwise": "embedding",
    "mla_kv_a_proj": "gradient",
    "moe_tp_experts": "local",
}
PARAMETER_STYLES = {  # of stacked experts: the dimension from the end that is sharded, and in how many pieces it lies
    "colwise": (2, 1),
    "packed_colwise": (2, 2),
    "rowwise": (1, 1),
    "packed_rowwise": (1, 2),
}


def starred(fqn: str) -> str:
    return re.sub(r"\d+", "*", fqn)


def _resumed(names: list[str], results: Path, compare: Callable[[str], dict[str, Any]]) -> None:
    """Compare with each architecture, and append a line of JSON for each to a file; those in the file are skipped."""
    lines = map(json.loads, results.read_text().splitlines()) if results.exists() else ()
    done = {each["name"]: each for each in lines}
    names = names or [each for each in transformers_models.names() if not each.endswith(transformers_models.CACHE)]
    for name in names:
        if name not in done:
            begin = time.perf_counter()
            done[name] = {"name": name, **compare(name), "seconds": round(time.perf_counter() - begin, 1)}
            with results.open("a") as file:
                file.write(json.dumps(done[name]) + "\n")
        found = done[name]
        if found["verdict"] not in ("no plan", "cannot be built"):
            print(f"{name:32} {found['verdict']} {found.get('error', '')}", flush=True)
        for line in found.get("differences", ()):
            print(f"    {line}")
    print(dict(Counter(each["verdict"] for each in done.values())))


def _failure(verdict: str, error: Exception, length: int = 200) -> dict[str, Any]:
    return {"verdict": verdict, "error": f"{type(error).__name__}: {str(error)[:length]}"}


def _agreement(name: str) -> dict[str, Any]:
    """Return a verdict on one architecture, and the differences.

    A star marks layers whose activations are whole on each rank.
    """
    try:
        example = transformers_models.make(name)
    except Exception as error:
        return _failure("cannot be built", error, 120)
    theirs = getattr(example.model, "tp_plan", None) or {}
    if not theirs:
        return {"verdict": "no plan"}
    try:
        stats = Statistics(example.model, example.kwargs or example.args)
        calls = Calls(example.model, record_once(example.model, stats.live.call, stats.execution, rules=TRACE_RULES))
        found = derive(calls)
    except Exception as error:
        return _failure("fails", error)
    own = bool(getattr(example.model.config, "base_model_tp_plan", None))
    differences = [
        f"{fqn}: {style}, here {have}{f': {why}' if why else ''}"
        for (fqn, style, have), why in {**_of_modules(found, theirs), **_of_parameters(found, theirs)}.items()
    ]
    verdict = "differs" if differences else "equal or more"
    return {"verdict": verdict, "differences": differences, "plan": "own" if own else "of a part"}


def _of_modules(found: Derivation, theirs: dict[str, str]) -> dict[tuple[str, str, str], str]:
    """Return the modules that are split in another way -> our reason."""
    calls = found.calls
    ours = dict.fromkeys(_shared(found), "gradient")
    ours |= {
        fqn: layer.role + ("*" if layer.reason and layer.role in ("column", "row") else "")
        for fqn, layer in found.layers.items()
    }
    differs: dict[tuple[str, str, str], str] = {}
    for fqn in sorted({*calls.places, *(event.fqn for event in calls.entered)}):
        style = theirs.get(starred(fqn)) or theirs.get(fqn)
        if style is None or style == "local_params" or next(calls.modules[fqn].parameters(), None) is None:
            continue
        wanted, have = STYLES.get(style, style), ours.get(fqn, "-")
        # A single head of keys and values cannot be split: the heads of queries share it.
        same = (
            have == wanted
            or (have, wanted) in (("gradient", "column"), ("gradient", "norm"))
            or have == wanted.rstrip("*")
            or (wanted, have) in (("column*", "head"), ("column*", "row*"), ("row*", "column*"))
        )
        if not same:
            differs[starred(fqn), style, have] = found.reasons.get(fqn, "")
    return differs


def _shared(found: Derivation) -> Iterator[str]:
    """Yield the layers of keys and values that all heads share: their gradient is summed, be it behind a norm."""
    calls = found.calls
    for fqn in (fqn for region in found.regions for fqn in region.parts):
        yield fqn
        for event in calls.entered:
            if event.fqn == fqn:
                yield from (source for value in values_in(event.args) for source in calls.sources(value))


def _of_parameters(found: Derivation, theirs: dict[str, str]) -> dict[tuple[str, str, str], str]:
    """Return the parameters that are split in another way -> our reason."""
    sharded = {
        fqn: layout
        for region in found.regions
        for fqn, layout in region.parameters.items()
        if isinstance(layout, Shard)
    }
    differs: dict[tuple[str, str, str], str] = {}
    ran = {*found.calls.places, *(event.fqn for event in found.calls.entered)}
    for fqn, parameter in found.calls.parameters.items():
        style = theirs.get(starred(fqn)) or theirs.get(fqn)
        if fqn.rpartition(".")[0] not in ran:  # such as experts of images, where the input has none
            continue
        if style in PARAMETER_STYLES and "weight" not in fqn.split("."):
            back, outer = PARAMETER_STYLES[style]
            layout = sharded.get(fqn)
            wrong = layout is not None and (parameter.dim() - layout.dim, layout.outer) != (back, outer)
            if layout is None or (parameter.dim() > 1 and wrong):
                differs[starred(fqn), style, str(layout)] = found.reasons.get(fqn.rpartition(".")[0], "")
    return differs


def _experts(name: str) -> dict[str, Any]:
    """Return a verdict on the experts of one architecture with a plan for expert parallelism."""
    try:
        example = transformers_models.make(name)
    except Exception as error:
        return _failure("cannot be built", error, 120)
    theirs = getattr(example.model, "ep_plan", None) or {}
    dispatched = {fqn for fqn, _ in example.model.named_modules() if theirs.get(starred(fqn)) == "ep_dispatch_experts"}
    stacked = {fqn for fqn, _ in example.model.named_parameters() if theirs.get(starred(fqn)) == "grouped_gemm"}
    if not dispatched and not stacked:
        return {"verdict": "no plan" if not theirs else "no experts"}
    try:
        plan = Statistics(example.model, example.kwargs or example.args).parallel_plan(expert=2, dispatch="all_reduce")
    except Exception as error:
        return _failure("refused", error, 300)
    ours = {layer.fqn for layer in plan.layers}
    sharded = {f"{layer.fqn}.{each}" for layer in plan.layers for each, dim in layer.shards.items() if dim == 0}
    missing, more = (dispatched - ours) | (stacked - sharded), ours - dispatched
    differences = [f"missing {fqn}: {plan.replicated.get(fqn, '')}" for fqn in sorted(missing)]
    differences += [f"more {fqn}" for fqn in sorted(set(map(starred, more)))]
    return {"verdict": "differs" if missing else "more" if more else "equal", "differences": differences}


def _units(name: str) -> dict[str, Any]:
    """Return a verdict on one architecture that says which modules must stay whole: are they the units of FSDP?

    Modules that occur once, such as the embeddings, and those behind the blocks are left out.
    """
    try:
        example = transformers_models.make(name)
    except Exception as error:
        return _failure("cannot be built", error, 120)
    classes = set(getattr(example.model, "_no_split_modules", None) or ())
    modules = {fqn: type(each).__name__ for fqn, each in example.model.named_modules()}
    times = Counter(modules.values())
    with_parameters = {fqn for fqn, each in example.model.named_modules() if any(True for _ in each.parameters())}
    theirs = {fqn for fqn, kind in modules.items() if kind in classes and times[kind] > 1} & with_parameters
    if not theirs:
        return {"verdict": "no plan"}
    try:
        plan = Statistics(example.model, example.kwargs or example.args).parallel_plan(shard=2)
    except Exception as error:
        return _failure("refused", error)
    ours = {fqn for unit in plan.units if unit != plan.last_unit for fqn in unit if times[modules[fqn]] > 1}
    finer = {fqn for fqn in ours if any(fqn.startswith(f"{whole}.") for whole in theirs)}
    coarser = {fqn for fqn in theirs - ours if any(fqn.startswith(f"{unit}.") for unit in ours)}
    found = {
        "finer": finer,
        "coarser": coarser,
        "more": ours - theirs - finer - {unit for unit in ours if any(fqn.startswith(f"{unit}.") for fqn in coarser)},
        "missing": {fqn for fqn in theirs - ours - coarser if not any(each.startswith(f"{fqn}.") for each in finer)},
    }
    verdict = (
        "equal" if ours == theirs else next((kind for kind in ("missing", "finer", "coarser") if found[kind]), "more")
    )
    differences = [
        f"{kind} {module}: {', '.join(sorted({starred(fqn) for fqn in fqns if modules[fqn] == module}))}"
        for kind, fqns in found.items()
        for module in sorted({modules[fqn] for fqn in fqns})
    ]
    return {"verdict": verdict, "differences": differences, "units": len(ours), "called": len(plan.called_units)}


def _equal(rank: int, _n: int, names: list[str], options: dict[str, int], results: Path) -> None:
    warnings.filterwarnings("ignore")
    _resumed(names, results if rank == 0 else Path(f"{results}.{rank}"), partial(_compared, options=options))


def _compared(name: str, options: dict[str, int]) -> dict[str, Any]:
    """Compare outputs, gradients, a step of AdamW, and the collectives of a sharded model with the whole model."""
    try:
        model, inputs = models.make(name if name in models.NAMES or "/" in name else f"transformers/{name}")
    except Exception as error:
        return _failure("cannot be built", error)
    try:
        plan = Statistics(model, inputs).parallel_plan(**options)
    except Exception as error:
        return _failure("refused", error)
    try:
        whole = copy.deepcopy(model)
        plan.apply(model, plan.device_mesh("cpu"))
        with training.Float64():
            ran = collectives.of_step(model, inputs, processes.loss_of)
            found = processes.compare(whole, model, inputs)
    except Exception as error:
        return _failure("FAILS", error)
    planned = collectives.of_plan(plan)
    good = found["output"] <= 1e-12 and found["grad"] <= 1e-12 and found["step"] <= 1e-10
    verdict = "DIFFERS" if not good else "equal" if ran == planned else "equal, OTHER COLLECTIVES"
    layers = Counter(layer.role + ("*" if layer.reason else "") for layer in plan.layers)
    reasons = sorted({f"whole: {re.sub(r'[0-9]+', '*', layer.reason)}" for layer in plan.layers if layer.reason})
    return {
        "verdict": verdict,
        **{key: float(f"{value:.1e}") for key, value in found.items()},
        "layers": dict(layers),
        "differences": [*reasons, *([] if ran == planned else [f"ran {ran}", f"planned {planned}"])],
    }


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("agree", "experts", "units", "equal", "divided"))
    parser.add_argument("names", nargs="*")
    parser.add_argument("--out", type=Path, help="a line of JSON for each architecture; default: WHAT.jsonl")
    chosen = parser.parse_args()
    out = chosen.out or Path(f"{chosen.what}.jsonl")
    of_one = {"agree": _agreement, "experts": _experts, "units": _units}
    if chosen.what in of_one:
        _resumed(chosen.names, out, of_one[chosen.what])
    else:
        options = {"expert": 2, "dispatch": "all_reduce"} if chosen.what == "divided" else {"tensor": 2}
        processes.run(_equal, 2, chosen.names or list(models.NAMES), options, out)
