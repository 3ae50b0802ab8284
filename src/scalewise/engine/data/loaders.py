"""Loader processes: samples of a data set read, decoded and collated ahead of the step, delivered in order.

torch's DataLoader does the work. Each of its items is a whole batch, requested by sample numbers, so the same samples
come in the same order from any number of processes.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from scalewise.engine.data.samples import Samples
from scalewise.errors import Failed, ProcessFailed, ScalewiseError, UserCodeError, user_frames
from scalewise.tasks.task import Batch

AHEAD = 3  # batches that each loader process prepares before they are requested
DIE_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG

Request = tuple[Tensor, Tensor]  # (sample numbers, their epochs)


@dataclass(frozen=True)
class _Failure:
    """The message of a failure in a loader process: an exception would carry our own frames."""

    message: str
    exit_code: int


class _OnRequest(Dataset[Any]):
    """Whole batches by request."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __getitem__(self, request: Request) -> Batch | _Failure:
        try:
            return self._samples.fetch(*request)
        except ScalewiseError as error:
            return _Failure(str(error), error.exit_code)
        except Exception as error:
            return _Failure(f"a sample could not be loaded:\n{user_frames(error)}", UserCodeError.exit_code)


def load(samples: Samples, requests: Iterable[Request], loaders: int, pin_memory: bool) -> Iterator[Batch]:
    """The requested batches, in order, from `loaders` processes, which the calling thread starts at once.

    Requests are read ahead. From page-locked memory (`pin_memory`) CUDA copies without waiting.
    """
    with warnings.catch_warnings():  # there may be more of them than cores, as the user chose
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        loader = DataLoader(
            _OnRequest(samples),
            batch_size=None,
            sampler=requests,
            num_workers=loaders,
            prefetch_factor=AHEAD,
            collate_fn=lambda batch: batch,
            pin_memory=pin_memory,
            worker_init_fn=_begin,
            multiprocessing_context="fork",  # a task's own classes need not be importable by name
        )
        return _until_closed(iter(loader))


def _until_closed(batches: Any) -> Iterator[Batch]:  # noqa: ANN401  (DataLoader's own iterator)
    try:
        for batch in batches:
            if isinstance(batch, _Failure):
                raise Failed(batch.message, batch.exit_code)
            yield batch
    except (ConnectionError, EOFError, FileNotFoundError) as error:  # what a batch is fetched through went with it
        raise ProcessFailed(
            f"a loader process died while it handed a batch over ({error}); --resume continues the run"
        ) from None
    finally:
        batches._shutdown_workers()


def _begin(number: int) -> None:
    """Use one thread, leave signals to the training process, and end with it."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
