"""A diagnosis as a few lines of plain text, for the end of anyone's training script."""

from __future__ import annotations

from scalewise.doctor.diagnose import CHECKS, Diagnosis
from scalewise.doctor.evidence import shown
from scalewise.doctor.titles import TITLES
from scalewise.noise import NoiseEstimate

NOT_MEASURED = "noise scale: not measured; see `scalewise doctor` for what was in the way"


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
        return NOT_MEASURED
    value, low, high = ("?" if one is None else shown(one) for one in (noise.value, noise.low, noise.high))
    return f"noise scale {value} samples (95 %: {low} to {high}): {noise.verdict}"
