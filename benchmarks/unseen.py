"""Nine more small tasks that `--recipe auto` was not developed on, written without knowing how it works.

python benchmarks/auto.py benchmarks/unseen.py --flags "--set kind=pixels" --seeds 5
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import cases
import scalewise as sw

Pair = tuple[Tensor, Tensor]


def folder() -> Path:
    """Where the data files are."""
    found = cases.data_folder()
    if found is None:
        raise FileNotFoundError("these tasks need a folder of data, found none; set SCALEWISE_DATA")
    return found


def images(name: str, train: slice, test: slice) -> tuple[Pair, Pair]:
    """A part of a built-in task's images, as numbers with mean 0 and deviation 1 for each color."""
    whole = sw.load_task(name, [], data=folder())
    (seen, labels), (unseen, unseen_labels) = whole.train, whole.test
    x, held_out = seen[train].float(), unseen[test].float()
    mean, deviation = x.mean((0, 2, 3), keepdim=True), x.std((0, 2, 3), keepdim=True)
    return ((x - mean) / deviation, labels[train]), ((held_out - mean) / deviation, unseen_labels[test])


def halved(pair: Pair) -> Pair:
    """Images of half the width and height, each pixel the mean of four."""
    x, labels = pair
    return F.avg_pool2d(x, 2), labels


def pixels() -> sw.Task:
    """Dense layers with batch norm and dropout on 10,000 halved images of CIFAR-10; Adam with steps down."""
    train, test = images("cifar10-small", slice(20000, 30000), slice(4000))

    def model() -> nn.Module:
        def block(inputs: int, outputs: int) -> list[nn.Module]:
            return [nn.Linear(inputs, outputs, bias=False), nn.BatchNorm1d(outputs), nn.ReLU(), nn.Dropout(0.3)]

        return nn.Sequential(nn.Flatten(), *block(768, 192), *block(192, 96), nn.Linear(96, 10))

    return sw.Task(
        model=model,
        train=halved(train),
        test=halved(test),
        loss=F.cross_entropy,
        metrics={"accuracy": sw.accuracy},
        recipe=sw.Recipe(worker_batch=64, epochs=8.0, optimizer="adam", lr=0.01, schedule="step"),
    )


