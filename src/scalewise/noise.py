"""The gradient noise scale, with an interval and a verdict.

With c groups of b samples whose mean gradients are gᵢ, and ḡ their mean (McCandlish et al. 2018, appendix A):

    L = mean‖gᵢ‖²    T = ‖ḡ‖²    |G|² = (c·T − L) ÷ (c − 1)    trΣ = b·c·(L − T) ÷ (c − 1)    B = trΣ ÷ |G|²

Both are unbiased in one step and very noisy, so numerator and denominator are averaged separately and only their
averages divided. Nothing is clamped before averaging.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import asdict, dataclass

import numpy as np
from scipy.special import stdtrit

WINDOW_STEPS = 2048
DECAY = 0.95
ENOUGH_STEPS = 20
ENOUGH_RATIO = 4.0


@dataclass(frozen=True)
class NoiseEstimate:
    """A noise scale in samples, its 95 % interval (`high` None: unbounded), and whether that is enough."""

    value: float | None
    low: float | None
    high: float | None
    enough: bool

    def to_json(self) -> dict[str, float | bool | None]:
        """As it stands in `noise_scale` of the result."""
        return asdict(self)


def signal_and_noise(
    mean_square: float, square_of_mean: float, groups: int, group_samples: float, population: float = math.inf
) -> tuple[float, float]:
    """Unbiased |G|² and trΣ from one step.

    Samples drawn without replacement from a `population` of N pull |G|² down by trΣ ÷ N; that is put back.

    >>> signal_and_noise(mean_square=3.0, square_of_mean=2.0, groups=2, group_samples=4)
    (1.0, 8.0)
    """
    noise = group_samples * groups * (mean_square - square_of_mean) / (groups - 1)
    signal = (groups * square_of_mean - mean_square) / (groups - 1)
    return signal + noise / population, noise


class NoiseScale:
    """Noise scale of a stream of steps.

    >>> monitor = NoiseScale()
    >>> monitor.observe(mean_square=3.0, square_of_mean=2.0, groups=2, group_samples=4)
    >>> monitor.current
    8.0
    """

    def __init__(self, population: float = math.inf) -> None:
        self.population = population
        self._steps: deque[tuple[float, float]] = deque(maxlen=WINDOW_STEPS)  # (signal, noise)
        self._seen = 0
        self._average = np.zeros(2)

    def observe(self, mean_square: float, square_of_mean: float, groups: int, group_samples: float) -> None:
        """Take one step's L and T; steps that are not finite are skipped."""
        if not (math.isfinite(mean_square) and math.isfinite(square_of_mean)):
            return
        pair = signal_and_noise(mean_square, square_of_mean, groups, group_samples, self.population)
        self._steps.append(pair)
        self._seen += 1
        weight = (1 - DECAY) / (1 - DECAY**self._seen)  # an exponential average without start-up bias
        self._average += weight * (np.array(pair) - self._average)

    @property
    def current(self) -> float | None:
        """Ratio of the exponential averages; None before the first step and where |G|² is not positive."""
        signal, noise = (float(value) for value in self._average)
        return noise / signal if signal > 0 else None

    def estimate(self) -> NoiseEstimate:
        """The noise scale over the second half of the steps seen (at least the last 50)."""
        window = np.array(self._steps)[-max(50, self._seen // 2) :]
        return ratio_of_means(window[:, 1], window[:, 0]) if len(window) else NoiseEstimate(None, None, None, False)

    def state(self) -> dict[str, list[float]]:
        """What `restore` needs."""
        return {
            "steps": [value for pair in self._steps for value in pair],
            "seen": [self._seen],
            "average": self._average.tolist(),
        }

    def restore(self, state: dict[str, list[float]]) -> None:
        """Go on from `state`."""
        values = iter(state["steps"])
        self._steps = deque(zip(values, values, strict=True), maxlen=WINDOW_STEPS)
        self._seen = int(state["seen"][0])
        self._average = np.array(state["average"])


def ratio_of_means(numerator: np.ndarray, denominator: np.ndarray) -> NoiseEstimate:
    """mean(numerator) ÷ mean(denominator) with Fieller's 95 % interval over blocks of neighbouring steps.

    The interval is the set of r with |ā − r·b̄| ≤ t·se(a − r·b); it is unbounded when b̄ is not separated from 0.
    """
    top, bottom = float(numerator.mean()), float(denominator.mean())
    value = top / bottom if bottom > 0 else None
    blocks = _block_means(np.stack([numerator, denominator]))  # (2, block)
    count = blocks.shape[1]
    if count < 4:
        return NoiseEstimate(value, None, None, False)
    (top_top, top_bottom), (_, bottom_bottom) = (np.cov(blocks) / count).tolist()
    t = float(stdtrit(count - 1, 0.975))
    a = bottom**2 - t**2 * bottom_bottom
    b = top * bottom - t**2 * top_bottom
    c = top**2 - t**2 * top_top
    spread = math.sqrt(max(b * b - a * c, 0.0))
    low = c / (b + spread) if c > 0 and b + spread > 0 else 0.0  # the smaller root, written so that a may be 0
    high = (b + spread) / a if bottom > 0 and a > 0 else None
    enough = len(numerator) >= ENOUGH_STEPS and low > 0 and high is not None and high <= ENOUGH_RATIO * low
    return NoiseEstimate(value, low, high, enough)


def _block_means(series: np.ndarray) -> np.ndarray:
    """Means of blocks of ⌊∛steps⌋ steps, so that neighbouring steps may be correlated."""
    steps = series.shape[1]
    length = max(1, math.floor(round(steps ** (1 / 3), 9)))
    whole = steps // length * length
    return series[:, steps - whole :].reshape(2, -1, length).mean(axis=2)
