"""Robust aggregation: a mean of workers' gradients that up to f bad workers cannot spoil.

`install` puts a rule into a DistributedDataParallel model. The rules themselves are pure functions of (n, d) vectors,
NumPy or torch.
"""

from heeler.robust.attacks import alie, ipm, mimic, mimic_direction, mimic_worker, nan, noise, sign_flip
from heeler.robust.gram import weights
from heeler.robust.hook import Aggregator, install
from heeler.robust.mixing import bucketing, nearest_neighbor_mixing
from heeler.robust.rules import centered_clipping, geometric_median, krum, median, multi_krum, trimmed_mean

__all__ = [
    "Aggregator",
    "alie",
    "bucketing",
    "centered_clipping",
    "geometric_median",
    "install",
    "ipm",
    "krum",
    "median",
    "mimic",
    "mimic_direction",
    "mimic_worker",
    "multi_krum",
    "nan",
    "nearest_neighbor_mixing",
    "noise",
    "sign_flip",
    "trimmed_mean",
    "weights",
]
