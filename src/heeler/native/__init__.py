"""Loops in C, for what NumPy has no operation for: compiled once per machine, and called without the GIL.

A source `name.c` has the loops, `name.py` beside it calls them: `loops` those of the solver and its table, `online`
those of the published rules; extras have sources of their own. `rows.h` is what sources share, `build` compiles them,
`call` hands arguments over. Knows nothing of orders.
"""
