"""Train a small network on scikit-learn's digits with Lightning's Trainer: one added argument.

python examples/lightning_classifier.py [--order herd|random] [--epochs 15] [--devices 2] [--tiny]

Needs pip install 'heeler[lightning,cli]'.
"""

import argparse
import warnings

import torch
from lightning.pytorch import LightningModule, Trainer
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from heeler.integrations.lightning import HeelerCallback

parser = argparse.ArgumentParser()
parser.add_argument("--order", default="herd")
parser.add_argument("--epochs", type=int, default=15)
parser.add_argument("--devices", type=int, default=1)
parser.add_argument("--tiny", action="store_true", help="200 examples, 3 epochs")


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(1) == y).float().mean(), sync_dist=True)

    def on_train_epoch_end(self):
        numbers = self.trainer.callback_metrics
        self.print(
            f"epoch {self.current_epoch + 1:2d}  train loss {numbers['train_loss']:.4f}  "
            f"test accuracy {numbers['accuracy']:.1%}"
        )

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


if __name__ == "__main__":
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    inputs, targets = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels)
    size = 200 if options.tiny else 1500
    train, test = TensorDataset(inputs[:size], targets[:size]), TensorDataset(inputs[1500:], targets[1500:])
    trainer = Trainer(
        max_epochs=3 if options.tiny else options.epochs,
        accelerator="cpu",
        devices=options.devices,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[HeelerCallback(order=options.order)],  # the added argument
    )
    trainer.fit(Classifier(), DataLoader(train, 16, shuffle=True), DataLoader(test, 128))
