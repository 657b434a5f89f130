"""The training loop on many models under each kind of plan: equal to one process, or refused with the reason.

python -m tests.parallel.sweep OUT.jsonl --plans tensor shard --models decoder transformers/llama
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.parallel import models, processes, training

TOLERANCE = 1e-9
SECONDS = 180  # of one case; most take less than ten
LIBRARIES = {
    "transformers": (
        "llama", "gpt2", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "opt", "bloom", "falcon", "gpt_neox", "gptj",
        "olmo2", "starcoder2", "granite", "cohere", "mamba", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3",
        "bert", "distilbert", "albert", "deberta_v2", "t5", "bart", "whisper", "m2m_100", "vit", "convnext",
        "dinov2", "clip", "llava", "wav2vec2", "llama@lora", "bert@lora", "gpt2@frozen", "vit@frozen",
    ),
    "torchvision": ("resnet18",),  # the others hold too much in float64 for several processes
    "timm": ("test_resnet", "test_vit", "test_convnext"),
}  # fmt: skip
MODELS = (*models.NAMES, *(f"{library}/{name}" for library, names in LIBRARIES.items() for name in names))


# Cases in which torch refuses to go on, and why.
KNOWN = {
    **{
        (model, "tensor x shard"): "whole states are set where all ranks divide the rows, and none of 2 x 2 divides 50"
        for model in ("gpt2", "llama", "t5")
    },
    **{
        (f"transformers/{model}@frozen", plan): "no optimizer for a stage that is all frozen"
        for model in ("gpt2", "vit")
        for plan in ("1f1b", "zero bubble", "interleaved", "pipeline x shard")
    },
}


def _sampled() -> Iterator[tuple[str, str]]:
    """Yield each model with one plan that torch does not refuse; the plans take turns."""
    plans = list(training.PLANS)
    for row, model in enumerate(MODELS):
        cases = [(model, plans[column]) for column in (-row % 16, -row % 8) if column < len(plans)]
        yield from [case for case in cases if case not in KNOWN][:1]


SAMPLE = list(_sampled())


def run(cases: Iterable[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    """Yield the verdict on each model and kind of plan; a case that hangs or fails costs its processes alone."""
    for model, plan in cases:
        begin = time.perf_counter()
        n, sizes, schedule = training.PLANS[plan]
        try:
            found = processes.run(training.compared, n, model, sizes, schedule, timeout=SECONDS)
            result = _verdict(found)
        except TimeoutError:
            result = {"verdict": "HANGS", "reason": f"longer than {SECONDS} s"}
        except Exception as error:
            trace = str(error.__cause__ or "").splitlines()
            result = {"verdict": "FAILS", "reason": f"{type(error).__name__}: {error}", "trace": trace}
        yield {"model": model, "plan": plan, **result, "seconds": round(time.perf_counter() - begin, 2)}


def _verdict(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    reasons = [rank["refused"] for rank in ranks if "refused" in rank]
    if len(reasons) == len(ranks):
        return {"verdict": "refused", "reason": reasons[0]}
    if reasons:
        return {"verdict": "FAILS", "reason": f"some ranks refuse: {reasons[0]}"}
    worst = max(ranks, key=lambda rank: rank["difference"])
    verdict = "equal" if worst["difference"] <= TOLERANCE else "DIFFERS"
    return {"verdict": verdict, "difference": worst["difference"], "reason": "" if verdict == "equal" else worst["of"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--plans", nargs="*", default=list(training.PLANS))
    chosen = parser.parse_args()
    lines = map(json.loads, chosen.out.read_text().splitlines()) if chosen.out.exists() else ()
    done = {(line["model"], line["plan"]) for line in lines}
    # The plans of two processes first: each number of processes waits apart.
    cases = [(model, plan) for plan in chosen.plans for model in chosen.models]
    cases.sort(key=lambda case: (training.PLANS[case[1]][0], chosen.models.index(case[0])))
    with chosen.out.open("a") as file:
        for result in run(case for case in cases if case not in done):
            file.write(json.dumps(result) + "\n")
            file.flush()
            print(result["model"], result["plan"], result["verdict"], result.get("reason", "")[:300], result["seconds"])
    lines = list(map(json.loads, chosen.out.read_text().splitlines()))
    for plan in training.PLANS:
        print(plan, dict(Counter(line["verdict"] for line in lines if line["plan"] == plan)))
    processes.stop()


if __name__ == "__main__":
    main()
