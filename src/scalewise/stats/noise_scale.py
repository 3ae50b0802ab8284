"""The gradient noise scale of a stream of steps, with its interval and a verdict.

With c groups of b samples whose mean gradients are gᵢ, and ḡ their mean (McCandlish et al. 2018, appendix A):

    L = mean‖gᵢ‖²    T = ‖ḡ‖²    |G|² = (c·T − L) ÷ (c − 1)    trΣ = b·c·(L − T) ÷ (c − 1)    B = trΣ ÷ |G|²

Both are unbiased in one step and very noisy, so numerator and denominator are averaged separately and only their
averages divided. Nothing is clamped before averaging.
"""

from __future__ import annotations

import math
import operator
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from scalewise.errors import UsageError
from scalewise.stats.interval import BLOCK_STEPS, Interval, Scatter, scatter, weighted_sum

ENOUGH_STEPS = 20
ENOUGH_RATIO = 4.0
LEAST_STEPS = 4  # for any interval at all
MOST_TIMES = 1e6  # the steps that there are: beyond that no number of them is named
# Assumption: where |G|² is hardly to be told from 0, or not at all, it counts as its own standard error when more steps
# are foretold, so that the number is neither endless nor the word of one lucky draw.
LEAST_SIGNAL = 1.0


@dataclass(frozen=True)
class NoiseEstimate(Interval[float | None]):
    """A noise scale in samples with its 95 % interval (`high` None: unbounded), and whether that is enough.

    `more_steps` says about how many steps are missing, `problem` why steps alone will not do.
    """

    enough: bool
    more_steps: int | None = None
    problem: str | None = None

    @property
    def verdict(self) -> str:
        """In words.

        >>> NoiseEstimate(120.0, 30.0, None, enough=False, more_steps=40).verdict
        'not enough: about 40 more steps'
        """
        if self.enough:
            return "enough"
        if self.problem is not None:
            return self.problem
        return "not enough" if self.more_steps is None else f"not enough: about {self.more_steps:,} more steps"

    def to_json(self) -> dict[str, Any]:
        """As it stands in `noise_scale` of the result."""
        return super().to_json() | {"enough": self.enough}


def ratio_of_means(
    numerator: np.ndarray, denominator: np.ndarray, block: int = BLOCK_STEPS, least: int = ENOUGH_STEPS
) -> NoiseEstimate:
    """mean(numerator) ÷ mean(denominator) over steps, with its 95 % interval; never enough below `least` steps."""
    steps = len(numerator)
    if steps < LEAST_STEPS:
        top, bottom = float(numerator.mean()), float(denominator.mean())
        value = top / bottom if bottom > 0 else None
        return NoiseEstimate(value, None, None, enough=False, more_steps=least - steps)
    seen = scatter(numerator, denominator, block)
    found = seen.interval()
    enough = steps >= least and found.value is not None and found.within(ENOUGH_RATIO)
    more = None if enough else _more_steps(seen, least)
    return NoiseEstimate(found.value, found.low, found.high, enough, more)


def _more_steps(seen: Scatter, least: int) -> int | None:
    """How many steps are missing, to a twentieth, if they continue as before; None where that is too far off."""

    def enough(times: float) -> bool:
        return seen.fieller(times, LEAST_SIGNAL).within(ENOUGH_RATIO)

    low, high = 1.0, 1.0 if enough(1.0) else MOST_TIMES
    if not enough(high):
        return None
    while high > 1.05 * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if enough(middle) else (middle, high)
    return rounded_up(max(seen.steps * (high - 1), least - seen.steps, 1))


def rounded_up(number: float) -> int:
    """To two digits, upwards.

    >>> rounded_up(7.2), rounded_up(1234)
    (8, 1300)
    """
    digit = 10 ** max(0, math.floor(math.log10(max(number, 1))) - 1)
    return math.ceil(number / digit) * digit


