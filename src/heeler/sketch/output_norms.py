"""The norm of each example's gradient at the model's output, from a hook on that output: it costs next to nothing.

For cross-entropy it is ‖p − y‖ (EL2N, arXiv 2107.07075), for a squared error the distance from the target.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from heeler.sketch.examples import tensors_in
from heeler.sketch.rows_per_example import ONE_ROW, RowsPerExample


class Noted:
    """Where the norms of a forward go."""

    per: RowsPerExample = ONE_ROW
    """How the examples' rows lie."""
    norms: Tensor | None = None
    """(B,), once its backward has been."""

    def add_norms(self, norms: Tensor) -> None:
        """norms: (k·B,), of rows."""
        if self.per.number > 1:
            norms = self.per.norms(norms)
        self.norms = norms if self.norms is None else self.norms + norms


def note_norms(output: Any, rows: int, batch_dim: int, noted: Noted, scaler: Any = None) -> None:
    """As soon as there is a gradient at `output`, put its norms per row into `noted`.

    Of the first tensor in `output` with so many rows. scaler: the GradScaler whose factor is taken out.
    """
    for tensor in (output,) if isinstance(output, Tensor) else tensors_in(output):
        dim = batch_dim if tensor.ndim > batch_dim else 0
        if tensor.requires_grad and tensor.ndim and tensor.shape[dim] == rows:
            tensor.register_hook(partial(_note, dim=dim, noted=noted, scaler=scaler))
            return


def _note(grad: Tensor | None, dim: int, noted: Noted, scaler: Any) -> None:
    if grad is None:  # DDP gives none to outputs that no loss is made of
        return
    try:
        rows = grad.detach().movedim(dim, 0).flatten(1) if grad.ndim > 1 else grad.detach().unsqueeze(1)
        norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.promote_types(rows.dtype, torch.float32))
        if scaler is not None and scaler.is_enabled():
            norms = norms / scaler.scale(torch.ones((), device=norms.device))  # does not wait for the device
        noted.add_norms(norms)
    except Exception:  # a gradient of another kind than any that we know: the backward shall go on
        return
