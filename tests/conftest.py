"""Skip what this machine cannot run."""

from __future__ import annotations

import pytest
import torch

pytest.register_assert_rewrite("tests.untouched")


def pytest_collection_modifyitems(items):
    if not torch.accelerator.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs an accelerator"))
