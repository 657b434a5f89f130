"""Steps of models in half precision: five tables of timm, iterations on A100s (vTrain, MICRO 2024).

    python benchmarks/whole_steps.py DATA_FOLDER [--models 60] [--cache FOLDER] [--without [TABLE ...]] [--calibrated]

Prints error and bias of each table for the models that a fit may see and for those held out in all tables. With
``--without``, the coefficients are first fitted to the shown models of the other tables, so that a whole table (a
device, a mode) is left out. With ``--calibrated``, also the errors of the models held out after a calibration with one,
and with five, of the others.
"""

from __future__ import annotations

import argparse
import copy
import csv
import pickle
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from scipy.optimize import least_squares
from single_kernels import error_of, put_value
from tabulate import tabulate

from modelsummary import DeviceSpec
from modelsummary.devices.factors import OF_DEVICES, Factors, calibrated_factors
from modelsummary.devices.kernel_time import DeviceModel, device_model, fits
from modelsummary.operators.kernels import StepOperator, kernels_of
from modelsummary.operators.operator_calls import OperatorCall
from modelsummary.operators.operator_rules import OpCost, op_rule
from modelsummary.operators.operator_work import Work

SEED = 0
F16 = torch.float16

Model = tuple[str, float, dict[Work, int], int, float]  # name, seconds, kernels and how often, operators, parameters


@dataclass(frozen=True)
class Table:
    """A published table of timm: half precision under autocast.

    Attributes:
        file: name of the table.
        device: name of the device.
        train: training steps without fused attention, which torch 1.12 did not have; else inference.
        channels_last: memory format of model and images.
        mode: ``"eager"`` or ``"compiled"``.
    """

    file: str
    device: str
    train: bool = False
    channels_last: bool = False
    mode: str = "eager"

    @property
    def kind(self) -> str:
        """The prefix of its columns."""
        return "train" if self.train else "infer"


TABLES = {
    "infer": Table("infer-amp-nchw-pt240-cu124-rtx3090", "RTX 3090"),
    "train": Table("train-amp-nchw-pt112-cu113-rtx3090", "RTX 3090", train=True),
    "infer nhwc": Table("infer-amp-nhwc-pt240-cu124-rtx3090", "RTX 3090", channels_last=True),
    "train nhwc": Table("train-amp-nhwc-pt112-cu113-rtx3090", "RTX 3090", train=True, channels_last=True),
    "compiled": Table("infer-amp-nchw-pt240-cu124-rtx4090-dynamo", "RTX 4090", mode="compiled"),
}


class Step(NamedTuple):
    """A measured step of a model, and the operators that it runs on the device."""

    name: str
    seconds: float
    operators: list[StepOperator]
    parameters: int  # that an optimizer updates
    macs: int  # of the forward, by timm's own count


def models_of(folder: Path, table: Table, count: int, cache: Path | None = None) -> list[Step]:
    """Return steps of a table, without models that timm has changed since.

    The choice follows from the names alone: tables share their models, and ``is_held_out`` parts all of them alike.
    """
    with open(folder / "timm" / f"{table.file}.csv") as file:
        rows = {row["model"]: row for row in csv.DictReader(file)}
    steps = []
    for name in sorted(rows, key=_rank)[:count]:
        kept = cache / f"{table.file}-{name}.pickle" if cache else None
        if kept is not None and kept.exists():
            step = pickle.loads(kept.read_bytes())
        else:
            step = _step_of(rows[name], table)
            if kept is not None:
                kept.write_bytes(_pickled(step))
        if step is not None:
            steps.append(step)
    return steps


def _rank(name: str) -> int:
    """Return a number that orders models at random, always in the same way."""
    return crc32(f"{SEED} {name.partition('.')[0]}".encode())


def is_held_out(name: str) -> bool:
    """Return True for the half of the models that no fit sees, in any table.

    >>> is_held_out("resnet50.a1_in1k") is is_held_out("resnet50")
    True
    """
    return bool(_rank(name) >> 4 & 1)


