"""What counts as training. This is the one place that says so.

An iteration of the loader trains if, after it handed out a batch and before another iteration did,

- with a model attached: a backward put a gradient into the model; or, where no forward of the model was seen (the loop
  calls `model.loss(x)`), its weights changed;
- without one: an optimizer of PyTorch made a step;
- where neither can be seen (no model attached, and no optimizer of PyTorch has made a step since the sampler was made):
  it was read past its first batch with gradients enabled, or to its end.

So gradient accumulation trains at its first backward, and an evaluation, a look at one batch or a loop that only reads
does not train. What is left of a resumed epoch may be nothing: then reading it to its end is enough.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from heeler.ordering.source import SketchSource


class Training:
    """Sees training happen: in the attached model, or by the steps of any optimizer."""

    def __init__(self) -> None:
        self._source: SketchSource | None = None
        self._steps = [0]
        self._watch_optimizers()

    @property
    def is_attached(self) -> bool:
        return self._source is not None

    def attach(self, source: SketchSource) -> None:
        """Look at this model from now on."""
        self._source = source
        self.close()

    def detach(self) -> None:
        """Look at optimizers again."""
        self._source = None
        self._watch_optimizers()

    def close(self) -> None:
        """Take the hook on optimizers off."""
        self._remove_hook()

    def _watch_optimizers(self) -> None:
        steps = self._steps

        def count(optimizer: Any, args: Any, kwargs: Any) -> None:
            steps[0] += 1

        self._remove_hook = weakref.finalize(self, register_optimizer_step_post_hook(count).remove)

    @property
    def count(self) -> int:
        """Grows with training: backwards of the attached model, or steps of optimizers. Costs next to nothing."""
        return self._steps[0] if self._source is None else self._source.backwards

    @property
    def weights(self) -> int:
        """Changes with the attached model's weights."""
        return 0 if self._source is None else self._source.weights_version

    @property
    def is_blind(self) -> bool:
        """Whether nothing that tells of training has ever been seen, so that reading has to do."""
        return self._source is None and self._steps[0] == 0
