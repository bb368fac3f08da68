"""One small file of rules per family of layers, in a registry that users can add to.

A rule says how the per-example gradient of a module's own parameters follows from what the module was called with and
from the gradient of its output; docs/layer-rules.md says how to write one. Rules are looked up along the class's MRO,
so subclasses (FSDP2 makes them) keep their rule, and by name for classes of packages that are not imported here. Norms
are also recognised by what they compute, see `found_norm`.
"""

from heeler.sketch.examples import Examples
from heeler.sketch.layer_rules import attention, cells, conv, embedding, linear, norm, recurrent  # noqa: F401 - they register
from heeler.sketch.layer_rules.base import Call, Cost, LayerRule, LeftOut, find_rule, register
from heeler.sketch.layer_rules.found_norm import found_norm

__all__ = ["Call", "Cost", "Examples", "LayerRule", "LeftOut", "find_rule", "found_norm", "register"]
