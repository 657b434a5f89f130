"""Steps, kernels and peaks of models on a CUDA device, and beside them what is predicted for it.

    python benchmarks/gpu_truth.py measure FILE.json.gz [--unseen] [--seconds 300]
    python benchmarks/gpu_truth.py compare FILE.json.gz [--device H100] [--only NAME] [--operators]

``measure`` needs the device, and not modelsummary; ``compare`` needs no device: models are built on meta. Forwards run
in evaluation mode in float32 and in bfloat16; steps are trained with AdamW under bfloat16 autocast, both as torch does
by default, some also compiled. Times are medians of runs between two CUDA events; a profiled run says what each
operator took. Products, attention and other operators are also measured alone, over several sets of operands, so that
the cache holds none of them.

``--unseen`` takes the models that were not looked at when ``"unit"`` and ``"host_us"`` of ``kernel_fits.json`` were
fitted to the others.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.nn import functional as F

BF16, F32 = torch.bfloat16, torch.float32
RUNS, WARM_UP = 8, 3
CACHE_BYTES = 60e6  # of the largest device's second level


class Case(NamedTuple):
    """A model with its inputs: keyword arguments, or positional ones under ``"args"``."""

    name: str
    model: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]
    compiled: bool = False  # also measured compiled
    needs_values: bool = False  # to be built, so that it is built on the CPU


class _LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10_000, 512)
        self.lstm = nn.LSTM(512, 1024, 2, batch_first=True)
        self.head = nn.Linear(1024, 10_000)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0])


def _images(batch: int, size: int = 224) -> Callable[[], dict[str, Any]]:
    return lambda: {"args": [torch.randn(batch, 3, size, size)]}


def _tokens(batch: int, length: int, vocabulary: int, labels: bool = True) -> Callable[[], dict[str, Any]]:
    def inputs() -> dict[str, Any]:
        tokens = torch.randint(0, vocabulary, (batch, length))
        return {"input_ids": tokens, "labels": tokens} if labels else {"input_ids": tokens}

    return inputs


def cases() -> list[Case]:
    """Models of torchvision, timm and transformers, and an LSTM."""
    import timm
    import torchvision
    import transformers as hf

    def vision(name: str) -> Callable[[], nn.Module]:
        return lambda: torchvision.models.get_model(name, weights=None)

    def language(kind: str, **sizes: Any) -> Callable[[], nn.Module]:
        head = {"Bert": "ForMaskedLM", "GPT2": "LMHeadModel", "T5": "ForConditionalGeneration"}.get(kind, "ForCausalLM")
        return lambda: getattr(hf, kind + head)(getattr(hf, f"{kind}Config")(**sizes))

    llama = {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8}
    qwen = {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8}
    mixtral = {"hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 8}
    return [
        Case("resnet50", vision("resnet50"), _images(64), True),
        Case("vit_b_16", vision("vit_b_16"), _images(64), True),
        Case("convnext_tiny", vision("convnext_tiny"), _images(64), True),
        Case("swin_t", vision("swin_t"), _images(64)),
        Case("efficientnet_v2_s", vision("efficientnet_v2_s"), _images(64)),
        Case("regnet_y_8gf", vision("regnet_y_8gf"), _images(64), needs_values=True),
        Case("densenet121", vision("densenet121"), _images(64)),
        Case("mobilenet_v3_large", vision("mobilenet_v3_large"), _images(256)),
        Case("mixer_b16_224", lambda: timm.create_model("mixer_b16_224"), _images(64)),
        Case("beit_base", lambda: timm.create_model("beit_base_patch16_224"), _images(64)),
        Case("bert", language("Bert"), _tokens(32, 128, 30_522), True),
        Case("gpt2", language("GPT2"), _tokens(8, 1024, 50_257)),
        Case(
            "llama",
            language("Llama", intermediate_size=8192, vocab_size=128_256, **llama),
            _tokens(2, 2048, 128_256),
            True,
        ),
        Case(
            "qwen3",
            language(
                "Qwen3", intermediate_size=3072, vocab_size=151_936, head_dim=128, tie_word_embeddings=True, **qwen
            ),
            _tokens(2, 1024, 151_936),
        ),
        Case(
            "mixtral",
            language("Mixtral", intermediate_size=3584, num_local_experts=8, vocab_size=32_000, **mixtral),
            _tokens(4, 1024, 32_000),
        ),
        Case(
            "t5",
            language("T5", d_model=768, d_ff=3072, num_layers=12, num_heads=12, decoder_start_token_id=0),
            _tokens(8, 512, 32_128),
        ),
        Case("lstm", _LanguageModel, lambda: {"args": [torch.randint(0, 10_000, (64, 128))]}),
    ]


class _Segmentation(nn.Module):
    """A model of torchvision that returns its result in a dict."""

    def __init__(self) -> None:
        super().__init__()
        import torchvision

        self.model = torchvision.models.segmentation.deeplabv3_resnet50(weights=None, weights_backbone=None)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)["out"]


def unseen_cases() -> list[Case]:
    """Models that nothing was fitted to."""
    import timm
    import torchvision
    import transformers as hf

    def vision(name: str, **options: Any) -> Callable[[], nn.Module]:
        return lambda: torchvision.models.get_model(name, weights=None, **options)

    def language(kind: str, **sizes: Any) -> Callable[[], nn.Module]:
        head = "ForMaskedLM" if kind == "Roberta" else "ForCausalLM"
        return lambda: getattr(hf, kind + head)(getattr(hf, f"{kind}Config")(**sizes))

    medium = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    mistral = {"hidden_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 4}
    return [
        Case("opt", language("OPT"), _tokens(8, 512, 50_272), True),
        Case("gpt_neox", language("GPTNeoX", vocab_size=50_432, **medium), _tokens(4, 1024, 50_432)),
        Case(
            "mistral",
            language("Mistral", intermediate_size=7168, vocab_size=32_000, **mistral),
            _tokens(1, 4096, 32_000),
        ),
        Case("roberta", language("Roberta", max_position_embeddings=514, **medium), _tokens(8, 256, 50_265)),
        Case("inception_v3", vision("inception_v3", aux_logits=False, init_weights=False), _images(64, 299)),
        Case("mnasnet1_0", vision("mnasnet1_0"), _images(64), True),
        Case("shufflenet_v2_x1_0", vision("shufflenet_v2_x1_0"), _images(128)),
        Case("deeplabv3_resnet50", _Segmentation, _images(8, 384)),
        Case("hrnet_w18", lambda: timm.create_model("hrnet_w18"), _images(32)),
    ]


def loss_of(result: Any) -> Tensor:
    """Return the loss of a result: its own, or a mean."""
    own = getattr(result, "loss", None)
    if own is not None:
        return own
    return (result.logits if hasattr(result, "logits") else result).float().mean()


def _run(model: nn.Module, inputs: dict[str, Any]) -> Any:
    return model(*inputs["args"]) if "args" in inputs else model(**inputs)


def _mapped(inputs: dict[str, Any], convert: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    return {
        name: [convert(entry) for entry in value] if isinstance(value, list) else convert(value)
        for name, value in inputs.items()
    }


def _on_device(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return _mapped(inputs, lambda x: x.to("cuda", dtype if x.is_floating_point() else None))


# ------------------------------------------------------------------------------------------------- measure


def _milliseconds(run: Callable[[], Any], runs: int = RUNS, warm_up: int = WARM_UP) -> float:
    for _ in range(warm_up):
        run()
    durations = []
    for _ in range(runs):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        durations.append(begin.elapsed_time(end))
    return statistics.median(durations)


def _profiled(run: Callable[[], Any]) -> tuple[list[list[Any]], float]:
    """Return rows of operator, shapes, count, microseconds on the device; and the milliseconds in which kernels ran."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as profiler:
        run()
        torch.cuda.synchronize()
    rows, kernels = [], defaultdict(lambda: [0, 0.0])
    for event in profiler.key_averages(group_by_input_shape=True):
        if str(event.device_type).endswith("CUDA"):
            kernels[event.key][0] += event.count
            kernels[event.key][1] += event.self_device_time_total
        elif event.self_device_time_total:
            rows.append([event.key, event.input_shapes, event.count, round(event.self_device_time_total, 2)])
    rows.sort(key=lambda row: -row[3])
    names = sorted(
        ([name[:120], count, round(us, 2)] for name, (count, us) in kernels.items()), key=lambda row: -row[2]
    )
    return [rows, names], sum(us for _, us in kernels.values()) / 1000


