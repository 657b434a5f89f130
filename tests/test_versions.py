"""The versions of torch and Python that are tested stand in ``setup.cfg`` alone."""

from __future__ import annotations

import json
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_oldest_tested_versions_are_the_required_ones():
    command = [sys.executable, "tools/versions.py", "--list"]
    pairs = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert setup["options"]["python_requires"] == f">={pairs[0]['python']}"
    assert f"torch>={pairs[0]['torch'].removesuffix('.0')}" in setup["options"]["install_requires"].split()
    assert pairs[-1]["torch"] == "newest"
    workflow = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
    assert not any(pair["torch"] in workflow for pair in pairs[:-1])
