"""The `heeler` command, assembled from one file per command."""

from typing import Annotated

import typer

from heeler import __version__
from heeler.cli.demo import demo
from heeler.cli.doctor import doctor
from heeler.cli.select import select
from heeler.cli.suspects import suspects

app = typer.Typer(name="heeler", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
for command in (demo, doctor, select, suspects):
    app.command()(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"heeler {__version__}")
        raise typer.Exit


@app.callback()
def heeler(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Reorder training data so that SGD converges in fewer epochs."""
