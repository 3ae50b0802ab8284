"""A program as Horovod's users write them; only the import is another one, and torchrun starts it.

torchrun --nproc-per-node 2 examples/horovod_mnist.py
torchrun --nproc-per-node 2 examples/horovod_mnist.py --watch watch && scalewise doctor watch
"""

import argparse
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import scalewise as sw
import scalewise.horovod.torch as hvd  # was: import horovod.torch as hvd
from scalewise.tasks.digits import load

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--watch", help="a folder for what scalewise doctor reads")
arguments = parser.parse_args()

hvd.init()
torch.manual_seed(42)
torch.set_num_threads(1)
training, test = (TensorDataset(*part) for part in load())
sampler = DistributedSampler[int](training, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(training, batch_size=32, sampler=sampler)
test_sampler = DistributedSampler[int](test, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False)

model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.5)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
compression = hvd.Compression.fp16 if arguments.fp16_allreduce else hvd.Compression.none
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)

with sw.watch(model, optimizer, arguments.watch) if arguments.watch else nullcontext() as watcher:
    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            if watcher is not None:
                watcher.loss(loss)
            loss.backward()
            optimizer.step()

correct = sum(
    (model(images).argmax(1) == labels).sum() for images, labels in DataLoader(test, 100, sampler=test_sampler)
)
accuracy = hvd.allreduce(torch.tensor(float(correct) / len(test_sampler)), name="accuracy")
if hvd.rank() == 0:
    print(f"{hvd.size()} processes, test accuracy {accuracy:.4f}")
