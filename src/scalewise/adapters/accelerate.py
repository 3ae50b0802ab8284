"""Accelerate: watch the loop that it wraps."""

from __future__ import annotations

from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from scalewise.adapters.common import noise_values
from scalewise.extras import require
from scalewise.watch.watcher import Watcher, watch

require("accelerate")

from accelerate import Accelerator  # noqa: E402


class Scalewise:
    """Watches a loop of Accelerate: `Scalewise(accelerator, model, optimizer)` after `accelerator.prepare`.

    With `accelerator.end_training()`, else with the program, the noise scale goes to the accelerator's trackers and the
    findings are printed; `scalewise doctor <out>` shows them again.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: Optimizer,
        out: str | Path = "watch",
        show: bool = True,
    ) -> None:
        """Watch from now on until the accelerator's `end_training`.

        Arguments:
            out: a folder; each process writes its own file there.
            show: print the noise scale and the findings when training ends.
        """
        self.watcher: Watcher = watch(model, optimizer, out, show=show)
        self._accelerator, self._end_training = accelerator, accelerator.end_training
        accelerator.end_training = self._end

    def _end(self) -> None:
        """End watching, then training."""
        self.watcher.close()
        if self._accelerator.is_main_process:
            self._accelerator.log(noise_values(self.watcher))
        self._accelerator.end_training = self._end_training
        self._end_training()
