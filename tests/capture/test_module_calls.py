"""Wrappers of ``nn.Module.__call__`` nest, and leave nothing behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from modelsummary.capture.module_calls import calls_wrapped, unwrap_calls, wrap_calls

ORIGINAL = nn.Module.__call__


def logging_to(log, name):
    def wrapper(call_module):
        def call(module, *args, **kwargs):
            log.append(name)
            return call_module(module, *args, **kwargs)

        return call

    return wrapper


def test_the_latest_wrapper_is_the_outermost():
    log = []
    with calls_wrapped(logging_to(log, "first")), calls_wrapped(logging_to(log, "second")):
        nn.Identity()(1)
    assert log == ["second", "first"]
    assert nn.Module.__call__ is ORIGINAL


def test_owners_leave_in_any_order():
    log = []
    wrap_calls("a", logging_to(log, "a"))
    wrap_calls("b", logging_to(log, "b"))
    wrap_calls("a", logging_to(log, "again"))
    unwrap_calls("a")
    nn.Identity()(1)
    unwrap_calls("b")
    unwrap_calls("b")
    assert log == ["b"]
    assert nn.Module.__call__ is ORIGINAL


def test_an_exception_leaves_no_wrapper():
    with pytest.raises(ValueError, match="stop"), calls_wrapped(logging_to([], "")):
        raise ValueError("stop")
    assert nn.Module.__call__ is ORIGINAL


def test_a_wrapper_of_somebody_else_stays():
    log = []
    theirs = logging_to(log, "theirs")(ORIGINAL)
    nn.Module.__call__ = theirs
    try:
        with calls_wrapped(logging_to(log, "ours")):
            nn.Linear(1, 1)(torch.ones(1, 1))
        assert nn.Module.__call__ is theirs
    finally:
        nn.Module.__call__ = ORIGINAL
    assert log == ["ours", "theirs"]
