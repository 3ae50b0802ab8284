"""Lightning: a callback that watches a Trainer's loop, and a task made of a LightningModule."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from scalewise.adapters.common import WAY_OUT, Shell, Watching, noise_values, parts_of, recipe_of, samples_in
from scalewise.errors import TaskError
from scalewise.extras import require
from scalewise.recipe import Recipe
from scalewise.tasks.task import Batch, Data, Loss, Task
from scalewise.watch.watcher import Watcher

require("lightning")

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer  # noqa: E402

Module = TypeVar("Module", bound=LightningModule)
STAGE = re.compile("^(train|training|val|valid|validation|test)[_/]")
TRAINING, EVALUATION = ("training_step",), ("validation_step", "test_step", "training_step")
EPOCHS = 5.0


class Scalewise(Watching, Callback):  # type: ignore[misc]  # Lightning is not there for a type checker
    """Watches a Trainer's loop: `Trainer(callbacks=[Scalewise()])`.

    At the end the noise scale goes to the Trainer's logger, and the findings are printed; `scalewise doctor <out>`
    shows them again.
    """

    _shell: Shell | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to watch, before the first step."""
        if not trainer.optimizers:
            return
        model, outputs = trainer.strategy.model, ()
        if not isinstance(model, DistributedDataParallel):
            model = self._shell = Shell(pl_module, "training_step")
            outputs = (pl_module, *pl_module.children())
        self.watcher = Watcher(model, trainer.optimizers[0], self._out, outputs=outputs)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the noise scale, print what was found."""
        if self.watcher is None:
            return
        self._close()
        if trainer.is_global_zero:
            values = noise_values(self.watcher)
            for logger in trainer.loggers if values else []:
                logger.log_metrics(values, step=trainer.global_step)
            if self._show:
                print(self.watcher.summary(), file=sys.stderr)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the module as it was."""
        self._close()

    def _close(self) -> None:
        if self.watcher is not None:
            self.watcher.close()
        if self._shell is not None:
            self._shell.remove()


def task(
    module: Callable[[], Module],
    train: Data | DataLoader[Any] | LightningDataModule,
    test: Data | DataLoader[Any] | None = None,
    validation: Data | DataLoader[Any] | None = None,
    *,
    worker_batch: int | None = None,
    epochs: float = EPOCHS,
    recipe: Recipe | None = None,
    weight: Callable[[Batch], Tensor | float] | None = None,
    **fields: Any,  # noqa: ANN401  (checked by Task)
) -> Task:
    """A task that trains with a LightningModule's `training_step` and evaluates with its `validation_step`.

    >>> task(MyModule, train_data, test_data)  # doctest: +SKIP

    The recipe is read from `configure_optimizers`. What the steps log becomes metrics, `val_acc` and `train_acc` both
    as `acc`; a torchmetrics object as its value in the batch. The loss of a `validation_step` that has none is that of
    `training_step`.

    Arguments:
        module: makes the LightningModule: its class, or a function.
        train, test, validation: tensors, data sets or DataLoaders; or a LightningDataModule alone.
        worker_batch, epochs: of the recipe that is read; the batch size of a DataLoader, else 32, and 5.
        recipe: in place of what `configure_optimizers` says.
        weight: what a batch counts, where the loss is not a mean over samples: for instance its number of tokens.
        fields: further fields of `sw.Task`, such as metric or buffers.
    """
    if isinstance(train, LightningDataModule):
        train.prepare_data()
        for stage in ("fit", "test"):
            train.setup(stage)
        loaders = [getattr(train, f"{name}_dataloader")() for name in ("train", "val", "test")]
        train, validation, test = (one or None for one in loaders)
    if test is None:
        raise TaskError("a task needs test data, got none; pass test=, or a datamodule with test_dataloader()")
    loaded = train.batch_size if isinstance(train, DataLoader) else None
    if recipe is None:
        recipe = recipe_of(_optimizer(module()), worker_batch or loaded or 32, epochs)
    data = parts_of(train, test, validation)
    names: dict[str, Any] = {"name": getattr(module, "__name__", "lightning").lower(), "recipe": recipe}
    return Task(model=module, step=lambda made, batch: _step(made, batch, weight), **data, **(names | fields))


def _optimizer(module: LightningModule) -> Optimizer:
    """The one optimizer that a module asks for, without a schedule."""
    made = module.configure_optimizers()
    if isinstance(made, list | tuple) and len(made) == 1:
        made = made[0]
    if isinstance(made, dict) and made.keys() == {"optimizer"}:
        made = made["optimizer"]
    if not isinstance(made, Optimizer):
        several = f"a {type(made).__name__} of {len(made)}" if isinstance(made, list | tuple | dict) else None
        raise TaskError(
            f"a recipe can be read where configure_optimizers returns one torch.optim.Optimizer and no schedule, got "
            f"{several or type(made).__name__}; {WAY_OUT}"
        )
    return made


def _step(module: Any, batch: Batch, weight: Callable[[Batch], Tensor | float] | None) -> Loss:  # noqa: ANN401
    """A LightningModule's own step as that of a task, with what it logs as metrics."""
    if not module.automatic_optimization:
        raise TaskError(
            f"a task needs a training_step that returns its loss and leaves the update to the engine, got "
            f"{type(module).__name__} with automatic_optimization = False; remove manual optimization"
        )
    mean, logged = _run(module, TRAINING if module.training else EVALUATION, batch)
    if mean is None and not module.training:  # it logs metrics alone
        mean, _ = _run(module, TRAINING, batch)
    if mean is None:
        raise TaskError(
            f"training_step of {type(module).__name__} must return its loss, alone or as {{'loss': …}}, got None"
        )
    count = samples_in(batch)
    counts = count if weight is None else weight(batch)
    return Loss(mean * counts, counts, {name: (value * count, count) for name, value in logged.items()})


def _run(module: Any, names: Sequence[str], batch: Batch) -> tuple[Tensor | None, dict[str, Tensor]]:  # noqa: ANN401
    """The loss and what is logged in the first of these steps that the module has; a loss may be logged only."""
    own = [name for name in names if getattr(type(module), name) is not getattr(LightningModule, name)]
    if not own:
        raise TaskError(f"a task needs a LightningModule with a training_step, got {type(module).__name__} without")
    logged: dict[str, Tensor] = {}
    module.log = lambda name, value, *_, **__: logged.update({_plain(name): _value(value)})
    module.log_dict = lambda values, *_, **__: [module.log(name, value) for name, value in values.items()]
    step = getattr(module, own[0])
    output = step(*(batch, 0)[: len(inspect.signature(step).parameters)])
    loss = output.get("loss") if isinstance(output, Mapping) else output
    known = logged.pop("loss", None)
    return (known if loss is None else loss), logged


def _plain(name: str) -> str:
    """A metric's name without the part of the data that it is of.

    >>> _plain("val_acc"), _plain("train/loss"), _plain("top5")
    ('acc', 'loss', 'top5')
    """
    return STAGE.sub("", name)


def _value(value: Any) -> Tensor:  # noqa: ANN401
    """A logged number; of a torchmetrics object its value in this batch."""
    if hasattr(value, "_forward_cache"):
        value = value.compute() if value._forward_cache is None else value._forward_cache
    return torch.as_tensor(value).detach()
