"""A step computed again, and where two runs part: what `replay` and `bisect` show in a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from scalewise.present.stored import Stored
from scalewise.present.story import Block, Cell, Fact, Section, Story, Table, Tone, kept
from scalewise.present.words import count, listed, number

SHOWN_SAMPLES, SHOWN_PARAMETERS, SHOWN_LETTERS = 8, 12, 24
STAGES = {
    "start": "the weights before it",
    "samples": "the training samples",
    "loss": "the loss",
    "gradient": "the gradient",
    "update": "the weights after its update",
}
WHY = {
    "seed": "other start weights, another order of the samples, other random numbers",
    "threads": "sums are taken in another order",
    "cpu_capability": "another instruction set: other kernels",
    "torch": "another version: other kernels",
    "machine": "another processor architecture: other kernels",
    "device": "another device: other kernels",
    "training data": "the data are not the same",
    "exact": "one of them gave exactness up (--reduce allreduce)",
}
NOT_RECORDED = (
    "Nothing that was recorded differs: look for a silent fault, for a task whose code or data changed between the "
    "two, or for one that is not deterministic."
)


def replay_story(document: Stored) -> Story:
    """One step: what was done, whether it is what the run recorded, and every worker's part."""
    start, trained = document.number("start"), document.number("trained_steps")
    begun = f"the checkpoint of step {number(start)}" if start else "the start of training"
    said, tone, differing = _verdict(document)
    workers = document.parts("workers")
    return Story(
        question=f"Is step {number(document.number('step'))} of {document.text('run')} what the run recorded?",
        answer=said,
        facts=(Fact("computed", f"from {begun}, {number(trained)} steps trained to get there"),),
        sections=kept(
            Section("What differs", tuple(Cell(line, "bad") for line in differing)) if differing else None,
            Section("Workers", (_workers(workers),)) if workers else None,
            Section("Gradients", (_parameters(workers),)) if workers else None,
        ),
        tone=tone,
    )


def _verdict(document: Stored) -> tuple[str, Tone, list[str]]:
    """The answer, its tone, and the numbers that differ."""
    matches = document.flag("matches")
    if document.text("failure"):
        told = "as the run recorded" if matches else "which the run did not record"
        return f"✗ {document.text('failure')}; {told}.", "bad", []
    if matches is None:
        return "The run recorded nothing of this step: there is nothing to compare with.", "warning", []
    if matches:
        return "✓ Bit for bit what the run recorded: loss and gradient norm.", "good", []
    reason = "" if document.flag("exact") else " (the run was not exact, so that was to be expected)"
    then, now = document.part("recorded"), document.part("recomputed")
    pairs = [(name, then.part(name), value) for name, value in now.items()]
    lines = [
        f"{name}: recorded {old.shown()}, now {new.shown()}"
        for name, old, new in pairs
        if old.value is not None and old.value != new.value
    ]
    return f"✗ Not what the run recorded{reason}.", "bad", lines


def _workers(workers: Sequence[Stored]) -> Table:
    rows = []
    for one in workers:
        samples = [sample.shown() for sample in one.parts("samples")]
        more = f", … {len(samples)} in all" if len(samples) > SHOWN_SAMPLES else ""
        numbers = one.number("loss"), one.number("gradient_norm")
        shown = (number(one.number("worker")), *map(_norm, numbers), ", ".join(samples[:SHOWN_SAMPLES]) + more)
        broken = one.parts("not_finite") or numbers[0] is None
        rows.append(tuple(Cell(text, "bad") for text in shown) if broken else shown)
    return Table(("worker", "loss", "gradient norm", "training samples"), tuple(rows), "Workers", words=frozenset({3}))


def _parameters(workers: Sequence[Stored]) -> Table:
    """The largest gradients, and those that are not finite, over the workers."""
    broken = {name.text() for one in workers for name in one.parts("not_finite")}
    names = [name for name, _ in workers[0].part("parameters").items()]
    norms = {name: [(one.number("parameters", name), one.number("worker")) for one in workers] for name in names}
    largest = {
        name: max(found, key=lambda one: math.inf if one[0] is None else one[0]) for name, found in norms.items()
    }
    order = sorted(names, key=lambda name: (name not in broken, -(largest[name][0] or 0.0)))
    rows: list[tuple[str | Cell, ...]] = []
    for name in order[:SHOWN_PARAMETERS]:
        smallest = min((norm for norm, _ in norms[name] if norm is not None), default=None)
        cells = name, _norm(smallest), _norm(largest[name][0]), number(largest[name][1])
        rows.append(tuple(Cell(cell, "bad") for cell in cells) if name in broken else cells)
    rest = len(order) - SHOWN_PARAMETERS
    legend = f"… and {count(rest, 'smaller one')}." if rest > 0 else ""
    return Table(("gradient of", "smallest norm", "largest norm", "of worker"), tuple(rows), "Gradients", legend=legend)


def _norm(value: float | None) -> str:
    return "not finite" if value is None else number(value)


def bisect_story(document: Stored) -> Story:
    """Two runs: what was compared, where they part, and why that may be."""
    left, right = (one.text() for one in document.parts("runs")[:2])
    differ = bool(document.flag("differ"))
    compared, stored = document.number("compared_steps"), len(document.parts("checkpoints", "same"))
    step, fields = document.number("record", "step"), document.part("record", "fields").items()
    again = _recomputed(document)
    rows = tuple((name, *(side.shown() for side in pair.parts()[:2])) for name, pair in fields)
    table = Table(("field", "left", "right"), rows, "Records", words=frozenset({1, 2}))
    return Story(
        question="Where do the two runs part?",
        answer=_where(document) if differ else _same(compared, stored),
        facts=(Fact("left", left), Fact("right", right)),
        sections=kept(
            Section(f"Recorded in step {number(step)}", (table,)) if differ and rows else None,
            Section("", (Cell(again, "dim"),)) if differ and again else None,
            _reasons(document, differ),
        ),
        problems=tuple(problem.text() for problem in document.parts("problems")),
        tone="bad" if differ else "good" if compared or stored else "warning",
    )


def _same(compared: float | None, stored: int) -> str:
    if not compared and not stored:
        return "They have no step in common: there is nothing to compare."
    weights = f", and the stored weights of {stored}," if stored else ""
    return f"✓ They do not differ: the records of {count(compared, 'step')}{weights} are the same."


def _where(document: Stored) -> str:
    step, tensor, stage = number(document.number("step")), document.text("tensor"), document.text("stage")
    if stage:
        worker = document.number("worker")
        who = "" if worker is None else f", worker {number(worker)}"
        what = "" if not tensor else f" of {tensor}" if stage == "gradient" else f": {tensor}"
        return f"✗ First in step {step}{who}, in {STAGES.get(stage, stage)}{what}."
    stored = document.number("checkpoints", "different") == document.number("step")
    return f"✗ First seen in step {step}{f', tensor {tensor}' if stored and tensor else ''}."


def _recomputed(document: Stored) -> str:
    """Which of the runs gives here what it gave there."""
    if document.text("stage"):
        return f"Computed again here, up to step {number(document.number('step'))}: they part as said above."
    matches = [one.flag() for one in document.parts("reproduced")]
    if not matches:
        return ""
    names = [name for name, same in zip(("left", "right"), matches, strict=False) if same is False]
    if not names:
        return "Computed again here, both give the same."
    return f"Computed again here, the step is the same for both, and not what {listed(names)} recorded."


def _reasons(document: Stored, differ: bool) -> Section | None:
    reasons = document.parts("reasons")
    if not reasons:
        return Section("Likely reason", (Cell(NOT_RECORDED, "warning"),)) if differ else None
    rows = tuple(
        (one.text("what"), _short(one.part("left")), _short(one.part("right")), WHY.get(one.text("what"), ""))
        for one in reasons
    )
    table: Block = Table(("what", "left", "right", "because"), rows, "Reasons", words=frozenset({1, 2, 3}))
    return Section("Likely reason" if differ else "Also different, without effect so far", (table,))


def _short(value: Stored) -> str:
    text = value.shown()
    return text if len(text) <= SHOWN_LETTERS else text[: SHOWN_LETTERS - 1] + "…"
