"""The page: the front end's files and the data of the models in one HTML document that needs no network."""

from __future__ import annotations

import json
import re
import tempfile
import webbrowser
from functools import cache
from html import escape
from os import PathLike
from pathlib import Path
from typing import Any

from modelsummary.file_contents import saved
from modelsummary.units import format_number
from modelsummary.views.export import in_script, static

__all__ = ["Page", "page_of"]

# Each after the ones that it imports.
_SCRIPTS = tuple("format model visible state colours tree graph charts table facts picture app".split())
_LICENSES = (
    "elkjs 0.12.1 (layout of graphs), EPL-2.0, source and licence: the package elkjs of npm",
    "d3 7.9.2 (charts, zoom, colours), Copyright Mike Bostock, ISC licence: the package d3 of npm",
)
_FRAME_HEIGHT = 640


class Page:
    """A page; in a notebook it is shown in a frame.

    Attributes:
        html: the whole document.

    >>> page = page_of({"version": 1, "models": [], "diff": None}, "an empty page")
    >>> page.html[:15], "</html>" in page.html
    ('<!DOCTYPE html>', True)
    """

    def __init__(self, html: str, title: str) -> None:
        self.html = html
        self._title = title

    def save(self, path: str | PathLike[str]) -> Path:
        """Write the page to a file and return its path.

        Raises:
            InputError: the file cannot be written.
        """
        return saved(self.html, path)

    def open(self) -> Path:
        """Write the page to a temporary file, show it in the browser, and return the path."""
        with tempfile.NamedTemporaryFile("w", suffix=".html", delete=False, encoding="utf-8") as file:
            file.write(self.html)
        webbrowser.open(Path(file.name).as_uri())
        return Path(file.name)

    def __repr__(self) -> str:
        size = format_number(len(self.html.encode()), "M")
        return f"<explorer page of {self._title}, {size} MB: save(path) writes it, open() shows it in the browser>"

    def _repr_html_(self) -> str:
        style = f"width: 100%; height: {_FRAME_HEIGHT}px; border: 1px solid rgba(128, 128, 128, .5)"
        return f'<iframe srcdoc="{escape(self.html)}" style="{style}" allowfullscreen></iframe>'


def page_of(data: dict[str, Any], title: str) -> Page:
    """Return the page that shows ``data``: ``version``, ``models`` (of ``model_data``) and ``diff``."""
    content = in_script(json.dumps(data, separators=(",", ":"), allow_nan=False))
    notices = "\n".join(f"  {line}" for line in _LICENSES)
    html = (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<!-- Contains\n{notices}\n-->\n"
        f"<style>\n{_static('explorer.css')}</style>\n</head>\n<body>\n{_static('explorer.html')}"
        f'<script type="application/json" id="data">{content}</script>\n'
        f"<script>{_static('vendor/d3.js')}</script>\n<script>{_static('vendor/elk.js')}</script>\n"
        f"<script>\n{_program()}</script>\n</body>\n</html>\n"
    )
    return Page(html, title)


def _static(name: str) -> str:
    return static(f"explorer/{name}")


@cache
def _program() -> str:
    """Return the ES modules of the front end as one script, each as a function that returns its exports."""
    return "'use strict';\n" + "".join(_as_function(name) for name in _SCRIPTS)


def _as_function(name: str) -> str:
    text = re.sub(
        r'^import (\{[^}]*\}) from "\./(\w+)\.js";$', r"const \1 = \2_;", _static(f"{name}.js"), flags=re.MULTILINE
    )
    exported = re.findall(r"^export (?:const|class) (\w+)", text, flags=re.MULTILINE)
    body = re.sub(r"^export (?=const|class)", "", text, flags=re.MULTILINE)
    return f"const {name}_ = (() => {{\n{body}return {{ {', '.join(exported)} }};\n}})();\n"
