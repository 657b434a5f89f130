"""The table of a profiled graph."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node

from modelsummary.fx.meta_info import MetaInfo, info_of
from modelsummary.tables import table
from modelsummary.units import grouped, scaled

__all__ = ["profile_table", "rows_of"]

_SIZES = ["Accumulate size", "Incremental size", "Output size", "Temp size", "Param size", "Backward size"]
_HEADERS = ["Op type", "Op", *_SIZES, "Fwd MACs", "Fwd FLOPs", "Bwd FLOPs"]


def rows_of(gm: GraphModule) -> list[dict[str, Any]]:
    """Return one dict per node of a profiled graph that makes tensors: exact bytes and counts.

    >>> import torch
    >>> from modelsummary.fx import symbolic_profile, symbolic_trace
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16))
    >>> gm = symbolic_trace(model, meta_args={"input": (x := torch.rand(4, 8))})
    >>> [(row["op_type"], row["param_size"], row["fwd_macs"]) for row in rows_of(symbolic_profile(gm, x))]
    [('placeholder', 0, 0), ('call_module', 576, 512), ('output', 0, 0)]
    """
    return [_row(node, info_of(node)) for node in gm.graph.nodes if _is_shown(node)]


def _is_shown(node: Node) -> bool:
    """Return True for nodes that make tensors, and for items of a module's result; other nodes are hidden."""
    return info_of(node).shape is not None or (
        getattr(node.target, "__name__", "") == "getitem"
        and any(source.op == "call_module" for source in node.all_input_nodes)
    )


def _row(node: Node, info: MetaInfo) -> dict[str, Any]:
    return {
        "op_type": node.op,
        "op": node.name,
        "fqn": info.fqn,
        "accumulate_size": info.accumulate_size,
        "incremental_size": info.incremental_size,
        "output_size": info.output_size,
        "temp_size": info.temp_size,
        "param_size": info.param_size,
        "backward_size": info.backward_size,
        "fwd_macs": info.macs,
        "fwd_flop": info.fwd_flop,
        "bwd_flop": info.bwd_flop,
    }


def profile_table(gm: GraphModule) -> str:
    """Return the nodes of a profiled graph as a table with totals; sizes are bytes with binary prefixes."""
    rows = rows_of(gm)
    lines = [
        [
            row["op_type"],
            row["op"],
            *(scaled(row[name], "B", binary=True) for name in list(row)[3:9]),
            *(scaled(row[name]) for name in list(row)[9:]),
        ]
        for row in rows
    ]
    accumulated = rows[-1]["accumulate_size"] if rows else 0
    totals = [sum(row[name] for row in rows) for name in ("fwd_macs", "fwd_flop", "bwd_flop")]
    uncounted = sorted({name for node in gm.graph.nodes for name in info_of(node).uncounted})
    return "\n".join(
        [
            table(lines, _HEADERS, "ll" + 9 * "r", "simple"),
            f"Kept for the backward: {scaled(accumulated, 'B', binary=True)} ({grouped(accumulated)} B)",
            "Products: {} MACs forward = {} FLOPs; {} FLOPs backward".format(*map(grouped, totals)),
            *([f"Not counted (no formula): {', '.join(uncounted)}"] if uncounted else []),
        ]
    )
