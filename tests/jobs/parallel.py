"""Trains tasks with every kind of parallelism in one job of several processes; process 0 prints the outcomes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import scalewise as sw

sys.path.insert(0, str(Path(__file__).parents[1]))

import models
from scalewise.engine.loop import Training
from scalewise.engine.parallel.model import sha256
from scalewise.engine.processes.team import leave
from scalewise.engine.store import checkpoint
from scalewise.errors import TaskError
from scalewise.runs.bench.parallelism import take_step
from scalewise.runs.bench.payload import Payload

STEPS = {"workers": 4, "worker_batch": 4, "micro_batch": 2, "steps": 3, "lr": 0.05, "threads": 1}
ADAM = {"optimizer": "adam", "lr": 0.002}
LAYER_WISE = {"weight_decay": 0.1, "adapt_vectors": True}
SPLIT = ("fsdp", "pipeline")
NEW = (*SPLIT, "tensor")
EVERY = (*NEW, "server")

# name -> (task, recipe, kinds of parallelism)
CASES = {
    "mlp": (models.deep_mlp, STEPS, EVERY),
    "cnn": (lambda: models.doubled(sw.load_task("digits", ["bn=true"])), STEPS, ("fsdp", "pipeline", "server")),
    "chars": (lambda: models.doubled(sw.load_task("chars", ["context=16", "layers=1"])), STEPS | ADAM, EVERY),
    "clipped": (models.deep_mlp, STEPS | {"clip_norm": 0.1}, ("tensor",)),
    "adascale": (models.deep_mlp, STEPS | {"lr_rule": "adascale"}, ("tensor",)),
    "bytes, clipped": (lambda: sw.load_task("mlp", ["hidden=97"]), STEPS | {"clip_norm": 0.1}, SPLIT),
    "bytes, lars": (models.few_chars, STEPS | LAYER_WISE | {"optimizer": "lars"}, SPLIT),
    "bytes, lamb": (models.few_chars, STEPS | LAYER_WISE | {"optimizer": "lamb"}, SPLIT),
    "bytes, schedule-free": (models.few_chars, STEPS | {"optimizer": "schedule-free", "weight_decay": 0.1}, SPLIT),
    "schedule-free": (models.deep_mlp, STEPS | {"optimizer": "schedule-free", "weight_decay": 0.1}, ("tensor",)),
    "bytes, adascale": (lambda: sw.load_task("digits", ["bn=true"]), STEPS | {"lr_rule": "adascale"}, SPLIT),
    "bytes": (lambda: sw.load_task("mlp"), STEPS | ADAM, SPLIT),
    "bytes, batch norm": (lambda: sw.load_task("digits", ["bn=true"]), STEPS, SPLIT),
    "bytes, tokens": (models.few_chars, STEPS | ADAM, (*SPLIT, "sharded")),
    "bytes, own buffer": (models.counting, STEPS, ("fsdp",)),
    "bytes, dropout": (lambda: sw.load_task("mlp", ["dropout=0.2"]), STEPS, ("fsdp",)),
    "bytes, one micro batch": (lambda: sw.load_task("digits"), STEPS | {"micro_batch": None}, ("pipeline",)),
    "bytes, a parameter without use": (models.wide_mlp, STEPS, ("fsdp",)),
    "bytes, growth": (lambda: sw.load_task("mlp"), STEPS | {"steps": 8, "schedule": "growth", "drop": 2}, SPLIT),
    "bytes, own step": (lambda: models.stepped("keyword"), STEPS, SPLIT),
    "own step": (lambda: models.doubled(models.stepped("keyword")), STEPS, ("tensor",)),
    "dropout": (lambda: sw.load_task("mlp", ["dropout=0.2"]), STEPS, ("pipeline",)),
}  # fmt: skip
PLACEMENTS = {
    "allreduce": sw.Placement(device="cpu", reduce="allreduce"),
    "server": sw.Placement(device="cpu", reduce="server"),
    "sharded": sw.Placement(device="cpu", shard_optimizer=True),
    "alone": sw.Placement(device="cpu"),
    **{name: sw.Placement(device="cpu", parallel=name) for name in ("data", "fsdp", "pipeline", "tensor")},
}
REFUSED = [(how, "pipeline") for how in ("twice", "part", "penalty")] + [("peeks", "tensor"), ("penalty", "fsdp")]
PAYLOADS = ("data", "allreduce", "sharded", "server", "fsdp", "pipeline")
CHAINS = {
    "unbroken": ["alone"] * 5,
    "changing": ["data", "fsdp", "pipeline", "sharded", "alone"],
    "tensor": ["fsdp", "tensor", "pipeline", "tensor", "alone"],
    "mlp": ["alone"] * 5,
}


def outcome(task: sw.Task, fields: dict, placement: str) -> dict:
    with Training(task, sw.Recipe(**fields), PLACEMENTS[placement], alone=placement == "alone") as training:
        *steps, result = training.records()
        held = training.strategy.held()
    updates = [step for step in steps if isinstance(step, sw.Step)]
    return {
        "sha256": result.weights_sha256,
        "exact": result.exact,
        "losses": [step.loss for step in updates],
        "norms": [step.gradient_norm for step in updates],
        "test": result.test["loss"],
        "held": [held.parameters, held.gradients, held.optimizer],
    }


def payload(placement: str) -> dict:
    """What this process moves in a step, by kind: [sent, received] bytes."""
    recipe = sw.Recipe(workers=4, worker_batch=8, micro_batch=4, steps=3, threads=1)
    with Training(models.whole_chunks(), recipe, PLACEMENTS[placement]) as training:
        take_step(training)
        with Payload(training.team) as counted:
            take_step(training)
    return {kind: [found.sent_bytes, found.received_bytes] for kind, found in counted.found.items()}


def resumed(kinds: list[str], folder: Path) -> dict:
    """A training that goes on with another kind of parallelism every two steps, and ends on one process."""
    split = folder.name in ("tensor", "mlp")
    task = sw.load_task("mlp") if split else sw.load_task("digits", ["bn=true"])
    rule = {"optimizer": "adam"} if split else {"optimizer": "lamb", "clip_norm": 0.5}
    recipe = sw.Recipe(workers=4, worker_batch=8, micro_batch=4, steps=2 * len(kinds), threads=1, lr=0.01, **rule)
    for number, kind in enumerate(kinds):
        dist.barrier()
        with Training(task, recipe, PLACEMENTS[kind], pause_every=2, alone=kind == "alone") as training:
            if number:
                checkpoint.load(training, folder / f"step-{2 * number}")
            for record in training.records():
                if isinstance(record, sw.Step) and record.step == 2 * number + 2:
                    break
            if dist.get_rank() == 0 or kind != "alone":
                checkpoint.save(training, folder)
            with training.strategy.whole() as model:
                found = {"sha256": sha256(model.tensors()), "exact": training.progress.exact, "loss": record.loss}
    return found


def refusal(how: str, placement: str) -> str:
    """What is said of a step that cannot be done in parts."""
    try:
        outcome(models.stepped(how), STEPS, placement)
    except TaskError as error:
        return str(error)
    return "it was trained"


def main(names: list[str]) -> None:
    dist.init_process_group("gloo")
    found = {}
    references = {}
    for name, (task, fields, placements) in CASES.items():
        if names and name not in names:
            continue
        if dist.get_rank() == 0:
            references[name] = outcome(task(), fields, "alone")
        for placement in placements:
            found[f"{name} ({placement})"] = outcome(task(), fields, placement)
    chains = {} if names else {name: resumed(chain, Path(name)) for name, chain in CHAINS.items()}
    refused = {} if names else {f"{how} ({where})": refusal(how, where) for how, where in REFUSED}
    stages = dist.get_world_size() <= 2  # the model of which payload is counted has two
    moved = {name: payload(name) for name in PAYLOADS if stages or name != "pipeline"}
    everybody: list[tuple[dict, dict]] = [({}, {})] * dist.get_world_size()
    dist.all_gather_object(everybody, (found, moved))
    if dist.get_rank() == 0:
        for name, run in found.items():
            run["held"] = [other[name]["held"] for other, _ in everybody]
            assert len({other[name]["sha256"] for other, _ in everybody}) == 1, f"{name}: processes drifted apart"
        payloads = [other for _, other in everybody]
        document = {"alone": references, "runs": found, "chains": chains, "payloads": payloads, "refused": refused}
        print(json.dumps(document), flush=True)
    leave()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
