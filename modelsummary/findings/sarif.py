"""Findings as a log in SARIF 2.1.0, the format in which tools of static analysis report.

The OASIS standard defines the fields: https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

__all__ = ["sarif_log"]

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def sarif_log(
    records: Iterable[Mapping[str, Any]],
    rules: Mapping[str, tuple[str, str]],
    lines_around: Mapping[str | None, tuple[str, int]] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return a log of one run.

    Args:
        rules: code -> name and meaning of each rule that was asked.
        lines_around: FQN -> file and line to report for findings without a line: GitHub refuses a log in which a result
            has none.

    >>> sarif_log([], {"G101": ("parameter-never-used", "A trained parameter.")})["runs"][0]["results"]
    []
    """
    positions = {code: position for position, code in enumerate(rules)}
    described = [
        {"id": code, "name": name, "shortDescription": {"text": meaning}} for code, (name, meaning) in rules.items()
    ]
    results = [
        {
            "ruleId": record["code"],
            "ruleIndex": positions[record["code"]],
            "level": record["level"],
            "message": {"text": f"{record['what']}; {record['remedy']}"},
            "locations": [_location(record, lines_around.get(record["fqn"], (None, None)))],
            "properties": {name: record[name] for name in ("call_index", "nbytes", "seconds")},
        }
        for record in records
    ]
    driver = {"name": "modelsummary", "rules": described}
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [{"tool": {"driver": driver}, "results": results}]}


def _location(record: Mapping[str, Any], around: tuple[str | None, int | None]) -> dict[str, Any]:
    location: dict[str, Any] = {}
    file, line = around if record["file"] is None else (record["file"], record["line"])
    if record["fqn"] is not None:
        location["logicalLocations"] = [{"fullyQualifiedName": record["fqn"] or "model", "kind": "module"}]
    if file is not None:
        artifact = {"uri": _uri(Path(file))}
        location["physicalLocation"] = {"artifactLocation": artifact, "region": {"startLine": line}}
    return location


def _uri(path: Path) -> str:
    """Return the path below the working directory, as code hosts want it; or all of it."""
    try:
        return path.resolve().relative_to(Path.cwd()).as_posix()
    except ValueError:
        return path.resolve().as_uri()
