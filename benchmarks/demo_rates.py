"""How `heeler demo` came by its learning rates: every order at six rates, three seeds, 30 epochs.

python -m benchmarks.demo_rates                                 # minutes
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from heeler.cli.demo_runs import ORDERS, TASKS, train

RATES = {"digits": (0.7, 1.0, 1.4, 2.0, 2.8, 4.0), "digits-mlp": (0.2, 0.3, 0.4, 0.6, 0.8, 1.2)}


def main() -> None:
    torch.set_num_threads(1)
    for task in TASKS:
        for order in ORDERS:
            found = {}
            for rate in RATES[task.name]:
                at_rate = replace(task, rates=dict.fromkeys(ORDERS, rate))
                found[rate] = float(np.mean([train(at_rate, order, seed, 30)[0, -1] for seed in range(3)]))
            best = min(found, key=lambda rate: found[rate])
            shown = ", ".join(f"{rate:g}: {loss:.3g}" for rate, loss in found.items())
            print(f"{task.name}, {order}: {best:g} ({shown})", flush=True)


if __name__ == "__main__":
    main()
