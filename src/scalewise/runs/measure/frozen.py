"""Many groups' gradients at one point of a training, whose weights stay as they are while they are looked at.

With m groups of b samples at the same weights all pairs of groups count, not only those of one step: the mean ḡ of
M = m·b samples has ‖ḡ‖² = |G|² + trΣ·(1 ÷ M − 1 ÷ N) on average, drawn from N without replacement, and their scatter
gives trΣ = b·Σ‖gᵢ − ḡ‖² ÷ (m − 1). Leaving out one of several blocks of groups at a time says how far both are off.

What is drawn anew whenever a sample is seen (dropout, augmentation, with batch norm the others of its group) no whole
pass exhausts. That part of trΣ, trΦ, comes from seeing the same samples twice, trΦ = M·‖ḡ − ḡ′‖² ÷ 2, and then
‖ḡ‖² = |G|² + (trΣ − trΦ)·(1 ÷ M − 1 ÷ N) + trΦ ÷ M.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from scalewise.engine.data import streams
from scalewise.engine.data.feed import fetched, placed
from scalewise.engine.data.loaders import Request
from scalewise.engine.data.samples import Augmented, Samples
from scalewise.engine.loop import Training
from scalewise.engine.parallel.workers import precision
from scalewise.engine.sums.flat import in_memory_order
from scalewise.stats.noise_scale import SAME, NoiseEstimate, ratio_of_means
from scalewise.stats.precondition import preconditioner

BLOCKS = 16  # in which groups are put by turns
AGAIN_GROUPS = 16  # seen twice where something is drawn anew
REGROUPED = 8  # groups whose samples are put into other groups: one pair in so many stays together
AGAIN_PASS = 1 << 20  # a number that no pass over the data has: augmentation draws by it
NO_NOISE = "no noise: every sample's gradient agrees"
NO_GRADIENT = "no gradient: it is 0 for every sample"
ADAM_LIKE = frozenset({"adam", "adamw", "lamb", "schedule-free"})


class GroupGradients:
    """The mean gradients of groups of fresh training samples, without a trace in the training."""

    def __init__(self, training: Training, group_samples: int, key: int) -> None:
        """Samples go through the model `group_samples` at a time, in the order that `key` gives."""
        self._training, self._size, self._key = training, group_samples, key
        augment, samples = training.task.augment, training.samples
        self._samples: Samples = samples if augment is None else Augmented(samples, augment, key)
        self._parameters = [*training.strategy.model.parameters.values()]

    @property
    def groups_per_pass(self) -> int:
        """Whole groups in one pass over the data."""
        return len(self._samples) // self._size

    def take(self, first: int, count: int) -> Iterator[list[Tensor]]:
        """The gradients of groups [first, first + count), pass after pass, each pass in an order of its own."""
        stream = streams.SampleStream(len(self._samples), self._key)
        starts = [divmod(number, self.groups_per_pass) for number in range(first, first + count)]
        places = [number * len(self._samples) + group * self._size for number, group in starts]
        requests = (stream.take(place, place + self._size) for place in places)
        return self._gradients(requests, "noise", first)

    def pairs(self) -> Iterator[tuple[list[Tensor], list[Tensor], int]]:
        """Mean gradients of the same samples seen twice, and of how many groups; none where they are always the same.

        With batch norm a gradient depends on the others of its group, so that groups are mixed.
        """
        if not self._drawn_anew():
            return
        mixed = bool(self._training.strategy.model.averages)
        count = min(REGROUPED, self.groups_per_pass) if mixed else 1
        for first in range(0, min(AGAIN_GROUPS, self.groups_per_pass) - count + 1, count):
            yield _mean(self.take(first, count)), _mean(self._take_again(first, count)), count

    def _drawn_anew(self) -> bool:
        """Whether the same samples may give another gradient when they are seen again."""
        if self._training.task.augment is not None or self._training.strategy.model.averages:
            return True
        (first,) = self.take(0, 1)
        drawn = streams.random_state()
        self._seed("noise", 0)
        if _differ(drawn, streams.random_state()):
            return True
        (again,) = self._take_again(0, 1)
        return float(_squares(torch._foreach_sub(first, again)).sum()) > SAME * float(_squares(first).sum())

    def _take_again(self, first: int, count: int) -> Iterator[list[Tensor]]:
        """The gradients of the samples of some groups of the first pass, with everything else drawn anew."""
        stream = streams.SampleStream(len(self._samples), self._key)
        indices, passes = stream.take(first * self._size, (first + count) * self._size)
        if count > 1:
            generator = torch.Generator().manual_seed(streams.key("noise again", self._key, first))
            indices = indices[torch.randperm(len(indices), generator=generator)]
        groups = zip(indices.split(self._size), (passes + AGAIN_PASS).split(self._size), strict=True)
        return self._gradients(groups, "noise again", first)

    def _gradients(self, requests: Iterable[Request], draws: str, first: int) -> Iterator[list[Tensor]]:
        training, model = self._training, self._training.strategy.model
        device, layout = training.team.device, training.recipe.layout
        batches = fetched(self._samples, requests, 0, device)
        model.buffers.remember()
        try:
            for number, batch in enumerate(batches, first):
                self._seed(draws, number)
                yield self._gradient(placed(batch, device, layout))
                model.buffers.restore()
        finally:
            model.buffers.restore()

    def _seed(self, draws: str, number: int) -> None:
        streams.seed_everything(streams.key(draws, self._key, number), self._training.team.device)

    def _gradient(self, batch: object) -> list[Tensor]:
        training, recipe = self._training, self._training.recipe
        call = training.strategy.model.call
        with precision(recipe, training.team.device):
            loss = training.task.evaluate(call, batch, recipe.label_smoothing)
        weight = float(loss.pairs()["loss"][1])
        return [*torch.autograd.grad(loss.root(weight or 1.0), self._parameters, materialize_grads=True)]


def _mean(gradients: Iterator[list[Tensor]]) -> list[Tensor]:
    mean, count = [one.clone() for one in next(gradients)], 1
    for gradient in gradients:
        torch._foreach_add_(mean, gradient)
        count += 1
    torch._foreach_div_(mean, count)
    return mean


def _differ(one: streams.RandomState, other: streams.RandomState) -> bool:
    """Whether something was drawn between two states of the generators."""
    return not torch.equal(one[0], other[0]) or one[1] != other[1] or one[2][2] != other[2][2]  # numpy's place


def preconditioners(training: Training) -> list[Tensor] | None:
    """√P of every parameter from the state of an Adam-like optimizer; None for others, and before the first step."""
    recipe = training.recipe
    if recipe.optimizer not in ADAM_LIKE or training.progress.step == 0:
        return None
    entries = {entry.name: entry.tensor for entry in training.strategy.state()}
    found = []
    for name, parameter in training.strategy.model.parameters.items():
        second_moment = torch.empty_like(parameter)
        in_memory_order(second_moment).copy_(entries[f"optimizer.exp_avg_sq.{name}"])
        steps = float(entries[f"optimizer.step.{name}"])
        found.append(preconditioner(second_moment, steps, recipe.beta2, recipe.epsilon))
    return found


@dataclass
class PooledNoise:
    """Sums over many groups of gradients at the same weights, by parameter, in blocks."""

    _group_samples: int  # b
    _population: int  # N, of which samples are drawn without replacement, pass after pass
    _factors: list[Tensor] | None = None  # √P of every parameter, to measure preconditioned gradients besides
    _sums: list[list[Tensor]] = field(default_factory=list)  # of block, of parameter
    _squares: list[Tensor] = field(default_factory=list)  # of block: Σ‖gᵢ‖², (plain or preconditioned, parameter)
    _anew: list[Tensor] = field(default_factory=list)  # of pair: trΦ, (plain or preconditioned, parameter)
    _counts: list[int] = field(default_factory=lambda: [0] * BLOCKS)
    groups: int = 0

    def add(self, gradients: list[Tensor]) -> None:
        """Take one group's mean gradients."""
        block, squares = self.groups % BLOCKS, self._both_squares(gradients)
        if len(self._sums) <= block:
            self._sums.append([gradient.clone() for gradient in gradients])
            self._squares.append(squares)
        else:
            torch._foreach_add_(self._sums[block], gradients)
            self._squares[block] += squares
        self._counts[block] += 1
        self.groups += 1

    def add_pair(self, first: list[Tensor], second: list[Tensor], groups: int) -> None:
        """Take the mean gradients of the same samples seen twice, N groups of them."""
        difference = torch._foreach_sub(first, second)
        self._anew.append(self._both_squares(difference) * (groups * self._group_samples) / 2)

    def _both_squares(self, gradients: Sequence[Tensor]) -> Tensor:
        """‖g‖² by parameter, plain and (with factors) preconditioned."""
        plain = [*gradients]
        kinds = [plain] if self._factors is None else [plain, torch._foreach_mul(plain, self._factors)]
        return torch.stack([_squares(kind) for kind in kinds])

    @property
    def pairs(self) -> int:
        """How often the same samples were seen twice."""
        return len(self._anew)

    def table(self) -> Table:
        """What is needed to estimate the noise scale, of each parameter."""
        return self._table(0, None)

    def preconditioned_table(self) -> Table | None:
        """The same of the preconditioned gradients."""
        return None if self._factors is None else self._table(1, self._factors)

    def _table(self, kind: int, factors: list[Tensor] | None) -> Table:
        gram = []
        for number, parts in enumerate(zip(*self._sums, strict=True)):
            rows = torch.stack(parts)  # (block, …)
            rows = (rows if factors is None else rows * factors[number]).reshape(len(rows), -1)
            wide = rows if rows.device.type == "mps" else rows.double()
            gram.append((wide @ wide.T).cpu().numpy())
        counts = np.array(self._counts[: len(self._sums)], dtype=float)
        squares = torch.stack(self._squares, 2)[kind].cpu().numpy()  # (parameter, block)
        anew = torch.stack(self._anew)[:, kind].cpu().numpy() if self._anew else np.zeros((0, len(gram)))
        return Table(np.stack(gram), squares, counts, self._group_samples, self._population, anew)


