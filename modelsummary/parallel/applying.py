"""Apply a plan with torch's own functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from modelsummary.parallel.plan import ParallelPlan

__all__ = ["apply_tensor_parallel"]


def apply_tensor_parallel(model: nn.Module, plan: ParallelPlan, mesh: DeviceMesh) -> None:
    """Shard the layers of ``model`` over a mesh of one dimension."""
    from torch.distributed.tensor.parallel import parallelize_module

    frozen = [name for name, each in model.named_parameters(remove_duplicate=False) if not each.requires_grad]
    ties = ties_of(model)
    for attribute in plan.attributes:
        setattr(model.get_submodule(attribute.fqn), attribute.name, attribute.local)
    sharded = {layer.fqn for layer in plan.layers}
    own = dict(model.named_modules(remove_duplicate=False))
    for layer in plan.layers:
        if layer.fqn in own:
            parallelize_module(own[layer.fqn], mesh, style_of(layer.style, layer.options))
    for names in ties:
        tie(model, sorted(names, key=lambda name: name.rpartition(".")[0] not in sharded))
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)


def style_of(style: str, options: dict[str, Any]) -> Any:
    """Return a style of ``torch.distributed.tensor.parallel``; layouts are written ``"Shard(1)"``."""
    from torch.distributed.tensor import parallel

    return getattr(parallel, style)(**{name: _placement(value) for name, value in options.items()})


def _placement(value: Any) -> Any:
    from torch.distributed.tensor import Replicate, Shard

    if not isinstance(value, str):
        return value
    return Replicate() if value == "Replicate()" else Shard(int(value.removeprefix("Shard(").removesuffix(")")))


def ties_of(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [each for each in names.values() if len(each) > 1]


def tie(model: nn.Module, names: list[str]) -> None:
    """Register the parameter of the first name under the others, too."""
    parameter = model.get_parameter(names[0])
    for name in names[1:]:
        owner, _, attribute = name.rpartition(".")
        model.get_submodule(owner).register_parameter(attribute, parameter)
