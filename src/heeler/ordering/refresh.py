"""In which epochs sketches are taken: often at first, while gradients change fast, then now and then.

Between them new orders come from the same sketches, and the model runs without taps, so that what tapping costs is
spread over all epochs (RESULTS.md, "How often sketches are taken").
"""

REFRESH = 8
"""Epochs from one sketch of an example to the next, at most, by default."""


def sketched_epochs(epochs: int, refresh: int) -> int:
    """In how many of the first `epochs` epochs sketches are taken."""
    return sum(is_due(age, refresh) for age in range(1, epochs + 1))


def is_due(age: int, refresh: int) -> bool:
    """Whether sketches are taken in the `age`-th epoch (1, 2, ...) since they began: 1, 2, 4, 8, 16, 24 for 8."""
    return age % refresh == 0 or (age < refresh and age & (age - 1) == 0)