def _pickled(step: Step | None) -> bytes:
    """Return a step as bytes; an operator call is made anew from its operator, whose properties are not data."""
    buffer = BytesIO()

    class Pickler(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, OperatorCall):
                return _call_of, (str(value.func), value.args, value.kwargs, value.outputs, value.cost)
            return NotImplemented

    Pickler(buffer).dump(step)
    return buffer.getvalue()


def _call_of(operator: str, args: Any, kwargs: Any, outputs: Any, cost: OpCost) -> OperatorCall:
    func = torch.ops
    for part in operator.split("."):
        func = getattr(func, part)
    return OperatorCall(func, op_rule(func), args, kwargs, outputs, cost)


def _step_of(row: dict[str, str], table: Table) -> Step | None:
    import timm

    from modelsummary.capture.input_data import call_arguments
    from modelsummary.capture.modules import ModelParts
    from modelsummary.capture.observe import observe
    from modelsummary.capture.step_plan import StepPlan

    train, kind = table.train, table.kind
    timm.layers.set_fused_attn(not train)  # torch 1.12 had none
    size, batch = int(row[f"{kind}_img_size"]), int(row[f"{kind}_batch_size"])
    memory_format = torch.channels_last if table.channels_last else torch.contiguous_format
    try:
        with torch.device("meta"):
            try:
                model = timm.create_model(row["model"].split(".")[0], img_size=size)
            except TypeError:
                model = timm.create_model(row["model"].split(".")[0])
            x = torch.empty(batch, 3, size, size).to(memory_format=memory_format)
        model = model.to(memory_format=memory_format)
        params = sum(parameter.numel() for parameter in model.parameters())
        if abs(params / 1e6 / float(row["param_count"]) - 1) > 0.02:
            return None
        plan = StepPlan(train, device=torch.device("cuda"), loss=_loss if train else None, autocast=F16)
        call = call_arguments(ModelParts.of(model.train(train)), x, (), {}, batch_dim=None, device=None, dtypes=None)
        operators = observe(model, call, plan, storages=False).operators
    except Exception as error:
        print(f"left out: {row['model']}: {type(error).__name__}: {str(error)[:80]}")
        return None
    macs = 1e9 * float(row.get("infer_gmacs", 0)) * batch
    operators = [operator for operator in operators if operator.phase != "step"]
    seconds = float(row[f"{kind}_step_time"]) * 1e-3
    return Step(row["model"], seconds, operators, params if train else 0, round(macs))


def _loss(output: Any) -> torch.Tensor:
    logits = output[0] if isinstance(output, (tuple, list)) else output
    targets = torch.zeros(logits.shape[0], dtype=torch.long)
    return torch.nn.functional.cross_entropy(logits.float(), targets)


# What moves bytes in single kernels that were measured, norms and softmax, is fitted to these; the backward of norms is
# as fast as on an H100.
HALF_START: dict[tuple[str, ...], float] = {
    ("tensor", "gemm", "efficiency"): 1.1,
    ("tensor", "gemm", "edge"): 6.0,
    ("tensor", "gemm", "start"): 40.0,
    ("tensor", "conv", "efficiency"): 1.0,
    ("tensor", "conv", "input"): 1.0,
    ("tensor", "conv", "weight"): 0.9,
    ("tensor", "depthwise"): 0.18,
    ("tensor", "attention"): 0.85,
    ("moving", "conversion"): 0.95,
    ("moving", "batch_norm"): 0.7,
    ("moving", "batch_norm inference"): 0.95,
    ("moving", "batch_norm backward"): 0.6,
    ("moving", "batch_norm channels last"): 0.7,
    ("moving", "batch_norm backward channels last"): 0.7,
    ("moving", "reduction"): 0.8,
    ("moving", "pool"): 0.75,
    ("moving", "copy strided"): 0.5,
    ("moving", "index"): 0.5,
    ("moving", "depthwise"): 0.7,
    ("moving", "depthwise backward"): 0.5,
    ("moving", "triton"): 0.95,
}
# Backwards that were slower in torch 1.12, of the tables of training, than they are on an H100 with torch 2.11.
_OF_TORCH_1_12 = {"norm backward": 0.29, "softmax backward": 0.336}
_DRAWS = 10  # of steps to calibrate with
_PRIOR = 0.5  # weight of the logarithm of a coefficient over its start, beside one residual per model


