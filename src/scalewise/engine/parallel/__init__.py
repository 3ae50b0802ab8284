"""How one step is computed over processes: interchangeable siblings behind one protocol.

| name | each process holds | each process computes | what is exchanged |
|---|---|---|---|
| data | the model | some workers | gradients |
| fsdp | a part of every tensor | some workers | parameters, layer by layer, and gradients |
| pipeline | some layers | them, for every worker | activations and their gradients |
| tensor | a part of every large matrix | its part, for every worker | activations and their gradients |

    workers            one worker's part of a step, and its numbers
    model              the task's model on this process's device
    protocol           what a strategy is built from, and does
    lockstep           workers in turns, for batch norm over all of them
    split, stages      what the last three share; a model as a chain of layers

Public: `build`, `Strategy`, `Setup`, `PlacedModel`, `WorkerNumbers`, `StepNumbers`. Imports data, sums, update,
placement and processes.team of the engine.
"""

from __future__ import annotations

from scalewise.engine.parallel.data import DataParallel
from scalewise.engine.parallel.protocol import Setup, Strategy


def build(setup: Setup) -> Strategy:
    """The strategy of the placement; plain data parallelism on one process. torch's engines take time to import."""
    if setup.placement.parallel == "data" or setup.team.size == 1:
        return DataParallel(setup)
    if setup.placement.parallel == "fsdp":
        from scalewise.engine.parallel.fsdp import FullyShardedParallel

        return FullyShardedParallel(setup)
    if setup.placement.parallel == "pipeline":
        from scalewise.engine.parallel.pipeline import PipelineParallel

        return PipelineParallel(setup)
    from scalewise.engine.parallel.tensor import TensorParallel

    return TensorParallel(setup)
