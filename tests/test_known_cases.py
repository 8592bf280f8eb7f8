"""Cases that people reported of `tf.distribute` and Keras, each with the public issue, and what is right."""

import keras
import numpy as np
import parity
import pytest
import tensorflow as tf
from keras import layers

import tfpar

X, Y = parity.regression(24)
MESHES = ["data=4", "data=2,model=2"]


def with_batch_norm():
    inner = [layers.Dense(8, name="up"), layers.BatchNormalization(), layers.Dense(1, name="down")]
    return keras.Sequential([keras.Input((8,)), *inner])


@pytest.mark.parametrize("mesh", MESHES)
def test_a_last_batch_of_one_row_with_batch_norm_and_a_scalar_loss(mesh, float64):
    """tensorflow#41657, #36224: a replica without examples gave NaN statistics and weights."""
    parity.assert_parity(
        lambda: parity.compiled(with_batch_norm(), loss=lambda y, p: keras.ops.mean((y - p) ** 2)),
        lambda m: m.fit(X[:9], Y[:9], batch_size=8, epochs=3, shuffle=False, verbose=0),
        mesh=mesh,
        check=lambda m: m.evaluate(X, Y, verbose=0),
    )


@pytest.mark.parametrize("mesh", MESHES)
def test_evaluate_agrees_with_a_call_after_batch_norm(mesh, float64):
    """keras PR#20541: replicas kept statistics of their own, and only the first one's were saved."""
    with parity.strategy_for(mesh).scope():
        model = parity.compiled(with_batch_norm())
    model.fit(X, Y, batch_size=8, epochs=3, verbose=0)
    expected = float(np.mean((model(X, training=False).numpy() - Y) ** 2))
    assert model.evaluate(X, Y, verbose=0) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("mesh", MESHES)
def test_masked_timesteps_count_once(mesh, float64):
    """Unequal numbers of valid timesteps per replica weighted them wrongly under `tf.distribute`."""
    ids = np.array([[1, 2, 3, 4, 5, 6], [1, 0, 0, 0, 0, 0], [2, 3, 0, 0, 0, 0], [4, 5, 6, 0, 0, 0]] * 4, "int32")
    targets = np.random.RandomState(0).randn(16, 6, 1)

    def build():
        embedding = layers.Embedding(7, 8, mask_zero=True)
        return parity.compiled(keras.Sequential([keras.Input((6,), dtype="int32"), embedding, layers.Dense(1, name="out")]))

    parity.assert_parity(
        build,
        lambda m: m.fit(ids, targets, batch_size=8, epochs=3, sample_weight=np.abs(targets[..., 0]), verbose=0),
        mesh=mesh,
    )


def test_predict_keeps_the_order_of_an_odd_number_of_rows(float64):
    """transformers#11265, DeepTables#26: empty or refused predictions."""
    with parity.strategy_for("data=4").scope():
        model = parity.compiled(parity.mlp())
    predictions = model.predict(X[:13], batch_size=8, verbose=0)
    np.testing.assert_allclose(predictions, model(X[:13]).numpy(), rtol=0, atol=1e-12)


def test_fit_takes_a_dataset_from_a_function(float64):
    """keras#18621, #20134: `fit` refused a dataset that the strategy had distributed."""
    strategy = parity.strategy_for("data=2,model=2")
    distributed = strategy.distribute_datasets_from_function(
        lambda context: tf.data.Dataset.from_tensor_slices((X, Y)).batch(context.get_per_replica_batch_size(8))
    )

    def fit(data):
        return lambda m: m.fit(data, epochs=2, verbose=0)

    whole = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    one = parity.train(None, lambda: parity.compiled(parity.mlp()), fit(whole))
    many = parity.train(strategy, lambda: parity.compiled(parity.mlp()), fit(distributed))
    parity.assert_close(one.history, many.history)
    parity.assert_close(one.weights, many.weights)


def test_metrics_update_outside_a_step():
    """tensorflow#56875, #40366: updating a metric in cross-replica context raised."""
    with parity.strategy_for("data=4").scope():
        metric = keras.metrics.MeanSquaredError()
        metric.update_state([[1.0], [2.0]], [[1.0], [4.0]])
    metric.update_state([[0.0]], [[3.0]])
    assert float(metric.result()) == pytest.approx(13 / 3)
    metric.reset_state()
    assert float(metric.result()) == 0.0


