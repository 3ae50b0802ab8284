"""The weights of a stored run: its final model, or one of its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from scalewise.engine import checkpoint
from scalewise.engine.model import sha256
from scalewise.engine.run import RunFolder, RunRecipe, read_recipe
from scalewise.errors import CheckpointError, RunFolderError


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
        raise RunFolderError(f"{path} must hold trained weights, found none; go on with train --resume {path}")
    return StoredWeights(saved[0], run, checkpoint.model_tensors(saved[0]))


def _read(file: Path) -> dict[str, Tensor]:
    try:
        tensors = load_file(file)
        with safe_open(file, "pt") as stored:
            expected = (stored.metadata() or {}).get("sha256")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}; train the run anew") from None
    if expected is not None and sha256(tensors) != expected:
        raise CheckpointError(f"{file} is damaged: it does not have its own SHA-256; train the run anew")
    return tensors
