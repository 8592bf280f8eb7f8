"""Dropout on a mesh: other masks per data shard, the same per model shard, reproducible from the seed."""

import keras
import numpy as np
import parity
import pytest
from keras import layers
from tensorflow.experimental import dtensor

import tfpar

X, Y = parity.regression(16)


def masks(mesh, seed=0, calls=1):
    import tensorflow as tf

    keras.utils.set_random_seed(seed)
    strategy = tfpar.HybridStrategy(mesh, layouts={r".*kernel": (None, "model")} if "model" in mesh else None)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), layers.Dense(4, name="up"), layers.Dropout(0.5)])
        model.layers[0].kernel.assign(np.eye(4))
        dropout = model.layers[1]
    batch = next(iter(strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensors(np.ones((64, 4), "float32")))))
    step = tf.function(lambda x: strategy.run(lambda x: dropout(x, training=True), args=(x,)))
    for _ in range(calls):
        out = step(batch)
    return [shard.numpy() != 0 for shard in dtensor.unpack(out)], strategy.gather(out, 0).numpy() != 0


def test_masks_per_shard():
    (a, b, c, d), whole = masks("data=2,model=2")
    assert (a == b).all() and (c == d).all() and (a != c).any()
    assert 0.3 < whole.mean() < 0.7


def test_reproducible_from_the_seed():
    assert (masks("data=2,model=2", 3)[1] == masks("data=2,model=2", 3)[1]).all()
    assert (masks("data=2,model=2", 3)[1] != masks("data=2,model=2", 4)[1]).any()
    assert (masks("data=4", 3, calls=2)[1] != masks("data=4", 3, calls=1)[1]).any()


def test_training_with_dropout_is_reproducible(float64):
    def build():
        return parity.compiled(
            keras.Sequential([keras.Input((8,)), layers.Dense(16, name="up"), layers.Dropout(0.5), layers.Dense(1)])
        )

    def run():
        fit = lambda m: m.fit(X, Y, batch_size=8, epochs=3, verbose=0)  # noqa: E731
        return parity.train(parity.strategy_for("data=2,model=2"), build, fit)

    first, second = run(), run()
    parity.assert_close(first.weights, second.weights, 0)
    model = second.model
    parity.assert_close(model.evaluate(X, Y, verbose=0), float(np.mean((model.predict(X, verbose=0) - Y) ** 2)))


@pytest.mark.parametrize(
    "layer",
    [layers.GaussianNoise(0.1), layers.SpatialDropout1D(0.5), layers.GaussianDropout(0.2), layers.AlphaDropout(0.2)],
)
def test_other_random_layers_train(layer):
    with parity.strategy_for("data=2,model=2").scope():
        model = parity.compiled(
            keras.Sequential(
                [
                    keras.Input((8,)),
                    layers.Reshape((4, 2)),
                    type(layer).from_config(layer.get_config()),
                    layers.Flatten(),
                    layers.Dense(1),
                ]
            )
        )
    assert np.isfinite(model.fit(X, Y, batch_size=8, epochs=2, verbose=0).history["loss"]).all()
