"""The convolutions of torch_geometric on a small graph, two of each with a ReLU between where they allow it."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from tests.zoo.example import CannotBuild, Example

LIBRARY = "torch_geometric"
WIDTH, NODES, EDGES, RELATIONS = 16, 24, 64, 3
NO_LAYERS = {"MessagePassing", "HeteroConv"}  # a base class, and a container for other convolutions

# What the constructors and forwards of convolutions call their arguments; each value is small and fits the others.
MAKES: dict[str, Any] = {
    "in_channels": WIDTH, "out_channels": WIDTH, "channels": WIDTH, "hidden_channels": WIDTH, "num_layers": 2, "K": 2,
    "space_dimensions": 3, "propagate_dimensions": WIDTH, "k": 4, "dim": 3, "kernel_size": 3, "heads": 2, "alpha": 0.1,
    "edge_dim": 4, "num_relations": RELATIONS, "num_node_types": 2, "num_edge_types": 2, "edge_type_emb_dim": 4,
    "edge_attr_emb_dim": 4, "num_bases": None, "first_aggr": True, "aggregators": ["mean", "max"],
    "scalers": ["identity", "amplification"], "deg": torch.tensor([0, 4, 10, 6, 4]), "act": nn.ReLU(),
    "in_edge_channels": 4, "max_steps": 2, "eps": 0.1, "filter_size": 2,
}  # fmt: skip


def _mlp(inputs: int, outputs: int = WIDTH) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, WIDTH), nn.ReLU(), nn.Linear(WIDTH, outputs))


def names() -> list[str]:
    """Names of the convolutions."""
    import torch_geometric.nn.conv as convolutions

    return [name for name in convolutions.__all__ if name not in NO_LAYERS]


def make(name: str) -> Example:
    """Build a convolution from its signature, and a graph for it."""
    import torch_geometric.nn.conv as convolutions

    kind = getattr(convolutions, name)
    try:
        model = _special(name, kind) or kind(**_arguments(kind))
        given = _inputs(model)
        with torch.no_grad():
            model.eval()(**given)
    except Exception as error:
        raise CannotBuild(" ".join(f"{type(error).__name__}: {error}".split())) from error
    return Example(model.eval(), (), given)


def _special(name: str, kind: Any) -> nn.Module | None:
    """Those that are given networks or other convolutions."""
    import torch_geometric.nn.conv as convolutions

    simple = convolutions.SAGEConv(WIDTH, WIDTH)
    builders: dict[str, Any] = {
        "GINConv": lambda: kind(_mlp(WIDTH)),
        "GINEConv": lambda: kind(_mlp(WIDTH), edge_dim=4),
        "EdgeConv": lambda: kind(_mlp(2 * WIDTH)),
        "DynamicEdgeConv": lambda: kind(_mlp(2 * WIDTH), k=4),
        "NNConv": lambda: kind(WIDTH, WIDTH, _mlp(4, WIDTH * WIDTH)),
        "PointNetConv": lambda: kind(_mlp(WIDTH + 3), _mlp(WIDTH)),
        "PPFConv": lambda: kind(_mlp(WIDTH + 4), _mlp(WIDTH)),
        "PointGNNConv": lambda: kind(_mlp(WIDTH, 3), _mlp(WIDTH + 3), _mlp(WIDTH)),
        "GPSConv": lambda: kind(WIDTH, simple, heads=2),
        "AntiSymmetricConv": lambda: kind(WIDTH),
        "DirGNNConv": lambda: kind(simple),
        "CGConv": lambda: kind(WIDTH, dim=4),
        "GMMConv": lambda: kind(WIDTH, WIDTH, dim=4, kernel_size=3),
        "SplineConv": lambda: kind(WIDTH, WIDTH, dim=4, kernel_size=3),
        "RGCNConv": lambda: kind(WIDTH, WIDTH, RELATIONS),
        "GCN2Conv": lambda: kind(WIDTH, alpha=0.1),
        "EGConv": lambda: kind(WIDTH, WIDTH, num_heads=2),
        "MeshCNNConv": lambda: kind(WIDTH, WIDTH),
        "HGTConv": lambda: kind({"a": WIDTH, "b": WIDTH}, WIDTH, (["a", "b"], [("a", "to", "b"), ("b", "to", "a")]), 2),
        "HANConv": lambda: kind({"a": WIDTH, "b": WIDTH}, WIDTH, (["a", "b"], [("a", "to", "b"), ("b", "to", "a")]), 2),
    }
    return builders[name]() if name in builders else None


def _arguments(kind: Any) -> dict[str, Any]:
    parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]
    needed = [each for each in parameters if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD]
    unknown = [each.name for each in needed if each.name not in MAKES]
    if unknown:
        raise CannotBuild(f"no rule for its arguments {unknown}")
    given = {each.name: MAKES[each.name] for each in needed}
    names_of_all = {each.name for each in parameters}
    if "edge_dim" in names_of_all:
        given["edge_dim"] = 4
    return given


def _inputs(model: nn.Module) -> dict[str, Any]:
    torch.manual_seed(0)
    x, edges = torch.randn(NODES, WIDTH), torch.randint(0, NODES, (2, EDGES))
    edges = edges[:, edges[1].argsort()]  # some want edges by target
    known: dict[str, Any] = {
        "x": x, "edge_index": edges, "edge_attr": torch.rand(EDGES, 4), "pos": torch.randn(NODES, 3),
        "edge_type": torch.randint(0, RELATIONS, (EDGES,)), "x_0": torch.randn(NODES, WIDTH),
        "pseudo": torch.rand(EDGES, 4), "hyperedge_index": torch.stack([edges[0], torch.randint(0, 8, (EDGES,))]),
        "pos_edge_index": edges[:, :32], "neg_edge_index": edges[:, 32:], "node_type": torch.randint(0, 2, (NODES,)),
        "normal": torch.randn(NODES, 3), "node_feats": x,
    }  # fmt: skip
    if type(model).__name__ in ("HGTConv", "HANConv"):
        graph = {("a", "to", "b"): edges % 12, ("b", "to", "a"): edges.flip(0) % 12}
        return {"x_dict": {"a": x[:12], "b": x[12:]}, "edge_index_dict": graph}
    if type(model).__name__ == "DNAConv":
        known["x"] = torch.randn(NODES, 3, WIDTH)
    if type(model).__name__ == "HEATConv":
        known["edge_type"] = torch.randint(0, 2, (EDGES,))
    if type(model).__name__ == "WLConv":
        known["x"] = torch.randint(0, 4, (NODES,))
    if type(model).__name__ == "MeshCNNConv":
        ring = torch.arange(NODES)
        neighbours = torch.stack([(ring + step) % NODES for step in (1, 2, 3, 4)], 1).flatten()
        known["edge_index"] = torch.stack([ring.repeat_interleave(4), neighbours])
    given: dict[str, Any] = {}
    for parameter in inspect.signature(model.forward).parameters.values():
        needed = parameter.default is parameter.empty
        if parameter.name in known and (
            needed or (parameter.name in ("edge_attr", "edge_type") and _wants(model, parameter.name))
        ):
            given[parameter.name] = known[parameter.name]
        elif needed and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            raise CannotBuild(f"no rule for the argument {parameter.name!r} of its forward")
    return given


def _wants(model: nn.Module, name: str) -> bool:
    """Return True if an optional argument is used: the layer was built with a size for it."""
    if name == "edge_type":
        return hasattr(model, "num_relations")
    return bool(
        getattr(model, "edge_dim", None)
        or type(model).__name__ in ("NNConv", "GMMConv", "SplineConv", "CGConv", "GINEConv", "HEATConv")
    )
