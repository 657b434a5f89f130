"""Where contexts end, predicted and real: tables of learned positions, masks, checks, and caches written by hand.

    python benchmarks/contexts.py [--filter gpt2]

Small models that accept 150 tokens, or any number. ``stats.serving`` says which context is the longest. Then the model
runs for real: a prompt and one token with the longest context, which must work, and with one token more, which must
fail where the model limits it. The bytes of the cache are compared with the tensors in the real one at three lengths.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.caches import LENGTHS, real_bytes
from modelsummary import InputError, Statistics
from modelsummary.serving.cache import cache_in
from modelsummary.serving.request import request_of
from modelsummary.serving.run import Encoded, run_request
from tests.serving.models import Decoder, Recurrent, TupleDecoder

END, BATCH = 150, 2
IDS = torch.zeros(1, 8, dtype=torch.long)
Make = Callable[[], nn.Module]


def models() -> dict[str, tuple[Make, dict[str, torch.Tensor]]]:
    """Name -> function that makes a model, and an input."""
    import transformers as hf

    gpt: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 50, "n_positions": END}
    usual: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50}
    pair: dict[str, Any] = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4}
    pair |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 60}
    ends, ids = {"max_position_embeddings": END}, {"input_ids": IDS}
    speech = {"max_source_positions": 50, "max_target_positions": END, "num_mel_bins": 16, "decoder_start_token_id": 1}
    speech |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    t5 = {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 4, "d_kv": 8, "vocab_size": 50}
    local: dict[str, Any] = {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}
    window: dict[str, Any] = {**usual, "intermediate_size": 64, "num_key_value_heads": 2, "sliding_window": 24}
    both = {"input_ids": torch.zeros(1, 20, dtype=torch.long), "decoder_input_ids": IDS}
    opt = {**usual, "ffn_dim": 64, "word_embed_proj_dim": 32}
    neo = {"hidden_size": 32, "vocab_size": 50, "window_size": 24, **local}
    sound = {"input_features": torch.zeros(1, 16, 100), "decoder_input_ids": IDS}
    return {
        "GPT-2": (lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**gpt)), ids),
        "GPT-J": (lambda: hf.GPTJForCausalLM(hf.GPTJConfig(**gpt, rotary_dim=8)), ids),
        "CodeGen": (lambda: hf.CodeGenForCausalLM(hf.CodeGenConfig(**gpt, rotary_dim=8)), ids),
        "OPT": (lambda: hf.OPTForCausalLM(hf.OPTConfig(**opt, **ends)), ids),
        "GPT-Neo": (lambda: hf.GPTNeoForCausalLM(hf.GPTNeoConfig(**neo, **ends)), ids),
        "BioGPT": (lambda: hf.BioGptForCausalLM(hf.BioGptConfig(**usual, intermediate_size=64, **ends)), ids),
        "BART": (lambda: hf.BartForConditionalGeneration(hf.BartConfig(**pair, **ends)), both),
        "Whisper": (lambda: hf.WhisperForConditionalGeneration(hf.WhisperConfig(**pair, **speech)), sound),
        "T5": (lambda: hf.T5ForConditionalGeneration(hf.T5Config(**t5, decoder_start_token_id=0)), both),
        "Mistral, window of 24": (lambda: hf.MistralForCausalLM(hf.MistralConfig(**window)), ids),
        "by hand, table of positions": (lambda: Decoder(layers=2, positions=END), {"ids": IDS}),
        "by hand, sliced table, tuples": (lambda: TupleDecoder(END), {"ids": IDS}),
        "by hand, window of 16": (lambda: Decoder(layers=2, window=16), {"ids": IDS}),
        "by hand, recurrent": (Recurrent, {"ids": IDS}),
    }


def real_cache(model: nn.Module, request: Any, context: int) -> int:
    """Run prompts and one token for real; return the bytes of the cache. Raises the error of the model."""
    kwargs = {
        name: torch.ones(value.shape, dtype=value.dtype) if hasattr(value, "shape") else value
        for name, value in request.prompt(BATCH, context - 1).kwargs.items()
    }
    with torch.no_grad():
        out = model(**kwargs)
        name, cache = cache_in(out, request.parameters) or ("", None)
        encoded = getattr(out, "encoder_last_hidden_state", None)
        more = {} if encoded is None else {"encoder_outputs": Encoded((encoded,))}
        token = torch.ones(BATCH, 1, dtype=torch.long)
        out = model(**{request.tokens: token, name: cache, **more, **request.flags})
    found = cache_in(out, request.parameters)
    first = next(each for each in (out.values() if isinstance(out, dict) else out) if isinstance(each, torch.Tensor))
    if found is None or not first.numel():
        raise RuntimeError("the result is empty")
    return real_bytes(found[1])


def row(name: str, make: Make, inputs: dict[str, torch.Tensor]) -> list[str]:
    """Return the row of the table for a model."""
    torch.manual_seed(0)
    model = make().eval()
    stats = Statistics(model, inputs)
    request = request_of(stats.live)
    predicted = [run_request(model, request, BATCH, each)[1].cache.nbytes for each in LENGTHS]
    real = [real_cache(model, request, each) for each in LENGTHS]
    found = stats.serving(LENGTHS[0], device="A100", batches=[1])
    cells = [name, "equal" if predicted == real else f"{predicted} for {real}"]
    cells += [f"{found.max_context:,}", found.max_context_limited_by]
    if found.max_context_limited_by != "model":
        return [*cells, "", ""]
    return [*cells, *(_runs(model, request, found.max_context + more) for more in (0, 1))]


def _runs(model: nn.Module, request: Any, context: int) -> str:
    try:
        real_cache(model, request, context)
    except Exception as error:
        return type(error).__name__
    return "runs"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--filter", default="")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rows = []
    for name, (make, inputs) in models().items():
        if options.filter.lower() in name.lower():
            try:
                rows.append(row(name, make, inputs))
            except InputError as error:
                rows.append([name, f"refused: {error}"[:120], "", "", "", ""])
            print(rows[-1], file=sys.stderr, flush=True)
    headers = ["model", "cache bytes", "longest context", "limited by", "with it", "with one token more"]
    print(tabulate(rows, headers, disable_numparse=True))


if __name__ == "__main__":
    main()
