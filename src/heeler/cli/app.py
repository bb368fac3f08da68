"""The `heeler` command, assembled from one file per command."""

import typer

from heeler.cli.demo import demo
from heeler.cli.doctor import doctor
from heeler.cli.select import select

app = typer.Typer(
    name="heeler",
    help="Puts training examples into an order in which SGD converges faster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (demo, doctor, select):
    app.command()(command)
