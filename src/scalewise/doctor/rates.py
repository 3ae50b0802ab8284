"""Learning rates: not adapted to the workers, on a schedule of another run, or too large at the start."""

from __future__ import annotations

import numpy as np

from scalewise.doctor.evidence import Baseline, Evidence, Finding, Severity, Unknown, Verdict, shown, worse
from scalewise.stats.gain import gain

# A rate this much below what the noise scale allows costs accuracy; the interval of the noise scale is already taken
# at its low end, so this is the margin of the rule itself. Against a second run, which lost less, less is enough.
SHORTFALL = 1.5
SHORTFALL_WITH_REFERENCE = 1.25
# "The same rate" as a smaller run's.
UNCHANGED = 1.1
# A rate under this share of its peak moves nothing; step schedules end at a hundredth, in the last quarter of a run.
FLOOR = 0.02
LONGEST_FLOOR = 0.4
# Under this share it is zero, as a schedule is that has ended; milestones by tens get there after four of them.
NOTHING = 1e-4
# A change of the rate by this share of its peak within one step is a step, not a slope.
JUMP = 0.3
# Equal peaks, to rounding.
SAME_PEAK = 1e-3
# A rate that comes back to this share of its peak was not meant to; the rise is straight where a quarter of the way
# has made more than this share of it (1/4, while a cosine has made 1/7).
LEAST_RETURN = 0.3
LONGEST_RISE = 0.5  # of a warm-up, as a share of the fall; in cycles it is 1
STRAIGHT = 0.2
# Schedules of two runs differ when one has fallen by half so many times earlier, in samples and in shares of a run.
STRETCH = 1.5
# Warm-up: a rate that starts above this share of its peak had none; a loss that rises by more than this share of its
# first value, over three steps and beyond its usual scatter, is a spike. Healthy runs fall or stay within a tenth.
# So is one that had fallen by a seventh and comes all the way back.
COLD_START = 0.8
SPIKE = 1.3
FALLEN = 0.85
BACK = 0.95
SCATTERS = 4.0
NEIGHBOURS = 3
TINY, MOST_LOG = 1e-300, 700.0
START_STEPS = 16


def lr_not_adapted(evidence: Evidence, reference: Evidence | None) -> Verdict:
    """The rate is that of a smaller global batch, although the gradient's noise allows a larger one."""
    if reference is not None:
        return _against_reference(evidence, reference)
    if evidence.workers == 1 or evidence.follows_noise:
        return None
    if not evidence.baselines:
        return Unknown("the rate of one worker is not known; give its run as the second folder")
    low = evidence.noise.low if evidence.noise is not None else None
    if low is None:
        return Unknown("the noise scale was not measured")
    baseline = min(evidence.baselines, key=lambda one: _shortfall(evidence, one, low))
    shortfall = _shortfall(evidence, baseline, low)
    if shortfall < SHORTFALL:
        return None
    return _unadapted(evidence, baseline, low, shortfall, "high" if shortfall >= 3 else "medium", "")


def _against_reference(evidence: Evidence, reference: Evidence) -> Verdict:
    losses = worse(evidence, reference)
    growth = evidence.global_batch / max(reference.global_batch, 1e-9)
    if (
        losses is None
        or evidence.follows_noise
        or growth < UNCHANGED
        or not reference.peak
        or evidence.optimizer != reference.optimizer
    ):
        return None
    baseline = Baseline(reference.peak, reference.global_batch)
    compared = f"; the loss ended at {shown(losses[0])} instead of {shown(losses[1])}"
    if evidence.noise is not None and evidence.noise.low:
        shortfall = _shortfall(evidence, baseline, evidence.noise.low)
        if shortfall >= SHORTFALL_WITH_REFERENCE:
            return _unadapted(evidence, baseline, evidence.noise.low, shortfall, "high", compared)
        if evidence.noise.enough:
            return None
    if evidence.peak > UNCHANGED * reference.peak:
        return None
    return Finding(
        "lr-not-adapted",
        "medium",
        f"the global batch grew {shown(growth)} times ({shown(reference.global_batch)} to "
        f"{shown(evidence.global_batch)}) and the peak learning rate stayed at {shown(evidence.peak)}{compared}.",
        _larger_rate(evidence, growth if evidence.proportional else growth**0.5, at_most=True),
    )


