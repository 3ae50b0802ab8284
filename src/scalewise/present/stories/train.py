"""One or several trainings: how well they learned, the curves, the noise scale, and why one may be worse."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from scalewise.present.charts import Axis, Mark, Series, line_chart, series_of, thinned
from scalewise.present.stored import Run, Stored
from scalewise.present.stories.doctor import findings_section
from scalewise.present.story import Block, Cell, Columns, Fact, Figure, Section, Story, Switch, Table, kept, table_of
from scalewise.present.words import (
    NOTHING,
    count,
    interval,
    metric,
    metrics,
    number,
    percent,
    rough,
    seconds,
    span,
    spelled,
)
from scalewise.records import SHARES
from scalewise.stats.critical_batch import efficiency

MOST_POINTS = 240
DERIVED = ("derived", "value", "because")
AGAINST = {"samples": "samples seen", "step": "step"}


def training_story(runs: Sequence[Run], inside: Path | None) -> Story:
    """The story of trainings, beside each other if there are several."""
    question, answer = (one_run if len(runs) == 1 else several_runs)(runs)
    return Story(
        name=", ".join(run.name for run in runs),
        question=question,
        answer=answer,
        facts=facts(runs[0].document) if len(runs) == 1 else (),
        sections=kept(
            runs_section(runs) if len(runs) > 1 else None,
            findings_section(runs, inside),
            curves_section(runs),
            noise_section(runs),
            *(recipe_section(run, len(runs) > 1) for run in runs),
            *(environment_section(run, len(runs) > 1) for run in runs),
        ),
        problems=tuple(f"{run.name}: {problem}" for run in runs for problem in run.problems),
    )


def main_metric(run: Run) -> str:
    """The name of the metric that counts: the first one on test data that is not the loss."""
    parts = [run.document.part("test"), run.document.part("train")]
    parts += [record.part("train") for record in run.of("epoch")[-1:]]
    names = [name for part in parts for name, _ in part.items()]
    return next((name for name in names if name != "loss"), "loss")


def outcome(run: Run) -> str:
    """How a training came out, in a clause."""
    name = main_metric(run)
    tested = run.document.number("test", name)
    if tested is not None:
        taken = f"{count(run.document.number('steps'), 'step')} in {seconds(run.document.number('seconds'))}"
        return f"test {spelled(name)} {metric(name, tested)} after {taken}"
    failed = run.of("failure")
    if failed:
        return f"it failed: {failed[-1].text('reason')}"
    steps = run.of("step")
    if not steps:
        return "no step has been recorded yet"
    loss = number(steps[-1].number("loss"))
    return f"it has no result yet; at step {number(steps[-1].number('step'))} the training loss is {loss}"


def one_run(runs: Sequence[Run]) -> tuple[str, str]:
    """The question that a single training answers."""
    run = runs[0]
    task, workers = run.recipe.text("task"), run.recipe.number("recipe", "workers")
    who = "does one worker" if workers == 1 else f"do {number(workers)} workers"
    said = outcome(run)
    return f"How well {who} learn {task}?", f"{said[:1].upper()}{said[1:]}. {_worth(run)}".strip()


def several_runs(runs: Sequence[Run]) -> tuple[str, str]:
    """The question that several trainings answer."""
    name = main_metric(runs[0])
    known = [(run, run.document.number("test", name)) for run in runs]
    ended = [(run, value) for run, value in known if value is not None]
    question = f"How do these {len(runs)} runs compare?"
    if len(ended) < 2:
        return question, "; ".join(f"{run.name}: {outcome(run)}" for run in runs) + "."
    ranked = sorted(ended, key=lambda one: one[1], reverse=name in SHARES)
    (best, top), (last, bottom) = ranked[0], ranked[-1]
    answer = (
        f"{best.name} has the best test {spelled(name)}, {metric(name, top)}; {last.name} the worst, "
        f"{metric(name, bottom)}. One run of each says nothing about seeds: scalewise compare does."
    )
    return question, answer


def _worth(run: Run) -> str:

    noise, batch = run.document.number("noise_scale", "value"), run.document.number("global_batch")
    if not noise or not batch or noise <= 0:
        return ""
    return (
        f"The noise scale of {rough(noise)} samples says that each sample of a global batch of {number(batch)} is "
        f"worth {percent(efficiency(batch, noise))} of one in a very small one."
    )


def result_story(document: Stored, input_share: float = 0.0) -> Story:
    """The story of a training that has just ended; `input_share` of the steps' time was spent waiting for samples."""
    recipe = Stored({"task": document.text("task"), "recipe": {"workers": document.number("workers")}})
    question, answer = one_run([Run("", Path(), "train", document, recipe)])
    return Story(question, answer, facts(document, input_share))


