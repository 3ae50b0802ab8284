"""Transformers: a callback that watches the Trainer's loop, and a task made of a model and its configuration."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from scalewise.adapters.common import Watching, noise_values, parts_of, samples_in
from scalewise.engine.data.samples import open_samples
from scalewise.errors import TaskError
from scalewise.extras import require
from scalewise.recipe import Recipe
from scalewise.tasks.task import Batch, Data, Loss, Task
from scalewise.watch.watcher import watch

require("transformers")

from transformers import PreTrainedModel, TrainerCallback, TrainingArguments  # noqa: E402
from transformers.loss.loss_utils import ForCausalLMLoss  # noqa: E402

IGNORED = -100  # the label of positions that count for nothing
SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
USUAL = Recipe(worker_batch=8, epochs=3.0, optimizer="adamw", lr=5e-5, schedule="linear", clip_norm=1.0)


class Scalewise(Watching, TrainerCallback):  # type: ignore[misc]  # Transformers is not there for a type checker
    """Watches the Trainer's loop: `Trainer(…, callbacks=[Scalewise()])`.

    At the end the noise scale stands in the Trainer's log history, and the findings are printed; `scalewise doctor
    <out>` shows them again.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:  # noqa: ANN401
        """Begin to watch, before the first step."""
        model = known["model"]  # or what averages its gradients over processes, which callbacks do not receive
        wrappers = (one for one in gc.get_objects() if type(one) is DistributedDataParallel and one.module is model)
        self.watcher = watch(next(wrappers, model), known["optimizer"], self._out, show=self._show)

    def on_train_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:  # noqa: ANN401
        """Note the noise scale, print what was found."""
        if self.watcher is None:
            return
        self.watcher.close()
        if state.is_world_process_zero:
            state.log_history.append({"step": state.global_step, **noise_values(self.watcher)})


def task(
    model: Callable[[], PreTrainedModel],
    train: Data,
    test: Data,
    validation: Data | None = None,
    *,
    arguments: TrainingArguments | None = None,
    recipe: Recipe | None = None,
    weight: Callable[[Batch], Tensor | float] | None = None,
    **fields: Any,  # noqa: ANN401  (checked by Task)
) -> Task:
    """A task that trains a Transformers model, whose output holds its loss.

    >>> task(lambda: GPT2LMHeadModel(config), rows, test_rows)  # doctest: +SKIP

    The loss is a mean over samples, or over the tokens whose label is not −100, of all workers: never a mean of means.

    Arguments:
        model: makes the model; random weights come from `Model(config)` or `AutoModelFor….from_config(config)`.
        train, test, validation: dictionaries of tensors, data sets of dictionaries, or lists of them, padded.
        arguments: the Trainer's, from which the recipe is read.
        recipe: in place of what `arguments` say; without both, what the Trainer does by default.
        weight: what a batch counts, where the model's own loss is a mean over something else.
        fields: further fields of `sw.Task`, such as metric or buffers.
    """
    data = parts_of(train, test, validation)
    chosen = recipe or (
        USUAL if arguments is None else recipe_of(arguments, len(open_samples(data["train"], 0, "training")))
    )
    defaults: dict[str, Any] = {"name": "transformers", "recipe": chosen}
    return Task(model=model, step=lambda made, batch: _step(made, batch, weight), **data, **(defaults | fields))


def _step(model: Any, batch: Batch, weight: Callable[[Batch], Tensor | float] | None) -> Loss:  # noqa: ANN401
    output = model(**batch)
    if output.loss is None:
        raise TaskError(f"a batch must hold labels, got {', '.join(batch)}; add them to the data")
    labels, logits = batch.get("labels"), getattr(output, "logits", None)
    if labels is not None and labels.ndim > 1 and getattr(model, "loss_function", None) is ForCausalLMLoss:
        labels = labels[:, 1:]  # a causal model predicts all but the first, each at the position before it
        logits = None if logits is None else logits[:, :-1]
    places = None if labels is None or labels.is_floating_point() else labels != IGNORED
    count = samples_in(batch) if places is None else int(places.sum())
    counts = count if weight is None else weight(batch)
    return Loss(output.loss * counts, counts, _accuracy(logits, labels, places))


@torch.no_grad()
def _accuracy(logits: Tensor | None, labels: Tensor | None, places: Tensor | None) -> dict[str, tuple[Tensor, float]]:
    """The share of right labels among the places that count, of a model that gives a logit for each."""
    if logits is None or labels is None or places is None or logits.ndim != labels.ndim + 1:
        return {}
    right = (logits.argmax(-1) == labels) & places
    return {"accuracy": (right.sum(), float(places.sum()))}


def recipe_of(arguments: TrainingArguments, samples: int) -> Recipe:
    """The single-worker recipe that TrainingArguments ask for; decay is that of all parameters here.

    `samples` of the training data say in epochs how long the warm-up is.
    """
    optimizer, schedule = str(arguments.optim.value), str(arguments.lr_scheduler_type.value)
    refused = [name for name in ("fp16", "label_smoothing_factor") if getattr(arguments, name)]
    if not optimizer.startswith("adamw_torch") or schedule not in SCHEDULES or refused:
        raise TaskError(
            f"a recipe can be read from arguments with optim adamw_torch, a linear, cosine or constant schedule and "
            f"without fp16 and label smoothing, got {', '.join([optimizer, schedule, *refused])}; say how it is "
            f"learned with recipe=sw.Recipe(…)"
        )
    steps = {"steps": arguments.max_steps} if arguments.max_steps > 0 else {}
    accumulated = arguments.gradient_accumulation_steps
    rows = arguments.per_device_train_batch_size
    epochs = float(arguments.num_train_epochs)
    all_steps = steps.get("steps", round(epochs * samples / (rows * accumulated)))
    warmup_steps = 0 if schedule == "constant" else arguments.get_warmup_steps(all_steps)
    return Recipe(
        worker_batch=rows * accumulated,
        micro_batch=rows if accumulated > 1 else None,
        epochs=epochs,
        optimizer="adamw",
        lr=arguments.learning_rate,
        beta1=arguments.adam_beta1,
        beta2=arguments.adam_beta2,
        epsilon=arguments.adam_epsilon,
        weight_decay=arguments.weight_decay,
        warmup_epochs=warmup_steps * rows * accumulated / samples,
        schedule=SCHEDULES[schedule],
        clip_norm=arguments.max_grad_norm or None,
        precision="bf16" if arguments.bf16 else "fp32",
        seed=arguments.seed,
        **steps,
    )
