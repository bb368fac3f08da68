"""How Heeler says that something is not as it should be: through `logging` and through `warnings`.

Through both, since `logging.basicConfig(filename=...)` would swallow the only word. A filter that turns warnings into
errors must not end a training run in the middle of a backward: the log then has it alone.
"""

from __future__ import annotations

import contextlib
import logging
import warnings

logger = logging.getLogger("heeler")


class HeelerWarning(UserWarning):
    """Something costs sketches or coordination; training goes on."""


def warn(message: str, *values: object) -> None:
    """Say it once: a message with %-places, and what goes into them."""
    logger.warning(message, *values)
    with contextlib.suppress(HeelerWarning):
        warnings.warn(message % values if values else message, HeelerWarning, stacklevel=2)
