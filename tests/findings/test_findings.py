"""The result of a check: order, choice of rules, table, JSON, SARIF, the page of the docs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from modelsummary import InputError, ModelStatistics, Statistics, StepError
from modelsummary.cli import run
from modelsummary.errors import NotLiveError, RegistrationError
from modelsummary.findings import RULES
from modelsummary.findings.ruleset import rule
from modelsummary.views.explorer.data import Explored, model_data
from tests.findings.page import PAGE, with_table
from tests.findings.planted import IMAGES, TEXT, Block, Images

USUAL = sorted(code for code, rule in RULES.items() if not rule.on_request)


class Messy(nn.Module):
    """A model with several defects."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(lambda _, x: torch.sigmoid(x) + torch.sigmoid(x)) for _ in range(3))
        self.spare, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture(scope="module")
def findings():
    return Statistics(Messy(), TEXT).check()


def test_errors_come_first_then_what_costs_most(findings):
    assert [finding.code for finding in findings] == ["U201", "G101", "R301", "R301", "R301"]
    assert [finding.fqn for finding in findings[2:]] == ["blocks.0", "blocks.1", "blocks.2"]
    assert findings.step_seconds > sum(finding.seconds for finding in findings) > 0


def test_equal_findings_are_one_line(findings):
    text = str(findings)
    (line,) = [line for line in text.splitlines() if line.startswith("R301  ")]
    assert "blocks.0, ..., blocks.2 (test_findings.py:" in line
    assert line.split()[line.split().index("3")] == "3"
    assert "R301: compute it once and pass it on" in text
    assert f"{len(USUAL)} rules on a training step; times on A100 80GB" in text


def test_rules_are_selected_and_ignored():
    stats = Statistics(Messy(), TEXT)
    assert {finding.code for finding in stats.check(select="U")} == {"U201"}
    assert {finding.code for finding in stats.check(select=["U", "computed-twice"])} == {"U201", "R301"}
    assert {finding.code for finding in stats.check(select=["U", "R301"], ignore="module-never-runs")} == {"R301"}
    assert set(stats.check(ignore="R").rules) == {code for code in USUAL if not code.startswith("R")}
    for wrong in ("X", "", "U2O1"):
        with pytest.raises(InputError, match="select takes codes of rules"):
            stats.check(select=wrong)
    with pytest.raises(InputError, match="ignore takes codes of rules, their beginnings or names, got 3"):
        stats.check(ignore=3)
    with pytest.raises(InputError, match="did you mean 'computed-twice'"):
        stats.check(ignore="computed-twic")


def test_json(findings):
    facts = json.loads(findings.to_json())
    assert list(facts["rules"]) == USUAL
    assert facts["findings"] == findings.to_records()
    assert facts["mode"] == "train"
    assert len(findings.to_pandas()) == len(findings)


def test_sarif(findings):
    """The fields that the schema of SARIF 2.1.0 requires, and what it says of their values."""
    log = json.loads(findings.to_sarif())
    assert log["version"] == "2.1.0"
    (checked,) = log["runs"]
    driver = checked["tool"]["driver"]
    assert driver["name"] == "modelsummary"
    assert [rule["id"] for rule in driver["rules"]] == USUAL
    assert all(rule["shortDescription"]["text"] for rule in driver["rules"])
    for result in checked["results"]:
        assert driver["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["level"] in ("none", "note", "warning", "error")
        assert result["message"]["text"]
        (location,) = result["locations"]
        assert location["logicalLocations"][0]["fullyQualifiedName"]
        place = location["physicalLocation"]  # without it, GitHub refuses the log
        assert place["artifactLocation"]["uri"].endswith("tests/findings/test_findings.py")
        assert place["region"]["startLine"] > 0
    forward = Messy.forward.__code__.co_firstlineno
    places = {result["ruleId"]: result["locations"][0]["physicalLocation"] for result in checked["results"]}
    lines = {(code, place["region"]["startLine"]) for code, place in places.items()}
    assert {line for code, line in lines if code != "R301"} == {forward}
    assert forward not in {line for code, line in lines if code == "R301"}


def test_what_a_project_has_accepted_is_left_out(findings, tmp_path: Path):
    path = tmp_path / "accepted.json"
    path.write_text(findings.to_json())
    assert list(findings.since(path)) == list(findings.since(findings)) == []
    assert "5 findings of an earlier check left out" in str(findings.since(path))
    model = Messy()
    model.blocks.append(Block(lambda _, x: torch.sigmoid(x) + torch.sigmoid(x)))
    model.other = nn.Parameter(torch.ones(2))
    new = Statistics(model, TEXT).check().since(path)
    assert [(finding.code, finding.fqn) for finding in new] == [("G101", ""), ("R301", "blocks.3")]
    no_text = '{"findings": [{"code": ["G101"], "fqn": "", "what": ""}]}'
    for text in ("", "[]", '{"findings": 3}', '{"findings": [{"code": "G101"}]}', no_text):
        path.write_text(text)
        with pytest.raises(InputError, match=r"expected a file of findings in JSON, got .*accepted"):
            findings.since(path)
    with pytest.raises(InputError, match="expected a file of findings"):
        findings.since(tmp_path / "none.json")


def test_other_steps_and_devices():
    stats = Statistics(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), IMAGES)
    slow, fast = stats.check("T4"), stats.check("H100")
    assert slow[0].seconds > fast[0].seconds
    with pytest.raises(InputError, match="no accelerator 'A10000'"):
        stats.check("A10000")
    with pytest.raises(InputError, match="unknown option 'losss' of a step"):
        stats.check(losss=None)
    with pytest.raises(NotLiveError):
        Statistics(nn.Linear(2, 2)).check()


