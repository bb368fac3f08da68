"""What users touch: the sampler, and what joins it to a model."""

from heeler.ordering.checkpoint import CheckpointError, load, save
from heeler.ordering.findings import suspects
from heeler.ordering.growth import grow
from heeler.ordering.handle import Handle, attach
from heeler.ordering.sampler import Sampler

__all__ = ["CheckpointError", "Handle", "Sampler", "attach", "grow", "load", "save", "suspects"]
