"""Steps of models in half precision: timm's tables of an RTX 3090, iterations on A100s (vTrain, MICRO 2024)."""

from __future__ import annotations

import csv
import pickle
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import least_squares
from single_kernels import put_value

from modelsummary import DeviceSpec
from modelsummary.devices.kernel_time import DeviceModel, device_model
from modelsummary.operators.operator_work import Work, work_of

F16 = torch.float16

Model = tuple[str, float, dict[Work, int], int, float]  # name, seconds, kernels and how often, operators, parameters


def timm_models(folder: Path, kind: str, count: int, cache: Path | None) -> list[Model]:
    """Return the kernels of the models in a table, without models that timm has changed since."""
    name = {"infer": "infer-amp-nchw-pt240-cu124-rtx3090", "train": "train-amp-nchw-pt112-cu113-rtx3090"}[kind]
    with open(folder / "timm" / f"{name}.csv") as file:
        rows = list(csv.DictReader(file))
    order = np.random.default_rng(0).permutation(len(rows))[:count]
    found = []
    for place in order:
        kept = cache / f"{kind}-{rows[place]['model']}.pickle" if cache else None
        if kept is not None and kept.exists():
            model = pickle.loads(kept.read_bytes())
        else:
            model = _timm_model(rows[place], kind)
            if kept is not None:
                kept.write_bytes(pickle.dumps(model))
        if model is not None:
            found.append(model)
    return found


def _timm_model(row: dict[str, str], kind: str) -> Model | None:
    import timm

    from modelsummary.capture.input_data import call_arguments
    from modelsummary.capture.observe import observe
    from modelsummary.capture.step_plan import StepPlan
    from modelsummary.memory.step_options import OPTIMIZERS

    train = kind == "train"
    timm.layers.set_fused_attn(not train)  # torch 1.12 had none
    size, batch = int(row[f"{kind}_img_size"]), int(row[f"{kind}_batch_size"])
    try:
        with torch.device("meta"):
            try:
                model = timm.create_model(row["model"].split(".")[0], img_size=size)
            except TypeError:
                model = timm.create_model(row["model"].split(".")[0])
            x = torch.empty(batch, 3, size, size)
        params = sum(each.numel() for each in model.parameters())
        if abs(params / 1e6 / float(row["param_count"]) - 1) > 0.02:
            return None
        make = OPTIMIZERS["sgd-momentum"] if train else None
        plan = StepPlan(train, make, torch.device("cuda"), loss=_loss if train else None, autocast=F16)
        call = call_arguments(model.train(train), x, (), {}, batch_dim=None, device=None, dtypes=None)
        operators = observe(model, call, plan, storages=False).operators
    except Exception as error:
        print(f"left out: {row['model']}: {type(error).__name__}: {str(error)[:80]}")
        return None
    works: Counter[Work] = Counter()
    for each in operators:
        if each.phase != "step":
            works.update(work_of(each.run.call))
    dispatched = sum(each.run.call.rule.launches_kernel for each in operators)
    return row["model"], float(row[f"{kind}_step_time"]) * 1e-3, dict(works), dispatched, params if train else 0


def _loss(output: Any) -> torch.Tensor:
    logits = output[0] if isinstance(output, (tuple, list)) else output
    targets = torch.zeros(logits.shape[0], dtype=torch.long)
    return torch.nn.functional.cross_entropy(logits.float(), targets)


# What moves bytes in single kernels that were measured, norms and softmax, is fitted to these.
HALF_START: dict[tuple[str, ...], float] = {
    ("tensor", "gemm", "efficiency"): 1.1,
    ("tensor", "gemm", "edge"): 6.0,
    ("tensor", "gemm", "start"): 40.0,
    ("tensor", "conv", "efficiency"): 1.0,
    ("tensor", "conv_passes"): 1.2,
    ("tensor", "depthwise"): 0.045,
    ("tensor", "attention"): 0.75,
    ("moving", "batch_norm"): 0.7,
    ("moving", "batch_norm inference"): 0.95,
    ("moving", "batch_norm backward"): 0.6,
    ("moving", "norm backward"): 0.25,
    ("moving", "softmax backward"): 0.8,
    ("moving", "reduction"): 0.8,
    ("moving", "pool"): 0.75,
    ("moving", "copy"): 0.9,
    ("moving", "index"): 0.5,
    ("moving", "depthwise"): 0.7,
}
_PRIOR = 0.5  # weight of the logarithm of a coefficient over its start, beside one residual per model


def step_ratios(models: list[Model], device: DeviceModel) -> np.ndarray:
    """Predicted over measured steps: the longer of the device's stream and the host; the optimizer moves 20 B each."""
    seconds: dict[Work, float] = {}
    ratios = []
    for _, measured, works, dispatched, params in models:
        for work in works:
            if work not in seconds:
                seconds[work] = device.seconds(work)
        stream = sum(seconds[work] * times for work, times in works.items())
        stream += 20 * params / (device.spec.bandwidth * device.stream)
        ratios.append(max(stream, dispatched * device.host) / measured)
    return np.array(ratios)


