"""The cache of a model: what its forward returns and takes back with the next token, and the bytes it holds.

Nothing is read from a configuration. The cache is found by name, in the result of a forward and among its arguments,
and its bytes are the bytes of the tensors in it.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from modelsummary.capture.containers import tensors_of
from modelsummary.capture.modules import modules_of, tensors_in_attributes
from modelsummary.errors import InputError, close_to
from modelsummary.extras import needs
from modelsummary.operators.tensor_bytes import inner_tensors, nbytes_of

__all__ = ["CACHES", "CacheBytes", "MakeCache", "bytes_of_cache", "cache_in", "cache_maker", "parameters_of"]

MakeCache = Callable[[nn.Module, int], Any]
"""Function from the model and the number of tokens to an empty cache."""

CACHES = ("dynamic", "static", "fp8", "quanto")
_QUANTISED = ("fp8", "quanto")  # hqq decides by values when to end its search
# Names under which a forward that returns a tuple takes its last item back.
_USUAL_NAMES = ("past_key_values", "cache", "kv_cache", "caches", "past", "state", "states", "hx")


class CacheBytes(NamedTuple):
    """The bytes of a cache.

    Attributes:
        nbytes: bytes of its tensors; a view counts its own elements. Counters without dimensions do not count.
        held_bytes: bytes of the storages behind them: after a prompt, a sliding window is a view of all its keys.
        layers: class of a cache's layer -> number of layers; the class of the cache itself if it has no layers.
    """

    nbytes: int
    held_bytes: int
    layers: dict[str, int]


def parameters_of(model: nn.Module) -> frozenset[str]:
    """Return the names of the arguments of a model's forward.

    >>> sorted(parameters_of(nn.Linear(2, 3)))
    ['input']
    """
    return frozenset(inspect.signature(model.forward).parameters)


def cache_maker(cache: str | MakeCache | None) -> MakeCache | None:
    """Return the function that makes an empty cache; None if the model makes its own.

    Args:
        cache: ``"dynamic"``, ``"static"``, or the backend of a quantised cache of transformers: ``"fp8"``,
            ``"quanto"``; a function from model and number of tokens to a cache; None.

    Raises:
        InputError: the name is unknown.
    """
    if cache is None or (callable(cache) and not isinstance(cache, str)):
        return cache
    if cache not in CACHES:
        options = ", ".join(map(repr, CACHES))
        raise InputError(f"cache must be {options}, a function or None, got {cache!r:.80}{close_to(cache, CACHES)}")
    name = str(cache)

    def make(model: nn.Module, context: int) -> Any:
        config: Any = getattr(model, "config", None)
        if config is None:
            raise InputError(f"cache={name!r} is for models of transformers; pass a function that makes the cache")
        has_encoder = getattr(config, "is_encoder_decoder", False)
        if has_encoder and name in _QUANTISED:
            raise InputError(f"cache={name!r} is for decoders without an encoder; pass cache='dynamic' or 'static'")
        with needs("transformers", "transformers"):
            import transformers
        try:
            if name in _QUANTISED:
                quantised: Any = transformers.QuantizedCache(backend=name, config=config)
                if name == "quanto":
                    for layer in quantised.layers:
                        layer._quantize = partial(_packed, layer._quantize)
                return quantised
            if name == "static":
                decoder_cache: Any = transformers.StaticCache(config=config, max_cache_len=context)
            else:
                decoder_cache = transformers.DynamicCache(config=config)
        except (ImportError, ValueError) as error:  # a missing library, or a model whose layers it does not take
            version = f"transformers {transformers.__version__}"
            raise InputError(f"cache={name!r} cannot be made by {version}: {error}") from error
        if has_encoder:
            return transformers.EncoderDecoderCache(decoder_cache, transformers.DynamicCache(config=config))
        return decoder_cache

    return make


def _packed(quantize: Callable[[Tensor, int], Any], tensor: Tensor, axis: int) -> Any:
    """Return what ``quantize`` makes of a tensor, with several elements in a byte.

    Quanto packs the elements of plain tensors only, and those on shapes have a type of their own.
    """
    from optimum.quanto.tensor.packed import PackedTensor

    try:
        quantised = quantize(tensor, axis)
    except ValueError as error:  # its groups do not divide the keys and values
        raise InputError(
            f"cache='quanto' cannot hold keys of shape {list(tensor.shape)}: {error}; pass a function that makes a "
            "QuantizedCache with another q_group_size"
        ) from error
    if type(quantised._data) is not PackedTensor:
        quantised._data = PackedTensor.pack(quantised._data, quantised.qtype.bits)
    return quantised


def cache_in(output: Any, parameters: Iterable[str]) -> tuple[str, Any] | None:
    """Return the cache in a result, with the name under which the forward takes it back; None if there is none.

    Args:
        output: result of the forward. Of a mapping or an object, the fields that are also arguments are the cache; of a
            tuple, the last item, if an argument has one of the usual names.
        parameters: names of the arguments of the forward.

    >>> import torch
    >>> name, cache = cache_in({"logits": torch.ones(1), "state": [torch.ones(2)]}, {"input_ids", "state"})
    >>> name, len(cache)
    ('state', 1)
    """
    names = frozenset(parameters)
    if isinstance(output, Mapping):
        fields: Mapping[str, Any] = output
    elif isinstance(output, Sequence) and not isinstance(output, (str, Tensor)):
        usual = [name for name in _USUAL_NAMES if name in names]
        fields = {usual[0]: output[-1]} if usual and len(output) > 1 else {}
    else:
        fields = getattr(output, "__dict__", {})
    for name, value in fields.items():
        if name in names and not isinstance(value, Tensor) and next(tensors_of(value), None) is not None:
            return name, value
    return None


def bytes_of_cache(
    cache: Any, model: nn.Module, before: frozenset[int], storage_of: Callable[[Tensor], tuple[int, int]]
) -> tuple[CacheBytes, int]:
    """Return the bytes of a cache, and of the states that the forward left in attributes of modules.

    Args:
        cache: the cache.
        model: the model after the forward.
        before: ids of the tensors in attributes of its modules before the forward.
        storage_of: returns the bytes of the storage behind a tensor, and how often it counts.

    Returns:
        The bytes, and the bytes of storages that each count once.
    """
    left = [tensor for tensor in tensors_in_attributes(modules_of(model)) if id(tensor) not in before]
    layers = _layers(cache)
    if any(tensor.dim() for tensor in left):
        layers["module attribute"] = sum(tensor.dim() > 0 for tensor in left)
    by_storage: dict[int, tuple[int, int, int]] = {}  # storage -> bytes of tensors in it, its own, how often it counts
    for tensor in {id(tensor): tensor for tensor in (*tensors_of(cache), *left)}.values():
        for inner in inner_tensors(tensor) if tensor.dim() else ():
            storage = inner.untyped_storage()._cdata
            viewed, *_ = by_storage.get(storage, (0, 0, 0))
            by_storage[storage] = viewed + nbytes_of(inner), *storage_of(inner)
    nbytes = sum(times * min(viewed, whole) for viewed, whole, times in by_storage.values())
    held_bytes = sum(times * whole for _, whole, times in by_storage.values())
    return CacheBytes(nbytes, held_bytes, layers), sum(whole for _, whole, _ in by_storage.values())


def _layers(cache: Any) -> dict[str, int]:
    """Return the class of each layer of a cache, with the number of layers."""
    parts = [getattr(cache, name, None) for name in ("self_attention_cache", "cross_attention_cache")]
    if all(part is not None for part in parts):
        return dict(Counter(_layers(parts[0])) + Counter(_layers(parts[1])))
    layers = getattr(cache, "layers", None)
    if isinstance(layers, (list, tuple)) and layers:
        return dict(Counter(type(layer).__name__ for layer in layers))
    return {type(cache).__name__: 1}