def _measure(run: Callable[[], Any], profiled: bool = True) -> dict[str, Any]:
    _milliseconds(run, 1, WARM_UP)
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    ms = _milliseconds(run, warm_up=0)
    result: dict[str, Any] = {"ms": ms, "held": held, "peak": torch.cuda.max_memory_allocated()}
    result["reserved"] = torch.cuda.max_memory_reserved()
    if profiled:
        (result["operators"], result["kernels"]), result["device_ms"] = _profiled(run)
    return result


def _measure_case(case: Case, has_time: Callable[[], bool]) -> Iterator[tuple[str, dict[str, Any]]]:
    with torch.device("cuda"):
        model = case.model()
    for dtype, name in ((F32, "forward float32"), (BF16, "forward bfloat16")):
        model.eval().to(dtype)
        inputs = _on_device(case.inputs(), dtype)

        def forward(model: nn.Module = model, inputs: dict[str, Any] = inputs) -> None:
            with torch.no_grad():
                _run(model, inputs)

        yield name, _measure(forward)
    if case.compiled and has_time():
        compiled = torch.compile(model)
        yield "forward bfloat16 compiled", _measure(lambda: forward(compiled, inputs))
    model.train().float()
    inputs = _on_device(case.inputs(), F32)
    optimizer = torch.optim.AdamW(model.parameters())
    held_after_forward = []

    def step(model: nn.Module = model) -> None:
        with torch.autocast("cuda", BF16):
            loss = loss_of(_run(model, inputs))
        held_after_forward.append(torch.cuda.memory_allocated())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    yield "step", _measure(step) | {"held_after_forward": held_after_forward[-1]}
    if case.compiled and has_time():
        compiled = torch.compile(model)
        yield "step compiled", _measure(lambda: step(compiled)) | {"held_after_forward": held_after_forward[-1]}


