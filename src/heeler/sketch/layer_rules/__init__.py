"""One small file of rules per family of layers, in a registry that users can add to.

A rule says how the per-example gradient of a module's own parameters follows from what the module was called with and
from the gradient of its output. To add one for a layer of your own:

    from heeler.sketch import LayerRule, MatrixSpec, register

    @register(MyLinear)
    class MyLinearRule(LayerRule):
        def declare(self, module):                      # which parameters, seen as which matrices and vectors
            self.matrices = [MatrixSpec("weight", "bias", rows=module.n_out, cols=module.n_in)]

        def keep(self, layer, call):                    # in forward: the little that backward will need
            return (layer.matrices[0].input(call.split(call.input)),)   # (B, T, k)

        def sketch(self, layer, examples, grads, xp):   # in backward: the (B, K) sketch of this call
            gp = layer.matrices[0].grad(examples.split(grads[0]))       # (B, T, k)
            return layer.matrices[0].contract(gp, xp)

Rules are looked up along the class's MRO, so subclasses (FSDP2 makes them) keep their rule, and by class name for
classes of packages that are not imported here.
"""

from heeler.sketch.examples import Examples
from heeler.sketch.layer_rules import attention, conv, embedding, linear, norm, recurrent
from heeler.sketch.layer_rules.base import Call, Cost, LayerRule, LeftOut, find_rule, register

__all__ = [
    "Call",
    "Cost",
    "Examples",
    "LayerRule",
    "LeftOut",
    "attention",
    "conv",
    "embedding",
    "find_rule",
    "linear",
    "norm",
    "recurrent",
    "register",
]
