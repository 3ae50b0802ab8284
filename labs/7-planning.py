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
# # 7 · Planning: how many workers, what it costs, how much data
#
# Before anyone rents a cluster, three questions: how long will it take with $N$ workers, what will it cost, and would more
# data help more than more machines? Everything here follows from a few numbers that a laptop can measure, plus a price and
# a link that you look up.

# %%
import dataclasses
import math

import numpy as np
import torch

import scalewise as sw
from scalewise import labs
from scalewise.plan.model import Inputs, rows
from scalewise.runs.measure.noise import measure_noise
from scalewise.stats.learning_curve import fit as fit_errors
from scalewise.stats.timing import fit as fit_cost

plt = labs.figures()
torch.set_num_threads(1)
task = sw.load_task("mlp", ["hidden=64"])
images, labels = task.train
recipe = sw.Recipe(worker_batch=32, epochs=10.0, optimizer="momentum", lr=0.02, threads=1)

# %% [markdown]
# ## What must be measured
#
# One worker's training gives three numbers: its steps $S_1$, the noise scale $B$ (lab 5), and the time of a step as a function
# of its worker batch, $c(b) = \alpha + \beta b$.

# %%
noise = measure_noise(task, recipe)
critical = noise.used.value
print(f"noise scale {critical:.0f} samples (95 %: {noise.used.low:.0f} to {noise.used.high:.0f})")

*_, single = sw.train(task, recipe)
print(f"one worker: {single.steps} steps, test accuracy {single.test['accuracy']:.3f}")

batches, seconds = [8, 32, 128, 512], []
for batch in batches:
    speeds = []
    for _ in range(3):
        *_, trial = sw.train(task, recipe.replace(worker_batch=batch, steps=60))
        speeds.append(trial.samples_per_second)
    seconds.append([batch / max(speeds)])
cost = fit_cost([1.0] * len(batches), batches, seconds)
alpha, beta = cost.fixed_seconds.value, cost.unit_seconds.value
print(
    f"a step takes {1e6 * alpha:.0f} µs and {1e6 * beta:.2f} µs more for every sample (the fastest of 3 trainings each)"
)

# %% [markdown]
# ## The planning model
#
# With $N$ workers of $b$ samples, a step is worth the *gain*
#
# $$r = \frac{1 + B/b}{1 + B/(Nb)} \in [1, N], \qquad S_N = \left\lceil \frac{S_1}{r} \right\rceil$$
#
# single-worker steps: that is the critical-batch law of lab 5. Gradients of $n$ bytes are summed in a ring over a link with
# latency $\lambda$ and bandwidth $w$, and partly hidden behind the computation ($1 \le \gamma \le 10$):
#
# $$t_N = \left(c^\gamma + \left(2(N-1)\lambda + \frac{2(N-1)}{N}\frac{n}{w}\right)^\gamma\right)^{1/\gamma},\qquad
#   \text{time} = S_N\, t_N,\qquad \text{cost} = N \cdot \text{time} \cdot \text{price}$$
#
# Link and price are **assumptions** that you look up; here 10 Gbit/s with 20 µs latency, and 2.50 an hour for a device.

# %%
parameters = sum(parameter.numel() for parameter in task.model().parameters())
inputs = Inputs(
    worker_batch=32,
    single_steps=single.steps,
    single_low=single.steps,
    single_high=single.steps,
    critical_batch=critical,
    critical_low=noise.used.low,
    critical_high=noise.used.high,
    lr=recipe.lr,
    lr_power=1.0,
    step_seconds=alpha,
    sample_seconds=beta,
    parameter_bytes=4 * parameters,
    latency_seconds=20e-6,
    bytes_per_second=1.25e9,
    price_per_hour=2.50,
)
counts = [1, 2, 4, 8, 16, 32]
planned = rows(inputs, counts)


def by_hand(workers, overlap=2.0):
    """Steps and seconds by the formulas above; scalewise assumes γ = 2 where nothing better is known."""
    gain = (1 + critical / 32) / (1 + critical / (workers * 32))
    compute = alpha + 32 * beta
    ring = 2 * (workers - 1) * 20e-6 + 2 * (workers - 1) / workers * 4 * parameters / 1.25e9
    steps = math.ceil(single.steps / gain - 1e-9)
    return steps, steps * (compute**overlap + ring**overlap) ** (1 / overlap)


for row in planned:
    assert row.steps == by_hand(row.workers)[0]
    assert math.isclose(row.seconds, by_hand(row.workers)[1])
labs.table(
    [
        {
            "workers": row.workers,
            "global batch": row.global_batch,
            "steps": row.steps,
            "samples": row.samples,
            "time (s)": row.seconds,
            "cost": row.cost,
            "efficiency": row.efficiency,
            "limited by": row.limit,
        }
        for row in planned
    ],
    "The plan by scalewise.plan, equal to the formulas by hand. A toy: real trainings take hours, by the same formulas.",
)

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.3))
left.loglog(counts, [row.seconds for row in planned], "o-", label="planned")
left.loglog(counts, [planned[0].seconds / count for count in counts], ":", color="grey", label="ideal")
left.set(xlabel="workers", ylabel="time (s)")
right.semilogx(counts, [100 * row.efficiency for row in planned], "o-")
right.axhline(50, color=labs.COLORS[1], linestyle="--", label="half of what is paid for is used")
right.set(xlabel="workers", ylabel="efficiency (%)", ylim=(0, 105))
for place in (left, right):
    place.set_xticks(counts, counts)
    place.minorticks_off()
    place.legend(fontsize=8)
