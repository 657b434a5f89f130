"""Bytes of the caches of tiny transformers models, predicted on shapes and of the real cache objects.

    python benchmarks/caches.py --out caches.jsonl [--filter llama] [--kinds own static] [--again]

Every decoder and every encoder-decoder of the installed transformers is built small by rule (``tests/zoo``), with
sliding windows of 24 tokens. It runs for real at three lengths: a prompt, then one token. The truth is the sum over
all tensors that pickling the cache meets. Each kind of cache that transformers offers is tried: the model's own,
static, and quantised ones. Results are lines of JSON; models already in the file are skipped.
"""

from __future__ import annotations

import argparse
import io
import json
import pickle
import re
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from modelsummary import DeviceSpec, InputError, Statistics
from modelsummary.serving.cache import cache_maker
from modelsummary.serving.request import request_of
from modelsummary.serving.run import Encoded, run_request

LENGTHS = (12, 48, 130)
WINDOW = 24
KINDS = (None, "static", "fp8", "quanto")
DEVICE = DeviceSpec("A100")


class _Tensors(pickle.Pickler):
    """A pickler that collects the tensors that it meets."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO())
        self.found: dict[int, Tensor] = {}

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, Tensor):
            return None
        self.found[id(value)] = value
        return id(value)


def real_bytes(cache: Any) -> int:
    """Bytes of the tensors with a dimension in a cache; tensors in one storage count at most its bytes."""
    pickler = _Tensors()
    pickler.dump(cache)
    storages: dict[int, list[int]] = {}
    for tensor in pickler.found.values():
        for inner in _inner(tensor) if tensor.dim() else ():
            storages.setdefault(inner.untyped_storage().data_ptr(), []).append(inner.nbytes)
            whole = inner.untyped_storage().nbytes()
            if sum(storages[inner.untyped_storage().data_ptr()]) > whole:
                storages[inner.untyped_storage().data_ptr()] = [whole]
    return sum(map(sum, storages.values()))


def _inner(tensor: Tensor) -> list[Tensor]:
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [each for name in names for each in _inner(getattr(tensor, name))]


def real_run(model: Any, request: Any, length: int, kind: str | None) -> tuple[int, list[str]]:
    """Run a prompt and one token for real; return the bytes of the cache, and the classes of its layers."""
    call = request.prompt(2, length - 1)
    kwargs = {name: _real(value) for name, value in call.kwargs.items()}
    make = cache_maker(kind)
    named = ("past_key_values", "cache_params", "state", "cache")
    name = next((each for each in named if each in request.parameters), None)
    if name is None:
        raise InputError("the forward takes no cache")
    before = {id(each) for each in _attributes(model)}
    with torch.no_grad():
        if make is not None:
            kwargs[name] = make(model, length)
        out = model(**kwargs)
        cache = out[name]
        encoded = getattr(out, "encoder_last_hidden_state", None)
        more = {} if encoded is None else {"encoder_outputs": Encoded((encoded,))}
        out = model(**{request.tokens: torch.ones(2, 1, dtype=torch.long), name: cache, **more, **request.flags})
    own = [each for each in _attributes(model) if id(each) not in before]
    cache = out[name]
    parts = [getattr(cache, each, None) for each in ("self_attention_cache", "cross_attention_cache")]
    layers = [layer for part in (parts if parts[0] is not None else [cache]) for layer in getattr(part, "layers", [])]
    return real_bytes((cache, own)), sorted({type(layer).__name__ for layer in layers} | {type(cache).__name__})


def _attributes(model: Any) -> list[Tensor]:
    """Tensors in attributes of modules; they live as long as the model."""
    return [each for module in model.modules() for each in vars(module).values() if isinstance(each, Tensor)]


def _real(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value
    return torch.ones(value.shape, dtype=value.dtype) if hasattr(value, "shape") else value


def check(name: str, kinds: Sequence[str | None]) -> list[dict[str, Any]]:
    """Build a model and return one record per kind of cache."""
    from tests.zoo import transformers_models as zoo

    example = zoo.make(name)
    model = example.model
    _shrink_windows(model)
    stats = Statistics(model, example.kwargs)
    request = request_of(stats.live)
    records = []
    for kind in kinds:
        record: dict[str, Any] = {"model": name, "kind": kind or "own", "real": [], "predicted": []}
        try:
            for length in LENGTHS:
                nbytes, classes = real_run(model, request, length, kind)
                record["real"].append(nbytes)
                record["classes"] = classes
        except Exception as error:  # the model does not take this cache, also not for real
            record["unusable"] = f"{type(error).__name__}: {error}"[:200]
            records.append(record)
            continue
        try:
            for length in LENGTHS:
                _, decode = run_request(model, request, 2, length, make_cache=cache_maker(kind))
                record["predicted"].append(decode.cache.nbytes)
        except InputError as error:
            record["refused"] = str(error)[:300]
        record["equal"] = record["real"] == record["predicted"]
        records.append(record)
    return records


def _shrink_windows(model: Any) -> None:
    """Set sliding windows and chunks to a few tokens, so that short prompts exceed them."""
    config = model.config.get_text_config(decoder=True)
    for field in ("sliding_window", "attention_chunk_size"):
        if isinstance(getattr(config, field, None), int):
            setattr(config, field, WINDOW)


def names() -> list[str]:
    """Architectures with a causal or a sequence-to-sequence head."""
    from tests.zoo import transformers_models as zoo

    heads = ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "IMAGE_TEXT_TO_TEXT")
    known = {each for head in heads for each in zoo._mapping(head).values()}
    return [folder for folder, (_, classes) in zoo.architectures().items() if classes[0] in known]


def main() -> None:
    """Check all models, and print a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--filter", default="")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--kinds", nargs="+", default=[kind or "own" for kind in KINDS])
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if options.again:
        options.out.unlink(missing_ok=True)
    records = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    done = {record["model"] for record in records}
    with options.out.open("a") as file:
        for name in names():
            if name in done or options.filter not in name:
                continue
            try:
                found = check(name, [None if kind == "own" else kind for kind in options.kinds])
            except Exception as error:
                found = [{"model": name, "kind": "own", "failed": f"{type(error).__name__}: {error}"[:300]}]
            for record in found:
                file.write(json.dumps(record) + "\n")
                print({key: value for key, value in record.items() if key not in ("classes",)}, flush=True)
            file.flush()
            records += found
    summarise(records)


