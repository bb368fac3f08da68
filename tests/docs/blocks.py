"""The code in a Markdown page: Python to run, commands to check, and what is marked as not to be run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "RESULTS.md", *(ROOT / "docs").rglob("*.md")])
NOT_RUN = re.compile(r"<!-- not run: (.+?) -->")
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^(heeler|python|python3|make|pip|torchrun) ")


@dataclass
class Block:
    page: Path
    line: int
    language: str
    code: str
    not_run: str
    """Why it is not run; empty where it is."""


def fenced(page: Path) -> list[Block]:
    """All blocks between ``` fences. A comment `<!-- not run: why -->` on the line before one marks it."""
    text = page.read_text()
    blocks = []
    for match in FENCE.finditer(text):
        above = text[: match.start()].rstrip("\n").rsplit("\n", 1)[-1]
        mark = NOT_RUN.fullmatch(above.strip())
        line = text.count("\n", 0, match.start()) + 2
        blocks.append(Block(page, line, match[1], match[2], mark[1] if mark else ""))
    return blocks


def commands(page: Path) -> list[str]:
    """Every command of a page: lines of shell and of indented blocks, and code within a line."""
    text = page.read_text()
    shell = [line for block in fenced(page) if block.language in ("bash", "sh", "shell") for line in _lines(block.code)]
    prose = FENCE.sub("", text)
    indented = _lines("\n".join(line[4:] for line in prose.split("\n") if line.startswith("    ")))
    inline = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose)
    return [command for command in [*shell, *indented, *inline] if COMMAND.match(command)]


def _lines(code: str) -> list[str]:
    """Lines with continuations joined, comments and environment variables before a command taken off."""
    joined = code.replace("\\\n", " ")
    bare = [re.sub(r"\s+#.*", "", line.strip()) for line in joined.split("\n")]
    return [re.sub(r"^(?:\$ )?(?:[A-Z_]+=\S+ )*", "", line) for line in bare]
