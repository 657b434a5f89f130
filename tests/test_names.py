"""One name means one thing: names of files, folders and classes."""

from __future__ import annotations

import ast
from collections import Counter

from tests.sources import PACKAGE, parsed

# Files of these names do the same for the model, or the figures, of their own room.
IN_SEVERAL_ROOMS = {
    "applying": "applies a plan to a model",
    "devices": "named devices, and those of a model and this machine",
    "estimate": "estimated figures as plain data",
    "fit": "what fits into the memory of a device",
    "inputs": "the inputs that a user passes",
    "known_values": "values of small tensors that decide on sizes",
    "measure": "measures a figure",
    "memory": "bytes, by what they hold",
    "onnx": "ONNX models",
    "plan": "how a model is spread over devices",
    "predict": "predicts a figure",
    "run": "runs a model",
    "runs": "several runs of a model",
    "statistics": "the statistics of a model",
    "step": "a training step",
    "weights": "the weights in a file",
}


def _repeated(names: list[str]) -> set[str]:
    return {name for name, count in Counter(names).items() if count > 1}


def test_a_file_name_is_used_once_or_for_the_same_thing():
    files = [path.stem for path in PACKAGE.rglob("*.py") if not path.stem.startswith("__")]
    folders = [path.parent.name for path in PACKAGE.rglob("__init__.py")]
    assert _repeated(files + folders) == IN_SEVERAL_ROOMS.keys()


def test_a_class_name_is_used_once():
    nodes = (node for tree in parsed().values() for node in ast.walk(tree))
    assert _repeated([node.name for node in nodes if isinstance(node, ast.ClassDef) and node.name[0] != "_"]) == set()
