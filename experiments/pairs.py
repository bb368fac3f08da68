"""Two lines of packed runs, seed by seed: how often one ends below the other, at the same rate and length.

    python -m experiments.pairs benchmarks/results/experiments-15-networks.json --of "herd, strata" --than stratified
    python -m experiments.pairs FILE --of "herd, strata" --than random --key train_seconds

Of every problem (a task with its options and schedule) the pairs in which --of ends lower, all pairs, and the least and
the largest quotient.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from experiments.packed import read_source
from experiments.records import Result
from experiments.tuned_tables import problems
from experiments.tuning import last


def quotients(results: Iterable[Result], of: str, than: str, key: str) -> list[float]:
    """`of` ÷ `than` of every two runs that differ in their order alone."""
    ends: dict[tuple[float, int, int], dict[str, float]] = {}
    for result in results:
        run = result.run
        ends.setdefault((run.lr, run.epochs, run.seed), {})[run.name] = last(result, key)
    return [own[of] / own[than] for own in ends.values() if of in own and than in own]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--of", required=True, help="a line's name, such as herd or 'herd, strata'")
    parser.add_argument("--than", required=True)
    parser.add_argument("--key", default="train_loss", help="what is compared: of the last epoch, or train_seconds")
    given = parser.parse_args()
    every: list[float] = []
    for path in given.files:
        for name, results in problems(read_source(path).results).items():
            found = quotients(results, given.of, given.than, given.key)
            every += found
            if found:
                print(f"{name}: {described(found)}")
    print(f"all: {described(every)}" if every else "no two runs differ in these orders alone")


def described(found: list[float]) -> str:
    return f"lower in {sum(q < 1 for q in found)} of {len(found)}, {min(found):.3f} to {max(found):.3f}"


if __name__ == "__main__":
    main()
