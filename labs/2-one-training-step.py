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
# # 2 · Logistic regression, deep and convolutional networks: one step taken apart
#
# Every training loop in the world does four things, again and again: **forward, cost, backward, update**. Here you see
# each of them with your own eyes, first for logistic regression, then for a network with a hidden layer, then for a
# convolution; each time computed by hand and held against PyTorch's autograd. Then we train all three, with curves,
# checkpoints of the best model and early stopping.

# %%
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import scalewise as sw
from scalewise import labs
from scalewise.tasks.digits import load

plt = labs.figures()
torch.set_num_threads(1)
(train_images, train_labels), (test_images, test_labels) = load()
print(f"{len(train_images):,} training and {len(test_images)} test images of {tuple(train_images.shape[1:])} pixels")

figure, axes = plt.subplots(1, 8, figsize=(7, 1.2))
for place, one in zip(axes, range(8), strict=True):
    place.imshow(train_images[one, 0], cmap="gray_r")
    place.set_title(int(train_labels[one]), fontsize=9)
    place.axis("off")
labs.show(figure, "Handwritten digits, 8 × 8 pixels (UCI; they come with scalewise), and their labels.")

# %% [markdown]
# ## Logistic regression, one step
#
# Is it a zero? With pixels $x$ (64 numbers), weights $w$ and a bias $b$:
#
# $$z = w^\top x + b, \qquad a = \sigma(z) = \frac{1}{1 + e^{-z}}, \qquad
#   J = -\frac1m \sum_i \big[ y_i \,\log\, a_i + (1 - y_i)\,\log(1 - a_i) \big]$$
#
# The derivative of this cost by $z$ is famously simple, because the derivative of the sigmoid cancels the logarithms':
#
# $$\frac{\partial J}{\partial z_i} = \frac{a_i - y_i}{m}, \qquad \frac{\partial J}{\partial w} = X^\top \frac{\partial J}{\partial z},
#   \qquad \frac{\partial J}{\partial b} = \sum_i \frac{\partial J}{\partial z_i}$$

# %%
X = train_images.flatten(1).double().numpy()  # (sample, pixel)
y = (train_labels == 0).double().numpy()  # 1 for a zero


def forward(X, w, b):
    """Probabilities."""
    return 1 / (1 + np.exp(-(X @ w + b)))


def cost(a, y):
    """Mean cross-entropy."""
    return -np.mean(y * np.log(a) + (1 - y) * np.log(1 - a))


def backward(X, a, y):
    """Gradients by w and b."""
    dz = (a - y) / len(y)
    return X.T @ dz, dz.sum()


w, b, rate = np.zeros(64), 0.0, 1.0
a = forward(X, w, b)
dw, db = backward(X, a, y)
print(f"forward:  every probability is {a[0]} at first")
print(f"cost:     {cost(a, y):.6f} (that is log 2 = {np.log(2):.6f})")
print(f"backward: length of the gradient {np.sqrt(dw @ dw + db**2):.6f}")
w, b = w - rate * dw, b - rate * db
print(f"update:   the cost is now {cost(forward(X, w, b), y):.6f}")

# %% [markdown]
# And autograd? It records what the forward pass did and plays it backwards.

# %%
weights = torch.zeros(64, dtype=torch.float64, requires_grad=True)
bias = torch.zeros((), dtype=torch.float64, requires_grad=True)
F.binary_cross_entropy_with_logits(torch.from_numpy(X) @ weights + bias, torch.from_numpy(y)).backward()
print("largest difference to our gradient:", max(abs(weights.grad.numpy() - dw).max(), abs(float(bias.grad) - db)))
assert np.allclose(weights.grad.numpy(), dw)

costs = []
for _step in range(300):
    a = forward(X, w, b)
    costs.append(cost(a, y))
    dw, db = backward(X, a, y)
    w, b = w - rate * dw, b - rate * db
test_guess = forward(test_images.flatten(1).double().numpy(), w, b) > 0.5
right = np.mean(test_guess == (test_labels == 0).numpy())
print(f"after 300 steps: cost {costs[-1]:.4f}, {right:.1%} of the test images are told apart from a zero correctly")

