"""The `heeler` command, assembled from one file a command."""

import typer

from heeler.cli.coordination import coordination
from heeler.cli.demo import demo
from heeler.cli.diversity import bench_diversity, diversity
from heeler.cli.doctor import doctor
from heeler.cli.epoch import epoch
from heeler.cli.herding import herding
from heeler.cli.overhead import overhead
from heeler.cli.solver import solver
from heeler.cli.sweep import report, sweep
from heeler.cli.train import train

app = typer.Typer(
    name="heeler",
    help="Puts training examples into an order in which SGD converges faster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (demo, doctor, train, sweep, report, herding, diversity):
    app.command()(command)

bench = typer.Typer(help="Measure Heeler on this machine: medians, with the spread.", no_args_is_help=True)
for measurement in (overhead, solver, epoch, coordination):
    bench.command()(measurement)
bench.command("diversity")(bench_diversity)
app.add_typer(bench, name="bench")
