"""Tasks that `--recipe auto` was not developed on: other models, losses, optimizers and schedules, all small.

python benchmarks/auto.py benchmarks/held_out.py --flags "--set kind=regression" --seeds 5
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import scalewise as sw
from cases import data_folder


def dense(*sizes: int, activation: type[nn.Module] = nn.ReLU, dropout: float = 0.0) -> nn.Module:
    """Dense layers with an activation between them."""
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), activation(), *([nn.Dropout(dropout)] if dropout else [])]
    return nn.Sequential(*layers[: -2 if dropout else -1])


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    """Mean squared error, as a metric."""
    return (output - target).square().mean()


def regression() -> sw.Task:
    """A smooth function of eight numbers with noise; mean squared error; momentum with a cosine."""
    random = torch.Generator().manual_seed(1)
    x = torch.rand(6000, 8, generator=random) * 2 - 1
    clean = torch.sin(3 * x[:, 0]) * x[:, 1] + x[:, 2] * x[:, 3] - torch.cos(2 * x[:, 4] + x[:, 5])
    y = (clean + 0.1 * torch.randn(6000, generator=random)).unsqueeze(1)

    return sw.Task(
        model=lambda: dense(8, 64, 64, 1),
        train=(x[1000:], y[1000:]),
        test=(x[:1000], y[:1000]),
        loss=F.mse_loss,
        metrics={"squared_error": squared_error},
        metric="squared_error",
        higher_is_better=False,
        recipe=sw.Recipe(worker_batch=32, epochs=12.0, optimizer="momentum", lr=0.02, schedule="cosine"),
    )


def spirals() -> sw.Task:
    """Three spirals; Adam with a constant rate."""
    random = torch.Generator().manual_seed(2)
    y = torch.arange(6000) % 3
    radius = torch.rand(6000, generator=random)
    angle = 5 * radius + y * (2 * torch.pi / 3) + 0.25 * torch.randn(6000, generator=random)
    x = torch.stack([radius * angle.cos(), radius * angle.sin()], 1)
    return sw.Task(
        model=lambda: dense(2, 48, 48, 3, activation=nn.Tanh),
        train=(x[2000:], y[2000:]),
        test=(x[:2000], y[:2000]),
        loss=F.cross_entropy,
        metrics={"accuracy": sw.accuracy},
        recipe=sw.Recipe(worker_batch=32, epochs=15.0, optimizer="adam", lr=0.003),
    )


def clothes() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """12,000 images of fashion-mnist for training and 5,000 for testing, as numbers from 0 to 1."""
    whole = sw.load_task("fashion-mnist", [], data=data_folder())
    (images, labels), (test_images, test_labels) = whole.train, whole.test
    return (images[:12000].float() / 255, labels[:12000]), (test_images[:5000].float() / 255, test_labels[:5000])


def dropped() -> sw.Task:
    """A dense network with dropout on clothes; AdamW with decay and a falling rate."""
    train, test = clothes()
    return sw.Task(
        model=lambda: dense(784, 128, 64, 10, dropout=0.2),
        train=train,
        test=test,
        loss=F.cross_entropy,
        metrics={"accuracy": sw.accuracy},
        recipe=sw.Recipe(
            worker_batch=32, epochs=8.0, optimizer="adamw", lr=0.001, weight_decay=0.01, schedule="linear"
        ),
    )


def logistic() -> sw.Task:
    """Logistic regression on clothes; plain gradient descent with steps down."""
    train, test = clothes()
    return sw.Task(
        model=lambda: dense(784, 10),
        train=train,
        test=test,
        loss=F.cross_entropy,
        metrics={"accuracy": sw.accuracy},
        recipe=sw.Recipe(worker_batch=16, epochs=6.0, optimizer="sgd", lr=0.05, schedule="step"),
    )


def normalized() -> sw.Task:
    """A small convolutional network with batch norm on clothes; Nesterov, decay, a warm-up and a cosine."""
    train, test = clothes()

    def model() -> nn.Module:
        def block(inputs: int, outputs: int) -> list[nn.Module]:
            convolution = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
            return [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]

        return nn.Sequential(*block(1, 16), *block(16, 32), *block(32, 32), nn.Flatten(), nn.Linear(512, 10))

    return sw.Task(
        model=model,
        train=train,
        test=test,
        loss=F.cross_entropy,
        metrics={"accuracy": sw.accuracy},
        recipe=sw.Recipe(
            worker_batch=32, epochs=5.0, optimizer="nesterov", lr=0.05, weight_decay=5e-4, warmup_epochs=0.5,
            schedule="cosine",
        ),
    )  # fmt: skip


def smoothed() -> sw.Task:
    """A dense network with batch norm and dropout on clothes; Adam with a constant rate."""
    train, test = clothes()

    def model() -> nn.Module:
        def block(inputs: int, outputs: int) -> list[nn.Module]:
            return [nn.Linear(inputs, outputs, bias=False), nn.BatchNorm1d(outputs), nn.ReLU(), nn.Dropout(0.2)]

        return nn.Sequential(nn.Flatten(), *block(784, 128), *block(128, 64), nn.Linear(64, 10))

    return sw.Task(
        model=model,
        train=train,
        test=test,
        loss=F.cross_entropy,
        metrics={"accuracy": sw.accuracy},
        recipe=sw.Recipe(worker_batch=32, epochs=6.0, optimizer="adam", lr=0.003),
    )


def shakespeare(context: int) -> tuple[Tensor, Tensor, int]:
    """10,000 pieces for training and 1,000 for testing, (piece, context + 1) character numbers, and the alphabet."""
    folder = data_folder()
    if folder is None:
        raise FileNotFoundError("text/tinyshakespeare.txt needs a data folder, found none; set SCALEWISE_DATA")
    text = (folder / "text" / "tinyshakespeare.txt").read_text(encoding="utf-8")
    alphabet = {character: number for number, character in enumerate(sorted(set(text)))}
    numbers = torch.tensor([alphabet[character] for character in text[: 11000 * context + 1]])
    pieces = numbers.unfold(0, context + 1, context).contiguous()  # the last character of one is the first of the next
    return pieces[:10000], pieces[10000:], len(alphabet)


class CharacterGru(nn.Module):
    """Logits of the next character at every position, from a gated recurrent unit."""

    def __init__(self, alphabet: int, width: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(alphabet, width // 2)
        self.memory = nn.GRU(width // 2, width, batch_first=True)
        self.head = nn.Linear(width, alphabet)

    def forward(self, characters: Tensor) -> Tensor:  # (sample, position) -> (sample, position, alphabet)
        states, _ = self.memory(self.characters(characters))
        logits: Tensor = self.head(states)
        return logits


def recurrent() -> sw.Task:
    """A recurrent network over the characters of Shakespeare; AdamW, clipped gradients and a cosine."""
    train, test, alphabet = shakespeare(context=32)

    def next_character(model: nn.Module, pieces: Tensor) -> sw.Loss:
        target = pieces[:, 1:].flatten()
        total = F.cross_entropy(model(pieces[:, :-1]).flatten(0, 1), target, reduction="sum")
        bits = total.detach() / math.log(2)
        return sw.Loss(total, len(target), {"bits_per_character": (bits, len(target))})

    return sw.Task(
        model=lambda: CharacterGru(alphabet, 96),
        train=train,
        test=test,
        step=next_character,
        metric="bits_per_character",
        higher_is_better=False,
        recipe=sw.Recipe(
            worker_batch=32, epochs=4.0, optimizer="adamw", lr=0.02, weight_decay=0.01, clip_norm=1.0,
            schedule="cosine",
        ),
    )  # fmt: skip


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions with batch norm beside a shortcut (He et al. 2016)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        narrow = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.shortcut = narrow if stride > 1 or inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def residual() -> sw.Task:
    """A small residual network on 6,000 images of CIFAR-10, mirrored at random; momentum, decay and a cosine."""
    whole = sw.load_task("cifar10-small", [], data=data_folder())
    (images, labels), (test_images, test_labels) = whole.train, whole.test

    def model() -> nn.Module:
        stem = [nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
        blocks = [ResidualBlock(16, 16, 1), ResidualBlock(16, 32, 2), ResidualBlock(32, 64, 2)]
        return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))

    return sw.Task(
        model=model,
        train=(images[:6000].float() / 255, labels[:6000]),
        test=(test_images[:4000].float() / 255, test_labels[:4000]),
        loss=F.cross_entropy,
        metrics={"accuracy": sw.accuracy},
        augment=sw.augment.images(sw.augment.flip),
        recipe=sw.Recipe(
            worker_batch=32, epochs=6.0, optimizer="momentum", lr=0.05, weight_decay=5e-4, schedule="cosine",
            layout="channels_last",
        ),
    )  # fmt: skip


class PatchTransformer(nn.Module):
    """Attention between the patches of an image (Dosovitskiy et al. 2021), averaged at the end."""

    def __init__(self, patch: int, width: int, layers: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, patch, stride=patch)
        self.positions = nn.Parameter(torch.randn((28 // patch) ** 2, width) * 0.02)
        self.blocks = nn.Sequential(*[self.block(width) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    @staticmethod
    def block(width: int) -> nn.Module:
        return nn.TransformerEncoderLayer(
            width, 4, 2 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )

    def forward(self, images: Tensor) -> Tensor:  # (sample, 1, row, column) -> (sample, class)
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions  # (sample, patch, width)
        logits: Tensor = self.head(self.norm(self.blocks(x)).mean(1))
        return logits


def patches() -> sw.Task:
    """A small vision transformer on 8,000 images of clothes; AdamW with decay, a warm-up and a cosine."""
    (images, labels), test = clothes()
    return sw.Task(
        model=lambda: PatchTransformer(patch=7, width=48, layers=2),
        train=(images[:8000], labels[:8000]),
        test=test,
        loss=F.cross_entropy,
        metrics={"accuracy": sw.accuracy},
        recipe=sw.Recipe(
            worker_batch=32, epochs=5.0, optimizer="adamw", lr=0.004, weight_decay=0.05, warmup_epochs=0.5,
            schedule="cosine",
        ),
    )  # fmt: skip


class TableNetwork(nn.Module):
    """Dense layers over the numbers of a row joined with an embedding per category."""

    def __init__(self, numbers: int, sizes: Sequence[int]) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList([nn.Embedding(size, 6) for size in sizes])
        self.dense = dense(numbers + 6 * len(sizes), 96, 48, 1)

    def forward(self, row: tuple[Tensor, Tensor]) -> Tensor:  # (sample, number), (sample, category) -> (sample, 1)
        numbers, categories = row
        vectors = [embedding(column) for embedding, column in zip(self.embeddings, categories.unbind(1), strict=True)]
        logits: Tensor = self.dense(torch.cat([numbers, *vectors], 1))
        return logits


def table() -> sw.Task:
    """Yes or no from ten numbers and three categories, some of them rare; AdamW with a falling rate."""
    random = torch.Generator().manual_seed(3)
    rows, sizes = 15000, (4, 12, 40)
    numbers = torch.randn(rows, 10, generator=random)
    columns = [torch.multinomial(1 / torch.arange(1.0, n + 1), rows, True, generator=random) for n in sizes]
    effects = [torch.randn(size, generator=random)[column] for size, column in zip(sizes, columns, strict=True)]
    slopes = torch.randn(4, generator=random)[columns[0]]  # a number that counts differently in each category
    score = numbers[:, 0] * slopes + numbers[:, 1] * numbers[:, 2] + torch.relu(numbers[:, 3]) - numbers[:, 4].abs()
    odds = 1.5 * (score + torch.stack(effects).sum(0))
    y = (torch.rand(rows, generator=random) < torch.sigmoid(odds)).float().unsqueeze(1)
    categories = torch.stack(columns, 1)
    return sw.Task(
        model=lambda: TableNetwork(10, sizes),
        train=((numbers[3000:], categories[3000:]), y[3000:]),
        test=((numbers[:3000], categories[:3000]), y[:3000]),
        loss=F.binary_cross_entropy_with_logits,
        metrics={"accuracy": sw.accuracy},
        recipe=sw.Recipe(
            worker_batch=32, epochs=6.0, optimizer="adamw", lr=0.008, weight_decay=0.01, schedule="linear"
        ),
    )


def mislabelled() -> sw.Task:
    """A dense network on clothes, a fifth of whose training labels are random; momentum with a falling rate."""
    (images, labels), test = clothes()
    random = torch.Generator().manual_seed(4)
    wrong = torch.rand(len(labels), generator=random) < 0.2
    guesses = torch.randint(10, labels.shape, generator=random)
    return sw.Task(
        model=lambda: dense(784, 128, 64, 10),
        train=(images, torch.where(wrong, guesses, labels)),
        test=test,
        loss=F.cross_entropy,
        metrics={"accuracy": sw.accuracy},
        recipe=sw.Recipe(worker_batch=32, epochs=5.0, optimizer="momentum", lr=0.05, schedule="linear"),
    )


class Factorization(nn.Module):
    """A rating as the dot product of two vectors, plus what the user, the item and all of them add."""

    def __init__(self, users: int, items: int, rank: int, mean: float) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(users, rank), nn.Embedding(items, rank)
        self.user_bias, self.item_bias = nn.Embedding(users, 1), nn.Embedding(items, 1)
        self.mean = nn.Parameter(torch.tensor(mean))
        for vectors in (self.users, self.items):
            nn.init.normal_(vectors.weight, std=0.1)
        for bias in (self.user_bias, self.item_bias):
            nn.init.zeros_(bias.weight)

    def forward(self, pairs: Tensor) -> Tensor:  # (sample, 2) -> (sample,)
        user, item = pairs.unbind(1)
        biases = self.user_bias(user) + self.item_bias(item)
        return self.mean + biases.squeeze(1) + (self.users(user) * self.items(item)).sum(1)


def factors() -> sw.Task:
    """Ratings from 1 to 5 of 300 items by 200 users, busy and idle ones; squared error; Adam."""
    random = torch.Generator().manual_seed(5)
    users, items, ratings = 200, 300, 20000
    tastes, traits = torch.randn(users, 3, generator=random), torch.randn(items, 3, generator=random)
    kindness, quality = 0.4 * torch.randn(users, 1, generator=random), 0.5 * torch.randn(items, generator=random)
    noise = 0.5 * torch.randn(users, items, generator=random)
    every = (3.4 + kindness + quality + 0.5 * tastes @ traits.T + noise).round().clamp(1, 5)
    activity, popularity = (torch.randn(size, generator=random).mul(0.7).exp() for size in (users, items))
    chosen = torch.multinomial(torch.outer(activity, popularity).flatten(), ratings, generator=random)
    pairs, y = torch.stack([chosen // items, chosen % items], 1), every.flatten()[chosen]
    mean = y[4000:].mean().item()
    return sw.Task(
        model=lambda: Factorization(users, items, 8, mean),
        train=(pairs[4000:], y[4000:]),
        test=(pairs[:4000], y[:4000]),
        loss=F.mse_loss,
        metrics={"squared_error": squared_error},
        metric="squared_error",
        higher_is_better=False,
        recipe=sw.Recipe(worker_batch=32, epochs=4.0, optimizer="adam", lr=0.005),
    )


KINDS: dict[str, Callable[[], sw.Task]] = {
    "regression": regression,
    "spirals": spirals,
    "dropped": dropped,
    "logistic": logistic,
    "normalized": normalized,
    "smoothed": smoothed,
    "recurrent": recurrent,
    "residual": residual,
    "patches": patches,
    "table": table,
    "mislabelled": mislabelled,
    "factors": factors,
}


def task(kind: str = "regression") -> sw.Task:
    """One of the kinds."""
    return KINDS[kind]()
