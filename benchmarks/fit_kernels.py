"""Fit the time of kernels on accelerators to published measurements, and say how well rows that were held out are met.

    python benchmarks/fit_kernels.py DATA_FOLDER [--write] [--models 500] [--cache FOLDER]

``DATA_FOLDER`` holds measurements that others published (its README has sources and licences): kernels in float32
(NeuSight, ASPLOS 2025), tables of timm on an RTX 3090, training iterations on A100s (vTrain, MICRO 2024).

1. Bandwidth and float32 products, on kernels: an efficiency per operator class, shared by all devices, and two numbers
   for each device. A measured single call is ``max(floor, offset + kernel)``: the host's dispatch, and what is between
   events on an idle device, are fitted, too, and left out of what is kept.
2. Half precision, on whole models of timm: a third of the models is held out.
3. What an A100 reaches of it, on training iterations without tensor and pipeline parallelism.

``--write`` puts the coefficients and the errors into ``modelsummary/costs/kernel_fits.json``.
"""

from __future__ import annotations

import argparse
import copy
import csv
import gzip
import json
import pickle
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import least_squares
from tabulate import tabulate

from modelsummary import DeviceSpec
from modelsummary.costs import kernel_time
from modelsummary.costs.kernel_time import DeviceModel
from modelsummary.costs.operator_work import Work, is_free, work_of

JSON = Path(kernel_time.__file__).with_name("kernel_fits.json")
DEVICES = {
    "NVIDIA A100-PCIE-40GB": "A100 40GB PCIe",
    "NVIDIA A100 80GB PCIe": "A100 80GB PCIe",
    "Tesla P100-PCIE-16GB": "P100",
    "Tesla P4": "P4",
    "Tesla T4": "T4",
    "Tesla V100-PCIE-32GB": "V100 PCIe",
}
HELD_OUT_DEVICE = "V100 PCIe"
BINARY = ("add", "mul", "div", "pow")
ELEMENTWISE = (*BINARY, "addu", "mulu", "divu", "powu", "relu", "gelu", "tanh")
CLASS_OF = {"bmm": "gemm", "linear": "gemm", "conv": "conv", "softmax": "softmax", "ln": "norm"}
F32, F16 = torch.float32, torch.float16
SOURCES = [
    "single kernels: NeuSight, ASPLOS 2025, https://github.com/sitar-lab/NeuSight (MIT)",
    "timm models on an RTX 3090: https://github.com/huggingface/pytorch-image-models, results/ (Apache-2.0)",
    "training iterations on A100: vTrain, MICRO 2024, https://github.com/VIA-Research/vTrain (MIT)",
]
# Elements of the smallest tile of batched products without tensor cores: the steps in the measured times show it.
_BATCHED_TILE = {"pascal": 8192, "volta": 4096, "turing": 4096}
_BATCHED_TILE |= dict.fromkeys(("ampere", "ada", "hopper", "blackwell"), 16384)
Sample = tuple[Work, float]  # a kernel and its measured seconds
Key = tuple[str, str]  # operator and device

# ----------------------------------------------------------------------------------------------- single kernels


def kernels_of(folder: Path, op: str) -> dict[Key, list[Sample]]:
    """Measured kernels of an operator by device. In the tables of products, N is the inner dimension."""
    found: dict[Key, list[Sample]] = defaultdict(list)
    with gzip.open(folder / "gpu_kernels" / f"{op}.csv.gz", "rt") as file:
        for row in csv.DictReader(file):
            name, seconds = DEVICES[row.pop("device")], float(row.pop("ms")) * 1e-3
            found[op, name].append((_work(op, [int(each) for each in row.values()]), seconds))
    return found


