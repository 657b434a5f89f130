"""Compare formulas with fresh runs, FLOPs per token with a real step, active parameters with published figures.

    python benchmarks/formulas.py sizes --out sizes.jsonl --library torchvision timm transformers --limit 100
    python benchmarks/formulas.py tokens --out tokens.jsonl --limit 100
    python benchmarks/formulas.py active
    python benchmarks/formulas.py meter
    python benchmarks/formulas.py report --out sizes.jsonl

``sizes``: every formula at 20 sizes that made or proved no formula, against a forward on shapes at these sizes.
``tokens``: FLOPs of forward and backward, against ``FlopCounterMode`` of torch around a real step on the CPU.
``active``: total and active parameters of mixtures of experts on meta, beside the figures that their authors publish.
``meter``: the time that ``MFUMeter.step`` takes.

Each model runs in its own process. Results are lines of JSON; models already in the file are skipped. ``tests/zoo``
builds the models. Models with more modules than ``--most-modules`` are left out, as they repeat the blocks of smaller
ones; ``--limit`` counts, per library, the models that are built and small enough.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import math
import multiprocessing
import random
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from tests.zoo.catalogues import CATALOGUES

FIGURES = ("macs", "total_output_bytes", "output_bytes", "bytes_written")
N_SIZES = 20
TIMEOUT = 600


# ------------------------------------------------------------------------------------------------ sizes


def compare_sizes(example: Any, figures: list[str]) -> dict[str, Any]:
    """Return, for each figure, at how many of the unseen sizes its formula equals a fresh run."""
    from modelsummary import FormulaError, InputError, Statistics
    from tests.zoo.checks import statistics

    stats = statistics(example)
    begin = time.perf_counter()
    found: dict[str, Any] = {"figures": {}}
    formulas: dict[str, Any] = {}
    try:
        scaling = stats._scaling(None)
    except FormulaError as error:
        return {"refused": str(error)}
    for figure in figures:
        try:
            formulas[figure] = scaling.formula(figure)
        except FormulaError as error:
            found["figures"][figure] = {"refused": str(error)[:400]}
    found["seconds_formulas"] = round(time.perf_counter() - begin, 1)
    found["runs"] = scaling.runs
    found["dimensions"] = {each.name: [each.size, each.step] for each in scaling.dimensions}
    found["formula"] = str(formulas.get("macs"))[:1000]
    if not formulas:
        return found
    draw = random.Random(1)
    seen = {tuple(sizes.values()) for sizes in scaling.sizes_run()}
    equal: Counter[str] = Counter()
    unequal: dict[str, str] = {}
    below: Counter[str] = Counter()
    compared = 0
    for number in range(8 * N_SIZES):
        # Some models accept sizes near the recorded ones only.
        ranges = _near if number % 2 else _wide
        sizes = {each.name: each.at(draw.randint(*ranges(each.number(each.size)))) for each in scaling.dimensions}
        if tuple(sizes.values()) in seen:
            continue
        seen.add(tuple(sizes.values()))
        call = scaling.call_at(sizes)
        try:
            fresh = Statistics(example.model, {**_positional(example, call), **call.kwargs}, execution="shape")
        except Exception:  # the model does not accept these sizes
            continue
        for figure in formulas:
            try:
                value = scaling.evaluate(figure, sizes)
            except InputError:  # the formula holds from larger sizes on, and says so
                below[figure] += 1
                continue
            own = fresh.total_output_bytes if figure == "total_output_bytes" else getattr(fresh.root, figure)
            equal[figure] += value == own
            if value != own:
                unequal.setdefault(figure, f"{sizes}: {value} for {own}")
        compared += 1
        if compared == N_SIZES:
            break
    for figure in formulas:
        of = compared - below[figure]
        found["figures"][figure] = {"equal": equal[figure], "of": of, "first": unequal.get(figure)}
    return found


def _wide(recorded: int) -> tuple[int, int]:
    return 0, 3 * recorded + 60


def _near(recorded: int) -> tuple[int, int]:
    return max(recorded - 12, 0), recorded + 12


def _positional(example: Any, call: Any) -> dict[str, Any]:
    """Return positional arguments by their names, so that all go into one dict."""
    import inspect

    from modelsummary.capture.inputs import InputSize

    names = list(inspect.signature(example.model.forward).parameters)

    def tensor(value: Any) -> Any:
        return torch.zeros(value.shape, dtype=value.dtype) if isinstance(value, InputSize) else value

    return {name: tensor(value) for name, value in zip(names, call.args, strict=False)}


# ----------------------------------------------------------------------------------------------- tokens


def compare_tokens(example: Any, _: list[str]) -> dict[str, Any]:
    """Return the FLOPs of a step: ours on shapes, and torch's count around a real step."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from modelsummary.capture.step import loss_of
    from tests.zoo.checks import statistics

    # The counter knows neither the fused attention nor the fused recurrent layers of the CPU. The latter also compute
    # the gradient of a state that needs none, so the prediction is made without them, too.
    with torch.backends.mkldnn.flags(enabled=False):
        found = statistics(example).flops_per_token()
    real = copy.deepcopy(example)
    for module in real.model.modules():  # the counter does not know grouped products: run experts one by one
        if hasattr(getattr(module, "config", None), "_experts_implementation"):
            module.config._experts_implementation = "eager"
    known: dict[Any, Any] = {torch.ops.aten.convolution_backward: _convolution_backward}
    forward, both = (FlopCounterMode(display=False, custom_mapping=known) for _ in range(2))
    with sdpa_kernel(SDPBackend.MATH), torch.backends.mkldnn.flags(enabled=False), both:
        with forward:
            out = real()
        loss_of(out, None).backward()
    facts = {name: getattr(found, name) for name in ("unit", "count", "params", "active_params", "notes")}
    ours = {"forward": found.forward_flops, "training": found.training_flops, "hidden": found.hidden_forward_flops}
    return {**facts, **ours, "torch_forward": forward.get_total_flops(), "torch_training": both.get_total_flops()}


