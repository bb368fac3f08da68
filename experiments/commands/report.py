"""`python -m experiments report`: reports of runs that were made elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def report(
    out: Annotated[Path, typer.Argument(help="Folder of finished runs; read with the folders below it.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Draw curves.png and write report.html from runs that are finished, wherever they were made."""
    from rich.console import Console

    from experiments.report import write_report
    from experiments.tables import as_numbers, print_summary

    try:
        tables = write_report(out)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if as_json:
        typer.echo(json.dumps([as_numbers(table) for table in tables]))
        return
    for table in tables:
        print_summary(table, Console())
