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
# # 5 · Why accuracy falls: noise scale, critical batch, sharp and flat minima
#
# Eight workers, the same data, the same number of epochs, and the model is worse. Nothing is broken. This lab shows why, and
# measures the number that says how many workers a task can use: the **gradient noise scale**.

# %%
import numpy as np
import torch
from torch.nn import functional as F

import scalewise as sw
from scalewise import labs
from scalewise.engine.loop import Training
from scalewise.runs.measure.minima import barrier, line, sharpness
from scalewise.runs.measure.noise import measure_noise
from scalewise.stats.steps_law import fit_law

plt = labs.figures()
torch.set_num_threads(1)
task = sw.load_task("mlp", ["hidden=64"])  # 8×8 digits, two hidden layers
images, labels = task.train
recipe = sw.Recipe(worker_batch=32, epochs=10.0, optimizer="sgd", lr=0.2, threads=1)

# %% [markdown]
# ## More workers, nothing else changed
#
# Each worker takes 32 samples a step, so $N$ workers make a **global batch** of $32N$. Epochs are fixed: all runs see the same
# number of samples.

# %%
SEEDS = 3
accuracy, curves, rows = {}, {}, []
for workers in (1, 2, 4, 8, 16, 32):
    ends = []
    for seed in range(SEEDS):
        *records, result = sw.train(task, recipe.replace(workers=workers, seed=seed))
        ends.append(result.test["accuracy"])
    accuracy[workers] = ends
    curves[workers] = [record for record in records if isinstance(record, sw.Step)]
    rows.append(
        {
            "workers": workers,
            "global batch": result.global_batch,
            "steps": result.steps,
            "samples": result.samples,
            "test accuracy, mean": float(np.mean(ends)),
            "± over seeds": float(np.std(ends, ddof=1)),
        }
    )
labs.table(rows, f"The same learning rate and epochs for any number of workers; {SEEDS} seeds.")

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.4))
for workers in (1, 4, 16):
    steps = curves[workers]
    name = f"{workers} worker{'' if workers == 1 else 's'}"
    left.plot([step.samples / 1000 for step in steps], [step.loss for step in steps], label=name, linewidth=1)
    right.plot([step.step for step in steps], [step.loss for step in steps], linewidth=1)
left.set(xlabel="thousand samples seen", ylabel="training loss of a step")
right.set(xlabel="steps taken", xlim=(0, 120))
left.legend()
labs.show(
    figure,
    "The same runs twice. By samples seen, many workers look bad (left). By steps taken they look alike (right): the runs "
    "with many workers are simply not as far, because they took fewer steps.",
)

# %% [markdown]
# ## Signal and noise
#
# A batch gradient is the true gradient $G$ plus noise that shrinks with the batch. With $\Sigma$ the covariance of one
# sample's gradient, the loss that a step with the best possible learning rate gains is (McCandlish et al. 2018)
#
# $$\Delta L(B) = \frac{\Delta L_{\max}}{1 + B_{\text{noise}} / B}, \qquad
#   B_{\text{noise}} = \frac{\mathrm{tr}\,\Sigma}{|G|^2}$$
#
# Below $B_{\text{noise}}$ twice the batch is nearly twice the progress; far above it nothing more is gained.
#
# How to measure it? With $c$ workers of $b$ samples, mean gradients $g_i$, and $\bar g$ their mean:
#
# $$L = \frac1c\sum_i |g_i|^2,\quad T = |\bar g|^2,\quad |G|^2 \approx \frac{cT - L}{c-1},\quad
#   \mathrm{tr}\,\Sigma \approx \frac{b\,c\,(L - T)}{c-1}$$
#
# Both are right on average and noisy in one step, so average **numerator and denominator separately** and divide last.


# %%
def gradient(model, chosen):
    """The mean gradient over the chosen samples, as one vector."""
    model.zero_grad()
    F.cross_entropy(model(images[chosen]), labels[chosen]).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


torch.manual_seed(0)
model = task.model()  # the start of training
draw = torch.Generator().manual_seed(1)
groups, group_samples = 8, 16
signals, noises = [], []
for _ in range(60):
    drawn = torch.randint(len(images), (groups, group_samples), generator=draw)
    each = torch.stack([gradient(model, chosen) for chosen in drawn])
    mean_square, square_of_mean = each.square().sum(1).mean().item(), each.mean(0).square().sum().item()
    signals.append((groups * square_of_mean - mean_square) / (groups - 1))
    noises.append(group_samples * groups * (mean_square - square_of_mean) / (groups - 1))
