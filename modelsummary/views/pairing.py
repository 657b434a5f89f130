"""Pairs of modules of two trees: which module of the one became which of the other."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence

__all__ = ["Structure", "paired"]

Structure = tuple[str, str]  # class, shapes of the parameters
Key = Callable[["_Tree", str], Hashable]


def paired(before: Mapping[str, Structure], after: Mapping[str, Structure]) -> dict[str, str]:
    """Return FQNs of the first tree -> FQNs of the second, each at most once; the other way round, the inverse.

    From the root on, children of paired modules are paired: attributes of one name, then the others in order, by all
    that they contain, then by structure, by name and class, by class, and by name. What remains is paired across
    parents, if the structure is equal and then if the FQN is. A module that was wrapped is paired with the one inside
    the wrapper.

    Args:
        before, after: FQN -> structure of all modules of a tree, the root first.

    >>> before = {"": ("Net", "{}"), "fc": ("Linear", "[8, 4]"), "act": ("ReLU", "{}")}
    >>> after = {"": ("Net", "{}"), "head": ("Linear", "[8, 4]"), "act": ("GELU", "{}")}
    >>> paired(before, after)
    {'': '', 'fc': 'head', 'act': 'act'}
    """
    if str(list(before.items())) > str(list(after.items())):
        return {first: second for second, first in paired(after, before).items()}
    pairing = _Pairing(before, after)
    pairing.add(next(iter(before)), next(iter(after)))
    while pairing.add_remaining():
        pass
    return pairing.pairs


class _Tree:
    """The modules of a model, with their children in order.

    Args:
        structures: FQN -> structure.
        contents: structure and children of a module -> its number, shared by the trees that are compared.
    """

    def __init__(self, structures: Mapping[str, Structure], contents: dict[Hashable, int]) -> None:
        self.structures = structures
        self.children: defaultdict[str, list[str]] = defaultdict(list)
        for fqn in structures:
            if fqn:
                self.children[fqn.rpartition(".")[0]].append(fqn)
        self._numbers = contents
        self.contents: dict[str, int] = {}
        for fqn in structures:
            self._number(fqn)

    def _number(self, fqn: str) -> int:
        if fqn not in self.contents:
            children = tuple((_name(child), self._number(child)) for child in self.children.get(fqn, ()))
            self.contents[fqn] = self._numbers.setdefault((self.structures[fqn], children), len(self._numbers))
        return self.contents[fqn]

    def walk(self, fqn: str) -> Iterator[str]:
        """Yield a module and all within it."""
        yield fqn
        for child in self.children.get(fqn, ()):
            yield from self.walk(child)

    def first(self, fqn: str, structure: Structure, without: Container[str]) -> str | None:
        """Return the first module of a structure that is this one or within it."""
        alike = (inner for inner in self.walk(fqn) if self.structures[inner] == structure)
        return next((inner for inner in alike if inner not in without), None)


class _Pairing:
    """The pairs of two trees, while they are looked for."""

    def __init__(self, before: Mapping[str, Structure], after: Mapping[str, Structure]) -> None:
        contents: dict[Hashable, int] = {}
        self._before, self._after = _Tree(before, contents), _Tree(after, contents)
        self.pairs: dict[str, str] = {}
        self._taken: set[str] = set()

    def add(self, left: str, right: str) -> None:
        """Pair two modules and what they contain; if one of them wraps the other, the wrapped one."""
        structure, new_structure = self._before.structures[left], self._after.structures[right]
        inner = self._after.first(right, structure, without=self._taken)
        outer = self._before.first(left, new_structure, without=self.pairs)
        if inner is None or outer is None:
            left, right = outer or left, inner or right
        self.pairs[left] = right
        self._taken.add(right)
        first, second = self._before.children.get(left, ()), self._after.children.get(right, ())
        for pair in self._aligned(*self._unpaired(first, second)):
            self.add(*pair)

    def add_remaining(self) -> bool:
        """Pair modules across parents; return False if there were none to pair."""
        left, right = self._unpaired(self._before.structures, self._after.structures)
        pairs = self._by_ending(left, right) or {fqn: fqn for fqn in set(left) & set(right)}
        for fqn in left:
            if fqn in pairs and fqn not in self.pairs and pairs[fqn] not in self._taken:
                self.add(fqn, pairs[fqn])
        return bool(pairs)

    def _unpaired(self, left: Iterable[str], right: Iterable[str]) -> tuple[list[str], list[str]]:
        return [fqn for fqn in left if fqn not in self.pairs], [fqn for fqn in right if fqn not in self._taken]

    def _aligned(self, left: Sequence[str], right: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Yield pairs of children: attributes of one name, then the others in order.

        Attributes need the same structure, or the same class if neither parent has one that the other lacks: otherwise
        an attribute was added or removed, and others may have moved on to other names.
        """
        names, new_names = ({_name(fqn): fqn for fqn in fqns if not _name(fqn).isdigit()} for fqns in (left, right))
        facts = slice(1) if names.keys() == new_names.keys() else slice(2)
        kept = {
            names[name]: new_names[name]
            for name in names
            if name in new_names
            and self._before.structures[names[name]][facts] == self._after.structures[new_names[name]][facts]
        }
        yield from kept.items()
        taken = set(kept.values())
        yield from self._in_order([fqn for fqn in left if fqn not in kept], [fqn for fqn in right if fqn not in taken])

    def _in_order(self, left: Sequence[str], right: Sequence[str], level: int = 0) -> Iterator[tuple[str, str]]:
        """Yield the longest sequence of pairs of equal keys, and between two pairs the sequence by the next key."""
        if not left or not right or level == len(_KEYS):
            return
        key = _KEYS[level]
        items = [(key(self._before, fqn), _name(fqn)) for fqn in left]
        new_items = [(key(self._after, fqn), _name(fqn)) for fqn in right]
        start = new_start = 0
        for index, new_index in _longest_common(items, new_items):
            yield from self._in_order(left[start:index], right[new_start:new_index], level + 1)
            yield left[index], right[new_index]
            start, new_start = index + 1, new_index + 1
        yield from self._in_order(left[start:], right[new_start:], level + 1)

    def _by_ending(self, left: Sequence[str], right: Sequence[str]) -> dict[str, str]:
        """Pair modules of the same structure, those whose FQNs share the longest ending first."""
        pairs: dict[str, str] = {}
        longest = max((fqn.count(".") + 1 for fqn in (*left, *right)), default=0)
        for length in range(longest, -1, -1):
            candidates: defaultdict[Hashable, deque[str]] = defaultdict(deque)
            for fqn in right:
                candidates[self._after.structures[fqn], _last_names(fqn, length)].append(fqn)
            for fqn in left:
                queue = candidates.get((self._before.structures[fqn], _last_names(fqn, length)))
                if queue:
                    pairs[fqn] = queue.popleft()
            taken = set(pairs.values())
            left = [unpaired for unpaired in left if unpaired not in pairs]
            right = [unpaired for unpaired in right if unpaired not in taken]
        return pairs


