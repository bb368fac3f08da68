"""What the architecture promises, read off the syntax trees."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import heeler

SOURCE = Path(heeler.__file__).parent
PYTORCHS = {
    "_BaseDataLoaderIter",
    "_auto_collation",
    "_collate_fn",
    "_dataset",
    "_dynamo",
    "_getframe",
    "_get_default_store",
    "_index_sampler",
    "_next_data",
    "_next_index",
    "_num_yielded",
    "_orig_mod",
}
"""Underscored names of Python and PyTorch that have no public counterpart."""


def reaches_in(source: str, file: str) -> list[str]:
    """Where it reads an underscored attribute of anything but `self` or its class."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Attribute) or not node.attr.startswith("_") or node.attr.startswith("__"):
            continue
        owner = node.value
        if isinstance(owner, ast.Name) and owner.id in ("self", "cls"):
            continue
        if isinstance(owner, ast.Call) and isinstance(owner.func, ast.Name) and owner.func.id == "super":
            continue
        if node.attr not in PYTORCHS:
            found.append(f"{file}:{node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize("package", ["ordering", "forecast", "stragglers"])
def test_no_module_reads_another_objects_underscored_attribute(package: str) -> None:
    files = sorted((SOURCE / package).rglob("*.py"))
    assert len(files) > 4
    assert not [place for path in files for place in reaches_in(path.read_text(), str(path.relative_to(SOURCE)))]


def test_such_a_read_is_found() -> None:
    source = "def f(sampler):\n    return sampler.session._secret + self._own + super()._take()\n"
    assert reaches_in(source, "f.py") == ["f.py:2: sampler.session._secret"]


def test_nobody_asks_a_rule_what_it_has_not_declared() -> None:
    asked = [
        path
        for path in SOURCE.rglob("*.py")
        for line in path.read_text().splitlines()
        if "getattr(" in line and "rule" in line.split("getattr(")[1]
    ]
    assert not asked


def test_sampler_and_handle_do_not_know_each_other() -> None:
    assert "handle" not in (SOURCE / "ordering" / "sampler.py").read_text().replace("handle's", "").replace(
        "handle.state_dict", ""
    )
    names = {
        node.id
        for node in ast.walk(ast.parse((SOURCE / "ordering" / "session.py").read_text()))
        if isinstance(node, ast.Name)
    }
    assert not {"Sampler", "Handle", "Sketcher"} & names


@pytest.mark.parametrize("package", ["herding", "ordering", "sketch", "integrations"])
@pytest.mark.parametrize("extra", ["levels", "streams"])
def test_the_core_does_not_import_the_extras(package: str, extra: str) -> None:
    for path in (SOURCE / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not [name for name in names if f"{name}.".startswith(f"heeler.{extra}.")], path


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("heeler.herding", {"torch", "numba"}),
        ("heeler", {"torch", "numba", "typer", "rich", "matplotlib", "sklearn"}),
        (
            "heeler.ordering",
            {"numba", "typer", "rich", "matplotlib", "sklearn", "transformers", "lightning", "accelerate"},
        ),
        ("heeler.stragglers", {"numba", "typer", "rich", "matplotlib", "sklearn"}),
    ],
)
def test_imports_stay_light(module: str, unwanted: set[str]) -> None:
    code = f"import sys, {module}; print(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not unwanted & set(loaded)
