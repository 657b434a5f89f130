"""The names that ``summary`` accepts for columns, rows, modes and units; plain strings work as well."""

from __future__ import annotations

from enum import Enum, IntEnum, unique

from modelsummary.units import Units

__all__ = ["ColumnSettings", "Mode", "RowSettings", "Units", "Verbosity"]


@unique
class ColumnSettings(str, Enum):
    """Columns of the table of ``summary``.

    >>> ColumnSettings("mult_adds") is ColumnSettings.MULT_ADDS
    True
    """

    KERNEL_SIZE = "kernel_size"
    GROUPS = "groups"
    INPUT_SIZE = "input_size"
    OUTPUT_SIZE = "output_size"
    NUM_PARAMS = "num_params"
    PARAMS_PERCENT = "params_percent"
    MULT_ADDS = "mult_adds"
    TRAINABLE = "trainable"


@unique
class RowSettings(str, Enum):
    """Parts and selection of the rows in the table of ``summary``.

    ``DEPTH`` numbers the rows, ``VAR_NAMES`` adds the attribute name of each module, ``ASCII_ONLY`` draws the tree
    without box-drawing characters, and ``HIDE_RECURSIVE_LAYERS`` leaves out repeated rows.
    """

    DEPTH = "depth"
    VAR_NAMES = "var_names"
    ASCII_ONLY = "ascii_only"
    HIDE_RECURSIVE_LAYERS = "hide_recursive_layers"


@unique
class Mode(str, Enum):
    """Mode in which the model runs; ``SAME`` leaves each module in its own mode."""

    TRAIN = "train"
    EVAL = "eval"
    SAME = "same"


@unique
class Verbosity(IntEnum):
    """Amount that ``summary`` prints: nothing, the table, or the table with every parameter."""

    QUIET = 0
    DEFAULT = 1
    VERBOSE = 2
