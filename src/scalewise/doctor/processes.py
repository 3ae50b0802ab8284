"""What differs between processes, or does not and should: data, weights, and the average of gradients."""

from __future__ import annotations

import math

import numpy as np

from scalewise.doctor.evidence import Evidence, Finding, Severity, Unknown, Verdict, shown
from scalewise.doctor.observations import Watched, WatchedStep, unpack

# Workers whose gradients differ by less than this, squared and relative to the gradient, saw the same samples: only
# rounding is left. Far from its minimum a regression has noise scales of a tenth of a sample on any samples.
LEAST_DIFFERENCE = 1e-6
# A sampler that fills up the last step repeats a few samples, and data sets hold some duplicates.
TOLERATED_OVERLAP = 0.05
# Same batch on two processes in this share of the steps: not chance.
SAME_STEPS = 0.5
# An order is "the same" when nearly all samples of a later pass stand where they stood in the first.
SAME_ORDER = 0.95
FEWEST_BATCHES = 4
HEAD = 8  # fingerprints of a micro batch that are always there, however long the run
# Steps dominated by one label, where the label changes: shuffled data have few, sorted data only such.
DOMINATED = 0.8
DOMINATED_STEPS = 0.5
# Shards are of different kinds when their label shares differ by half in total variation, over enough samples.
LABEL_DISTANCE = 0.5
LABEL_SAMPLES = 200


def same_data(evidence: Evidence, reference: Evidence | None) -> Verdict:
    """Several workers see the same samples, so they are worth one."""
    if evidence.workers == 1:
        return None
    if not evidence.watched:
        return _same_gradients(evidence)
    if len(evidence.processes) < 2:
        return Unknown("only one process's file is there")
    first, *others = [_batches(one) for one in evidence.processes]
    for number, other in enumerate(others, 1):
        both = min(len(first), len(other))
        same = sum(np.array_equal(np.sort(a), np.sort(b)) for a, b in zip(first, other, strict=False))
        if both and same > SAME_STEPS * both:
            return _same(f"processes 0 and {number} were given the same samples in {same} of {both} steps.")
    return _same_norms(evidence)


def _same_norms(evidence: Evidence) -> Verdict:
    """Gradients of different samples never have the same norm to the last digits."""
    tables = [{step.step: step.first_square for step in one.steps if step.first_square} for one in evidence.processes]
    common = sorted(set.intersection(*map(set, tables)))
    rows = np.array([[float(table[number] or 0.0) for table in tables] for number in common])
    if len(rows) < 4:
        return None
    equal = np.ptp(rows, axis=1) <= 1e-9 * rows.max(axis=1)
    if equal.mean() <= SAME_STEPS:
        return None
    return _same(f"the gradients of {len(tables)} processes had the same norm in {equal.sum()} of {len(rows)} steps.")


def _same_gradients(evidence: Evidence) -> Verdict:
    if evidence.noise is None or evidence.noise.value is None:
        return Unknown("the noise scale was not measured")
    whole = evidence.samples_per_epoch is not None and evidence.worker_batch >= evidence.samples_per_epoch
    if whole or evidence.noise.value > LEAST_DIFFERENCE * evidence.worker_batch:
        return None
    return Finding(
        "same-data",
        "high",
        f"the gradients of {evidence.workers} workers coincide: the noise scale is {evidence.noise.value:.2g} samples "
        f"for a worker batch of {shown(evidence.worker_batch)}.",
        "Let the data set's __getitem__(index) return the sample of that index, not one that is drawn or fixed.",
    )


def _same(sentence: str) -> Finding:
    fix = "Give every process its own shard: DataLoader(data, sampler=torch.utils.data.DistributedSampler(data))."
    return Finding("same-data", "high", sentence, fix)


def overlapping_shards(evidence: Evidence, reference: Evidence | None) -> Verdict:
    """A sample is on several processes within one pass over the data."""
    if len(evidence.processes) < 2 or isinstance(same_data(evidence, reference), Finding):
        return None
    passes = [_first_pass(one, len(evidence.processes)) for one in evidence.processes]
    known = [one for one in passes if one is not None]
    if len(known) < len(passes):
        return Unknown("samples cannot be told apart by their inputs")
    length = min(map(len, known))
    sets = [set(one[:length].tolist()) for one in known]
    fraction = _fraction(evidence.processes[0])
    shares = {
        (a, b): len(sets[a] & sets[b]) / fraction / max(1, min(len(sets[a]), len(sets[b])))
        for a in range(len(sets))
        for b in range(a + 1, len(sets))
    }
    (a, b), share = max(shares.items(), key=lambda item: item[1])
    if share <= TOLERATED_OVERLAP or len(sets[a] & sets[b]) <= 2 * len(sets):
        return None
    share = min(share, 1.0)
    severity: Severity = "high" if share < 0.9 else "medium"  # whole data on all: each pass counts several times
    return Finding(
        "overlapping-shards",
        severity,
        f"{share:.0%} of the {min(len(sets[a]), len(sets[b])):,} samples looked at in process {a}'s first pass were "
        f"seen by process {b} in its own.",
        "Shard with torch.utils.data.DistributedSampler(data), with the same seed on all processes.",
    )


