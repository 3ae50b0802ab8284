"""Contestants in processes of their own, as people run them: nobody shares a heap, a thread pool or a setting.

Run by `speed.py`: own_process.py NAME TASK WORKER_BATCH THREADS DATA. Takes a number of steps from each line on its
standard input and answers with the seconds of one of them.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TextIO

import torch

import contestants
from cases import Case
from rounds import Contestant, Ready, Round, Seconds, Work


def apart(who: Sequence[Contestant], case: Case, data: Path | None) -> list[Contestant]:
    """The same contestants, each in a process that waits for its turn."""
    return [replace(contestant, ready=_ready(contestant, case, data)) for contestant in who]


def _ready(contestant: Contestant, case: Case, data: Path | None) -> Ready:
    @contextlib.contextmanager
    def ready(work: Work) -> Iterator[Round]:
        if find_spec(contestant.needs) is None:
            raise ModuleNotFoundError(contestant.needs, name=contestant.needs)
        words = [contestant.name, case.task, str(case.worker_batch), str(work.threads), str(data or "")]
        command = [sys.executable, __file__, *words]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                _answer(process.stdout)  # it is ready, or says why not

                def round(steps: int) -> Seconds:
                    assert process.stdin is not None
                    assert process.stdout is not None
                    print(steps, file=process.stdin, flush=True)
                    return Seconds(*_answer(process.stdout)["seconds"])

                yield round
            finally:
                process.kill()

    return ready


def _answer(stream: IO[str]) -> dict[str, list[float]]:
    answer = json.loads(stream.readline() or '{"error": "it ended without a word"}')
    if "missing" in answer:
        raise ModuleNotFoundError(answer["missing"], name=answer["missing"])
    if "error" in answer:
        raise RuntimeError(answer["error"])
    assert isinstance(answer, dict)
    return answer


def _rounds(name: str, case: Case, threads: int, data: Path | None, answers: TextIO) -> None:
    everybody = {contestant.name: contestant for contestant in (*contestants.ONE_WORKER, *contestants.MANY_WORKERS)}
    torch.set_num_threads(threads)
    with everybody[name].ready(Work(case.load(data), case.worker_batch, threads)) as round:
        _say(answers, {"seconds": []})
        for line in sys.stdin:
            gc.collect()
            _say(answers, {"seconds": [*round(int(line))]})


def _say(answers: TextIO, answer: dict[str, list[float] | str | None]) -> None:
    print(json.dumps(answer), file=answers, flush=True)


def main(name: str, task: str, worker_batch: str, threads: str, data: str) -> None:
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # whatever frameworks print is no answer
        try:
            _rounds(name, Case(task, int(worker_batch)), int(threads), Path(data) if data else None, answers)
        except ModuleNotFoundError as error:
            _say(answers, {"missing": error.name})
        except Exception as error:
            _say(answers, {"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main(*sys.argv[1:])
