"""Copies of the model: drifted apart, or fed gradients that were averaged wrongly."""

from __future__ import annotations

import math

import numpy as np

from scalewise.doctor.evidence import Evidence, Finding, Severity, Unknown, Verdict, shown
from scalewise.doctor.observations import WatchedStep

# Copies that got the same updates are the same to rounding (1e-7); one missed update moves weights by 1e-4 and more.
LARGEST_DRIFT = 1e-5
# Shares of the work that differ by less than a twentieth change an average by less than its noise.
LEAST_UNEVENNESS = 0.05
# A gradient's weight against the samples or tokens it stands for, as an exponent: 1 is right, 0 a mean of means.
HALFWAY = 0.5
FEWEST_PAIRS = 8


def replicas_drifted(evidence: Evidence, reference: Evidence | None) -> Verdict:
    """The processes' weights differ after the same number of steps."""
    if not evidence.watched:
        return None  # all of a process's workers share its weights, which exact sums keep equal over processes
    if len(evidence.processes) < 2 or evidence.processes[0].process.sharded:
        return None  # there is one copy
    tables = [{step.step: step for step in one.steps if step.weight_norm is not None} for one in evidence.processes]
    common = sorted(set.intersection(*map(set, tables)))
    if not common:
        return Unknown("no step's weights were seen on every process")
    drifts = {number: max(_distance(tables[0][number], table[number]) for table in tables[1:]) for number in common}
    first = next((number for number in common if not drifts[number] <= LARGEST_DRIFT), None)
    if first is None:
        return None
    counts = sorted({len(one.steps) for one in evidence.processes})
    uneven = f"; they took {' and '.join(map(str, counts))} steps" if len(counts) > 1 else ""
    lost = not evidence.processes[0].process.reduces
    return Finding(
        "replicas-drifted",
        "high",
        f"the weights of {len(tables)} processes differ by {drifts[first]:.1%} after step {first} and by "
        f"{drifts[common[-1]]:.1%} after step {common[-1]}{uneven}.",
        "Wrap the model: torch.nn.parallel.DistributedDataParallel(model), and call only the wrapped one."
        if lost
        else "Let every process take every step, or none: agree by an all-reduce before skipping one.",
    )


def _distance(one: WatchedStep, other: WatchedStep) -> float:
    """How far two copies are apart, relative to their size, by the weights looked at and by the norm of all."""
    mine, theirs = np.array(one.weights or [0.0]), np.array(other.weights or [0.0])
    sampled = float(np.linalg.norm(mine - theirs)) / max(float(np.linalg.norm(mine)), 1e-30)
    norms = abs((one.weight_norm or 0.0) - (other.weight_norm or 0.0)) / max(one.weight_norm or 0.0, 1e-30)
    return max(sampled, norms)


def wrong_averaging(evidence: Evidence, reference: Evidence | None) -> Verdict:
    """Uneven parts of a global batch count alike, so a sample or token in a small part counts more.

    A loss that is a mean over its own part gives all parts output gradients of one size S, however many samples or
    tokens w they hold; the right weight gives S ∝ w. So the slope of log S over log w within steps tells them apart.
    """
    if not evidence.watched:
        return None  # the engine divides by the weight of the whole global batch
    groups = _groups(evidence)
    if not groups:
        return None
    spread = float(np.mean([np.abs(weights / weights.mean() - 1).mean() for weights, _ in groups]))
    x = np.concatenate([np.log(weights) - np.log(weights).mean() for weights, _ in groups])
    y = np.concatenate([np.log(sizes) - np.log(sizes).mean() for _, sizes in groups])
    if spread < LEAST_UNEVENNESS or len(x) < FEWEST_PAIRS or not (x @ x):
        return None
    slope = float(x @ y / (x @ x))
    error = math.sqrt(float(((y - slope * x) ** 2).sum()) / (len(x) - len(groups)) / float(x @ x))
    if slope + 2 * error > HALFWAY:
        return None
    severity: Severity = "high" if spread > 0.3 else "medium" if spread > 0.1 else "low"
    sentence, fix = _uneven(evidence, groups, spread), _weighted(evidence)
    if not _same_samples(evidence):
        return Finding("wrong-averaging", severity, sentence, fix)
    return Finding(  # a loss may count sequences alike on purpose
        "wrong-averaging",
        "medium" if severity == "high" else severity,
        f"{sentence[:-1]}, though each part holds as many samples: is every token meant to count alike, or every "
        f"sequence?",
        f"If sequences are meant to count alike, nothing is wrong. If tokens are: {fix[0].lower()}{fix[1:]}",
    )


def _same_samples(evidence: Evidence) -> bool:
    """Whether all parts of a global batch hold as many samples, so that only their tokens differ in number."""
    tables = [{step.step: step.samples for step in one.steps if step.averaging} for one in evidence.processes]
    rows = [
        np.array([samples for table in tables for samples in table[number]], dtype=float)
        for number in set.intersection(*map(set, tables))
    ]
    return float(np.mean([np.abs(row / row.mean() - 1).mean() for row in rows if row.any()])) < LEAST_UNEVENNESS


def _groups(evidence: Evidence) -> list[tuple[np.ndarray, np.ndarray]]:
    """Per step, the weight and the output gradient's size of every micro batch on every process."""
    tables = [{step.step: step.averaging for step in one.steps if step.averaging} for one in evidence.processes]
    found = []
    for number in sorted(set.intersection(*map(set, tables))):
        pairs = np.array([pair for table in tables for pair in table[number] or []], dtype=float)
        if len(pairs) > 1 and np.isfinite(pairs).all() and (pairs > 0).all():
            found.append((pairs[:, 0], pairs[:, 1]))
    return found


def _uneven(evidence: Evidence, groups: list[tuple[np.ndarray, np.ndarray]], spread: float) -> str:
    weights = max((weights for weights, _ in groups), key=lambda one: one.max() / one.min())
    parts = "processes" if len(evidence.processes) > 1 else "micro batches"
    return (
        f"the parts of a global batch hold {shown(weights.min())} to {shown(weights.max())} samples or tokens "
        f"({spread:.0%} from their mean on average over {len(groups)} steps), and the {parts}' gradients count alike."
    )


def _weighted(evidence: Evidence) -> str:
    if len(evidence.processes) > 1:
        return (
            "Sum the loss and divide by the mean weight of all processes: loss = total * processes / "
            "all_reduce(weight), where weight counts this process's samples or tokens."
        )
    return "Sum every micro batch's loss and divide by the samples or tokens of the whole step: loss = total / weight."
