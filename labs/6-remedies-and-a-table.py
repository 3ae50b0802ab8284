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
# # 6 · The remedies, one by one, and a famous table's hidden flaws
#
# Lab 5 showed why many workers lose accuracy: fewer, not better, steps. Here is what people do about it (batch norm per worker,
# a larger learning rate, warm-up, LARS, LAMB, AdaScale), each added in turn. Then we take a table from a well-known
# lecture on distributed deep learning and find three mistakes in it, with a tool that finds them in *your* programs too.

# %%
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import scalewise as sw
from scalewise import labs
from scalewise.doctor.diagnose import diagnose_folder
from scalewise.tasks.digits import load

plt = labs.figures()
torch.set_num_threads(1)
SEEDS, EPOCHS, WORKERS = 2, 5.0, 8

# %% [markdown]
# ## The remedies
#
# - **Batch norm per worker**: each worker normalises with the statistics of its own worker batch, $\hat x = (x - \mu_B) /
#   \sqrt{\sigma_B^2 + \epsilon}$. Global batches grow, the statistics' batches do not (*ghost batch norm*).
# - **Linear scaling**: $N$ workers average $N$ gradients, so one step replaces $N$ small ones: $\eta_N = N \eta$ (Goyal et
#   al. 2017). For Adam-like optimizers $\sqrt N$ is the usual choice.
# - **Warm-up**: at the start the gradient changes so fast that one large step is *not* $N$ small ones; so the rate rises from
#   $\eta$ to $N\eta$ over the first epochs.
# - **LARS, LAMB**: every layer moves by a share of its own length. LAMB, with Adam's direction $r$:
#   $w \leftarrow w - \eta\,\frac{\|w\|}{\|r + \lambda w\|}\,(r + \lambda w)$.
# - **AdaScale**: measure in every step how many single-worker steps it is worth, the gain
#   $r = \frac{\sigma^2 + \mu^2}{\sigma^2 / N + \mu^2} \in [1, N]$; multiply the rate by $r$ and count the step as $r$ steps. It
#   takes **more samples**, and says so.

# %%
plain, normed = sw.load_task("digits"), sw.load_task("digits", ["bn=true"])
base = sw.Recipe(worker_batch=32, epochs=EPOCHS, optimizer="momentum", lr=0.02, threads=1)
many = base.replace(workers=WORKERS)
warm = many.replace(lr_rule="linear", warmup_epochs=1.0)
remedies = {
    "1 worker": (plain, base),
    "8 workers, naive": (plain, many),
    "+ batch norm per worker": (normed, many),
    "+ rate × 8": (normed, many.replace(lr_rule="linear")),
    "+ warm-up, 1 epoch": (normed, warm),
    "LARS instead": (normed, warm.replace(optimizer="lars", lr=1.0, lr_rule="sqrt")),
    "LAMB instead": (normed, warm.replace(optimizer="lamb", lr=0.01, lr_rule="sqrt")),
    "AdaScale instead": (normed, many.replace(lr_rule="adascale")),
}
rows, spread = [], {}
for name, (task, recipe) in remedies.items():
    ends = []
    for seed in range(SEEDS):
        *_, result = sw.train(task, recipe.replace(seed=seed))
        ends.append(result)
    spread[name] = [end.test["accuracy"] for end in ends]
    rows.append(
        {
            "row": name,
            "steps": ends[0].steps,
            "samples": ends[0].samples,
            "peak rate": ends[0].lr["peak"],
            "training accuracy": float(np.mean([end.train["accuracy"] for end in ends])),
            "test accuracy": float(np.mean(spread[name])),
        }
    )
labs.table(
    rows,
    f"8×8 digits, worker batch 32, {EPOCHS:g} epochs, mean of {SEEDS} seeds. From batch norm to warm-up each row adds to the one above.",
)

# %%
figure, axes = plt.subplots(figsize=(7, 3.4))
for place, values in enumerate(spread.values()):
    axes.plot(values, [place] * len(values), "o", color=labs.COLORS[0], alpha=0.6)
    axes.plot(np.mean(values), place, "|", color=labs.COLORS[1], markersize=18, markeredgewidth=3)
axes.set_yticks(range(len(spread)), list(spread))
axes.invert_yaxis()
axes.set_xlabel("test accuracy (dots: seeds, bar: mean)")
labs.show(figure, "Test accuracy of each remedy, every seed shown. Two seeds cannot rank neighbours that overlap.")

# %% [markdown]
# Do not rank the remedies by this plot: 360 test images and two seeds show large losses (*naive*), but not the order of
# rows that lie close together. `scalewise compare digits --workers 8 --seeds 5` runs all rows with paired intervals and says which
# differences are larger than the noise of seeds.
#
# ## The lecture's table
#
# CIFAR-10, a small residual network, 12 epochs, 512 samples per worker, 1 or 8 workers; published as "accuracy". Beside it:
# the same experiment measured with this project, read from its dated results file.

# %%
result = labs.measured("2026-11-17-lecture")
made = result["conditions"]
print(
    f"measured {made['date'][:10]} with {made['command']}, torch {made['versions']['torch']}, {made['cores']} cores of an {made['cpu']}"
)


def middle(row, kind, name):
    """The mean of a number over the seeds of one kind of run, if there are any."""
    values = [outcome[name] for outcome in row["outcomes"] if outcome["kind"] == kind]
    return float(np.mean(values)) if values else None


