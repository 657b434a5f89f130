"""The arguments that ``Statistics.parallel_plan`` and ``cluster.Plan`` have in common: their values and errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelsummary.capture.checkpoints import kept_results
from modelsummary.errors import InputError
from modelsummary.memory.checkpointing import CheckpointPlan

__all__ = [
    "LEVELS",
    "check_checkpoint",
    "check_dispatch",
    "check_sending",
    "check_sequence",
    "checkpoint_by_name",
    "level_of",
]

LEVELS = ("optimizer", "gradients", "parameters")
"""What ranks shard, each with those before it: stages 1, 2 and 3 of ZeRO."""

_DISPATCHES = ("all_to_all", "all_reduce")


def check_dispatch(dispatch: Any) -> None:
    """Raise ``InputError`` for an unknown way in which the tokens of several ranks meet their experts."""
    if dispatch not in _DISPATCHES:
        raise InputError(f"dispatch must be one of {', '.join(map(repr, _DISPATCHES))}, got {dispatch!r:.80}")


def check_sending(dispatch: Any, expert: int, **sizes: int) -> None:
    """Raise ``InputError`` for an unknown dispatch, and for ranks that send tokens to experts and have the same ones.

    Args:
        sizes: number of ranks along the other dimensions of the mesh.
    """
    check_dispatch(dispatch)
    if expert == 1 or dispatch != "all_to_all":
        return
    asked = f"expert={expert} with dispatch='all_to_all'"
    remedy = "or dispatch='all_reduce', with which ranks of expert have the same tokens"
    for name in ("tensor", "context", "pipeline"):
        if sizes[name] > 1:
            raise InputError(
                f"parallel_plan does not apply {asked} and {name}={sizes[name]}: it sends tokens between ranks of "
                f"shard or data alone; pass {name}=1, {remedy}"
            )
    name = "shard" if sizes["shard"] > 1 else "data"
    if sizes[name] % expert:
        raise InputError(
            f"{asked} needs a multiple of {expert} for {name}, got {sizes[name]}: ranks of expert have tokens of their "
            f"own, so they are ranks of shard, or of data without shards; pass {name}={expert}, {remedy}"
        )


def check_sequence(sequence: Any, tensor: int) -> None:
    """Raise ``InputError`` if activations cannot be sharded along the sequence over the ranks of ``tensor``."""
    if not isinstance(sequence, bool):
        raise InputError(f"sequence must be True or False, got {sequence!r:.80}")
    if sequence and tensor == 1:
        raise InputError(
            "sequence=True shards activations over the ranks of tensor, of which there is one; pass tensor >= 2"
        )


def check_checkpoint(checkpoint: Any) -> None:
    """Raise ``InputError`` for a value of ``checkpoint`` that neither a plan of a cluster nor one of layers takes."""
    is_count = type(checkpoint) is int and checkpoint >= 0
    names_modules = isinstance(checkpoint, (list, tuple, Mapping, CheckpointPlan))
    if not (is_count or names_modules or checkpoint in (None, "every", "selective", "operator")):
        advice = "; 'every' recomputes all blocks" if checkpoint in ("full", "all", True) else ""
        raise InputError(
            "checkpoint must be None, 'every', 'selective', 'operator', a number of blocks of each stage, a list of "
            f"names, or a memory plan, got {checkpoint!r:.80}{advice}"
        )


def checkpoint_by_name(checkpoint: Any, caller: str) -> Any:
    """Return a checkpoint that names modules as a dict: module -> names of the results that it keeps.

    Other values are returned as they are.

    Args:
        checkpoint: a value that ``check_checkpoint`` accepts.
        caller: what takes it, for errors.

    Raises:
        InputError: it is a memory plan that moves tensors to the host, or a name cannot be the one of a result.

    >>> checkpoint_by_name(["layers.0"], "a Plan"), checkpoint_by_name("every", "a Plan")
    ({'layers.0': ()}, 'every')
    """
    if isinstance(checkpoint, CheckpointPlan):
        if checkpoint.offload:
            raise InputError(
                f"{caller} moves no saved tensors to the host, as the memory plan in checkpoint= does; make that plan "
                "without offload="
            )
        return checkpoint.checkpoint
    if isinstance(checkpoint, (list, tuple)):
        checkpoint = dict((entry, ()) if isinstance(entry, str) else entry for entry in checkpoint)
    return kept_results(checkpoint) if isinstance(checkpoint, Mapping) else checkpoint


def level_of(sharded: Any, shard: int) -> str | None:
    """Return what the ranks of ``shard`` hold parts of; None: nothing.

    Args:
        sharded: one of ``LEVELS``, its stage of ZeRO, 0 for none, or None: parameters if ``shard`` is larger than 1.
        shard: number of ranks.

    Raises:
        InputError: the level is unknown, or ranks would shard nothing.

    >>> level_of(None, 8), level_of(1, 8), level_of(None, 1)
    ('parameters', 'optimizer', None)
    """
    if sharded is None:
        return "parameters" if shard > 1 else None
    is_stage = type(sharded) is int and 0 <= sharded <= len(LEVELS)
    if not is_stage and sharded not in LEVELS:
        options = ", ".join(map(repr, LEVELS))
        raise InputError(f"sharded must be one of {options} (or 1, 2, 3 as in ZeRO), or None, got {sharded!r:.80}")
    if sharded == 0 and shard > 1:
        raise InputError(f"sharded=0 shards nothing over shard={shard} ranks; pass data={shard} for whole copies")
    return (None, *LEVELS)[sharded] if is_stage else sharded
