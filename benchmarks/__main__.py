"""`python -m benchmarks`: measure Heeler on this machine. Run in a clone; needs `heeler[cli]`."""

import typer

from benchmarks.commands.coordination import coordination
from benchmarks.commands.diversity import diversity
from benchmarks.commands.epoch import epoch
from benchmarks.commands.know_own import know_own
from benchmarks.commands.levels import levels, levels_scale, scale_constants, scale_needs
from benchmarks.commands.overhead import overhead
from benchmarks.commands.select import select, select_slopes
from benchmarks.commands.solver import solver

app = typer.Typer(
    name="python -m benchmarks",
    help="Measure Heeler on this machine: medians, with the spread.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for measurement in (
    *(overhead, solver, epoch, coordination, diversity, select, select_slopes),
    *(levels, levels_scale, scale_constants, scale_needs, know_own),
):
    app.command()(measurement)

if __name__ == "__main__":
    app(prog_name="python -m benchmarks")
