"""Everything about a PyTorch model in one call: layers, shapes, parameters, MACs, bytes.

::

    stats = modelsummary.Statistics(model, input_data=(1, 3, 224, 224))
    print(stats)
"""

import re
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

import lazy_loader

# __init__.pyi says which module each public name is in; a module is imported when a name of it is used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def _check_folder(package: Path) -> None:
    """Raise ``ImportError`` if another project's distribution, whose import name is ours, has files in the folder."""
    try:
        other = distribution("modelsummary")
    except PackageNotFoundError:
        return
    if Path(str(other.locate_file(package.name))).resolve() == package:
        raise ImportError(
            f"{package} holds files of torch-modelsummary and of modelsummary {other.version}, which is another "
            "project; pip uninstall both, then install torch-modelsummary again"
        )


def _checked_version() -> str:
    """Return the version that is installed. Raise ``ImportError`` if torch is older than its metadata asks for."""
    try:
        metadata = distribution("torch-modelsummary").metadata
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "0+unknown"
    needed = re.search(r"^torch *\(?>=(\d+)\.(\d+)", "\n".join(metadata.get_all("Requires-Dist", [])), re.MULTILINE)
    try:
        installed = version("torch")
    except PackageNotFoundError:  # only an import would tell, and it takes long
        return metadata["Version"]
    release = re.match(r"(\d+)\.(\d+)", installed)
    if needed and release and [*map(int, release.groups())] < [*map(int, needed.groups())]:
        least = ".".join(needed.groups())
        raise ImportError(f"torch must be {least} or newer, got {installed}; pip install 'torch>={least}'")
    return metadata["Version"]


_check_folder(Path(__file__).resolve().parent)
__version__ = _checked_version()
