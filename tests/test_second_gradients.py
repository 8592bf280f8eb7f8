"""A penalty on the gradient of the inputs trains as on one device: a gradient of a gradient meets what a first one does not.

The penalty is that of Gulrajani et al., 2017, arXiv:1704.00028.
"""

import keras
import numpy as np
import parity
import pytest
import tensorflow as tf
from keras import layers

RNG = np.random.RandomState(0)
IMAGE, ROWS = (6, 6, 4), (6, 4)
TARGETS = RNG.randn(16, 2)


class Penalized(keras.Sequential):
    """The mean squared error and the mean square of its outputs' gradient in the inputs."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                predictions = self(x, training=True)
            slope = inner.gradient(predictions, x)
            loss = keras.ops.mean((predictions - y) ** 2) + 10 * keras.ops.mean(slope**2)
        self.optimizer.apply(outer.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


class SelfAttention(layers.Layer):
    def __init__(self):
        super().__init__()
        self.attention = layers.MultiHeadAttention(2, 4)

    def call(self, x):
        return self.attention(x, x)


CASES = {
    "conv": (IMAGE, lambda: [layers.Conv2D(4, 3, padding="same", activation="tanh")]),
    "conv, strided": (IMAGE, lambda: [layers.Conv2D(4, 3, strides=2), layers.LeakyReLU(), layers.Conv2D(4, 2)]),
    "conv of rows": (ROWS, lambda: [layers.Conv1D(4, 3, padding="causal", activation="tanh")]),
    "transposed": (IMAGE, lambda: [layers.Conv2DTranspose(4, 3, strides=2, activation="tanh")]),
    "depthwise": (IMAGE, lambda: [layers.DepthwiseConv2D(3, strides=2, padding="same", activation="tanh")]),
    "separable": (IMAGE, lambda: [layers.SeparableConv2D(4, 3, activation="tanh")]),
    "groups": (IMAGE, lambda: [layers.Conv2D(8, 3, groups=4, activation="tanh")]),
    "average": (IMAGE, lambda: [layers.Dense(4, activation="tanh"), layers.AveragePooling2D(2)]),
    "maximum": (IMAGE, lambda: [layers.Dense(4, activation="tanh"), layers.MaxPooling2D(2), layers.Dense(4, "tanh")]),
    "resize": (IMAGE, lambda: [layers.UpSampling2D(2, interpolation="bilinear"), layers.Conv2D(4, 3, activation="tanh")]),
    "batch norm": (IMAGE, lambda: [layers.Conv2D(4, 3), layers.BatchNormalization(), layers.LeakyReLU()]),
    "spectral norm": (IMAGE, lambda: [layers.SpectralNormalization(layers.Conv2D(4, 3)), layers.Activation("silu")]),
    "layer norm": (ROWS, lambda: [layers.Dense(8, name="up"), layers.LayerNormalization(), layers.Dense(4, "gelu")]),
    "recurrence": (ROWS, lambda: [layers.LSTM(4)]),
    "attention": (ROWS, lambda: [SelfAttention()]),
}


def fit(shape):
    x = RNG.randn(16, *shape)
    return lambda model: model.fit(x, TARGETS, batch_size=8, epochs=2, shuffle=False, verbose=0)


def network(shape, make):
    def build():
        return parity.compiled(Penalized([keras.Input(shape), *make(), layers.Flatten(), layers.Dense(2, name="out")]))

    return build


@pytest.mark.parametrize("name", CASES)
def test_penalty_on_the_gradient(float64, name):
    shape, make = CASES[name]
    parity.assert_parity(network(shape, make), fit(shape))


@pytest.mark.parametrize("mesh", ["data=4", "model=4"])
def test_penalty_on_other_meshes(float64, mesh):
    names = ("conv", "depthwise", "average", "maximum")
    make = lambda: [layer for name in names for layer in CASES[name][1]()]  # noqa: E731
    parity.assert_parity(network((12, 12, 4), make), fit((12, 12, 4)), mesh)
