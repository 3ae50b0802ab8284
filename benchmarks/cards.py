"""Remedies that `scalewise compare` has no row for, on digits, over seeds: figures for the method cards.

python benchmarks/cards.py --seeds 5 > benchmarks/results/<date>-cards.md
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import scalewise as sw
from report import conditions
from scalewise.stats.interval import paired_difference, spread

ONE, ONE_NORMED, ONE_STEP = "one worker", "one worker, batch norm", "one worker, rate falls twice by 4"


@dataclass(frozen=True)
class Row:
    """A name, the row it is compared with, whether the model has batch norm, and what is changed in the recipe."""

    name: str
    against: str
    normed: bool
    changes: dict[str, Any]


def row(name: str, against: str = ONE, normed: bool = False, **changes: Any) -> Row:  # noqa: ANN401
    return Row(name, against, normed, changes)


ROWS = [
    row(ONE),
    row(ONE_NORMED, normed=True),
    row(ONE_STEP, schedule="step", drop=4),
    row("one worker, global batch grows twice by 4", ONE_STEP, schedule="growth", drop=4),
    row("8 workers, nothing else", workers=8),
    row("8, linear rule", workers=8, lr_rule="linear"),
    row("8, linear rule, warm-up", workers=8, lr_rule="linear", warmup_epochs=1.0),
    row("8, square-root rule", workers=8, lr_rule="sqrt"),
    row("8, square-root rule, warm-up", workers=8, lr_rule="sqrt", warmup_epochs=1.0),
    row("8, Muon", workers=8, optimizer="muon", lr=0.003, lr_rule="sqrt", warmup_epochs=1.0),
    row("8, batch norm of each worker (32 samples)", ONE_NORMED, True, workers=8),
    row("8, batch norm of ghost groups (8 samples)", ONE_NORMED, True, workers=8, batch_norm="ghost:8"),
    row("8, batch norm of all workers (256 samples)", ONE_NORMED, True, workers=8, batch_norm="sync"),
]


def trained(one: Row, seed: int) -> sw.Result:
    """One training of a row, on this process, with one thread."""
    task = sw.load_task("digits", ["bn=true"] if one.normed else [])
    *_, result = sw.train(task, task.recipe.replace(seed=seed, threads=1, **one.changes))
    assert isinstance(result, sw.Result)
    return result


def line(one: Row, results: dict[str, dict[int, sw.Result]]) -> str:
    """A row of the table."""

    def accuracies(name: str) -> dict[int, float]:
        return {seed: 100 * result.test["accuracy"] for seed, result in results[name].items()}

    found, example = spread(list(accuracies(one.name).values())), next(iter(results[one.name].values()))
    assert found.mean is not None
    difference = paired_difference(accuracies(one.name), accuracies(one.against)) if one.name != one.against else None
    against = f"{difference.value:+.2f} ({difference.low:+.2f} to {difference.high:+.2f})" if difference else ""
    recipe = ", ".join(f"{name} {value}" for name, value in one.changes.items())
    shown = f"{found.mean:.2f} ± {found.std or 0.0:.2f}"
    return f"| {one.name} | {recipe} | {example.steps} | {shown} | {against} | {one.against if against else ''} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    seeds = parser.parse_args().seeds
    under = conditions(f"python benchmarks/cards.py --seeds {seeds}", 1, 1, datetime.now().astimezone())
    results = {one.name: {seed: trained(one, seed) for seed in range(seeds)} for one in ROWS}
    print(f"# Remedies on digits, {under.date[:10]}\n\n- command: `{under.command}`, commit {under.commit}")
    print(f"- torch {under.versions['torch']}; {under.cpu}, {under.cores} cores, CPU, 1 thread\n")
    print(
        f"n = {seeds} seeds; test accuracy, mean ± standard deviation; differences in points, paired by seed, 95 %.\n"
    )
    print("| row | changed in the recipe | steps | test accuracy, % | difference | from |\n|---|---|---|---|---|---|")
    for one in ROWS:
        print(line(one, results))


if __name__ == "__main__":
    main()
