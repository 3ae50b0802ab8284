"""Too few steps for the global batch, too few samples for batch norm, and a loss that is not finite or ran away."""

from __future__ import annotations

import math

import numpy as np

from scalewise.doctor.evidence import (
    Evidence,
    Finding,
    Severity,
    Unknown,
    Verdict,
    final_loss,
    shown,
    still_falling,
    worse,
)
from scalewise.stats.critical_batch import efficiency

# A run that makes less than half the progress of its single-worker budget has visibly lost accuracy.
LEAST_PROGRESS = 0.5
# Momentum and Adam average over tens of steps, so no rate makes up for fewer.
FEWEST_STEPS = 30
# Against a run of twice the steps or more: a loss a fifth above its, on training and on test data.
FEWER = 2.0
CLEARLY_WORSE = 1.2
# Times the first step's loss, by nine in ten of the last: that of a small batch may be a thousand times another's.
RAN_AWAY = 10.0
LAST_STEPS = 8


def too_few_steps(evidence: Evidence, reference: Evidence | None) -> Verdict:
    """The global batch is beyond the noise scale and the samples were not increased, so training ended early."""
    if evidence.workers == 1 and reference is None:
        return None
    if reference is not None and worse(evidence, reference) is None:
        return None
    falling = still_falling(evidence)
    if falling is None:
        return None if reference is None else _fewer_than(evidence, reference)
    high = evidence.noise.high if evidence.noise is not None else None
    if not high:
        return _very_few(evidence, falling)
    budget, batch = _budget(evidence, reference)
    share = evidence.samples / budget * efficiency(evidence.global_batch, high) / efficiency(batch, high)
    return _too_few(evidence, high, share, falling) if share < LEAST_PROGRESS else _very_few(evidence, falling, True)


def _budget(evidence: Evidence, reference: Evidence | None) -> tuple[float, float]:
    """The samples and the global batch of the run that this one stands for: else one worker with these samples."""
    if reference is not None and reference.samples:
        return reference.samples, reference.global_batch
    budgets = [(one.samples, one.global_batch) for one in evidence.baselines if one.samples is not None]
    return min(budgets) if budgets else (evidence.samples, evidence.worker_batch)


def _too_few(evidence: Evidence, noise: float, share: float, falling: float) -> Finding:
    more = math.ceil(evidence.steps / share)
    longer = f"train for about {more:,} steps" if evidence.watched else f"train longer (--steps {more})"
    return Finding(
        "too-few-steps",
        "high" if share < LEAST_PROGRESS / 2 else "medium",
        f"the global batch of {shown(evidence.global_batch)} is {shown(evidence.global_batch / noise)} times the noise "
        f"scale (at most {shown(noise)} samples), so {evidence.steps} steps do {share:.0%} of one worker's work with "
        f"these samples, and the loss was still falling ({falling:.0%} of its fall came in the last quarter).",
        f"Use fewer workers or a smaller worker batch, or {longer}.",
    )


def _fewer_than(evidence: Evidence, reference: Evidence) -> Verdict:
    """A loss that has settled, or scatters too much to tell, well above that of a run of far more steps."""
    losses, tests = (final_loss(evidence), final_loss(reference)), (evidence.test_loss, reference.test_loss)
    pairs = [pair for pair in (losses, tests) if None not in pair]
    clearly = all(mine > CLEARLY_WORSE * other > 0 for mine, other in pairs if mine is not None and other is not None)
    if not pairs or not clearly or reference.steps < FEWER * evidence.steps:
        return None
    mine, other = pairs[0]
    longer = "train for more steps" if evidence.watched else f"train longer (--steps {reference.steps} at most)"
    return Finding(
        "too-few-steps",
        "medium",
        f"training took {evidence.steps:,} steps of {shown(evidence.global_batch)} samples and the other run "
        f"{reference.steps:,} of {shown(reference.global_batch)}; the loss ended at {shown(mine or 0.0)} instead of "
        f"{shown(other or 0.0)}.",
        f"Raise the learning rate with the global batch, use fewer workers, or {longer}.",
    )


def _very_few(evidence: Evidence, falling: float, known: bool = False) -> Verdict:
    if evidence.steps >= FEWEST_STEPS:
        return None if known else Unknown("the noise scale was not measured firmly enough")
    loss = final_loss(evidence)
    return Finding(
        "too-few-steps",
        "medium",
        f"training took {evidence.steps} steps of {shown(evidence.global_batch)} samples and the loss was still "
        f"falling ({falling:.0%} of its fall came in the last quarter, to {shown(loss or 0.0)}).",
        "Train longer"
        + (" or use a smaller global batch." if evidence.watched else " (--epochs) or use fewer workers."),
    )


