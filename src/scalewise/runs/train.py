"""`scalewise train` and `sw.fit`: resolve the recipe, agree on the folder, train on one process or several.

`fit` is the question as Python asks it. The command uses `launched`, which trains in several processes, and `started`,
which gives it the `Run` to draw.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch.distributed as dist
from pydantic import TypeAdapter

from scalewise.engine.auto import Auto, complete
from scalewise.engine.candidates import DEFAULT_CANDIDATES
from scalewise.engine.data.samples import open_samples
from scalewise.engine.loop import Training
from scalewise.engine.placement import (
    DiskFull,
    Placement,
    check_processes,
    check_recipe,
    default_processes,
)
from scalewise.engine.processes.failures import translating
from scalewise.engine.processes.fork_server import ForkServer
from scalewise.engine.processes.launch import Elasticity, launch, taking_part
from scalewise.engine.processes.team import Team, takes_part
from scalewise.engine.processes.watchdog import watched
from scalewise.engine.store.folder import (
    RunFolder,
    RunRecipe,
    begun_by_this_job,
    check_folder,
    check_same,
    check_writable,
    data_sha256,
    holding,
    make_folder,
    read_recipe,
)
from scalewise.errors import Failed, PlacementError, RecipeError, ScalewiseError, UsageError
from scalewise.files import read_json
from scalewise.recipe import Derived, Recipe, RecipeMode, Search, Trial
from scalewise.records import Result, write_atomically
from scalewise.runs.request import HANG_SECONDS, Notice, Notify, Subject, compiles, load_subject, resumed_folder, silent
from scalewise.runs.run import OnRecord, Run, ignore
from scalewise.tasks.load import load_task
from scalewise.tasks.task import Task

_TRIALS = TypeAdapter(list[Trial])
SAVE_SECONDS = 20.0  # for the processes that are left to save an emergency checkpoint
MAX_RESTARTS = 3  # the default that torch's own launcher had


def warn(line: str) -> None:
    """Report what deserves attention as a Python warning."""
    if isinstance(line, Notice):
        warnings.warn(line, stacklevel=2)


@dataclass(frozen=True)
class Request:
    """A training into a folder, as asked for; what is not described here is that of `fit`."""

    task: Task
    base: Recipe | Path | None = None  # the recipe to start from, or its file; by default the task's own
    given: Mapping[str, Any] = field(default_factory=dict)  # fields that the user set; they always win
    mode: RecipeMode = "auto"
    auto: Auto = field(default_factory=Auto)
    placement: Placement = field(default_factory=Placement)
    folder: Path | None = None
    resume: str | None = None
    checkpoint_steps: int | None = None
    on_disk_full: DiskFull = "stop"
    hang_timeout: float = (
        HANG_SECONDS  # without progress, after which one of several processes counts as dead; 0 for never
    )
    stop_seconds: float | None = None  # from a stop signal to the end of the process; None waits for the step's end

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("mode", self.mode, get_args(RecipeMode)),
            ("on_disk_full", self.on_disk_full, get_args(DiskFull)),
        ):
            if value not in choices:
                raise UsageError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
        if self.checkpoint_steps is not None and self.checkpoint_steps < 1:
            raise RecipeError(
                f"checkpoint_steps must be at least 1, got {self.checkpoint_steps}; change --checkpoint-steps"
            )


def fit(
    task: str | Task,
    recipe: Recipe | None = None,
    placement: Placement | None = None,
    *,
    folder: str | Path | None = None,
    resume: str | Path | None = None,
    mode: RecipeMode = "auto",
    epochs_fixed: bool = False,
    search: float | None = None,
    candidates: Sequence[str] = DEFAULT_CANDIDATES,
    checkpoint_steps: int | None = None,
    on_disk_full: DiskFull = "stop",
    on_record: OnRecord = ignore,
    notify: Notify = warn,
) -> Result:
    """Train into a run folder, as `scalewise train` does: derives, stores, resumes, and returns the `Result`.

    >>> import scalewise as sw
    >>> folder = getfixture("tmp_path") / "run"
    >>> task = sw.load_task("linear")
    >>> result = sw.fit(task, sw.Recipe(workers=4, worker_batch=8, steps=6), folder=folder)
    >>> result.steps, sorted(path.name for path in folder.glob("*.json"))
    (6, ['env.json', 'recipe.json', 'result.json'])
    >>> sw.fit(task, sw.Recipe(steps=9), folder=folder, resume="auto").steps
    9

    Trains on this process, or takes part in the torchrun job that started it. The first Ctrl-C or SIGTERM stops after
    the step, saves the state and raises `Interrupted`; the same call with `resume="auto"` then continues. A program
    that trains several runs gives each its `folder`.

    Arguments:
        task: what is learned; or its name or file, as the command takes it.
        recipe: how. With mode `auto`, fields that were not set come from the task's own recipe or are derived.
        placement: where; by default whatever device is available.
        folder: the run folder, new or empty unless resumed; by default runs/<task>-<time>.
        resume: a run folder to continue in, or `auto` for `folder`, else the newest one of this task, if it exists.
        mode: `auto` derives what was not set when there are several workers, `plain` trains the recipe as it is.
        epochs_fixed: keep auto to the number of samples of a single worker, at the price of accuracy.
        search: steps of auto's race, as a share of one worker's; 0 follows the noise with AdaScale instead. By
            default 0.03, or up to 0.1 where trials need it.
        candidates: optimizers that auto races, or `own` for the task's.
        checkpoint_steps: steps from checkpoint to checkpoint, besides one at the end of every epoch.
        on_disk_full: stop when a checkpoint does not fit on the disk, or continue and try again at the next one.
        on_record: called with every `Step`, `Epoch` and the `Result` after it is stored, on the first process.
        notify: called with lines about the run; by default those that deserve attention become warnings.
    """
    request = Request(
        task=load_task(task) if isinstance(task, str) else task,
        base=recipe if mode == "plain" else None,
        given={} if recipe is None else {name: getattr(recipe, name) for name in recipe.model_fields_set},
        mode=mode,
        auto=Auto(epochs_fixed, search, candidates),
        placement=placement or Placement(),
        folder=None if folder is None else Path(folder),
        resume=None if resume is None else str(resume),
        checkpoint_steps=checkpoint_steps,
        on_disk_full=on_disk_full,
    )
    with started(request, notify) as run:
        return run.train(on_record)


@contextlib.contextmanager
def started(request: Request, notify: Notify = silent) -> Iterator[Run]:
    """The run that was asked for, on one process or as one of several, which all train what the first one resolves."""
    if not takes_part():
        with _opened(request, *resolved(request), notify) as run:
            yield run
        return
    with taking_part(request.placement.device) as team, watched(team, request.hang_timeout) as watch:
        recipe, resumed = _agreed(request, team)
        if watch is not None:
            watch.recipe = recipe.recipe
        with _opened(request, recipe, resumed, notify) as run:
            yield run


def launched(
    request: Request,
    arguments: Sequence[str],
    processes: int | None,
    min_processes: int | None = None,
    max_restarts: int | None = None,
    fork_server: ForkServer | None = None,
    notify: Notify = silent,
) -> int | None:
    """Train in several processes on this machine; None when this process is to train by itself.

    Arguments:
        arguments: of `scalewise`, for every process.
        processes, min_processes, max_restarts: the flags of `scalewise train`.
        fork_server: where processes come from, if they need not import everything themselves.
        notify: reports restarts.
    """
    if takes_part():
        return None
    recipe = resolved(request, measure=False)[0].recipe
    check_recipe(request.placement, recipe)
    if processes is not None:
        check_processes(processes, recipe, request.placement)
    count = processes or default_processes(recipe, request.placement)
    _check_elasticity(count, min_processes, max_restarts, request.hang_timeout)
    if count == 1 and not max_restarts:
        return None
    elasticity = Elasticity(
        max_restarts=MAX_RESTARTS if max_restarts is None else max_restarts,
        min_processes=min_processes,
        emergency_seconds=max(SAVE_SECONDS, request.hang_timeout),
        say=lambda line: notify(Notice(line)),
    )
    return launch(count, arguments, recipe.threads or 1, elasticity=elasticity, fork_server=fork_server)


def _check_elasticity(count: int, min_processes: int | None, max_restarts: int | None, hang_timeout: float) -> None:
    if min_processes is not None and not 1 <= min_processes <= count:
        raise PlacementError(
            f"min_processes must be between 1 and the number of processes ({count}), got {min_processes}; "
            f"change --min-processes"
        )
    if max_restarts is not None and max_restarts < 0:
        raise PlacementError(f"max_restarts must be at least 0, got {max_restarts}; change --max-restarts")
    if hang_timeout != 0 and not 1 <= hang_timeout < math.inf:
        raise PlacementError(
            f"hang_timeout must be at least 1 second, or 0 for never, got {hang_timeout}; change --hang-timeout"
        )


def resolved(request: Request, measure: bool = True) -> tuple[RunRecipe, RunFolder | None]:
    """The recipe, complete if `measure`, and the folder of the run to continue, if any."""
    task = request.task
    begun = begun_by_this_job(request.folder, task.name)
    if begun is not None:
        return read_recipe(begun), begun
    path = resumed_folder(request.resume, request.folder, task.name, "recipe.json")
    if path is not None:
        folder, subject = RunFolder(path), load_subject(task, None, None)
        stored = read_recipe(folder)
        changes = dict(request.given)
        if stored.search is not None and changes.get("epochs") == stored.search.epochs:
            changes.pop("epochs", None)  # one worker's, from which the stored ones were derived
        if "epochs" in changes:
            changes.setdefault("steps", None)
        wanted = dataclasses.replace(
            stored, task=subject.spec, settings=subject.settings, recipe=stored.recipe.replace(**changes)
        )
        check_same(stored, wanted, folder, task.validation is not None)
        check_writable(folder.path)
        return wanted, folder
    check_folder(request.folder)
    return _completed(request if measure else dataclasses.replace(request, mode="plain")), None


def _completed(request: Request, team: Team | None = None) -> RunRecipe:
    """The complete recipe of a new run; the processes of a team race its candidates together.

    What an interrupted race has found lies beside the run's folder until the same command has finished it.
    """
    subject = load_subject(request.task, None, None)
    base = Recipe.load(request.base) if isinstance(request.base, Path) else request.base or request.task.recipe
    race = _RaceFile(request, subject, base)
    leads, races = team is None or team.leads, request.mode == "auto"
    known = race.read() if leads and races else None
    known = known if team is None else team.shared(known)
    trials: list[Trial] = []

    def keep(trial: Trial) -> None:
        trials.append(trial)
        if leads:
            race.write(trials)

    where, given, size = request.placement, dict(request.given), 1 if team is None else team.size
    with translating():
        recipe, derived, search = complete(
            request.task, base, given, request.mode, where, request.auto, known, processes=size, on_trial=keep
        )
    if leads and races:
        race.remove()
    if recipe.compile and not compiles(where.device):
        recipe = recipe.replace(compile=False)
        derived.append(Derived("compile", False, "torch.compile needs a C++ compiler on a CPU; found none"))
    return RunRecipe(subject.spec, subject.settings, recipe, derived, search=search)


class _RaceFile:
    """The trials of a race that was stopped: <run folder>.race.json, for the same task and recipe only."""

    def __init__(self, request: Request, subject: Subject, base: Recipe) -> None:
        folder = request.folder or Path("runs") / request.task.name
        self._path = folder.with_name(f"{folder.name}.race.json")
        source = Path(subject.spec)
        code = hashlib.sha256(source.read_bytes()).hexdigest() if source.is_file() else ""  # it may have changed since
        data = data_sha256(open_samples(request.task.train, 0, "training"))
        auto = dataclasses.asdict(request.auto)
        what = [subject.spec, subject.settings, code, data, base.model_dump(), {**request.given}, auto]
        self._key = hashlib.sha256(json.dumps(what, default=str).encode()).hexdigest()

    def read(self) -> Search | None:
        """The trials, if there are any of this very race."""
        try:
            stored = read_json(self._path)
            trials = _TRIALS.validate_python(stored["trials"]) if stored["key"] == self._key else []
        except (OSError, ValueError, TypeError, KeyError):
            return None
        return Search(0, 0, 0.0, trials=tuple(trials)) if trials else None

    def write(self, trials: Sequence[Trial]) -> None:
        """Store the trials so far."""
        content = {"key": self._key, "trials": [dataclasses.asdict(trial) for trial in trials]}
        with contextlib.suppress(OSError):  # the race is run again then
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, json.dumps(content, indent=2) + "\n")

    def remove(self) -> None:
        """Forget them: the recipe holds them now."""
        with contextlib.suppress(OSError):
            self._path.unlink()


def _agreed(request: Request, team: Team) -> tuple[RunRecipe, RunFolder | None]:
    """What the first process has resolved, on every process; its error is everybody's."""
    agreed: Any = None
    if team.leads:
        try:
            agreed = resolved(request, measure=False)
        except ScalewiseError as error:
            agreed = (str(error), error.exit_code)
    first, second = team.shared(agreed)
    if isinstance(first, str):
        raise Failed(first, second)
    if second is None:
        first = team.shared(_completed(request, team))
    return first, second


@contextlib.contextmanager
def _opened(request: Request, recipe: RunRecipe, resumed: RunFolder | None, notify: Notify) -> Iterator[Run]:
    """The run in its folder: a new one, or the one it was begun in."""
    derived, every = recipe.derived, request.checkpoint_steps
    training = Training(request.task, recipe.recipe, request.placement, derived, every, recipe.hold_out, recipe.search)
    with translating(), training:
        leads = training.team.leads
        folder = resumed or _new_folder(request, training)
        with holding(folder.path) if leads else contextlib.nullcontext():
            if resumed is None and leads:
                check_folder(folder.path)  # another run may have begun and ended in it in the meantime
            say, full, seconds = notify if leads else silent, request.on_disk_full, request.stop_seconds
            run = Run(folder, recipe, training, say, every, full, seconds)
            run.begin(resumes=resumed is not None)
            yield run


def _new_folder(request: Request, training: Training) -> RunFolder:
    """The first process makes the folder of a new run; all use it."""
    paths = [str(make_folder(request.folder, training.task.name).path)] if training.team.leads else [""]
    if training.team.size > 1:
        dist.broadcast_object_list(paths, 0)
    return RunFolder(Path(paths[0]))
