import logging
import tempfile  # noqa: F401
import warnings

import accelerate
import lightning
import ray.train.torch  # noqa: F401
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader  # noqa: F401
from transformers import Trainer, TrainingArguments  # noqa: F401

import heeler  # noqa: F401

warnings.simplefilter("ignore")  # the frameworks', of a loader without workers and the like
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Net(nn.Sequential):
    """Takes its batch as it comes, and the labels too, where a framework passes them."""

    def forward(self, x, labels=None):
        out = super().forward(x)
        return out if labels is None else {"loss": nn.functional.cross_entropy(out, labels)}


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net(nn.Linear(8, 3))

    def training_step(self, batch, batch_idx):
        return self.net(batch["x"], batch["labels"])["loss"]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


x, y = torch.randn(64, 8), torch.randint(3, (64,))
dataset = [{"x": a, "labels": b} for a, b in zip(x, y, strict=True)]
loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
model, net, another, module = Net(nn.Linear(8, 3)), Net(nn.Linear(8, 3)), Net(nn.Linear(8, 3)), Module()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss_fn, epochs = nn.CrossEntropyLoss(), 2
arguments = TrainingArguments("out", num_train_epochs=2, report_to="none", use_cpu=True, disable_tqdm=True)
accelerator = accelerate.Accelerator(cpu=True)
