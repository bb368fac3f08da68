"""The mathematics of ordering, on arrays alone: balance passes, a solver, bounds, and the field's online rules by name.

Knows nothing of models or samplers. Importing it compiles nothing; kernels load at first use.
"""

from heeler.herding.bounds import Bound, herding_bound, parallel_herding_bound
from heeler.herding.passes import balance_pass, coordinated_pair_pass, pair_pass
from heeler.herding.solver import Solution, solve, solve_with_report

__all__ = [
    "Bound",
    "Solution",
    "balance_pass",
    "coordinated_pair_pass",
    "herding_bound",
    "pair_pass",
    "parallel_herding_bound",
    "solve",
    "solve_with_report",
]
