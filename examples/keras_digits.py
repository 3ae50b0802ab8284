"""A Keras model on torch: trained by fit and watched (the lines marked with sw), or as a task by scalewise.

KERAS_BACKEND=torch python examples/keras_digits.py
scalewise train examples/keras_digits.py --workers 8 --processes 2 --batch-norm ghost:16
"""

import keras
from keras import layers

import scalewise as sw
from scalewise.adapters.keras import Scalewise  # sw
from scalewise.tasks.digits import load


def model() -> keras.Model:
    made = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(8, 3, use_bias=False),
            layers.BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dropout(0.1),
            layers.Dense(10),
        ]
    )
    made.compile(
        optimizer=keras.optimizers.Adam(0.002),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return made


def task() -> sw.Task:
    (x, y), (test_x, test_y) = load()
    return sw.adapters.keras.task(model, (x.movedim(1, -1), y), (test_x.movedim(1, -1), test_y))


if __name__ == "__main__":
    keras.utils.set_random_seed(0)
    images, labels = load()[0]
    network = model()
    network.fit(
        images.movedim(1, -1).numpy(),
        labels.numpy(),
        epochs=4,
        verbose=0,
        callbacks=[Scalewise()],  # sw
    )
    print("weights", sum(weight.value.double().sum().item() for weight in network.weights))
