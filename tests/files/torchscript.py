"""TorchScript files for tests, and what interpreting them gives."""

from __future__ import annotations

import warnings

import torch

from modelsummary import load


def scripted(model, path, x=None):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated, and says so in many ways
        script = torch.jit.script(model) if x is None else torch.jit.trace(model, x, check_trace=False)
        torch.jit.save(script, path)
    return path


def run_here(path, *sizes):
    """The statistics of the module in a file on inputs of these sizes, or of the sizes of tensors."""
    return load(path, list(sizes), run=True)