labs.show(
    figure,
    "The planned time beside the ideal of N times faster, and the share of what is paid for that is used.",
)

# %% [markdown]
# ## Is the plan right?
#
# The steps can be tested without any cluster, because workers are part of the recipe and one process can run them all.
# AdaScale measures the gain in every step and stops when $S_1$ single-worker steps are done; so its number of steps is what
# the plan predicts.

# %%
trials = []
for workers, row in zip((2, 4, 8), planned[1:4], strict=True):
    *_, result = sw.train(task, recipe.replace(workers=workers, lr_rule="adascale"))
    trials.append(
        {
            "workers": workers,
            "steps planned": row.steps,
            "steps taken": result.steps,
            "planned ÷ taken": row.steps / result.steps,
            "test accuracy": result.test["accuracy"],
            "one worker's": single.test["accuracy"],
        }
    )
labs.table(trials, "The plan's steps against real trainings with AdaScale, one seed.")

# %% [markdown]
# `scalewise plan TASK --workers 1,2,4,8,16 --price 2.50/h --link 25gbit` measures all inputs itself, gives every row an
# interval, and prints the command to run.
#
# ## Would more data help?
#
# Over a wide range the error falls as a power of the number of training samples $m$ (Hestness et al. 2017):
#
# $$\varepsilon(m) = \alpha\, m^{\beta} + \gamma, \qquad \beta < 0$$
#
# $\gamma$ is what no amount of data removes. We train on parts of the data, fit the curve to the **smaller** ones, and see
# whether it predicts the largest.

# %%
sizes, points = [45, 90, 180, 360, 720, len(images)], []
for size in sizes:
    for seed in range(4):
        chosen = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))[:size]
        part = dataclasses.replace(task, train=(images[chosen], labels[chosen]))
        *_, result = sw.train(part, recipe.replace(steps=300, lr=0.05, seed=seed))
        points.append((size, 1 - result.test["accuracy"]))
curve = fit_errors([point for point in points if point[0] < sizes[-1]])
predicted, seen = curve.at(sizes[-1]), np.mean([error for size, error in points if size == sizes[-1]])
print(f"α = {curve.alpha.value:.3g}, β = {curve.beta.value:.3f} (95 %: {curve.beta.low:.2f} to {curve.beta.high:.2f})")
print(f"γ = {curve.gamma.value:.3g}: {'known' if curve.identified else 'not identified by so few points'}")
print(
    f"error at {sizes[-1]:,} samples: predicted {predicted.value:.3f} ({predicted.low:.3f} to {predicted.high:.3f}), measured {seen:.3f}"
)
inside = predicted.low <= seen <= predicted.high
print("the measured error lies", "inside" if inside else "OUTSIDE", "the predicted interval")
if seen < curve.gamma.value:
    print("but below the fitted γ: what looked like a floor to the smaller sizes is none")

# %%
ahead = np.geomspace(sizes[0], 4 * sizes[-1], 60)
figure, axes = plt.subplots()
axes.fill_between(
    ahead,
    [curve.at(size).low for size in ahead],
    [curve.at(size).high for size in ahead],
    color="#56B4E9",
    alpha=0.3,
    label="95 % for a new training",
)
axes.loglog(ahead, [curve.at(size).value for size in ahead], "-", label="fitted to the smaller sizes")
axes.loglog(
    *zip(*[point for point in points if point[0] < sizes[-1]], strict=True),
    "o",
    color=labs.COLORS[0],
    alpha=0.5,
    markersize=4,
    label="fitted points",
)
axes.loglog(
    *zip(*[point for point in points if point[0] == sizes[-1]], strict=True),
    "s",
    color=labs.COLORS[1],
    markersize=5,
    label="held back",
)
axes.set(xlabel="training samples m", ylabel="test error")
axes.legend(fontsize=8)
labs.show(figure, "A learning curve fitted to parts of the data, and the largest size that it had not seen.")

# %%
needed = curve.size_for(seen / 2)
shown = "never, by the best curve" if needed.value is None else f"about {needed.value:,.0f} samples"
high = "no upper end" if needed.high is None else f"{needed.high:,.0f}"
print(f"to halve the error of {seen:.3f}: {shown} (95 %: {needed.low or 0:,.0f} to {high})")

# %% [markdown]
# Be careful with floors: few and small sizes easily make one up, and then a target below it looks impossible. Fit again with
# all sizes before you believe it. `scalewise forecast TASK` runs this for your task and says when $\gamma$ is not identified.
#
# ## Questions
#
# **7.1** Write the plan's steps: a function of `single` ($S_1$), `workers`, `worker_batch` and `critical` ($B$) that
# returns the whole number of steps.

# %%
answer_1 = None  # your function
labs.check("7.1", answer_1)

# %% [markdown]
# **7.2** A training takes 90 minutes on 8 workers; each costs 2.50 an hour. What does it cost?

# %%
answer_2 = None  # a number
labs.check("7.2", answer_2)

# %% [markdown]
# **7.3** An error follows $\varepsilon(m) = 2\,m^{-0.5}$. How many samples does an error of 0.05 need?

# %%
answer_3 = None  # a number
labs.check("7.3", answer_3)

# %% [markdown]
# **7.4** The fitted curve has $\gamma = 0.04$ (well identified), and the target is an error of 0.03. What can help?
#
# - a) twice the data
# - b) ten times the data
# - c) another model or cleaner labels
# - d) more workers

# %%
answer_4 = None  # "a", "b", "c" or "d"
labs.check("7.4", answer_4)