figure, (left, middle) = plt.subplots(1, 2, figsize=(7, 3), width_ratios=(2, 1))
left.semilogy(costs)
left.set(xlabel="step", ylabel="cost (cross-entropy)")
heat = middle.imshow(w.reshape(8, 8), cmap="PuOr_r", vmin=-abs(w).max(), vmax=abs(w).max())
middle.set_title("weights w", fontsize=10)
middle.axis("off")
figure.colorbar(heat, ax=middle, shrink=0.8)
labs.show(
    figure, "The cost falls with every step; the weights look for ink in a ring (orange) and none inside (purple)."
)

# %% [markdown]
# ## A hidden layer, one step
#
# Ten classes and a hidden layer of 32: $h = \max(0, W_1 x + b_1)$, $s = W_2 h + b_2$, probabilities
# $p = \mathrm{softmax}(s)$, cost $J = -\frac1m\sum_i \log\, p_{i,y_i}$. Backward is the chain rule, from the end to the start;
# each line needs what the forward pass computed, which is why training needs so much more memory than prediction (lab 3):
#
# $$\delta_2 = \frac{p - \mathrm{onehot}(y)}{m},\quad \frac{\partial J}{\partial W_2} = \delta_2^\top h,\quad
#   \delta_1 = (\delta_2 W_2) \odot [h > 0],\quad \frac{\partial J}{\partial W_1} = \delta_1^\top x$$

# %%
torch.manual_seed(0)
net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).double()
images, labels = train_images[:100].double(), train_labels[:100]

x = images.flatten(1)  # forward …
h = (x @ net[1].weight.T + net[1].bias).clamp(min=0)
p = (h @ net[3].weight.T + net[3].bias).softmax(dim=1)
by_hand_cost = -p[torch.arange(100), labels].log().mean()

delta_2 = (p - F.one_hot(labels, 10)) / 100  # … and backward
delta_1 = (delta_2 @ net[3].weight) * (h > 0)
by_hand = {"3.weight": delta_2.T @ h, "3.bias": delta_2.sum(0), "1.weight": delta_1.T @ x, "1.bias": delta_1.sum(0)}

F.cross_entropy(net(images), labels).backward()
rows = []
for name, parameter in net.named_parameters():
    difference = (parameter.grad - by_hand[name]).abs().max().item()
    rows.append({"parameter": name, "shape": str(tuple(parameter.shape)), "largest difference": difference})
    assert difference < 1e-12
labs.table(rows, "Gradients by hand against autograd, double precision.")

# %% [markdown]
# ## A convolution is a matrix product
#
# A 3×3 convolution looks at every 3×3 patch with the same few weights. Lay the patches out as columns, and it is one
# matrix product: that is what makes it fast on any device (lab 3).

# %%
kernel = torch.randn(4, 1, 3, 3, dtype=torch.float64)  # 4 filters
patches = F.unfold(images, kernel_size=3, padding=1)  # (sample, 9, 64)
by_product = (kernel.flatten(1) @ patches).reshape(100, 4, 8, 8)
print("patches:", tuple(patches.shape), " output:", tuple(by_product.shape))
print("largest difference to conv2d:", (by_product - F.conv2d(images, kernel, padding=1)).abs().max().item())
print("weights of the convolution:", kernel.numel(), " of a dense layer of the same shape:", 64 * 4 * 64)

# %% [markdown]
# ## Training all three
#
# The same loop trains every model: only the `model` of the *task* changes. How it is trained is the *recipe*: worker
# batch, epochs, optimizer, learning rate. `sw.train` yields a record per step, one per epoch, and the result.
#
# **Early stopping**: a tenth of the training data is held out (*validation*); when its accuracy has not risen for
# `patience` epochs, training stops and the **best** weights are restored. Test data decide nothing: they are only
# reported.

