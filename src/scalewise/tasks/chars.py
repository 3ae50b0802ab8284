"""A small character transformer on *Alice's Adventures in Wonderland*, embedded.

Samples are pieces of paragraphs, at most `context` characters long and padded, so samples hold different numbers
of characters: the loss is a sum over characters with their count as its weight.
"""

from __future__ import annotations

import gzip
import math
from importlib import resources

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scalewise.errors import TaskError
from scalewise.recipe import Recipe
from scalewise.tasks.task import Loss, Task

PADDING = -1
HEADS = 4


def load(context: int) -> tuple[Tensor, Tensor, int]:
    """Train and test samples, (sample, context + 1) character numbers, and the size of the alphabet.

    The last tenth of the paragraphs is the test set.
    """
    text = gzip.decompress(resources.files("scalewise.tasks").joinpath("data/alice.txt.gz").read_bytes()).decode()
    alphabet = {character: number for number, character in enumerate(sorted(set(text)))}
    paragraphs = [" ".join(part.split()) + "\n" for part in text.split("\n\n") if part.strip()]
    cut = len(paragraphs) * 9 // 10
    train, test = (_pieces(part, alphabet, context) for part in (paragraphs[:cut], paragraphs[cut:]))
    return train, test, len(alphabet)


def _pieces(paragraphs: list[str], alphabet: dict[str, int], context: int) -> Tensor:
    texts = ["\n" + text for text in paragraphs]  # every sample starts with the character before it
    cuts = [text[start : start + context + 1] for text in texts for start in range(0, len(text) - 1, context)]
    samples = torch.full((len(cuts), context + 1), PADDING)
    for row, cut in enumerate(cuts):
        samples[row, : len(cut)] = torch.tensor([alphabet[character] for character in cut])
    return samples


class Block(nn.Module):
    """Causal self-attention and a two-layer network, each after a layer norm, each added to its input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:  # (sample, position, width)
        """One layer."""
        samples, positions, width = x.shape
        split = self.qkv(self.norm1(x)).view(samples, positions, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)  # (sample, head, position, width ÷ heads) each
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).reshape(samples, positions, width)))
        return x + self.drop(self.mlp(self.norm2(x)))


class Entry(nn.Module):
    """Characters and their positions as vectors."""

    def __init__(self, characters: nn.Embedding, positions: nn.Parameter) -> None:
        super().__init__()
        self.characters, self.positions = characters, positions

    def forward(self, characters: Tensor) -> Tensor:  # (sample, position) -> (sample, position, width)
        """All positions at once."""
        vectors: Tensor = self.characters(characters) + self.positions[: characters.shape[1]]
        return vectors


class CharacterModel(nn.Module):
    """Logits of the next character at every position."""

    def __init__(self, alphabet: int, context: int, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.characters = nn.Embedding(alphabet, width)
        self.positions = nn.Parameter(torch.randn(context, width) * 0.02)
        self.blocks = nn.Sequential(*[Block(width, HEADS, dropout) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, alphabet)

    def forward(self, characters: Tensor) -> Tensor:  # (sample, position) -> (sample, position, alphabet)
        """All positions at once."""
        x = self.characters(characters) + self.positions[: characters.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits

    def stages(self) -> list[nn.Module]:
        """The same as a chain of layers, for pipelines."""
        return [Entry(self.characters, self.positions), *self.blocks, self.norm, self.head]


def next_character(model: nn.Module, samples: Tensor) -> Loss:
    """Summed cross-entropy over the characters present, weighted by their number."""
    target = samples[:, 1:]
    logits = model(samples[:, :-1].clamp(min=0))
    total = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PADDING, reduction="sum")
    count = (target != PADDING).sum()
    return Loss(total, count, {"bits_per_character": (total.detach() / math.log(2), count)})


def chars(context: int = 64, width: int = 64, layers: int = 2, dropout: float = 0.0) -> Task:
    """A character transformer; the metric is bits per character."""
    if context < 1 or layers < 1 or width < HEADS or width % HEADS or not 0 <= dropout < 1:
        raise TaskError(
            f"chars needs context and layers of at least 1, a width that {HEADS} heads divide, and dropout in [0, 1); "
            f"got context={context}, layers={layers}, width={width}, dropout={dropout}; change --set"
        )
    train, test, alphabet = load(context)
    return Task(
        name="chars",
        model=lambda: CharacterModel(alphabet, context, width, layers, dropout),
        train=train,
        test=test,
        step=next_character,
        metric="bits_per_character",
        higher_is_better=False,
        recipe=Recipe(worker_batch=16, epochs=5.0, optimizer="adam", lr=0.002),
    )
