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
# # 1 · Gradient descent, SGD and the batch size
#
# Two numbers, $w$ and $b$, are enough to see everything that happens when a network with millions of them is trained:
# why we follow the gradient, what a *stochastic* gradient is, what the batch size changes, and how to choose it.
#
# You need no accelerator. Run the cells from top to bottom; at the end there are four questions, and the notebook checks
# your answers.

# %%
import time

import numpy as np

from scalewise import labs

plt = labs.figures()
random = np.random.default_rng(0)

# %% [markdown]
# ## A line through points
#
# 200 points lie around the line $y = 2x + 1$. The model is $\hat y = w x + b$, and its cost is half of the mean squared
# error over the $m$ samples:
#
# $$J(w, b) = \frac{1}{2m} \sum_{i=1}^{m} \left(w x_i + b - y_i\right)^2$$

# %%
samples = 200
x = random.uniform(0, 2, samples)
y = 2 * x + 1 + random.normal(0, 0.5, samples)


def cost(w, b):
    """J for one line, or for a whole grid of them."""
    return np.mean((np.multiply.outer(w, x) + np.asarray(b)[..., None] - y) ** 2, axis=-1) / 2


best_b, best_w = np.linalg.lstsq(np.stack([np.ones(samples), x], axis=1), y, rcond=None)[0]
print(f"the best line, solved directly: y = {best_w:.3f}·x + {best_b:.3f}, cost {cost(best_w, best_b):.4f}")

figure, axes = plt.subplots(figsize=(6, 3.4))
axes.plot(x, y, "o", markersize=3, alpha=0.5, label="samples")
axes.plot([0, 2], [best_b, 2 * best_w + best_b], "-", color=labs.COLORS[1], label="the best line")
axes.set(xlabel="x", ylabel="y")
axes.legend()
labs.show(figure, "200 samples and the line with the least cost. With two unknowns it can be solved; a network cannot.")

# %% [markdown]
# ## The gradient
#
# The gradient says in which direction the cost rises fastest. By the chain rule
#
# $$\frac{\partial J}{\partial w} = \frac{1}{m}\sum_i (w x_i + b - y_i)\, x_i, \qquad
#   \frac{\partial J}{\partial b} = \frac{1}{m}\sum_i (w x_i + b - y_i)$$
#
# and **gradient descent** takes steps against it: $w \leftarrow w - \eta\,\partial J/\partial w$, likewise $b$. $\eta$ is
# the *learning rate*. A formula for a gradient is easily wrong, so we test it as everybody should: by wiggling.


# %%
def gradient(w, b, chosen):
    """The mean gradient over the chosen samples."""
    error = w * x[chosen] + b - y[chosen]
    return np.array([np.mean(error * x[chosen]), np.mean(error)])


everything = np.arange(samples)
wiggle = 1e-6
by_formula = gradient(0.5, -1.0, everything)
by_wiggling = [
    (cost(0.5 + wiggle, -1.0) - cost(0.5 - wiggle, -1.0)) / (2 * wiggle),
    (cost(0.5, -1.0 + wiggle) - cost(0.5, -1.0 - wiggle)) / (2 * wiggle),
]
print("by the formula:", np.round(by_formula, 6))
print("by wiggling:   ", np.round(by_wiggling, 6))
assert np.allclose(by_formula, by_wiggling)

# %% [markdown]
# ## Three ways to go down
#
# The gradient over **all** samples is exact and expensive. The gradient over a **batch** of $B$ randomly drawn samples
# points in the same direction *on average*. So there is a choice:
#
# - **gradient descent**: $B = m$, one step per pass over the data (an *epoch*);
# - **mini-batch SGD**: $1 < B < m$;
# - **SGD** in the narrow sense: $B = 1$.
#
# Below all three see the same number of samples: 8 epochs. Press *Play*, or drag the slider.


# %%
def descend(batch, rate, epochs, seed=0, start=(-1.0, 3.5), decay=False):
    """w, b after every step, and the samples seen by then."""
    draw = np.random.default_rng(seed)
    place, trail = np.array(start), [(*start, 0)]
    seen, total = 0, epochs * samples
    while seen + batch <= total:
        order = draw.permutation(samples)
        for first in range(0, samples - batch + 1, batch):
            factor = 1 - seen / total if decay else 1.0
            place = place - rate * factor * gradient(*place, order[first : first + batch])
            seen += batch
            trail.append((*place, seen))
    return np.array(trail)


