"""What a run folder says about the model and the task, for whoever reads it later without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from scalewise.engine.loop import Training
from scalewise.records import write_atomically


def add_facts(environment: Path, training: Training) -> None:
    """Add `model` and `task` to env.json, unless they are there from before a resume."""
    known = json.loads(environment.read_text()) if environment.is_file() else {}
    if "model" not in known:
        task = {"samples": len(training.samples), "recipe": training.task.recipe.model_dump()}
        content = {**known, "model": model_facts(training.strategy.model.module), "task": task}
        write_atomically(environment, json.dumps(content, indent=2) + "\n")


def model_facts(model: nn.Module) -> dict[str, Any]:
    """Its size, and its batch-norm layers with the smallest momentum, as torch defines it."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    layers = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    momenta = [layer.momentum for layer in layers if layer.momentum is not None]
    norm = {"layers": len(layers), "momentum": min(momenta, default=None)} if layers else None
    return {"parameters": parameters, "batch_norm": norm}
