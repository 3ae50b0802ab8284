"""A LightningModule: trained by Lightning and watched (the lines marked with sw), or as a task by scalewise.

python examples/lightning_digits.py
scalewise train examples/lightning_digits.py --workers 8 --processes 2
"""

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import scalewise as sw
from scalewise.adapters.lightning import Scalewise  # sw
from scalewise.tasks.digits import load


class Digits(L.LightningModule):  # type: ignore[misc]  # Lightning is not there for a type checker
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 10))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.loss(batch, "train")

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.loss(batch, "val")

    def loss(self, batch: tuple[Tensor, Tensor], stage: str) -> Tensor:
        output = self.net(batch[0])
        self.log(f"{stage}_accuracy", (output.argmax(1) == batch[1]).float().mean())
        return F.cross_entropy(output, batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.005, weight_decay=0.01)


def task() -> sw.Task:
    return sw.adapters.lightning.task(Digits, *load(), metric="accuracy")


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    trainer = L.Trainer(
        max_epochs=5,
        accelerator="cpu",
        enable_checkpointing=False,
        enable_progress_bar=False,
        logger=L.loggers.CSVLogger("."),
        callbacks=[Scalewise()],  # sw
    )
    trainer.fit(Digits(), DataLoader(TensorDataset(*load()[0]), batch_size=32, shuffle=True))
    print("weights", sum(parameter.double().sum().item() for parameter in trainer.model.parameters()))
