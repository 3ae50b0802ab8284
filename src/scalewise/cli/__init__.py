"""The command line. Commands are loaded when they are called, so that --help is fast and imports no torch."""

from __future__ import annotations

import contextlib
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
app.command("scalewise.cli.train:train", name="train", help="Train a task with any number of workers.")
app.command("scalewise.cli.compare:compare", name="compare", help="Compare the remedies for many workers, over seeds.")
app.command("scalewise.cli.measure:measure", name="measure", help="How far can this model scale?")
app.command("scalewise.cli.doctor:doctor", name="doctor", help="Why did a run lose accuracy?")
app.command("scalewise.cli.tasks:tasks", name="tasks", help="What is built in, and where its data is.")


# How long a computing thread waits for its siblings before it sleeps, read when torch is loaded. The default, about a
# millisecond, costs a whole time slice whenever loaders or other programs keep a core busy: docs/log.md has figures.
SPINS = "2000"


class Terminated(BaseException):
    """SIGTERM arrived."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit with its code."""
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    signal.signal(signal.SIGTERM, _terminate)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with it ignored
    if arguments is not None:
        sys.argv[1:] = arguments  # other processes are started with the same words
    try:
        code, message = _outcome(arguments)
    except KeyboardInterrupt:
        code, message = 130, "interrupted"
    except Terminated:
        code, message = 143, "terminated"
    _finish(code, message)


def _outcome(arguments: Sequence[str] | None) -> tuple[int, str]:
    """The exit code of a command and what to say about it."""
    try:
        return app(arguments, exit_on_error=False, print_error=False, result_action="return_value") or 0, ""
    except CycloptsError as error:
        return 2, " ".join(str(error).split()).rstrip(".") + "; see --help"
    except ScalewiseError as error:
        return error.exit_code, str(error)
    except BrokenPipeError:
        sys.stdout = None  # nobody reads what is left
        return 1, ""
    finally:  # nothing may interrupt the end
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise Terminated


def _finish(code: int, message: str) -> NoReturn:
    if "RANK" in os.environ:
        from scalewise.engine.launch import leave_outcome

        if leave_outcome(code, message):  # the launching process speaks
            sys.exit(0 if code == 3 else code)
    if message:
        with contextlib.suppress(OSError):
            print(f"scalewise: {message}", file=sys.stderr)
    sys.exit(code)
