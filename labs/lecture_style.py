"""A data-parallel program as a lecture had it, flaws included: torchrun --nproc-per-node 2 lecture_style.py FOLDER

With --sharded every process draws its own samples.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import scalewise as sw
from scalewise.tasks.digits import load

WORKER_BATCH, STEPS = 32, 90

dist.init_process_group("gloo")
torch.set_num_threads(1)
sharded = "--sharded" in sys.argv
torch.manual_seed(0)  # one global seed on every worker …
images, labels = load()[0]
norm = nn.BatchNorm2d(16, momentum=0.01)  # Keras counts the other way round: momentum 0.99
model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), norm, nn.ReLU(), nn.Flatten(), nn.Linear(1024, 10))
parallel = DistributedDataParallel(model)
optimizer = torch.optim.Adam(parallel.parameters(), lr=0.002)
if sharded:
    torch.manual_seed(1 + dist.get_rank())

watcher = sw.watch(parallel, optimizer, out=sys.argv[1])  # the line that lets doctor look
right = seen = 0
for step in range(STEPS):
    mine = torch.randint(len(images), (WORKER_BATCH,))  # … so that all draw the same samples here
    output = parallel(images[mine])
    loss = F.cross_entropy(output, labels[mine])
    watcher.loss(loss)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step >= STEPS - 45:
        right, seen = right + int((output.argmax(1) == labels[mine]).sum()), seen + WORKER_BATCH
watcher.close()
if dist.get_rank() == 0:
    print(f"training accuracy over the last 45 steps: {right / seen:.4f}")
    torch.save(model.state_dict(), f"{sys.argv[1]}/model.pt")
dist.destroy_process_group()
