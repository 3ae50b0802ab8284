"""`scalewise measure`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from scalewise.cli.flags import DataFolder, Device, Json, Quiet, Settings, TaskName
from scalewise.cli.inputs import OUTPUT, PLACEMENT, asking, options, recipe_flags, show
from scalewise.errors import TargetMissed, TooLittleMemory
from scalewise.present.stories.measure import measurement_story
from scalewise.runs.measure.request import MeasureRequest, Part, Verify
from scalewise.runs.request import request_from

RecipeFlags = recipe_flags(__name__, without=("target", "patience"))


def measure(
    task: TaskName,
    /,
    *,
    flags: Annotated[RecipeFlags, Parameter(name="*")] = RecipeFlags(),  # type: ignore[valid-type]  # noqa: B008
    set: Settings = None,
    recipe: Path | None = None,
    verify: Verify | None = None,
    target: float | None = None,
    seeds: int | None = None,
    most_seeds: int | None = None,
    sharpness: Annotated[bool, Parameter(negative=())] = False,
    weights: Path | None = None,
    between: tuple[Path, Path] | None = None,
    plane: str | None = None,
    samples: int = 1024,
    layers: Annotated[bool, Parameter(negative=())] = False,
    skip: Annotated[list[Part] | None, Parameter(negative=())] = None,
    data: DataFolder = None,
    memory: Annotated[str | None, Parameter(group=PLACEMENT)] = None,
    processes: Annotated[int | None, Parameter(group=PLACEMENT)] = None,
    device: Device = "auto",
    out: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
    resume: Annotated[str | None, Parameter(group=OUTPUT)] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Measure how far a model can scale: noise scale, critical batch, largest worker batch that fits, throughput.

    scalewise measure digits --workers 8
    scalewise measure digits --workers 8 --verify sweep --seeds 5
    scalewise measure cifar10 --memory 4GB
    scalewise measure digits --sharpness --between runs/small runs/large --plane random --skip noise --skip memory

    Arguments:
        recipe: A JSON file to start from instead of the task's own recipe.
        verify: Measure the critical batch directly as well, by training: branch (from checkpoints, at several global
            batches) or sweep (steps to a target loss over global batches).
        target: The validation loss that a sweep trains to; by default one that the recipe reaches.
        seeds: Runs of --verify at each global batch; by default 3 of branches, 5 of a sweep, which adds as many as it
            takes to know the median of their steps to 3 %.
        most_seeds: Runs of a sweep at each global batch at most; by default 64.
        sharpness: Measure how sharp the minimum is (Keskar et al. 2017), in the full space and in a random subspace.
        weights: The run folder, or its checkpoint, whose sharpness is measured; by default those of --between, or a run
            of this recipe that is trained for it.
        between: Two run folders of this task: the loss on the line between their weights.
        plane: With --between, the loss on a plane as well, in a third direction: a third run folder, or random.
        samples: Training samples that sharpness and the loss between runs are means over.
        layers: The noise scale of every layer too.
        skip: A part to leave out; may be repeated.
        memory: The memory of a machine, as in 4GB, for the largest worker batch; by default what is free here.
        processes: Processes that share that memory; 1 by default.
        out: Folder of the measurement; by default runs/measure-<task>-<time>.
        resume: The folder of a measurement to resume, or auto for the newest one of this task (or --out): runs that it
            holds are not trained again.
    """
    request = request_from(MeasureRequest, task, options(locals()))
    with asking(quiet, task, data) as view:
        from scalewise.runs.measure.measure import answer

        found = answer(request, view.notify)
    show(measurement_story, found.to_json(), found.folder, view.console, json)
    if found.missed is not None:
        raise TargetMissed(found.missed)
    if found.unfinished is not None:
        raise TooLittleMemory(found.unfinished)
    return 0