def _allowed(evidence: Evidence, baseline: Baseline, noise: float) -> float:
    """By how much SGD's rate may grow (Johnson et al. 2020), an adaptive optimizer's by its root."""
    return gain(noise, 1.0, evidence.global_batch / baseline.global_batch, baseline.global_batch)


def _shortfall(evidence: Evidence, baseline: Baseline, noise: float) -> float:
    """How many times larger the rate could be."""
    allowed = _allowed(evidence, baseline, noise)
    factor = evidence.peak / baseline.lr if baseline.lr else np.inf
    return float((allowed if evidence.proportional else allowed**0.5) / factor) if factor else 1.0


def _unadapted(
    evidence: Evidence, baseline: Baseline, noise: float, shortfall: float, severity: Severity, compared: str
) -> Finding:
    allowed = _allowed(evidence, baseline, noise)
    factor = evidence.peak / baseline.lr
    peak = f"still {shown(evidence.peak)}" if factor < UNCHANGED else f"only {shown(factor)} times {shown(baseline.lr)}"
    root = "" if evidence.proportional else f", {shown(allowed**0.5)} for {evidence.optimizer}"
    return Finding(
        "lr-not-adapted",
        severity,
        f"{evidence.workers} workers make the global batch {shown(evidence.global_batch)} and the noise scale of at "
        f"least {shown(noise)} samples allows {shown(allowed)} times the rate of {shown(baseline.global_batch)} "
        f"samples{root}, but the peak is {peak}{compared}.",
        _larger_rate(evidence, shortfall, at_most=False),
    )


def _larger_rate(evidence: Evidence, times: float, at_most: bool) -> str:
    peak = f"{'up to ' if at_most else ''}{shown(evidence.peak * times)}"
    if evidence.watched:
        return f"Set lr={peak} in the optimizer, with a warm-up over the first tenth of the steps."
    return f"Use --recipe auto, or --lr {peak} with --lr-rule none and --warmup-epochs 1."


def schedule_too_fast(evidence: Evidence, reference: Evidence | None) -> Verdict:
    """The schedule has run out long before training has, or runs faster or slower than the other run's."""
    if len(evidence.rates) < 8 or not evidence.peak:
        return None
    if reference is not None and not evidence.counts_progress and (found := _other_stretch(evidence, reference)):
        return found
    return _idle(evidence) or _came_back(evidence)


def _idle(evidence: Evidence) -> Finding | None:
    """A rate that lies at its floor for much of the run.

    Steps down, or a floor above zero, may be meant so (milestones, two phases of fine-tuning): one process says nothing
    of a floor above zero, and of steps down the finding is a question.
    """
    shares = np.array(evidence.rates) / evidence.peak
    floor = NOTHING if evidence.workers == 1 else FLOOR
    last = int(np.flatnonzero(shares > floor)[-1])
    idle = 1 - (last + 1) / len(shares)
    if idle <= LONGEST_FLOOR:
        return None
    smooth = -np.diff(shares).min() < JUMP
    return _too_fast(
        evidence,
        f"the learning rate fell to {shown(evidence.rates[-1])}, under {100 * floor:g}% of its peak "
        f"{shown(evidence.peak)}, by step {last + 2} and stayed there for the last {idle:.0%} of {evidence.steps} "
        f"steps{'' if smooth else '; it fell in steps, which may be meant so'}.",
        1 / max(1 - idle, 1e-9),
        "high" if smooth else "low",
    )


