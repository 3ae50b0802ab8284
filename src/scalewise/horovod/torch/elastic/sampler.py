"""Samples of an epoch that is divided again when the number of processes changes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized

from torch.utils.data import Sampler

from scalewise.horovod.processes import rank, size


class ElasticSampler(Sampler[int]):
    """This process's share of the samples that the epoch still has.

    Call `record_batch` after each batch and `set_epoch` when an epoch has ended, and keep the sampler in a
    `TorchState`: after a restart only samples that no process has seen are shared out.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: all samples are to come."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that every process has trained on `batch_size` more samples."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        """Where the epoch is."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on from there, with the processes of now."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Share what is left among the processes of now; the first samples come twice when it does not divide."""
        self.num_replicas, self.rank = size(), rank()
        order = [*range(len(self.dataset))]
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        left = self.remaining_indices
        even = [left[index % len(left)] for index in range(self.total_size)]
        return iter(even[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples
