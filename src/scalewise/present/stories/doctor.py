"""What the doctor finds in trainings."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

from scalewise.doctor.diagnose import CHECKS, TITLES, Diagnosis, diagnose_folder
from scalewise.present.stored import Run, is_safe
from scalewise.present.story import Block, Fact, Finding, Section, Story
from scalewise.present.words import count, number, sentence


def diagnosis_story(diagnosis: Diagnosis) -> Story:
    """One diagnosis: what was looked at, what was found, and what could not be looked for."""
    evidence = diagnosis.evidence
    workers = f"{count(evidence.workers, 'worker')} × {number(evidence.worker_batch)}"
    size = f"{workers} = global batch {number(evidence.global_batch)}, {evidence.steps:,} steps, {evidence.optimizer}"
    looked, found = count(len(CHECKS) - len(diagnosis.unknown), "cause"), len(diagnosis.findings)
    unknown = [f"not looked for: {cause}: {reason}" for cause, reason in diagnosis.unknown.items()]
    return Story(
        question=f"Why did {evidence.name} lose accuracy?",
        answer=f"{found} of {looked} found." if found else f"✓ Nothing found: {looked} looked for.",
        facts=(Fact("run", size),),
        sections=(Section("", tuple(findings(diagnosis))),) if diagnosis.findings else (),
        notes=tuple(unknown),
        tone="warning" if found else "good",
    )


def findings(diagnosis: Diagnosis, prefix: str = "") -> list[Finding]:
    """The findings of a diagnosis, worst first."""
    return [
        Finding(prefix + TITLES.get(one.cause, one.cause), one.severity, sentence(one.evidence), one.fix, one.cause)
        for one in diagnosis.findings
    ]


def findings_section(runs: Sequence[Run], inside: Path | None) -> Section | None:
    """The findings of every run; a run of one worker is what the others are held against."""
    single = next((run for run in runs if run.recipe.number("recipe", "workers") == 1), None)
    blocks: list[Block] = []
    for run in runs:
        same_task = single is not None and run.recipe.text("task") == single.recipe.text("task")
        reference = single if same_task and run is not single else None
        blocks += _of_run(run, reference, inside, f"{run.name}: " if len(runs) > 1 else "")
    lead = "" if single is None or len(runs) == 1 else f"Other runs are compared with {single.name}, of one worker."
    return Section("What the doctor says", tuple(blocks), lead) if blocks else None


def _of_run(run: Run, reference: Run | None, inside: Path | None, prefix: str) -> list[Block]:
    found = _diagnosis(run, reference, inside)
    if found is None:
        return [f"{prefix}the records could not be diagnosed."] if run.records else []
    if not found.findings:
        looked = count(len(CHECKS) - len(found.unknown), "cause")
        return [f"{prefix}{looked} of lost accuracy looked for, none found."]
    return [*findings(found, prefix)]


def _diagnosis(run: Run, reference: Run | None, inside: Path | None) -> Diagnosis | None:
    """The doctor's findings, or nothing for files that only look like a run's."""
    for one in (run, reference):
        if one is not None and not is_safe(one.path, inside or one.path):
            return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of arithmetic with absurd numbers
            return diagnose_folder(run.path, None if reference is None else reference.path)
    except Exception:  # anything may be in a run folder, and no page may fail over it
        return None