rows = [
    {
        "row": row["name"],
        "published (training)": row["published"][0],
        "same batches: training": middle(row, "unsharded", "train_accuracy"),
        "same batches: test": middle(row, "unsharded", "test_accuracy"),
        "… with lagging statistics": middle(row, "unsharded", "running_test_accuracy"),
        "true shards: training": middle(row, "sharded", "train_accuracy"),
        "true shards: test": middle(row, "sharded", "test_accuracy"),
    }
    for row in result["rows"]
]
labs.table(
    rows,
    "The lecture's table and what is behind it. Same batches: as its programs really ran. True shards: as it was meant.",
)

# %% [markdown]
# Three things were wrong, and none of them shows in the published column:
#
# 1. **All workers drew the same batches.** The Adam programs set one global seed on every worker, and every worker shuffled
#    with it: eight machines computed the same gradient eight times. Only LAMB's program set no seed, so LAMB alone saw
#    eight times the data. So the gap between Adam and LAMB was also one between 1 and 8 shards: on the same batches as
#    Adam (table), LAMB is level with it, and with true shards for both **Adam with warm-up is ahead: the conclusion turns
#    around** (one seed each, untuned rates).
# 2. **Batch norm's running statistics had not settled.** With momentum 0.99 and 144 steps they still remember the start;
#    evaluated with them, the model is far worse than it is.
# 3. **Only training accuracy was shown**, so nobody could notice the second.
#
# (And the "batch norm" row and the "scaled LR + warm-up" row are two runs of one program.)
#
# ## Finding them with doctor
#
# Here is a small program with the same habits: one seed everywhere, batch norm with momentum 0.99 (PyTorch writes 0.01), training
# accuracy only. One line lets `sw.watch` look on.

# %%
labs.code("lecture_style.py")

# %%
folder = Path(tempfile.mkdtemp())
print(labs.program("lecture_style.py", str(folder / "same"), processes=2))
diagnosis = diagnose_folder(folder / "same")  # the same as: scalewise doctor FOLDER
for finding in diagnosis.findings:
    print(f"{finding.severity.upper()}  {finding.cause}\n  seen: {finding.evidence}\n  fix:  {finding.fix}\n")
causes = {finding.cause for finding in diagnosis.findings}
assert {"same-data", "statistics-lag"} <= causes

# %% [markdown]
# Doctor saw the samples themselves (fingerprints of the inputs), not the loss: **no loss curve shows this mistake.** Now the
# third habit. The program was proud of its training accuracy; we load its model and do what it never did: look at test data,
# first with the running statistics, then with statistics recomputed for these weights.

# %%
(train_images, train_labels), (test_images, test_labels) = load()
norm = nn.BatchNorm2d(16, momentum=0.01)
model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), norm, nn.ReLU(), nn.Flatten(), nn.Linear(1024, 10))
model.load_state_dict(torch.load(folder / "same" / "model.pt", weights_only=True))


def test_numbers():
    """Loss and accuracy on the test images."""
    model.eval()
    with torch.no_grad():
        output = model(test_images)
    return F.cross_entropy(output, test_labels).item(), (output.argmax(1) == test_labels).double().mean().item()


lagging = test_numbers()
norm.reset_running_stats()
norm.momentum = None  # a plain mean over what follows
model.train()
with torch.no_grad():
    for part in train_images.split(128):
        model(part)
recomputed = test_numbers()
labs.table(
    [
        {"statistics": "running averages of 90 steps", "test loss": lagging[0], "test accuracy": lagging[1]},
        {"statistics": "recomputed for these weights", "test loss": recomputed[0], "test accuracy": recomputed[1]},
    ],
    "The same weights, evaluated twice.",
)

# %%
steps = np.arange(0, 1000)
figure, axes = plt.subplots(figsize=(6.5, 3))
for momentum in (0.9, 0.99):
    axes.plot(steps, momentum**steps, label=f"momentum {momentum}")
axes.axvline(144, color="grey", linewidth=1)
axes.annotate(" the lecture's 144 steps", (144, 0.9), fontsize=9)
axes.set(xlabel="steps", ylabel="weight of the start value")
axes.legend()
labs.show(figure, "How much of a running average is still its start value: momentum to the power of the steps taken.")

# %% [markdown]
# In scalewise these three cannot happen quietly: samples come from one stream cut by position (so workers cannot share them),
# statistics are recomputed for evaluation while they lag, and test numbers are always reported beside training ones.
#
# ## Questions
#
# **6.1** Write the warm-up: a function of `lr` (one worker's rate), `workers`, `warmup_epochs` and `epochs` (passes done so
# far) that rises in a straight line from `lr` at the start to `lr * workers` at the end of the warm-up, and stays there.

# %%
answer_1 = None  # your function
labs.check("6.1", answer_1)

# %% [markdown]
# **6.2** A running average has momentum 0.99. After 144 steps, which share of it is still the start value?

# %%
answer_2 = None  # a number between 0 and 1
labs.check("6.2", answer_2)

# %% [markdown]
# **6.3** In LAMB (no weight decay) a layer has $\|w\| = 2$ and the update $\|r\| = 0.5$; the learning rate is 0.01. How long is
# the step that this layer takes?

# %%
answer_3 = None  # a number
labs.check("6.3", answer_3)

# %% [markdown]
# **6.4** Eight workers draw the same 512 samples in every step, and their gradients are averaged. The step is as good as one of
#
# - a) 1 worker with 512 samples
# - b) 8 workers with 512 different samples each
# - c) 1 worker with 64 samples
# - d) 8 workers with a rate 8 times larger

# %%
answer_4 = None  # "a", "b", "c" or "d"
labs.check("6.4", answer_4)