epochs = 8
trails = {
    "gradient descent (200), rate 0.5": descend(batch=200, rate=0.5, epochs=epochs),
    "mini batches of 20, rate 0.2": descend(batch=20, rate=0.2, epochs=epochs),
    "SGD (1), rate 0.05": descend(batch=1, rate=0.05, epochs=epochs),
}


def contour(axes):
    """The cost as a map: every line is a height."""
    w, b = np.meshgrid(np.linspace(-1.6, 3.4, 120), np.linspace(-0.6, 4.2, 120))
    heights = cost(w, b)
    levels = cost(best_w, best_b) + np.geomspace(0.003, heights.max() - heights.min(), 14)
    axes.contour(w, b, heights, levels=levels, colors="#9aa5b1", linewidths=0.8)
    axes.plot(best_w, best_b, "k*", markersize=12, label="the minimum")
    axes.set(xlabel="w", ylabel="b", xlim=(-1.6, 3.4), ylim=(-0.6, 4.2))
    axes.grid(False)


figure, axes = plt.subplots(figsize=(7, 5))
contour(axes)
labs.animate(
    figure,
    axes,
    {name: (trail[:, 0], trail[:, 1], trail[:, 2]) for name, trail in trails.items()},
    "Paths on the cost's map while the same 1,600 samples are seen; the star is the minimum. Gradient descent moves "
    "straight and rarely, SGD often and astray, mini batches lie between.",
)

# %%
labs.table(
    [
        {
            "path": name,
            "steps": len(trail) - 1,
            "samples": int(trail[-1, 2]),
            "cost at the end": float(cost(trail[-1, 0], trail[-1, 1])),
            "above the minimum": float(cost(trail[-1, 0], trail[-1, 1]) - cost(best_w, best_b)),
        }
        for name, trail in trails.items()
    ],
    "After 8 epochs. All paths cost the same number of gradients of single samples.",
)

# %% [markdown]
# ## How large may the learning rate be?
#
# Near the minimum the cost is a bowl with the Hessian $H$. Along an eigenvector of $H$ with eigenvalue $\lambda$ a step
# multiplies the distance to the minimum by $(1 - \eta\lambda)$. It shrinks as long as
#
# $$\eta < \frac{2}{\lambda_{\max}}$$
#
# and along the flat direction ($\lambda_{\min}$) it shrinks slowly: the ratio $\lambda_{\max}/\lambda_{\min}$ decides how
# tedious it is.

# %%
design = np.stack([x, np.ones(samples)], axis=1)
eigenvalues = np.linalg.eigvalsh(design.T @ design / samples)
limit = 2 / eigenvalues.max()
print(f"eigenvalues {eigenvalues.min():.3f} and {eigenvalues.max():.3f}: the rate must stay below {limit:.3f}")

figure, axes = plt.subplots()
for share in (0.05, 0.5, 0.95, 1.02):
    trail = descend(batch=200, rate=share * limit, epochs=40)
    above = cost(trail[:, 0], trail[:, 1]) - cost(best_w, best_b)
    axes.semilogy(above, label=f"η = {share * limit:.2f} ({share:.0%} of the limit)")
axes.set(xlabel="step of gradient descent", ylabel="cost above the minimum")
axes.legend()
labs.show(figure, "Too small is slow, too large diverges, and the limit is where the theory says it is.")

# %% [markdown]
# ## What the batch size changes
#
# A batch gradient is a mean of $B$ samples' gradients. If one sample's gradient has covariance $\Sigma$, then
#
# $$\mathrm{Cov}[g_B] = \frac{\Sigma}{B} \quad\text{so its noise has a standard deviation} \propto \frac{1}{\sqrt{B}}$$
#
# (drawn with replacement; without it, a little less). Let us see that at one fixed place.

# %%
place = (0.5, 1.0)
true = gradient(*place, everything)
sizes = [1, 2, 5, 10, 20, 50, 100]
noise = []
for size in sizes:
    drawn = [gradient(*place, random.integers(samples, size=size)) for _ in range(1000)]
    noise.append(np.sqrt(np.mean(np.sum((np.array(drawn) - true) ** 2, axis=1))))

figure, axes = plt.subplots()
axes.loglog(sizes, noise, "o-", label="measured, 1,000 batches each")
axes.loglog(sizes, noise[0] / np.sqrt(sizes), "--", label="1 ÷ √B through the first point")
axes.axhline(np.linalg.norm(true), color=labs.COLORS[2], linestyle=":", label="length of the true gradient")
axes.set(xlabel="batch size B (samples)", ylabel="typical error of the gradient")
axes.legend()
labs.show(figure, "Four times the samples halve the gradient's error: each further halving costs four times more.")