def cache_classes() -> list[str]:
    """Names of the classes of caches and of their layers in all modules of transformers that are imported."""
    from transformers import cache_utils

    bases = [cache_utils.Cache, cache_utils.CacheLayerMixin, cache_utils.LinearAttentionCacheLayerMixin]
    found, pending = [], list(bases)
    while pending:
        pending += (below := pending.pop().__subclasses__())
        found += [each.__name__ for each in below]
    return sorted({*found, cache_utils.DummyLayer.__name__, cache_utils.EncoderDecoderCache.__name__})


def summarise(records: list[dict[str, Any]]) -> None:
    """Print how many models of each kind are equal, and which models cover each class of caches."""
    ran = [record for record in records if "equal" in record]
    print(f"{len({record['model'] for record in ran})} models ran for real")
    for kind in KINDS:
        of_kind = [record for record in ran if record["kind"] == (kind or "own")]
        print(f"{kind or 'own'}: {sum(record['equal'] for record in of_kind)} of {len(of_kind)} equal")
    covered: dict[str, list[str]] = {name: [] for name in cache_classes()}
    for record in ran:
        for name in record.get("classes", ()) if record["equal"] else ():
            covered.setdefault(name, []).append(record["model"])
    for name, models in covered.items():
        print(f"class {name}: {len(models)} models, such as {models[0]}" if models else f"class {name}: no model")
    unusable = Counter((each["kind"], _reason(each["unusable"])) for each in records if "unusable" in each)
    for (kind, reason), number in unusable.most_common():
        print(f"not usable, {kind}: {number} models: {reason}")
    for record in ran:
        if not record["equal"]:
            print("different:", {key: value for key, value in record.items() if key != "classes"})
    for record in records:
        if "failed" in record:
            print("not built, or no cache:", record["model"], record["failed"])


def _reason(text: str) -> str:
    """The first sentence of an error, without the figures in it."""
    return re.sub(r"\d+", "N", text.partition(". ")[0])[:120]


if __name__ == "__main__":
    main()
