"""The recipe of the conda package against the metadata of the wheel."""

from __future__ import annotations

import re
from configparser import ConfigParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONDA_NAMES = {"torch": "pytorch"}


def test_the_recipe_says_what_the_wheel_says():
    yaml = pytest.importorskip("yaml")
    file = ROOT / "conda" / "recipe.yaml"
    if not file.exists():
        pytest.skip("the recipe is not part of the source distribution")
    recipe, setup = yaml.safe_load(file.read_text()), ConfigParser(interpolation=None)
    setup.read(ROOT / "setup.cfg")
    options = setup["options"]
    about, context = recipe["about"], recipe["context"]
    assert context["version"] == setup["metadata"]["version"]
    assert f">={context['python_min']}" == options["python_requires"]
    assert about["summary"] == setup["metadata"]["description"]
    assert about["license"] == setup["metadata"]["license_expression"]
    assert all((ROOT / name).is_file() for name in about["license_file"])
    commands = setup["options.entry_points"]["console_scripts"].split("\n")
    assert recipe["build"]["python"]["entry_points"] == [command for command in commands if command]
    wheel = [line for line in options["install_requires"].split("\n") if line and not line.startswith("#")]
    bounds = {re.sub(r"\[.*\]", "", name): least for name, _, least in (line.partition(">=") for line in wheel)}
    needed = {name: least for name, _, least in (line.partition(" >=") for line in recipe["requirements"]["run"])}
    assert needed.pop("python") == "${{ python_min }}"
    assert needed.pop("wcwidth") == ""  # what tabulate[widechars] adds
    assert needed == {CONDA_NAMES.get(name, name): least for name, least in bounds.items()}
