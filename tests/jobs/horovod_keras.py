"""scalewise.horovod.keras on two processes against one process with the whole batch.

python -m torch.distributed.run --nproc-per-node 2 horovod_keras.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest

import scalewise.horovod.keras as hvd
from scalewise.horovod.torch import barrier

import keras  # isort: skip
import torch  # isort: skip

ROWS, BATCH = 32, 8


def data() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    return generator.normal(size=(ROWS, 4)), generator.normal(size=(ROWS, 2))


def model_of(optimizer: keras.optimizers.Optimizer, built: bool = True) -> keras.Model:
    layers = [keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((4,)), *layers] if built else layers)
    model.compile(loss="mse", optimizer=optimizer, metrics=["mae"])
    return model


def mine(rows: np.ndarray) -> np.ndarray:
    """This process's part of every batch of all processes."""
    parts = rows.reshape(ROWS // (BATCH * hvd.size()), hvd.size(), BATCH, -1)
    return parts[:, hvd.rank()].reshape(-1, rows.shape[1])


def check_training_equals_that_of_one_process() -> None:
    x, y = data()
    for kind, options in ((keras.optimizers.SGD, {"momentum": 0.9}), (keras.optimizers.Adam, {})):
        keras.utils.set_random_seed(5)
        whole = model_of(kind(0.05, **options))
        start = whole.get_weights()
        whole.fit(x, y, batch_size=BATCH * hvd.size(), epochs=3, shuffle=False, verbose=0)
        optimizer = hvd.DistributedOptimizer(kind(0.05, **options))
        assert isinstance(optimizer, kind)
        keras.utils.set_random_seed(hvd.rank())  # other weights on every process
        model = model_of(optimizer)
        if hvd.rank() == 0:
            model.set_weights(start)
        broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        history = model.fit(
            mine(x),
            mine(y),
            batch_size=BATCH,
            epochs=3,
            shuffle=False,
            verbose=0,
            callbacks=[broadcast, hvd.callbacks.MetricAverageCallback()],
        )
        for got, wanted in zip(model.get_weights(), whole.get_weights(), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
        assert history.history["loss"] == pytest.approx(whole.history.history["loss"], rel=1e-4)


def check_passes_per_step() -> None:
    x, y = data()
    weights = []
    for passes, batch in ((1, BATCH), (2, BATCH // 2)):
        keras.utils.set_random_seed(5)
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(0.1), backward_passes_per_step=passes, average_aggregated_gradients=True
        )
        model = model_of(optimizer)
        model.fit(mine(x), mine(y), batch_size=batch, shuffle=False, verbose=0)
        assert int(optimizer.iterations) == ROWS // (BATCH * hvd.size())
        weights.append(model.get_weights())
    for one, two in zip(*weights, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-6)


def check_a_model_that_is_built_late() -> None:
    keras.utils.set_random_seed(hvd.rank())
    model = model_of(hvd.DistributedOptimizer(keras.optimizers.Adam()), built=False)
    x, y = data()
    model.fit(
        mine(x), mine(y), batch_size=BATCH, verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    )
    flat = np.concatenate([weights.ravel() for weights in model.get_weights()])
    assert np.array_equal(*hvd.allgather(flat[None]))


def check_saved_models() -> None:
    model = model_of(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)))
    x, y = data()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        best = hvd.callbacks.BestModelCheckpoint(path, monitor="loss")
        model.fit(mine(x), mine(y), batch_size=BATCH, verbose=0, callbacks=[best])
        assert path.exists() == (hvd.rank() == 0), "process 0 writes"
        model.save(path)
        loaded = hvd.load_model(path)
        assert type(keras.saving.load_model(path).optimizer).__name__ == "Adam", "it loads without us, too"
    assert isinstance(loaded.optimizer, keras.optimizers.Adam)
    assert int(loaded.optimizer.iterations) == int(model.optimizer.iterations) > 0
    with pytest.raises(ValueError, match="wrap it once"):
        hvd.DistributedOptimizer(loaded.optimizer)


def check_values_and_mistakes() -> None:
    rank, size = hvd.rank(), hvd.size()
    assert hvd.allreduce(float(rank)) == (size - 1) / 2
    assert hvd.allgather(np.full((1, 2), rank)).tolist() == [[one] * 2 for one in range(size)]
    assert hvd.broadcast(np.array([rank]), 1).tolist() == [1]
    assert hvd.reducescatter(np.ones(size), op=hvd.Sum).tolist() == [size]
    model = model_of(keras.optimizers.SGD(0.1))
    model.layers[0].bias.assign(np.full(6, rank))
    hvd.broadcast_global_variables(1, model)
    assert model.layers[0].bias.numpy().tolist() == [1] * 6
    with pytest.raises(ValueError, match="BroadcastGlobalVariablesCallback"):
        hvd.broadcast_global_variables(0)
    with pytest.raises(ValueError, match="Keras optimizer"):
        hvd.DistributedOptimizer(torch.optim.SGD([torch.ones(1)]))


def check_local_variables() -> None:
    rank, size = hvd.rank(), hvd.size()
    x, y = data()
    model = model_of(hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)))
    for variable in model.variables:
        variable.assign(np.full(variable.shape, rank))
    own = model.layers[0].variables
    sent = hvd.callbacks.BroadcastGlobalVariablesCallback(1, local_variables=own)
    model.fit(mine(x), mine(y), batch_size=BATCH, verbose=0, callbacks=[sent])
    assert {float(variable.numpy().flat[0]) for variable in own} == {rank}
    assert {float(variable.numpy().flat[0]) for variable in model.layers[1].variables} == {1}
    optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(1.0), local_layers=model.layers[:1])
    optimizer.build(model.trainable_variables)
    optimizer.apply([torch.full(tuple(one.shape), rank + 1.0) for one in model.trainable_variables])
    assert float(own[0].numpy().flat[0]) == pytest.approx(rank - (rank + 1) / size)
    assert float(model.layers[1].kernel.numpy().flat[0]) == pytest.approx(1 - (size + 1) / 2)


