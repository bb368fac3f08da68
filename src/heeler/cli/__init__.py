"""The command line. Typer, rich and matplotlib come with the extra `cli`; the library itself needs none of them."""

import sys


def main() -> None:
    """Entry point of the `heeler` command."""
    try:
        from heeler.cli.app import app

        app()
    except ModuleNotFoundError as error:
        if error.name not in {"typer", "rich", "matplotlib", "sklearn"}:
            raise
        sys.exit(f"heeler: the command line needs {error.name}: pip install 'heeler[cli]'")
