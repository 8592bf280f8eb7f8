"""Layers with state, masks, randomness or unusual operations train as on one device."""

import itertools

import keras
import numpy as np
import parity
import pytest
import tensorflow as tf
from keras import layers, regularizers

RNG = np.random.RandomState(5)
X, Y = parity.regression(24)
SEQUENCE = RNG.randn(24, 6, 8)
IMAGES = RNG.randn(24, 8, 8, 3)
IDS = RNG.randint(0, 10, (24, 6)).astype("int32")


class Counter(keras.Layer):
    """Assigns its own state: a count of calls and a running mean of its inputs."""

    def build(self, shape):
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")
        self.mean = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False, name="mean")
        self.total = tf.Variable(0.0, trainable=False, name="total")

    def call(self, x, training=False):
        if training:
            self.calls.assign_add(1.0)
            self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(x, 0))
            self.total.assign_add(1.0)
        return x * 1.0


class Activity(keras.Layer):
    """Adds a loss of its own."""

    def call(self, x):
        self.add_loss(0.01 * keras.ops.mean(keras.ops.square(x)))
        return x


def stack(*inner, shape=(8,), outputs=1, dtype=None):
    return parity.compiled(keras.Sequential([keras.Input(shape, dtype=dtype), *inner, layers.Dense(outputs, name="out")]))


l2 = regularizers.L2(0.05)
MODELS = {
    "batch norm": (lambda: stack(layers.Dense(8, name="up"), layers.BatchNormalization(), layers.Dense(4, name="down")), X),
    "sync batch norm": (lambda: stack(layers.BatchNormalization(synchronized=True)), X),
    "group norm": (lambda: stack(layers.GroupNormalization(4)), X),
    "rms norm": (lambda: stack(layers.RMSNormalization()), X),
    "l2": (lambda: stack(layers.Dense(8, name="up", kernel_regularizer=l2, bias_regularizer=l2)), X),
    "activity regularizer": (lambda: stack(layers.Dense(8, name="up", activity_regularizer=regularizers.L1(0.01))), X),
    "add_loss": (lambda: stack(layers.Dense(8, name="up"), Activity(), layers.Dense(4, name="down")), X),
    "own state": (lambda: stack(layers.Dense(8, name="up"), Counter()), X),
    "constraint": (lambda: stack(layers.Dense(8, name="up", kernel_constraint=keras.constraints.MaxNorm(0.5))), X),
    "spectral norm": (lambda: stack(layers.SpectralNormalization(layers.Dense(8))), X),
    "lstm": (lambda: stack(layers.LSTM(8), shape=(6, 8)), SEQUENCE),
    "lstm sequences": (lambda: stack(layers.LSTM(8, return_sequences=True), layers.Flatten(), shape=(6, 8)), SEQUENCE),
    "gru": (lambda: stack(layers.GRU(8), shape=(6, 8)), SEQUENCE),
    "simple rnn": (lambda: stack(layers.SimpleRNN(8), shape=(6, 8)), SEQUENCE),
    "bidirectional": (lambda: stack(layers.Bidirectional(layers.GRU(4)), shape=(6, 8)), SEQUENCE),
    "masked lstm": (
        lambda: stack(layers.Embedding(10, 8, mask_zero=True), layers.LSTM(8), shape=(6,), dtype="int32"),
        IDS,
    ),
    "masked mean": (
        lambda: stack(
            layers.Embedding(10, 8, mask_zero=True), layers.GlobalAveragePooling1D(), shape=(6,), dtype="int32"
        ),
        IDS,
    ),
    "attention": (lambda: stack(SelfAttention(), layers.Flatten(), shape=(6, 8)), SEQUENCE),
    "conv": (
        lambda: stack(
            layers.Conv2D(4, 3, activation="relu"), layers.MaxPooling2D(), layers.Flatten(), shape=(8, 8, 3)
        ),
        IMAGES,
    ),
    "conv with batch norm": (
        lambda: stack(
            layers.Conv2D(4, 3, padding="same", strides=2),
            layers.BatchNormalization(),
            layers.AveragePooling2D(2),
            layers.Flatten(),
            shape=(8, 8, 3),
        ),
        IMAGES,
    ),
    "depthwise conv": (
        lambda: stack(layers.DepthwiseConv2D(3), layers.SeparableConv2D(4, 3), layers.Flatten(), shape=(8, 8, 3)),
        IMAGES,
    ),
    "conv transpose": (
        lambda: stack(layers.Conv2DTranspose(2, 3, strides=2), layers.Flatten(), shape=(8, 8, 3)),
        IMAGES,
    ),
    "conv1d": (lambda: stack(layers.Conv1D(4, 3, padding="causal"), layers.Flatten(), shape=(6, 8)), SEQUENCE),
    "time distributed": (lambda: stack(layers.TimeDistributed(layers.Dense(4)), layers.Flatten(), shape=(6, 8)), SEQUENCE),
    "einsum dense": (
        lambda: stack(layers.EinsumDense("abc,cd->abd", (6, 4), bias_axes="d"), layers.Flatten(), shape=(6, 8)),
        SEQUENCE,
    ),
    "prelu": (lambda: stack(layers.Dense(8, name="up"), layers.PReLU()), X),
}  # fmt: skip


