"""Two processes: FSDP2's sharded parameters against the same model as a whole; process 0 prints the differences."""

from __future__ import annotations

import copy
import json
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import scalewise as sw

OPTIMIZERS = {
    "LARS": lambda parameters: sw.optim.LARS(parameters, lr=0.5, weight_decay=0.1, trust_coefficient=0.1),
    "LARS, all": lambda parameters: sw.optim.LARS(
        parameters, lr=0.5, weight_decay=0.1, trust_coefficient=0.1, adapt_vectors=True
    ),
    "LAMB": lambda parameters: sw.optim.LAMB(parameters, lr=0.05, weight_decay=0.1),
    "LAMB, all": lambda parameters: sw.optim.LAMB(parameters, lr=0.05, weight_decay=0.1, adapt_vectors=True),
    "Muon": lambda parameters: sw.optim.Muon(parameters, lr=0.05),
    "SOAP": lambda parameters: sw.optim.SOAP(parameters, lr=0.05, every=2),
    "ScheduleFree": lambda parameters: sw.optim.ScheduleFree(parameters, lr=0.05, weight_decay=0.1),
}


def network() -> nn.Module:
    """Float64, with a layer of 7 rows, which two processes share unequally, and one of 1 row, which one has alone."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 1)).double()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(12, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()


def whole(model: nn.Module) -> torch.Tensor:
    values = [p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]
    return torch.cat([value.flatten() for value in values])


def compare(make) -> dict[str, float]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plain, sharded = network(), fully_shard(network(), mesh=mesh)
    start = whole(plain)
    optimizers = make(plain.parameters()), make(sharded.parameters())
    train(plain, optimizers[0], range(4))
    train(sharded, optimizers[1], range(2))
    stored = copy.deepcopy(optimizers[1].state_dict())
    again = fully_shard(network(), mesh=mesh)
    again.load_state_dict(sharded.state_dict())
    resumed = make(again.parameters())
    resumed.load_state_dict(stored)
    train(sharded, optimizers[1], range(2, 4))
    train(again, resumed, range(2, 4))
    local = sum(parameter.to_local().numel() for parameter in sharded.parameters())
    return {
        "moved": float((whole(plain) - start).norm()),
        "difference": float((whole(plain) - whole(sharded)).norm()),
        "resumed": float((whole(again) - whole(sharded)).norm()),
        "local_share": local / start.numel(),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {name: compare(make) for name, make in OPTIMIZERS.items()}
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    os._exit(0)  # FSDP2's meshes keep gloo's threads, which may abort a Python that ends in the usual way (docs/log.md)
