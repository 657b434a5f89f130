"""The table of docs/agents.md: the keys of the JSON that the commands print, from running them."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from modelsummary.cli import run

PAGE = Path(__file__).parents[2] / "docs/agents.md"
_HEADERS = ("Command", "Exit status", "Part", "Keys")
_MODEL = """\
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
        self.unused = nn.Linear(16, 16)

    def forward(self, x):
        return self.layers(x)
"""
_SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
_CONFIG = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2, **_SIZES}
_SERVE = "serve-plan hf:config.json --device A100 --context 256 --dtype bfloat16"
_RUNS = [  # arguments, and the parts of the document that have keys of their own
    ("net.py:Net --input 8,16 --memory adamw --split 2", ("", "rows[]", "memory", "stages[]")),
    ("net.py:Net --input 8,16 --max-params 1", ()),
    ("check net.py:Net --input 8,16", ("", "findings[]")),
    ("compare net.py:Net net.py:Net --input 8,16", ("", "forms[]")),
    ("plan hf:config.json --input input_ids=1,16:long --device A100 --nodes 1 --batch 8 --limit 3", ("[]",)),
    (_SERVE, ("", "throughput[]")),
    (f"{_SERVE} --prompt 32 --new-tokens 16 --rate 1 --requests 10", ("load[]",)),
    (f"{_SERVE} --prompt 32 --new-tokens 16 --requests 10 --ttft 500 --devices 1", ("load[]",)),
    ("net.py:Missing --input 8,16", ()),
]


def with_table(text: str) -> str:
    """Return the text of the page with the table as it is to be."""
    lines = text.splitlines()
    begin = lines.index(f"| {' | '.join(_HEADERS)} |")
    end = next(index for index in range(begin, len(lines)) if not lines[index].startswith("|"))
    rows = [_HEADERS, ("---",) * len(_HEADERS), *_rows()]
    lines[begin:end] = [f"| {' | '.join(row)} |".replace("  |", " |") for row in rows]
    return "\n".join(lines) + "\n"


def _rows() -> Iterator[tuple[str, str, str, str]]:
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            Path("net.py").write_text(_MODEL, encoding="utf-8")
            Path("config.json").write_text(json.dumps(_CONFIG), encoding="utf-8")
            for arguments, parts in _RUNS:
                status = run([*arguments.split(), "--format", "json", "--output", "document.json"])
                command = f"`modelsummary {arguments}`"
                if not parts:
                    yield command, str(status), "", ""
                document = json.loads(Path("document.json").read_text(encoding="utf-8")) if parts else None
                for part in parts:
                    yield command, str(status), f"`{part}`" if part else "", _keys(document, part)
                    command = ""
        finally:
            os.chdir(before)


def _keys(document: Any, part: str) -> str:
    name = part.removesuffix("[]")
    value = document[name] if name else document
    return ", ".join(f"`{key}`" for key in (value[0] if part.endswith("[]") else value))
