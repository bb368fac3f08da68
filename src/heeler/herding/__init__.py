"""The mathematics of ordering, on arrays alone: balance sweeps, a solver, bounds, a table, and the rules by name.

Knows nothing of models or samplers, and does not import torch. Kernels are compiled, or loaded, at first use.
"""

from heeler.herding.bounds import Bound, herding_bound, parallel_herding_bound
from heeler.herding.rules import RULES, OrderingRule, adopt, make_rule, rule_class, rule_names
from heeler.herding.solver import Solution, solve
from heeler.herding.sweeps import balance_sweep, coordinated_pair_sweep, pair_sweep
from heeler.herding.table import SketchTable

__all__ = [
    "RULES",
    "Bound",
    "OrderingRule",
    "SketchTable",
    "Solution",
    "adopt",
    "balance_sweep",
    "coordinated_pair_sweep",
    "herding_bound",
    "make_rule",
    "pair_sweep",
    "parallel_herding_bound",
    "rule_class",
    "rule_names",
    "solve",
]
