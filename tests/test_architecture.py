"""What the architecture promises, read off the syntax trees."""

import ast
import subprocess
import sys
from importlib.util import resolve_name
from pathlib import Path

import pytest

import heeler

SOURCE = Path(heeler.__file__).parent
CORE = ["native", "herding", "gpu", "sketch", "ordering", "notices.py", "torch_private.py"]
NEED_NO_EXTRA = ["forecast", "integrations"]
"""They are no part of the core and might know the extras, but have no need to."""
EXTRAS = {"diversity", "selection", "robust", "stragglers", "streams", "levels"}
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


def names_in(module: str) -> set[str]:
    """All names that the code of a module uses, prose left aside."""
    nodes = list(ast.walk(ast.parse((SOURCE / "ordering" / module).read_text())))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    imports = (node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom)))
    return names | {alias.name for node in imports for alias in node.names}


def test_sampler_and_handle_do_not_know_each_other() -> None:
    assert not [name for name in names_in("sampler.py") if "handle" in name.lower()]
    assert not {"Sampler", "Handle", "Sketcher"} & names_in("session.py")
    assert {"Sampler", "Session"} <= names_in("handle.py")


def imported(source: str, package: str) -> set[str]:
    """All modules and names that a module of `package` imports, anywhere in it, or reaches through `heeler`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            name = "." * node.level + (node.module or "")
            module = resolve_name(name, package) if node.level else name
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            found.add(ast.unparse(node))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            found |= {argument.value for argument in node.args if isinstance(argument, ast.Constant)}
    return {name for name in found if isinstance(name, str) and name.startswith("heeler.")}


def extras_in(source: str, package: str) -> set[str]:
    """The extras among them; some of their names are also names of `heeler`."""
    homes = {name: heeler._HOMES.get(name, "") for name in heeler.__all__}
    second = {name.split(".")[1] for name in imported(source, package)}
    return {homes.get(name, name) for name in second} & EXTRAS


def test_the_core_does_not_import_the_extras() -> None:
    places = [SOURCE / name for name in CORE + NEED_NO_EXTRA]
    files = [path for place in places for path in ([place] if place.is_file() else sorted(place.rglob("*.py")))]
    assert len(files) > 80
    for path in files:
        package = ".".join(("heeler", *path.relative_to(SOURCE).parent.parts))
        assert not extras_in(path.read_text(), package), path


@pytest.mark.parametrize(
    "source",
    [
        "import heeler.levels",
        "from heeler.levels.rule import BlockHerd",
        "from heeler import levels",
        "from heeler import two_levels",
        "from ..levels import BlockHerd",
        "def f():\n    from heeler.levels import BlockHerd",
        "if TYPE_CHECKING:\n    from heeler.levels import BlockHerd",
        "import heeler\nheeler.two_levels()",
        "import heeler\nheeler.levels.BlockHerd()",
        "importlib.import_module('heeler.levels')",
    ],
)
def test_every_way_to_import_an_extra_is_found(source: str) -> None:
    assert extras_in(source, "heeler.ordering") == {"levels"}
    assert not extras_in(source.replace("two_levels", "order_by").replace("levels", "herding"), "heeler.ordering")


def test_every_package_is_core_or_extra_or_knows_everything() -> None:
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")} | {path.name for path in SOURCE.glob("*.py")}
    assert packages == {*CORE, *NEED_NO_EXTRA, *EXTRAS, "cli", "__init__.py"}


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("heeler.herding", {"torch"}),
        ("heeler", {"torch", "typer", "rich", "matplotlib", "sklearn"}),
        (
            "heeler.ordering",
            {"typer", "rich", "matplotlib", "sklearn", "transformers", "lightning", "accelerate"},
        ),
        ("heeler.stragglers", {"typer", "rich", "matplotlib", "sklearn"}),
    ],
)
def test_imports_stay_light(module: str, unwanted: set[str]) -> None:
    code = f"import sys, {module}; print(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not unwanted & set(loaded)