def _alone(buffers: Callable[[], list[Tensor]], run: Callable[..., Any], runs: int = 20) -> float:
    """Return the microseconds of a call, over as many sets of operands as no cache holds."""
    first = buffers()
    n_bytes = sum(tensor.numel() * tensor.element_size() for tensor in first)
    sets = [first, *(buffers() for _ in range(min(8, int(2 * CACHE_BYTES / n_bytes))))]
    for _ in range(3):
        run(*sets[0])
    durations = []
    for _ in range(3):
        torch.cuda._sleep(1_000_000)  # the queue fills while the device sleeps, so that the host is not measured
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for number in range(runs):
            run(*sets[number % len(sets)])
        end.record()
        torch.cuda.synchronize()
        durations.append(begin.elapsed_time(end) * 1000 / runs)
    return min(durations)


def _matrices(*shapes: Sequence[int], dtype: torch.dtype = BF16) -> Callable[[], list[Tensor]]:
    return lambda: [torch.randn(*shape, device="cuda", dtype=dtype) for shape in shapes]


def _transposed_product(a: Tensor, b: Tensor) -> Tensor:
    return a @ b.mT


def _layer_norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


def _sum_of_rows(x: Tensor) -> Tensor:
    return x.sum(0)


def _grouped(a: Tensor, b: Tensor) -> Tensor:
    ends = torch.arange(1, len(b) + 1, device="cuda", dtype=torch.int32) * (len(a) // len(b))
    return torch._grouped_mm(a, b.mT, offs=ends)


_OF_ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "layer_norm": _layer_norm,
    "softmax": partial(torch.softmax, dim=-1),
    "gelu": F.gelu,
    "sum": _sum_of_rows,
    "to float32": torch.Tensor.float,
}