def _squares(gradients: Sequence[Tensor]) -> Tensor:
    return torch.stack([*torch._foreach_norm([*gradients])]).double().square()


@dataclass(frozen=True)
class Table:
    """Inner products of the blocks' sums and their squares, by parameter."""

    gram: np.ndarray  # (parameter, block, block)
    squares: np.ndarray  # (parameter, block)
    counts: np.ndarray  # (block,) groups
    group_samples: int
    population: int
    anew: np.ndarray  # (pair, parameter) trΦ

    def values(self, chosen: list[int] | None = None) -> np.ndarray:
        """|G|² and trΣ of all parameters, or of some, as each block has them: (2, block), with the right means.

        They are pseudo-values: what the estimate would change by if a block were left out, times the other blocks.
        """
        rows = slice(None) if chosen is None else chosen
        gram, squares = self.gram[rows].sum(0), self.squares[rows].sum(0)
        blocks = len(self.counts)
        everything = np.ones(blocks)
        anew = float(self.anew[:, rows].sum(1).mean()) if len(self.anew) else 0.0
        drawn = float(self.counts.sum()) * self.group_samples / self.population
        seen, passes = min(1.0, drawn), max(1, round(drawn))
        found = np.array(self._parts(gram, squares, everything, seen, passes, anew))
        if found[1] <= SAME * self.group_samples * squares.sum() / self.counts.sum():
            return np.stack([np.full(blocks, found[0]), np.zeros(blocks)])
        whole = np.array(self._parts(gram, squares, everything))
        left_out = np.array([self._parts(gram, squares, everything - one) for one in np.eye(blocks)])
        deviations = (blocks - 1) * (whole - left_out)  # (block, 2)
        deviations -= deviations.mean(0)
        unknown = self._unknown(seen, anew / found[1])
        values: np.ndarray = (found + deviations * np.array([math.sqrt(unknown), 1.0])).T
        return values

    def _unknown(self, seen: float, share_anew: float) -> float:
        """What is left of the variance of |G|² when this share of the data is seen: what is drawn anew stays.

        Assumption: it is the same share of the noise in all directions. Its size is known from N pairs only.
        """
        pairs = len(self.anew)
        stays = min(1.0, share_anew) * (1 + 1 / pairs) if pairs else 0.0
        return 1 - seen + seen * stays

    @property
    def samples(self) -> int:
        """How many were looked at."""
        return round(float(self.counts.sum()) * self.group_samples)

    def _parts(
        self,
        gram: np.ndarray,
        squares: np.ndarray,
        keep: np.ndarray,
        seen: float = 0.0,
        passes: int = 1,
        anew: float = 0.0,
    ) -> tuple[float, float]:
        """|G|² and trΣ from the blocks that are kept, in some passes and with a share of all samples seen.

        Every pass takes a degree of freedom from the samples' own scatter, and only the first from what is drawn anew.
        """
        groups = float(keep @ self.counts)
        square_of_mean = float(keep @ gram @ keep) / groups**2
        scatter = self.group_samples * (float(keep @ squares) - groups * square_of_mean)
        noise = (scatter - anew * (passes - 1)) / (groups - passes)
        samples = groups * self.group_samples
        return square_of_mean - noise / samples * (1 - seen) - anew / samples * seen, noise


def estimate(tables: Sequence[Table], chosen: list[int] | None = None) -> NoiseEstimate:
    """The noise scale over some points of a training: the ratio of means, whose errors are those within the points."""
    signals, noises = np.concatenate([table.values(chosen) for table in tables], axis=1)
    if not noises.any():
        return NoiseEstimate(None, None, None, enough=False, problem=NO_NOISE if signals.any() else NO_GRADIENT)
    return ratio_of_means(noises, signals, block=len(tables[0].counts), least=0)
