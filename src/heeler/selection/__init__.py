"""Choosing a subset of examples, with weights, from a table of their gradients: `heeler.select`.

Knows nothing of models, and does not import torch unless a saved state is read.
"""

from heeler.selection.api import METHODS, select
from heeler.selection.parts import proportional_parts
from heeler.selection.result import Selection, Spread
from heeler.selection.source import Rows, rows_of
from heeler.selection.together import select_together

__all__ = [
    "METHODS",
    "Rows",
    "Selection",
    "Spread",
    "proportional_parts",
    "rows_of",
    "select",
    "select_together",
]
