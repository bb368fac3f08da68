"""The tables of docs/will-it-help.md are what the benchmarks make of the stored files."""

import json

import pytest

from benchmarks import plateaus, realized, verdicts
from tests.docs.blocks import ROOT

PAGE = (ROOT / "docs" / "will-it-help.md").read_text()


def stored(name: str) -> list[dict[str, object]]:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


@pytest.mark.parametrize("name", ["realized", "verdicts", "plateaus"])
def test_tables_are_of_the_stored_files(name: str) -> None:
    made = {"realized": realized.table, "verdicts": verdicts.table, "plateaus": plateaus.table}[name](stored(name))
    after = PAGE.split(f"<!-- table: {name} -->\n\n")[1]
    assert after.startswith(made + "\n\n")