def _work(op: str, figures: list[int]) -> Work:
    if op in ("bmm", "linear"):
        b, m, n, k = figures[0], figures[1], figures[3], figures[2]
        sizes = (b, m, n, k) if op == "bmm" else (1, b * m, n, k)
        weights = b * n * k if op == "bmm" else n * k
        return Work(f"aten.{op}", "gemm", F32, sizes, 2 * b * m * n * k, 4 * (b * m * (n + k) + weights))
    if op == "conv":
        b, c, n, kernel, size, stride, padding = figures
        out = (size + 2 * padding - kernel) // stride + 1
        m, k = b * out * out, c * kernel**2
        moved = 4 * (b * (out * out * n + size * size * c) + k * n)
        name = "aten.convolution (3x3)" if (kernel, stride) == (3, 1) else "aten.convolution"
        return Work(name, "conv", F32, (1, m, n, k, out, out), 2 * m * n * k, moved)
    rows, width = figures
    op_class = CLASS_OF.get(op, "elementwise")
    sizes = (rows, width) if op_class != "elementwise" else (rows * width,)
    return Work(f"aten.{op}", op_class, F32, sizes, 0, 4 * rows * width * (3 if op in BINARY else 2))


class KernelFit:
    """The float32 part of the coefficients, fitted on single kernels; ``devices`` has what is of one device."""

    def __init__(self, folder: Path, coefficients: dict[str, Any], seed: int = 0, per_device: int = 200) -> None:
        rng = np.random.default_rng(seed)
        self.coefficients = copy.deepcopy(coefficients)
        self.devices: dict[str, dict[str, float]] = {name: {} for name in DEVICES.values()}
        self.train: dict[Key, list[Sample]] = {}
        self.test: dict[Key, list[Sample]] = {}
        self.overhead: dict[Key, tuple[float, float]] = {}  # offset and floor in seconds
        for op in (*ELEMENTWISE, "softmax", "ln", "bmm", "linear", "conv"):
            for key, samples in kernels_of(folder, op).items():
                order = rng.permutation(len(samples))
                self.train[key] = [samples[place] for place in order[:per_device]]
                self.test[key] = [samples[place] for place in order[per_device : 3 * per_device]]

    def model(self, name: str) -> DeviceModel:
        """The model of a device with the coefficients as they are now."""
        own = self.devices[name]
        return DeviceModel(DeviceSpec(name), self.coefficients, own.get("stream", 0.87), 1.0, own.get("simt", 0.85))

    def fit(self) -> None:
        """Fit one class after the other."""
        for name in self.devices:
            if any(key[1] == name for key in self.train if key[0] == "add"):
                self._fit([key for key in self.train if key[0] in ("add", "relu") and key[1] == name], ["stream"], {})
        self.devices["A100 80GB PCIe"]["stream"] = self.devices["A100 40GB PCIe"]["stream"]
        self.coefficients["simt"]["batched_tile"] = _BATCHED_TILE
        for op, name in (("softmax", "softmax"), ("ln", "norm")):
            self._fit([key for key in self.train if key[0] == op], [], {("moving", name): 0.7})
        gemm, conv = ("simt", "gemm"), ("simt", "conv")
        self._fit(
            [key for key in self.train if key[0] in ("bmm", "linear")],
            ["simt"],
            {(*gemm, "edge"): 2.0, (*gemm, "start"): 10.0},
        )
        self.devices["A100 80GB PCIe"]["simt"] = self.devices["A100 40GB PCIe"]["simt"]
        free = {(*conv, "edge"): 2.0, (*conv, "start"): 10.0, (*conv, "efficiency"): 0.8, (*conv, "winograd"): 0.8}
        self._fit([key for key in self.train if key[0] == "conv"], [], free)
        for key in self.train:
            if key not in self.overhead:
                self._fit([key], [], {})

    def _fit(self, keys: list[Key], own: list[str], free: dict[tuple[str, ...], float]) -> None:
        """Fit ``own`` figures of the devices in ``keys``, coefficients at the paths ``free``, and the overheads."""
        names = list(dict.fromkeys(name for _, name in keys))
        start = [*free.values(), *[0.85] * (len(own) * len(names)), *[25.0, 35.0] * len(keys)]

        def put(values: np.ndarray) -> None:
            left = list(np.abs(values))
            for path in free:
                _set(self.coefficients, path, left.pop(0))
            for what in own:
                for name in names:
                    self.devices[name][what] = left.pop(0)
            for key in keys:
                self.overhead[key] = left.pop(0) * 1e-6, left.pop(0) * 1e-6

        def residuals(values: np.ndarray) -> np.ndarray:
            put(values)
            return np.log(np.concatenate([self.ratios(key, self.train[key]) for key in keys]))

        found = least_squares(residuals, start, loss="soft_l1", f_scale=0.1, diff_step=0.03, max_nfev=15)
        put(found.x)

    def ratios(self, key: Key, samples: list[Sample], model: DeviceModel | None = None) -> np.ndarray:
        """Predicted over measured."""
        model = model or self.model(key[1])
        offset, floor = self.overhead.get(key, (25e-6, 35e-6))
        return np.array([max(floor, offset + model.busy(work)) / seconds for work, seconds in samples])

    def table(self, unseen: DeviceModel) -> list[list[Any]]:
        """Mean errors by operator class: rows held out on seen devices, and all of the unseen device."""
        rows = []
        for op_class in ("gemm", "conv", "softmax", "norm", "elementwise"):
            ops = [op for op, _ in self.test if CLASS_OF.get(op, "elementwise") == op_class]
            seen = [key for key in self.test if key[0] in ops and key[1] != HELD_OUT_DEVICE]
            own = np.concatenate([self.ratios(key, self.test[key]) for key in seen])
            new = np.concatenate(
                [self.ratios((op, HELD_OUT_DEVICE), self.test[op, HELD_OUT_DEVICE], unseen) for op in set(ops)]
            )
            old = np.concatenate(
                [_roofline_ratios(key, self.test[key]) for key in (*seen, *((op, HELD_OUT_DEVICE) for op in set(ops)))]
            )
            by_device = {key[1]: [] for key in seen}
            for key in seen:
                by_device[key[1]].append(_error(self.ratios(key, self.test[key])))
            detail = ", ".join(f"{name} {np.mean(each):.1%}" for name, each in by_device.items())
            rows.append([op_class, f"{_error(own):.1%}", f"{_error(new):.1%}", f"{_error(old):.1%}", detail])
        return rows


