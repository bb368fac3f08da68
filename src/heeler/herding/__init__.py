"""The mathematics of ordering, on arrays alone: balance passes, a solver, bounds, and the field's online rules by name.

Knows nothing of models or samplers. Importing it compiles nothing; kernels load at first use.
"""

from heeler.herding.bounds import Bound, herding_bound, parallel_herding_bound
from heeler.herding.passes import balance_pass, coordinated_pair_pass, pair_pass
from heeler.herding.rules import RULES, Rule, make_rule, rule_names
from heeler.herding.solver import Solution, solve, solve_with_report

__all__ = [
    "RULES",
    "Bound",
    "Rule",
    "Solution",
    "balance_pass",
    "coordinated_pair_pass",
    "herding_bound",
    "make_rule",
    "pair_pass",
    "parallel_herding_bound",
    "rule_names",
    "solve",
    "solve_with_report",
]
