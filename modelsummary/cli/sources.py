"""Models by name, for the command line: from libraries, configurations, factories and files."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from modelsummary.cli.arguments import SOURCES
from modelsummary.errors import InputError, close_to, in_short
from modelsummary.extras import needs
from modelsummary.files.loading import is_file
from modelsummary.files.weights.hub import configuration_file, repository_of

__all__ = ["Source", "add_adapters", "build_model", "check_unset"]


class Source(NamedTuple):
    """A model and what is known about its inputs.

    Attributes:
        model: the model.
        inputs: positional and keyword arguments stored with the model, or None.
        takes_indices: True if the first input holds token indices.
        quantization: ``quantization_config`` of a configuration, which the model ignores; None: there is none.
    """

    model: nn.Module
    inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    takes_indices: bool = False
    quantization: Mapping[str, Any] | None = None


def build_model(name: str, settings: Mapping[str, Any], *, with_values: bool) -> Source:
    """Make the model called ``name``.

    Args:
        name: a name as in ``SOURCES``.
        settings: keyword arguments of the function or class that makes the model.
        with_values: True: parameters have (random) values; False: they are on meta, if the model can be made there.

    Raises:
        InputError: the model does not exist, or making it failed.
        MissingExtraError: the library of the model is not installed.

    >>> build_model("torch.nn:Linear", {"in_features": 2, "out_features": 3}, with_values=False).model.weight.device
    device(type='meta')
    """
    if name.endswith(".pt2"):
        return _exported(Path(name), settings)
    kind, _, rest = name.rpartition(":") if ".py:" in name else name.partition(":")
    if not rest:
        kind, rest = _library_of(name), name
    make = _MAKERS[kind](rest, settings) if kind in _MAKERS else _factory(kind, rest, settings)
    try:
        return _made(make, with_values)
    except InputError:
        raise
    except Exception as error:  # whatever a model's constructor raises
        remedy = "; --kwargs passes arguments, as JSON" if isinstance(error, TypeError) else ""
        raise InputError(f"making {name!r} failed: {type(error).__name__}: {error}{remedy}") from error


def add_adapters(model: nn.Module, rank: int) -> nn.Module:
    """Return the model, frozen, with trained LoRA adapters of this rank at its linear layers but the output layer.

    peft adds them with its defaults: in float32 next to weights of 16 bits.

    Raises:
        InputError: peft cannot add adapters to this model.
        MissingExtraError: peft is not installed.
    """
    with _needs("peft", "lora"):
        from peft import LoraConfig, get_peft_model
    device = next((parameter.device for parameter in model.parameters()), None)
    try:
        with torch.device(device or "cpu"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft says which of its defaults it changes for these layers
            adapted = get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear"))
    except (ValueError, TypeError, AttributeError) as error:  # without linear layers, or with weights of other kinds
        raise InputError(f"--lora {rank} does not fit {type(model).__name__}: {in_short(error):.200}") from error
    base: nn.Module = adapted.get_base_model()
    return base


def check_unset(model: str, settings: Mapping[str, Any]) -> None:
    """Raise ``InputError`` if there are settings for a model that is made already."""
    if settings:
        raise InputError(f"{model} is made already; leave out --kwargs {dict(settings)!r:.80}")


def _library_of(name: str) -> str:
    """Return the library that has a model of this name: torchvision, else timm."""
    names: list[str] = []
    with suppress(ImportError, RuntimeError):
        from torchvision import models

        names += models.list_models()
        if name in names:
            return "torchvision"
    with suppress(ImportError):
        import timm

        if timm.is_model(name):
            return "timm"
        names += timm.list_models()
    file = name.rstrip(":")
    hint = close_to(name, dict.fromkeys(names))
    if file.endswith(".py"):
        hint = f"; {file} is a file of code: add its class or function, {file}:NAME"
    elif is_file(name):
        raise InputError(
            f"{name!r} is a file, but this command runs a model; pass one that can be made, or a .pt2 file"
        )
    elif Path(name).exists():
        hint = f"; {name} is a {'folder' if Path(name).is_dir() else 'file of another kind'}"
    raise InputError(f"cannot find model {name!r}; expected {SOURCES}{hint}")


def _made(make: Callable[[], Source], with_values: bool) -> Source:
    if not with_values:
        try:
            with torch.device("meta"):
                return make()
        except InputError:
            raise
        except Exception:  # some constructors compute with tensors; any other error is raised again below
            pass
    return make()


def _torchvision(name: str, settings: Mapping[str, Any]) -> Callable[[], Source]:
    with _needs("torchvision", "torchvision"):
        from torchvision import models
    try:
        builder = models.get_model_builder(name)
    except ValueError:
        raise _unknown("torchvision", name, models.list_models()) from None
    parameters = inspect.signature(builder).parameters
    without = {option: None for option in ("weights", "weights_backbone") if option in parameters}
    quick = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    return lambda: Source(builder(**{**without, **quick, **settings}))


def _timm(name: str, settings: Mapping[str, Any]) -> Callable[[], Source]:
    with _needs("timm", "timm"):
        import timm
    if not timm.is_model(name):
        raise _unknown("timm", name, timm.list_models())
    return lambda: Source(timm.create_model(name, pretrained=False, **settings))


def _transformers(name: str, settings: Mapping[str, Any]) -> Callable[[], Source]:
    with _needs("transformers", "transformers"):
        import transformers
    path = Path(name)
    repository = repository_of(f"hf:{name}")
    if path.is_dir():
        path /= "config.json"
    elif repository is not None and not path.exists():
        path = configuration_file(repository)
    if not path.exists():
        raise InputError(
            f"hf: takes a configuration file, its directory, or org/name on the Hugging Face Hub, got {name!r}"
        )
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"configuration {name!r} cannot be read: {error}; pass a config.json of transformers"
        ) from None
    if not isinstance(facts, dict) or "model_type" not in {**facts, **settings}:
        raise InputError(f"configuration {name!r} has no 'model_type'; pass a config.json of transformers")
    facts |= settings
    try:
        config = transformers.AutoConfig.for_model(**facts)
    except ValueError as error:
        raise InputError(f"configuration {name!r} cannot be used: {str(error).splitlines()[0]:.200}") from error
    architecture = next(iter(facts.get("architectures") or ()), None)
    kind = getattr(transformers, architecture, None) if architecture else None

    def make() -> Source:
        name = "dtype" if hasattr(config, "dtype") else "torch_dtype"  # the second warns where the first is there
        with _default_dtype(getattr(config, name, None)):
            model = transformers.AutoModel.from_config(config) if kind is None else kind(config)
        takes_indices = model.main_input_name == "input_ids"
        return Source(model, takes_indices=takes_indices, quantization=facts.get("quantization_config"))

    return make


@contextmanager
def _default_dtype(dtype: torch.dtype | str | None) -> Iterator[None]:
    """Run the body with this dtype as torch's default; None leaves the default as it is."""
    named = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(named, torch.dtype) or not named.is_floating_point:
        yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(named)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