def _roofline_ratios(key: Key, samples: list[Sample]) -> np.ndarray:
    spec = DeviceSpec(key[1])
    return np.array([spec.bound(work.flops, work.nbytes, F32).seconds / seconds for work, seconds in samples])


def _error(ratios: np.ndarray) -> float:
    return float(np.abs(ratios - 1).mean())


def _set(tree: dict[str, Any], path: tuple[str, ...], value: float) -> None:
    for name in path[:-1]:
        tree = tree[name]
    tree[path[-1]] = float(value)


# ------------------------------------------------------------------------------------------------- whole models

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

    from modelsummary.capture.inputs import call_arguments
    from modelsummary.memory.plan import OPTIMIZERS, StepPlan
    from modelsummary.memory.predict import step_operators

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
        plan = StepPlan(train, make, torch.device("cpu"), loss=_loss if train else None, autocast=F16)
        call = call_arguments(model.train(train), x, (), {}, batch_dim=None, device=None, dtypes=None)
        operators, _ = step_operators(model, call, plan)
    except Exception as error:
        print(f"left out: {row['model']}: {type(error).__name__}: {str(error)[:80]}")
        return None
    works: Counter[Work] = Counter()
    for each in operators:
        if each.phase != "step":
            works.update(work_of(each.run.call))
    dispatched = sum(not is_free(each.run.call) for each in operators)
    return row["model"], float(row[f"{kind}_step_time"]) * 1e-3, dict(works), dispatched, params if train else 0


def _loss(output: Any) -> torch.Tensor:
    logits = output[0] if isinstance(output, (tuple, list)) else output
    targets = torch.zeros(logits.shape[0], dtype=torch.long)
    return torch.nn.functional.cross_entropy(logits.float(), targets)


