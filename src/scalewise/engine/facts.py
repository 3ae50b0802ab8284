"""What a run folder says about the model and the task, for whoever reads it later without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_flatten

from scalewise.documents import read_json
from scalewise.engine.loop import Training
from scalewise.engine.model import sha256
from scalewise.engine.samples import Samples
from scalewise.records import write_atomically

HASHED_SAMPLES = 256


def add_facts(environment: Path, training: Training) -> None:
    """Add `model` and `task` to env.json, unless they are there from before a resume."""
    known = read_json(environment) if environment.is_file() else {}
    if "model" not in known:
        task = {"samples": len(training.samples), "recipe": training.task.recipe.model_dump()}
        if training.samples.in_memory:
            task["data_sha256"] = data_sha256(training.samples)
        content = {**known, "model": model_facts(training.strategy.model.module), "task": task}
        write_atomically(environment, json.dumps(content, indent=2) + "\n")


def data_sha256(samples: Samples) -> str:
    """The hash of some samples, evenly spread, by which one can tell other data."""
    indices = torch.linspace(0, len(samples) - 1, min(len(samples), HASHED_SAMPLES)).long()
    leaves, _ = tree_flatten(samples.fetch(indices, torch.zeros_like(indices)))
    return sha256({str(number): leaf for number, leaf in enumerate(leaves)})


def model_facts(model: nn.Module) -> dict[str, Any]:
    """Its size, and its batch-norm layers with the smallest momentum, as torch defines it."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    layers = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    momenta = [layer.momentum for layer in layers if layer.momentum is not None]
    norm = {"layers": len(layers), "momentum": min(momenta, default=None)} if layers else None
    return {"parameters": parameters, "batch_norm": norm}
