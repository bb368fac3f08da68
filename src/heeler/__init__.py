"""Heeler reorders training data so that SGD converges in fewer epochs: two changed lines in a PyTorch script."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from heeler.notices import HeelerWarning

if TYPE_CHECKING:
    from heeler.forecast import Explanation, explain
    from heeler.herding import order_by
    from heeler.levels import two_levels
    from heeler.ordering import CheckpointError, Handle, Sampler, attach, grow, load, save, suspects
    from heeler.selection import Selection, select

__version__ = "0.3.0.dev0"
__all__ = [
    "CheckpointError",
    "Explanation",
    "Handle",
    "HeelerWarning",
    "Sampler",
    "Selection",
    "__version__",
    "attach",
    "explain",
    "grow",
    "load",
    "order_by",
    "save",
    "select",
    "suspects",
    "two_levels",
]
_PACKAGES = (
    *("diversity", "forecast", "herding", "integrations", "levels", "ordering", "robust", "selection", "sketch"),
    *("stragglers", "streams"),
)
_HOMES = {"Explanation": "forecast", "explain": "forecast"}
_HOMES |= dict.fromkeys(("Selection", "select"), "selection")
_HOMES |= {"order_by": "herding", "two_levels": "levels"}


def __getattr__(name: str) -> Any:
    """Import at first use, so that `heeler.herding` can be had without torch."""
    if name in _PACKAGES:
        return import_module(f"heeler.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'heeler' has no attribute {name!r}")
    home = _HOMES.get(name, "ordering")
    value = globals()[name] = getattr(import_module(f"heeler.{home}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})