def facts(result: Stored, input_share: float = 0.0) -> tuple[Fact, ...]:
    """What to read at a glance."""
    if not result.is_object:
        return ()
    spread = f"{number(result.number('workers'))} × {number(result.number('worker_batch'))}"
    processes = count(result.number("processes"), "process", "processes")
    place = f"on {processes}, {count(result.number('threads'), 'thread')} each"
    waited = f", {percent(input_share)} of a step waiting for samples" if input_share >= 0.01 else ""
    trained = f"{number(result.number('epochs'))} epochs, {number(result.number('samples'))} samples"
    found = [
        Fact("workers", spread, f"global batch {number(result.number('global_batch'))}, {place}"),
        Fact("optimizer", result.text("optimizer"), f"peak LR {number(result.number('lr', 'peak'))}"),
        Fact("steps", number(result.number("steps")), trained),
        Fact(
            "time",
            seconds(result.number("seconds")),
            f"{number(result.number('samples_per_second'))} samples/s{waited}",
        ),
        *(_measured(result, part) for part in ("train", "validation", "test") if result.part(part).items()),
        noise_fact(result.part("noise_scale")),
    ]
    if result.flag("exact") is not None:
        exact, same = ("exact", "the same") if result.flag("exact") else ("not exact", "close, not the same,")
        sha256 = f"sha256 {result.text('weights_sha256')[:16]}…"
        found.append(Fact("weights", exact, f"{sha256}, {same} on any number of processes"))
    return (*found, Fact("run", result.text("run"), place="terminal")) if result.text("run") else tuple(found)


def _measured(result: Stored, part: str) -> Fact:
    """The metric that counts on a part of the data, and the others."""
    values = {name: value.number() for name, value in result.part(part).items()}
    name = next((name for name in values if name != "loss"), "loss")
    others = metrics({other: value for other, value in values.items() if other != name})
    return Fact(f"{part} {spelled(name)}", metric(name, values[name]), others, "good" if part == "test" else "plain")


def noise_fact(noise: Stored) -> Fact:
    """The noise scale with its interval, or what to do to get one."""
    if not noise.is_object:
        return Fact("noise scale", "not measured", "it needs two or more workers, or --micro-batch")
    if noise.number("value") is None:
        return Fact("noise scale", "not known yet", "the gradient is not separated from its noise: train more steps")
    verdict = "" if noise.flag("enough") else "; not enough steps for a firm value"
    return Fact("noise scale", f"{rough(noise.number('value'))} samples", f"{ends(noise)}{verdict}")


def ends(part: Stored) -> str:
    """The interval of a value, with its level."""
    low, high = part.number("low"), part.number("high")
    return "no interval" if low is None and high is None else f"95 %: {span(low, high, rough)}"


def estimate(part: Stored) -> str:
    """A noise scale with its interval."""
    value, low, high = part.estimate()
    return f"{rough(value)} (no interval)" if value is not None and low is None else interval(value, low, high, rough)


def runs_section(runs: Sequence[Run]) -> Section:
    """The runs beside each other."""
    name = main_metric(runs[0])
    columns: Columns[Run] = {
        "run": lambda run: run.name,
        "workers": lambda run: number(run.recipe.number("recipe", "workers")),
        "global batch": _global_batch,
        "peak LR": lambda run: number(run.document.number("lr", "peak")),
        "steps": lambda run: number(run.document.number("steps")),
        "samples": lambda run: number(run.document.number("samples")),
        f"test {spelled(name)}": lambda run: metric(name, run.document.number("test", name)),
        "samples/s": lambda run: number(run.document.number("samples_per_second")),
        "noise scale": lambda run: (
            estimate(noise) if (noise := run.document.part("noise_scale")).is_object else NOTHING
        ),
        "weights": lambda run: run.document.text("weights_sha256")[:12],
    }
    return Section("Runs", (table_of(runs, columns, "The runs", ["weights"]),))


def _global_batch(run: Run) -> str:
    workers, batch = (run.recipe.number("recipe", name) for name in ("workers", "worker_batch"))
    return number(None if workers is None or batch is None else workers * batch)


def curves_section(runs: Sequence[Run]) -> Section | None:
    """Loss, metric and learning rate, against samples or steps."""
    name = main_metric(runs[0])
    choices = tuple((title, tuple(_curves(runs, key, title, name))) for key, title in AGAINST.items())
    if not any(figures for _, figures in choices):
        return None
    thin = any(len(run.of("step")) > MOST_POINTS for run in runs)
    lead = "Lines are means over neighbouring steps, the area behind them is their range." if thin else ""
    return Section("Curves", (Switch("Curves against", choices),), lead)


