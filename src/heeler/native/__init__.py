"""Loops in C, for what NumPy has no operation for: compiled once per machine, and called without the GIL.

`loops.c` has the loops, `build` compiles them, `loops` calls them. Knows nothing of orders.
"""