def fit_half(coefficients: dict[str, Any], models: list[Model]) -> None:
    """Fit the half-precision coefficients to steps of models on an RTX 3090; changes ``coefficients``."""
    start = np.array(list(HALF_START.values()))
    spec = DeviceSpec("RTX 3090")

    def put(values: np.ndarray) -> DeviceModel:
        for path, value in zip(HALF_START, np.abs(values), strict=True):
            put_value(coefficients, path, value)
        return DeviceModel(spec, coefficients, 0.92, 1.0, 1.0)

    def residuals(values: np.ndarray) -> np.ndarray:
        ratios = step_ratios(models, put(values))
        return np.concatenate([np.log(ratios), _PRIOR * np.log(np.abs(values) / start)])

    least, most = 0.3 * start, 3 * start
    for place, path in enumerate(HALF_START):  # no kernel moves bytes faster than the memory
        most[place] = 1.0 if path[0] == "moving" else most[place]
    options: dict[str, Any] = {"loss": "soft_l1", "f_scale": 0.1, "x_scale": start, "diff_step": 0.02, "max_nfev": 8}
    put(least_squares(residuals, start, bounds=(least, most), **options).x)


def iterations(folder: Path) -> Iterator[tuple[dict[str, int], float]]:
    """Runs that are neither tensor nor pipeline parallel: their figures, and seconds of an iteration."""
    names = "gpus batch micro width heads layers length tensor data pipeline".split()
    with open(folder / "training_runs" / "a100_single_node.csv", encoding="utf-8-sig") as file:
        for row in list(csv.reader(file))[1:]:
            run = dict(zip(names, map(int, row[:10]), strict=True))
            if run["tensor"] == run["pipeline"] == 1:
                yield run, float(row[10]) * 1e-3


def iteration_seconds(run: dict[str, int], device: DeviceModel, host: float) -> float:
    """An iteration of Megatron's GPT with recomputed activations, in half precision, on data parallel devices.

    ``host``: seconds that Python needs for a layer, which small layers wait for.
    """
    b, s, h, heads, vocabulary = run["micro"], run["length"], run["width"], run["heads"], 51200
    tokens = b * s

    def gemm(batch: int, m: int, n: int, k: int) -> float:
        moved = 2 * batch * (m * n + n * k + m * k)
        return device.seconds(Work("aten.mm", "gemm", F16, (batch, m, n, k), 2 * batch * m * n * k, moved))

    def pass_(op_class: str, nbytes: int, name: str = "") -> float:
        return device.seconds(Work(name, op_class, F16, (nbytes,), 0, nbytes))

    products = [(1, tokens, 3 * h, h), (1, tokens, h, h), (1, tokens, 4 * h, h), (1, tokens, h, 4 * h)]
    scores = [(b * heads, s, s, h // heads), (b * heads, s, h // heads, s)]
    forward = sum(gemm(*sizes) for sizes in (*products, *scores))
    backward = sum(gemm(z, m, k, n) + gemm(z, n, k, m) for z, m, n, k in (*products, *scores))
    wide = 2 * tokens * h  # bytes of one activation
    square = 2 * b * heads * s * s
    forward += 2 * pass_("norm", 2 * wide) + 2 * pass_("elementwise", 7 * wide) + pass_("elementwise", 8 * wide)
    forward += pass_("softmax", 2 * square) + pass_("elementwise", 5 * square // 2) + 2 * pass_("copy", 4 * wide)
    backward += (
        2 * pass_("norm", 4 * wide, "backward") + 2 * pass_("elementwise", 6 * wide) + pass_("elementwise", 12 * wide)
    )
    backward += pass_("softmax", 3 * square) + pass_("elementwise", 5 * square // 2) + 2 * pass_("copy", 4 * wide)
    head = gemm(1, tokens, vocabulary, h) + gemm(1, tokens, h, vocabulary) + gemm(1, vocabulary, h, tokens)
    head += 6 * pass_("elementwise", 4 * tokens * vocabulary)
    micro_batches = run["batch"] // run["data"] // b
    params = run["layers"] * 12 * h * h + vocabulary * h
    exchanged = 2 * (run["data"] - 1) / run["data"] * 2 * params / 200e9
    optimizer = pass_("elementwise", 30 * params)
    on_device = run["layers"] * (2 * forward + backward) + head
    return micro_batches * max(on_device, run["layers"] * host) + exchanged + optimizer


def check_a100(folder: Path, coefficients: dict[str, Any]) -> np.ndarray:
    """Predicted over measured iterations of half of the runs; the host's time per layer is fitted to the others."""
    runs = list(iterations(folder))
    spec = DeviceSpec("A100 80GB")
    device = replace(device_model(spec), coefficients=coefficients)

    def ratios(part: list[Any], host: float) -> np.ndarray:
        return np.array([iteration_seconds(run, device, host) / seconds for run, seconds in part])

    def residuals(values: np.ndarray) -> np.ndarray:
        return np.log(ratios(runs[::2], abs(values[0]) * 1e-3))

    host = abs(least_squares(residuals, [3.0], loss="soft_l1", f_scale=0.1, diff_step=0.03).x[0])
    print(f"A100: {host:.2f} ms of the host for a layer")
    return ratios(runs[1::2], host * 1e-3)


def roofline_step(model: Model) -> float:
    spec = DeviceSpec("RTX 3090")
    _, measured, works, _, _ = model
    return sum(times * spec.bound(work.flops, work.nbytes, F16).seconds for work, times in works.items()) / measured
