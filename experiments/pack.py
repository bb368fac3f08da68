"""Compact data files to carry to another machine: `python -m experiments.pack DIR --data DIR [--only ...]`.

The tasks read what this writes as they read the originals. WikiText-2 becomes 16-bit word numbers, CIFAR-10 a subset of
pixel differences, GLUE the frozen embeddings, the encoder half precision; the others are copied compressed. For the
plans of issue 15 on a machine that takes 64 MiB at a time, two folders:

    python -m experiments.pack build/gpu --only cifar10 text --images 12800 --test-images 10000
    python -m experiments.pack build/encoder --only encoder

and embeddings are made where the encoder and the texts are, on a GPU if there is one:

    python -m experiments.pack DIR --data build/encoder --only glue
"""

from __future__ import annotations

import argparse
import io
import lzma
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.folder import Folder
from experiments.tasks import cifar, glue, hmda, wikitext

IMAGES, TEST_IMAGES, SENTENCES = 14_080, 2_000, 16_384
"""Examples of CIFAR-10 and of each GLUE task that are packed, at most, where nothing else is said."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m experiments.pack", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path, help="where the originals are; else HEELER_DATA")
    parser.add_argument("--only", nargs="+", choices=list(PACKERS), default=list(PACKERS))
    parser.add_argument("--images", type=int, default=IMAGES, help="training images of CIFAR-10")
    parser.add_argument("--test-images", type=int, default=TEST_IMAGES)
    given = parser.parse_args(arguments)
    packers = dict(PACKERS)
    packers["cifar10"] = partial(pack_cifar, images=given.images, test_images=given.test_images)
    for name in given.only:
        packers[name](Folder(given.data), given.out)
    total = sum(path.stat().st_size for path in given.out.rglob("*") if path.is_file())
    print(f"{given.out}: {total / 2**20:.1f} MiB")
    return 0


def pack_digits(folder: Folder, out: Path) -> None:
    """The embedded digits, for machines without scikit-learn."""
    from sklearn.datasets import load_digits as embedded

    pixels, digit = embedded(return_X_y=True)
    save(out / "digits.npz", X=pixels.astype(np.uint8), y=digit.astype(np.uint8))


def pack_hmda(folder: Folder, out: Path) -> None:
    features, label, columns = hmda.read_applications(folder)
    save(out / hmda.FILE, X=features, y=label, columns=np.array(columns))


def pack_wikitext(folder: Folder, out: Path) -> None:
    tokens = wikitext.read_tokens(folder)
    save(out / wikitext.PACKED, **{part: words.astype(np.uint16) for part, words in tokens.items()})


def pack_m4(folder: Folder, out: Path) -> None:
    for part in ("train", "test"):
        name = f"m4-weekly/Weekly-{part}.csv"
        write(out / f"{name}.xz", lzma.compress(folder.read(name), preset=9))


def pack_text(folder: Folder, out: Path) -> None:
    """WikiText-2's texts, for tasks that read characters."""
    for part in wikitext.SHA256:
        name = f"wikitext-2/{part}.txt"
        write(out / f"{name}.xz", lzma.compress(folder.read(name), preset=9))


def pack_cifar(folder: Folder, out: Path, images: int = IMAGES, test_images: int = TEST_IMAGES) -> None:
    """A subset: the same images that `limit` would take first, and the first test images."""
    found = cifar.read_images(folder)
    chosen = np.random.default_rng(0).permutation(len(found["train"][1]))[:images]
    arrays: dict[str, Any] = {}
    for part, rows in (("train", chosen), ("test", np.arange(test_images))):
        rows = rows[: len(found[part][1])]
        arrays[f"{part}_x"] = cifar.differences(found[part][0][rows])
        arrays[f"{part}_y"] = found[part][1][rows]
    plain = io.BytesIO()
    np.savez(plain, **arrays)
    write(out / f"{cifar.PACKED}.xz", lzma.compress(plain.getvalue()))  # a tenth smaller than a compressed .npz


def pack_glue(folder: Folder, out: Path) -> None:
    """Embeddings, of as many tasks as have their files or embeddings in the folder."""
    for task in glue.LAYOUTS:
        names = f"glue/{task}/minilm.npz", f"glue/{task}/train.tsv"
        if not (any(map(folder.find, names)) or Folder.cache().find(names[0])):
            continue
        arrays = glue.embeddings(folder, task)
        chosen = np.random.default_rng(0).permutation(len(arrays["train_y"]))[:SENTENCES]
        arrays["train_x"], arrays["train_y"] = arrays["train_x"][chosen], arrays["train_y"][chosen]
        save(out / f"glue/{task}/minilm.npz", **arrays)


def pack_encoder(folder: Folder, out: Path) -> None:
    """MiniLM in half precision, and the GLUE tasks' texts."""
    tokenizer, model = glue.load_encoder(folder)
    model.half().save_pretrained(out / glue.ENCODER)
    tokenizer.save_pretrained(out / glue.ENCODER)
    for task in glue.LAYOUTS:
        for part in ("train", "dev"):
            name = f"glue/{task}/{part}.tsv"
            if folder.find(name):
                write(out / f"{name}.xz", lzma.compress(folder.read(name), preset=9))


PACKERS: dict[str, Callable[[Folder, Path], None]] = {
    "digits": pack_digits,
    "hmda": pack_hmda,
    "wikitext2": pack_wikitext,
    "text": pack_text,
    "m4": pack_m4,
    "cifar10": pack_cifar,
    "glue": pack_glue,
    "encoder": pack_encoder,
}
"""What can be packed."""


def save(path: Path, **arrays: Any) -> None:
    """An .npz file, compressed."""
    packed = io.BytesIO()
    np.savez_compressed(packed, **arrays)
    write(path, packed.getvalue())


def write(path: Path, raw: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(raw)


if __name__ == "__main__":
    raise SystemExit(main())
