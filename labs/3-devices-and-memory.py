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
# # 3 · CPU against accelerator: what to send, and how large a batch fits
#
# An accelerator (a GPU, say) multiplies matrices many times faster than a CPU. It also lives at the other end of a bus, and
# it has its own, smaller memory. This lab measures what is worth sending there, and what decides the largest batch.
#
# The lab runs anywhere: it times whatever devices **this** machine has. Where there is only a CPU it says so, compares one
# thread with all threads, and *calculates* the rest from numbers of an imagined device that you can change. What was
# measured and what was assumed is always kept apart.

# %%
import os
import time

import numpy as np
import torch
from torch.nn import functional as F

from scalewise import labs
from scalewise.runs.bench.devices import break_even
from scalewise.runs.bench.workloads import OPERATIONS, missing, places
from scalewise.stats.interval import Interval
from scalewise.stats.timing import Cost, fit
from scalewise.tasks.digits import cnn, load

plt = labs.figures()
found = places()
print("devices here:", "; ".join(place.name for place in found))
for note in missing(found):
    print("not here:", note)

# %% [markdown]
# ## Three operations that training is made of
#
# - a **matrix product** of two $n \times n$ matrices: $2n^3$ FLOPs on $3n^2$ numbers;
# - a **3×3 convolution** with 32 channels on 32×32 images: also a product in disguise (lab 2);
# - an **elementwise** sum of two vectors: one FLOP for every three numbers moved.
#
# Their *arithmetic intensity*, FLOPs per byte, tells them apart: the product's grows with $n$, the sum's never does. So
# the first is limited by arithmetic, the second by memory.
#
# We time each at several sizes, on every device in turn, in rounds (so that a busy moment hits all alike). Other programs can only make
# something slower, so of all rounds the **fastest** counts.

# %%
ROUNDS = 5
names = ("matrix product", "convolution 3×3", "elementwise")
chosen = [operation for operation in OPERATIONS if operation.name in names]


def timed(run, device, least_seconds=0.004):
    """Seconds of one run, from as many as fill a few milliseconds."""
    times, began = 0, time.perf_counter()
    while time.perf_counter() - began < least_seconds:
        run()
        times += 1
    if device.type == "cuda":
        torch.cuda.synchronize()
    elif device.type == "mps":
        torch.mps.synchronize()
    return (time.perf_counter() - began) / times


timings = {(place, operation, size): [] for operation in chosen for size in operation.sizes for place in found}
ready = {}
for _round in range(ROUNDS):
    for (place, operation, size), seconds in timings.items():
        with place.used() as device:
            key = (place.device, operation.name, size)
            if key not in ready:
                ready[key] = operation.prepare(size, device)
            ready[key]()
            seconds.append(timed(ready[key], device))
fastest = {key: min(seconds) for key, seconds in timings.items()}
if hasattr(os, "getloadavg"):
    busy = os.getloadavg()[0]
    print(f"processes that wanted to run in the last minute: {busy:.1f}, on {os.cpu_count()} cores")
    if busy > os.cpu_count():
        print("the machine is crowded: two threads wait for each other then, and look slower than they are")

figure, axes = plt.subplots(1, 3, figsize=(9, 3.2))
for place_on_page, operation in zip(axes, chosen, strict=True):
    for place in found:
        speed = [operation.flops(size) / fastest[place, operation, size] / 1e9 for size in operation.sizes]
        place_on_page.loglog(operation.sizes, speed, "o-", label=place.name)
    place_on_page.set(title=operation.name, xlabel=f"size ({operation.unit})")
axes[0].set_ylabel("GFLOP per second")
axes[0].legend(fontsize=8)
labs.show(
    figure,
    f"Speed by size, the best of {ROUNDS} rounds on this machine. Where a line rises, operations are still too small for the "
    "device; elementwise work stays far below what products reach, whatever its size.",
)

