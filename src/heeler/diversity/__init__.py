"""Gradient diversity: how large may the batch be? From the sketches that Heeler holds anyway.

    print(heeler.diversity.advice(handle))
    bound = batch_size_bound(vectors)

`of_handle`: in a run with Heeler; `present_weights`: at the weights a model has right now; `estimators`: from a table
of vectors; `two_batch_sizes`: from gradient norms; `streaming_diversity`: while training goes, also across workers;
`sketch_error`: what a sketch does to these numbers; `mechanisms`: Langevin noise and quantized gradients, which raise
diversity.
"""

from heeler.diversity.estimators import (
    batch_size_bound,
    differential_diversity,
    diversity_of,
    gradient_diversity,
    noise_scale,
)
from heeler.diversity.measured import Diversity, Measured, sentence
from heeler.diversity.mechanisms import add_langevin_noise, quantize, quantize_gradients
from heeler.diversity.of_handle import advice, of
from heeler.diversity.present_weights import measure
from heeler.diversity.sketch_error import layouts_of
from heeler.diversity.streaming_diversity import StreamingDiversity
from heeler.diversity.two_batch_sizes import bound_from_norms

__all__ = [
    "Diversity",
    "Measured",
    "StreamingDiversity",
    "add_langevin_noise",
    "advice",
    "batch_size_bound",
    "bound_from_norms",
    "differential_diversity",
    "diversity_of",
    "gradient_diversity",
    "layouts_of",
    "measure",
    "noise_scale",
    "of",
    "quantize",
    "quantize_gradients",
    "sentence",
]
