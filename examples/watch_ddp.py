"""Watch your own DistributedDataParallel loop, and ask why it is worse. There is a mistake in it: which?

torchrun --nproc-per-node 2 examples/watch_ddp.py
scalewise doctor watch
torchrun --nproc-per-node 2 examples/watch_ddp.py --sharded      # without the mistake
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import scalewise as sw
from scalewise.tasks.digits import load

dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(0)
data = TensorDataset(*load()[0])
sampler = DistributedSampler[int](data) if "--sharded" in sys.argv else None
loader = DataLoader(data, batch_size=32, sampler=sampler, shuffle=sampler is None, drop_last=True)
model = DistributedDataParallel(nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

watcher = sw.watch(model, optimizer, out="watch")  # the only line that is needed …
for epoch in range(4):
    if sampler is not None:
        sampler.set_epoch(epoch)
    for images, labels in loader:
        loss = F.cross_entropy(model(images), labels)
        watcher.loss(loss)  # … and one to see spikes of the loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

if dist.get_rank() == 0:
    print(f"process 0 ends with loss {loss.item():.4f}")
dist.destroy_process_group()
