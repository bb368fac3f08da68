"""Boxes, arrows and notes on an empty canvas, for the documentation's pictures."""

from __future__ import annotations

from typing import Any

from numpy.typing import ArrayLike


def canvas(width: float, height: float) -> tuple[Any, Any]:
    """A figure without axes, in units of its own."""
    figure, axes = pyplot().subplots(figsize=(0.8 * width, 0.8 * height))
    figure.subplots_adjust(left=0, right=1, bottom=0, top=1)
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.set_axis_off()
    return figure, axes


def box(axes: Any, x: float, y: float, width: float, height: float, text: str, colour: str) -> None:
    """A filled box with white text."""
    from matplotlib.patches import FancyBboxPatch

    style = f"round,pad=0,rounding_size={min(0.12, height / 4)}"
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=colour, edgecolor="none"))
    if text:
        note(axes, x + width / 2, y + height / 2, text, colour="white", weight="bold")


def arrow(axes: Any, start: ArrayLike, end: ArrayLike, colour: str, width: float = 1.4) -> None:
    style = {"arrowstyle": "-|>", "color": colour, "linewidth": width, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", xy=end, xytext=start, arrowprops=style)


def note(
    axes: Any,
    x: float,
    y: float,
    text: str,
    *,
    size: float = 10,
    align: str = "center",
    colour: str = "#222222",
    weight: str = "normal",
) -> None:
    axes.text(x, y, text, fontsize=size, ha=align, va="center", color=colour, fontweight=weight)


def pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt
