"""Batch norm: statistics over too few samples, and running statistics that lag behind the weights."""

from __future__ import annotations

import math

from scalewise.doctor.evidence import Evidence, Finding, Severity, Verdict, shown

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
    if evidence.watched:
        fix = (
            "Raise the micro batch (and ghost_batch, if there is one) to 8 or more, or use "
            "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)."
        )
    else:
        fix = "Raise --worker-batch (and --micro-batch or ghost:N) to 8 or more, with fewer workers."
    return Finding(
        "worker-batch-too-small",
        severity,
        f"batch norm ({layers}) takes its statistics over {shown(norm.group)} samples; under "
        f"{SMALLEST_GROUP} they are noisy.",
        fix,
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
        _fix(evidence),
    )


def _fix(evidence: Evidence) -> str:
    if evidence.watched:
        return (
            "Set momentum=0.1 in the batch-norm layers, or recompute the statistics before evaluating: "
            "torch.optim.swa_utils.update_bn(loader, model)."
        )
    return "Use --statistics auto, which recomputes them before evaluating, or momentum=0.1 in the batch-norm layers."
