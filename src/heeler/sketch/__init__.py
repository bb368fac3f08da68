"""From a model to sketches: K numbers per example's gradient, taken out of an ordinary backward."""

from heeler.sketch.coverage import Coverage
from heeler.sketch.layer_rules import Call, Cost, Examples, LayerRule, LeftOut, register
from heeler.sketch.matrices import MatrixSpec
from heeler.sketch.passes import SketchListener
from heeler.sketch.sketcher import Sketcher

__all__ = [
    "Call",
    "Cost",
    "Coverage",
    "Examples",
    "LayerRule",
    "LeftOut",
    "MatrixSpec",
    "SketchListener",
    "Sketcher",
    "register",
]
