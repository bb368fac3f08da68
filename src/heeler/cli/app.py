"""The `heeler` command, assembled from one file a command."""

import typer

app = typer.Typer(
    name="heeler",
    help="Puts training examples into an order in which SGD converges faster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Measure Heeler on this machine: medians, with the spread.", no_args_is_help=True)
app.add_typer(bench, name="bench")