def _convolution_backward(grad: Any, x: Any, weight: Any, *args: Any, **_: Any) -> int:
    """Count one product per gradient; torch's own formula ignores the groups."""
    is_transposed, mask = args[4], args[-1]
    positions = math.prod(x if is_transposed else grad)  # inputs or outputs, each times a filter without its first size
    return 2 * positions * math.prod(weight[1:]) * (bool(mask[0]) + bool(mask[1]))


# ----------------------------------------------------------------------------------------------- active

# Total and active parameters in 10^9, as the papers state them.
PUBLISHED = {
    "Mixtral": ("MixtralConfig", {}, 47.0, 13.0),  # arXiv:2401.04088, abstract
    "DeepSeek-V3": ("DeepseekV3Config", {}, 671.0, 37.0),  # arXiv:2412.19437, abstract
    "OLMoE-1B-7B": ("OlmoeConfig", {"intermediate_size": 1024}, 6.9, 1.3),  # arXiv:2409.02060; its abstract: 7 and 1
    "Jamba": ("JambaConfig", {}, 52.0, 12.0),  # arXiv:2403.19887, introduction
}


def active() -> None:
    """Print total and active parameters beside the published ones."""
    import transformers

    from modelsummary import Statistics

    for name, (config_class, options, total, published) in PUBLISHED.items():
        begin = time.perf_counter()
        try:
            config = getattr(transformers, config_class)(**options)
            with torch.device("meta"):
                model = transformers.AutoModelForCausalLM.from_config(config).eval()
            ids = torch.zeros(1, 16, dtype=torch.long, device="meta")
            found = Statistics(model, {"input_ids": ids, "use_cache": False}).flops_per_token()
        except Exception as error:
            print(f"{name:24} {type(error).__name__}: {' '.join(str(error).split())[:150]}", flush=True)
            continue
        seconds = time.perf_counter() - begin
        print(
            f"{name:24} total {found.params / 1e9:8.2f} G (published {total}), "
            f"active {found.active_params / 1e9:7.2f} G (published {published}), "
            f"forward {found.forward / 1e9:7.1f} GFLOPs per token, {seconds:.0f} s",
            flush=True,
        )


def meter() -> None:
    """Print the time that a step of the meter takes."""
    from modelsummary.integrations.meter import MFUMeter

    for every in (1, 10):
        counted = MFUMeter(6e9, "A100", torch.bfloat16, every=every, show=None)
        times = []
        for _ in range(20):
            begin = time.perf_counter()
            for _ in range(5000):
                counted.step(4096)
            times.append((time.perf_counter() - begin) / 5000)
        print(f"every={every}: {min(times) * 1e6:.2f} us per step (best of 20 x 5000)")


