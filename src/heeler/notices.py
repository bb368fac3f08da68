"""How Heeler says that something is not as it should be: once, by `warnings`, or else by `logging`.

By `warnings` (`HeelerWarning`), which everybody sees who has not said otherwise. Where a filter would swallow it, or
would make an error of it and so end a training run in the middle of a backward, the logger `heeler` has it instead.
"""

from __future__ import annotations

import logging
import sys
import warnings

logger = logging.getLogger("heeler")


class HeelerWarning(UserWarning):
    """Something costs sketches or coordination; training goes on."""


def warn(message: str, *values: object) -> None:
    """Say it once: a message with %-places, and what goes into them."""
    text = message % values if values else message
    frame = sys._getframe(1)
    if not _is_ignored(text, frame.f_globals.get("__name__", ""), frame.f_lineno):
        try:
            warnings.warn(text, HeelerWarning, stacklevel=2)
            return
        except HeelerWarning:  # a filter makes errors of warnings
            pass
    logger.warning("%s", text)


def _is_ignored(text: str, module: str, line: int) -> bool:
    """Whether the first filter that fits, as `warnings` looks for it, is one that swallows."""
    for action, pattern, category, modules, number in warnings.filters:
        fits = issubclass(HeelerWarning, category) and number in (0, line)
        if fits and _matches(pattern, text) and _matches(modules, module):
            return action == "ignore"
    return False


def _matches(pattern: object, text: str) -> bool:
    """Patterns are compiled, but for those that Python starts with."""
    if pattern is None or isinstance(pattern, str):
        return pattern in (None, text)
    return bool(pattern.match(text))  # type: ignore[attr-defined]
