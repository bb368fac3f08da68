"""The `heeler` command, assembled from one file a command."""

import typer

from heeler.cli.epoch import epoch
from heeler.cli.herding import herding
from heeler.cli.solver import solver

app = typer.Typer(
    name="heeler",
    help="Puts training examples into an order in which SGD converges faster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(herding)

bench = typer.Typer(help="Measure Heeler on this machine: medians, with the spread.", no_args_is_help=True)
bench.command()(solver)
bench.command()(epoch)
app.add_typer(bench, name="bench")