class CharacterLstm(nn.Module):
    """Logits of the next character at every position, from a long short-term memory."""

    def __init__(self, alphabet: int, width: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(alphabet, 32)
        self.memory = nn.LSTM(32, width, batch_first=True)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(width, alphabet)

    def forward(self, characters: Tensor) -> Tensor:  # (sample, position) -> (sample, position, alphabet)
        states, _ = self.memory(self.characters(characters))
        logits: Tensor = self.head(self.drop(states))
        return logits


def wikitext(name: str) -> str:
    """The articles of one part of WikiText-2."""
    return (folder() / "text" / f"wikitext-2-{name}.txt").read_text(encoding="utf-8")


def encyclopedia() -> sw.Task:
    """The next character of an encyclopedia, in articles never seen; AdamW, clipped gradients and a cosine."""
    context, known = 32, 80
    frequent = Counter(wikitext("valid")).most_common(known)
    alphabet = {character: number for number, (character, _) in enumerate(frequent)}

    def pieces(name: str, count: int) -> Tensor:  # rare characters share the last number
        text = wikitext(name)[: count * context + 1]
        return torch.tensor([alphabet.get(character, known) for character in text]).unfold(0, context + 1, context)

    def next_character(model: nn.Module, piece: Tensor) -> sw.Loss:
        target = piece[:, 1:].flatten()
        total = F.cross_entropy(model(piece[:, :-1]).flatten(0, 1), target, reduction="sum")
        bits = total.detach() / math.log(2)
        return sw.Loss(total, len(target), {"bits_per_character": (bits, len(target))})

    return sw.Task(
        model=lambda: CharacterLstm(known + 1, 96),
        train=pieces("valid", 10000).contiguous(),
        test=pieces("test", 2000).contiguous(),
        step=next_character,
        metric="bits_per_character",
        higher_is_better=False,
        recipe=sw.Recipe(
            worker_batch=32, epochs=4.0, optimizer="adamw", lr=0.02, weight_decay=0.01, clip_norm=1.0,
            schedule="cosine",
        ),
    )  # fmt: skip


class PreactivatedBlock(nn.Module):
    """Two 3×3 convolutions, each after batch norm and its activation, beside a shortcut (He et al. 2016b)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.BatchNorm2d(inputs), nn.ReLU())
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        )  # fmt: skip
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        ready = self.before(x)
        result: Tensor = self.body(ready) + self.shortcut(ready)
        return result


def garments() -> sw.Task:
    """A small residual network on 8,000 images of fashion-mnist; Nesterov, decay and a falling rate."""
    train, test = images("fashion-mnist", slice(52000, 60000), slice(5000, 10000))

    def model() -> nn.Module:
        blocks = [PreactivatedBlock(12, 12, 1), PreactivatedBlock(12, 24, 2), PreactivatedBlock(24, 48, 2)]
        head = [nn.BatchNorm2d(48), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 10)]
        return nn.Sequential(nn.Conv2d(1, 12, 3, stride=2, padding=1, bias=False), *blocks, *head)

    return sw.Task(
        model=model,
        train=train,
        test=test,
        loss=F.cross_entropy,
        metrics={"accuracy": sw.accuracy},
        recipe=sw.Recipe(
            worker_batch=32, epochs=5.0, optimizer="nesterov", lr=0.05, weight_decay=5e-4, schedule="linear",
            layout="channels_last",
        ),
    )  # fmt: skip


class MixerBlock(nn.Module):
    """Dense layers across the patches, then across the channels (Tolstikhin et al. 2021)."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.across_patches = nn.Sequential(nn.Linear(patches, 32), nn.GELU(), nn.Linear(32, patches))
        self.across_channels = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:  # (sample, patch, channel), as it came
        x = x + self.across_patches(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        result: Tensor = x + self.across_channels(self.norms[1](x))
        return result


class Mixer(nn.Module):
    """Mixer blocks over the patches of a 32×32 image, averaged at the end."""

    def __init__(self, patch: int, width: int, layers: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.blocks = nn.Sequential(*[MixerBlock((32 // patch) ** 2, width) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:  # (sample, color, row, column) -> (sample, class)
        logits: Tensor = self.head(self.norm(self.blocks(self.patches(x).flatten(2).transpose(1, 2))).mean(1))
        return logits


def mixer() -> sw.Task:
    """An MLP-mixer on 10,000 images of CIFAR-10, mirrored at random; AdamW, decay, a warm-up and a cosine."""
    train, test = images("cifar10-small", slice(30000, 40000), slice(4000, 8000))
    return sw.Task(
        model=lambda: Mixer(patch=8, width=64, layers=3),
        train=train,
        test=test,
        loss=F.cross_entropy,
        metrics={"accuracy": sw.accuracy},
        augment=sw.augment.images(sw.augment.flip),
        recipe=sw.Recipe(
            worker_batch=32, epochs=6.0, optimizer="adamw", lr=0.008, weight_decay=0.05, warmup_epochs=0.5,
            schedule="cosine",
        ),
    )  # fmt: skip


def dense(*sizes: int, activation: type[nn.Module] = nn.ReLU) -> list[nn.Module]:
    """Dense layers with an activation between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), activation()]
    return layers[:-1]


def absolute_error(output: Tensor, target: Tensor) -> Tensor:
    """Mean absolute error, as a metric."""
    return (output - target).abs().mean()


def arm() -> sw.Task:
    """Six measurements of a robot's arm from its five joints and load, with noise; Huber's loss; Adam."""
    random = torch.Generator().manual_seed(11)
    rows, tested = 11000, 3000
    joints, load = torch.rand(rows, 5, generator=random) * 3 - 1.5, torch.rand(rows, 1, generator=random)
    lengths = torch.tensor([1.0, 0.8, 0.6, 0.4, 0.3])
    bent = joints.cumsum(1) - 0.3 * load  # the load bends every link down
    east, north = (lengths * bent.cos()).cumsum(1), (lengths * bent.sin()).cumsum(1)
    torque = (lengths * bent.cos() * (1 + load)).sum(1)
    distance = ((east[:, 4] - 1).square() + (north[:, 4] - 1).square()).sqrt()
    clean = torch.stack([east[:, 4], north[:, 4], east[:, 2], north[:, 2], torque, distance], 1)
    clean = (clean - clean.mean(0)) / clean.std(0)
    y = clean + torch.tensor([0.05, 0.05, 0.1, 0.1, 0.15, 0.05]) * torch.randn(rows, 6, generator=random)
    x = torch.cat([joints, 2 * load - 1], 1)
    return sw.Task(
        model=lambda: nn.Sequential(*dense(6, 96, 96, 6, activation=nn.SiLU)),
        train=(x[tested:], y[tested:]),
        test=(x[:tested], y[:tested]),
        loss=F.smooth_l1_loss,
        metrics={"absolute_error": absolute_error},
        metric="absolute_error",
        higher_is_better=False,
        recipe=sw.Recipe(worker_batch=32, epochs=10.0, optimizer="adam", lr=0.04, schedule="linear"),
    )


def fraud() -> sw.Task:
    """Rare frauds among payments, which count four times; accuracy with both classes equal; momentum and a cosine."""
    random = torch.Generator().manual_seed(12)
    rows, tested = 20000, 8000
    x = torch.randn(rows, 14, generator=random)
    mixed = x @ (torch.eye(14) + 0.3 * torch.randn(14, 14, generator=random))  # columns depend on each other
    odd = mixed[:, 0] * mixed[:, 1] - mixed[:, 2].square() + 2 * torch.sin(2 * mixed[:, 3]) + mixed[:, 4:8].sum(1)
    score = odd + 1.5 * torch.relu(mixed[:, 8] + mixed[:, 9]) + 0.8 * torch.randn(rows, generator=random)
    y = (score > score.quantile(0.92)).float()
    skewed = torch.where(torch.arange(14) % 3 == 0, (mixed / 2).exp(), mixed)  # some columns are amounts
    skewed = (skewed - skewed.mean(0)) / skewed.std(0)
    train, test = (skewed[tested:], y[tested:]), (skewed[:tested], y[:tested])
    share = train[1].mean().item()

    def weighted(model: nn.Module, batch: Pair) -> sw.Loss:
        rows, target = batch
        logits = model(rows).squeeze(1)
        total = F.binary_cross_entropy_with_logits(logits, target, pos_weight=torch.tensor(4.0), reduction="sum")
        weight = torch.where(target > 0, 0.5 / share, 0.5 / (1 - share))
        right = ((logits > 0) == (target > 0)).float()
        return sw.Loss(total, len(target), {"balanced_accuracy": ((weight * right).sum(), weight.sum())})

    return sw.Task(
        model=lambda: nn.Sequential(*dense(14, 64, 32, 1)),
        train=train,
        test=test,
        step=weighted,
        metric="balanced_accuracy",
        recipe=sw.Recipe(
            worker_batch=16, epochs=4.0, optimizer="momentum", lr=0.03, weight_decay=1e-4, schedule="cosine"
        ),
    )


def doubtful() -> sw.Task:
    """A convolutional network on halved images of CIFAR-10, a quarter of whose training labels are wrong; Adam."""
    train, test = images("cifar10-small", slice(40000, 50000), slice(6000, 10000))
    x, labels = halved(train)
    random = torch.Generator().manual_seed(13)
    wrong = torch.rand(len(labels), generator=random) < 0.25
    others = (labels + torch.randint(1, 10, labels.shape, generator=random)) % 10

    def model() -> nn.Module:
        def block(inputs: int, outputs: int) -> list[nn.Module]:
            return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.ReLU(), nn.MaxPool2d(2)]

        return nn.Sequential(*block(3, 24), *block(24, 48), *block(48, 64), nn.Flatten(), nn.Linear(256, 10))

    return sw.Task(
        model=model,
        train=(x, torch.where(wrong, others, labels)),
        test=halved(test),
        loss=F.cross_entropy,
        metrics={"accuracy": sw.accuracy},
        recipe=sw.Recipe(
            worker_batch=64, epochs=7.0, optimizer="adam", lr=0.002, schedule="cosine", layout="channels_last"
        ),
    )


class WordBag(nn.Module):
    """The mean and the largest of the words' vectors, then dense layers with dropout."""

    def __init__(self, words: int, width: int, classes: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        nn.init.normal_(self.words.weight, std=0.1)
        self.dense = nn.Sequential(nn.Dropout(0.3), *dense(2 * width, 64, classes))

    def forward(self, window: Tensor) -> Tensor:  # (sample, position) -> (sample, class)
        vectors = self.words(window)
        logits: Tensor = self.dense(torch.cat([vectors.mean(1), vectors.amax(1)], 1))
        return logits


def articles(count: int) -> list[list[str]]:
    """The words, in small letters, of the `count` longest articles of WikiText-2's smaller parts."""
    parts = re.split(r"^ = [^=\n]+ = $", wikitext("valid") + wikitext("test"), flags=re.MULTILINE)
    return sorted((part.lower().split() for part in parts), key=len, reverse=True)[:count]


def topics() -> sw.Task:
    """Which of 40 articles a window of 24 words comes from; a bag of word vectors; Adam."""
    random = torch.Generator().manual_seed(14)
    windows: list[tuple[Sequence[str], int]] = [
        (words[start : start + 24], topic)
        for topic, words in enumerate(articles(40))
        for start in range(0, len(words) - 23, 24)
    ]
    order = torch.randperm(len(windows), generator=random).tolist()
    windows = [windows[place] for place in order]
    tested = 2500
    counts = Counter(word for window, _ in windows[tested:] for word in window)
    frequent = [word for word, times in counts.most_common() if times > 1]
    numbers = {word: number for number, word in enumerate(frequent, 1)}  # 0 is any other word
    x = torch.tensor([[numbers.get(word, 0) for word in window] for window, _ in windows])
    y = torch.tensor([topic for _, topic in windows])
    return sw.Task(
        model=lambda: WordBag(len(numbers) + 1, 32, 40),
        train=(x[tested:], y[tested:]),
        test=(x[:tested], y[:tested]),
        loss=F.cross_entropy,
        metrics={"accuracy": sw.accuracy},
        recipe=sw.Recipe(worker_batch=32, epochs=8.0, optimizer="adam", lr=0.003),
    )


def unnormalized() -> sw.Task:
    """A convolutional network without norm layers on shifted images of fashion-mnist; momentum with steps down."""
    train, test = images("fashion-mnist", slice(20000, 30000), slice(5000))

    def model() -> nn.Module:
        def block(inputs: int, outputs: int) -> list[nn.Module]:
            return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]

        return nn.Sequential(*block(1, 12), *block(12, 24), nn.Flatten(), *dense(1176, 64, 10))

    return sw.Task(
        model=model,
        train=train,
        test=test,
        loss=F.cross_entropy,
        metrics={"accuracy": sw.accuracy},
        augment=sw.augment.images(sw.augment.crop(1)),
        recipe=sw.Recipe(worker_batch=16, epochs=4.0, optimizer="momentum", lr=0.02, schedule="step"),
    )


KINDS: dict[str, Callable[[], sw.Task]] = {
    "pixels": pixels,
    "encyclopedia": encyclopedia,
    "garments": garments,
    "mixer": mixer,
    "arm": arm,
    "fraud": fraud,
    "doubtful": doubtful,
    "topics": topics,
    "unnormalized": unnormalized,
}


def task(kind: str = "pixels") -> sw.Task:
    """One of the kinds."""
    return KINDS[kind]()
