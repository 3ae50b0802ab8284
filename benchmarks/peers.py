"""Other tools that train on one process; each is imported only when it is its turn."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from rounds import LEARNING_RATE, MOMENTUM, WARM_UP_STEPS, Ready, Round, Seconds, Work, endless, images, now, per_step
from scalewise.tasks.augment import Pixels

Loader = Callable[[Work], DataLoader[Any]]


def accelerate(loader: Loader) -> Ready:
    def steps(work: Work) -> Iterator[None]:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        plain = work.model()
        model, optimizer, batches = accelerator.prepare(plain, work.optimizer(plain), loader(work))
        while True:
            for x, y in batches:
                optimizer.zero_grad()
                accelerator.backward(work.loss(model(images(x)), y))
                optimizer.step()
                yield

    return endless(steps)


def lightning(loader: Loader) -> Ready:
    @contextmanager
    def ready(work: Work) -> Iterator[Round]:
        import lightning.pytorch as pl

        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

        class Module(pl.LightningModule):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.model = work.model()

            def training_step(self, batch: list[Tensor], index: int) -> Tensor:
                return work.loss(self.model(images(batch[0])), batch[1])

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return work.optimizer(self.model)

        class Clock(pl.Callback):  # type: ignore[misc]
            def __init__(self) -> None:
                self.times: list[Seconds] = []

            def on_train_batch_end(self, *_: object) -> None:
                self.times.append(now())

        off = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
        module, batches = Module(), loader(work)

        def round(count: int) -> Seconds:
            clock = Clock()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                steps = WARM_UP_STEPS + count
                trainer = pl.Trainer(accelerator="cpu", devices=1, max_steps=steps, callbacks=[clock], **off)
                trainer.fit(module, batches)
            return between(clock.times, count)

        yield round

    return ready


@contextmanager
def keras(work: Work) -> Iterator[Round]:
    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    class Clock(keras.callbacks.Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.times: list[Seconds] = []

        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            self.times.append(now())

    x, y = work.data
    model = keras.Sequential([keras.Input(tuple(x.shape[1:]), dtype="uint8"), *keras_layers(work.model())])
    model.compile(
        optimizer=keras.optimizers.SGD(LEARNING_RATE, momentum=MOMENTUM),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=False,
    )
    mine, its = (sum(p.numel() for p in m.parameters() if p.requires_grad) for m in (model, work.model()))
    assert mine == its, f"the Keras model must have as many parameters as the torch model, {its}, got {mine}"

    def round(count: int) -> Seconds:
        clock = Clock()
        steps = WARM_UP_STEPS + count
        model.fit(x, y, batch_size=work.batch, steps_per_epoch=steps, verbose=0, callbacks=[clock])
        return between(clock.times, count)

    yield round


def keras_layers(model: nn.Module) -> list[Any]:
    """The same layers, in torch's order of dimensions."""
    import keras

    layers = keras.layers
    first = {"data_format": "channels_first"}
    same: dict[type[nn.Module], Callable[[Any], Any]] = {
        Pixels: lambda _: layers.Rescaling(1 / 255),
        nn.Conv2d: lambda m: layers.Conv2D(
            m.out_channels, m.kernel_size, padding="same", use_bias=m.bias is not None, **first
        ),
        nn.BatchNorm2d: lambda m: layers.BatchNormalization(axis=1, epsilon=m.eps, momentum=1 - m.momentum),
        nn.ReLU: lambda _: layers.ReLU(),
        nn.MaxPool2d: lambda m: layers.MaxPooling2D(m.kernel_size, **first),
        nn.Flatten: lambda _: layers.Flatten(),
        nn.Linear: lambda m: layers.Dense(m.out_features),
    }
    return [same[type(module)](module) for module in model.children()]


def between(times: Sequence[Seconds], count: int) -> Seconds:
    """Per step, from the end of the last step of warm-up to the end of the last one."""
    assert len(times) == WARM_UP_STEPS + count, f"{WARM_UP_STEPS + count} steps were asked for, got {len(times)}"
    return per_step(times[WARM_UP_STEPS - 1], times[-1], count)