by_hand = np.mean(noises) / np.mean(signals)

samples = torch.stack([gradient(model, torch.tensor([one])) for one in range(len(images))])  # every sample's own
true = samples.mean(0)
exact = ((samples - true).square().sum(1).mean() / true.square().sum()).item()
print(f"from 60 steps of 8 groups: {by_hand:.0f} samples;  from every single sample's gradient: {exact:.0f} samples")

# %% [markdown]
# scalewise measures it in every run with two or more workers (it is nearly free), and `scalewise measure TASK` at several
# points of a training, with intervals:

# %%
report = measure_noise(task, recipe)
stages = report.stages
figure, axes = plt.subplots()
middle = [stage.estimate.value for stage in stages]
below = [stage.estimate.value - stage.estimate.low for stage in stages]
above = [stage.estimate.high - stage.estimate.value for stage in stages]
axes.errorbar([stage.step for stage in stages], middle, yerr=[below, above], fmt="o-", capsize=4)
axes.axhline(report.used.value, color=labs.COLORS[1], linestyle="--", label=f"average: {report.used.value:.0f} samples")
axes.set(xlabel="step of one worker's training", ylabel="noise scale (samples)", ylim=(0, None))
axes.legend()
labs.show(figure, "The noise scale over training with 95 % intervals; it changes as the true gradient does.")

# %% [markdown]
# ## The critical batch, by training
#
# Summed over a training, the law says: to reach a given loss at global batch $B$ takes
#
# $$S = S_{\min}\left(1 + \frac{B_{\text{crit}}}{B}\right) \text{ steps} \quad\text{and}\quad
#   E = E_{\min}\left(1 + \frac{B}{B_{\text{crit}}}\right) \text{ samples}.$$
#
# At $B = B_{\text{crit}}$ both are twice their minimum: 50 % efficiency. We test it directly: steps to a training loss of
# 0.2, at each batch size with the best of four learning rates (a comparison with one rate for all would be unfair).

# %%
TARGET, RATES, MOST = 0.2, (0.1, 0.2, 0.4, 0.8), 700


def steps_to_target(batch, rate, seed):
    """Steps until the loss over all training samples is below the target; infinity if that takes too many."""
    torch.manual_seed(seed)
    model, draw = task.model(), torch.Generator().manual_seed(seed)
    for step in range(1, MOST + 1):
        chosen = torch.randint(len(images), (batch,), generator=draw)
        model.zero_grad()
        F.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= rate * parameter.grad
            if step % 5 == 0 and F.cross_entropy(model(images), labels) < TARGET:
                return step
    return np.inf


best = {}
for batch in (8, 16, 32, 64, 128, 256, 512):
    tried = {rate: np.mean([steps_to_target(batch, rate, seed) for seed in range(2)]) for rate in RATES}
    rate = min(tried, key=tried.get)
    best[batch] = (tried[rate], rate)
law = fit_law((batch, steps) for batch, (steps, _) in best.items())
critical = law.critical
print(
    f"critical batch from training: {critical.value:.0f} samples (95 %: {critical.low:.0f} to {critical.high or np.inf:.0f})"
)
print(
    f"noise scale, average:         {report.used.value:.0f} samples ({report.used.low:.0f} to {report.used.high:.0f})"
)

# %%
batches = np.array(list(best))
steps = np.array([best[batch][0] for batch in best])
curve = np.geomspace(batches.min(), batches.max(), 100)
fitted = law.least_steps * (1 + critical.value / curve)
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.4))
left.loglog(batches, steps, "o", label="measured")
left.loglog(curve, fitted, "--", label="the law, fitted")
left.axvline(critical.value, color=labs.COLORS[2], linestyle=":", label="critical batch")
left.set(xlabel="global batch B (samples)", ylabel="steps to the loss")
left.legend(fontsize=8)
right.loglog(batches, steps * batches, "o")
right.loglog(curve, fitted * curve, "--")
right.axvline(critical.value, color=labs.COLORS[2], linestyle=":")
right.set(xlabel="global batch B (samples)", ylabel="samples to the loss")
labs.show(figure, "Steps stop falling and samples start rising around the critical batch. Mean of two seeds each.")

