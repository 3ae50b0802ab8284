"""The command line: parse, call `runs`, draw. One thin file per command, at most 150 lines each.

Commands are loaded when they are called, so that --help is fast and imports no torch.
May import: everything below. Public: `app` and `main`.
"""

from __future__ import annotations

import contextlib
import errno
import inspect
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from cyclopts import App
from cyclopts.exceptions import CycloptsError

from scalewise import __version__
from scalewise.errors import ScalewiseError

app = App(
    name="scalewise",
    help="Take a PyTorch training run from one worker to many without losing accuracy.",
    version=__version__,
    help_format="plaintext",
    suppress_keyboard_interrupt=False,
)
bench = App(name="bench", help="How fast are the devices, the links and the scaling here?", help_format="plaintext")
BENCHES = {
    "bench:devices": "Operations and a training on every device here.",
    "bench:collectives": "How fast processes exchange data.",
    "bench_training:scaling": "How a training speeds up on more processes.",
    "bench_training:parallelism": "What each kind of parallelism costs.",
}
COMMANDS = {
    "train": "Train a task with any number of workers.",
    "compare": "Compare the remedies for many workers, over seeds.",
    "tune": "Search for the recipe with the fewest steps, and prove it.",
    "measure": "How far can this model scale?",
    "plan": "How many workers, in which time, for how much?",
    "forecast": "How much data, or how large a model, for a target?",
    "profile": "Where does a step's time go?",
    "doctor": "Why did a run lose accuracy?",
    "replay": "Compute one step of a run again, bit for bit.",
    "bisect": "Where do two runs differ first, and why?",
    "report": "One self-contained page of one or several runs.",
    "serve": "Show the runs in a folder in a browser, live.",
    "tasks": "What is built in, and where its data is.",
}
for place, words in BENCHES.items():
    bench.command(f"scalewise.cli.{place}", name=place.partition(":")[2], help=words)
for name, words in COMMANDS.items():
    app.command(f"scalewise.cli.{name}:{name}", name=name, help=words)
app.command(bench)
app.register_install_completion_command(
    help="Install completion for bash, zsh or fish; it takes effect in a new shell."
)

# How long a computing thread waits for its siblings before it sleeps, read when torch is loaded. The default, about a
# millisecond, costs a whole time slice whenever loaders or other programs keep a core busy: docs/log.md has figures.
SPINS = "2000"
HELP = frozenset({"--help", "-h"})
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
NOT_WRITABLE = FULL | {errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO}


_arrived: list[int] = []  # signals that had no other handler


class Terminated(BaseException):
    """SIGTERM arrived."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit with its code."""
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is loaded; we report failures
    os.environ.setdefault("KERAS_BACKEND", "torch")  # the only one that a task can use
    _arrived.clear()
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGINT, _end)  # a shell's background jobs start with it ignored
    if arguments is not None:
        sys.argv[1:] = arguments  # other processes are started with the same words
    try:
        code, message = _outcome(arguments)
    except (KeyboardInterrupt, Terminated):
        code, message = 1, ""
    if code == 1 and _arrived:  # also where a library turned it into another error, as numpy does while it is imported
        code, message = 128 + _arrived[0], "interrupted" if _arrived[0] == signal.SIGINT else "terminated"
    _finish(code, message)


def _show_examples(arguments: Sequence[str]) -> None:
    """Let the help of a command begin with all that its docstring says, examples too.

    The list of commands has one line of each, so that it imports none of them.
    """
    command = app.parse_commands([word for word in arguments if word not in HELP])[1][-1]
    if command.default_command is not None and command not in (app, bench):
        words = (inspect.getdoc(command.default_command) or "").partition("\nArguments:\n")[0]
        command.help = f"{command.help}\n\n{words.partition(chr(10))[2].strip()}"


def _outcome(arguments: Sequence[str] | None) -> tuple[int, str]:
    """The exit code of a command and what to say about it."""
    try:
        words = sys.argv[1:] if arguments is None else arguments
        if not HELP.isdisjoint(words):
            _show_examples(words)
        return app(arguments, exit_on_error=False, print_error=False, result_action="return_value") or 0, ""
    except CycloptsError as error:
        return 2, " ".join(str(error).split()).rstrip(".") + "; see --help"
    except ScalewiseError as error:
        return error.exit_code, str(error)
    except BrokenPipeError:
        sys.stdout = None  # nobody reads the rest
        return 1, ""
    except OSError as error:
        if error.errno not in NOT_WRITABLE:
            raise
        if error.filename is None:
            sys.stdout = sys.__stdout__ = None  # type: ignore[misc]  # the rest cannot be written either
        what = "free disk space" if error.errno in FULL else "check who may write there"
        return 1, f"{error.filename or 'the output'} could not be written: {error.strerror}; {what} and start again"
    finally:  # nothing may interrupt the end
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    _arrived.append(number)
    raise KeyboardInterrupt if number == signal.SIGINT else Terminated


def _finish(code: int, message: str) -> NoReturn:
    if "RANK" in os.environ:
        from scalewise.engine.processes.last_words import leave_exit_report

        if leave_exit_report(code, message):  # the launching process speaks
            sys.exit(0 if code == 3 else code)
    if message:
        with contextlib.suppress(OSError):
            print(f"scalewise: {message}", file=sys.stderr)
    sys.exit(code)
