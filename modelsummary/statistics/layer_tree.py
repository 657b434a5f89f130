"""``LayerTree``: the rows of a model by name, and the model's totals."""

from __future__ import annotations

from collections.abc import Iterator

from modelsummary.errors import InputError, LayerNotFoundError, close_to
from modelsummary.layer_info import LayerInfo, leaf_output_bytes, ledger
from modelsummary.units import ReadableNumbers

__all__ = ["LayerTree"]


class LayerTree(ReadableNumbers):
    """A tree of ``LayerInfo`` with access by name, and with totals.

    Iterating yields the rows in printed order without the root, as does ``summary_list``.
    ``stats["layer1.conv"]`` is the first call of a module.

    Args:
        root: the row of the model.

    >>> from torch import nn
    >>> from modelsummary import Statistics
    >>> stats = Statistics(nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 4)), (1, 2))
    >>> [row.fqn for row in stats], stats["0"].macs, stats.total_macs, stats.total_params
    (['0', '1'], 16, 48, 60)
    """

    def __init__(self, root: LayerInfo) -> None:
        self.root = root
        self.summary_list = [row for row in root.walk() if row is not root]
        self._index: dict[str, list[LayerInfo]] = {}
        for row in root.walk():
            self._index.setdefault(row.fqn, []).append(row)

    def __iter__(self) -> Iterator[LayerInfo]:
        return iter(self.summary_list)

    def __len__(self) -> int:
        return len(self.summary_list)

    def __getitem__(self, fqn: str) -> LayerInfo:
        """Return the first call of the module ``fqn`` (``""``: the model). Raise ``LayerNotFoundError``, a KeyError."""
        return self.calls(fqn)[0]

    def calls(self, fqn: str) -> list[LayerInfo]:
        """Return all calls of the module ``fqn`` in printed order; one row if it was not called.

        Raises:
            InputError: ``fqn`` is not a string.
            LayerNotFoundError: the model has no such module.

        >>> from torch import nn
        >>> from modelsummary import Statistics
        >>> relu = nn.ReLU()
        >>> stats = Statistics(nn.Sequential(nn.Linear(2, 8), relu, nn.Linear(8, 8), relu), (1, 2))
        >>> len(stats.calls("1"))
        2
        """
        if not isinstance(fqn, str):
            raise InputError(f"fqn must be a fully qualified name such as 'layer1.0.conv1', got {fqn!r}")
        rows = self._index.get(fqn) or self._index.get(self._first_path(fqn))
        if rows is not None:
            return list(rows)
        raise LayerNotFoundError(f"no layer named {fqn!r} in {self.root.class_name}{close_to(fqn, self._index)}")

    def _first_path(self, fqn: str) -> str:
        """Return the FQN in the tree for another path to the same module, if live modules are there to follow it."""
        module = self.root.module
        for name in fqn.split("."):
            module = module._modules.get(name) if module is not None else None
        return next((row.fqn for row in self.root.walk() if module is not None and row.module is module), fqn)

    def _ipython_key_completions_(self) -> list[str]:
        return list(self._index)

    # ------------------------------------------------------------------------------------------- totals

    @property
    def total_params(self) -> int:
        """The number of elements of all parameters; a tied parameter counts once."""
        return self.root.num_params

    @property
    def trainable_params(self) -> int:
        """The number of elements of the parameters with ``requires_grad``."""
        return self.root.trainable_params

    @property
    def total_mult_adds(self) -> int:
        """The MACs of one forward of the batch that was passed. Raises ``InputError`` if no forward ran."""
        return self._of_forward("total_mult_adds").macs

    total_macs = total_mult_adds

    @property
    def total_flops(self) -> int:
        """2 x ``total_mult_adds``."""
        return self._of_forward("total_flops").flops

    @property
    def total_param_bytes(self) -> int:
        """The bytes of all parameters in their own dtypes."""
        return self.root.params_bytes

    @property
    def total_buffer_bytes(self) -> int:
        """The bytes of all buffers (and packed quantised weights) in their own dtypes."""
        return self.root.buffer_bytes

    @property
    def total_input_bytes(self) -> int:
        """The bytes of the model's inputs."""
        return self._of_forward("total_input_bytes").input_bytes

    @property
    def total_output_bytes(self) -> int:
        """The bytes of the outputs of all leaf calls: the forward's activations, as seen from modules."""
        return leaf_output_bytes(self._of_forward("total_output_bytes"))

    @property
    def uncounted_ops(self) -> dict[str, int]:
        """The ledger: names of operators that look like matrix products and have no MAC formula -> number of runs."""
        return ledger(self.root)

    def _of_forward(self, name: str) -> LayerInfo:
        """Return the root. Raise ``InputError`` if no forward ran."""
        if not self.root.executed:
            raise InputError(f"{name} needs a forward, and none was run; pass an input: Statistics(model, input_data)")
        return self.root