def test_iterations_and_rate_are_plain_numbers():
    """`int(optimizer.iterations)` raised under `tf.distribute.MirroredStrategy`."""
    with parity.strategy_for("data=4").scope():
        model = parity.compiled(
            parity.mlp(), keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5))
        )
    model.fit(X, Y, batch_size=8, verbose=0)
    assert int(model.optimizer.iterations) == 3
    assert float(model.optimizer.learning_rate) == pytest.approx(0.1 * 0.5**3)


def test_l2_of_a_split_kernel_counts_once(float64):
    """keras PR#20609: weight penalties were counted once per replica; each shard's must be counted once."""

    def build():
        penalty = keras.regularizers.L2(0.5)
        return parity.compiled(
            keras.Sequential([keras.Input((8,)), layers.Dense(8, kernel_regularizer=penalty, name="up"), layers.Dense(1)])
        )

    _, many = parity.assert_parity(build, lambda m: m.fit(X[:21], Y[:21], batch_size=8, epochs=2, verbose=0))
    kernel = many.model.get_layer("up").kernel.numpy()
    assert float(many.model.losses[0]) == pytest.approx(0.5 * np.sum(kernel**2))


def test_users_own_variables(float64):
    """A `tf.Variable` of the user's behaves like one: indexing, operators, scatter updates, in and out of a step."""

    def run(strategy):
        with strategy.scope() if strategy else parity.contextlib.nullcontext():
            v = tf.Variable(np.arange(12.0).reshape(6, 2), name="table")
        v.assign_add(tf.ones_like(v))
        v.assign_sub(0.5 * tf.ones((6, 2), tf.float64))
        v.scatter_update(tf.IndexedSlices(tf.constant([[9.0, 9.0]], tf.float64), [2]))
        v.scatter_add(tf.IndexedSlices(tf.constant([[1.0, 1.0], [2.0, 2.0]], tf.float64), [0, 0]))
        v.scatter_nd_sub([[1, 1]], tf.constant([5.0], tf.float64))

        def step():
            v.scatter_nd_add([[3, 0]], tf.constant([7.0], tf.float64))
            v.assign(v * 2.0)
            return tf.reduce_sum(v[1:3]) + tf.reduce_sum(tf.nn.embedding_lookup(v, [0, 5]))

        runner = strategy or tf.distribute.get_strategy()
        total = tf.function(lambda: runner.run(step))()
        return float(runner.reduce("SUM", total, None)), v.numpy(), (v[1] + 1.0).numpy(), v[2:4].numpy()

    with pytest.warns(UserWarning, match="axis 'model'"):
        plain = tfpar.HybridStrategy("data=2,model=2", layouts=None)
    split = tfpar.HybridStrategy("data=2,model=2", layouts={"table": (None, "model")})
    for strategy in (plain, split):
        parity.assert_close(run(None), run(strategy))


def test_next_to_a_mirrored_strategy_of_tensorflow():
    """Two strategies in one process took each other's collectives for their own (tensorflow#61314)."""
    models = []
    for strategy in (tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(4)]), tfpar.HybridStrategy("data=4")):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            models.append(parity.compiled(parity.mlp(), keras.optimizers.SGD(0.01)))
    for _ in range(4):
        losses = [model.fit(X, Y, batch_size=8, shuffle=False, verbose=0).history["loss"] for model in models]
    np.testing.assert_allclose(*losses, rtol=1e-4)


def test_ordinary_tensors_given_to_a_traced_step(float64):
    strategy = parity.strategy_for("data=4")
    with strategy.scope():
        model = parity.mlp()
    step = tf.function(lambda x, scale: tf.reduce_sum(model(x)) * scale)
    total = strategy.run(step, args=(tf.constant(X), np.float64(2.0)))
    assert float(strategy.reduce("SUM", total, None)) == pytest.approx(2 * model(X).numpy().sum())


def test_a_model_of_1700_operations_in_a_row():
    """TensorFlow stops after 500 rounds of carrying layouts on, three times over."""

    def deep(x):
        for _ in range(1700):
            x = keras.ops.tanh(x)
        return x

    with tfpar.HybridStrategy("data=2").scope():
        model = keras.Sequential([keras.Input((2,)), layers.Lambda(deep)])
    x = np.ones((4, 2), "float32")
    np.testing.assert_allclose(model.predict(x, verbose=0), deep(x), rtol=1e-6)