HALF_START: dict[tuple[str, ...], float] = {
    ("tensor", "gemm", "efficiency"): 1.1,
    ("tensor", "gemm", "edge"): 6.0,
    ("tensor", "gemm", "start"): 40.0,
    ("tensor", "conv", "efficiency"): 1.0,
    ("tensor", "conv_passes"): 1.2,
    ("tensor", "depthwise"): 0.045,
    ("tensor", "attention"): 0.6,
    ("moving", "batch_norm"): 0.7,
    ("moving", "batch_norm inference"): 0.95,
    ("moving", "batch_norm backward"): 0.6,
    ("moving", "norm backward"): 0.25,
    ("moving", "norm"): 0.6,
    ("moving", "softmax"): 0.8,
    ("moving", "reduction"): 0.8,
    ("moving", "pool"): 0.75,
    ("moving", "copy"): 0.9,
    ("moving", "index"): 0.5,
    ("moving", "depthwise"): 0.7,
}
_PRIOR = 0.15  # how far, as a logarithm, coefficients are free to go from where they start


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
            _set(coefficients, path, value)
            if path[:3] in (("tensor", "gemm", "edge"), ("tensor", "gemm", "start")):
                _set(coefficients, ("tensor", "conv", path[2]), value)
        return DeviceModel(spec, coefficients, 0.92, 1.0, 1.0)

    def residuals(values: np.ndarray) -> np.ndarray:
        ratios = step_ratios(models, put(values))
        return np.concatenate([np.log(ratios), _PRIOR * np.log(np.abs(values) / start)])

    put(least_squares(residuals, start, loss="soft_l1", f_scale=0.1, diff_step=0.03, max_nfev=8).x)


# -------------------------------------------------------------------------------------------- training on A100


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


def fit_a100(folder: Path, coefficients: dict[str, Any]) -> tuple[float, float]:
    """What an A100 reaches of the efficiency of tensor cores, fitted on half of the runs; error on the others."""
    runs = list(iterations(folder))
    spec = DeviceSpec("A100 80GB")

    def ratios(part: list[Any], values: np.ndarray) -> np.ndarray:
        compute, host = np.abs(values) * (1, 1e-3)
        device = DeviceModel(spec, coefficients, 0.87, compute, 1.0)
        return np.array([iteration_seconds(run, device, host) / seconds for run, seconds in part])

    def residuals(values: np.ndarray) -> np.ndarray:
        return np.log(ratios(runs[::2], values))

    found = least_squares(residuals, [0.8, 3.0], loss="soft_l1", f_scale=0.1, diff_step=0.03).x
    print(f"A100: {abs(found[0]):.3f} of the efficiency; {abs(found[1]):.2f} ms of the host for a layer")
    return float(abs(found[0])), _error(ratios(runs[1::2], found))


# --------------------------------------------------------------------------------------------------------- main


