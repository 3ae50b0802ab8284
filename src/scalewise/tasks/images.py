"""Photographs in folders, one folder per class, decoded as they are needed, and a VGG-like network for them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from scalewise.errors import DataError, TaskError
from scalewise.recipe import Recipe
from scalewise.tasks import augment
from scalewise.tasks.augment import Pixels
from scalewise.tasks.task import Task, classifier, convolution

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = (".jpg", ".jpeg", ".png")
ENDS = {"JPEG": b"\xff\xd9", "PNG": b"IEND\xaeB\x60\x82"}
MOST_PIXELS = 1 << 26
TEST_PARTS = ("test", "val", "validation")
TEST_SHARE = 10
CONVOLUTIONS = (2, 2, 2, 3, 3, 3)
WIDTHS = (1, 2, 4, 8, 8, 8)
SMALLEST_SIZE = 8

Labelled = tuple[Path, int]


class ImageFiles(Dataset[tuple[Tensor, int]]):
    """Image files with labels, each as bytes of (3, size, size)."""

    def __init__(self, files: Sequence[Labelled], size: int) -> None:
        self.files = files
        self.size = size

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.files[index]
        return decode(path, self.size), label

    def describe(self, index: int) -> str:
        """The file, for messages."""
        return str(self.files[index][0])


@contextmanager
def _opened(path: Path) -> Iterator[Image]:
    """An image file, refused by its header where it would take too much memory, before any of it is decoded."""
    from PIL import Image

    try:
        with warnings.catch_warnings(action="ignore"), Image.open(path, formats=tuple(ENDS)) as image:
            width, height = image.size
            if width * height > MOST_PIXELS:
                raise ValueError(f"it has {width} × {height} pixels, at most {MOST_PIXELS:,} are allowed")
            yield image
    except Exception as error:  # whatever Pillow makes of a broken file
        empty = path.is_file() and not path.stat().st_size
        reason = "it is empty" if empty else str(error).removesuffix(f" {str(path)!r}")
        raise DataError(f"image {path} must be a readable JPEG or PNG file: {reason}; replace or remove it") from None


def decode(path: Path, size: int) -> Tensor:
    """The middle square of an image, scaled to size × size, in three colours."""
    from PIL import Image

    with _opened(path) as image:
        image.draft("RGB", (size, size))  # JPEG: decode no more than is needed
        colours = image.convert("RGB")
        side = min(colours.size)
        left, top = ((length - side) // 2 for length in colours.size)
        square = colours.crop((left, top, left + side, top + side)).resize((size, size), Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(square)).permute(2, 0, 1).contiguous()


def check(path: Path) -> None:
    """Refuse a file that is no image, is too large, or ends early; decode it as a whole only when in doubt."""
    with _opened(path) as image:
        kind = image.format or ""
    with path.open("rb") as file:
        file.seek(-min(64, path.stat().st_size), 2)
        ends_well = ENDS.get(kind, ENDS["JPEG"]) in file.read()
    if not ends_well:
        decode(path, SMALLEST_SIZE)


def find(folder: Path) -> tuple[list[str], list[Labelled]]:
    """The classes of a folder, which are its folders by name, and its image files in order."""
    if not folder.is_dir():
        raise DataError(f"folder {folder} must be a folder of image folders, found none; change --set folder=…")
    classes = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    files = [
        (path, label)
        for label, name in enumerate(classes)
        for path in sorted((folder / name).rglob("*"))
        if path.suffix.lower() in SUFFIXES and path.is_file()
    ]
    filled = {label for _, label in files}
    empty = [name for label, name in enumerate(classes) if label not in filled]
    if not classes or empty:
        got = f"no image in {folder / empty[0]}" if empty else f"no folder in {folder}"
        raise DataError(
            f"folder {folder} must hold one folder per class with {', '.join(SUFFIXES)} files, got {got}; add images "
            f"or remove the empty folder"
        )
    return classes, files


def split(folder: Path) -> tuple[list[str], list[Labelled], list[Labelled]]:
    """Classes, train and test files: the folders train and test (or val) if they exist, else a tenth held out."""
    if (folder / "train").is_dir():
        test_folder = next((folder / name for name in TEST_PARTS if (folder / name).is_dir()), None)
        if test_folder is None:
            raise DataError(f"folder {folder} has train but none of {', '.join(TEST_PARTS)}; add one of them")
        classes, train = find(folder / "train")
        test_classes, test = find(test_folder)
        if classes != test_classes:
            odd = sorted({*classes} ^ {*test_classes})
            raise DataError(f"{folder / 'train'} and {test_folder} must hold the same classes, only one has {odd[0]}")
        return classes, train, test
    classes, files = find(folder)
    if len(files) < 2:
        raise DataError(f"folder {folder} must hold at least 2 images, one to train and one to test, got {len(files)}")
    order = np.random.Generator(np.random.PCG64(0)).permutation(len(files))
    cut = max(1, len(files) // TEST_SHARE)
    return classes, [files[i] for i in sorted(order[cut:])], [files[i] for i in sorted(order[:cut])]


def vgg(classes: int, size: int, width: int, bn: bool) -> nn.Module:
    """15 convolutions, 6 poolings, 3 dense layers (after Simonyan and Zisserman 2015).

    The channels are 1, 2, 4, 8, 8 and 8 times `width`.
    """
    layers: list[nn.Module] = [Pixels()]
    channels = 3
    for count, factor in zip(CONVOLUTIONS, WIDTHS, strict=True):
        for _ in range(count):
            layers += convolution(channels, factor * width, bn)
            channels = factor * width
        layers.append(nn.MaxPool2d(2, ceil_mode=True))
        size = -(-size // 2)
    dense = 16 * width
    layers += [nn.Flatten(), nn.Linear(channels * size * size, dense), nn.ReLU(), nn.Linear(dense, dense), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(dense, classes))
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            assert module.bias is not None
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            nn.init.zeros_(module.bias)
    return model


def images(folder: Path, size: int = 64, width: int = 16, bn: bool = True, augmented: bool = True) -> Task:
    """Your own photographs: a folder per class, in train/ and test/ or together (a tenth is then the test data)."""
    try:
        import PIL  # noqa: F401
    except ImportError:
        raise TaskError("task images needs Pillow to read images; pip install 'scalewise[images]'") from None
    if size < SMALLEST_SIZE or width < 1:
        raise TaskError(
            f"size must be at least {SMALLEST_SIZE} and width at least 1, got {size} and {width}; change --set size=… "
            f"or width=…"
        )
    classes, train, test = split(folder)
    for path, _ in (*train, *test):
        check(path)
    data = ImageFiles(train, size), ImageFiles(test, size)
    changes = augment.images(augment.flip, augment.crop(size // 16)) if augmented else None
    recipe = Recipe(worker_batch=32, epochs=10.0, optimizer="adam", lr=0.001, layout="channels_last")
    return classifier("images", lambda: vgg(len(classes), size, width, bn), data, recipe, changes)