# %% [markdown]
# Expect the two numbers to agree in order of magnitude, not better: the noise scale is a property of gradients at one
# point, the critical batch of a whole training. `scalewise measure TASK --verify sweep` does this with more care.
#
# ## Sharp and flat minima
#
# Another explanation of why large batches generalise worse: they end in *sharper* minima (Keskar et al. 2017). Sharpness is
# how far the loss can rise within a small box around the weights,
#
# $$100 \cdot \frac{\max_{|y_i| \le \epsilon(|x_i| + 1)} f(x + y) - f(x)}{1 + f(x)}$$
#
# Let us look rather than believe: a small-batch and a large-batch run with **as many steps**, two seeds.

# %%
kinds = {
    "small batch (32)": recipe.replace(worker_batch=32, steps=700, lr=0.2),
    "large batch (1,024)": recipe.replace(worker_batch=1024, steps=700, lr=0.2),
}
ended, rows = {}, []
for name, kind in kinds.items():
    for seed in range(2):
        with Training(task, kind.replace(seed=seed), sw.Placement()) as training:
            *_, result = training.records()
            ended[name, seed] = training.final
        found = sharpness(task, kind, ended[name, seed], epsilons=(1e-3,), samples=512)
        rows.append(
            {
                "run": name,
                "seed": seed,
                "training loss": found.loss,
                "test accuracy": result.test["accuracy"],
                "sharpness": found.rows[0].value,
            }
        )
labs.table(rows, "Sharpness in a box of ε = 0.001 in all weights, over 512 training samples.")

# %%
small, large = (
    np.mean([row["sharpness"] for row in rows if row["run"].startswith(kind)]) for kind in ("small", "large")
)
sharper = "large" if large > small else "small"
print(
    f"mean sharpness: small batch {small:.2f}, large batch {large:.2f}; in this run the {sharper} batch is the sharper one"
)

between = line(task, recipe, ended["small batch (32)", 0], ended["large batch (1,024)", 0], samples=512)
figure, axes = plt.subplots()
axes.plot([row.alpha for row in between.rows], [row.train["loss"] for row in between.rows], label="training loss")
axes.plot([row.alpha for row in between.rows], [row.test["loss"] for row in between.rows], label="test loss")
for place, name in ((0, "small batch"), (1, "large batch")):
    axes.axvline(place, color="grey", linewidth=0.8)
    axes.annotate(
        name,
        (place, 0.97),
        xycoords=("data", "axes fraction"),
        ha="center",
        va="top",
        fontsize=9,
        backgroundcolor="white",
    )
axes.set(xlabel="α: weights = (1 − α) · small batch + α · large batch", ylabel="loss", ylim=(0, None))
axes.legend(loc="center left")
print(f"barrier between the two: {barrier(between.rows):.4f}")
labs.show(figure, "The loss on the straight line through the weights of both runs (same seed, so the same start).")

# %% [markdown]
# Whatever your run shows, be careful with the conclusion: sharpness changes with the training loss and with the scale of the
# weights, and in our own experiments (five seeds each) the kind of run that came to the lower training loss was the less
# sharp one, large batch or small. **Too few steps** explains what we saw at the top of this lab; sharpness was not needed.
#
# ## Questions
#
# **5.1** Write the noise scale as a function of `L`, `T`, `c` (groups) and `b` (samples in a group).

# %%
answer_1 = None  # your function
labs.check("5.1", answer_1)

# %% [markdown]
# **5.2** At a global batch of three times the critical batch, what is a sample worth, compared with one at a tiny batch?

# %%
answer_2 = None  # a number between 0 and 1
labs.check("5.2", answer_2)

# %% [markdown]
# **5.3** A training needs at least 100 steps ($S_{\min}$), and its critical batch is 200. How many steps does it need at a
# global batch of 50?

# %%
answer_3 = None  # a number
labs.check("5.3", answer_3)

# %% [markdown]
# **5.4** You go from 1 to 8 workers with the same worker batch and the same epochs, and accuracy falls. What changed most
# directly?
#
# - a) the number of samples seen
# - b) the number of steps taken
# - c) the size of the model
# - d) the amount of noise in the data

# %%
answer_4 = None  # "a", "b", "c" or "d"
labs.check("5.4", answer_4)