# %% [markdown]
# With a **constant** learning rate that noise never lets SGD settle: it ends in a cloud around the minimum, whose height
# grows with $\eta / B$. Here the rate is the same for all batch sizes, and the mean over the last quarter of 60 epochs and
# 5 seeds is shown. Then the same with a rate that falls to zero.

# %%
rate, rows = 0.2, []
for size in (1, 4, 20, 100, 200):
    floors = {}
    for decay in (False, True):
        ends = []
        for seed in range(5):
            trail = descend(size, rate, epochs=60, seed=seed, decay=decay)
            tail = trail[int(0.75 * len(trail)) :] if not decay else trail[-1:]
            ends.append(np.mean(cost(tail[:, 0], tail[:, 1]) - cost(best_w, best_b)))
        floors[decay] = float(np.mean(ends))
    rows.append(
        {
            "batch size": size,
            "steps": 60 * (samples // size),
            "above the minimum, constant rate": floors[False],
            "above the minimum, falling rate": floors[True],
        }
    )
labs.table(rows, "60 epochs at rate 0.2, mean over 5 seeds: small batches end in a cloud unless the rate falls.")

# %% [markdown]
# ## Choosing the batch size
#
# So why not always $B = 1$ with a falling rate? Because a machine works on many samples at once. A step costs a fixed part
# (starting the work) and a part per sample, $t(B) \approx \alpha + \beta B$. We measure it here.

# %%
many_x = random.uniform(0, 2, 1 << 16)
many_y = 2 * many_x + 1
sizes = [1, 4, 16, 64, 256, 1024, 4096, 16384]
seconds = []
for size in sizes:
    part_x, part_y = many_x[:size], many_y[:size]
    times = []
    for _ in range(15):
        began = time.perf_counter()
        for _ in range(20):
            error = 0.5 * part_x + 1.0 - part_y
            np.mean(error * part_x), np.mean(error)
        times.append((time.perf_counter() - began) / 20)
    seconds.append(np.median(times))

figure, (left, right) = plt.subplots(1, 2, figsize=(7.5, 3.2))
left.loglog(sizes, np.array(seconds) * 1e6, "o-")
left.set(xlabel="batch size B (samples)", ylabel="one gradient (µs)")
right.semilogx(sizes, np.array(sizes) / seconds / 1e6, "o-")
right.set(xlabel="batch size B (samples)", ylabel="million samples per second")
labs.show(figure, "On this machine: small batches waste the fixed cost of a step; beyond some size nothing is gained.")

# %% [markdown]
# This is the whole dilemma, and it comes back in every lab:
#
# - **too small** a batch wastes the machine;
# - **too large** a batch wastes samples: its gradient is more exact than a step can use (lab 5 measures where that begins:
#   the *critical batch*);
# - in between there is a wide range where the choice hardly matters. Take the smallest batch that keeps the machine busy,
#   and let the learning rate follow (lab 6).
#
# > In scalewise nobody says only "batch": the **worker batch** is what one worker sees in a step, the **global batch** is
# > workers × worker batch, and the **micro batch** is what goes through the model at once.

# %% [markdown]
# ## Questions
#
# Set the variable, run the cell, and read what the check says.
#
# **1.1** Write the gradient yourself: a function of `w`, `b`, and the arrays `x`, `y` that returns the pair
# $(\partial J/\partial w, \partial J/\partial b)$ for $J = \frac{1}{2m}\sum (wx+b-y)^2$. (Scroll up if you must, but try.)

# %%
answer_1 = None  # your function
labs.check("1.1", answer_1)

# %% [markdown]
# **1.2** There are 1,437 training samples, the batch size is 32, and training lasts 10 epochs. Batches are cut out of one
# long stream of samples, across the ends of epochs. How many steps are taken, to the nearest whole step?

# %%
answer_2 = None  # a number
labs.check("1.2", answer_2)

# %% [markdown]
# **1.3** You replace batches of 25 by batches of 100. The standard deviation of the gradient's noise
#
# - a) stays the same
# - b) becomes half
# - c) becomes a quarter
# - d) doubles

# %%
answer_3 = None  # "a", "b", "c" or "d"
labs.check("1.3", answer_3)

# %% [markdown]
# **1.4** A cost's Hessian has the eigenvalues 0.1 and 8. Below which learning rate does gradient descent converge?

# %%
answer_4 = None  # a number
labs.check("1.4", answer_4)
