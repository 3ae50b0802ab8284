"""Data parallelism by hand: torchrun --nproc-per-node 2 data_parallel_by_hand.py"""

import hashlib

import torch
import torch.distributed as dist
from torch.nn import functional as F

from scalewise.engine.data.streams import SampleStream
from scalewise.tasks.digits import cnn, load

WORKER_BATCH, STEPS, SEED = 32, 60, 0

dist.init_process_group("gloo")
torch.set_num_threads(1)
worker, workers = dist.get_rank(), dist.get_world_size()
images, labels = load()[0]
stream = SampleStream(len(images), SEED)  # the order of the samples, the same for all workers

# 1. The same model everywhere: the first worker's weights are sent to all.
torch.manual_seed(SEED)
model = cnn(bn=False, dropout=0.0)
for parameter in model.parameters():
    dist.broadcast(parameter.data, src=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
for step in range(STEPS):
    # 2. Different data: each worker takes its own part of the global batch.
    first = (step * workers + worker) * WORKER_BATCH
    mine, _ = stream.take(first, first + WORKER_BATCH)
    # 3. Forward and backward, each for itself. The mean over all workers is a sum of means ÷ workers.
    optimizer.zero_grad()
    (F.cross_entropy(model(images[mine]), labels[mine]) / workers).backward()
    # 4. The gradients are summed over the workers: now all have the same. 5. All take the same step.
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()

weights = b"".join(tensor.numpy().tobytes() for _, tensor in sorted(model.state_dict().items()))
print(f"worker {worker}: {hashlib.sha256(weights).hexdigest()}", flush=True)
dist.destroy_process_group()
