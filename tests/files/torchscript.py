"""TorchScript files for tests, and what running them in this process gives."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch

from modelsummary.files.statistics import FileStatistics
from modelsummary.files.torch.script_record import recorded


def scripted(model, path, x=None):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated, and says so in many ways
        script = torch.jit.script(model) if x is None else torch.jit.trace(model, x, check_trace=False)
        torch.jit.save(script, path)
    return path


def run_here(path, *sizes, **dtypes):
    """What ``load(path, sizes, run=True)`` gives, without the seconds that another process takes."""
    given = dict(enumerate(sizes))
    kinds = {number: each.dtype for number, each in given.items() if isinstance(each, torch.Tensor)}
    plain = {number: list(each.shape) if number in kinds else list(each) for number, each in given.items()}
    return FileStatistics(recorded(str(path), plain, kinds), Path(path))
