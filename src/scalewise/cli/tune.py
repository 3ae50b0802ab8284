"""`scalewise tune`."""

from __future__ import annotations

import contextlib
import json as to_json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from scalewise.cli.flags import DataFolder, Device, Json, Quiet, Settings, TaskName
from scalewise.cli.inputs import OUTPUT, PLACEMENT, download, leave_page, options, recipe_flags, show
from scalewise.present.live_compare import TuneView
from scalewise.present.stored import Stored
from scalewise.present.stories.tune import tuning_story
from scalewise.runs.request import request_from

if TYPE_CHECKING:
    from scalewise.runs.tune.tune import Event
    from scalewise.runs.tune.tuning import Tuning

RecipeFlags = recipe_flags(__name__, without=("workers", "seed"))


def tune(
    task: TaskName,
    /,
    *,
    flags: Annotated[RecipeFlags, Parameter(name="*")] = RecipeFlags(),  # type: ignore[valid-type]  # noqa: B008
    workers: str | None = None,
    budget: str | None = None,
    seeds: int | None = None,
    candidates: str | None = None,
    seed: int | None = None,
    set: Settings = None,
    data: DataFolder = None,
    jobs: Annotated[int | None, Parameter(group=PLACEMENT)] = None,
    device: Device = "auto",
    out: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
    resume: Annotated[str | None, Parameter(group=OUTPUT)] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Search for the recipe with the fewest steps that is as good as one worker, and prove it over fresh seeds.

    scalewise tune digits --workers 8 --budget 20x
    scalewise tune digits --workers 8,32 --candidates muon,own --seeds 10

    Recipe flags change the single worker's recipe, which is what the others must be as good as.

    Arguments:
        workers: Workers to search for, 8 by default; several as in 8,32 share the budget.
        budget: What the trials may take: 20x are the samples of 20 trainings of one worker (the default), 30min is a
            time. One worker on the tuning seeds and the proof are extra.
        seeds: Fresh seeds of the proof, seed, seed + 1, …; 5 by default.
        candidates: Optimizers to search over, own for the task's; by default muon, own, lamb or lars, and adamw.
        seed: Seed of the search, 0 by default; its own runs have seeds from seed + 1000 on.
        jobs: Runs at the same time; by default as many as there are cores for their threads. Changes no result.
        out: Folder of the search; by default runs/tune-<task>-<time>.
        resume: The folder of a search to resume, or auto for the newest one of this task (or --out).
    """
    asked = options(locals())
    from scalewise.runs.tune.tune import TuneRequest, answer

    request = request_from(TuneRequest, task, asked)
    with contextlib.redirect_stdout(sys.stderr):  # whatever a task prints: stdout is for the JSON document
        download(task, data, quiet)
        with _Screen(quiet) as screen:
            found = answer(request, screen.follow)
        if found.signal:
            leave_page(found.folder, screen.view.console)
        found.check_interrupted()
        show(tuning_story, found.document(), found.folder, screen.view.console, json=False)
        if json:
            print(to_json.dumps(found.to_json(), indent=2), file=sys.__stdout__, flush=True)  # not redirected
    found.check_proved()
    return 0


class _Screen(contextlib.ExitStack):
    """The live view of a search, from the moment that it starts."""

    view: TuneView

    def __init__(self, quiet: bool) -> None:
        super().__init__()
        self._quiet = quiet

    def follow(self, tuning: Tuning, event: Event) -> None:
        """Draw what has just happened."""
        from scalewise.runs.compare.jobs import Phase
        from scalewise.runs.tune.tune import Started

        trials = [Stored(trial) for row in tuning.rows()[-1:] for trial in row["trials"]]
        if isinstance(event, Started):
            self.view = TuneView(self._quiet, tuning.metric, tuning.planned)
            self.view.introduce(event.optimizers, event.jobs, tuning.begun.budget, event.hold_out)
            self.enter_context(self.view.live())
        elif isinstance(event, Phase):
            self.view.begin(event.title, trials)
        elif isinstance(event, str):
            self.view.console.print(event, markup=False)
        else:
            self.view.show(event, trials)
