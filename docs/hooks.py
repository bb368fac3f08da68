"""Pages of the site that are files of the repository's root, so that nothing is written twice."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

PAGES = {"results.md": "RESULTS.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}


def on_files(files: Files, config: Any) -> Files:
    root = Path(config.config_file_path).parent
    for page, source in PAGES.items():
        pointer = files.get_file_from_path(page)
        if pointer is not None:
            files.remove(pointer)
        files.append(File.generated(config, page, content=seen_from_docs((root / source).read_text())))
    return files


def seen_from_docs(text: str) -> str:
    """The root's links as they have to be within docs/."""
    text = re.sub(r"\]\(docs/", "](", text)
    for page, source in PAGES.items():
        text = text.replace(f"]({source}", f"]({page}")
    return text