# %% [markdown]
# ## From which size does it pay?
#
# Two numbers describe each line well enough: a fixed cost and a cost per unit of work, $t(n) = \alpha + \beta \cdot
# \mathrm{work}(n)$. Sending an operation to a device pays from the smallest $n$ with
#
# $$\alpha_{\text{host}} + \beta_{\text{host}} W(n) \;\ge\; \alpha_{\text{device}} + \beta_{\text{device}} W(n)
#   + \left[\, \alpha_{\text{copy}} + \beta_{\text{copy}} \,\mathrm{bytes}(n) \,\right]$$
#
# where the bracket is the way there and back.
#
# `scalewise bench devices` does this for every operation and device it finds. First what can be measured everywhere: when
# do **more threads** pay? (Nothing has to be carried, so the bracket is zero.)


# %%
def cost_of(place, operation):
    """α and β of an operation somewhere."""
    return fit(
        [1.0] * len(operation.sizes),
        [operation.work(size) for size in operation.sizes],
        [[fastest[place, operation, size]] for size in operation.sizes],
    )


one, host = found[0], [place for place in found if place.device == "cpu"][-1]
rows = []
for operation in chosen:
    limits = min(operation.sizes), max(operation.sizes)
    worth = break_even(
        cost_of(one, operation), cost_of(host, operation), None, operation.work, operation.moved_bytes, limits
    )
    alone, all_of_it = (fastest[place, operation, limits[1]] for place in (one, host))
    rows.append(
        {
            "operation": operation.name,
            "unit": operation.unit,
            "more threads pay from": worth.size if host != one else None,
            "how many times faster at the largest size": alone / all_of_it,
        }
    )
labs.table(
    rows, f"Measured here: {one.name} against {host.name}. – means: not within 64 times the sizes that were timed."
)

# %% [markdown]
# Now the accelerator. If this machine has one, its timings are in the plot above and `scalewise bench devices` measures
# the copies as well. If not, here is an **imagined** device. Its four numbers are assumptions in the order of magnitude of
# data sheets, not measurements: change them and see what moves.

# %%
assumed = {
    "launch_seconds": 10e-6,  # to start any operation there
    "flops_per_second": 10e12,  # of a matrix product
    "memory_bytes_per_second": 500e9,  # of its own memory, for elementwise work
    "bus_bytes_per_second": 12e9,  # between the CPU's memory and its own
    "bus_seconds": 10e-6,  # of latency, each way
}


def certain(value):
    """A number without an interval."""
    return Interval(value, value, value)


copies = Cost(certain(2 * assumed["bus_seconds"]), certain(1 / assumed["bus_bytes_per_second"]), 0.0)
rows = []
for operation in chosen:
    per_unit = 1 / assumed["flops_per_second" if operation.bound == "compute" else "memory_bytes_per_second"]
    device = Cost(certain(assumed["launch_seconds"]), certain(per_unit), 0.0)
    limits = min(operation.sizes), max(operation.sizes)
    arguments = (operation.work, operation.moved_bytes, limits)
    carried = break_even(cost_of(host, operation), device, copies, *arguments)
    resident = break_even(cost_of(host, operation), device, None, *arguments)
    rows.append(
        {
            "operation": operation.name,
            "unit": operation.unit,
            "pays with copies from": carried.size,
            "pays from, if the data are there": resident.size,
        }
    )
labs.table(
    rows, f"{host.name} as measured here, against the assumed device. – means: not up to 64 times the timed sizes."
)

# %% [markdown]
# The lesson does not depend on the exact numbers: **send arithmetic, not memory traffic, and leave the data there.** A
# training step sends a batch once, does everything on the device, and brings back a single number, the loss.

# %% [markdown]
# ## Memory decides the batch size
#
# Backward needs what forward computed (lab 2), so the *activations* of every layer stay in memory until backward has
# used them. They grow with the batch; the parameters, their gradients and the optimizer's state do not:
#
# $$\text{memory}(B) = \left(\text{weights} + \text{gradients} + \text{optimizer state}\right) + B \cdot
#   \left(\text{activations of one sample}\right)$$
#
# PyTorch lets us watch what autograd saves; we count the bytes.


