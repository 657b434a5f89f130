"""``nn.MultiheadAttention``: one function of torch takes its parameters, so it is split by heads as a whole."""

from __future__ import annotations

from torch import nn

from modelsummary.capture.templates import Attribute
from modelsummary.parallel.placements import Shard
from modelsummary.parallel.record_calls import Calls
from modelsummary.record.events import Event, Value

__all__ = ["INPUTS", "attention_inputs", "attention_shards", "attentions", "nested_encoders"]

INPUTS = ("query", "key", "value")


def attentions(calls: Calls) -> dict[str, str]:
    """Return why each ``nn.MultiheadAttention`` that runs cannot be split, by FQN; an empty reason if it can."""
    called = {*calls.places, *(event.fqn for event in calls.entered)}
    return {
        fqn: _obstacle(calls, fqn, module)
        for fqn, module in calls.modules.items()
        if isinstance(module, nn.MultiheadAttention) and fqn in called
    }


def _obstacle(calls: Calls, fqn: str, module: nn.MultiheadAttention) -> str:
    if fqn not in calls.places or type(module).forward is not nn.MultiheadAttention.forward:
        return (
            f"{type(module).__name__} overrides the forward of nn.MultiheadAttention; the forward of torch can be split"
        )
    if module.bias_k is not None or module.add_zero_attn:
        return f"{fqn} adds keys and values of all heads (add_bias_kv, add_zero_attn); without them it can be split"
    expected = {"in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias"}
    projection = f"{fqn}.out_proj"
    names = {name for name, parameter in module._parameters.items() if parameter is not None}
    if not names <= expected or type(module.out_proj).forward is not nn.Linear.forward:
        return f"the parameters of {fqn} are parametrised or quantised; plain parameters can be split"
    if any(calls.holders[name] != {name} or calls.users.get(name) for name in (fqn, projection)):
        return f"another module or function takes parameters of {fqn}, too; parameters of its own work"
    return (
        f"{projection} is also called as a module; the attention alone may take it"
        if projection in calls.places
        else ""
    )


def attention_shards(module: nn.Module) -> dict[str, Shard | None]:
    """Return each parameter of an attention -> its placement; None if it is replicated."""
    shards: dict[str, Shard | None] = {}
    for name, _ in module.named_parameters():
        if name == "out_proj.bias":
            shards[name] = None
        elif name == "out_proj.weight":
            shards[name] = Shard(1)
        else:
            shards[name] = Shard(0, outer=3 if name.startswith("in_proj") else 1)  # queries, keys and values
    return shards


def attention_inputs(event: Event) -> list[Value | Attribute]:
    """Return the tensors that are query, key and value of a call."""
    return [*event.args[:3], *(event.kwargs[name] for name in INPUTS[len(event.args) :])]


def nested_encoders(calls: Calls, sharded: set[str]) -> list[str]:
    """Return the FQNs of each ``nn.TransformerEncoder`` that would give nested tensors to layers that are sharded."""
    return [
        fqn
        for fqn, module in calls.modules.items()
        if isinstance(module, nn.TransformerEncoder)
        and getattr(module, "use_nested_tensor", None) is True
        and any(name.startswith(f"{fqn}." if fqn else "") for name in sharded)
    ]
