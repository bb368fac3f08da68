"""Robust aggregation: a mean of workers' gradients that up to f bad workers cannot spoil.

`install` puts a rule into a DistributedDataParallel model. The rules themselves are pure functions of (n, d) vectors,
NumPy or torch.
"""

from heeler.robust.aggregation_rules import centered_clipping, geometric_median, krum, median, multi_krum, trimmed_mean
from heeler.robust.ddp_aggregator import Aggregator
from heeler.robust.gram_weights import weights
from heeler.robust.install_rule import install

__all__ = [
    "Aggregator",
    "centered_clipping",
    "geometric_median",
    "install",
    "krum",
    "median",
    "multi_krum",
    "trimmed_mean",
    "weights",
]
