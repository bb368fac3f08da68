"""What a compiled model's two variants cost: plain, untapped and tapped steps in turns, and runs of 16 epochs.

    python -m benchmarks.compiled --out compiled.json                          # all parts, on a GPU
    python -m benchmarks.compiled --only gpt --dim 256
    python -m benchmarks.compiled --tiny --device cpu                          # does it run?

gpt and lenet: steps of a plain model and of an attached copy whose taps are switched on and off. The ratios are of one
round's times, their medians and quartiles over all rounds. gpt is GPT-2 124M in bf16 with AdamW; lenet runs under CUDA
graphs (mode="reduce-overhead").

gpt-run and lenet-run: the same two, each through a sampler and loader of its own, epoch by epoch in turns; sketches in
epochs 1, 2, 4, 8 and 16. Of an epoch the first steps (`HEAD`), in which rows are checked and code is compiled, are
timed apart from the others, and both apart from the turnover, in which the next order is found. `ratio` is of all steps
but the first epoch's head and that of the first untapped epoch, which hold the compilation. `ratio_at_1000` is the same
for epochs of 1,000 steps: each body gets so many more steps as its kind of epoch usually takes, so that what happens
once (kernels are loaded in the first epoch) counts once, and heads are not stretched. Both are also given
`_with_turnovers`, since a user waits for them too. The arithmetic is in `benchmarks.compiled_figures`, which brings
stored files up to date.

Compilations are counted: what a variant takes the first time, and what all later switches take, which should be 0.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, RandomSampler, TensorDataset, default_collate

import heeler
from benchmarks import overhead
from benchmarks.compiled_figures import HEAD, figures, spread
from heeler.sketch import Sketcher

PARTS = ("lenet", "gpt", "lenet-run", "gpt-run")
VARIANTS = ("plain", "untapped", "tapped")


def say(*words: Any) -> None:
    print(*words, flush=True)


class Trained:
    """A compiled model, its batch and its optimizer."""

    def __init__(self, part: str, definitions: Any, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.is_gpt, self.cuda = part.startswith("gpt"), options.device == "cuda"
        self.batch = options.batch or (16 if self.is_gpt else 64)
        size = "small" if self.is_gpt and options.tiny else ""
        self.net, self.x, self.y = definitions.build(part.split("-")[0], size, self.batch, options.device)
        mode = None if self.is_gpt else "reduce-overhead"
        self.run: Any = torch.compile(self.net, mode=mode)
        if self.is_gpt:
            self.optimizer: Any = torch.optim.AdamW(self.net.parameters(), lr=1e-5, fused=self.cuda)
        else:
            self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-3, momentum=0.9)

    def backward(self, x: Tensor, y: Tensor) -> None:
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=self.is_gpt and self.cuda):
            out = self.run(x)
            loss = F.cross_entropy(out.view(-1, out.shape[-1]), y.view(-1))
        loss.backward()

    def step(self, x: Tensor, y: Tensor) -> None:
        self.backward(x, y)
        self.optimizer.step()
        self.optimizer.zero_grad()


def twins(part: str, options: argparse.Namespace) -> tuple[Trained, Trained]:
    """A plain one, and one to be attached, of a second copy of the definitions: the compiler keeps what it made by code
    object, and would look through either's variants in every step of the other."""
    gc.collect()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    spec = importlib.util.spec_from_file_location("benchmarks.overhead_again", str(overhead.__file__))
    assert spec is not None
    assert spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = again
    spec.loader.exec_module(again)
    return Trained(part, overhead, options), Trained(part, again, options)


