"""Heeler puts training examples into an order in which SGD converges faster: two changed lines in a PyTorch script."""

from heeler.forecast import Explanation, explain
from heeler.ordering import CheckpointError, Handle, Sampler, attach, grow, load, save

__version__ = "0.1.0"
__all__ = [
    "CheckpointError",
    "Explanation",
    "Handle",
    "Sampler",
    "__version__",
    "attach",
    "explain",
    "grow",
    "load",
    "save",
]