# %%
def saved_bytes(model, images, labels):
    """Bytes that backward will need, each memory counted once; the parameters themselves are not counted."""
    kept, own = {}, {parameter.data_ptr() for parameter in model.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if tensor.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = F.cross_entropy(model(images), labels)
    loss.backward()
    return sum(kept.values())


torch.manual_seed(0)
torch.set_num_threads(1)
model = cnn(bn=False, dropout=0.0)
(images, labels), _ = load()
batches = [1, 8, 32, 128, 512]
kept = [saved_bytes(model, images[:batch].clone(), labels[:batch].clone()) for batch in batches]
sample_bytes = (kept[-1] - kept[0]) / (batches[-1] - batches[0])
parameters = sum(parameter.numel() for parameter in model.parameters())
fixed_bytes = 3 * 4 * parameters  # weights, gradients and momentum, 4 bytes each
print(f"{sample_bytes:,.0f} bytes of activations for one sample; {fixed_bytes:,} bytes whatever the batch")

figure, axes = plt.subplots()
axes.loglog(batches, np.array(kept) / 1e6, "o", label="saved for backward (counted)")
axes.loglog(batches, sample_bytes * np.array(batches) / 1e6, "--", label=f"{sample_bytes / 1e3:.1f} kB × samples")
axes.axhline(fixed_bytes / 1e6, color=labs.COLORS[2], linestyle=":", label="weights, gradients, momentum")
axes.set(xlabel="worker batch (samples)", ylabel="memory (MB)")
axes.legend()
labs.show(figure, "Activations grow in a straight line with the batch and soon outweigh everything else.")

# %% [markdown]
# So "a batch of 32 dies out of memory, 16 fits" is a straight line crossing a limit, and it can be **predicted**:
# `scalewise measure TASK --memory 2GB` does so, and then tries the answer in a process that may die.
#
# And if the batch that you want does not fit? **Micro batches**: several smaller passes whose gradients add up. The sum is
# the same; the memory is that of one micro batch.


# %%
def gradient(micro_batch, batch=128):
    """The gradient of one worker batch, and the most that was saved at once."""
    model.zero_grad()
    most = 0
    for first in range(0, batch, micro_batch):
        part = slice(first, first + micro_batch)
        most = max(most, saved_bytes(model, images[part].clone(), labels[part].clone()))
    pieces = batch // micro_batch
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()]) / pieces, most


whole, _ = gradient(128)
rows = []
for micro_batch in (128, 64, 32, 16):
    found_gradient, most = gradient(micro_batch)
    rows.append(
        {
            "micro batch": micro_batch,
            "passes": 128 // micro_batch,
            "saved at once (MB)": most / 1e6,
            "largest difference of the gradient": (found_gradient - whole).abs().max().item(),
        }
    )
labs.table(rows, "A worker batch of 128 in micro batches. Differences are round-off: sums are taken in another order.")

# %% [markdown]
# (With batch norm the micro batch also changes the statistics: part of the recipe, see lab 6.)
#
# ## Questions
#
# **3.1** How many FLOPs per byte does the product of two matrices of side 1,024 have, in single precision (4 bytes), if each
# of the three matrices crosses the memory bus once?

# %%
answer_1 = None  # a number
labs.check("3.1", answer_1)

# %% [markdown]
# **3.2** Two long vectors lie in the CPU's memory, and their sum is needed there. Is it worth sending them to an accelerator
# whose own memory is 20 times faster than the CPU's, over a bus that is slower than the CPU's memory?
#
# - a) yes, from some length on
# - b) no, at no length
# - c) only if the vectors are short
# - d) only in double precision

# %%
answer_2 = None  # "a", "b", "c" or "d"
labs.check("3.2", answer_2)

# %% [markdown]
# **3.3** With the bytes that **you measured above** (`fixed_bytes`, `sample_bytes`) and a budget of 10 MB (10,000,000
# bytes), what is the largest worker batch of this network?

# %%
answer_3 = None  # a whole number
labs.check("3.3", answer_3, fixed_bytes=fixed_bytes, sample_bytes=sample_bytes, budget_bytes=10e6)

# %% [markdown]
# **3.4** A worker batch of 256 needs 8 GB of activations. You run it in micro batches of 32. How many GB of activations are
# needed at once?

# %%
answer_4 = None  # a number
labs.check("3.4", answer_4)
