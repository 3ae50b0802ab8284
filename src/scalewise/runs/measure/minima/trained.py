"""A run of a recipe, trained to its end in a folder of its own; one that is there already is not trained again."""

from __future__ import annotations

from collections.abc import Callable

from scalewise.engine.loop import Training
from scalewise.engine.placement import DeviceName, Placement
from scalewise.engine.store.checkpoint import load_newest
from scalewise.engine.store.folder import RunFolder, RunRecipe, begin, check_same, read_recipe, stored_records
from scalewise.tasks.task import Task


def train_in(
    folder: RunFolder,
    task: Task,
    run: RunRecipe,
    device: DeviceName = "auto",
    notify: Callable[[str], None] = lambda line: None,
) -> None:
    """Train, or go on where the folder's run was stopped; afterwards it holds the model.

    Arguments:
        folder: of the run.
        task, run: what is learned, and how.
        device: where.
        notify: told what is being done.
    """
    if folder.recipe.is_file():
        check_same(read_recipe(folder), run, folder, task.validation is not None)
        if folder.result.is_file():
            return
    where = Placement(device=device)
    with Training(task, run.recipe, where, run.derived, hold_out=run.hold_out, alone=True) as training:
        notify(f"training {training.planned_steps or 'some'} steps in {folder.path.name}")
        if folder.recipe.is_file():
            load_newest(training, folder.checkpoints)
        folder.path.mkdir(parents=True, exist_ok=True)
        begin(folder, run, training.team.device.type, 1)
        for _ in stored_records(training, folder, None):
            pass
