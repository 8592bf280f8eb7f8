"""Operations that DTensor partitions wrongly, or not at all, give one device's value and gradient in a step."""

import warnings

import keras
import numpy as np
import parity
import pytest
import tensorflow as tf
from keras import layers

import tfpar
from tfpar import input as input_lib, op_support

RNG = np.random.RandomState(0)
X, LABELS = RNG.randn(8, 4), np.arange(8, dtype="int32") % 4

OPERATIONS = {
    "sparse cross-entropy": lambda x: tf.nn.sparse_softmax_cross_entropy_with_logits(LABELS, x),
    "keras sparse cross-entropy": lambda x: keras.losses.sparse_categorical_crossentropy(LABELS, x, from_logits=True),
    "top_k": lambda x: tf.math.top_k(x, 2).values,
    "reversed rows": lambda x: x[::-1],
    "reversed columns": lambda x: x[:, ::-1],
    "scatter_nd": lambda x: tf.scatter_nd(tf.constant(LABELS[:, None], tf.int64), x, [6, 4]),
    "gather_nd": lambda x: tf.gather_nd(x, [[0], [5]]),
    "cumprod": lambda x: tf.math.cumprod(x, 1),
    "softsign": lambda x: tf.nn.softsign(x),
}
LAYOUTS = {"batch": ("data", None), "columns": (None, "model"), "both": ("data", "model")}


def value_and_gradient(operation, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = operation(x)
        total = tf.reduce_sum(y * np.arange(1.0, y.shape.num_elements() + 1).reshape(y.shape))
    return total, tf.convert_to_tensor(tape.gradient(total, x))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_value_and_gradient(name, layout):
    strategy = tfpar.HybridStrategy("data=2,model=2", layouts={r"x": LAYOUTS[layout]})
    expected = tf.function(lambda x: value_and_gradient(OPERATIONS[name], x))(tf.constant(X))

    @tf.function
    def step():
        return strategy.run(lambda: value_and_gradient(OPERATIONS[name], variable.value + 0.0))

    with strategy.scope():
        variable = keras.Variable(X, dtype="float64", name="x")
    actual = strategy.gather(step(), 0)
    parity.assert_close([e.numpy() for e in expected], [a.numpy() for a in actual], 1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "operation",
    [lambda x: tf.boolean_mask(x, LABELS > 1), lambda x: tf.where(x[:, 0] > 0), lambda x: tf.where(x[:, 1] < 0)],
    ids=["boolean_mask", "where", "where after a slice"],
)
def test_values_of_a_size_that_depends_on_values(operation, layout):
    strategy = tfpar.HybridStrategy("data=2,model=2", layouts={r"x": LAYOUTS[layout]})
    with strategy.scope():
        variable = keras.Variable(X, dtype="float64", name="x")
    actual = strategy.gather(tf.function(lambda: strategy.run(lambda: operation(variable.value + 0.0)))(), 0)
    np.testing.assert_array_equal(actual, operation(tf.constant(X)))


@pytest.mark.parametrize("metric", ["MeanIoU", "BinaryIoU", "AUC", "RecallAtPrecision", "R2Score", "PearsonCorrelation"])
def test_metrics_on_such_operations(metric, float64):
    options = {"MeanIoU": (2,), "BinaryIoU": (), "RecallAtPrecision": (0.5,)}.get(metric, ())

    def build():
        model = parity.mlp(outputs=1)
        model.add(layers.Activation("sigmoid"))
        return parity.compiled(model, loss="binary_crossentropy", metrics=[getattr(keras.metrics, metric)(*options)])

    x, y = parity.regression(21)
    y = (y > 0).astype("float64")
    parity.assert_parity(build, lambda m: m.fit(x, y, batch_size=8, epochs=2, verbose=0))


def test_an_operation_missing_from_the_table_is_found_and_named_once(monkeypatch, float64):
    monkeypatch.delenv(op_support._VARIABLE + "REVERSEV2")
    monkeypatch.setattr(op_support, "_warned", set())

    class Backwards(keras.Layer):
        def call(self, x):
            return tf.reverse(x, [1])

    def build():
        return parity.compiled(
            keras.Sequential([keras.Input((8,)), layers.Dense(8, name="up"), Backwards(name="back"), layers.Dense(1)])
        )

    x, y = parity.regression(24)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parity.assert_parity(build, lambda m: m.fit(x, y, batch_size=8, epochs=2, verbose=0))
    messages = [str(w.message) for w in caught if "cannot partition" in str(w.message)]
    assert len(messages) == 1 and "ReverseV2" in messages[0] and "back" in messages[0]


def test_nothing_changes_outside_a_step():
    value = tf.constant(X)
    np.testing.assert_array_equal(value[::-1], X[::-1])
    np.testing.assert_array_equal(tf.where(value > 0), np.argwhere(X > 0))
    assert tf.scatter_nd(tf.constant([[0]], tf.int64), tf.constant([1.0]), tf.constant([3], tf.int64)).shape == (3,)
    assert input_lib.distribute({"a": None}, tfpar.Mesh("data=2")) == {"a": None}