def non_finite(evidence: Evidence, reference: Evidence | None) -> Verdict:
    """Losses, gradients or weights became infinite or not a number."""
    if not evidence.non_finite and evidence.failure is None:
        return None
    steps = evidence.non_finite
    if evidence.failure is not None:
        what = f"the run stopped: {evidence.failure.split(';')[0].split(' (')[0]}"
    else:
        what = (
            f"{len(steps)} of {evidence.steps} steps had a loss or gradient that is not finite, first step {steps[0]}"
        )
    at = min(steps[0] - 1 if steps else evidence.steps, len(evidence.rates) - 1)
    rate = f", at a learning rate of {shown(evidence.rates[max(at, 0)])}" if evidence.rates else ""
    return Finding("non-finite", "high", f"{what}{rate}.", _calmer(evidence))


def diverged(evidence: Evidence, reference: Evidence | None) -> Verdict:
    """The loss ended far above where it began, if it is still a number."""
    last = final_loss(evidence)
    first = evidence.losses[0] if evidence.losses else 0.0
    tail = np.array(evidence.losses[-max(LAST_STEPS, len(evidence.losses) // 10) :])
    tail = tail[np.isfinite(tail)]
    if last is None or not 0 < first < float(np.quantile(tail, 0.1)) / RAN_AWAY:
        return None
    what = f"the loss ended at {shown(last)}, {shown(last / first)} times where it began ({shown(first)})"
    return Finding(
        "diverged", "high", f"{what}, at a learning rate of up to {shown(evidence.peak)}.", _calmer(evidence)
    )


def _calmer(evidence: Evidence) -> str:
    if evidence.watched:
        return "Lower the rate or warm it up, and clip: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)."
    return "Lower --lr, or add --warmup-epochs 1 or --clip-norm 1."


# Under 8 samples batch statistics are so noisy that accuracy falls (Wu & He 2018, figure 1: 2 to 10 points of ImageNet
# error at 8 to 2 images); from 8 on the loss is within what repeated runs differ by.
SMALLEST_GROUP = 8
# Running statistics that still hold this share of their start values (mean 0, variance 1) are visibly wrong.
START_SHARE = 0.05
# Running statistics half a standard deviation (or a factor e^½ in variance) away from a batch's, in the middle channel
# of the worst layer; a batch's own scatter comes on top of it.
LARGEST_GAP = 0.5


def worker_batch_too_small(evidence: Evidence, reference: Evidence | None) -> Verdict:
    """Batch norm computes its statistics over a handful of samples."""
    norm = evidence.batch_norm
    if norm is None or not norm.layers or norm.group >= SMALLEST_GROUP:
        return None
    layers = f"{norm.layers} layer{'s' if norm.layers > 1 else ''}"
    severity: Severity = "high" if norm.group <= 2 else "medium" if norm.group <= 4 else "low"
    return Finding(
        "worker-batch-too-small",
        severity,
        f"batch norm ({layers}) takes its statistics over {shown(norm.group)} samples; under "
        f"{SMALLEST_GROUP} they are noisy.",
        "Raise the micro batch (and ghost_batch, if there is one) to 8 or more, or use "
        "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)."
        if evidence.watched
        else "Raise --worker-batch (and --micro-batch or ghost:N) to 8 or more, with fewer workers.",
    )


def statistics_lag(evidence: Evidence, reference: Evidence | None) -> Verdict:
    """Running statistics are not those of the final weights, so the model is worse in evaluation than in training."""
    norm = evidence.batch_norm
    if norm is None or not norm.layers or not norm.batches or norm.recalibrated:
        return None
    kept = (1 - norm.momentum) ** norm.batches if norm.momentum is not None else 0.0
    limit = LARGEST_GAP + 2 * math.sqrt(2 / max(norm.group - 1, 1))
    far = norm.gap is not None and norm.gap > limit
    if kept <= START_SHARE and not far:
        return None
    facts = [f"saw {norm.batches} batches"]
    if kept > START_SHARE:
        facts.append(f"still hold {kept:.0%} of their start values")
    if far and norm.gap:
        facts.append(f"are {shown(norm.gap)} standard deviations away from a batch's")
    return Finding(
        "statistics-lag",
        "high" if kept > 4 * START_SHARE or far else "medium",
        f"batch norm's running statistics (momentum {shown(norm.momentum or 0.0)}) {' and '.join(facts)}.",
        "Set momentum=0.1 in the batch-norm layers, or recompute the statistics before evaluating: "
        "torch.optim.swa_utils.update_bn(loader, model)."
        if evidence.watched
        else "Use --statistics auto, which recomputes them before evaluating, or momentum=0.1 in the batch-norm "
        "layers.",
    )