def _alone_in_turn() -> Iterator[tuple[str, list[int], float]]:
    """Return name, sizes and microseconds of operators that run alone."""
    widths = [4096, 4095, 4097, 4098, 4100, 4104, 4112, 4128, 4160]
    shapes = [(4096, n, 4096) for n in widths] + [(4096, 4096, k) for k in widths[1:]]
    shapes += [(m, 4096, 4096) for m in (1, 8, 64, 128, 256, 512, 1024, 2048, *widths[1:])]
    shapes += [(8192, n, 1024) for n in (50_257, 50_264, 50_304, 32_000, 30_522, 30_528)]
    shapes += [(m, n, k) for m in (2048, 8192) for n, k in ((768, 768), (3072, 768), (768, 3072), (8192, 2048))]
    shapes += [(8192, n, 768) for n in (766, 767, 770, 776)] + [(8192, 768, k) for k in (766, 767, 770, 776)]
    for m, n, k in shapes:
        yield "mm bfloat16", [m, n, k], _alone(_matrices((m, k), (n, k)), _transposed_product)
    for m, n, k in ((4096, 4096, 4096), (8192, 3072, 768), (64, 4096, 4096)):
        yield "mm float32", [m, n, k], _alone(_matrices((m, k), (n, k), dtype=F32), _transposed_product)
    squares = [(batch, m, m, 64) for batch in (96, 384) for m in (64, 128, 197, 512, 1024)]
    for batch, m, n, k in (*squares, (96, 64, 2048, 64), (96, 2048, 64, 64), (64, 2048, 128, 2048)):
        yield "bmm bfloat16", [batch, m, n, k], _alone(_matrices((batch, m, k), (batch, n, k)), _transposed_product)
    for sizes in ((8, 12, 1024, 64), (2, 32, 2048, 64), (2, 32, 4096, 128), (64, 12, 197, 64), (1, 32, 16384, 128)):
        for is_causal in (False, True):
            attend = partial(F.scaled_dot_product_attention, is_causal=is_causal)
            yield "sdpa", [*sizes, int(is_causal)], _alone(_matrices(sizes, sizes, sizes), attend, 10)
    for sizes in ((4096, 768), (4096, 4096), (16384, 1024), (65536, 512)):
        yield "add", [*sizes], _alone(_matrices(sizes, sizes), torch.add)
        for name, run in _OF_ROWS.items():
            yield name, [*sizes], _alone(_matrices(sizes), run)
    for rows, experts, n, k in ((8192, 8, 3584, 1024), (8192, 64, 1408, 2048), (512, 8, 3584, 1024)):
        yield "grouped_mm", [rows, experts, n, k], _alone(_matrices((rows, k), (experts, n, k)), _grouped, 5)


