"""The names ``summary`` takes for columns, rows, modes and units; the plain strings do as well."""

from __future__ import annotations

from enum import Enum, IntEnum, unique

from modelsummary.units import Units

__all__ = ["ColumnSettings", "Mode", "RowSettings", "Units", "Verbosity"]


@unique
class ColumnSettings(str, Enum):
    """Columns of the table of ``summary``."""

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
    """What the rows of the table of ``summary`` show."""

    DEPTH = "depth"
    VAR_NAMES = "var_names"
    ASCII_ONLY = "ascii_only"
    HIDE_RECURSIVE_LAYERS = "hide_recursive_layers"


@unique
class Mode(str, Enum):
    """Mode the model runs in: ``SAME`` leaves every module in its own."""

    TRAIN = "train"
    EVAL = "eval"
    SAME = "same"


@unique
class Verbosity(IntEnum):
    """What ``summary`` prints: nothing, the table, or the table with every parameter."""

    QUIET = 0
    DEFAULT = 1
    VERBOSE = 2
