"""Trees of rows for tests of views, without a model."""

from __future__ import annotations

from hypothesis import strategies as st

from modelsummary import LayerInfo


def tree(spec, parent=None, name=""):
    """Rows from ``(own amount, [children])``; the amount is of parameters."""
    own, children = spec
    fqn = f"{parent.fqn}.{name}".lstrip(".") if parent is not None else ""
    row = LayerInfo(fqn, name, "Row", 0, None, self_params=own, parent_info=parent, executed=True)
    row.depth = parent.depth + 1 if parent is not None else 0
    row.children = [tree(child, row, str(number)) for number, child in enumerate(children)]
    row.num_params = own + sum(child.num_params for child in row.children)
    return row


OWN = st.integers(0, 10**6) | st.sampled_from([0, 1, 10**12])
SPECS = st.recursive(
    st.tuples(OWN, st.just([])), lambda inner: st.tuples(OWN, st.lists(inner, max_size=8)), max_leaves=40
)