def check_copies() -> None:
    wrapped = hvd.DistributedOptimizer(keras.optimizers.Adam(), op=hvd.Sum)
    for copied in (wrapped.from_config(wrapped.get_config()), type(wrapped).from_config(wrapped.get_config())):
        assert copied.get_config() == wrapped.get_config()
    copied = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Sum)
    copied = copied.from_config(copied.get_config())
    variable = keras.Variable(np.zeros(2))
    copied.build([variable])
    copied.apply([torch.ones(2)])
    assert variable.numpy().tolist() == [-hvd.size()] * 2, "a copy is distributed, too"


def check_elastic_state() -> None:
    rank = hvd.rank()
    x, y = data()
    model = model_of(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)))
    state = hvd.elastic.KerasState(model, batch=20 + rank, epoch=10 + rank)
    state.sync()
    assert (state.batch, state.epoch) == (20, 10)
    start = model.get_weights()
    callbacks = [hvd.elastic.UpdateBatchStateCallback(state), hvd.elastic.UpdateEpochStateCallback(state)]
    model.fit(mine(x), mine(y), batch_size=BATCH, epochs=2, verbose=0, callbacks=callbacks)
    assert (state.batch, state.epoch) == (0, 12)
    state.restore()
    assert (state.batch, state.epoch, int(model.optimizer.iterations)) == (20, 10, 0)
    assert all(map(np.array_equal, model.get_weights(), start))
    state.epoch = 0
    commit = hvd.elastic.CommitStateCallback(state, batches_per_commit=2)
    model.fit(mine(x), mine(y), batch_size=BATCH, verbose=0, callbacks=[*callbacks, commit])
    trained = model.get_weights()
    model.set_weights(start)
    other = hvd.elastic.KerasState(model_of(keras.optimizers.Adam()), batch=0, epoch=0)
    state.restore()
    other.load(state.saved())
    assert all(map(np.array_equal, model.get_weights(), trained))
    assert all(map(np.array_equal, other.model.get_weights(), trained))
    assert (state.epoch, other.epoch) == (1, 1)
    assert int(other.model.optimizer.iterations) == int(model.optimizer.iterations) > 0
    with pytest.raises(ValueError, match=r"keras\.Input"):
        hvd.elastic.KerasState(model_of(keras.optimizers.SGD(), built=False))


class Rates(keras.callbacks.Callback):
    """Notes the rate and momentum of every step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[float, float]] = []

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        self.seen.append((float(self.model.optimizer.learning_rate), self.model.optimizer.momentum))


def check_rates() -> None:
    size = hvd.size()
    x, y = data()
    rates = Rates()
    model = model_of(hvd.DistributedOptimizer(keras.optimizers.SGD(0.4, momentum=0.5)))
    callbacks = [
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.4, warmup_epochs=2),
        hvd.callbacks.LearningRateScheduleCallback(initial_lr=0.4, multiplier=lambda epoch: 0.5**epoch, start_epoch=2),
        rates,
    ]
    model.fit(mine(x), mine(y), batch_size=BATCH, epochs=4, verbose=0, callbacks=callbacks)
    steps = ROWS // (BATCH * size)
    rising = [0.4 / size * (1 + (step + 1) / steps * (size - 1) / 2) for step in range(2 * steps)]
    assert [rate for rate, _ in rates.seen] == pytest.approx(rising + [0.1] * steps + [0.05] * steps, rel=1e-5)
    before = [0.4, *(rate for rate, _ in rates.seen)]
    corrected = [0.5 * now / then for then, (now, _) in zip(before, rates.seen, strict=False)]
    assert [momentum for _, momentum in rates.seen] == pytest.approx(corrected, rel=1e-5)
    assert model.optimizer.momentum == 0.5


def main() -> None:
    torch.set_num_threads(1)
    hvd.init()
    for check in [value for name, value in globals().items() if name.startswith("check_")]:
        check()
        barrier()
        if hvd.rank() == 0:  # lines of several processes may run into each other
            print(check.__name__, flush=True)


if __name__ == "__main__":
    main()
