"""`python -m experiments`: the papers' tasks, ablations and reports. Run in a clone; needs `heeler[cli]`."""

import typer

from experiments.commands.diversity import diversity
from experiments.commands.herding import herding
from experiments.commands.report import report
from experiments.commands.subsets import subsets
from experiments.commands.sweep import sweep
from experiments.commands.train import train

app = typer.Typer(
    name="python -m experiments",
    help="Train the papers' tasks in several orders, and compare.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (train, sweep, report, herding, diversity, subsets):
    app.command()(command)

if __name__ == "__main__":
    app(prog_name="python -m experiments")
