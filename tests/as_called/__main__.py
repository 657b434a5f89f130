"""Write docs/as_called.md: ``python -m tests.as_called``."""

from __future__ import annotations

import sys
import warnings

from tests.as_called.page import PAGE, page
from tests.as_called.run import answers_of
from tests.as_called.ways import WAYS

warnings.simplefilter("ignore")
found = {}
for title in WAYS:
    found[title] = answers_of(title)
    sys.stderr.write(f"{title}\n")
PAGE.write_text(page(found), encoding="utf-8")
