"""Write docs/operators.md: ``python -m tests.operators``. It runs the fixed models of the gate."""

from __future__ import annotations

import importlib
import sys
import warnings

from tests.operators.page import PAGE, page
from tests.zoo.catalogues import CATALOGUES
from tests.zoo.checks import statistics
from tests.zoo.fixed import FIXED
from tests.zoo.test_kernels import operators_of

warnings.simplefilter("ignore")
names: set[str] = set()
for library, models in FIXED.items():
    for model in models:
        names |= operators_of(statistics(importlib.import_module(CATALOGUES[library]).make(model)))
        sys.stderr.write(f"{library} {model}\n")
PAGE.write_text(page(names), encoding="utf-8")
