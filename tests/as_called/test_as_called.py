"""Every way of calling x every feature: the answer is right, or is refused with a reason; the model stays untouched."""

from __future__ import annotations

import pytest
import torch

from tests.as_called.features import FEATURES, UNTOUCHED, WRONG
from tests.as_called.known import KNOWN
from tests.as_called.page import PAGE, marks, marks_of_page
from tests.as_called.run import answers_of
from tests.as_called.ways import WAYS

QUICK = {"keyword-only forward", "dataclass", "inference_mode around", "frozen backbone", "on meta", "FSDP1", "lazy"}
OLD = torch.torch_version.TorchVersion(torch.__version__) < "2.10"
slow = pytest.mark.slow


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("title", [title if title in QUICK else pytest.param(title, marks=slow) for title in WAYS])
def test_as_called(title):
    found = answers_of(title)
    wrong = {name: answer.text for name, answer in found.items() if answer.verdict == WRONG}
    known = {name for way, name in KNOWN if way == title}
    assert {name: text for name, text in wrong.items() if name not in known} == {}
    assert known <= wrong.keys(), "holds now: take it out of KNOWN in tests/as_called/known.py"
    if not OLD:
        page = marks_of_page(PAGE.read_text(encoding="utf-8"))
        assert page[title] == marks(found), "python -m tests.as_called writes the page again"


def test_the_page_has_every_way():
    assert list(marks_of_page(PAGE.read_text(encoding="utf-8"))) == list(WAYS)
    assert {name for _, name in KNOWN} <= {*FEATURES, UNTOUCHED}
    assert {title for title, _ in KNOWN} | QUICK <= WAYS.keys()
