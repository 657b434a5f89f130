"""How the figures of a model follow from the sizes of its inputs: formulas, found and checked by runs on shapes.

The multiply-adds of single operators are in ``operators``.
"""

from modelsummary.formulas.dimensions import Dimension, DimensionNames
from modelsummary.formulas.figures import FIGURES, FiguresAt
from modelsummary.formulas.scaling import Scaling
from modelsummary.formulas.tokens import FlopsPerToken

__all__ = ["FIGURES", "Dimension", "DimensionNames", "FiguresAt", "FlopsPerToken", "Scaling"]
