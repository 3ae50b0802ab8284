"""From a task's name on the command line to a Task."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib
import importlib.util
import inspect
import sys
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from scalewise.errors import TaskError, UsageError, UserCodeError, user_frames
from scalewise.extras import missing
from scalewise.tasks import BUILT_IN
from scalewise.tasks.task import Origin, Task

BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def load_task(spec: str, settings: Sequence[str] = (), data: Path | None = None) -> Task:
    """A built-in name, `path/to/file.py` (its `task` function) or `package.module:function`, called with settings.

    Settings are `name=value` pairs; `data` is the folder of the data files, for functions that take it.
    """
    factory = _find(spec)
    arguments = _arguments(spec, factory, [*settings, *([f"data={data}"] if data is not None else [])])
    with _users_code(f"task {spec} failed while it was built"):
        task = factory(**arguments)
    if not isinstance(task, Task):
        raise TaskError(f"{spec} must return a scalewise.Task, got {type(task).__name__}; return sw.Task(…)")
    short = Path(spec).stem if spec.endswith(".py") else spec.rpartition(":")[2]
    named = task if task.name != "task" else dataclasses.replace(task, name=short)
    object.__setattr__(named, "origin", Origin(spec, tuple(settings), data))
    return named


@contextlib.contextmanager
def _users_code(failed: str) -> Iterator[None]:
    """Report what a user's code raises with its own traceback, and a missing extra by how to install it."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and (extra := missing(error)):
            raise extra from None
        raise UserCodeError(f"{failed}:\n{user_frames(error)}") from error


def settings_of(spec: str) -> list[str]:
    """The names that `--set` takes for a task."""
    return [*inspect.signature(_find(spec)).parameters]


def _find(spec: str) -> Callable[..., Any]:
    if spec in BUILT_IN:
        return _attribute(BUILT_IN[spec].factory, spec)
    if spec.endswith(".py"):
        return _from_file(Path(spec))
    if ":" in spec:
        return _attribute(spec, spec)
    close = difflib.get_close_matches(spec, BUILT_IN, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise TaskError(
        f"unknown task {spec!r}; {hint}a task is one of {', '.join(BUILT_IN)}, a path/to/file.py, "
        f"or package.module:function"
    )


def _from_file(path: Path) -> Callable[..., Any]:
    if not path.is_file():
        raise TaskError(f"task file {path} must exist, found none; check the path")
    name = f"scalewise_task_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent.resolve()))  # so that it can import its neighbours, as a script can
    with _users_code(f"task file {path} failed while it was imported"):
        spec.loader.exec_module(module)
    if not callable(getattr(module, "task", None)):
        raise TaskError(f"task file {path} must define a function task() that returns a scalewise.Task, found none")
    function: Callable[..., Any] = module.task
    return function


def _attribute(reference: str, spec: str) -> Callable[..., Any]:
    module_name, _, name = reference.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        with _users_code(f"task {spec} failed while it was imported"):
            module = importlib.import_module(module_name)
    except UserCodeError as error:
        absent = error.__cause__.name if isinstance(error.__cause__, ModuleNotFoundError) else None
        if absent is not None and module_name.startswith(absent):
            raise TaskError(f"task {spec}: no module named {absent}; check the name or install it") from None
        raise
    finally:
        sys.path.pop(0)
    if not callable(getattr(module, name, None)):
        raise TaskError(f"task {spec}: module {module_name} has no function {name!r}; check the name after the colon")
    function: Callable[..., Any] = getattr(module, name)
    return function


def _arguments(spec: str, factory: Callable[..., Any], settings: Sequence[str]) -> dict[str, Any]:
    try:
        signature = inspect.signature(factory, eval_str=True)
    except NameError:  # an annotation that only a type checker can resolve
        signature = inspect.signature(factory)
    arguments = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals:
            raise TaskError(f"--set needs name=value, got {setting!r}; write for example --set bn=true")
        if name not in signature.parameters:
            known = ", ".join(signature.parameters) or "none"
            flag = "takes no --data" if name == "data" else f"has no setting {name!r}"
            raise TaskError(f"task {spec} {flag}; its settings are: {known}")
        arguments[name] = _convert(name, text, signature.parameters[name])
    for name, parameter in signature.parameters.items():
        variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.default is parameter.empty and not variadic and name not in arguments:
            raise TaskError(f"task {spec} needs a value for {name!r}, got none; add --set {name}=…")
    return arguments


def _convert(name: str, text: str, parameter: inspect.Parameter) -> Any:  # noqa: ANN401
    kind = parameter.annotation
    if kind is inspect.Parameter.empty or isinstance(kind, str):
        kind = str if parameter.default in (None, inspect.Parameter.empty) else type(parameter.default)
    choices = [choice for choice in typing.get_args(kind) if choice is not type(None)]
    if len(choices) == 1 and len(typing.get_args(kind)) == 2:  # X | None
        if text.lower() == "none":
            return None
        kind = choices[0]
    try:
        if kind is bool:
            return BOOLEANS[text.lower()]
        return kind(text) if kind in (int, float, Path) else text
    except (ValueError, KeyError):
        expected = "true or false" if kind is bool else f"a value of type {kind.__name__}"
        raise TaskError(f"--set {name}= needs {expected}, got {text!r}") from None
