"""What watching adds to a step of a plain loop, Lightning, Transformers and Keras.

python benchmarks/adapters.py [--rounds 128] [LIBRARY…]        # a table, on standard output

One training, whose watcher looks on for 16 steps and away for the next 16, by turns: two trainings beside each other
differ by up to 9 % where neither is watched, by their places in memory, and a machine's speed changes within seconds.
Every kind of look comes within 256 watched steps, so the ratio is that of sums; the interval is Student's over eight
parts of the training.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable

os.environ["KERAS_BACKEND"] = "torch"

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.hooks import RemovableHandle

import scalewise as sw
from scalewise.watch.watcher import Watcher

BATCH, INPUTS, WIDTH = 128, 784, 1024
SETTLED = 192  # steps that are not counted: the first ones are looked at more often
ROUND = 16  # steps
PARTS = 8  # of a training
T_95 = 2.365  # Student's, 7 degrees of freedom


class Clock:
    """Processor time of every step; it turns the watcher off and on."""

    def __init__(self) -> None:
        self.watcher: Callable[[], Watcher] | None = None
        self._ends: list[float] = []
        self._hidden: list[tuple[RemovableHandle, object]] = []

    def tick(self) -> None:
        """End a step."""
        self._ends.append(time.process_time())
        over, left = divmod(len(self._ends) - SETTLED, ROUND)
        if over >= 0 and left == 0:
            self._look_away() if over % 2 else self._look_on()
            self._ends[-1] = time.process_time()

    def _look_away(self) -> None:
        assert self.watcher is not None
        self._hidden = [(handle, _hooks(handle).pop(handle.id)) for handle in self.watcher()._handles]

    def _look_on(self) -> None:
        assert self.watcher is not None
        for handle, hook in self._hidden:
            _hooks(handle)[handle.id] = hook
        self.watcher()._ended_at = time.perf_counter()

    def rounds(self) -> list[tuple[float, float]]:
        """Seconds of a watched step and of one that is not, round by round."""
        marks = self._ends[SETTLED - 1 :: ROUND]
        spans = [(end - start) / ROUND for start, end in itertools.pairwise(marks)]
        return [*zip(spans[::2], spans[1::2], strict=False)]


def _hooks(handle: RemovableHandle) -> dict[int, object]:
    found: dict[int, object] | None = handle.hooks_dict_ref()
    assert found is not None
    return found


def data(steps: int) -> TensorDataset:
    torch.manual_seed(0)
    return TensorDataset(torch.randn(BATCH * steps, INPUTS), torch.randint(10, (BATCH * steps,)))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))


def plain(samples: TensorDataset, out: str, clock: Clock) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watcher = sw.watch(model, optimizer, out)
    clock.watcher = lambda: watcher
    for x, y in DataLoader(samples, BATCH):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        clock.tick()
    watcher.close()


def lightning(samples: TensorDataset, out: str, clock: Clock) -> None:
    import lightning.pytorch as L

    class Net(L.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def on_train_batch_end(self, *arguments: object, **named: object) -> None:
            clock.tick()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    watching = sw.adapters.lightning.Scalewise(out, show=False)
    clock.watcher = lambda: watching.watcher
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    L.Trainer(max_epochs=1, accelerator="cpu", callbacks=[watching], enable_model_summary=False, **quiet).fit(
        Net(), DataLoader(samples, BATCH)
    )


def transformers(samples: TensorDataset, out: str, clock: Clock) -> None:
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

    class Ticks(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *arguments: object, **known: object) -> None:
            clock.tick()

    torch.manual_seed(0)
    model = BertForSequenceClassification(
        BertConfig(vocab_size=64, hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=256)
    )
    rows = [
        {"input_ids": [(n * k) % 64 for k in range(16)], "labels": n % 2} for n in range(16 * len(samples) // BATCH)
    ]
    watching = sw.adapters.transformers.Scalewise(out, show=False)
    clock.watcher = lambda: watching.watcher
    arguments = TrainingArguments(
        tempfile.mkdtemp(), per_device_train_batch_size=16, num_train_epochs=1, report_to=[], use_cpu=True,
        save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    Trainer(model, arguments, train_dataset=rows, callbacks=[Ticks(), watching]).train()


def keras(samples: TensorDataset, out: str, clock: Clock) -> None:
    import keras as library
    from keras import layers

    class Ticks(library.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, *arguments: object, **named: object) -> None:
            clock.tick()

    wide = [layers.Dense(WIDTH, activation="relu") for _ in range(2)]
    model = library.Sequential([library.Input((INPUTS,)), *wide, layers.Dense(10)])
    model.compile(
        optimizer=library.optimizers.SGD(0.01), loss=library.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    watching = sw.adapters.keras.Scalewise(out, show=False)
    clock.watcher = lambda: watching.watcher
    x, y = (part.numpy() for part in samples.tensors)
    model.fit(x, y, batch_size=BATCH, epochs=1, verbose=0, callbacks=[watching, Ticks()])


LIBRARIES: dict[str, Callable[[TensorDataset, str, Clock], None]] = {
    "plain": plain,
    "lightning": lightning,
    "transformers": transformers,
    "keras": keras,
}


def measured(name: str, rounds: int) -> tuple[list[float], float]:
    """Watched to unwatched in each part of the training, and the milliseconds of an unwatched step."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        LIBRARIES[name](data(SETTLED + 2 * ROUND * rounds), folder, clock)
    pairs = clock.rounds()
    each = len(pairs) // PARTS
    parts = [pairs[start : start + each] for start in range(0, each * PARTS, each)]
    ratios = [sum(watched for watched, _ in part) / sum(without for _, without in part) for part in parts]
    return ratios, statistics.median(without for _, without in pairs) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("libraries", nargs="*", default=[*LIBRARIES])
    parser.add_argument("--rounds", type=int, default=128)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| loop | step, ms | watched ÷ unwatched, mean of 8 parts | its 95 % interval |\n|---|---|---|---|")
    for name in options.libraries:
        ratios, milliseconds = measured(name, options.rounds)
        middle, error = statistics.mean(ratios), T_95 * statistics.stdev(ratios) / math.sqrt(PARTS)
        print(f"| {name} | {milliseconds:.1f} | {middle:.3f} | {middle - error:.3f}–{middle + error:.3f} |", flush=True)


if __name__ == "__main__":
    main()