def _came_back(evidence: Evidence) -> Finding | None:
    """A cosine that was followed beyond its end, so that the rate rose again."""
    bottom = _turn(np.array(evidence.rates) / evidence.peak)
    if not bottom:
        return None
    return _too_fast(
        evidence,
        f"the learning rate had fallen to {shown(evidence.rates[bottom])} after {bottom} of {evidence.steps} steps and "
        f"then rose slowly to {shown(max(evidence.rates[bottom:]))} again: its schedule had ended.",
        evidence.steps / bottom,
        "high",
    )


def _turn(shares: np.ndarray) -> int:
    """Where the rate was lowest before it rose again as a cosine does; 0 if it never did.

    Restarts jump, and cycles that are meant begin with a rise as long as the fall, or rise in a straight line.
    """
    peak = _first_peak(shares)
    bottom = _first_valley(shares, peak)
    if bottom is None or peak > LONGEST_RISE * (bottom - peak):
        return 0
    climb = shares[bottom : bottom + _first_peak(shares[bottom:]) + 1] - shares[bottom]
    if climb[-1] < LEAST_RETURN or np.diff(climb).max() >= JUMP:
        return 0
    quarter = float(np.interp((len(climb) - 1) / 4, np.arange(len(climb)), climb))
    return bottom if quarter < STRAIGHT * climb[-1] else 0


def _first_valley(shares: np.ndarray, peak: int) -> int | None:
    """The lowest step of the first stretch at the floor after the peak; None if there is none, or no end of it."""
    below = np.flatnonzero(shares[peak:] < FLOOR)
    if not len(below):
        return None
    begins = peak + int(below[0])
    leaves = np.flatnonzero(shares[begins:] >= FLOOR)
    return begins + int(shares[begins : begins + leaves[0]].argmin()) if len(leaves) else None


def _first_peak(rates: np.ndarray) -> int:
    """The first step at the peak; a cosine's later periods may exceed the first by rounding."""
    return int(np.flatnonzero(rates >= (1 - SAME_PEAK) * rates.max())[0])


def _too_fast(evidence: Evidence, sentence: str, times: float, severity: Severity) -> Finding:
    if evidence.watched:
        processes = f" for {evidence.workers} processes" if evidence.workers > 1 else ""
        fix = (
            f"Call scheduler.step() once per optimizer.step() and give the scheduler the {evidence.steps} steps that "
            f"are really taken (it ran about {times:.1f} times too fast{processes})."
        )
        fix = fix if severity == "high" else f"If it is not meant so: {fix[0].lower()}{fix[1:]}"
    else:
        fix = "Choose --schedule and --epochs so that the rate falls over the whole run."
    return Finding("schedule-too-fast", severity, sentence, fix)


def _other_stretch(evidence: Evidence, reference: Evidence) -> Finding | None:
    """The schedules of both runs, by where they have fallen by half."""
    mine, other = _half(evidence.rates), _half(reference.rates)
    if other is None:
        return None
    cut = f"{other:.0%} of {shown(reference.samples)} samples"
    if mine is None or mine > STRETCH * other:
        if mine is not None and mine * evidence.samples < STRETCH * other * reference.samples:
            return None
        when = "never had" if mine is None else f"only had after {mine:.0%} of {shown(evidence.samples)}"
        return Finding(
            "schedule-too-slow",
            "medium",
            f"the other run's learning rate had fallen to half its peak after {cut}, this one's {when}: a schedule "
            f"counted in the other run's {reference.steps} steps ends late in {evidence.steps}.",
            f"Count the schedule in samples, or give it the {evidence.steps} steps that this run takes.",
        )
    if STRETCH * mine < other and STRETCH * mine * evidence.samples < other * reference.samples:
        return _too_fast(
            evidence,
            f"the learning rate had fallen to half its peak after {mine:.0%} of {shown(evidence.samples)} samples, in "
            f"the other run after {cut}.",
            other / mine,
            "high",
        )
    return None