def _curves(runs: Sequence[Run], key: str, title: str, name: str) -> list[Figure]:
    """The charts against one thing."""
    steps = {run.name: run.of("step") for run in runs}
    epochs = {run.name: run.of("epoch") for run in runs}
    across = Axis(title)
    losses = [_series(label, found, key, "loss") for label, found in steps.items()]
    charts = [line_chart("Training loss", across, Axis("loss", log=_can_be_log(losses)), losses)]
    if name != "loss":
        learned = {}
        for part, word in (("train", "training"), ("validation", "validation")):
            labels = {run: word if len(runs) == 1 else f"{run}, {word}" for run in epochs}
            series = [_series(labels[run], epochs[run], key, part, name, kind="both") for run in epochs]
            learned[word] = [one for one in series if one.points]
        parts = " and ".join(word for word, found in learned.items() if found)
        titled = f"{spelled(name).capitalize()} by epoch, {parts} data"
        axis = Axis(spelled(name), share=name in SHARES)
        charts.append(line_chart(titled, across, axis, [*itertools.chain(*learned.values())]))
    rates = [_series(label, found, key, "lr") for label, found in steps.items()]
    charts.append(line_chart("Learning rate", across, Axis("learning rate", low=0.0), rates))
    return [*kept(*charts)]


def _can_be_log(series: Sequence[Series]) -> bool:
    values = [value for one in series for _, value in one.points]
    return bool(values) and min(values) > 0 and max(values) > 20 * min(values)


def _series(label: str, records: Sequence[Stored], key: str, *names: str, kind: str = "line") -> Series:
    """One number of the records, thinned to what can be seen."""
    points = series_of(label, records, key, names).points
    thin = thinned(points, MOST_POINTS)
    return Series(label, thin.points, thin.band, "both" if kind == "both" and len(points) <= 40 else "line")


def noise_section(runs: Sequence[Run]) -> Section | None:
    """The noise scale as training went on, beside the global batch."""
    measured = [(run, _series(run.name, run.of("step"), "samples", "noise_scale")) for run in runs]
    series = [Series(one.name, one.points, look=order) for order, (_, one) in enumerate(measured) if one.points]
    if not series:
        return None
    batches = {run.document.number("global_batch") for run, one in measured if one.points} - {None}
    marks = [Mark("y", batch, f"global batch {number(batch)}") for batch in sorted(b for b in batches if b)]
    figure = line_chart("Noise scale", Axis("samples seen"), Axis("samples", log=True), series, marks)
    lead = (
        "The noise scale estimates the critical batch: at a global batch of this size a sample is worth half of one in "
        "a very small batch. Where it is far below the global batch, more workers bring little."
    )
    return Section("Noise scale over training", kept(figure), lead)


def recipe_section(run: Run, named: bool) -> Section | None:
    """The recipe; first what was derived, with the reason."""
    stored = run.recipe
    fields = stored.part("recipe").items()
    if not fields:
        return None
    blocks: list[Block] = []
    reasons = tuple(derived_cells(stored))
    if reasons:
        blocks.append(Table(DERIVED, reasons, "What was derived", frozenset({1, 2})))
    own = dict(run.environment.part("task", "recipe").items())
    differ = {name: own[name].shown() for name, value in fields if name in own and own[name].value != value.value}
    rows = tuple((name, value.shown(), differ.get(name, "")) for name, value in fields)
    blocks.append(Table(("field", "value", "task's own"), rows, "Every field of the recipe", frozenset({1, 2})))
    task = " ".join([stored.text("task"), *(setting.shown() for setting in stored.parts("settings"))])
    return Section(f"Recipe{f' of {run.name}' if named else ''}", tuple(blocks), f"Task: {task}.", folded=True)


def derived_cells(stored: Stored) -> list[tuple[str, Cell, Cell]]:
    """What nobody gave, with the reason."""
    return [
        (one.text("field"), Cell(_value(one.part("value")), "strong"), Cell(one.text("reason"), "dim"))
        for one in stored.parts("derived")
    ]


def _value(stored: Stored) -> str:
    return stored.shown() if stored.number() is None else number(stored.number())


def environment_section(run: Run, named: bool) -> Section | None:
    """Versions, processor and placement."""
    plain = [(name, value.shown()) for name, value in run.environment.items() if not value.is_object]
    parameters, samples = run.environment.number("model", "parameters"), run.environment.number("task", "samples")
    plain += [] if parameters is None else [("model", count(parameters, "parameter"))]
    plain += [] if samples is None else [("training samples", f"{samples:,.0f}")]
    table = Table(("what", "value"), tuple(plain), "Environment", frozenset({1}))
    return Section(f"Environment{f' of {run.name}' if named else ''}", (table,), folded=True) if plain else None
