"""What the questions of a task have in common: the task and recipe they are of, and the folder they answer in.

A question is a frozen request. Its answer stands in a folder: `request.json` holds what the folder was begun with, and
a document holds what --json prints. Imports no torch, so that commands show their help at once.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from scalewise.engine.placement import DeviceName, available_cores
from scalewise.errors import Interrupted, RunFolderError, ScalewiseError, UsageError
from scalewise.files import read_json
from scalewise.recipe import Derived, Recipe, resolve
from scalewise.records import write_atomically

if TYPE_CHECKING:
    from scalewise.tasks.task import Task

REQUEST_FILE = "request.json"
LEFT_OUT = ("given", "tune", "hold_out")  # what need not be said again on resume

Notify = Callable[[str], None]
HANG_SECONDS = 60.0
PYTHON = "python:"  # before the name of a task that no command can load: an object of a Python program
Numbers = str | int | Sequence[int]  # 8, [1, 2, 4] or "1,2,4"
Settings = Sequence[str] | Mapping[str, object]  # ["bn=true"] or {"bn": True}
RequestT = TypeVar("RequestT")
BegunT = TypeVar("BegunT", bound="BegunFolder")
FunctionT = TypeVar("FunctionT", bound=Callable[..., object])


class Notice(str):
    """A line to keep on the screen; a plain line only says what is being done now."""


def silent(line: str) -> None:
    """Report nothing."""


def keywords_of(kind: type) -> Callable[[FunctionT], FunctionT]:
    """Decorate a function that passes its keywords on to a request: its signature, and help, name them one by one."""

    def named(function: FunctionT) -> FunctionT:
        own = inspect.signature(function)
        subject, *others = own.parameters.values()
        options = [
            inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=one.type)
            for one in dataclasses.fields(kind)[1:]
            if one.name != "given"
        ]
        function.__signature__ = own.replace(parameters=[subject, *options, *others])  # type: ignore[attr-defined]
        return function

    return named


def request_from(kind: type[RequestT], task: str | Path | Task, options: Mapping[str, Any]) -> RequestT:
    """A request from keyword arguments: its own fields, and fields of the recipe as what was given."""
    subject, *others = dataclasses.fields(kind)  # type: ignore[arg-type]
    known = {one.name: str(one.type) for one in others if one.name != "given"}
    given = {name: value for name, value in options.items() if name in Recipe.model_fields and name not in known}
    unknown = [name for name in options if name not in known and name not in given]
    if unknown:
        names = ", ".join(sorted(known))
        raise TypeError(f"unexpected keyword argument {unknown[0]!r}; options are {names}, and fields of sw.Recipe")
    own = {name: _with_paths(known[name], value) for name, value in options.items() if name in known}
    return kind(**own, **{subject.name: str(task) if isinstance(task, Path) else task, "given": given})


def _with_paths(annotation: str, value: Any) -> Any:  # noqa: ANN401
    """The value of a field, with paths where the field has them and strings were given, or the other way round."""
    if "Path" not in annotation:
        return str(value) if isinstance(value, Path) else value
    if isinstance(value, str | Path):
        return (Path(value),) if "Sequence" in annotation else Path(value)
    return value if value is None else tuple(map(Path, value))


def check_alone(command: str) -> None:
    """Refuse to run inside a torchrun job."""
    if "RANK" in os.environ:
        raise UsageError(
            f"{command} starts its processes itself, got a torchrun job (RANK is set); run it without torchrun"
        )


def check_counts(**counts: int | None) -> None:
    """Refuse counts below 1."""
    for name, count in counts.items():
        if count is not None and count < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, got {count}")


def comma_separated(values: Numbers | Sequence[str]) -> str:
    """Several values as a flag has them.

    >>> comma_separated([1, 2, 4]), comma_separated(8), comma_separated("1,2")
    ('1,2,4', '8', '1,2')
    """
    return str(values) if isinstance(values, str | int) else ",".join(map(str, values))


@dataclass(frozen=True)
class Subject:
    """What a question is of: the task, and the name, settings and folder of data that it is loaded with."""

    task: Task
    spec: str
    settings: list[str]
    data: Path | None = None


def load_subject(task: str | Task, settings: Settings | None, data: Path | None) -> Subject:
    """The task of a question: loaded by its name, or a `Task` itself, which has its settings already."""
    from scalewise.tasks.load import load_task

    words = _words(settings or ())
    if isinstance(task, str):
        return Subject(load_task(task, words, data), task, words, data)
    if words or data is not None:
        raise UsageError(
            f"set and data are for tasks that are loaded by name, got the task {task.name} itself; drop them"
        )
    if task.origin is None:
        return Subject(task, f"{PYTHON}{task.name}", [])
    return Subject(task, task.origin.spec, [*task.origin.settings], task.origin.data)


@dataclass(frozen=True)
class Question:
    """A question of a task as it is asked. Its fields are the flags of its command, whose help describes them.

    `given` are the fields of the recipe that are set.
    """

    task: str | Task
    set: Settings | None = None
    data: Path | None = None
    device: DeviceName = "auto"
    out: Path | None = None
    given: dict[str, Any] = field(default_factory=dict)

    def load(self) -> Subject:
        """The task that it is of."""
        return load_subject(self.task, self.set, self.data)


def _words(settings: Settings) -> list[str]:
    """`name=value` pairs.

    >>> _words({"bn": True, "hidden": 64})
    ['bn=true', 'hidden=64']
    """
    if not isinstance(settings, Mapping):
        return [*settings]
    return [f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in settings.items()]


def single_recipe(base: Recipe, given: dict[str, Any], device: DeviceName) -> tuple[Recipe, list[Derived]]:
    """One worker's recipe, trained to the end of its budget, and what was derived for it."""
    recipe, derived = resolve(base, given, "auto", available_cores())
    return compilable(recipe, device).replace(workers=1, patience=None, target=None), derived


def compilable(recipe: Recipe, device: DeviceName) -> Recipe:
    """The recipe, without compiling where torch.compile does not find what it needs."""
    return recipe.replace(compile=False) if recipe.compile and not compiles(device) else recipe


def compiles(device: DeviceName) -> bool:
    """Whether torch.compile finds what it needs."""
    names = (os.environ.get("CXX", "c++"), "g++", "clang++")
    return device == "cuda" or any(shutil.which(name) for name in names)


def resumed_folder(resume: str | None, out: Path | None, name: str, file: str = REQUEST_FILE) -> Path | None:
    """The folder to resume, if any: the one named, or with `auto` --out or the newest under runs/ that holds `file`."""
    from scalewise.engine.store.folder import newest

    if resume is None:
        return None
    if resume != "auto":
        if out is not None:
            raise RunFolderError(f"--resume {resume} continues in that folder; drop --out {out}")
        return Path(resume)
    if out is None:
        return newest(name, Path("runs"), file)
    return out if (out / file).is_file() else None


def stopped(number: int, what: str, folder: Path) -> Interrupted:
    """The error to raise when a signal has stopped a question whose folder can be resumed."""
    from scalewise.engine.processes import signals

    words = f"stopped the {what}; its runs are saved, continue with the same command and --resume {folder}"
    return Interrupted(f"{signals.name(number)} {words}", number)


@contextmanager
def answering(
    name: str,
    out: Path | None,
    resumed: Path | None = None,
    begun: BegunFolder | None = None,
    keeps_runs: bool = True,
) -> Iterator[Path]:
    """The folder to answer in: the resumed one, or a new one, which a failure that stored nothing removes.

    Errors of torch and of the task's code leave as errors of scalewise.

    Arguments:
        name: of a new folder under runs/, without the time.
        begun: what it was begun with, to be stored.
        keeps_runs: whether a mistake in task or recipe leaves runs that are worth keeping.
    """
    from scalewise.engine.processes.failures import translating
    from scalewise.engine.store.folder import check_writable, make_folder

    if resumed is not None:
        check_writable(resumed)
    folder = resumed or make_folder(out, name).path
    try:
        with translating():
            if begun is not None:
                save_request(folder, begun)
            yield folder
    except BaseException as error:
        mistake = isinstance(error, ScalewiseError) and error.exit_code == UsageError.exit_code
        empty = all(REQUEST_FILE in path.name for path in folder.iterdir())
        if resumed is None and (empty or (mistake and not keeps_runs)):
            shutil.rmtree(folder)
        raise


@dataclass(frozen=True)
class BegunFolder:
    """What a folder was begun with. Its runs are of it, so resuming may not change it, but for what `may_change`."""

    what: ClassVar[str]  # the folder is of
    rule: ClassVar[str]  # in words
    may_change: ClassVar[tuple[str, ...]] = ()
    task: str
    settings: list[str]
    given: dict[str, Any]  # recipe fields that were set


@dataclass(frozen=True)
class Begun(BegunFolder):
    """What a measurement or a forecast was begun with."""

    what = "measurement or forecast"
    rule = "task and recipe may not change"
    recipe: str | None = None  # the file that they started from


def save_request(folder: Path, begun: BegunFolder) -> None:
    """Store what a folder was begun with."""
    write_atomically(folder / REQUEST_FILE, json.dumps(dataclasses.asdict(begun), indent=2) + "\n")


def load_request(folder: Path, kind: type[BegunT]) -> BegunT:
    """What a folder was begun with."""
    file = folder / REQUEST_FILE
    if not file.is_file():
        raise RunFolderError(f"--resume {folder} must be the folder of a {kind.what}, found no {REQUEST_FILE} in it")
    try:
        return kind(**read_json(file))
    except (OSError, TypeError, ValueError) as error:
        raise RunFolderError(f"{file} must be a stored request, got something else: {error}") from None


def begun_or_resumed(
    wanted: BegunT, resume: str | None, out: Path | None, name: str, changes: Mapping[str, Any] | None = None
) -> tuple[BegunT, Path | None]:
    """What to answer, with changes to it, and the folder that is resumed, if any."""
    from scalewise.engine.store.folder import check_folder

    folder = resumed_folder(resume, out, name)
    if folder is None:
        check_folder(out)
        return dataclasses.replace(wanted, **changes or {}), None
    stored = load_request(folder, type(wanted))
    check_unchanged(folder, stored, wanted)
    return dataclasses.replace(stored, **changes or {}), folder


def check_unchanged(folder: Path, stored: BegunFolder, wanted: BegunFolder) -> None:
    """Refuse to resume a folder that was begun with something else; what was set then may be left out."""
    for name, before in vars(stored).items():
        after = getattr(wanted, name)
        left_out = name in LEFT_OUT and not after
        if before != after and not left_out and name not in wanted.may_change:
            raise RunFolderError(
                f"{folder} was begun with {name}={before}, got {after}; on resume {wanted.rule}: repeat the first "
                f"command with --resume, or start a new folder without it"
            )