def _half(rates: tuple[float, ...]) -> float | None:
    """The share of the steps after which the rate is at most half its peak; None if it never is."""
    curve = np.array(rates)
    if len(curve) < 8 or not curve.max():
        return None
    peak = _first_peak(curve)
    after = np.flatnonzero(curve[peak:] <= curve.max() / 2)
    return float((peak + after[0]) / len(curve)) if len(after) else None


def warm_up_missing(evidence: Evidence, reference: Evidence | None) -> Verdict:
    """The loss jumps up in the first steps, at a rate that is at its peak from the start."""
    losses = np.array(evidence.losses)
    if not len(losses) or not np.isfinite(losses[0]):
        return Unknown("no loss was seen; add watcher.loss(loss) to the loop") if evidence.watched else None
    cold = evidence.peak and evidence.rates[0] >= COLD_START * evidence.peak
    early = losses[: max(START_STEPS, len(losses) // 4)]
    late = losses[len(early) :] if not evidence.non_finite else losses[:0]  # a run that blew up says nothing of usual
    early, late = early[np.isfinite(early)], late[np.isfinite(late)]
    if len(early) <= NEIGHBOURS or losses[0] <= 0 or not cold or not _spikes(early, late, SCATTERS * _scatter(losses)):
        return None
    step = int(early[1:].argmax()) + 2
    rise = f"rose from {shown(losses[0])} to {shown(early.max())} at step {step}"
    factor = f"{shown(evidence.rates[0])} from the first step on"
    if evidence.watched:
        warm = max(5, evidence.steps // 10)
        fix = f"Warm up: torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters={warm}), stepped once a step."
    else:
        fix = "Add --warmup-epochs 1, or more of them, or lower --lr."
    return Finding("warm-up-missing", "high", f"the loss {rise}, with the learning rate at {factor}.", fix)


def _spikes(losses: np.ndarray, late: np.ndarray, scatter: float) -> bool:
    """Whether the loss rises well above its start, or back to it; by medians of neighbours, since one step is no spike.

    A model that is right nearly always has a loss of nearly 0 in most small batches and of 1 in some: what is usual
    later is no spike, and the first loss is no start if it lies far below what comes later.
    """
    start = max(float(losses[0]), float(np.median(late)) if len(late) else 0.0)
    middle, usual = _middle(losses[1:]), _usual_ratio(late)
    lowest = np.minimum.accumulate(middle)
    fell = (lowest <= min(FALLEN, 1 / usual) * start) & (start - lowest > scatter)
    rises = middle >= max(SPIKE * start, usual * start, start + scatter)
    return bool(rises.any() or (fell & (middle >= BACK * start)).any())


def _middle(losses: np.ndarray) -> np.ndarray:
    """Medians of neighbours."""
    windows = np.lib.stride_tricks.sliding_window_view(losses, min(NEIGHBOURS, len(losses)))
    return np.median(windows, axis=1)


def _usual_ratio(late: np.ndarray) -> float:
    """By what factor the loss of some neighbouring steps may differ from that of the next ones, seldom exceeded."""
    if len(late) < 8 * NEIGHBOURS:
        return 1.0
    logs = np.log(np.maximum(_middle(late)[::NEIGHBOURS], TINY))
    return float(np.exp(min(2 * np.quantile(np.abs(np.diff(logs)), 0.95), MOST_LOG)))


def _scatter(losses: np.ndarray) -> float:
    """How much the loss varies from step to step: late in the run, or at the start where it varies more.

    A mean of squares scatters in proportion to itself, so that its end says little about its start.
    """
    parts = (part[np.isfinite(part)] for part in (losses[:START_STEPS], losses[len(losses) // 2 :]))
    return max(float(np.median(np.abs(np.diff(part)))) if len(part) > 3 else 0.0 for part in parts)
