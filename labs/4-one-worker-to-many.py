# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 4 · From one worker to many
#
# **Data parallelism**: every worker has the whole model and its own part of the data; gradients are summed in every step.
# **Model parallelism**: every worker has a part of the model; activations are handed on. We write the first by hand in 40
# lines, run it in real processes, do the same with scalewise, and get **the same bytes**. Then we ask when results depend
# on the number of processes, why that is bad, and which parallelism sends less.

# %%
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import scalewise as sw
from scalewise import labs
from scalewise.engine.data.streams import SampleStream
from scalewise.tasks.digits import cnn, load

plt = labs.figures()
torch.set_num_threads(1)

# %% [markdown]
# ## By hand
#
# This is the whole program. Five things make it data-parallel: the same start everywhere (broadcast), different data,
# gradients each for itself, one sum over all (all-reduce), and the same step everywhere.

# %%
labs.code("data_parallel_by_hand.py")

# %%
said = labs.program("data_parallel_by_hand.py", processes=2)
print(said)

# %% [markdown]
# Both processes end with the same weights: they started equal and added equal numbers. (The last line is a SHA-256 over all
# weights; a single different bit would change it.)
#
# ## With scalewise
#
# The same *recipe*, here on **one** process. A scalewise **worker** is a share of the data, part of the recipe; a
# **process** is only where the work is done. So two workers on one process are a *rehearsal* of the program above.

# %%
recipe = sw.Recipe(workers=2, worker_batch=32, steps=60, optimizer="momentum", lr=0.02, threads=1)
*_, rehearsal = sw.train(sw.load_task("digits"), recipe)
by_hand = {line.split()[-1] for line in said.splitlines() if line.startswith("worker")}
print("by hand, 2 processes:      ", *by_hand)
print("scalewise, 1 process:      ", rehearsal.weights_sha256)
assert by_hand == {rehearsal.weights_sha256}
print("the same, byte for byte")

# %% [markdown]
# ## When the number of processes changes the result
#
# With two workers there is one `+`, and $a + b = b + a$ also in floating point. With more, the **order** matters, because
# every `+` rounds: $(a + b) + c \ne a + (b + c)$. Here are real gradients of four workers, added in three orders.

# %%
images, labels = load()[0]
torch.manual_seed(0)
model = cnn(bn=False, dropout=0.0)
stream = SampleStream(len(images), seed=0)
gradients = []
for worker in range(4):
    mine, _ = stream.take(worker * 32, (worker + 1) * 32)
    model.zero_grad()
    F.cross_entropy(model(images[mine]), labels[mine]).backward()
    gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
a, b, c, d = gradients
orders = {
    "((a + b) + c) + d": ((a + b) + c) + d,
    "(a + b) + (c + d)": (a + b) + (c + d),
    "((d + c) + b) + a": ((d + c) + b) + a,
}
tree = orders["(a + b) + (c + d)"]
rows = [
    {
        "order": name,
        "numbers that differ from the tree's": int((value != tree).sum()),
        "largest relative difference": float(((value - tree).abs() / tree.abs().clamp(min=1e-30)).max()),
    }
    for name, value in orders.items()
]
labs.table(rows, f"Sums of four gradients of {len(tree):,} numbers each.")

# %% [markdown]
# A library's all-reduce adds in whatever order suits the number of processes: the last bits differ, training amplifies
# them, and "8 workers are worse" or "it worked yesterday on 4 machines" becomes impossible to investigate. scalewise adds
# along **one fixed binary tree over worker numbers**, whoever computes which branch. So four workers give the same
# bytes on one process and on three (which does not even divide four).

# %%
four = recipe.replace(workers=4)
*_, one_process = sw.train(sw.load_task("digits"), four)
flags = ("--workers", "4", "--worker-batch", "32", "--steps", "60", "--optimizer", "momentum", "--lr", "0.02")
flags += ("--threads", "1", "--recipe", "plain")
three_processes = labs.scalewise("train", "digits", *flags, "--processes", "3")
print("ordered, 1 process:  ", one_process.weights_sha256[:32])
print("ordered, 3 processes:", three_processes["weights_sha256"][:32])
assert one_process.weights_sha256 == three_processes["weights_sha256"]

usual = labs.scalewise("train", "digits", *flags, "--processes", "3", "--reduce", "allreduce")
print("the backend's own all-reduce, 3 processes:", usual["weights_sha256"][:32], " exact:", usual["exact"])

