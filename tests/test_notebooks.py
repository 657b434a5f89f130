"""The tutorials run from beginning to end."""

from __future__ import annotations

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
TUTORIALS = Path(__file__).parents[1] / "docs" / "tutorials"
PICTURES = {"first_look": 3, "will_it_fit": 2, "cluster": 1, "serving": 1}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Jupyter
@pytest.mark.parametrize("path", sorted(TUTORIALS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebook(path):
    pytest.importorskip("torchvision", exc_type=(ImportError, RuntimeError))
    for library in {"files": ["onnxruntime", "safetensors"], "serving": ["transformers"]}.get(path.stem, []):
        pytest.importorskip(library)
    pytest.importorskip("matplotlib")
    notebook = nbformat.read(path, as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "the build of the docs makes the outputs"
    nbclient.NotebookClient(
        notebook, kernel_name="python3", timeout=300, resources={"metadata": {"path": TUTORIALS}}
    ).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert [output for output in outputs if output.output_type == "error"] == []
    data = [output.data for output in outputs if "data" in output]
    assert sum("image/png" in each for each in data) >= PICTURES.get(path.stem, 0)
    if path.stem in ("first_look", "files"):
        assert any("modelsummary" in each.get("text/html", "") for each in data)
