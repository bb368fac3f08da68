"""Robust rules against published attacks: many workers simulated in one process, on scikit-learn's digits.

python -m experiments.robust [--steps 600] [--seeds 3] [--out benchmarks/results/robust-attacks.json]
python -m experiments.robust --table benchmarks/results/robust-attacks.json
python -m experiments.robust --picture docs/images/robust.svg benchmarks/results/robust-attacks.json

After "Byzantine-robust learning on heterogeneous datasets via bucketing" (Karimireddy, He, Jaggi 2022): n = 24 without
an attack, n = 25 with f = 5 bad workers, batches of 32, worker momentum 0.9, and bucketing with s = 2. Their task is
MNIST with a convolutional network and rate 0.01; it is not at hand here, so the task is digits (1,536 images of 8 × 8,
261 for testing), a network 64-32-10 and rate 0.05. So accuracies differ; what is compared is the order of the rules.
Non-iid: the good workers' examples are sorted by label and cut into equal parts. Mimic learns for 100 steps whom to
mimic, then copies that worker; IPM has ε = 0.1.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from experiments import byzantine
from experiments.drawing import pyplot
from experiments.folder import Folder
from experiments.tasks.digits import load_digits
from heeler import robust

BATCH, RATE, MOMENTUM, WARM_UP, LAST = 32, 0.05, 0.9, 100, 5
TAU, RFA_STEPS, RFA_NU = 10.0, 8, 0.1
RULES = ("mean", "krum", "median", "RFA", "clipping")
ATTACKS = ("none", "mimic", "IPM")
PUBLISHED = {  # test accuracy, %, 3 seeds; from the paper's published logs
    ("none", "iid", 0): {"mean": 98.79, "krum": 97.95, "median": 97.72, "RFA": 98.62, "clipping": 98.78},
    ("none", "non-iid", 0): {"mean": 98.75, "krum": 89.90, "median": 80.36, "RFA": 82.60, "clipping": 98.78},
    ("none", "non-iid", 2): {"krum": 93.27, "median": 95.59, "RFA": 97.34, "clipping": 98.75},
    ("mimic", "non-iid", 0): {"mean": 92.7, "krum": 37.3, "median": 64.3, "RFA": 78.9, "clipping": 91.5},
    ("mimic", "non-iid", 2): {"mean": 92.7, "krum": 53.2, "median": 78.6, "RFA": 91.2, "clipping": 92.6},
}

Params = dict[str, Tensor]


def run(rule: str, attack: str, data: str, s: int, seed: int, steps: int) -> float:
    """Test accuracy, %: the mean of the last evaluations, every 20 steps."""
    examples = load_digits(Folder(None))
    (x, y), (test_x, test_y) = examples.train, examples.test
    n, f = (24, 0) if attack == "none" else (25, 5)
    good = n - f
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    order = torch.argsort(y, stable=True) if data == "non-iid" else torch.randperm(len(x), generator=generator)
    shards = torch.stack([part[: len(x) // good] for part in order.tensor_split(good)])  # (good, examples)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    params = {name: value.detach() for name, value in model.named_parameters()}

    def loss(params: Params, inputs: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(functional_call(model, params, (inputs,)), labels)

    gradients: Callable[[Params, Tensor, Tensor], Params] = vmap(grad(loss), in_dims=(None, 0, 0))
    momentum = torch.zeros(good, sum(value.numel() for value in params.values()))
    attacker = Attacker(attack, n, f, momentum.shape[1], generator)
    center, accuracies = torch.zeros(momentum.shape[1]), []
    for step in range(steps):
        places = torch.rand(shards.shape, generator=generator).argsort(dim=1)[:, :BATCH]
        batch = shards.gather(1, places)
        rows = gradients(params, x[batch], y[batch])
        momentum = MOMENTUM * momentum + torch.cat([rows[name].flatten(1) for name in params], dim=1)
        sent = torch.cat([momentum, attacker(momentum, step)])
        center = aggregate(rule, sent, f, s, center, seed * steps + step)
        pieces = center.split([value.numel() for value in params.values()])
        params = {
            name: value - RATE * piece.view_as(value)
            for (name, value), piece in zip(params.items(), pieces, strict=True)
        }
        if step % 20 == 19:
            right = functional_call(model, params, (test_x,)).argmax(dim=1) == test_y
            accuracies.append(100 * right.float().mean().item())
    return statistics.mean(accuracies[-LAST:])


class Attacker:
    """What the f bad workers send, (f, d), given the good ones' vectors."""

    def __init__(self, attack: str, n: int, f: int, d: int, generator: torch.Generator) -> None:
        self.attack, self.n, self.f = attack, n, f
        self.direction = nn.functional.normalize(torch.randn(d, generator=generator), dim=0)
        self.worker = 0

    def __call__(self, good: Tensor, step: int) -> Tensor:
        if self.attack == "none":
            return good[:0]
        if self.attack == "IPM":
            return byzantine.ipm(good, 0.1).expand(self.f, -1)
        if step < WARM_UP:
            self.direction = byzantine.mimic_direction(good, self.direction, step)
            self.worker = byzantine.mimic_worker(good, self.direction)
        return byzantine.mimic(good, self.worker).expand(self.f, -1)


