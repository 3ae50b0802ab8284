"""Learning curves of which everything is known, and how often the forecast's intervals cover what is true of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from scalewise.stats.learning_curve import fit

AHEAD = 4.0  # times the largest size seen
CLEAR = 2.0  # γ beyond so many half-widths of its ideal interval can be known; below their inverse it cannot


@dataclass(frozen=True)
class TrueCurve:
    """ε(m) = α·m^β + γ, measured with relative noise at some sizes."""

    alpha: float
    beta: float
    gamma: float
    noise: float
    sizes: tuple[float, ...]  # one for each measurement

    def error(self, size: float) -> float:
        return self.alpha * size**self.beta + self.gamma

    def measured(self, size: float, random: np.random.Generator) -> float:
        return self.error(size) * math.exp(self.noise * random.standard_normal())

    @property
    def can_be_known(self) -> bool | None:
        """Whether γ stands out of an ideal interval (Fisher's information at the truth); None: a matter of luck."""
        sizes = np.array(self.sizes)
        power, total = self.alpha * sizes**self.beta, self.alpha * sizes**self.beta + self.gamma
        jacobian = np.stack([power, power * np.log(sizes), np.ones_like(sizes)], axis=1) / total[:, None]
        half = math.sqrt(np.linalg.inv(jacobian.T @ jacobian)[2, 2]) * self.noise
        ratio = self.gamma / (half * float(stdtrit(len(sizes) - 3, 0.975)))
        return True if ratio > CLEAR else False if ratio < 1 / CLEAR else None


def draw(random: np.random.Generator) -> TrueCurve:
    """A curve as they are met: six to nine doublings of the size, one to three seeds, with and without γ."""
    first, doublings, seeds = random.uniform(100, 2000), int(random.integers(6, 10)), int(random.integers(1, 4))
    sizes = [first * 2**number for number in range(doublings) for _ in range(seeds)]
    beta, last = -random.uniform(0.15, 0.7), random.uniform(0.01, 0.3)
    gamma = 0.0 if random.random() < 1 / 3 else random.uniform(0.0, 0.95) * last
    alpha = (last - gamma) / max(sizes) ** beta
    return TrueCurve(alpha, beta, gamma, random.uniform(0.005, 0.06), tuple(sizes))


@dataclass(frozen=True)
class Outcome:
    """Whether the interval covered a new measurement and the truth, and whether γ was flagged rightly."""

    covered: bool
    covered_truth: bool
    flagged_rightly: bool | None
    identified: bool


def trial(seed: int) -> Outcome:
    """Draw a curve, measure it, fit it, and look ahead."""
    random = np.random.default_rng([2026, seed])
    true = draw(random)
    found = fit([(size, true.measured(size, random)) for size in true.sizes])
    ahead = AHEAD * max(true.sizes)
    interval = found.at(ahead)
    assert interval.low is not None
    assert interval.high is not None
    known = true.can_be_known
    return Outcome(
        covered=interval.low <= true.measured(ahead, random) <= interval.high,
        covered_truth=interval.low <= true.error(ahead) <= interval.high,
        flagged_rightly=None if known is None else known == found.identified,
        identified=found.identified,
    )