# ------------------------------------------------------------------------------------------------- runs


def _child(library: str, name: str, compare: Any, options: argparse.Namespace, pipe: Any) -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    pipe.send({"library": library, "model": name, **_compared(library, name, compare, options)})


def _compared(library: str, name: str, compare: Any, options: argparse.Namespace) -> dict[str, Any]:
    try:
        example = importlib.import_module(CATALOGUES[library]).make(name)
    except Exception as error:
        return {"not_built": f"{type(error).__name__}: {error}"[:300]}
    n_modules = sum(1 for _ in example.model.modules())
    if n_modules > options.most_modules:
        return {"left_out": n_modules}
    try:
        return {"modules": n_modules, **compare(example, options.figures)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]}


def run(options: argparse.Namespace, compare: Any) -> None:
    """Compare models that are not in the file yet, each in a forked process."""
    known = list(map(json.loads, options.out.read_text().splitlines())) if options.out.exists() else []
    done = {(each["library"], each["model"]) for each in known}
    forking = multiprocessing.get_context("fork")
    for library in options.library:
        catalogue = importlib.import_module(CATALOGUES[library])
        names = [name for name in catalogue.names() if options.filter in name and not name.endswith("+cache")]
        random.Random(0).shuffle(names)
        if hasattr(catalogue, "warm_up"):
            catalogue.warm_up()
        compared = sum(each["library"] == library and _is_compared(each) for each in known)
        with options.out.open("a") as file:
            for name in [each for each in names if (library, each) not in done]:
                if compared >= options.limit:
                    break
                begin = time.perf_counter()
                receiver, sender = forking.Pipe(duplex=False)
                child = forking.Process(target=_child, args=(library, name, compare, options, sender))
                child.start()
                sender.close()
                result = {"library": library, "model": name, "error": f"more than {TIMEOUT} s, or ended"}
                try:
                    if receiver.poll(TIMEOUT):
                        result = receiver.recv()
                except EOFError:
                    pass
                child.kill()
                child.join()
                result["seconds"] = round(time.perf_counter() - begin, 1)
                file.write(json.dumps(result) + "\n")
                file.flush()
                compared += _is_compared(result)
                print({key: value for key, value in result.items() if key != "formula"}, flush=True)


def _is_compared(result: dict[str, Any]) -> bool:
    return "not_built" not in result and "left_out" not in result


def report(options: argparse.Namespace) -> None:
    """Print how many formulas were found, refused, and equal to the fresh runs."""
    lines = [json.loads(line) for line in options.out.read_text().splitlines()]
    built = [each for each in lines if _is_compared(each)]
    print(f"{len(lines)} models, {len(built)} built and small enough", dict(Counter(each["library"] for each in built)))
    print(Counter("error" if "error" in each else "no dimension" if "refused" in each else "ran" for each in built))
    for figure in FIGURES:
        cells: Counter[str] = Counter()
        sizes = 0
        for each in built:
            found = each.get("figures", {}).get(figure)
            if found is None:
                continue
            if "refused" in found:
                cells["refused"] += 1
            else:
                cells["all equal" if found["equal"] == found["of"] else "DIFFERS"] += 1
                sizes += found["of"]
        print(f"{figure:20} {dict(cells)}, {sizes} sizes")
    for each in built:
        for figure, found in {"model": each, **each.get("figures", {})}.items():
            why = found.get("refused") or found.get("error") or found.get("first")
            if why:
                print(f"{each['library']} {each['model']}, {figure}: {why}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["sizes", "tokens", "active", "meter", "report"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--library", nargs="+", default=["transformers"])
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--filter", default="")
    parser.add_argument("--most-modules", type=int, default=10**6)
    parser.add_argument("--figures", nargs="+", default=list(FIGURES))
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    if chosen.what in ("sizes", "tokens"):
        run(chosen, compare_sizes if chosen.what == "sizes" else compare_tokens)
    else:
        {"active": active, "meter": meter, "report": lambda: report(chosen)}[chosen.what]()