def weighted_mean(estimates: Sequence[NoiseEstimate], weights: Sequence[float]) -> NoiseEstimate:
    """The mean of independent estimates. Where one is unbounded so is the mean; its lower end is that of their lows."""
    problem = next((one.problem for one in estimates if one.problem is not None), None)
    lows = [one.low for one in estimates if one.low is not None]
    if problem is not None or len(lows) < len(estimates):
        return NoiseEstimate(None, None, None, enough=False, problem=problem)
    bounded = [Interval(one.value, low, one.high) for one, low in zip(estimates, lows, strict=True)
               if one.value is not None and one.high is not None]  # fmt: skip
    if len(bounded) < len(estimates):
        values = [one.value for one in estimates if one.value is not None]
        value = sum(map(operator.mul, weights, values)) if len(values) == len(estimates) else None
        return NoiseEstimate(value, sum(map(operator.mul, weights, lows)), None, enough=False)
    found = weighted_sum(bounded, weights)
    return NoiseEstimate(found.value, found.low, found.high, enough=found.within(ENOUGH_RATIO))


def trapezoid_weights(steps: Sequence[int]) -> list[float]:
    """Weights of the trapezoid rule over steps; they add up to 1.

    >>> trapezoid_weights([0, 1, 2])
    [0.25, 0.5, 0.25]
    """
    total = steps[-1] - steps[0]
    if not total:
        return [1 / len(steps)] * len(steps)
    before = [steps[0], *steps[:-1]]
    after = [*steps[1:], steps[-1]]
    return [(end - start) / (2 * total) for start, end in zip(before, after, strict=True)]


WINDOW_STEPS = 2048
LEAST_WINDOW_STEPS = 50
DECAY = 0.95
SAME = 1e-5  # of L: groups whose gradients differ by less than rounding would make them
IDENTICAL = (
    "identical {compared}: their gradients agree in every step, so they see the same samples, or there is no noise; "
    "give each its own share of the data"
)
NO_GRADIENT = "no gradient: it is 0 in every step"
LAYER = "layer "  # what the keys of a layer in a state begin with


