"""`scalewise forecast`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from scalewise.cli.flags import DataFolder, Device, Json, Quiet, Settings
from scalewise.cli.inputs import OUTPUT, asking, options, recipe_flags, show
from scalewise.errors import TargetMissed
from scalewise.present.stories import forecast as stories
from scalewise.runs.request import request_from

RecipeFlags = recipe_flags(__name__, without=("workers", "target", "patience", "steps", "lr_rule", "seed"))


def forecast(
    source: str,
    /,
    *,
    flags: Annotated[RecipeFlags, Parameter(name="*")] = RecipeFlags(),  # type: ignore[valid-type]  # noqa: B008
    target: float | None = None,
    shares: str | None = None,
    sizes: str | None = None,
    seeds: int | None = None,
    set: Settings = None,
    plan: Path | None = None,
    data: DataFolder = None,
    device: Device = "auto",
    out: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
    resume: Annotated[str | None, Parameter(group=OUTPUT)] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Say how much data, or how large a model, an error takes: the power law through errors at smaller sizes.

    scalewise forecast errors.csv --target 0.05
    scalewise forecast fashion-mnist --shares 2,4,8,16,25 --seeds 3 --target 0.08 --plan runs/plan-fashion-mnist-…
    scalewise forecast mlp --sizes hidden=8,16,32,64,128

    Arguments:
        source: A CSV file with columns samples (or parameters) and error; or a task, which is then trained on shares of
            its data: a built-in name, path/to/file.py (its task() function), or package.module:function.
        target: The error to come down to.
        shares: Percentages of the training data to train on; 2,4,8,16,32 by default.
        sizes: Models to train instead, as values of a setting of the task's function: width=16,32,64.
        seeds: Trainings at each size; 3 by default.
        plan: The folder of a plan of this task: what the target takes is then said for each of its numbers of workers.
        out: Folder of the trainings; by default runs/forecast-<task>-<time>. A table of errors leaves one only where
            this is given.
        resume: The folder of a forecast to resume, or auto for the newest one of this task (or --out).
    """
    asked = options(locals(), "source")
    from scalewise.runs.forecast import ForecastRequest, answer

    request = request_from(ForecastRequest, source, asked)
    with asking(quiet, source, data) as view:
        found = answer(request, view.notify)
    document = show(stories.forecasting_story, found.to_json(), found.folder, view.console, json)
    if found.outlook.unreachable:
        raise TargetMissed(stories.answer(document))
    return 0