def graphs() -> int:
    """How many the compiler has made so far."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def compiled_by(action: Callable[[], Any]) -> dict[str, float]:
    before, start = graphs(), time.perf_counter()
    action()
    synchronize()
    return {"graphs": graphs() - before, "seconds": round(time.perf_counter() - start, 2)}


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure_steps(part: str, options: argparse.Namespace) -> dict[str, Any]:
    """Plain, untapped and tapped steps in turns."""
    plain, attached = twins(part, options)
    sketcher = Sketcher(attached.run, dim=options.dim, layers=overhead.choose_layers(options.layers))

    def plain_step() -> None:
        plain.step(plain.x, plain.y)

    def own_step() -> None:
        attached.step(attached.x, attached.y)
        if len(sketcher.pop()) != (attached.batch if sketcher.sketching else 0):
            raise RuntimeError("a step delivered other sketches than it should")

    def switch(variant: str) -> Callable[[], None]:
        if variant != "plain":
            sketcher.sketching = variant == "tapped"
        return plain_step if variant == "plain" else own_step

    made: dict[str, Any] = {}
    for variant in ("plain", "tapped", "untapped"):  # as a run meets them
        step = switch(variant)
        made[variant] = compiled_by(lambda step=step: [step() for _ in range(6)])  # type: ignore[misc]
        say(f"  {variant}: {made[variant]['graphs']} graphs, {made[variant]['seconds']} s for the first 6 steps")
    equal = _gradients_are_equal(plain, attached, sketcher)
    say(f"  gradients are equal, bit for bit: {equal}")
    before = graphs()
    rounds: list[dict[str, float]] = []
    for number in range(options.rounds):
        order = VARIANTS[number % 3 :] + VARIANTS[: number % 3]
        taken = {}
        for variant in order:
            step = switch(variant)
            for _ in range(5):  # until nothing is checked any more
                step()
            synchronize()
            start = time.perf_counter()
            for _ in range(options.steps or (20 if plain.is_gpt else 300)):
                step()
            synchronize()
            taken[variant] = time.perf_counter() - start
        rounds.append(taken)
        ratios = [f"{v} {taken[v] / taken['plain']:.4f}" for v in VARIANTS[1:]]
        say(f"  round {number + 1}: " + ", ".join(ratios))
    count = options.steps or (20 if plain.is_gpt else 300)
    result: dict[str, Any] = {
        "part": part,
        "compiled": {**made, "later": {"graphs": graphs() - before}},
        "gradients_equal": equal,
        "ms": {v: 1e3 * statistics.median(r[v] for r in rounds) / count for v in VARIANTS},
        "untapped": spread([r["untapped"] / r["plain"] for r in rounds]),
        "tapped": spread([r["tapped"] / r["plain"] for r in rounds]),
        "tapped_layers": sketcher.sketched,
        "dim": sketcher.dim,
        "steps_per_turn": count,
    }
    say(f"  untapped {shown(result['untapped'])}, tapped {shown(result['tapped'])}; later graphs: {graphs() - before}")
    return result


def _gradients_are_equal(plain: Trained, attached: Trained, sketcher: Sketcher) -> dict[str, bool]:
    """At the same weights, on the same batch: the untapped variant's and the plain model's, and those of the plain
    model twice. Kernels that add in any order differ from one backward to the next."""
    attached.net.load_state_dict(plain.net.state_dict())
    sketcher.sketching = False
    found = []
    for one in (plain, plain, attached):
        one.backward(plain.x, plain.y)
        found.append([p.grad.clone() for p in one.net.parameters() if p.grad is not None])
        one.optimizer.zero_grad()
    first, again, own = found
    return {
        "plain_and_untapped": all(torch.equal(a, b) for a, b in zip(first, own, strict=True)),
        "plain_twice": all(torch.equal(a, b) for a, b in zip(first, again, strict=True)),
    }


class Batches(TensorDataset):
    """Taken whole: what a loader does for single examples would hide what is measured."""

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, ...]:
        picked = torch.tensor(indices)
        return tuple(t.index_select(0, picked) for t in self.tensors)


def as_it_is(batch: Any) -> Any:
    """Collated already, unless it is a list of single examples, as Heeler's look at a loader gives."""
    return batch if isinstance(batch, tuple) else default_collate(batch)


def random_like(batch: Tensor, rows: int) -> Tensor:
    """So many rows of the same kind: real numbers, or integers of the same range."""
    shape = (rows, *batch.shape[1:])
    return torch.randn(shape) if batch.is_floating_point() else torch.randint(int(batch.max()) + 1, shape)


