"""The results of benchmarks/noise.py as a page for people."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def page(document: Mapping[str, Any], date: str) -> str:
    lines = [f"# The noise scale: is it right, and what does it cost? {date}", ""]
    for part, content in document.items():
        title, note, table = PARTS[part]
        under = content["conditions"]
        dirty = ", with changes that are not committed" if under["dirty"] else ""
        lines += [f"## {title}", "", note, ""]
        lines += [*table(content["rows"]), ""]
        lines += [
            f"`{under['command']}`; commit {under['commit']}{dirty}; Python {under['python']}, torch "
            f"{under['versions']['torch']}; {under['cpu']}, {under['cores']} cores, {under['threads']} thread; load "
            f"{under['load']:.1f} at the start",
            "",
        ]
    return "\n".join(lines)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (headings, ["---"] * len(headings), *rows)]


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _estimate(found: Row | None) -> str:
    if found is None:
        return "–"
    high = "∞" if found["high"] is None else _number(found["high"])
    return f"{_number(found['value'])} ({_number(found['low'])}–{high})"


def _error(found: Row | None) -> str:
    return "–" if found is None or found["relative_error"] is None else f"{100 * found['relative_error']:+.1f} %"


def coverage(rows: Sequence[Row]) -> list[str]:
    frozen = [
        [*(str(row[name]) for name in ("steps", "groups", "dimensions", "noise_scale", "trials")), *_shares(row)]
        for row in rows
        if row["gradients"] == "frozen"
    ]
    names = ("steps", "groups", "dimensions", "rate", "deviation", "trials")
    moving = [[*(str(row[name]) for name in names), *_shares(row)] for row in rows if row["gradients"] == "moving"]
    shares = ["covered", "unbounded", "enough"]
    return [
        *_table(["steps", "groups", "dimensions", "noise scale ÷ global batch", "trials", *shares], frozen),
        "",
        "SGD on a quadratic whose noise grows with the distance; the truth is the window's ratio of means.",
        "",
        *_table([*names, *shares], moving),
    ]


def _shares(row: Row) -> list[str]:
    return [f"{100 * row[name]:.1f} %" for name in ("covered", "unbounded", "enough")]


def checkpoints(rows: Sequence[Row]) -> list[str]:
    headings = ["task", "step", "per-sample truth", "all groups pooled", "error", "steps of 8 groups", "error"]
    headings += ["preconditioned truth", "pooled", "error"]
    cells = [
        [
            row["task"],
            str(row["step"]),
            _number(row["truth"]),
            f"{_estimate(row['pooled'])}, {row['pooled_samples']:,} samples",
            _error(row["pooled"]),
            _estimate(row["steps"]),
            _error(row["steps"]),
            _number(row.get("preconditioned_truth")),
            _estimate(row.get("preconditioned")),
            _error(row.get("preconditioned")),
        ]
        for row in rows
    ]
    return _table(headings, cells)


def published(rows: Sequence[Row]) -> list[str]:
    lines: list[str] = []
    for row in rows:
        stages = [
            [stage["name"], str(stage["step"]), f"{stage['samples']:,}", _estimate(stage["noise_scale"])]
            for stage in row["stages"]
        ]
        lines += [f"{row['task']}, seed {row['seed']}, {row['steps']:,} steps, {row['seconds']} s in all", ""]
        lines += _table(["stage", "step", "samples looked at", "noise scale"], stages)
        lines += [f"| **average over steps** | | | **{_estimate(row['plain'])}** |", ""]
    return lines


def curvature(rows: Sequence[Row]) -> list[str]:
    return _table(
        [*rows[0]], [[value if isinstance(value, str) else _number(value) for value in row.values()] for row in rows]
    )


def overhead(rows: Sequence[Row]) -> list[str]:
    def ratio(found: Row) -> str:
        return f"{found['median']:.3f} ({found['low']:.3f}–{found['high']:.3f})"

    columns = ["without, again (control)", "with"]
    cells = [
        [
            row["case"],
            row["kind"],
            f"{row['step_milliseconds']:.1f}",
            str(row["with"]["n"]),
            *(ratio(row[c]) for c in columns),
        ]
        for row in rows
    ]
    return _table(["task × global batch", "loop", "step, ms", "n", *columns], cells)


def share(rows: Sequence[Row]) -> list[str]:
    def percent(found: Row) -> str:
        median, low, high = (100 * found[name] for name in ("median", "low", "high"))
        return f"{median:.2f} % ({low:.2f}–{high:.2f}), n = {found['n']} turns"

    cells = [[row["case"], row["kind"], f"{row['step_milliseconds']:.1f}", percent(row["share"])] for row in rows]
    return _table(["task × global batch", "loop", "step, ms", "share of the step"], cells)


FROZEN = (
    "Groups of 16 fresh samples at frozen weights of the task's own training against the gradient of every single "
    "sample (torch.func), corrected for the finite population. `NoiseScale` sees steps of 8 groups, and uses the "
    "second half of them."
)
PARTS: dict[str, tuple[str, str, Callable[[Sequence[Row]], list[str]]]] = {
    "coverage": (
        "Intervals",
        "Gaussian gradients with known mean and covariance; how often the 95 % interval held the truth, had no upper "
        "end, and was called enough.",
        coverage,
    ),
    "digits": ("digits against per-sample gradients", FROZEN, checkpoints),
    "chars": ("chars against per-sample gradients", FROZEN, checkpoints),
    "fashion": ("fashion-mnist against per-sample gradients", FROZEN, checkpoints),
    "mnist": (
        "fashion-mnist, beside MNIST's published figures",
        "McCandlish et al. (2018): critical batch of MNIST 20 at the start and 200 on average. MNIST's own files are "
        "not here, so fashion-mnist stands in for it: as many images of the same size, but harder to tell apart, and "
        "another network.",
        published,
    ),
    "cifar": (
        "CIFAR-10, beside its published figures",
        "McCandlish et al. (2018): noise scale 400 at the start and 2,000 on average, critical batch 300 and 900; "
        "another network.",
        published,
    ),
    "curvature": (
        "Preconditioned forms beside the curvature",
        "In samples. `curvature, adam` is tr(PHPΣ) ÷ GᵀPHPG with Gauss and Newton's H: what a larger batch is worth to "
        "Adam's step. `root` multiplies gradients by √P, `whole` by P, with v̂ at least that share of its mean over the "
        "tensor. `root, floor 0.01` is the form in use. One checkpoint each, 89 groups of 16: no spread.",
        curvature,
    ),
    "overhead": (
        "What it costs",
        "Processor time of a step relative to one without the noise scale, off and on by turns of 12 steps within one "
        "training: median over n cycles (its 95 % interval).",
        overhead,
    ),
    "share": (
        "The part of a step that passes inside of what measures",
        "The functions and hooks that take norms and average them, timed from inside (processor time), over turns of 8 "
        "steps: median (its 95 % interval).",
        share,
    ),
}