def kernels_in(step: Step, mode: str) -> Model:
    """Return the distinct kernels of a step and how often each runs."""
    kernels = kernels_of(step.operators, mode)
    works = Counter(kernel.work for kernel in kernels)
    dispatched = sum(kernel.n_operators for kernel in kernels) if mode == "eager" else 0
    return step.name, step.seconds, dict(works), dispatched, step.parameters


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


def calibrated_errors(table: Table, steps: list[Model], coefficients: dict[str, Any], count: int) -> list[float]:
    """Return the errors of held-out models after calibrations with some of the others, drawn at random."""
    device = device_of(table, coefficients)

    def ratios(part: list[Model], factors: Factors) -> np.ndarray:
        return step_ratios(part, replace(device, spec=replace(device.spec, factors=factors)))

    others, unseen = ([step for step in steps if is_held_out(step[0]) is part] for part in (False, True))
    errors = []
    for draw in range(_DRAWS):
        chosen = Random(draw).sample(others, count)
        seconds = [step[1] for step in chosen]

        def predict(factors: Factors, chosen: list[Model] = chosen) -> list[float]:
            return [ratio * step[1] for ratio, step in zip(ratios(chosen, factors), chosen, strict=True)]

        errors.append(error_of(ratios(unseen, calibrated_factors(predict, seconds, names=OF_DEVICES))))
    return errors


def device_of(table: Table, coefficients: dict[str, Any]) -> DeviceModel:
    """Return the time model of the device of a table, with other coefficients, and the kernels of its torch."""
    moving = {**coefficients["moving"], **(_OF_TORCH_1_12 if table.train else {})}
    return replace(device_model(DeviceSpec(table.device)), coefficients={**coefficients, "moving": moving})


def fit_half(coefficients: dict[str, Any], models: dict[str, list[Model]]) -> None:
    """Fit the half-precision coefficients to steps of the tables; changes ``coefficients``."""
    start = np.array(list(HALF_START.values()))

    def residuals(values: np.ndarray) -> np.ndarray:
        for path, value in zip(HALF_START, np.abs(values), strict=True):
            put_value(coefficients, path, value)
        logs = [np.log(step_ratios(steps, device_of(TABLES[name], coefficients))) for name, steps in models.items()]
        return np.concatenate([*logs, _PRIOR * np.log(np.abs(values) / start)])

    least, most = 0.3 * start, 3 * start
    for index, path in enumerate(HALF_START):  # no kernel moves bytes faster than the memory
        most[index] = 1.0 if path[0] == "moving" else most[index]
    options: dict[str, Any] = {"loss": "cauchy", "f_scale": 0.1, "x_scale": start, "diff_step": 0.02, "max_nfev": 8}
    residuals(least_squares(residuals, start, bounds=(least, most), **options).x)


def report(models: dict[str, list[Model]], coefficients: dict[str, Any]) -> str:
    """Return errors and biases of all tables, of the models that a fit may see and of those held out."""
    rows = []
    for name, steps in models.items():
        ratios = step_ratios(steps, device_of(TABLES[name], coefficients))
        unseen = np.array([is_held_out(step[0]) for step in steps])
        roofline = np.array([roofline_step(step, TABLES[name].device) for step in steps])
        row: list[Any] = [name, TABLES[name].device]
        for part in (~unseen, unseen):
            row += [int(part.sum()), f"{error_of(ratios[part]):.1%}", f"{ratios[part].mean() - 1:+.1%}"]
        row += [f"{np.mean(np.abs(ratios[unseen] - 1) < limit):.0%}" for limit in (0.1, 0.2)]
        rows.append([*row, f"{error_of(roofline[unseen]):.1%}"])
    headers = ["table", "device", "shown", "error", "bias", "held out", "error", "bias"]
    headers += ["within 10 %", "within 20 %", "roofline"]
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)


