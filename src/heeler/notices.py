"""How Heeler says that something is not as it should be: through `warnings`.

A filter that turns warnings into errors must not end a training run in the middle of a backward: then the logger
`heeler` has it instead.
"""

from __future__ import annotations

import logging
import warnings

logger = logging.getLogger("heeler")


class HeelerWarning(UserWarning):
    """Something costs sketches or coordination; training goes on."""


def warn(message: str, *values: object) -> None:
    """A message with %-places, and what goes into them."""
    text = message % values if values else message
    try:
        warnings.warn(text, HeelerWarning, stacklevel=2)
    except HeelerWarning:
        logger.warning("%s", text)
