"""Random changes of images: what they do, and that they belong to the sample and not to the batch."""

from __future__ import annotations

import pytest
import torch

import scalewise as sw
from scalewise.engine.data.streams import sample_keys

IMAGES = torch.randint(1, 256, (500, 3, 12, 10), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
KEYS = sample_keys(0, torch.zeros(500, dtype=torch.long), torch.arange(500))
CHANGES = {"flip": sw.augment.flip, "crop": sw.augment.crop(3), "cutout": sw.augment.cutout(4)}


@pytest.mark.parametrize("name", CHANGES)
def test_a_sample_is_changed_alike_in_any_batch(name):
    whole = CHANGES[name](IMAGES, KEYS)
    assert (whole.shape, whole.dtype) == (IMAGES.shape, IMAGES.dtype)
    assert not torch.equal(whole, IMAGES)
    chosen = torch.tensor([400, 3, 77])
    assert torch.equal(CHANGES[name](IMAGES[chosen], KEYS[chosen]), whole[chosen])


def test_flip_mirrors_half():
    changed = sw.augment.flip(IMAGES, KEYS)
    mirrored = [torch.equal(new, old.flip(2)) for new, old in zip(changed, IMAGES, strict=True)]
    kept = [torch.equal(new, old) for new, old in zip(changed, IMAGES, strict=True)]
    assert all(a != b for a, b in zip(mirrored, kept, strict=True))
    assert 200 < sum(mirrored) < 300


def test_crop_is_a_slice_of_the_padded_image():
    changed = sw.augment.crop(3)(IMAGES, KEYS)
    padded = torch.nn.functional.pad(IMAGES, [3] * 4)
    offsets = set()
    for new, old in zip(changed, padded, strict=True):
        found = [
            (top, left)
            for top in range(7)
            for left in range(7)
            if torch.equal(new, old[:, top : top + 12, left : left + 10])
        ]
        assert len(found) == 1
        offsets.add(found[0])
    assert len(offsets) == 49  # every shift occurs among 500 images


def test_cutout_blackens_one_square():
    changed = sw.augment.cutout(4)(IMAGES, KEYS)
    black = (changed == 0).all(1)  # (sample, row, column); the images hold no zero
    assert torch.equal(changed[~black.unsqueeze(1).expand_as(changed)], IMAGES[~black.unsqueeze(1).expand_as(changed)])
    sizes = black.any(2).sum(1) * black.any(1).sum(1)
    assert torch.equal(sizes, black.sum((1, 2)))  # a rectangle
    assert sizes.max() == 16
    assert sizes.min() >= 4  # cut off at a corner


def test_changes_in_a_row_draw_independently():
    twice = sw.augment.images(sw.augment.flip, sw.augment.flip)
    changed, labels = twice((IMAGES, torch.arange(500)), KEYS)
    kept = [torch.equal(new, old) for new, old in zip(changed, IMAGES, strict=True)]
    assert 200 < sum(kept) < 300
    assert torch.equal(labels, torch.arange(500))


def test_epochs_differ_and_seeds_differ():
    draws = {
        tuple(sw.augment.draw(sample_keys(seed, torch.full((8,), epoch), torch.arange(8)), 0, 1000).tolist())
        for seed in range(4)
        for epoch in range(4)
    }
    assert len(draws) == 16


def test_draws_are_uniform():
    keys = sample_keys(1, torch.zeros(70_000, dtype=torch.long), torch.arange(70_000))
    counts = torch.bincount(sw.augment.draw(keys, 0, 7), minlength=7)
    assert len(counts) == 7
    assert ((counts - 10_000).abs() < 400).all()  # 4 standard deviations