def main() -> None:
    """Print the errors of each table of timm, with the coefficients of the package."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the measurements")
    parser.add_argument("--models", type=int, default=60, help="of each table")
    parser.add_argument("--cache", type=Path, help="folder that keeps the operators of the models")
    parser.add_argument("--without", nargs="*", help="fit to the other tables first; with no name, to all")
    parser.add_argument("--calibrated", action="store_true", help="also after a calibration with one and with five")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    models = timm_models(options.folder, options.models, options.cache)
    coefficients = copy.deepcopy(fits()["coefficients"])
    if options.without is not None:
        fit_half(coefficients, shown(models, options.without))
        print({".".join(path): round(value_at(coefficients, path), 3) for path in HALF_START})
    print(report(models, coefficients))
    for name, steps in models.items() if options.calibrated else ():
        errors = [np.mean(calibrated_errors(TABLES[name], steps, coefficients, count)) for count in (1, 5)]
        print(name, *(f"{error:.1%}" for error in errors))


def timm_models(folder: Path, count: int, cache: Path | None) -> dict[str, list[Model]]:
    """Return the kernels of the steps of each table."""
    if cache:
        cache.mkdir(parents=True, exist_ok=True)
    return {
        name: [kernels_in(step, table.mode) for step in models_of(folder, table, count, cache)]
        for name, table in TABLES.items()
    }


def shown(models: dict[str, list[Model]], without: Sequence[str] = (), count: int = 30) -> dict[str, list[Model]]:
    """Return models that a fit may see, without some tables."""
    tables = {name: steps for name, steps in models.items() if name not in without}
    return {name: [step for step in steps if not is_held_out(step[0])][:count] for name, steps in tables.items()}


def value_at(tree: Any, path: tuple[str, ...]) -> float:
    """Return the value at a path of nested dicts."""
    for name in path:
        tree = tree[name]
    return float(tree)


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

    def pass_(op_class: str, nbytes: int, *, is_backward: bool = False) -> float:
        sizes = (tokens, h) if op_class == "norm" else (nbytes // F16.itemsize,)
        return device.seconds(Work("", op_class, F16, sizes, 0, nbytes, is_backward=is_backward))

    products = [(1, tokens, 3 * h, h), (1, tokens, h, h), (1, tokens, 4 * h, h), (1, tokens, h, 4 * h)]
    scores = [(b * heads, s, s, h // heads), (b * heads, s, h // heads, s)]
    forward = sum(gemm(*sizes) for sizes in (*products, *scores))
    backward = sum(gemm(z, m, k, n) + gemm(z, n, k, m) for z, m, n, k in (*products, *scores))
    wide = 2 * tokens * h  # bytes of one activation
    square = 2 * b * heads * s * s
    forward += 2 * pass_("norm", 2 * wide) + 2 * pass_("elementwise", 7 * wide) + pass_("elementwise", 8 * wide)
    forward += pass_("softmax", 2 * square) + pass_("elementwise", 5 * square // 2) + 2 * pass_("copy", 4 * wide)
    backward += 2 * pass_("norm", 4 * wide, is_backward=True)
    backward += 2 * pass_("elementwise", 6 * wide) + pass_("elementwise", 12 * wide)
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


def roofline_step(model: Model, device: str = "RTX 3090") -> float:
    """Return the roofline of the kernels of a step over its measured time."""
    spec = DeviceSpec(device)
    _, measured, works, _, _ = model
    return sum(times * spec.bound(work.flops, work.nbytes, F16).seconds for work, times in works.items()) / measured


if __name__ == "__main__":
    main()
