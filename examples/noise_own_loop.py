"""The noise scale in your own loop: how large may the global batch become before samples are wasted?

python examples/noise_own_loop.py                                    # gradient accumulation: one line, one call a step
torchrun --nproc-per-node 2 examples/noise_own_loop.py               # DistributedDataParallel: one line
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import scalewise as sw
from scalewise.tasks.digits import load

WORKER_BATCH, MICRO_BATCH = 64, 16

distributed = "RANK" in os.environ
torch.set_num_threads(1)
torch.manual_seed(0)
data = TensorDataset(*load()[0])
model: nn.Module = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
monitor = sw.NoiseScale(population=len(data))
if distributed:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
    monitor.watch_ddp(model, worker_batch=WORKER_BATCH)
else:
    accumulation = monitor.watch_accumulation(model, micro_batch=MICRO_BATCH)
sampler = DistributedSampler[int](data) if distributed else None
loader = DataLoader(data, batch_size=WORKER_BATCH, sampler=sampler, shuffle=sampler is None, drop_last=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

for epoch in range(8):
    if sampler is not None:
        sampler.set_epoch(epoch)
    for images, labels in loader:
        size = WORKER_BATCH if distributed else MICRO_BATCH
        for part, target in zip(images.split(size), labels.split(size), strict=True):
            F.cross_entropy(model(part), target).mul(size / WORKER_BATCH).backward()
        if not distributed:
            accumulation.step()  # before clipping, if there is any
        optimizer.step()
        optimizer.zero_grad()

found = monitor.estimate()
if not distributed or dist.get_rank() == 0:
    low, value, high = ("?" if one is None else f"{one:.0f}" for one in (found.low, found.value, found.high))
    print(f"noise scale {value} samples (95 %: {low} to {high}): {found.verdict}")
if distributed:
    dist.destroy_process_group()
