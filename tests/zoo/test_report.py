"""The pages of the gate, from results written by hand."""

from __future__ import annotations

from tests.zoo.report import exceptions_page, kinds_of, reasons_of


def _result(model, **checks):
    checks = {name: {"verdict": verdict, "reason": reason} for name, (verdict, reason) in checks.items()}
    return {"library": "ours", "model": model, "built": True, "checks": checks}


RESULTS = [
    _result("a", trace=("yes", ""), meta=("refused", "needs values: aten.nonzero needs the values of a tensor")),
    _result("b", trace=("refused", "the model calls 'x', which assigns its attribute 'scales'"), meta=("yes", "")),
    _result("c", trace=("refused", "the model calls 'x', which assigns its attribute 'scales'"), meta=("no", "boom")),
    {"library": "ours", "model": "d", "error": "ImportError: requires natten", "checks": {}},
]


def test_kinds_of_reasons():
    assert kinds_of(reasons_of(RESULTS)) == [
        ["built", "a library is missing", "1"],
        ["trace", "a module changes an attribute while it runs", "2"],
        ["meta", "the forward needs values of a tensor", "1"],
        ["meta", "an error of the model, or of its configuration", "1"],
    ]


def test_every_model_is_listed_with_its_reason():
    lines = exceptions_page(reasons_of(RESULTS)).splitlines()
    assert "## trace: 2" in lines
    assert "- ours b, ours c: `refused: the model calls 'x', which assigns its attribute 'scales'`" in lines
    assert "- ours c: `boom`" in lines
