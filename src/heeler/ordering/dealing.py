"""One global order, dealt out to the workers batch by batch."""

import numpy as np
from numpy.typing import NDArray


def deal(
    order: NDArray[np.int64], workers: int, rank: int, batch_size: int, *, drop_last: bool = False
) -> NDArray[np.int64]:
    """The indices of worker `rank`: its `batch_size` of every global batch of `workers * batch_size` examples.

    Step t of all workers together trains on `order[t * n * B : (t + 1) * n * B]`, so n workers walk the order that one
    worker would walk with n times the batch. Every worker gets equally many: what is left after the last full global
    batch is dealt evenly, filled up from the order's beginning as `DistributedSampler` does, or cut with `drop_last`.

    Args:
        order: (N,) a permutation.

    Returns:
        (ceil(N / n),) or, with `drop_last`, (floor(N / n),).
    """
    if workers == 1:
        return order
    per_step = workers * batch_size
    full = len(order) // per_step * per_step
    rest = order[full:]
    if drop_last:
        share = len(rest) // workers
    else:
        share = -(-len(rest) // workers)
        rest = np.concatenate([rest, np.resize(order, share * workers - len(rest))])
    own = order[:full].reshape(-1, workers, batch_size)[:, rank].reshape(-1)
    return np.concatenate([own, rest[rank * share : (rank + 1) * share]])