def signal_and_noise(
    mean_square: float, square_of_mean: float, groups: float, group_samples: float, population: float = math.inf
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
    """Noise scale of a stream of steps, for anyone's loop.

    It is fed by hand and read with `estimate()`; `scalewise.watch.noise` has one that is fed by hooks.

    >>> monitor = NoiseScale()
    >>> monitor.observe(mean_square=3.0, square_of_mean=2.0, groups=2, group_samples=4)
    >>> monitor.current
    8.0
    """

    def __init__(self, population: float = math.inf) -> None:
        """Nothing is known yet.

        Arguments:
            population: size of the training set, where samples are drawn from it without replacement.
        """
        if not population > 1:
            raise UsageError(
                f"a training set has at least 2 samples, got population={population}; give how many it has"
            )
        self.population = population
        self.layers: dict[str, NoiseScale] = {}  # filled on request, by the name of the parameter
        self.every = 1  # one step of the training in N is measured
        self.compared = "workers"  # what the groups are
        self._steps: deque[tuple[float, float]] = deque(maxlen=WINDOW_STEPS)  # (signal, noise)
        self._seen = 0
        self._different = 0  # steps in which the groups' gradients differed
        self._average = np.zeros(2)
        self._late: list[Callable[[], None]] = []  # bring in numbers that are read a step late

    def observe(self, mean_square: float, square_of_mean: float, groups: float, group_samples: float) -> None:
        """Take one step's L and T; steps that are not finite are skipped."""
        if not (groups > 1 and math.isfinite(groups)):
            raise UsageError(
                f"the noise scale compares at least 2 groups of samples, got groups={groups}; split the batch, or "
                f"leave such a step out"
            )
        if not group_samples > 0:
            raise UsageError(f"a group must have samples, got group_samples={group_samples}; give how many it has")
        if not (math.isfinite(mean_square) and math.isfinite(square_of_mean)):
            return
        if mean_square < 0 or square_of_mean < 0:
            raise UsageError(
                f"squares of norms are at least 0, got mean_square={mean_square} and square_of_mean={square_of_mean}; "
                f"square the norms"
            )
        pair = signal_and_noise(mean_square, square_of_mean, groups, group_samples, self.population)
        self._steps.append(pair)
        self._seen += 1
        self._different += abs(mean_square - square_of_mean) > SAME * mean_square
        weight = (1 - DECAY) / (1 - DECAY**self._seen)  # an exponential average without start-up bias
        self._average += weight * (np.array(pair) - self._average)

    def observe_norms(self, small_norm: float, big_norm: float, *, small_batch: float, big_batch: float) -> None:
        """Take the norms of two gradients at the same weights: of a small batch, and of a bigger one.

        The small batch may be a part of the big one, or not.

        >>> monitor = NoiseScale()
        >>> monitor.observe_norms(3.0**0.5, 2.0**0.5, small_batch=4, big_batch=8)
        >>> round(monitor.current, 6)
        8.0
        """
        if not 0 < small_batch < big_batch:
            raise UsageError(
                f"the noise scale needs gradients of two batch sizes, small_batch below big_batch, got {small_batch} "
                f"and {big_batch}; take a part of the batch, or one of its micro batches, as the small one"
            )
        self.observe(small_norm * small_norm, big_norm * big_norm, big_batch / small_batch, small_batch)

    @property
    def current(self) -> float | None:
        """Ratio of the exponential averages; None before the first step and where `|G|²` is not positive."""
        signal, noise = (float(value) for value in self._average)
        return noise / signal if signal > 0 else None

    def estimate(self) -> NoiseEstimate:
        """The noise scale over the second half of the steps seen (at least the last 50)."""
        self._bring_in()
        length = max(LEAST_WINDOW_STEPS, self._seen // 2)
        window = np.array(self._steps)[-length:]
        if not len(window):
            return NoiseEstimate(None, None, None, enough=False, more_steps=ENOUGH_STEPS)
        if not self._different:
            value = 0.0 if window[:, 0].mean() > 0 else None
            problem = IDENTICAL.format(compared=self.compared) if window.any() else NO_GRADIENT
            return NoiseEstimate(value, None, None, enough=False, problem=problem)
        found = ratio_of_means(window[:, 1], window[:, 0])
        if found.more_steps is None:
            return found
        wanted = (
            len(window) + found.more_steps
        )  # in the window, which is half of the training's steps once they are many
        if wanted > WINDOW_STEPS:
            steps = wanted * self.every
            problem = f"not enough: it would take {steps:,} steps of this size; measure with a larger global batch"
            return replace(found, more_steps=None, problem=problem)
        looks = (wanted if wanted <= LEAST_WINDOW_STEPS else 2 * wanted) - self._seen
        return replace(found, more_steps=looks * self.every)

    def _bring_in(self) -> None:
        for bring_in in self._late:
            bring_in()

    def state(self) -> dict[str, list[float]]:
        """What `restore` needs, the newest step and the layers included."""
        self._bring_in()
        found: dict[str, list[float]] = {
            "steps": [value for pair in self._steps for value in pair],
            "seen": [self._seen],
            "different": [self._different],
            "average": self._average.tolist(),
        }
        if self.every != 1:
            found["every"] = [self.every]
        layers = [(name, layer.state()) for name, layer in self.layers.items()]
        return found | {f"{LAYER}{name} {key}": values for name, state in layers for key, values in state.items()}

    def restore(self, state: dict[str, list[float]]) -> None:
        """Continue from `state`."""
        values = iter(state["steps"])
        self._steps = deque(zip(values, values, strict=True), maxlen=WINDOW_STEPS)
        self._seen = int(state["seen"][0])
        self._different = int(state.get("different", state["seen"])[0])
        self._average = np.array(state["average"])
        self.every = int(state.get("every", [1])[0])
        layers: dict[str, dict[str, list[float]]] = {}
        for key in state:
            if key.startswith(LAYER):
                name, part = key.removeprefix(LAYER).rsplit(" ", 1)
                layers.setdefault(name, {})[part] = state[key]
        self.layers = {name: type(self)(self.population) for name in layers}
        for name, layer in self.layers.items():
            layer.restore(layers[name])
