"""Before a long run: what Heeler will cover and cost, when it can pay, and what will not work."""

from heeler.forecast.explain import Explanation, explain
from heeler.forecast.findings import Finding
from heeler.forecast.run_costs import Needs
from heeler.forecast.step_timing import Timing

__all__ = ["Explanation", "Finding", "Needs", "Timing", "explain"]
