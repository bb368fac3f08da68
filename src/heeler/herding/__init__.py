"""The mathematics of ordering, on arrays alone: balance sweeps, a solver, bounds, a table, and the rules by name.

Knows nothing of models or samplers, and does not import torch. Kernels are compiled, or loaded, at first use.
"""

from heeler.herding.batches import solve_batches
from heeler.herding.rules import RULES, make_rule, rule_class, rule_names
from heeler.herding.rules.by_score import order_by
from heeler.herding.rules.protocol import OrderingRule
from heeler.herding.rules.spec import RuleSpec
from heeler.herding.solver import Solution, solve
from heeler.herding.sweeps import Bound, balance_sweep, herding_bound, pair_sweep
from heeler.herding.table import SketchTable

__all__ = ["RULES", "OrderingRule", "RuleSpec", "make_rule", "order_by", "rule_class", "rule_names"]
__all__ += ["Bound", "SketchTable", "Solution", "balance_sweep", "herding_bound", "pair_sweep"]
__all__ += ["solve", "solve_batches"]