# %% [markdown]
# ## What does it send?
#
# Summing $n$ bytes of gradients over $P$ processes in a *ring* sends, from every process,
#
# $$\text{data parallel: } 2\,\frac{P-1}{P}\, n \text{ bytes a step, whatever the batch.}$$
#
# A model cut into $P$ *pipeline* stages sends the activations at each cut forward, and their gradients of the same size
# back:
#
# $$\text{pipeline: } 2 \cdot B \cdot (\text{bytes of one sample's activations at the cut}), \text{ whatever the model's size.}$$
#
# Counted for two models on two processes:


# %%
def counted(model, sample, cut):
    """Bytes of all parameters, and of one sample's activations after layer `cut`."""
    return 4 * sum(parameter.numel() for parameter in model.parameters()), 4 * model[: cut + 1](sample).numel()


wide = nn.Sequential(
    nn.Flatten(), nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)
)
examples = {"digits CNN, cut after pooling": (model, 4), "dense network of 2,048, cut in the middle": (wide, 2)}
batches = np.array([1, 4, 16, 64, 256, 1024, 4096])
figure, axes = plt.subplots(1, 2, figsize=(8, 3.3), sharey=True)
for place, (name, (net, cut)) in zip(axes, examples.items(), strict=True):
    parameter_bytes, sample_bytes = counted(net, images[:1], cut)
    place.loglog(batches, np.full(len(batches), 2 * 0.5 * parameter_bytes) / 1e6, label="data parallel")
    place.loglog(batches, 2 * batches * sample_bytes / 1e6, label="pipeline")
    place.set_title(name, fontsize=9)
    place.set_xlabel("samples in a step")
    print(f"{name}: equal at {parameter_bytes / (2 * sample_bytes):,.1f} samples a step")
axes[0].set_ylabel("MB sent by a process in a step")
axes[0].legend()
labs.show(
    figure,
    "Data parallelism sends the model's size, a pipeline the batch's: large models with small batches favour the pipeline, "
    "small models with large batches favour data parallelism.",
)

# %% [markdown]
# Bytes are not all: a pipeline's stages wait for each other while it fills and empties. With $M$ micro batches and $P$
# stages each is idle for $(P-1)/(M+P-1)$ of the time, so many micro batches are needed. The mathematics is the same, though:
# here a real pipeline of two processes, against two data-parallel workers rehearsed on one process.

# %%
in_parts = recipe.replace(micro_batch=8)
*_, data_parallel = sw.train(sw.load_task("digits"), in_parts)
flags = ("--workers", "2", "--worker-batch", "32", "--micro-batch", "8", "--steps", "60", "--optimizer", "momentum")
flags += ("--lr", "0.02", "--threads", "1", "--recipe", "plain")
pipeline = labs.scalewise("train", "digits", *flags, "--processes", "2", "--parallel", "pipeline")
print("data parallel:", data_parallel.weights_sha256[:32])
print("pipeline:     ", pipeline["weights_sha256"][:32], " exact:", pipeline["exact"])
assert data_parallel.weights_sha256 == pipeline["weights_sha256"]

# %% [markdown]
# | | data parallel | model parallel |
# |---|---|---|
# | each process has | the whole model, some workers | a part of the model, all workers |
# | sent in a step | the size of the model | the size of the activations at the cuts |
# | memory of a process | whole model + its workers' activations | a part of both |
# | waiting | for the slowest worker | for the stage before (bubble) |
# | use it when | the model fits (almost always first) | the model does not fit |
#
# `scalewise bench parallelism TASK` measures all of this for your own model.

# %% [markdown]
# ## Questions
#
# **4.1** Write a function of `size` (bytes) and `processes` that returns how many bytes each process sends in a ring sum.

# %%
answer_1 = None  # your function
labs.check("4.1", answer_1)

# %% [markdown]
# **4.2** Same recipe, same seed, same machine; a run on 4 processes and a run on 8 processes end with weights that differ in
# the last digits. Which is the likely cause?
#
# - a) the processes' clocks differ
# - b) broadcast changes the start weights
# - c) gradients are added in another order
# - d) the network is too slow

# %%
answer_2 = None  # "a", "b", "c" or "d"
labs.check("4.2", answer_2)

# %% [markdown]
# **4.3** A pipeline has 4 stages and 12 micro batches a step. Which share of the time is each stage idle?

# %%
answer_3 = None  # a number between 0 and 1
labs.check("4.3", answer_3)

# %% [markdown]
# **4.4** A model has 100 MB of gradients; a cut in its middle passes 1 MB of activations per sample. Two processes, 8 samples a
# step. Which sends fewer bytes?
#
# - a) data parallelism
# - b) the pipeline
# - c) both the same

# %%
answer_4 = None  # "a", "b" or "c"
labs.check("4.4", answer_4)
