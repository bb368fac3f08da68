"""Before a long run: what Heeler will cover and cost, when it can pay, and what will not work."""

from heeler.forecast.checks import Finding
from heeler.forecast.costs import Needs
from heeler.forecast.explain import Explanation, explain
from heeler.forecast.timing import Timing

__all__ = ["Explanation", "Finding", "Needs", "Timing", "explain"]
