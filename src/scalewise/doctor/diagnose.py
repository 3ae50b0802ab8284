"""The list of checks, and the findings of a run in the order in which to look at them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from scalewise.doctor.amount import diverged, non_finite, statistics_lag, too_few_steps, worker_batch_too_small
from scalewise.doctor.evidence import Evidence, Finding, Severity, Unknown, Verdict, shown
from scalewise.doctor.processes import overlapping_shards, replicas_drifted, same_data, unshuffled, wrong_averaging
from scalewise.doctor.rates import lr_not_adapted, schedule_too_fast, warm_up_missing
from scalewise.doctor.runs import read_run
from scalewise.errors import RunFolderError, UsageError
from scalewise.stats.noise_scale import NoiseEstimate

Check = Callable[[Evidence, Evidence | None], Verdict]

# By cause, in the order in which findings of one severity are shown: what makes all other numbers meaningless first.
CAUSES: dict[str, tuple[Check, str]] = {
    "non-finite": (non_finite, "steps that are not finite"),
    "diverged": (diverged, "the loss ran away"),
    "same-data": (same_data, "workers see the same data"),
    "replicas-drifted": (replicas_drifted, "the copies of the model drifted apart"),
    "wrong-averaging": (wrong_averaging, "uneven parts are averaged alike"),
    "overlapping-shards": (overlapping_shards, "shards overlap"),
    "unshuffled": (unshuffled, "the data are not shuffled"),
    "schedule-too-fast": (schedule_too_fast, "the schedule runs too fast"),
    "warm-up-missing": (warm_up_missing, "no warm-up"),
    "lr-not-adapted": (lr_not_adapted, "the learning rate was not adapted"),
    "too-few-steps": (too_few_steps, "too few steps for the global batch"),
    "worker-batch-too-small": (worker_batch_too_small, "worker batch too small for batch norm"),
    "statistics-lag": (statistics_lag, "batch-norm statistics lag behind"),
}
CHECKS = {cause: check for cause, (check, _) in CAUSES.items()}
TITLES = {cause: title for cause, (_, title) in CAUSES.items()}
TITLES["schedule-too-slow"] = "the schedule runs too slowly"  # a finding of schedule_too_fast
# With these the gradients' noise means nothing, so what is concluded from it would lead astray.
SPOIL_NOISE = frozenset({"non-finite", "diverged", "same-data", "replicas-drifted", "wrong-averaging"})
# What else follows from a cause: the loss of sorted data jumps with every new label.
FOLLOWS = {"unshuffled": "warm-up-missing"}
RANKS: dict[Severity, int] = {"high": 0, "medium": 1, "low": 2}


@dataclass(frozen=True)
class Diagnosis:
    """What was found, worst first, and what could not be looked for, with the reason."""

    evidence: Evidence
    findings: list[Finding]
    unknown: dict[str, str]


def diagnose(evidence: Evidence, reference: Evidence | None = None) -> Diagnosis:
    """Look for every cause of lost accuracy; `reference` is a run that did better, if there is one."""
    verdicts: dict[str, Verdict] = {}
    for cause, check in CHECKS.items():
        verdicts[cause] = check(evidence, reference)
        if cause in SPOIL_NOISE and isinstance(verdicts[cause], Finding):
            evidence = replace(evidence, noise=None)
    explained = {FOLLOWS.get(cause) for cause, verdict in verdicts.items() if isinstance(verdict, Finding)}
    findings = [one for cause, one in verdicts.items() if isinstance(one, Finding) and cause not in explained]
    unknown = {cause: verdict.reason for cause, verdict in verdicts.items() if isinstance(verdict, Unknown)}
    return Diagnosis(evidence, sorted(findings, key=lambda one: RANKS[one.severity]), unknown)


def diagnose_folder(run: Path, reference: Path | None = None) -> Diagnosis:
    """The diagnosis of a stored run, whose numbers may be anything: where they cannot be, that is said."""
    try:
        evidence, other = read_run(run), read_run(reference) if reference is not None else None
        if other is not None and evidence.task != other.task and None not in (evidence.task, other.task):
            raise UsageError(
                f"two runs must be of one task to be compared, got {evidence.task} and {other.task}; leave one out"
            )
        return diagnose(evidence, other)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise RunFolderError(f"{run} contains invalid numbers ({error}); restore it or train again") from None


def summary(diagnosis: Diagnosis) -> str:
    """The noise scale, then what was found, worst first."""
    lines = [noise_sentence(diagnosis.evidence.noise)]
    for finding in diagnosis.findings:
        lines += [
            f"{finding.severity}: {TITLES[finding.cause]} ({finding.cause})",
            f"  {finding.evidence}",
            f"  {finding.fix}",
        ]
    if not diagnosis.findings:
        lines.append(f"nothing found; {len(CHECKS) - len(diagnosis.unknown)} causes looked for")
    return "\n".join(lines)


def noise_sentence(noise: NoiseEstimate | None) -> str:
    """The noise scale with its interval and verdict.

    >>> noise_sentence(NoiseEstimate(120.0, 90.0, 160.0, enough=True))
    'noise scale 120 samples (95 %: 90 to 160): enough'
    """
    if noise is None:
        return "noise scale: not measured; see `scalewise doctor` for what was in the way"
    value, low, high = ("?" if one is None else shown(one) for one in (noise.value, noise.low, noise.high))
    return f"noise scale {value} samples (95 %: {low} to {high}): {noise.verdict}"
