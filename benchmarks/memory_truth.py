"""Predicted peaks beside the allocator's, with the workspace of every operator measured; training and inference.

    python benchmarks/memory_truth.py [--models 30] [--batch 4] [--batches-that-fit 8] [--others]

Each model is calibrated, predicted and measured (torch's profiler on the CPU). Then, for some models, the largest batch
that ``max_batch_size`` allows for a budget is run, and the next larger one: the first must fit, the second must not.
With ``--others``, the models are 20 that the code was not developed with.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import warnings
from typing import Any

import torch
from latency_truth import cases
from tabulate import tabulate
from torch import nn

from modelsummary import Statistics
from modelsummary.latency import kernel_runs

MORE = (
    "resnet26 mobilenetv3_small_050 efficientnet_lite0 convnext_atto mobilevit_xxs poolformer_s12 xcit_nano_12_p16_224"
    " coat_lite_tiny crossvit_tiny_240 pit_ti_224 tinynet_e regnetx_002"
)


OTHERS = (
    "maxvit_nano_rw_256 volo_d1_224 eca_nfnet_l0 hiera_tiny_224 davit_tiny caformer_s18 dla34 res2net50_26w_4s"
    " cait_xxs24_224 gcvit_xxtiny focalnet_tiny_srf inception_v4 lambda_resnet26t tnt_s_legacy_patch16_224"
)
SEGMENTATION = "fcn_resnet50 deeplabv3_mobilenet_v3_large lraspp_mobilenet_v3_large"


class Recurrent(nn.Module):
    """A recurrent layer and a projection."""

    def __init__(self, kind: type[nn.RNNBase], width: int = 256, **options: Any) -> None:
        super().__init__()
        self.embedding, self.rnn, self.head = (
            nn.Embedding(100, 128),
            kind(128, 256, 2, batch_first=True, **options),
            nn.Linear(width, 100),
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.embedding(ids))[0])


def subjects() -> Any:
    """Names, models and inputs."""
    import timm

    for kind in (nn.LSTM, nn.GRU):
        yield kind.__name__, lambda kind=kind: Recurrent(kind), lambda b: torch.randint(0, 100, (b, 64))
    yield from cases()
    for name in MORE.split():
        size = 240 if "240" in name else 224
        yield name, lambda name=name: timm.create_model(name), lambda b, size=size: torch.rand(b, 3, size, size)


def others() -> Any:
    """Names, models and inputs that the code was not developed with."""
    import timm
    import torchvision

    for name in OTHERS.split():
        size = timm.get_pretrained_cfg(name).input_size[-1]
        yield name, lambda name=name: timm.create_model(name), lambda b, size=size: torch.rand(b, 3, size, size)
    models, none = torchvision.models, {"weights": None, "weights_backbone": None}
    for name in SEGMENTATION.split():
        yield name, lambda name=name: models.get_model(name, **none), lambda b: torch.rand(b, 3, 128, 128)
    ids = lambda b: torch.randint(0, 100, (b, 64))  # noqa: E731
    yield "LSTM with projection", lambda: Recurrent(nn.LSTM, 64, proj_size=64, dropout=0.1), ids
    yield "GRU, bidirectional", lambda: Recurrent(nn.GRU, 512, bidirectional=True), ids
    yield "RNN", lambda: Recurrent(nn.RNN), ids


def scalar(output: Any) -> torch.Tensor:
    """A loss that costs nothing."""
    output = next(iter(output.values())) if isinstance(output, dict) else output
    return (output if isinstance(output, torch.Tensor) else output[0]).sum()


def main() -> None:
    """Compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=30)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--batches-that-fit", type=int, default=8, metavar="N")
    parser.add_argument("--others", action="store_true", help="of 20 models that the code was not developed with")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    kernel_runs._LEAST_ROUNDS, kernel_runs._SECONDS_OF_ROUNDS = 1, 0.0  # bytes matter here, not seconds
    rows, errors, fits = [], {"inference": [], "train": []}, []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MODELSUMMARY_CACHE"] = folder
        for number, (name, make, inputs) in enumerate(
            list(others() if options.others else subjects())[: options.models]
        ):
            row = [name]
            for mode in ("inference", "train"):
                train = mode == "train"
                step: dict[str, Any] = {"optimizer": "sgd-momentum", "loss": scalar} if train else {}
                stats = Statistics(make().train(train), inputs(options.batch))
                without = stats.memory(mode, workspaces=False, **step).peak
                stats.calibrate(backward=train, **step)
                measured = stats.measure_memory(mode, **step)
                errors[mode].append(measured.predicted.peak / measured.peak - 1)
                row += [f"{without / measured.peak - 1:+.1%}", f"{errors[mode][-1]:+.2%}"]
            rows.append(row)
            print(row, flush=True)
            if number < options.batches_that_fit:
                fits.append([name, *largest_batch(make, inputs, options.batch)])
    headers = ["model", "inference, storages alone", "inference", "training, storages alone", "training"]
    print(tabulate(rows, headers, tablefmt="github", disable_numparse=True))
    for mode, found in errors.items():
        within = sum(abs(error) <= 0.025 for error in found) / len(found)
        print(f"{mode}: mean error {statistics.mean(map(abs, found)):.2%}, {within:.0%} of {len(found)} within 2.5 %")
    print(tabulate(fits, ["model", "budget (B)", "batch", "its peak fits", "the next one does not"], tablefmt="github"))


def largest_batch(make: Any, inputs: Any, batch: int) -> list[Any]:
    """Budget, the batch that is said to fit, and whether it does, and the next larger one does not."""
    step: dict[str, Any] = {"optimizer": "sgd-momentum", "loss": scalar}
    stats = Statistics(make().train(), inputs(batch))
    budget = int(1.9 * stats.memory(**step).peak)
    best = stats.max_batch_size(budget, **step)
    for size in (best, best + 1):  # their calls are measured, and the answer is checked
        Statistics(make().train(), inputs(size)).calibrate(backward=True, **step)
    best = stats.max_batch_size(budget, **step)
    peaks = [Statistics(make().train(), inputs(size)).measure_memory(**step).peak for size in (best, best + 1)]
    return [budget, best, peaks[0] <= budget, peaks[1] > budget]


if __name__ == "__main__":
    main()
