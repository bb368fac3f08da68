"""Gradient diversity: how large may the batch be? From the sketches that Heeler holds anyway.

    print(heeler.diversity.advice(handle))
    bound = batch_size_bound(vectors)

`estimators`: from a table of vectors, or from the gradient norms of two batch sizes; `of_handle`: in a run with Heeler;
`weights`: at the weights a model has right now; `streaming`: while training goes, also across workers; `sketching`:
what a sketch does to these numbers; `mechanisms`: Langevin noise and quantized gradients, which raise diversity.
"""

from heeler.diversity.estimators import (
    batch_size_bound,
    bound_from_norms,
    differential_diversity,
    diversity_of,
    gradient_diversity,
    noise_scale,
    sentence,
)
from heeler.diversity.measured import Diversity, Estimate, Measured
from heeler.diversity.mechanisms import add_langevin_noise, quantize, quantize_gradients
from heeler.diversity.of_handle import advice, of
from heeler.diversity.sketching import calibrate, layouts_of, pick_for_calibration
from heeler.diversity.streaming import StreamingDiversity
from heeler.diversity.weights import measure

__all__ = [
    "Diversity",
    "Estimate",
    "Measured",
    "StreamingDiversity",
    "add_langevin_noise",
    "advice",
    "batch_size_bound",
    "bound_from_norms",
    "calibrate",
    "differential_diversity",
    "diversity_of",
    "gradient_diversity",
    "layouts_of",
    "measure",
    "noise_scale",
    "of",
    "pick_for_calibration",
    "quantize",
    "quantize_gradients",
    "sentence",
]
