"""`scalewise compare`."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from scalewise.cli.flags import DataFolder, Device, Json, Quiet, Settings, TaskName
from scalewise.cli.inputs import OUTPUT, PLACEMENT, download, leave_page, options, recipe_flags, show
from scalewise.present.live_compare import CompareView
from scalewise.present.stories.compare import comparison_story
from scalewise.runs.request import request_from

if TYPE_CHECKING:
    from scalewise.runs.compare.compare import Event
    from scalewise.runs.compare.comparison import Comparison

RecipeFlags = recipe_flags(__name__, without=("workers", "seed"))


def compare(
    task: TaskName,
    /,
    *,
    flags: Annotated[RecipeFlags, Parameter(name="*")] = RecipeFlags(),  # type: ignore[valid-type]  # noqa: B008
    workers: str | None = None,
    seeds: int | None = None,
    rows: str | None = None,
    tuned: Path | None = None,
    set: Settings = None,
    tune: int | None = None,
    hold_out: Annotated[bool, Parameter(negative=())] = False,
    data: DataFolder = None,
    jobs: Annotated[int | None, Parameter(group=PLACEMENT)] = None,
    device: Device = "auto",
    out: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
    resume: Annotated[str | None, Parameter(group=OUTPUT)] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Compare what people do about many workers, over seeds: the table of remedies.

    scalewise compare digits --workers 8
    scalewise compare digits --workers 8 --rows single,naive,auto --seeds 10 --tune 5 --hold-out
    scalewise compare digits --workers 1,2,4,8,16,32

    Arguments:
        workers: Workers of every row but single, 8 by default; several as in 1,2,4,8 draw the error against the global
            batch.
        seeds: Runs of every row, with seeds 0, 1, …; 5 by default.
        rows: Of single,naive,batch-norm,lr-scaled,warm-up,lars,lamb,adascale,auto, by default these (naive,auto with
            several counts), and muon and tuned.
        tuned: Recipe that scalewise tune found, for the row tuned.
        tune: Learning rates that every row may try on validation data before its seeds are run.
        hold_out: Keep a tenth of the training data out for validation, where the task has no validation data.
        jobs: Runs at the same time; by default as many as there are cores for their threads.
        out: Folder of the comparison; by default runs/compare-<task>-<time>.
        resume: The folder of a comparison to resume, or auto for the newest one of this task (or --out).
    """
    asked = options(locals())
    from scalewise.runs.compare.compare import CompareRequest, answer

    request = request_from(CompareRequest, task, asked)
    with contextlib.redirect_stdout(sys.stderr):  # whatever a task prints: stdout is for the JSON document
        download(task, data, quiet)
        with _Screen(quiet) as screen:
            found = answer(request, screen.follow)
        if found.signal:
            leave_page(found.folder, screen.view.console)
        found.check_interrupted()
        show(comparison_story, found.to_json(), found.folder, screen.view.console, json)
    found.check_failures()
    return 0


class _Screen(contextlib.ExitStack):
    """The live view of a comparison, from the moment that it starts."""

    view: CompareView

    def __init__(self, quiet: bool) -> None:
        super().__init__()
        self._quiet = quiet

    def follow(self, comparison: Comparison, event: Event) -> None:
        """Draw what has just happened."""
        from scalewise.runs.compare.compare import Started
        from scalewise.runs.compare.jobs import Outcome, Phase

        if isinstance(event, Started):
            self.view = CompareView(self._quiet, comparison.metric, comparison.seeds, event.jobs)
            self.view.introduce(comparison.lines, comparison.skipped, event.threads)
            self.enter_context(self.view.live())
        elif isinstance(event, Phase):
            self.view.tuned(comparison.tuned)
            self.view.begin(event.title, event.jobs, comparison.rows())
        elif isinstance(event, str):
            self.view.console.print(event, markup=False)
        else:
            self.view.show(event, comparison.rows() if isinstance(event, Outcome) else None)
