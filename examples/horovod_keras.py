"""The lecture's program: Keras with Horovod, on Keras 3 and torch; only the imports are other ones.

torchrun --nproc-per-node 2 examples/horovod_keras.py
torchrun --nproc-per-node 2 examples/horovod_keras.py watch && scalewise doctor watch
"""

import sys

import scalewise.horovod.keras as hvd  # was: import horovod.keras as hvd

# ruff: isort: split
import keras
import torch
from keras import layers

from scalewise.adapters.keras import Scalewise
from scalewise.tasks.digits import load

hvd.init()
torch.set_num_threads(1)
keras.utils.set_random_seed(hvd.rank())  # other samples, and weights until they are broadcast
(x, y), (test_x, test_y) = (tuple(tensor.numpy() for tensor in part) for part in load())
x, y = x[hvd.rank() :: hvd.size()], y[hvd.rank() :: hvd.size()]

model = keras.Sequential(
    [keras.Input(x.shape[1:]), layers.Flatten(), layers.Dense(64, activation="relu"), layers.Dense(10)]
)
rate = 0.002 * hvd.size()  # the learning rate grows with the processes …
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(rate))
model.compile(
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), optimizer=optimizer, metrics=["accuracy"]
)
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=rate, warmup_epochs=3, verbose=hvd.rank() == 0),  # … slowly
    hvd.callbacks.LearningRateScheduleCallback(initial_lr=rate, multiplier=0.1, start_epoch=5),
    *(Scalewise(out, show=False) for out in sys.argv[1:]),
]
history = model.fit(x, y, batch_size=32, epochs=6, callbacks=callbacks, verbose=2 if hvd.rank() == 0 else 0)
accuracy = model.evaluate(test_x, test_y, verbose=0)[1]
if hvd.rank() == 0:
    print(f"{hvd.size()} processes, test accuracy {accuracy:.4f}, learning rates {history.history['lr']}")