_MAKERS: dict[str, Callable[[str, Mapping[str, Any]], Callable[[], Source]]] = {
    "torchvision": _torchvision,
    "timm": _timm,
    "hf": _transformers,
}


def _module_of(path: str) -> ModuleType:
    """Return the module of a file of code; modules beside the file can be imported from it."""
    file = Path(path).resolve()
    if not file.is_file():
        raise InputError(f"file {path!r} does not exist")
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None  # as the name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(file.stem, module)  # dataclasses look up their module there
    spec.loader.exec_module(module)
    return module


def _factory(module: str, name: str, settings: Mapping[str, Any]) -> Callable[[], Source]:
    try:
        target: Any = _module_of(module) if module.endswith(".py") else importlib.import_module(module)
    except InputError:
        raise
    except Exception as error:  # whatever the code of a module raises
        what = "" if isinstance(error, ImportError) else f"{type(error).__name__}: "
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]
        remedy = f"; expected {SOURCES}" if is_missing else ""
        raise InputError(f"module {module!r} cannot be imported: {what}{error}{remedy}") from error
    for part in name.split("."):
        if not hasattr(target, part):
            raise InputError(f"module {module!r} has no {name!r}{close_to(part, _makers_in(target))}")
        target = getattr(target, part)
    if isinstance(target, nn.Module):
        model = target
        check_unset(f"{module}:{name}", settings)
        return lambda: Source(model)
    if not callable(target):
        raise InputError(f"{module}:{name} must be a function or class that makes a module, got {target!r:.80}")

    def make() -> Source:
        model = target(**settings)
        if not isinstance(model, nn.Module):
            raise InputError(f"{module}:{name} must make a torch.nn.Module, got {model!r:.80}")
        return Source(model)

    return make


def _makers_in(namespace: Any) -> list[str]:
    """Return the names of models, and of functions and classes that are defined in a module."""
    module_name = getattr(namespace, "__name__", None)
    return [
        name
        for name, value in getattr(namespace, "__dict__", {}).items()
        if isinstance(value, nn.Module) or (callable(value) and getattr(value, "__module__", None) == module_name)
    ]


def _exported(path: Path, settings: Mapping[str, Any]) -> Source:
    check_unset(f"the model in {str(path)!r}", settings)
    if not path.is_file():
        raise InputError(f"file {str(path)!r} does not exist")
    try:
        program = torch.export.load(path)
    except Exception as error:  # a broken archive raises various exceptions
        raise InputError(f"{str(path)!r} cannot be read as an exported program: {error}") from error
    return Source(program.module(), program.example_inputs)


def _unknown(library: str, name: str, names: list[str]) -> InputError:
    return InputError(f"{library} has no model {name!r}{close_to(name, names)}")


@contextmanager
def _needs(library: str, extra: str) -> Iterator[None]:
    try:
        with needs(library, extra):
            yield
    except RuntimeError as error:  # raised by a torchvision that was built for another torch
        raise InputError(f"{library} does not work with torch {torch.__version__}: {error}") from error