def _name(fqn: str) -> str:
    return fqn.rpartition(".")[2]


def _last_names(fqn: str, length: int) -> tuple[str, ...]:
    return tuple(fqn.split(".")[-length:]) if length else ()


# what children of paired modules are paired by, the strongest first
_KEYS: tuple[Key, ...] = (
    lambda tree, fqn: tree.contents[fqn],
    lambda tree, fqn: tree.structures[fqn],
    lambda tree, fqn: (_name(fqn), tree.structures[fqn][0]),
    lambda tree, fqn: tree.structures[fqn][0],
    lambda _, fqn: _name(fqn),
)
Item = tuple[Hashable, str]  # key, name


def _longest_common(left: Sequence[Item], right: Sequence[Item]) -> Iterator[tuple[int, int]]:
    """Yield positions of the longest common subsequence of keys; of several, the one with the most equal names.

    >>> list(_longest_common([("a", "0"), ("b", "1")], [("b", "0"), ("a", "1"), ("b", "2")]))
    [(0, 1), (1, 2)]
    """
    common = {key for key, _ in left} & {key for key, _ in right}
    rows, columns = ([index for index, (key, _) in enumerate(items) if key in common] for items in (left, right))
    alike = [left[row] == right[column] for row, column in zip(rows, columns, strict=False)]
    start = [*alike, False].index(False)
    yield from zip(rows[:start], columns[:start], strict=True)
    rows, columns = rows[start:], columns[start:]

    def gain(row: int, column: int) -> int:
        (key, name), (new_key, new_name) = left[rows[row]], right[columns[column]]
        return (len(rows) + 1 + (name == new_name)) if key == new_key else 0

    best = [[0] * (len(columns) + 1) for _ in range(len(rows) + 1)]  # of the rest from a row and a column on
    for row in reversed(range(len(rows))):
        for column in reversed(range(len(columns))):
            matched = best[row + 1][column + 1] + gain(row, column)
            best[row][column] = max(matched, best[row + 1][column], best[row][column + 1])
    row = column = 0
    while row < len(rows) and column < len(columns):
        if best[row][column] == best[row + 1][column]:
            row += 1
        elif best[row][column] == best[row][column + 1]:
            column += 1
        else:
            yield rows[row], columns[column]
            row, column = row + 1, column + 1