def measure_run(part: str, options: argparse.Namespace) -> dict[str, Any]:
    """Two runs, one with an attached model, epoch by epoch in turns."""
    plain, attached = twins(part, options)
    steps = options.epoch_steps or (110 if plain.is_gpt else 300)
    examples = steps * plain.batch
    data = Batches(*(random_like(t.cpu(), examples) for t in (plain.x, plain.y)))
    sampler = heeler.Sampler(data, batch_size=plain.batch)
    handle = heeler.attach(attached.run, sampler, layers=overhead.choose_layers(options.layers))
    samplers = {"plain": RandomSampler(data), "heeler": sampler}
    loaders = {
        name: DataLoader(data, plain.batch, sampler=each, collate_fn=as_it_is, pin_memory=plain.cuda)
        for name, each in samplers.items()
    }

    def epoch(name: str) -> dict[str, float]:
        one, marks = plain if name == "plain" else attached, [time.perf_counter()]
        for number, (x, y) in enumerate(loaders[name]):
            if number in (0, HEAD):
                synchronize()
                marks.append(time.perf_counter())
            one.step(x.to(options.device, non_blocking=True), y.to(options.device, non_blocking=True))
        synchronize()
        marks.append(time.perf_counter())
        return {"turnover": marks[1] - marks[0], "head": marks[2] - marks[1], "body": marks[3] - marks[2]}

    epochs: list[dict[str, Any]] = []
    for number in range(1, options.epochs + 1):
        before = graphs()
        found: dict[str, Any] = {"epoch": number, "plain": epoch("plain")}
        between = graphs()
        found["heeler"] = epoch("heeler")
        found["sketched"] = handle.sketcher.sketching
        found["graphs"] = {"plain": between - before, "heeler": graphs() - between}
        epochs.append(found)
        kind = "tapped" if found["sketched"] else "untapped"
        ratio = found["heeler"]["body"] / found["plain"]["body"]
        say(f"  epoch {number} ({kind}): {ratio:.4f}, graphs {found['graphs']}, {found['heeler']}")
    seen = handle.metrics()["examples_with_sketch"]
    result = {
        "part": part,
        **figures(epochs, steps),
        "graphs": {name: [e["graphs"][name] for e in epochs] for name in ("plain", "heeler")},
        "examples_with_sketch": seen,
        "ignored_passes": handle.ignored_passes,
        "left_out": handle.sketcher.left_out,
        "tapped_layers": handle.sketcher.sketched,
        "dim": handle.sketcher.dim,
        "steps_per_epoch": steps,
        "epochs": epochs,
    }
    for name in ("ratio", "ratio_at_1000"):
        say(f"  {name} {result[name]:.4f}, with waits for orders {result[f'{name}_with_turnovers']:.4f}")
    say(f"  untapped {shown(result['untapped'])}, tapped {shown(result['tapped'])}; graphs {result['graphs']}")
    say({key: result[key] for key in ("examples_with_sketch", "ignored_passes", "left_out", "turnover_seconds")})
    return result


def shown(found: dict[str, float]) -> str:
    return f"{found['median']:.4f} ({found['low']:.4f} to {found['high']:.4f})" if found else "none"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, action="append", help="a part; may be given several times")
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--layers", default="default")
    parser.add_argument("--dim", type=int, default=1024, help="numbers per sketch of gpt and lenet; runs: the default")
    parser.add_argument("--batch", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=0, help="per turn")
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--epoch-steps", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="as small as can be: only to see that it runs")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.tiny:
        options.rounds, options.steps, options.batch, options.epochs, options.epoch_steps = 2, 2, 4, 5, HEAD + 2
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    machine = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    about = {"machine": machine, "torch": torch.__version__, "threads": torch.get_num_threads(), "tiny": options.tiny}
    results: dict[str, Any] = {**about, "parts": []}
    for part in options.only or PARTS:
        say(f"{part} on {machine}")
        start = time.perf_counter()
        results["parts"].append((measure_run if part.endswith("run") else measure_steps)(part, options))
        results["parts"][-1]["seconds"] = time.perf_counter() - start
        if options.out is not None:
            options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
