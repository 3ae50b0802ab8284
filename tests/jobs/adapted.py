"""What one library's adapter does, tried in one process: python adapted.py LIBRARY; prints a JSON document."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import torch

import scalewise as sw

torch.set_num_threads(1)


def trained(task: sw.Task, **changes: Any) -> sw.Result:
    *_, result = sw.train(task, task.recipe.replace(steps=3, threads=1, **changes))
    assert isinstance(result, sw.Result)
    return result


def refused(call: Any) -> str:
    try:
        call()
    except sw.ScalewiseError as error:
        return str(error)
    return ""


def lightning() -> dict[str, Any]:
    from lightning.pytorch import LightningModule
    from lightning_digits import Digits, load, task
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, TensorDataset

    made = task()
    torch.manual_seed(0)
    model, (x, y) = Digits(), load()[0]
    model.train()
    torch.manual_seed(1)
    loss = made.step(model, (x[:32], y[:32]))
    torch.manual_seed(1)
    output = model.net(x[:32])
    loaded = sw.adapters.lightning.task(Digits, DataLoader(TensorDataset(x, y), 64), (x[:9], y[:9]))

    class Scheduled(Digits):
        def configure_optimizers(self):
            return [super().configure_optimizers()], []

    class Plain(LightningModule):
        """Logs accuracy alone when it is evaluated."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(64, 10)

        def training_step(self, batch: Any) -> Any:
            return {"loss": F.cross_entropy(self.layer(batch[0].flatten(1)), batch[1])}

        def validation_step(self, batch: Any, number: int) -> None:
            self.log("val_acc", (self.layer(batch[0].flatten(1)).argmax(1) == batch[1]).float().mean())

        def configure_optimizers(self) -> Any:
            return {"optimizer": torch.optim.SGD(self.parameters(), lr=0.1)}

    class Manual(Plain):
        automatic_optimization = False

    class Idle(Plain):
        training_step = LightningModule.training_step

    plain, manual, idle = (sw.adapters.lightning.task(kind, *load()) for kind in (Plain, Manual, Idle))
    return {
        "recipe": made.recipe.model_dump(),
        "plain": trained(plain, workers=2).to_json()["test"],
        "manual": refused(lambda: trained(manual, workers=2)),
        "idle": refused(lambda: trained(idle, workers=2)),
        "loaded": loaded.recipe.worker_batch,
        "loss": [loss.total.item() / loss.weight, F.cross_entropy(output, y[:32]).item()],
        "accuracy": [
            float(loss.metrics["accuracy"][0]) / 32, (output.argmax(1) == y[:32]).float().mean().item()
        ],
        "refused": refused(lambda: sw.adapters.lightning.task(Scheduled, *load())),
        "result": trained(made, workers=2).to_json(),
    }  # fmt: skip


def transformers() -> dict[str, Any]:
    from torch.nn import functional as F
    from transformers import BertConfig, BertForSequenceClassification, TrainingArguments
    from transformers_symbols import CONFIG, GPT2LMHeadModel, rows, task

    made = task()
    model = GPT2LMHeadModel(CONFIG).eval()
    batch = {name: values[:20] for name, values in made.train.items()}
    loss = made.step(model, batch)
    logits, labels = model(**batch).logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
    small = BertConfig(
        vocab_size=16, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=2
    )
    texts = [{"input_ids": row["input_ids"], "labels": row["input_ids"][0] % 2, "text": "…"} for row in rows(64, 0)]
    words: dict[str, Any] = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "use_cpu": True}
    arguments = TrainingArguments("t", **words)
    read = sw.adapters.transformers.recipe_of

    class Lazy:  # a data set of dictionaries that is read row by row
        def __len__(self) -> int:
            return len(texts)

        def __getitem__(self, index: int) -> dict[str, Any]:
            return texts[index]

    bert = sw.adapters.transformers.task(
        lambda: BertForSequenceClassification(small), Lazy(), texts, arguments=arguments
    )
    return {
        "loss": [loss.total.item(), F.cross_entropy(logits, labels, reduction="sum").item()],
        "weight": [loss.weight, int((labels != -100).sum())],
        "accuracy": [int(loss.metrics["accuracy"][0]), int((logits.argmax(-1) == labels).sum())],
        "result": trained(made, workers=2).to_json(),
        "bert": trained(bert, workers=2).to_json(),
        "recipe": bert.recipe.model_dump(),
        "warm": read(TrainingArguments("t", warmup_steps=12, bf16=True, **words), 64).model_dump(),
        "rising": read(TrainingArguments("t", warmup_steps=0.25, **words), 64).warmup_epochs,
        "refused": refused(lambda: read(TrainingArguments("t", label_smoothing_factor=0.1, **words), 64)),
    }


def keras() -> dict[str, Any]:
    import keras_digits
    import numpy as np

    made = keras_digits.task()
    x, y = made.train
    build = keras_digits.model

    def frozen() -> Any:
        model = build()
        model.compile(optimizer="rmsprop", loss="mse")
        return model

    def counting(*metrics: object) -> list[object]:
        """Which metric counts in a task with these, and whether more of it is better."""

        def compiled() -> Any:
            layers = keras_digits.keras.layers
            model = keras_digits.keras.Sequential([layers.Flatten(), layers.Dense(2, activation="softmax")])
            model.compile("adam", "sparse_categorical_crossentropy", metrics=[*metrics])
            return model

        binary = x[:8], y[:8] % 2
        task = sw.adapters.keras.task(compiled, binary, binary)
        return [task.metric, task.higher_is_better]

    keras_digits.keras.utils.set_random_seed(0)
    ours = made.model()
    keras_digits.keras.utils.set_random_seed(0)
    theirs = build()
    theirs.layers[-2].rate = ours.keras_model.layers[-2].rate = 0.0
    module_loss = made.step(ours.train(), (x[:32], y[:32]))
    expected = theirs.train_on_batch(x[:32].numpy(), y[:32].numpy(), return_dict=True)
    ours.eval()
    theirs_after = theirs.layers[1]
    statistics = [ours.norm0.running_mean - theirs_after.moving_mean.value, ours.norm0.running_var * 0]
    folder = Path("keras-run")
    folder.mkdir()
    from safetensors.torch import save_file

    save_file({name: value.detach().clone() for name, value in ours.state_dict().items()}, folder / "model.safetensors")
    loaded = sw.adapters.keras.load(build(), folder)
    inputs = x[:16].numpy()
    return {
        "recipe": made.recipe.model_dump(),
        "loss": [module_loss.total.item() / 32, expected["loss"]],
        "accuracy": [float(module_loss.metrics["accuracy"][0]) / 32, expected["accuracy"]],
        "means": max(float(one.detach().abs().max()) for one in statistics),
        "loaded": float(np.abs(loaded.predict(inputs, verbose=0) - ours(x[:16]).detach().numpy()).max()),
        "refused": refused(lambda: sw.adapters.keras.task(frozen, made.train, made.test)),
        "counts": [
            counting(keras_digits.keras.metrics.SparseCategoricalAccuracy()),
            counting(keras_digits.keras.metrics.SparseCategoricalCrossentropy(name="entropy"), "accuracy"),
            counting(keras_digits.keras.metrics.IoU(2, [0], sparse_y_pred=False)),
        ],
        "result": trained(made, workers=2).to_json(),
        "ghost": trained(made, workers=2, batch_norm="ghost:16").to_json(),
        "sync": trained(made, workers=2, batch_norm="sync").to_json(),
    }


if __name__ == "__main__":
    print(json.dumps({"lightning": lightning, "transformers": transformers, "keras": keras}[sys.argv[1]]()))
