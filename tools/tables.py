"""Write docs/tables.md: the printed tables of five large models, as anyone gets them. ``--check`` compares instead.

python tools/tables.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from torch import nn

from modelsummary import Statistics
from modelsummary.capture.input_data import Dtypes
from modelsummary.cli.sources import build_model

PAGE = Path(__file__).parents[1] / "docs/tables.md"
MOST_LINES, MOST_COLUMNS = 60, 120

_LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}


def _from_torchvision(name: str) -> Callable[[], nn.Module]:
    return lambda: build_model(f"torchvision:{name}", {}, with_values=False).model


def _llama() -> nn.Module:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**_LLAMA, use_cache=False))


def _unet() -> nn.Module:
    import segmentation_models_pytorch

    model: nn.Module = segmentation_models_pytorch.Unet("resnet34", encoder_weights=None, classes=2)
    return model


# title, how it is made, the model, its input, dtypes
MODELS: dict[str, tuple[str, Callable[[], nn.Module], tuple[int, ...], Dtypes]] = {
    "ResNet-152": (
        "Statistics(torchvision.models.resnet152(), (1, 3, 224, 224))",
        _from_torchvision("resnet152"),
        (1, 3, 224, 224),
        None,
    ),
    "ViT-L/16": (
        "Statistics(torchvision.models.vit_l_16(), (1, 3, 224, 224))",
        _from_torchvision("vit_l_16"),
        (1, 3, 224, 224),
        None,
    ),
    "Llama 3 8B": (
        'Statistics(transformers.LlamaForCausalLM(config), (1, 2048), dtypes="long")  # the sizes of Llama 3 8B',
        _llama,
        (1, 2048),
        "long",
    ),
    "EfficientNetV2-L": (
        "Statistics(torchvision.models.efficientnet_v2_l(), (1, 3, 480, 480))",
        _from_torchvision("efficientnet_v2_l"),
        (1, 3, 480, 480),
        None,
    ),
    "U-Net": (
        'Statistics(segmentation_models_pytorch.Unet("resnet34", classes=2), (1, 3, 256, 256))',
        _unet,
        (1, 3, 256, 256),
        None,
    ),
}

_HEAD = """\
# The tables of large models

`print(stats)` folds a table of more than 100 rows: equal siblings are one row, rows show totals, and as many levels are
shown as make 40 rows. `stats.table(depth=None, fold=False)` prints every row, `stats.table(sort="macs")` the most
expensive ones first. `python tools/tables.py` writes this page.
"""


def page() -> str:
    """Return the page. Raise ``ValueError`` if a table does not fit."""
    parts = [_HEAD]
    for name, (code, make, size, dtypes) in MODELS.items():
        table = str(Statistics(make().eval(), size, dtypes=dtypes))
        lines = table.splitlines()
        if len(lines) > MOST_LINES or max(map(len, lines)) > MOST_COLUMNS:
            raise ValueError(f"the table of {name} has {len(lines)} lines of up to {max(map(len, lines))} columns")
        parts.append(f"## {name}\n\n```python\n{code}\n```\n\n```text\n{table}\n```\n")
    return "\n".join(parts)


def main() -> None:
    """Write the page, or compare it with ``--check``."""
    text = page()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text, encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != text:
        sys.exit("docs/tables.md is old: run python tools/tables.py")


if __name__ == "__main__":
    main()
