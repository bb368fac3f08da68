"""Files, functions and numbers that the pages name are those of the code."""

import ast
import re

import pytest

import heeler
from heeler import diversity, herding, robust, sketch
from heeler.herding import OrderingRule, rule_class, rule_names
from tests.docs.blocks import ROOT

CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
STABILITY = (ROOT / "docs" / "stability.md").read_text()


def rows(text):
    """Cells of every row of every table, without heads and rules."""
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    return [[cell.strip() for cell in row.strip("|").split("|")] for t in tables for row in t.splitlines()[2:]]


def section(text, title):
    return re.split(r"^#+ ", text.split(title, 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


WALK = "### From `backward()` to the next order"
STOPS = [row[:3] for row in rows(section(CONTRIBUTING, WALK))]
CHANGES = rows(section(CONTRIBUTING, "### What to touch"))


def test_there_are_stops_and_changes():
    assert 8 <= len(STOPS) <= 12
    assert len(CHANGES) >= 10


@pytest.mark.parametrize("stop", STOPS, ids=lambda stop: stop[2])
def test_every_stop_is_in_the_code(stop):
    _, file, function = (cell.strip("`") for cell in stop)
    tree = ast.parse((ROOT / "src" / "heeler" / file).read_text())
    for name in function.split("."):
        found = [n for n in tree.body if isinstance(n, (ast.ClassDef, ast.FunctionDef)) and n.name == name]
        assert found, f"{file} has no {function}"
        tree = found[0]


def test_the_map_names_what_is_there():
    tree = CONTRIBUTING.split("```text\n")[1].split("```")[0]
    named = re.findall(r"^ *([\w/]+(?:/|\.py))  ", tree, re.MULTILINE) + re.findall(r"; (\w+\.py)\b", tree)
    assert len(named) > 20
    there = {path.name for path in [*ROOT.iterdir(), *(ROOT / "src").rglob("*")]}
    assert [name for name in named if name.rstrip("/").split("/")[-1] not in there] == []
    assert {path.name for path in (ROOT / "src" / "heeler").iterdir() if (path / "__init__.py").exists()} <= {
        name.rstrip("/") for name in named
    }


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change[0])
def test_every_file_to_touch_is_there(change):
    named = re.findall(r"`((?:src|tests|docs)/[^`]+|pyproject\.toml)`", change[1])
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []
    code = "\n".join((ROOT / path).read_text() for path in named if path.endswith(".py"))
    names = [
        name.split(".")[-1] for name in re.findall(r"`([A-Za-z_.]+)`", change[1]) if not name.endswith((".py", ".toml"))
    ]
    assert [name for name in names if not re.search(rf"^ *(?:def|class) {name}\b", code, re.MULTILINE)] == []


def test_the_pages_state_what_rules_declare():
    page = (ROOT / "docs" / "orders.md").read_text()
    table = {row[0].strip("`"): row for row in rows(section(page, "### Saying what it can do"))}
    assert set(table) == {
        *("needs_vectors", "keeps_table", "table", "coordinates_shards", "solves_in_background", "dim"),
        *("uses_strata", "needs_strata", "own_examples_only"),
    }
    for attribute, row in table.items():
        default = getattr(OrderingRule, attribute)
        assert row[1] == f"`{default}`"
        if isinstance(default, bool):
            set_by = {name for name in rule_names() if getattr(rule_class(name), attribute) is not default}
            assert set(re.findall(r"`([a-z-]+)`", row[3])) == set_by
    listed = {name for row in rows(page) for name in re.findall(r"`([a-z-]+)`", row[0])}
    assert set(rule_names()) <= listed


def test_versions_agree():
    places = {
        "CITATION.cff": r"^version: (.+)$",
        "CHANGELOG.md": r"^## (.+)$",  # the newest heading
        "pyproject.toml": r'^version = "(.+)"$',
        "README.md": r"heeler-(\S+?)-py3",
    }
    for file, pattern in places.items():
        assert re.search(pattern, (ROOT / file).read_text(), re.MULTILINE)[1] == heeler.__version__, file
    assert set(re.findall(places["README.md"], (ROOT / "README.md").read_text())) == {heeler.__version__}


def test_public_names_are_there_and_documented():
    table = {row[0].strip("`"): set(re.findall(r"`(\w+)`", row[1])) for row in rows(section(STABILITY, "## Public"))}
    assert table["heeler"] == set(heeler.__all__)
    assert table["heeler.sketch"] - {"__all__"} == set(sketch.__all__)
    assert table["heeler.herding"] - {"__all__"} <= set(herding.__all__)
    reference = (ROOT / "docs" / "reference.md").read_text()
    for module, names in (
        ("heeler", heeler.__all__),
        ("heeler.herding", herding.__all__),
        ("heeler.sketch", sketch.__all__),
    ):
        missing = [name for name in names if f"::: {module}.{name}\n" not in reference]
        assert set(missing) <= {"__version__", "RULES"}
    assert "::: heeler.diversity\n" in reference
    assert "::: heeler.robust\n" in reference
    assert all(hasattr(robust, name) for name in robust.__all__)
    assert all(hasattr(diversity, name) for name in diversity.__all__)


def test_public_names_come_at_first_use():
    for name in heeler.__all__:
        assert getattr(heeler, name) is not None
    assert set(heeler.__all__) | {"herding", "sketch"} <= set(dir(heeler))
    with pytest.raises(AttributeError, match="no attribute 'Smapler'"):
        heeler.Smapler  # noqa: B018
