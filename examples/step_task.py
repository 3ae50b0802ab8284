"""The general form: any tree of tensors as a batch, and a step that returns a sum and its weight.

Sequences of different lengths: the loss is a mean over all tokens of the global batch, not a mean of means.

python examples/step_task.py
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import scalewise as sw

LONGEST, SYMBOLS = 12, 8


def sequences(count: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(SYMBOLS, (count, 1), generator=generator)
    stride = torch.randint(1, 3, (count, 1), generator=generator)
    return {
        "symbols": (start + stride * torch.arange(LONGEST)) % SYMBOLS,
        "length": torch.randint(4, LONGEST + 1, (count,), generator=generator),
    }


class NextSymbol(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gru, self.head = (
            nn.Embedding(SYMBOLS, 16),
            nn.GRU(16, 32, batch_first=True),
            nn.Linear(32, SYMBOLS),
        )

    def forward(self, symbols: Tensor) -> Tensor:
        logits: Tensor = self.head(self.gru(self.embed(symbols))[0])
        return logits


def step(model: nn.Module, batch: dict[str, Tensor]) -> sw.Loss:
    target = batch["symbols"][:, 1:]
    there = torch.arange(1, LONGEST) < batch["length"][:, None]
    losses = F.cross_entropy(model(batch["symbols"][:, :-1]).transpose(1, 2), target, reduction="none")
    return sw.Loss((losses * there).sum(), there.sum())


def task() -> sw.Task:
    recipe = sw.Recipe(worker_batch=32, epochs=4.0, optimizer="adam", lr=0.005)
    return sw.Task(model=NextSymbol, train=sequences(2000, 0), test=sequences(200, 1), step=step, recipe=recipe)


if __name__ == "__main__":
    *_, result = sw.train(task(), sw.Recipe(workers=4, worker_batch=32, epochs=4.0, optimizer="adam", lr=0.01))
    assert isinstance(result, sw.Result)
    print(f"test loss per token {result.test['loss']:.4f} after {result.steps} steps")
