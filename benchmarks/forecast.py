"""How well `forecast` looks ahead: on curves of which everything is known, and on parts of a real data set.

    python benchmarks/forecast.py synthetic --trials 1000
    python benchmarks/forecast.py real fashion-mnist --epochs 2 --seeds 2 --data DATA --runs FOLDER

The second part trains on shares of the data and then on all of it; it goes on where it was when it is started again
with the same --runs. Writes benchmarks/results/<date>-forecast.md and .json, which keep the other part's numbers.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from forecast_synthetic import AHEAD, CLEAR, trial
from report import add_part, described

SHARES = (0.02, 0.04, 0.08, 0.16, 0.25)
RESULTS = Path(__file__).parent / "results"


def synthetic(trials: int) -> dict[str, Any]:
    """Coverage of the prediction interval, and how often γ was flagged rightly."""
    found = [trial(seed) for seed in range(trials)]
    judged = [outcome for outcome in found if outcome.flagged_rightly is not None]
    return {
        "trials": trials,
        "ahead": AHEAD,
        "covered": _share([outcome.covered for outcome in found]),
        "covered_truth": _share([outcome.covered_truth for outcome in found]),
        "judged": len(judged),
        "flagged_rightly": _share([bool(outcome.flagged_rightly) for outcome in judged]),
        "called_identified": sum(outcome.identified for outcome in judged),
        "called_identified_rightly": sum(outcome.identified and bool(outcome.flagged_rightly) for outcome in judged),
    }


def _share(values: Sequence[bool]) -> float:
    return sum(values) / len(values)


def real(name: str, epochs: float, seeds: int, data: Path | None, runs: Path) -> dict[str, Any]:
    """Errors on shares of a task's data, the curve through them, and the error with all of it."""
    from scalewise.engine.store.folder import RunRecipe
    from scalewise.runs.forecast import on_shares
    from scalewise.stats.outlook import Points, outlook
    from scalewise.tasks.load import load_task

    task = load_task(name, (), data)
    recipe = task.recipe.replace(epochs=epochs, threads=1)
    runs.mkdir(parents=True, exist_ok=True)
    run = RunRecipe(name, [], recipe, [])
    parts = on_shares(task, run, SHARES, seeds, runs, notify=_say)
    whole = on_shares(task, run, (1.0,), seeds, runs, notify=_say)
    curve = outlook(Points("samples", tuple((one.samples, one.error) for one in parts))).curve
    expected, measured = curve.at(whole[0].samples), math.exp(sum(math.log(one.error) for one in whole) / len(whole))
    assert expected.value is not None
    return {
        "task": name,
        "epochs": epochs,
        "seeds": seeds,
        "parts": [asdict(one) for one in parts],
        "whole": [asdict(one) for one in whole],
        "alpha": asdict(curve.alpha),
        "beta": asdict(curve.beta),
        "gamma": asdict(curve.gamma) | {"identified": curve.identified},
        "expected": asdict(expected),
        "measured": measured,
        "relative_error": expected.value / measured - 1,
    }


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def to_markdown(found: dict[str, Any]) -> str:
    """The results file."""
    lines = ["# Forecast", ""]
    if "synthetic" in found:
        lines += _synthetic_lines(found["synthetic"])
    for part in found.get("real", {}).values():
        lines += _real_lines(part)
    return "\n".join(lines) + "\n"


def _synthetic_lines(part: dict[str, Any]) -> list[str]:
    return [
        "## Synthetic curves",
        "",
        *_conditions(part),
        f"- {part['trials']:,} curves α·m^β + γ: 6 to 9 doublings of m, 1 to 3 seeds, β −0.15 to −0.7, γ 0 in a third",
        "  of them, else up to 95 % of the last error; relative noise 0.5 to 6 % (benchmarks/forecast_synthetic.py)",
        f"- the 95 % interval at {part['ahead']:g} times the largest size covered a new measurement in "
        f"{100 * part['covered']:.1f} % and the true error in {100 * part['covered_truth']:.1f} %",
        f"- γ flagged rightly in {100 * part['flagged_rightly']:.1f} % of the {part['judged']} curves in which that is",
        f"  no matter of luck: γ is more than {CLEAR:g} half-widths of an ideal interval (can be known) or less than",
        f"  1 ÷ {CLEAR:g} of one (it cannot). Called identified: {part['called_identified']}, rightly "
        f"{part['called_identified_rightly']}",
        "",
    ]


def _real_lines(part: dict[str, Any]) -> list[str]:
    expected = part["expected"]
    rows = [f"| {one['samples']:,} | {one['seed']} | {one['epochs']:.1f} | {one['error']:.4f} |"
            for one in (*part["parts"], *part["whole"])]  # fmt: skip
    return [
        f"## {part['task']}",
        "",
        *_conditions(part),
        f"- {part['seeds']} seeds; {part['epochs']:g} epochs on all samples, as √ more on fewer",
        f"- expected with all samples: {expected['value']:.4f} ({expected['low']:.4f} to {expected['high']:.4f}), "
        f"measured {part['measured']:.4f}: {100 * part['relative_error']:+.1f} %",
        f"- exponent {part['beta']['value']:.3f} ({part['beta']['low']:.3f} to {part['beta']['high']:.3f}); γ "
        f"{part['gamma']['value']:.4f}, {'identified' if part['gamma']['identified'] else 'unidentified'}",
        "",
        "| samples | seed | epochs | test error |",
        "|---|---|---|---|",
        *rows,
        "",
    ]


def _conditions(part: dict[str, Any]) -> list[str]:
    return [f"- {line}" for line in part["conditions"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parts = parser.add_subparsers(dest="part", required=True)
    curves = parts.add_parser("synthetic")
    curves.add_argument("--trials", type=int, default=1000)
    trained = parts.add_parser("real")
    trained.add_argument("task")
    trained.add_argument("--epochs", type=float, default=6.0)
    trained.add_argument("--seeds", type=int, default=3)
    trained.add_argument("--data", type=Path)
    trained.add_argument("--runs", type=Path, required=True)
    given = parser.parse_args()
    if given.part == "synthetic":
        command = f"python benchmarks/forecast.py synthetic --trials {given.trials}"
        add_part(
            given.results,
            "forecast",
            ["synthetic"],
            synthetic(given.trials) | {"conditions": described(command)},
            to_markdown,
        )
        return
    command = f"python benchmarks/forecast.py real {given.task} --epochs {given.epochs:g} --seeds {given.seeds} …"
    part = real(given.task, given.epochs, given.seeds, given.data, given.runs)
    add_part(given.results, "forecast", ["real", given.task], part | {"conditions": described(command)}, to_markdown)


if __name__ == "__main__":
    main()