class SelfAttention(keras.Layer):
    """Two heads on the sequence itself."""

    def __init__(self):
        super().__init__()
        self.attention = layers.MultiHeadAttention(2, 4, name="attention")

    def build(self, shape):
        self.attention.build(shape, shape)

    def call(self, x):
        return self.attention(x, x, use_causal_mask=True)


@pytest.mark.parametrize("name", MODELS)
def test_layer(name, float64):
    build, x = MODELS[name]
    parity.assert_parity(
        build,
        lambda m: m.fit(x, Y, batch_size=8, epochs=2, verbose=0, shuffle=False),
        check=lambda m: (m.predict(x, verbose=0), m(x[:6]).numpy(), m.evaluate(x, Y, verbose=0)),
    )


def test_the_states_did_change(float64):
    one, many = parity.assert_parity(
        MODELS["own state"][0], lambda m: m.fit(X, Y, batch_size=8, epochs=2, verbose=0, shuffle=False)
    )
    layer = next(layer for layer in many.model.layers if isinstance(layer, Counter))
    assert float(layer.calls) == 6 and float(layer.total) == 6


CELLS = (layers.LSTM, layers.GRU, layers.SimpleRNN)
QUICK = ("right", layers.LSTM)


@pytest.mark.parametrize(
    ("padding", "cell"),
    [
        pytest.param(*case, marks=[] if case == QUICK else pytest.mark.long)
        for case in itertools.product(("right", "left"), CELLS)
    ],
)
def test_masked_bidirectional_sequences(padding, cell, float64):
    """Keras' own unrolled recurrence applies the mask of the forward direction to the backward outputs."""
    ids = np.zeros((16, 5), "int32")
    for row, length in enumerate([1, 2, 3, 5] * 4):
        ids[row, :length] = np.arange(1, length + 1)
    ids = ids if padding == "right" else ids[:, ::-1].copy()

    def build():
        table = layers.Embedding(10, 4, mask_zero=True)
        both = layers.Bidirectional(cell(3, return_sequences=True))
        return stack(table, both, cell(2, go_backwards=True), shape=(5,), dtype="int32")

    parity.assert_parity(
        build,
        lambda m: m.fit(ids, Y[:16], batch_size=8, epochs=2, verbose=0, shuffle=False),
        check=lambda m: (m.predict(ids, verbose=0), m(ids).numpy()),
    )


@pytest.mark.parametrize("mesh", parity.MESHES)
def test_batch_norm_statistics_with_an_uneven_last_batch(mesh, float64):
    parity.assert_parity(
        MODELS["batch norm"][0],
        lambda m: m.fit(X[:21], Y[:21], batch_size=8, epochs=2, verbose=0, shuffle=False),
        mesh=mesh,
        check=lambda m: (m.evaluate(X, Y, verbose=0), m.predict(X, verbose=0)),
    )