def aggregate(rule: str, sent: Tensor, f: int, s: int, center: Tensor, seed: int) -> Tensor:
    """(d,) of (n, d)."""
    if s:
        sent = byzantine.bucketing(sent, s, seed)
    if rule == "mean":
        return sent.mean(dim=0)
    if rule == "krum":
        return robust.krum(sent, f)
    if rule == "median":
        return robust.median(sent)
    if rule == "RFA":
        return robust.geometric_median(sent, nu=RFA_NU, iterations=RFA_STEPS)
    return robust.centered_clipping(sent, center, TAU)


def measure(steps: int, seeds: int) -> list[dict[str, Any]]:
    lines = []
    for attack in ATTACKS:
        for data in ("iid", "non-iid"):
            for s in (0, 2):
                for rule in RULES:
                    if rule == "mean" and s:
                        continue  # the mean of means; with an odd n nearly
                    every = [run(rule, attack, data, s, seed, steps) for seed in range(seeds)]
                    spread = statistics.stdev(every) if seeds > 1 else 0.0
                    line = {"attack": attack, "data": data, "bucketing": s, "rule": rule}
                    lines.append({**line, "accuracy": round(statistics.mean(every), 2), "sd": round(spread, 2)})
    return lines


def table(report: dict[str, Any]) -> str:
    """Markdown: ours, and the published figure behind it where there is one."""
    found = {(x["attack"], x["data"], x["bucketing"], x["rule"]): x for x in report["lines"]}
    text = [f"| attack | data | s | {' | '.join(RULES)} |", "|---|---|---|" + "---|" * len(RULES)]
    for attack in ATTACKS:
        for data in ("iid", "non-iid"):
            for s in (0, 2):
                cells = []
                for rule in RULES:
                    line = found.get((attack, data, s, rule))
                    ours = f"{line['accuracy']:.1f} ± {line['sd']:.1f}" if line else "–"
                    theirs = PUBLISHED.get((attack, data, s), {}).get(rule)
                    cells.append(ours + (f" ({theirs:.1f})" if theirs is not None else ""))
                text.append(f"| {attack} | {data} | {s or 'none'} | {' | '.join(cells)} |")
    return "\n".join(text)


def picture(report: dict[str, Any], path: Path) -> None:
    """Accuracy of every rule under every attack, non-iid, without and with bucketing."""
    plt = pyplot()
    colours = {"mean": "#888888", "krum": "#c0392b", "median": "#e08e0b", "RFA": "#2471a3", "clipping": "#1e8449"}
    with plt.rc_context({"svg.hashsalt": "heeler", "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True)
        for axis, data in zip(axes, ("iid", "non-iid"), strict=True):
            groups = [(attack, s) for attack in ATTACKS for s in (0, 2)]
            for place, (attack, s) in enumerate(groups):
                for shift, rule in enumerate(RULES):
                    line = next(
                        (
                            x
                            for x in report["lines"]
                            if (x["attack"], x["data"], x["bucketing"], x["rule"]) == (attack, data, s, rule)
                        ),
                        None,
                    )
                    if line is not None:
                        at = place + 0.16 * (shift - 2)
                        axis.bar(at, line["accuracy"], 0.15, yerr=line["sd"], color=colours[rule], label=rule)
            axis.set_xticks(range(len(groups)), [f"{a}\n{'s = 2' if s else 'as sent'}" for a, s in groups], fontsize=8)
            axis.set_title(f"{data} workers", fontsize=10)
            axis.spines[["top", "right"]].set_visible(False)
        axes[0].set_ylabel("test accuracy, %")
        handles, labels = axes[0].get_legend_handles_labels()
        unique = dict(zip(labels, handles, strict=True))
        figure.legend(unique.values(), unique.keys(), ncols=len(unique), loc="lower center", frameon=False, fontsize=9)
        figure.tight_layout(rect=(0, 0.08, 1, 1))
        figure.savefig(path, metadata={"Date": None}, facecolor="white")
        plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, metavar="JSON")
    parser.add_argument("--picture", type=Path, nargs=2, metavar=("SVG", "JSON"))
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.table.read_text())))
        return
    if options.picture:
        picture(json.loads(options.picture[1].read_text()), options.picture[0])
        return
    torch.set_num_threads(1)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    report = {
        "command": f"python -m experiments.robust --steps {options.steps} --seeds {options.seeds}",
        "machine": "one core of a shared AMD EPYC",
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "lines": measure(options.steps, options.seeds),
    }
    text = json.dumps(report, indent=1)
    if options.out:
        options.out.write_text(text + "\n")
    else:
        print(text)


if __name__ == "__main__":
    main()
