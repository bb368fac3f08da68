"""A GradScaler: the one that `attach` is given, and one that it was not given."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from heeler.notices import warn

_DEPTH = 16
"""Frames between an optimizer's hook and the scaler that makes the step: its `step` and the optimizer's wrappers."""


def unwrapped_scaler(scaler: Any) -> Any:
    """The GradScaler inside timm's NativeScaler, a precision plugin of Lightning's or an optimizer of Accelerate's."""
    inner = scaler
    for _ in range(2):
        if inner is None or _is_scaler(inner):
            return inner
        names = [name for name in ("_scaler", "scaler") if hasattr(inner, name)]
        if not names:
            break
        inner = getattr(inner, names[0])
    if inner is None or _is_scaler(inner):
        return inner
    raise TypeError(
        f"scaler= must be a GradScaler, with scale() and is_enabled(), or hold one as timm's NativeScaler does, not "
        f"{type(scaler).__name__}"
    )


def _is_scaler(scaler: Any) -> bool:
    return callable(getattr(scaler, "scale", None)) and callable(getattr(scaler, "is_enabled", None))


class ScalerWatch:
    """Sees, at the first step of the optimizer of these parameters, whether a GradScaler makes that step.

    The scaler's factor changes during training, so sketches that carry it cannot be compared with each other.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        numbers, seen = {id(p) for p in parameters}, [False]

        def look(optimizer: Any, args: Any, kwargs: Any) -> None:
            if torch.compiler.is_compiling():  # a compiled step: frames cannot be looked at there
                return
            if seen[0] or not any(id(p) in numbers for group in optimizer.param_groups for p in group["params"]):
                return
            seen[0] = True  # a hook cannot be taken off while hooks run
            if _is_inside_scaler():
                warn(
                    "a GradScaler scales the loss, and attach was not given it: sketches carry its factor, which "
                    "changes during training. Give it: heeler.attach(..., scaler=scaler), or the NativeScaler that "
                    "holds it"
                )

        self.close = weakref.finalize(self, register_optimizer_step_pre_hook(look).remove)
        """Take the hook off."""


def _is_inside_scaler() -> bool:
    frame: Any = sys._getframe(2)
    for _ in range(_DEPTH):
        if frame is None:
            return False
        if frame.f_globals.get("__name__", "").endswith("amp.grad_scaler"):
            scaler = frame.f_locals.get("self")
            return _is_scaler(scaler) and bool(scaler.is_enabled())
        frame = frame.f_back
    return False
