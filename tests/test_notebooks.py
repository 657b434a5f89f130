"""The notebooks of examples/ run from beginning to end."""

from __future__ import annotations

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
EXAMPLES = Path(__file__).parents[1] / "examples"


PICTURES = {"tour": 3, "will_it_fit": 1, "plan_405b": 1, "onnx_lab": 0}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Jupyter
@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebook(path):
    pytest.importorskip("torchvision", exc_type=(ImportError, RuntimeError))
    pytest.importorskip("onnxruntime" if "onnx" in path.stem else "matplotlib")
    notebook = nbformat.read(path, as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "commit notebooks without their outputs"
    nbclient.NotebookClient(
        notebook, kernel_name="python3", timeout=300, resources={"metadata": {"path": EXAMPLES}}
    ).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert [output for output in outputs if output.output_type == "error"] == []
    data = [output.data for output in outputs if "data" in output]
    assert sum("image/png" in each for each in data) >= PICTURES[path.stem]
    if path.stem in ("tour", "onnx_lab"):
        assert any("modelsummary" in each.get("text/html", "") for each in data)