# %%
models = {
    "logistic regression": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)),
    "deep network": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
    "convolutional network": lambda: nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10)
    ),
}
recipe = sw.Recipe(worker_batch=32, epochs=25.0, optimizer="momentum", lr=0.05, patience=4, threads=1)
curves, rows = {}, []
for name, model in models.items():
    task = sw.Task(
        model=model,
        train=(train_images, train_labels),
        test=(test_images, test_labels),
        loss=F.cross_entropy,
        metrics={"accuracy": sw.accuracy},
    )
    *records, result = sw.train(task, recipe)
    curves[name] = [record for record in records if isinstance(record, sw.Epoch)]
    rows.append(
        {
            "model": name,
            "parameters": sum(parameter.numel() for parameter in model().parameters()),
            "epochs until stopped": round(result.epochs),
            "best epoch": round([epoch for epoch in curves[name] if epoch.best][-1].epoch),
            "training accuracy": result.train["accuracy"],
            "validation accuracy": result.validation["accuracy"],
            "test accuracy": result.test["accuracy"],
        }
    )
labs.table(rows, "Each stopped by itself; validation and test with the best weights, one seed.")

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(7.5, 3.4))
for name, epochs in curves.items():
    numbers = [epoch.epoch for epoch in epochs]
    (line,) = left.semilogy(numbers, [epoch.train["loss"] for epoch in epochs], label=name)
    right.plot(numbers, [epoch.validation["accuracy"] for epoch in epochs])
    best = [epoch for epoch in epochs if epoch.best][-1]
    right.plot(best.epoch, best.validation["accuracy"], "o", color=line.get_color())
left.set(xlabel="epoch", ylabel="training loss")
right.set(xlabel="epoch", ylabel="validation accuracy", ylim=(0.85, 1.005))
left.legend(fontsize=8)
labs.show(figure, "Curves of the three models; the dots are the epochs whose weights were kept.")

# %% [markdown]
# ## Checkpoints
#
# A run in a terminal is a folder: recipe, a line of JSON per step, checkpoints, the model. Stop it (Ctrl-C, or a machine
# that dies) and it goes on from there, **to the same bytes** as if nothing had happened. Here we stop on purpose after 2
# of 4 epochs.

# %%
with tempfile.TemporaryDirectory() as folder:
    part, whole = f"{folder}/part", f"{folder}/whole"
    labs.scalewise("train", "mlp", "--epochs", "2", "--out", part)
    print("checkpoints:", sorted(path.name for path in Path(part, "checkpoints").iterdir())[-1])
    resumed = labs.scalewise("train", "mlp", "--resume", part, "--epochs", "4")
    at_once = [*sw.train(sw.load_task("mlp"), sw.load_task("mlp").recipe.replace(epochs=4.0))][-1]
print("stopped and resumed:", resumed["weights_sha256"][:16])
print("at once:            ", at_once.weights_sha256[:16])
assert resumed["weights_sha256"] == at_once.weights_sha256

# %% [markdown]
# ## Questions
#
# **2.1** Write the backward pass of logistic regression: a function of `X` (samples × features), `y`, `w`, `b` that
# returns `(dw, db)` of the *mean* cross-entropy.

# %%
answer_1 = None  # your function
labs.check("2.1", answer_1)

# %% [markdown]
# **2.2** How many parameters does a network have with 64 inputs, one hidden layer of 32 and 10 outputs, biases included?

# %%
answer_2 = None  # a number
labs.check("2.2", answer_2)

# %% [markdown]
# **2.3** An image of 28 × 28 goes through a 5 × 5 convolution (stride 1, no padding) and then through 2 × 2 max-pooling.
# How many pixels has a side now?

# %%
answer_3 = None  # a number
labs.check("2.3", answer_3)

# %% [markdown]
# **2.4** Validation accuracy was best in epoch 9; with `patience=4` training stopped after epoch 13. Which weights does the
# run end with?
#
# - a) those of epoch 13
# - b) the mean of epochs 9 to 13
# - c) those of epoch 9
# - d) those with the best *test* accuracy

# %%
answer_4 = None  # "a", "b", "c" or "d"
labs.check("2.4", answer_4)
