"""A data folder with tiny files in the real formats."""

import lzma

import numpy as np
import pytest
import torch

from experiments.folder import Folder


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """As `python -m experiments train` has it: these models are too small to share."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)

    def text(name, contents, *, packed=False):
        path = root / (name + ".xz" if packed else name)
        path.parent.mkdir(parents=True, exist_ok=True)
        raw = contents.encode()
        path.write_bytes(lzma.compress(raw) if packed else raw)

    columns = ["loan_amount_000s", "purchaser_type", "population"]
    x = rng.normal(size=(200, 3)).astype(np.float32) * [300, 1, 2000] + [280, 0, 5000]
    y = (x[:, 0] + rng.normal(size=200) * 300 > 280).astype(np.uint8)
    x[:, 1] = y
    (root / "hmda-nj-2017").mkdir()
    np.savez(root / "hmda-nj-2017/applications.npz", X=x.astype(np.float32), y=y, columns=np.array(columns))

    words = [f"w{i}" for i in range(30)]
    for part, lines in (("train", 260), ("valid", 20), ("test", 40)):
        body = "".join(" " + " ".join(rng.choice(words, 9)) + " \n" for _ in range(lines))
        text(f"wikitext-2/{part}.txt", body, packed=part != "valid")

    def series(length):
        return "".join(
            f'"W{i}",' + ",".join(f'"{100 + i + v:.2f}"' for v in np.cumsum(rng.normal(size=length))) + "\n"
            for i in range(4)
        )

    text("m4-weekly/Weekly-train.csv", '"V1","V2"\n' + series(80).replace('"\n', '","",""\n'), packed=True)
    text("m4-weekly/Weekly-test.csv", '"V1","V2"\n' + series(13))

    names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    (root / "cifar-10").mkdir()
    for name in names:
        records = rng.integers(0, 256, (8, 3073), dtype=np.uint8)
        records[:, 0] %= 10
        (root / f"cifar-10/{name}.bin").write_bytes(records.tobytes())

    header = "sentence\tlabel\n"
    text("glue/SST-2/train.tsv", header + 'a "quoted film \t1\nbad\t0\n', packed=True)
    text("glue/SST-2/dev.tsv", header + "fine\t1\n")
    text("glue/CoLA/train.tsv", "gj04\t1\t\tGood.\ngj04\t0\t*\tBad is.\n")
    text("glue/RTE/train.tsv", "index\tsentence1\tsentence2\tlabel\n0\tA.\tB.\tnot_entailment\n1\tC.\tD.\tentailment\n")
    for part, count in (("train", 64), ("dev", 16)):
        label = rng.integers(0, 2, count)
        arrays = {f"{part}_x": (rng.normal(size=(count, 1, 8)) + label[:, None, None]).astype(np.float16)}
        arrays[f"{part}_y"] = label.astype(np.uint8)
        (root / f"{part}.npz").parent.mkdir(exist_ok=True)
        np.savez(root / f"{part}.npz", **arrays)
    both = {**np.load(root / "train.npz"), **np.load(root / "dev.npz")}
    np.savez(root / "glue/SST-2/minilm.npz", **both)
    return Folder(root)
