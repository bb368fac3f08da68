"""From a model to sketches: K numbers for every example's gradient, taken out of an ordinary backward."""

from heeler.sketch.courier import Courier
from heeler.sketch.coverage import Coverage
from heeler.sketch.matrices import MatrixSpec
from heeler.sketch.rules import Call, Cost, Examples, LeftOut, Rule, register
from heeler.sketch.sketcher import Sketcher

__all__ = [
    "Call",
    "Cost",
    "Courier",
    "Coverage",
    "Examples",
    "LeftOut",
    "MatrixSpec",
    "Rule",
    "Sketcher",
    "register",
]
