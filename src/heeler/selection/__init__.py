"""Choosing a subset of examples, with weights, from a table of their gradients: `heeler.select`.

Knows nothing of models, and does not import torch unless a saved state is read.
"""

from heeler.selection.api import Selection, Spread, select
from heeler.selection.distributed import select_together
from heeler.selection.methods import METHODS
from heeler.selection.quota import proportional_parts
from heeler.selection.rows import Rows, rows_of

__all__ = ["METHODS", "Rows", "Selection", "Spread", "proportional_parts", "rows_of", "select", "select_together"]
