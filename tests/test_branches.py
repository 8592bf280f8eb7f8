"""Branches and loops in a step: a weight that only one branch reads, gradients of both orders, results that are split."""

import keras
import numpy as np
import parity
import pytest
import tensorflow as tf
from keras import layers
from tensorflow.experimental import dtensor
from test_second_gradients import Penalized

import tfpar
from tfpar import transfer

RNG = np.random.RandomState(0)
X, Y = RNG.randn(16, 6, 4), RNG.randn(16, 2)
RULES = {r".*branches.*/wide": (None, "model"), r".*branches.*/narrow": ("model", None)}


class Branches(layers.Layer):
    """Takes its branches in turn, step by step."""

    def __init__(self, choose):
        super().__init__(name="branches")
        self.choose = choose

    def build(self, shape):
        self.wide = self.add_weight(shape=(shape[-1], 8), name="wide")
        self.narrow = self.add_weight(shape=(8, shape[-1]), name="narrow")
        self.gain = self.add_weight(shape=(shape[-1],), initializer="ones", name="gain")
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")

    def call(self, x):
        self.calls.assign_add(1.0)
        turn = tf.cast(self.calls, tf.int32)
        return self.choose(turn, x, lambda: self.pair(x), lambda: tf.sin(x * self.gain) * x)

    def pair(self, x):
        return keras.ops.tanh(keras.ops.matmul(keras.ops.gelu(keras.ops.matmul(x, self.wide)), self.narrow))


CHOICES = {
    "cond": lambda turn, x, one, other: tf.cond(turn % 2 == 0, one, other),
    "keras cond": lambda turn, x, one, other: keras.ops.cond(turn % 2 == 0, one, other),
    "nested": lambda turn, x, one, other: tf.cond(
        turn % 2 == 0, lambda: tf.cond(tf.reduce_sum(x) > 0, one, other) + x, other
    ),
    "switch": lambda turn, x, one, other: tf.switch_case(turn % 3, [one, other, lambda: one() * other()]),
    "case": lambda turn, x, one, other: tf.case([(turn % 3 == 0, one), (tf.reduce_sum(x) > 0, other)], lambda: one() * x),
    "in a loop": lambda turn, x, one, other: tf.while_loop(
        lambda i, y: i < 3, lambda i, y: (i + 1, tf.cond(i == turn, lambda: tf.sin(y), lambda: tf.tanh(y) * x)), (0, one())
    )[1],
}


SECOND = [pytest.param(Penalized, choice, marks=() if choice == "cond" else pytest.mark.long) for choice in CHOICES]


@pytest.mark.parametrize(("base", "choice"), [*((keras.Sequential, choice) for choice in CHOICES), *SECOND])
def test_branches(float64, base, choice):
    """The second gradient is that of a penalty on the gradient of the inputs."""

    def build():
        return parity.compiled(base([keras.Input((6, 4)), Branches(CHOICES[choice]), layers.Flatten(), layers.Dense(2)]))

    fit = lambda model: model.fit(X, Y, batch_size=8, epochs=3, shuffle=False, verbose=0)  # noqa: E731
    parity.assert_parity(build, fit, layouts=RULES)


def test_loop_in_a_branch_is_an_error():
    def choose(turn, x, one, other):
        looped = lambda: tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, tf.sin(y)), (0, one()))[1]  # noqa: E731
        return tf.cond(turn % 2 == 0, looped, other)

    with tfpar.HybridStrategy("data=4").scope():
        model = parity.compiled(keras.Sequential([keras.Input((6, 4)), Branches(choose), layers.Flatten(), layers.Dense(2)]))
    with pytest.raises(NotImplementedError, match="Put the branch into the loop"):
        model.fit(X, Y, batch_size=8, verbose=0)
    model.predict(X, verbose=0)  # without a gradient it runs


@pytest.mark.parametrize("asked", [("data", "model"), ("model", "data")])
def test_what_follows_a_loop_may_be_split(asked):
    strategy = tfpar.HybridStrategy("data=2,model=2")
    layout = strategy.mesh.layout(asked)

    def step(x, split=lambda y: dtensor.relayout(y, layout)):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = split(tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, tf.sin(y) + x), (0, x))[1])
            total = tf.reduce_sum(y**3)
        return total, tape.gradient(total, x)

    rows = RNG.randn(8, 4)
    split = transfer.to_mesh(rows, strategy.mesh.layout(["data", None]))
    total, gradient = strategy.run(tf.function(step), args=(split,))
    one = step(tf.constant(rows), lambda y: y)
    parity.assert_close(one, [strategy.gather(total, 0), strategy.gather(gradient, 0)])