@pytest.mark.parametrize("loss", [lambda output: output.nothing, lambda output: output])
def test_a_wrong_loss_raises(loss):
    with pytest.raises((InputError, StepError), match="loss"):
        Statistics(Block(), TEXT).check(loss=loss)


def test_a_forward_that_fails_without_gradients_too_raises():
    class Fickle(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.ok = nn.Linear(64, 8), True

        def forward(self, x):
            assert self.ok
            return self.fc(x)

    model = Fickle()
    stats = Statistics(model, TEXT)
    model.ok = False
    with pytest.raises(StepError, match="the forward of the step failed"):
        stats.check()


def test_a_rule_is_registered_once():
    with pytest.raises(RegistrationError, match="registered already"):
        rule("G101", "another")(lambda _: [])
    with pytest.raises(RegistrationError, match="registered already"):
        rule("G999", "computed-twice")(lambda _: [])


def test_the_command(capsys, tmp_path: Path):
    options = ["check", "torch.nn:Linear", "--kwargs", '{"in_features": 2, "out_features": 3}', "--input", "4,2"]
    assert run(options) == 0
    assert "No findings" in capsys.readouterr().out
    model = ["check", f"{__file__}:Messy", "--input", "4,16,64"]
    assert run(model) == 1
    assert "spare" in capsys.readouterr().out
    assert run([*model, "--select", "R302,D"]) == 0
    path = tmp_path / "log.sarif"
    assert run([*model, "--ignore", "R,G", "--format", "sarif", "--output", str(path)]) == 1
    assert [result["ruleId"] for result in json.loads(path.read_text())["runs"][0]["results"]] == ["U201"]
    accepted = str(tmp_path / "accepted.json")
    assert run([*model, "--format", "json", "--output", accepted]) == 1
    assert run([*model, "--baseline", accepted]) == 0
    assert run([*model, "--baseline", accepted, "--format", "json", "--output", accepted]) == 2
    assert "would replace the accepted findings" in capsys.readouterr().err
    assert run([*model, "--baseline", accepted]) == 0
    capsys.readouterr()
    assert run([*model, "--select", "nope"]) == 2
    assert "select takes codes of rules" in capsys.readouterr().err
    assert run(model[:2]) == 2
    assert "needs an --input" in capsys.readouterr().err


def test_the_page_is_up_to_date():
    text = PAGE.read_text(encoding="utf-8")
    assert with_table(text) == text, "run python -m tests.findings"


def test_a_sound_model_prints_that_nothing_was_found():
    assert str(Statistics(Images(), IMAGES).check()).startswith("No findings in Images, [4, 3, 32, 32], float32: ")


def test_the_rows_have_the_codes():
    """Equal rows that are shown once have the codes of all, and a row whose children are hidden has theirs."""
    model = nn.Sequential(Messy(), nn.Conv1d(16, 16, 1))
    stats = Statistics(model, TEXT)
    assert stats[""].findings is None
    assert "findings is not known yet: call stats.check()" in stats.table(columns=["findings"])
    stats.check()
    codes = {row["fqn"]: row["findings"] for row in stats.to_records(columns=["fqn", "findings"])}
    assert (codes["0"], codes["0.spare"], codes["0.blocks.2"], codes["1"]) == ("G101", "U201", "R301", "")
    assert stats.to_records(columns=["fqn", "findings"], depth=1)[1]["findings"] == "G101, R301, U201"
    (line,) = [line for line in stats.table(columns=["findings"], fold=True).splitlines() if "3 x Block" in line]
    assert line.split()[-1] == "R301"
    stats.check(select="U")
    assert stats["0"].findings == ""


def test_marks_are_stored_and_explored():
    stats = Statistics(Messy(), TEXT)
    assert '"findings"' not in stats.to_json()
    assert ModelStatistics.from_json(stats.to_json())[""].findings is None
    stats.check()
    assert ModelStatistics.from_json(stats.to_json())["blocks.1"].findings == "R301"
    data = model_data(Explored(stats.root))
    marks = [data["texts"][place] for place in data["groups"]["Findings"]]
    names = [data["texts"][place] for place in data["nodes"]["name"]]
    assert dict(zip(names, marks, strict=True))["spare"] == "U201"