def unshuffled(evidence: Evidence, reference: Evidence | None) -> Verdict:
    """The samples come sorted by label, or in the same order in every pass."""
    if not evidence.watched:
        return None  # every epoch has its own permutation
    for check in (_sorted_labels, _different_shards, _same_order):
        if found := check(evidence):
            return found
    return None


def _sorted_labels(evidence: Evidence) -> Finding | None:
    tops = [step.top_label for one in evidence.processes for step in one.steps if step.top_label]
    full = [label for count, label, of in tops if of > 2 and count > DOMINATED * of]
    kinds, counts = np.unique(full, return_counts=True)
    if len(full) <= DOMINATED_STEPS * len(tops) or len(tops) < 4 or len(kinds[counts > 0.1 * len(full)]) < 2:
        return None
    return Finding(
        "unshuffled",
        "high",
        f"in {len(full)} of {len(tops)} batches looked at more than {DOMINATED:.0%} of the samples had one label, "
        f"{len(kinds)} labels in turn: the data are sorted.",
        "Shuffle: DataLoader(data, shuffle=True), or DistributedSampler(data, shuffle=True).",
    )


def _different_shards(evidence: Evidence) -> Finding | None:
    rows = [np.array(one.labels, dtype=float) for one in evidence.processes]
    if len(rows) < 2 or len({len(row) for row in rows}) > 1 or min(row.sum() for row in rows) < LABEL_SAMPLES:
        return None
    shares = np.stack([row / row.sum() for row in rows])
    distance = float(np.abs(shares - shares[0]).sum(axis=1).max() / 2)
    if distance < LABEL_DISTANCE:
        return None
    return Finding(
        "unshuffled",
        "high",
        f"the labels of the processes' shards differ by {distance:.0%}: the data were cut before they were shuffled.",
        "Shuffle before sharding: torch.utils.data.DistributedSampler(data, shuffle=True).",
    )


def _same_order(evidence: Evidence) -> Finding | None:
    for one in evidence.processes:
        batches = _batches(one)
        heads = [] if _alike(batches) else [batch[:HEAD].tobytes() for batch in batches]
        if heads and heads[0] in heads[1:FEWEST_BATCHES]:
            continue  # full batches, as gradient descent and LBFGS take them, have no order
        periods = [period for period in range(FEWEST_BATCHES, len(heads) - 2) if heads[period] == heads[0]]
        for period in periods[:1]:
            later = min(period, len(heads) - period)
            same = sum(heads[at] == heads[period + at] for at in range(later)) / later
            if same >= SAME_ORDER:
                return Finding(
                    "unshuffled",
                    "medium",
                    f"process {one.process.process} saw its batches in the same order again after {period} steps: "
                    f"{same:.0%} of its second pass stands where it stood in the first.",
                    "Call sampler.set_epoch(epoch) at the start of every epoch, or DataLoader(data, shuffle=True).",
                )
    return None


def _batches(one: Watched) -> list[np.ndarray]:
    """The fingerprints of every step's samples."""
    return [unpack(step.inputs) for step in one.steps if step.inputs]


def _alike(batches: list[np.ndarray]) -> bool:
    """Whether fingerprints say nothing, since most samples of a batch have the same one."""
    shares = [len(np.unique(batch)) / len(batch) for batch in batches if len(batch)]
    return not shares or float(np.mean(shares)) < 0.9


def _fraction(one: Watched) -> float:
    """The share of the samples whose fingerprints were taken."""
    return sum(map(len, _batches(one))) / max(1, sum(sum(step.samples) for step in one.steps if step.inputs))


def _first_pass(one: Watched, processes: int) -> np.ndarray | None:
    """The samples seen before they begin to come back; None if fingerprints say nothing.

    In a second pass one sample in `processes` is one that this process had before. So repeats come close together
    there, while duplicates in the data are far apart.
    """
    batches = _batches(one)
    if _alike(batches):
        return None
    stream = np.concatenate(batches)
    _, firsts = np.unique(stream, return_index=True)
    repeats = np.setdiff1d(np.arange(len(stream)), firsts)
    close = np.flatnonzero(np.diff(repeats) <= 4 * processes / _fraction(one))
    return stream[: int(repeats[close[0]])] if len(close) else stream


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
