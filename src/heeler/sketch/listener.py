"""Who is told about a model's forwards and backwards."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class SketchListener(Protocol):
    """Told when something happens; what has happened is pulled, with `Sketcher.pop_passes`."""

    def forward_begins(self, rows: int, inputs: Tensor | None) -> Any:
        """A pass over `rows` examples is about to open; returns a stamp, which comes back with its sketches.

        inputs: the model's first tensor argument. Called once per sketched forward, as it starts. Inside a model that
        was compiled in place nobody can be called: there it comes with the first gradient, without inputs.
        """

    def forward_counted(self, rows: int | None) -> None:
        """A forward of `rows` examples begins that is not sketched, since `sketching` is False.

        rows: None inside a model that was compiled in place. There it comes with the backward, and nobody knows them.
        """

    def coverage_changed(self) -> None:
        """A layer with a part in earlier sketches is left out from now on: they cannot be compared with new ones."""


class Nobody:
    """The listener of a sketcher that has none."""

    def forward_begins(self, rows: int, inputs: Tensor | None) -> Any: ...

    def forward_counted(self, rows: int | None) -> None: ...

    def coverage_changed(self) -> None: ...
