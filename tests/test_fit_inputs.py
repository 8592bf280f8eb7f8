"""Every way to give data to `fit`, `evaluate` and `predict` is the same as on one device."""

import keras
import numpy as np
import parity
import pytest
import tensorflow as tf
from keras import layers

X, Y = parity.regression(24)
EVALUATE = {
    "evaluate": lambda m: m.evaluate(X, Y, verbose=0, batch_size=8),
    "predict": lambda m: m.predict(X, verbose=0),
}


class Batches(keras.utils.PyDataset):
    """Six batches of four rows."""

    def __len__(self):
        return 6

    def __getitem__(self, i):
        return X[4 * i : 4 * i + 4], Y[4 * i : 4 * i + 4]


def generator():
    for i in range(6):
        yield X[4 * i : 4 * i + 4], Y[4 * i : 4 * i + 4]


def dataset(batch=8):
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(batch)


FITS = {
    "numpy": lambda m: m.fit(X, Y, batch_size=8, epochs=2, verbose=0),
    "numpy unshuffled": lambda m: m.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0),
    "last batch not divisible": lambda m: m.fit(X[:13], Y[:13], batch_size=8, epochs=3, verbose=0),
    "last batch smaller than the axis": lambda m: m.fit(X[:9], Y[:9], batch_size=8, epochs=3, verbose=0),
    "batch smaller than the axis": lambda m: m.fit(X[:5], Y[:5], batch_size=1, epochs=1, verbose=0),
    "tf.data": lambda m: m.fit(dataset(), epochs=2, verbose=0),
    "tf.data repeated": lambda m: m.fit(dataset().repeat(), epochs=2, steps_per_epoch=4, verbose=0),
    "PyDataset": lambda m: m.fit(Batches(), epochs=2, shuffle=False, verbose=0),
    "PyDataset in workers": lambda m: m.fit(Batches(workers=2, max_queue_size=2), epochs=2, shuffle=False, verbose=0),
    "generator": lambda m: m.fit(generator(), epochs=1, steps_per_epoch=6, verbose=0),
    "validation data": lambda m: m.fit(X, Y, batch_size=8, epochs=2, validation_data=(X[:10], Y[:10]), verbose=0),
    "validation split": lambda m: m.fit(X, Y, batch_size=8, epochs=2, validation_split=0.25, verbose=0),
    "validation dataset": lambda m: m.fit(X, Y, batch_size=8, epochs=2, validation_data=dataset(5), verbose=0),
    "sample weight": lambda m: m.fit(X, Y, batch_size=8, epochs=2, sample_weight=np.arange(24) / 7.0, verbose=0),
    "train_on_batch": lambda m: [m.train_on_batch(X[i : i + 8], Y[i : i + 8]) for i in (0, 8, 16, 3, 5)],
    "train_on_batch of 3": lambda m: [m.train_on_batch(X[i : i + 3], Y[i : i + 3]) for i in (0, 8, 16, 3, 5)],
}


@pytest.mark.parametrize("name", FITS)
def test_fit(name, float64):
    def check(m):
        return {key: f(m) for key, f in EVALUATE.items()} | {"call": m(X).numpy(), "batch": m.predict_on_batch(X[:6])}

    parity.assert_parity(lambda: parity.compiled(parity.mlp(), metrics=["mae"]), FITS[name], check=check)


def test_test_on_batch_and_dict_logs(float64):
    def check(m):
        return m.test_on_batch(X[:7], Y[:7], return_dict=True), m.train_on_batch(X[:8], Y[:8], return_dict=True)

    parity.assert_parity(lambda: parity.compiled(parity.mlp(), metrics=["mae"]), lambda m: None, check=check)


def two_towers():
    a, b = keras.Input((8,), name="a"), keras.Input((4,), name="b")
    h = layers.Concatenate()([layers.Dense(8, activation="tanh", name="up")(a), layers.Dense(8, name="side")(b)])
    outputs = {
        "first": layers.Dense(1, name="first")(h),
        "second": layers.Dense(3, activation="softmax", name="second")(h),
    }
    model = keras.Model({"a": a, "b": b}, outputs)
    losses = {"first": "mse", "second": "sparse_categorical_crossentropy"}
    return parity.compiled(model, loss=losses, loss_weights={"first": 1.0, "second": 0.5}, metrics={"second": ["accuracy"]})


INPUTS = {"a": X, "b": X[:, :4]}
TARGETS = {"first": Y, "second": np.arange(24) % 3}
MULTI = {
    "dicts of numpy": lambda m: m.fit(INPUTS, TARGETS, batch_size=8, epochs=2, verbose=0),
    "dicts in tf.data": lambda m: m.fit(tf.data.Dataset.from_tensor_slices((INPUTS, TARGETS)).batch(8), epochs=2, verbose=0),
    "dict sample weights": lambda m: m.fit(
        INPUTS, TARGETS, sample_weight={"first": np.arange(24) / 9.0, "second": np.ones(24)}, batch_size=8, verbose=0
    ),
}


@pytest.mark.parametrize("name", MULTI)
def test_dicts_and_several_outputs(name, float64):
    parity.assert_parity(two_towers, MULTI[name], check=lambda m: m.predict(INPUTS, verbose=0))


def test_tuple_inputs(float64):
    def build():
        a, b = keras.Input((8,)), keras.Input((4,))
        return parity.compiled(keras.Model((a, b), layers.Dense(1)(layers.Concatenate()([a, b]))))

    parity.assert_parity(build, lambda m: m.fit((X, X[:, :4]), Y, batch_size=8, epochs=2, verbose=0))


def test_class_weight(float64):
    def build():
        return parity.compiled(parity.mlp(outputs=3), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))

    labels = np.arange(24) % 3
    parity.assert_parity(
        build, lambda m: m.fit(X, labels, batch_size=8, epochs=2, class_weight={0: 1.0, 1: 3.0, 2: 0.2}, verbose=0)
    )


@pytest.mark.parametrize("steps", [2, 5])
def test_steps_per_execution(steps, float64):
    parity.assert_parity(
        lambda: parity.compiled(parity.mlp(), steps_per_execution=steps),
        lambda m: m.fit(X, Y, batch_size=4, epochs=2, verbose=0),
        check=lambda m: (m.predict(X, batch_size=5, verbose=0), m.evaluate(X, Y, batch_size=5, verbose=0)),
    )


def test_distributed_datasets_are_accepted(float64):
    strategy = parity.strategy_for("data=2,model=2")
    distributed = strategy.experimental_distribute_dataset(dataset())
    one = parity.train(None, lambda: parity.compiled(parity.mlp()), lambda m: m.fit(dataset(), epochs=2, verbose=0))
    many = parity.train(strategy, lambda: parity.compiled(parity.mlp()), lambda m: m.fit(distributed, epochs=2, verbose=0))
    parity.assert_close(one.history, many.history)
    parity.assert_close(one.weights, many.weights)


def test_a_generator_of_unknown_length_loses_no_batch():
    """Plain Keras counts one step too many here: its step and the end of the data race in one function."""
    with parity.strategy_for("data=2,model=2").scope():
        model = parity.compiled(parity.mlp())
    model.fit(generator(), epochs=1, verbose=0)
    assert int(model.optimizer.iterations) == 6
