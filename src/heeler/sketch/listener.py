"""Who is told about a model's forwards and backwards."""

from __future__ import annotations

from typing import Protocol


class SketchListener(Protocol):
    """Told when something happens; what has happened is pulled, with `Sketcher.pop_passes`."""

    def forward_begins(self) -> None:
        """A pass is about to open: called once per sketched forward, before its sketch can be popped.

        Eager: as the forward starts. Compiled code can call nobody, so there it comes when the backward delivers the
        first gradient.
        """

    def backward_ended(self) -> None:
        """A backward put a gradient into a pass. Reentrant checkpointing calls it once per checkpointed segment."""

    def forward_counted(self, rows: int) -> None:
        """A forward of `rows` examples begins that is not sketched, since `sketching` is False."""


class Nobody:
    """The listener of a sketcher that has none."""

    def forward_begins(self) -> None: ...

    def backward_ended(self) -> None: ...

    def forward_counted(self, rows: int) -> None: ...
