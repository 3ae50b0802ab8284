"""The phases of a training step, in the order in which a sample meets them.

A phase has **worked** while its own code ran: the data set's `__getitem__` in `read`, a layer's `forward` in `forward`,
whatever they did with that time (computing, reading a file, sleeping). It has **waited** while it could not go on
before somebody else was done: a loader process that has no batch ready (`queue`) or another process (`communication`).
The seconds of a training process, worked and waited, add up to its step. Work done beside the step, in loader processes
or threads that read ahead, is counted in full under its own phase and is not part of that sum; the step shows what it
waited for it.
"""

from __future__ import annotations

from typing import Literal, get_args

PhaseName = Literal[
    "read",
    "transport to memory",
    "preprocess",
    "queue",
    "transport to device",
    "forward",
    "loss",
    "output",
    "backward",
    "sum",
    "communication",
    "norms",
    "optimizer",
    "update",
    "return",
]
PHASES: tuple[PhaseName, ...] = get_args(PhaseName)
OTHER = "other"  # what is left of the step: the loop around the phases
INPUT: tuple[PhaseName, ...] = PHASES[:5]
READING: tuple[PhaseName, ...] = PHASES[:3]  # what loader processes do
COMPUTING: tuple[PhaseName, ...] = ("forward", "loss", "output", "backward")
UPDATING: tuple[PhaseName, ...] = ("sum", "norms", "optimizer", "update")

MEANING: dict[str, str] = {
    "read": "samples out of the data set",
    "transport to memory": "samples made one batch",
    "preprocess": "augmentation",
    "queue": "until the next batch was there",
    "transport to device": "batch to the device",
    "forward": "the model, layer by layer",
    "loss": "the loss of its output",
    "output": "metrics and numbers of it",
    "backward": "gradients, layer by layer",
    "sum": "workers' gradients added up",
    "communication": "with other processes",
    "norms": "gradient norms, clipping",
    "optimizer": "learning rate and new weights",
    "update": "new state put in its place",
    "return": "numbers read, record made",
    OTHER: "the loop around it",
}
