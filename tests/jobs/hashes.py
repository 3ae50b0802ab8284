"""Trains many recipes in one job of several processes; process 0 prints the hash of each as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import scalewise as sw

sys.path.insert(0, str(Path(__file__).parents[1]))

import models
from scalewise.engine.processes.team import leave
from scalewise.engine.sums import flat

DIGITS = {"workers": 8, "worker_batch": 16, "steps": 4, "lr": 0.05}

# name -> (task, recipe, placements in which it is trained)
CASES = {
    "momentum": (lambda: sw.load_task("digits"), DIGITS, ["ordered", "sharded", "server"]),
    "adam": (lambda: sw.load_task("digits"), DIGITS | {"optimizer": "adam", "lr": 0.002}, ["ordered", "sharded"]),
    "adamw": (lambda: sw.load_task("mlp"), DIGITS | {"optimizer": "adamw", "weight_decay": 0.1}, ["sharded"]),
    "nesterov, cosine": (lambda: sw.load_task("mlp"), DIGITS | {"optimizer": "nesterov", "schedule": "cosine"}, ["ordered"]),
    "batch norm": (lambda: sw.load_task("digits", ["bn=true"]), DIGITS, ["ordered", "server"]),
    "ghost batch norm": (lambda: sw.load_task("digits", ["bn=true"]), DIGITS | {"batch_norm": "ghost:4"}, ["ordered"]),
    "dropout": (lambda: sw.load_task("digits", ["dropout=0.3"]), DIGITS, ["ordered"]),
    "micro batches": (lambda: sw.load_task("digits", ["bn=true"]), DIGITS | {"micro_batch": 4}, ["sharded"]),
    "clipping": (lambda: sw.load_task("digits"), DIGITS | {"clip_norm": 0.1}, ["sharded", "server"]),
    "bf16": (lambda: sw.load_task("mlp"), DIGITS | {"precision": "bf16"}, ["ordered"]),
    "channels last": (lambda: sw.load_task("digits", ["bn=true"]), DIGITS | {"layout": "channels_last"}, ["sharded"]),
    "two threads": (lambda: sw.load_task("digits"), DIGITS | {"threads": 2, "steps": 3}, ["ordered"]),
    "tokens": (lambda: sw.load_task("chars"), DIGITS | {"steps": 3, "worker_batch": 4, "optimizer": "adam", "lr": 0.002}, ["ordered", "server"]),
    "larger than the data": (models.double_mlp, DIGITS | {"steps": 3}, ["ordered"]),
    "several buckets": (models.wide_mlp, DIGITS | {"steps": 4, "optimizer": "adam", "lr": 0.001, "clip_norm": 1.0}, ["ordered", "sharded", "server"]),
    "several buckets, micro batches": (models.wide_mlp, DIGITS | {"steps": 3, "micro_batch": 8}, ["sharded"]),
    "own buffer": (models.counting, DIGITS, ["ordered", "server"]),
    "data set": (models.dataset, DIGITS, ["ordered"]),
    "smoothed labels": (lambda: sw.load_task("mlp"), DIGITS | {"label_smoothing": 0.1}, ["ordered"]),
    "early stopping": (lambda: sw.load_task("mlp"), {"workers": 8, "worker_batch": 8, "epochs": 3.0, "patience": 1, "lr": 0.5}, ["ordered"]),
    "adascale": (lambda: sw.load_task("digits"), {"workers": 8, "worker_batch": 16, "epochs": 0.3, "lr_rule": "adascale", "schedule": "linear"}, ["ordered", "sharded"]),
    "batch norm over all workers": (lambda: sw.load_task("digits", ["bn=true", "dropout=0.2"]), DIGITS | {"batch_norm": "sync", "steps": 4}, ["ordered", "sharded"]),
    "batch norm over all workers, micro batches": (models.wide_mlp, DIGITS | {"batch_norm": "sync", "micro_batch": 8, "steps": 3}, ["ordered"]),
    "growth": (models.wide_mlp, DIGITS | {"steps": 8, "schedule": "growth", "drop": 2}, ["sharded"]),
    "lars": (lambda: sw.load_task("digits"), DIGITS | {"optimizer": "lars", "lr": 5.0, "weight_decay": 0.01}, ["sharded", "server"]),
    "lamb": (models.wide_mlp, DIGITS | {"steps": 4, "optimizer": "lamb", "lr": 0.01, "weight_decay": 0.01}, ["ordered", "sharded", "server"]),
    "lamb, all tensors": (lambda: sw.load_task("digits", ["bn=true"]), DIGITS | {"optimizer": "lamb", "lr": 0.01, "adapt_vectors": True, "clip_norm": 1.0}, ["sharded"]),
    "lamb, two threads": (models.wide_mlp, DIGITS | {"steps": 2, "optimizer": "lamb", "lr": 0.01, "threads": 2}, ["sharded"]),
    "muon": (lambda: sw.load_task("digits", ["bn=true"]), DIGITS | {"optimizer": "muon", "lr": 0.005, "layout": "channels_last"}, ["ordered", "server"]),
    "soap": (lambda: sw.load_task("digits", ["bn=true"]), DIGITS | {"steps": 12, "optimizer": "soap", "lr": 0.005, "layout": "channels_last"}, ["ordered", "server"]),
    "schedule-free": (lambda: sw.load_task("digits", ["bn=true"]), DIGITS | {"optimizer": "schedule-free", "lr": 0.01, "weight_decay": 0.1}, ["ordered", "sharded", "server"]),
    "schedule-free, early stopping": (lambda: sw.load_task("mlp"), {"workers": 8, "worker_batch": 8, "epochs": 3.0, "patience": 1, "optimizer": "schedule-free", "lr": 0.2}, ["sharded"]),
    "allreduce": (lambda: sw.load_task("digits"), DIGITS, ["allreduce"]),
}  # fmt: skip
PLACEMENTS = {
    "ordered": sw.Placement(device="cpu"),
    "sharded": sw.Placement(device="cpu", shard_optimizer=True),
    "server": sw.Placement(device="cpu", reduce="server"),
    "allreduce": sw.Placement(device="cpu", reduce="allreduce"),
}


def main(workers: int, names: list[str]) -> None:

    flat.BUCKET_BYTES = 256 << 10
    dist.init_process_group("gloo")
    found = {}
    for name, (task, fields, placements) in CASES.items():
        if names and name not in names:
            continue
        recipe = sw.Recipe(**({"threads": 1} | fields | {"workers": workers}))
        for placement in placements:
            *steps, result = sw.train(task(), recipe, PLACEMENTS[placement])
            updates = [step for step in steps if isinstance(step, sw.Step)]
            found[f"{name} ({placement})"] = {
                "sha256": result.weights_sha256,
                "best": result.best_sha256,
                "exact": result.exact,
                "test": result.test,
                "train": result.train,
                "noise": result.noise_scale,
                "losses": [step.loss for step in updates],
                "gradient_norms": [step.gradient_norm for step in updates],
            }
    if dist.get_rank() == 0:
        print(json.dumps(found))
    leave()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), sys.argv[2:])
