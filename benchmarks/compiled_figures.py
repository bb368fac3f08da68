"""What `benchmarks.compiled` makes of a run's epochs: arithmetic alone, so that stored files can be brought up to date.

    python -m benchmarks.compiled_figures benchmarks/results/compiled-gpt-run-h200.json

Every epoch of a plain and of an attached model has a turnover (the wait for its order), a head (its first steps, in
which rows are checked and code is compiled) and a body (all other steps). Heads of epochs in which something was
compiled are left out of every ratio, of both models.

What happens once counts once. An epoch of 1,000 steps is one that was measured plus so many more steps as usual: a
body becomes body + (stretch - 1) x the median body of its kind, where the kinds are plain, untapped and tapped. Heads
are not stretched: checks are so many per epoch. Turnovers are, likewise, for finding an order takes time in proportion
to the examples; their kinds are plain, behind a tapped epoch (the loop waits for the whole solve) and behind an
untapped one (the order was found meanwhile).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

HEAD = 12
"""Steps at an epoch's start: more than are checked."""
LONG = 1000
"""Steps of the epochs that a run is stretched to."""
NAMES = ("plain", "heeler")

Epochs = list[dict[str, Any]]


def figures(epochs: Epochs, steps: int) -> dict[str, Any]:
    """The ratios of a run of epochs of `steps` steps each, as it was and with `LONG` steps per epoch."""
    stretch = (LONG - HEAD) / (steps - HEAD)
    bodies = [e["heeler"]["body"] / e["plain"]["body"] for e in epochs]
    return {
        "ratio": _ratio(epochs, 1.0, waits=False),
        "ratio_with_turnovers": _ratio(epochs, 1.0, waits=True),
        "ratio_at_1000": _ratio(epochs, stretch, waits=False),
        "ratio_at_1000_with_turnovers": _ratio(epochs, stretch, waits=True),
        "untapped": spread([r for r, e in zip(bodies, epochs, strict=True) if not e["sketched"]]),
        "tapped": spread([r for r, e in zip(bodies, epochs, strict=True) if e["sketched"]]),
        "turnover_seconds": statistics.median(e["heeler"]["turnover"] for e in epochs[1:]),
    }


def _ratio(epochs: Epochs, stretch: float, *, waits: bool) -> float:
    total = {name: _seconds(epochs, name, stretch, waits=waits) for name in NAMES}
    return total["heeler"] / total["plain"]


def _seconds(epochs: Epochs, name: str, stretch: float, *, waits: bool) -> float:
    """Of one model's run, bodies (and turnovers) stretched."""
    tapped = [name == "heeler" and e["sketched"] for e in epochs]
    # fsum: sum rounds otherwise from Python 3.12 on, and stored figures are to come out the same
    total = math.fsum(e[name]["head"] for number, e in enumerate(epochs) if number and not sum(e["graphs"].values()))
    total += math.fsum(stretched([e[name]["body"] for e in epochs], tapped, stretch))
    if waits:  # the first epoch's order is there before anything is
        behind = tapped[:-1]
        total += math.fsum(stretched([e[name]["turnover"] for e in epochs[1:]], behind, stretch))
    return float(total)


def stretched(seconds: list[float], kinds: list[bool], stretch: float) -> list[float]:
    """Each with (stretch - 1) medians of its kind more."""
    pairs = list(zip(seconds, kinds, strict=True))
    usual = {kind: statistics.median(s for s, k in pairs if k == kind) for kind in set(kinds)}
    return [s + (stretch - 1) * usual[kind] for s, kind in pairs]


def spread(values: list[float]) -> dict[str, float]:
    """The median and the quartiles."""
    ordered = sorted(values)
    if not ordered:
        return {}
    at = {"low": len(ordered) // 4, "high": (3 * len(ordered)) // 4}
    return {"median": statistics.median(ordered), **{name: ordered[place] for name, place in at.items()}}


def brought_up_to_date(results: dict[str, Any]) -> dict[str, Any]:
    """A stored file's content with the figures of its runs computed anew from their epochs; other parts as they are."""
    parts = []
    for part in results["parts"]:
        found = figures(part["epochs"], part["steps_per_epoch"]) if "epochs" in part else {}
        parts.append({"part": part["part"], **found, **{k: v for k, v in part.items() if k not in {"part", *found}}})
    return {**results, "parts": parts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="of `benchmarks.compiled --out`; they are written anew")
    for path in parser.parse_args().files:
        results = brought_up_to_date(json.loads(path.read_text()))
        path.write_text(json.dumps(results, indent=1) + "\n")
        for part in results["parts"]:
            print(path.name, part["part"], {k: v for k, v in part.items() if k.startswith("ratio")})


if __name__ == "__main__":
    main()