def _sustained(seconds: float = 4.0) -> dict[str, Any]:
    """Return TFLOP/s of a large product in each quarter of a second, and joules, where the driver counts them."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=BF16) for _ in range(2))
    begin = [time.perf_counter(), _joules()]
    rates = []
    while time.perf_counter() - begin[0] < seconds:
        start = time.perf_counter()
        for _ in range(170):
            a @ b
        torch.cuda.synchronize()
        rates.append(round(170 * 2 * 8192**3 / (time.perf_counter() - start) / 1e12, 1))
    return {"tflops": rates, "watts": (_joules() - begin[1]) / (time.perf_counter() - begin[0])}


def _joules() -> float:
    try:
        import pynvml

        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetTotalEnergyConsumption(pynvml.nvmlDeviceGetHandleByIndex(0)) / 1000
    except Exception:  # the library or the counter is not there
        return float("nan")


def measure(path: Path, seconds: float, *, unseen: bool) -> None:
    """Measure the cases, until the time is over, and write them."""
    begin = time.perf_counter()
    properties = torch.cuda.get_device_properties(0)
    data: dict[str, Any] = {"device": properties.name, "torch": torch.__version__, "models": {}, "failed": {}}

    def has_time() -> bool:
        return time.perf_counter() - begin < seconds

    def save() -> None:
        with gzip.open(path, "wt") as file:
            json.dump(data, file)

    if not unseen:
        data["alone"], data["sustained"] = list(_alone_in_turn()), _sustained()
    for case in unseen_cases() if unseen else cases():
        if not has_time():
            break
        rows = data["models"][case.name] = {}
        try:
            for name, result in _measure_case(case, has_time):
                rows[name] = result
                print(f"{time.perf_counter() - begin:4.0f} s {case.name}, {name}: {result['ms']:.2f} ms", flush=True)
        except Exception as error:  # one model that fails does not end the others
            data["failed"][case.name] = repr(error)[:500]
            print(case.name, repr(error)[:300], flush=True)
        torch.cuda.empty_cache()
        save()


# ------------------------------------------------------------------------------------------------- compare


def _predicted(case: Case, name: str, device: str) -> tuple[float, Any, int]:
    """Return milliseconds, kernels and peak of a measured row."""
    from modelsummary import Statistics

    is_step = name.startswith("step")
    with torch.device("cpu" if case.needs_values else "meta"):
        model, inputs = case.model(), case.inputs()
    dtype = F32 if is_step or "float32" in name else BF16
    model.to("meta", dtype).train(is_step)  # some models make a few tensors on the CPU
    inputs = _mapped(inputs, lambda x: x.to("meta", dtype if x.is_floating_point() else None))
    stats = Statistics(model, *inputs["args"]) if "args" in inputs else Statistics(model, inputs)
    step: dict[str, Any] = {"loss": loss_of, "autocast": BF16, "optimizer": "adamw"} if is_step else {}
    mode = "compiled" if "compiled" in name else "eager"
    options = {**step, "backward": True} if is_step else step
    estimate = stats.estimate_latency(device, mode=mode, **options)
    memory = stats.memory("train" if is_step else "inference", device="cuda", **step)
    return float(estimate), stats.kernels(device, mode=mode, **options), memory.peak


def _kernel_ms(row: dict[str, Any]) -> float:
    """Return the milliseconds of the profiled kernels, without the annotations around them."""
    return sum(us for name, _, us in row["kernels"] if not name.startswith(("Optimizer.step", "##"))) / 1000


def compare(path: Path, device: str, only: str, *, operators: bool) -> None:
    """Print a table of predictions beside measurements, and mean errors by kind of row."""
    with gzip.open(path, "rt") as file:
        data = json.load(file)
    lines, errors = [], defaultdict(list)
    for case in [*cases(), *unseen_cases()]:
        for name, row in data["models"].get(case.name, {}).items() if only in case.name else ():
            ms, kernels, peak = _predicted(case, name, device)
            kernel_ms, measured_kernel_ms = 1000 * kernels.seconds, _kernel_ms(row)
            ratios = ms / row["ms"], kernel_ms / measured_kernel_ms, peak / row["peak"]
            errors[name].append(ratios)
            figures = (row["ms"], ms, ratios[0] - 1, measured_kernel_ms, kernel_ms, ratios[1] - 1)
            lines.append([case.name, name, *figures, row["peak"] / 1e9, peak / 1e9])
            if operators:
                _print_operators(case.name, name, row, kernels)
    headers = [
        "model",
        "run",
        "ms",
        "predicted",
        "error",
        "kernels (ms)",
        "predicted",
        "error",
        "peak (GB)",
        "predicted",
    ]
    formats = ["", "", ".2f", ".2f", "+.1%", ".2f", ".2f", "+.1%", ".2f", ".2f"]
    print(tabulate(lines, headers, floatfmt=formats, tablefmt="github"))
    means = [
        [name, len(rows)]
        + [
            value
            for column in zip(*rows, strict=True)
            for value in (_mean(abs(x - 1) for x in column), _mean(column) - 1)
        ]
        for name, rows in errors.items()
    ]
    headers = ["run", "models", "error", "bias", "kernels: error", "bias", "peak: error", "bias"]
    print(tabulate(means, headers, floatfmt=["", "", *[".1%", "+.1%"] * 3], tablefmt="github"))


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def _print_operators(model: str, run: str, row: dict[str, Any], kernels: Any) -> None:
    """Print the operators whose measured and predicted milliseconds differ most."""
    by_name: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name, _, _, us in row["operators"]:
        by_name[name.removeprefix("aten::")][0] += us / 1000
    for kernel in kernels:
        name = kernel.work.operator.removeprefix("foreach ").split(" ")[0].removeprefix("aten.").split(".")[0]
        by_name[name][1] += 1000 * (kernel.seconds or 0.0)
    most = sorted(by_name.items(), key=lambda item: -abs(item[1][0] - item[1][1]))[:12]
    rows = [[name, *figures] for name, figures in most]
    print(tabulate(rows, [f"{model}, {run}", "ms", "predicted"], floatfmt=".3f", tablefmt="github"), flush=True)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["measure", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--seconds", type=float, default=300, help="in which models begin to be measured")
    parser.add_argument("--unseen", action="store_true", help="the models that nothing was fitted to")
    parser.add_argument("--device", default="H100", help="whose times are predicted")
    parser.add_argument("--only", default="", help="models whose names contain this")
    parser.add_argument("--operators", action="store_true", help="print the operators that differ most")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.action == "measure":
        measure(options.file, options.seconds, unseen=options.unseen)
    else:
        compare(options.file, options.device, options.only, operators=options.operators)


if __name__ == "__main__":
    main()
