"""Two levels: blocks are put in an order by their sums, examples within two half blocks at a time.

For data in shards of their own: `walk_blocks` orders shards by their sums, `halve` cuts one in two, and `BlockOrder`
expands both into an order of examples that is never held as a whole.
"""

from heeler.herding.lazy import LazyOrder
from heeler.herding.levels.halving import Blocks, Walk, halve, walk_blocks
from heeler.herding.levels.order import BlockOrder
from heeler.herding.levels.scatter import Scatter
from heeler.herding.levels.table import BlockTable, Snapshot

__all__ = ["BlockOrder", "BlockTable", "Blocks", "LazyOrder", "Scatter", "Snapshot", "Walk", "halve", "walk_blocks"]
