from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset

from scalewise.engine.data import streams
from scalewise.engine.data.samples import hold_out, open_samples
from scalewise.errors import TaskError


@given(st.integers(1, 30), st.integers(0, 100), st.integers(1, 100))
def test_every_epoch_is_a_permutation_wherever_it_is_cut(samples, start, length):
    stream = streams.SampleStream(samples, seed=3)
    whole, epochs = stream.take(0, 210)
    indices, part = streams.SampleStream(samples, seed=3).take(start, start + length)
    assert torch.equal(indices, whole[start : start + length])
    assert torch.equal(part, epochs[start : start + length])
    for epoch in range(210 // samples):
        assert sorted(whole[epoch * samples : (epoch + 1) * samples].tolist()) == list(range(samples))


def test_epochs_and_seeds_differ():
    first, second = streams.SampleStream(100, 0), streams.SampleStream(100, 1)
    assert not torch.equal(first.take(0, 100)[0], first.take(100, 200)[0])
    assert not torch.equal(first.take(0, 100)[0], second.take(0, 100)[0])


def test_keys_do_not_collide():
    keys = {streams.key("worker", 0, step, worker) for step in range(200) for worker in range(50)}
    assert len(keys) == 10_000


def test_sample_keys_depend_on_sample_epoch_and_seed_alone():
    indices, epochs = torch.tensor([5, 9, 5]), torch.tensor([0, 0, 1])
    together = streams.sample_keys(0, epochs, indices)
    alone = torch.cat([streams.sample_keys(0, epochs[i : i + 1], indices[i : i + 1]) for i in range(3)])
    assert torch.equal(together, alone)
    assert len({*together.tolist(), *streams.sample_keys(1, epochs, indices).tolist()}) == 6


class Noisy(Dataset):
    """Draws from every global generator, as careless data sets do."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return torch.tensor([index, torch.rand(()), random.random(), np.random.rand()])


def test_a_dataset_draws_the_same_whatever_was_fetched_before():
    samples = open_samples(Noisy(), seed=0, what="training")
    indices, epochs = torch.tensor([3, 7]), torch.tensor([0, 0])
    first = samples.fetch(indices, epochs)
    samples.fetch(torch.arange(20), torch.zeros(20, dtype=torch.long))
    assert torch.equal(first, samples.fetch(indices, epochs))
    assert torch.equal(first[1:], samples.fetch(indices[1:], epochs[1:]))
    assert not torch.equal(first, samples.fetch(indices, epochs + 1))


def test_held_out_samples_are_a_fixed_tenth():
    samples = open_samples((torch.arange(100), torch.arange(100)), seed=0, what="training")
    train, validation = hold_out(samples)
    seen = [part.fetch(torch.arange(len(part)), torch.zeros(len(part)))[0].tolist() for part in (train, validation)]
    assert (len(seen[0]), len(seen[1])) == (90, 10)
    assert sorted(seen[0] + seen[1]) == list(range(100))
    assert hold_out(samples)[1].chosen.tolist() == validation.chosen.tolist()


class Endless(IterableDataset):
    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (Endless(), "indexable"),
        (iter([1, 2]), "indexable"),
        ((torch.zeros(3), torch.zeros(4)), "same number of samples"),
        ((torch.zeros(0),), "at least 1"),
        (("a", "b"), "tensors"),
        (7, "map-style"),
    ],
)
def test_data_that_cannot_be_used_is_refused(data, words):
    with pytest.raises(TaskError, match=words):
        open_samples(data, seed=0, what="training")


def test_numpy_arrays_are_taken():
    batch = open_samples({"x": np.arange(4.0)}, 0, "training").fetch(torch.tensor([2]), torch.tensor([0]))
    assert batch["x"].tolist() == [2.0]


def test_loading_data_does_not_change_what_a_model_draws():
    samples = open_samples(Noisy(), seed=0, what="training")
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    samples.fetch(torch.tensor([3, 7]), torch.tensor([0, 0]))
    assert torch.equal(torch.rand(3), expected)
