"""The plain data class and functions over its tree, without a capture."""

from __future__ import annotations

import pickle

from modelsummary import LayerInfo
from modelsummary.layer_info import leaf_output_bytes, ledger


def row(name, *children, **facts):
    info = LayerInfo(fqn=name, name=name, class_name="Layer", layer_id=0, module=None, **facts)
    for child in children:
        child.parent_info = info
        child.depth = info.depth + 1
        info.children.append(child)
    return info


def tree():
    return row(
        "",
        row("a", executed=True, output_bytes=8, uncounted_ops={"x": 1}),
        row("list", row("b", executed=True, output_bytes=4, uncounted_ops={"x": 2, "y": 1})),
        row("c", executed=False, output_bytes=0),
        executed=True,
        output_bytes=100,
    )


def test_walking_in_printed_order():
    root = tree()
    root.children[1].children[0].depth = 2
    assert [each.fqn for each in root.walk()] == ["", "a", "list", "b", "c"]
    assert [each.fqn for each in root.walk(depth=1)] == ["", "a", "list", "c"]
    assert [each.fqn for each in root.walk(depth=0)] == [""]


def test_leaves_are_calls_during_which_no_other_module_ran():
    root = tree()
    assert not root.is_leaf
    assert not root.children[1].is_leaf
    assert leaf_output_bytes(root) == 12
    assert leaf_output_bytes(row("", row("never"), executed=True, output_bytes=5)) == 5


def test_the_ledger_adds_up():
    assert ledger(tree()) == {"x": 3, "y": 1}


def test_uncertainty():
    assert row("a", uncounted_ops={"x": 1}).is_uncertain
    assert row("a", note="hidden").is_uncertain
    assert not row("a", note="raised", executed=True).is_uncertain


def test_derived_figures():
    info = row("a", macs=3, self_macs=2, input_bytes=1, output_bytes=2, params_bytes=4, buffer_bytes=8)
    assert (info.flops, info.self_flops, info.size_bytes) == (6, 4, 15)


def test_pickling_a_tree():
    again = pickle.loads(pickle.dumps(tree()))
    assert [each.fqn for each in again.walk()] == ["", "a", "list", "b", "c"]
    assert again.children[0].parent_info is again
