"""What the README and the pages show runs: each page's Python, in order, in one namespace."""

import contextlib
import importlib.util
import io
import re
import shlex

import pytest
import torch
import typer

from benchmarks.__main__ import app as benchmarks
from experiments.__main__ import app as experiments
from heeler.cli.app import app as heeler
from tests.docs.blocks import PAGES, ROOT, commands, fenced

WITH_PYTHON = [page for page in PAGES if any(block.language == "python" for block in fenced(page))]
ALL_COMMANDS = [(page, command) for page in PAGES for command in commands(page)]


def name(page):
    return page.stem.lower().replace("-", "_")


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name)
def test_python_runs(page, tmp_path, monkeypatch):
    """`setup/PAGE.py` makes what a page takes for granted: a model, a dataset; its `close()`, if any, clears up."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    setup = ROOT / "tests" / "docs" / "setup" / f"{name(page)}.py"
    namespace = {"__name__": "page"}
    if setup.exists():
        exec(compile(setup.read_text(), str(setup), "exec"), namespace)
    try:
        for block in fenced(page):
            if block.language == "python" and not block.not_run:
                padded = "\n" * (block.line - 1) + block.code  # so that a traceback names the page's own line
                with contextlib.redirect_stdout(io.StringIO()):
                    exec(compile(padded, str(page), "exec"), namespace)
    finally:
        namespace.get("close", lambda: None)()


def test_few_blocks_are_not_run():
    blocks = [block for page in PAGES for block in fenced(page) if block.language == "python"]
    marked = [f"{block.page.name}:{block.line}: {block.not_run}" for block in blocks if block.not_run]
    assert len(marked) <= 4, marked
    assert len(blocks) >= 5 * len(marked)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_block_has_a_language(page):
    assert [block.line for block in fenced(page) if not block.language] == []


@pytest.mark.parametrize(("page", "command"), ALL_COMMANDS, ids=[f"{name(p)}: {c}" for p, c in ALL_COMMANDS])
def test_commands_exist(page, command):
    words = shlex.split(command)
    if words[0] == "heeler":
        parse(heeler, words[1:])
    elif words[0].startswith("python") and words[1:3] in (["-m", "experiments"], ["-m", "benchmarks"]):
        parse(experiments if words[2] == "experiments" else benchmarks, words[3:])
    elif words[0].startswith("python"):
        check_python(words[1:])
    elif words[0] == "torchrun":
        assert any((ROOT / word).is_file() for word in words if word.endswith(".py"))
    elif words[0] == "make":
        targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        assert {word for word in words[1:] if "=" not in word} <= targets


def parse(app, words):
    """Let the real command line read the words, without running anything. Words in capitals stand for something."""
    command = typer.main.get_command(app)
    context = None
    while hasattr(command, "commands"):
        context = command.context_class(command, parent=context)
        if not words or words[0].startswith("--"):
            assert {*words} <= {option for each in command.get_params(context) for option in each.opts}
            return
        found = command.get_command(context, words[0])
        assert found is not None, f"there is no command {words[0]!r}"
        command, words = found, words[1:]
    if words in ([], ["--help"]):  # the command is only named
        return
    command.make_context(command.name, list(words), parent=context)


def check_python(words):
    """The module or script is there, and its source knows every option."""
    if words[0] == "-m":
        found = importlib.util.find_spec(words[1])
        assert found is not None, f"there is no module {words[1]}"
        if words[1].split(".")[0] not in ("experiments", "benchmarks"):
            return  # another project's
        path, words = found.origin, words[2:]
    else:
        path, words = ROOT / words[0], words[1:]
    source = (ROOT / path).read_text()
    for word in words:
        if word.startswith("--"):
            assert word.split("=")[0] in source, f"{path} has no option {word}"
