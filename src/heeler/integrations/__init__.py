"""Heeler in other people's training loops: `heeler.integrations.transformers`, `.accelerate` and `.lightning`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_FRAMEWORKS = ("accelerate", "lightning", "transformers")


def __getattr__(name: str) -> Any:
    """Import a framework at first use only."""
    if name not in _FRAMEWORKS:
        raise AttributeError(f"module 'heeler.integrations' has no attribute {name!r}")
    return import_module(f"heeler.integrations.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_FRAMEWORKS})
