"""Orders in two levels: blocks are put in an order by their sums, examples within two half blocks at a time.

An order is expanded where it is read, and never held as a whole.
"""

from heeler.levels.rule import BlockHerd, two_levels

__all__ = ["BlockHerd", "two_levels"]
