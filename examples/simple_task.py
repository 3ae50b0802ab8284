"""The simple form: a model, (x, y) data and a loss. Eight workers on this one process.

python examples/simple_task.py
scalewise train examples/simple_task.py --workers 8 --processes 2
"""

import torch
from torch import nn
from torch.nn import functional as F

import scalewise as sw


def task(samples: int = 4000, width: int = 32) -> sw.Task:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(samples, 2, generator=generator) * 2 - 1
    y = (x.norm(dim=1) < 0.8).long()  # inside a circle or not
    cut = samples // 5
    return sw.Task(
        model=lambda: nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 2)),
        train=(x[cut:], y[cut:]),
        test=(x[:cut], y[:cut]),
        loss=F.cross_entropy,
        metrics={"accuracy": sw.accuracy},
        recipe=sw.Recipe(worker_batch=16, epochs=5.0, optimizer="momentum", lr=0.05),
    )


if __name__ == "__main__":
    for record in sw.train(task(), sw.Recipe(workers=8, worker_batch=16, epochs=5.0, lr=0.4)):
        if isinstance(record, sw.Epoch):
            print(f"epoch {record.epoch:.1f}: loss {record.train['loss']:.4f}")
        if isinstance(record, sw.Result):
            print(f"test accuracy {record.test['accuracy']:.3f}, weights {record.weights_sha256[:16]}")
