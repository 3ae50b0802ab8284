"""The loss as a function of all weights at once, on samples that do not change: what a minimum looks like."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from scalewise.engine.data import streams
from scalewise.engine.data.feed import placed
from scalewise.engine.data.samples import Samples, open_samples
from scalewise.engine.evaluate import right_statistics
from scalewise.engine.parallel.model import PlacedModel, numerics, sha256
from scalewise.engine.parallel.workers import means, precision
from scalewise.engine.placement import DeviceName, available_cores
from scalewise.engine.processes.team import Team, alone
from scalewise.engine.store import checkpoint
from scalewise.engine.store.folder import RunFolder, RunRecipe, read_recipe
from scalewise.errors import CheckpointError, RunFolderError, TaskError
from scalewise.recipe import Recipe, resolve
from scalewise.tasks.task import Batch, Data, Loss, MeanLoss, Task

SAMPLES = 1024  # of each part of the data, the same for every run and seed, so that runs can be compared
BATCH = 256  # samples at once, at least

Weights = Mapping[str, Tensor]  # parameters and buffers by name, as in model.safetensors


class Surface:
    """Mean loss f(x) over fixed samples; x is the vector of all trainable weights, in parameter order.

    The model is in evaluation mode (no dropout, fixed batch-norm statistics) and samples are not augmented, so f is a
    function. Label smoothing is left out: f is what evaluation reports.
    """

    def __init__(self, task: Task, recipe: Recipe, team: Team, samples: int) -> None:
        self._task, self._recipe, self._team = task, recipe, team
        self._model = PlacedModel(task, recipe, team)
        self._parameters = [*self._model.parameters.values()]
        self._training = open_samples(task.train, 0, "training")
        self._count = samples
        self._batches = {"train": self._fixed(self._training)}

    def _fixed(self, samples: Samples) -> list[Batch]:
        """The same samples whatever the seed, on the device."""
        order = torch.from_numpy(np.random.Generator(np.random.PCG64(0)).permutation(len(samples)))
        chosen = order[: self._count].sort().values
        rows = self._recipe.rows  # a micro batch was chosen for memory, a worker batch was not
        parts = chosen.split(rows if self._recipe.micro_batch else max(BATCH, rows))
        batches = (samples.fetch(part, torch.zeros_like(part)) for part in parts)
        return [placed(batch, self._team.device, self._recipe.layout) for batch in batches]

    def add_part(self, name: str, data: Data) -> None:
        """Make `numbers` possible on other data than the training data."""
        self._batches[name] = self._fixed(open_samples(data, 0, name))

    @property
    def samples(self) -> int:
        """Training samples that f is the mean over."""
        return min(self._count, len(self._training))

    @property
    def shapes(self) -> list[torch.Size]:
        """The shapes of the parameters that x is made of."""
        return [parameter.shape for parameter in self._parameters]

    def load(self, weights: Weights) -> np.ndarray:
        """Take a run's parameters and buffers; returns its x."""
        wanted = self._model.tensors()
        for name, tensor in wanted.items():
            if name not in weights or weights[name].shape != tensor.shape:
                found = f"shape {list(weights[name].shape)}" if name in weights else "none"
                raise TaskError(
                    f"the weights must be of this task's model, whose {name} has shape {list(tensor.shape)}, got "
                    f"{found}; give the task and the --set values that the run was trained with"
                )
        self._model.load({name: weights[name] for name in wanted})
        return torch.cat([parameter.detach().reshape(-1) for parameter in self._parameters]).cpu().double().numpy()

    def right_statistics(self) -> AbstractContextManager[None]:
        """The context in which batch-norm statistics are those of the present weights over training samples.

        With --statistics running they stay those that were loaded; without batch norm there are none.
        """
        return right_statistics(self._task, self._recipe, self._model, 0, self._training, 0, self._team.device)

    @torch.no_grad()
    def move(self, x: np.ndarray) -> None:
        """Give the model the weights x."""
        flat = torch.from_numpy(x).to(self._parameters[0].dtype).to(self._team.device)
        parts = flat.split([parameter.numel() for parameter in self._parameters])
        for parameter, part in zip(self._parameters, parts, strict=True):
            parameter.copy_(part.view(parameter.shape))

    @torch.no_grad()
    def numbers(self, part: str = "train") -> dict[str, float]:
        """Loss and metrics at the present weights."""
        names: list[str] = []
        rows = []
        for number, batch in enumerate(self._batches[part]):
            pairs = self._forward(number, batch).pairs()
            names = [*pairs]
            rows.append([float(value) for pair in pairs.values() for value in pair])
        return means(names, rows)

    def loss_and_gradient(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        """f(x) and ∇f(x)."""
        self.move(x)
        total = weight = 0.0
        gradient = np.zeros_like(x)
        for number, batch in enumerate(self._batches["train"]):
            loss = self._forward(number, batch)
            found = torch.autograd.grad(loss.root(1.0), self._parameters, materialize_grads=True)
            gradient += torch.cat([part.reshape(-1) for part in found]).cpu().double().numpy()
            totals = loss.pairs()["loss"]
            total, weight = total + float(totals[0]), weight + float(totals[1])
        return total / weight, gradient / weight

    def _forward(self, number: int, batch: Batch) -> Loss | MeanLoss:
        self._model.module.eval()
        streams.seed_everything(streams.key("surface", number), self._team.device)
        with precision(self._recipe, self._team.device):
            return self._task.evaluate(self._model.module, batch)


@contextmanager
def opened(task: Task, recipe: Recipe, samples: int = SAMPLES, device: DeviceName = "auto") -> Iterator[Surface]:
    """The loss surface of a task, on this process, with the recipe's numerics."""
    complete, _ = resolve(recipe, {}, "plain", available_cores())
    with alone(device) as team, numerics(complete, team.device, exact=True):
        yield Surface(task, complete, team, samples)


@dataclass(frozen=True)
class StoredWeights:
    """Parameters and buffers by name, where they come from, and how they were trained."""

    path: Path
    run: RunRecipe
    tensors: dict[str, Tensor]


def stored_weights(path: Path) -> StoredWeights:
    """The weights of a run folder (its model.safetensors, else its newest checkpoint), or of RUN/checkpoints/step-N."""
    if (path / "index.json").is_file():
        return StoredWeights(path, read_recipe(RunFolder(path.parent.parent)), checkpoint.model_tensors(path))
    folder = RunFolder(path)
    if not folder.recipe.is_file():
        raise RunFolderError(
            f"{path} must be the folder of a run, or one of its checkpoints, found no recipe.json or index.json in it; "
            f"check the path"
        )
    run = read_recipe(folder)
    if folder.model.is_file():
        return StoredWeights(path, run, _read(folder.model))
    saved = checkpoint.stored(folder.checkpoints)
    if not saved:
        raise RunFolderError(f"{path} must hold trained weights, found none; continue with train --resume {path}")
    return StoredWeights(saved[0], run, checkpoint.model_tensors(saved[0]))


def _read(file: Path) -> dict[str, Tensor]:
    try:
        tensors = load_file(file)
        with safe_open(file, "pt") as stored:
            expected = (stored.metadata() or {}).get("sha256")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}; train the run again") from None
    if expected is not None and sha256(tensors) != expected:
        raise CheckpointError(f"{file} is damaged: it does not have its own SHA-256; train the run again")
    return tensors
