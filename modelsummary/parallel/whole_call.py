"""A call of a function that sees the tokens of all ranks of context parallelism, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["WHOLE_CALL_KINDS", "WholeCall"]

WHOLE_CALL_KINDS = frozenset({"part", "whole", "own", "causal"})


@dataclass(frozen=True)
class WholeCall:
    """A call of a function that sees the tokens of all ranks, or that looks like one.

    Attributes:
        fqn: of the module whose forward calls it.
        function: its name.
        kind: ``"part"``, ``"whole"``, ``"own"`` or ``"causal"``, as ``TokensOfRank`` takes them.
        sizes: positions of the numbers among its arguments that count tokens.
        dim: of the tokens in its result; None if it has none.
    """

    fqn: str
    function: str
    kind: str
    sizes: tuple[int, ...] = ()
    dim: int | None = None