def main() -> None:
    """Fit, print the errors, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the measurements")
    parser.add_argument("--write", action="store_true", help="the coefficients into the package")
    parser.add_argument("--models", type=int, default=500, help="of each table of timm")
    parser.add_argument("--cache", type=Path, help="folder that keeps the kernels of the models of timm")
    parser.add_argument("--date", default="", help="to be written into the file")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    coefficients = copy.deepcopy(kernel_time.fits()["coefficients"])
    kernels = KernelFit(options.folder, coefficients)
    kernels.fit()
    coefficients = kernels.coefficients
    others = [each for name, each in kernels.devices.items() if name != HELD_OUT_DEVICE]
    default = {what: float(np.mean([each[what] for each in others])) for what in ("simt", "stream")}
    spec = DeviceSpec(HELD_OUT_DEVICE)
    per_joule = _flops_per_joule(kernels, without=HELD_OUT_DEVICE)
    unseen = DeviceModel(spec, coefficients, default["stream"], 1.0, kernel_time.sustained(spec, per_joule))
    rows = kernels.table(unseen)
    headers = ["class", "rows held out", f"{HELD_OUT_DEVICE}, without its own figures", "roofline", "by device"]
    print(tabulate(rows, headers, tablefmt="github"))
    print({name: {what: round(value, 3) for what, value in own.items()} for name, own in kernels.devices.items()})

    if options.cache:
        options.cache.mkdir(parents=True, exist_ok=True)
    errors: dict[str, float] = {}
    tables = {kind: timm_models(options.folder, kind, options.models, options.cache) for kind in ("infer", "train")}
    train = [model for models in tables.values() for place, model in enumerate(models) if place % 3]
    train = train[:: max(len(train) // 160, 1)]  # more do not change the coefficients
    fit_half(coefficients, train)
    device = DeviceModel(DeviceSpec("RTX 3090"), coefficients, 0.92, 1.0, 1.0)
    lines = []
    for kind, models in tables.items():
        test = models[::3]
        ratios = step_ratios(test, device)
        errors[kind] = _error(ratios)
        old = np.array([_roofline_step(model) for model in test])
        within = [f"{np.mean(np.abs(ratios - 1) < limit):.0%}" for limit in (0.1, 0.2)]
        lines.append([f"timm {kind}", len(test), f"{errors[kind]:.1%}", *within, f"{_error(old):.1%}"])
    moving = coefficients[
        "moving"
    ]  # torch 1.12, of the table, had a slow backward of layer norms, which is fused since
    moving["norm backward"] = max(moving["norm backward"], 0.6 * moving["norm"])
    compute, errors["a100"] = fit_a100(options.folder, coefficients)
    lines.append(["A100 iterations", "half", f"{errors['a100']:.1%}", "", "", ""])
    print(
        tabulate(
            lines, ["held out", "models", "mean error", "within 10 %", "within 20 %", "roofline"], tablefmt="github"
        )
    )
    print(json.dumps(coefficients))
    if options.write:
        _write(coefficients, kernels, default, compute, errors, options.date, rows)


# 10^9 operations per joule of newer processes, by the figures of NVIDIA's data sheets relative to 7 nm: not fitted.
_NEWER = {"ada": 130.0, "hopper": 130.0, "blackwell": 150.0}
_PROCESS = {"volta": "12 nm", "turing": "12 nm", "pascal": "16 nm", "ampere": "7 nm"}


def _flops_per_joule(kernels: KernelFit, without: str = "") -> dict[str, float]:
    """What a watt sustains of the vector units, from boards of the process that lack power; else from all of them."""
    found: dict[str, list[float]] = defaultdict(list)
    for name, own in kernels.devices.items():
        spec = DeviceSpec(name)
        if name != without and "simt" in own:
            value = own["simt"] * spec.peak(F32) / kernel_time.WATTS[name] / 1e9
            found[_PROCESS[spec.generation]].append(value)
    return {each: float(max(found[process])) for each, process in _PROCESS.items()} | _NEWER


def _roofline_step(model: Model) -> float:
    spec = DeviceSpec("RTX 3090")
    _, measured, works, _, _ = model
    return sum(times * spec.bound(work.flops, work.nbytes, F16).seconds for work, times in works.items()) / measured


def _write(
    coefficients: dict[str, Any],
    kernels: KernelFit,
    default: dict[str, float],
    compute: float,
    errors: dict[str, float],
    date: str,
    rows: list[list[Any]],
) -> None:
    devices: dict[str, Any] = {
        "RTX 3090": {"generation": "ampere", "tensor": 1.0, "simt": 0.9, "stream": 0.92, "error": errors["infer"]},
        "A100": {
            "generation": "ampere",
            "tensor": compute,
            "simt": kernels.devices["A100 40GB PCIe"]["simt"],
            "stream": kernels.devices["A100 40GB PCIe"]["stream"],
            "error": errors["a100"],
        },
    }
    for name, generation in (("V100", "volta"), ("T4", "turing"), ("P100", "pascal"), ("P4", "pascal")):
        own = kernels.devices.get(name) or kernels.devices[f"{name} PCIe"]
        ratios = np.concatenate(
            [kernels.ratios(key, kernels.test[key]) for key in kernels.test if key[1].split()[0] == name]
        )
        devices[name] = {
            "generation": generation,
            "tensor": compute,
            "simt": own["simt"],
            "stream": own["stream"],
            "error": _error(ratios),
        }
    found = {
        "date": date,
        "sources": SOURCES,
        "held_out_error": {**{row[0]: row[1] for row in rows}, **{k: f"{v:.1%}" for k, v in errors.items()}},
        "unseen_error": max(errors["infer"], errors["train"], errors["a100"], 0.15),
        "flops_per_joule": _flops_per_joule(kernels),
        "coefficients": coefficients,
        "devices": devices,
        "default": {"tensor": compute, "simt": default["simt"], "stream": 0.87, "error": 0.15},
    }
    JSON.write_text(json.dumps(_rounded(found), indent=1) + "\n", encoding="utf-8")


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
