"""Own train steps, own losses and own loops under `strategy.run`."""

import keras
import numpy as np
import parity
import pytest
import tensorflow as tf
from keras import layers

import tfpar

X, Y = parity.regression(24)


def scalar_loss(y, p):
    return keras.ops.mean(keras.ops.square(y - p))


@pytest.mark.parametrize(
    "loss",
    [
        lambda: scalar_loss,
        lambda: keras.losses.MeanSquaredError("sum"),
        lambda: keras.losses.Huber(reduction="mean_with_sample_weight"),
    ],
    ids=["scalar mean", "sum", "mean_with_sample_weight"],
)
def test_losses(loss, float64):
    parity.assert_parity(
        lambda: parity.compiled(parity.mlp(), keras.optimizers.SGD(0.01, momentum=0.9), loss()),
        lambda m: m.fit(X[:21], Y[:21], batch_size=8, epochs=2, verbose=0),
    )


class OwnStep(keras.Model):
    """The custom training step of the Keras guide."""

    def __init__(self):
        super().__init__()
        self.up, self.out = layers.Dense(16, activation="tanh", name="up"), layers.Dense(1, name="out")
        self.tracker = keras.metrics.Mean(name="own")

    def call(self, x, training=False):
        return self.out(self.up(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.ops.mean((y - self(x, training=True)) ** 2)
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True)
        )
        self.tracker.update_state(loss)
        return {"own": self.tracker.result(), "raw": loss}

    def test_step(self, data):
        x, y = data
        return {"own": keras.ops.mean(keras.ops.abs(y - self(x)))}


class OwnLoss(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean((y - y_pred) ** 2) + sum(self.losses)


def test_own_train_step(float64):
    parity.assert_parity(
        lambda: parity.compiled(OwnStep()),
        lambda m: m.fit(X, Y, batch_size=8, epochs=2, validation_data=(X, Y), verbose=0),
        check=lambda m: m.predict(X, verbose=0),
    )


def test_own_compute_loss(float64):
    def build():
        regularizer = keras.regularizers.L2(0.1)
        return parity.compiled(
            OwnLoss([keras.Input((8,)), layers.Dense(8, kernel_regularizer=regularizer, name="up"), layers.Dense(1)])
        )

    parity.assert_parity(build, lambda m: m.fit(X[:21], Y[:21], batch_size=8, epochs=2, verbose=0))


def test_gan_like_model_of_models(float64):
    class Pair(keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.second = parity.mlp(), parity.mlp()
            self.first_optimizer, self.second_optimizer = keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.01)

        def call(self, x):
            return self.first(x)

        def train_step(self, data):
            x, y = data
            for model, optimizer in ((self.first, self.first_optimizer), (self.second, self.second_optimizer)):
                with tf.GradientTape() as tape:
                    loss = keras.ops.mean((y - model(x, training=True)) ** 2)
                optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            return {"loss": loss}

    def build():
        model = Pair()
        model.compile()
        return model

    parity.assert_parity(build, lambda m: m.fit(X, Y, batch_size=8, epochs=2, verbose=0), slots=False)


def loop(strategy, wrap, distribute):
    """The custom loop of the tf.distribute guide; `strategy` None is one device."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    scope = strategy.scope() if strategy else parity.contextlib.nullcontext()
    with scope:
        model, optimizer = parity.mlp(), keras.optimizers.Adam(0.01)
        seen = keras.metrics.MeanAbsoluteError()
    default = tf.distribute.get_strategy()
    runner, global_batch = strategy or default, 8

    def train_step(batch):
        x, y = batch
        with tf.GradientTape() as tape:
            prediction = model(x, training=True)
            each = tf.reduce_sum((y - prediction) ** 2, -1)
            loss = tf.nn.compute_average_loss(each, global_batch_size=global_batch)
            loss += tf.nn.scale_regularization_loss(0.01 * tf.reduce_sum(model.trainable_variables[0] ** 2))
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )
        seen.update_state(y, prediction)
        return loss, each, prediction

    if wrap == "around run":
        step = tf.function(lambda batch: runner.run(train_step, args=(batch,)))
    elif wrap == "inside run":
        inner = tf.function(train_step)
        step = lambda batch: runner.run(inner, args=(batch,))  # noqa: E731
    else:
        step = lambda batch: runner.run(train_step, args=(batch,))  # noqa: E731
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    numbers = []
    for batch in distribute(runner, dataset) if strategy else dataset:
        loss, each, prediction = step(batch)
        numbers.append(float(runner.reduce("SUM", loss, axis=None)))
        numbers.append(float(runner.reduce("SUM", each, axis=0)))
        numbers.append(float(runner.reduce(tf.distribute.ReduceOp.MEAN, each, axis=0)))
        numbers.append(np.concatenate([r.numpy() for r in runner.experimental_local_results(prediction)]))
        numbers.append(np.asarray(runner.gather(prediction, axis=0)))
    return numbers, float(seen.result()), model.get_weights(), [v.numpy() for v in optimizer.variables]


def from_function(strategy, dataset):
    def make(context):
        assert context.num_replicas_in_sync == strategy.num_replicas_in_sync
        return dataset.unbatch().batch(context.get_per_replica_batch_size(8))

    return strategy.distribute_datasets_from_function(make)


@pytest.mark.parametrize("mesh", parity.MESHES)
@pytest.mark.parametrize("wrap", ["around run", "inside run", "eager"])
def test_custom_loop(mesh, wrap, float64):
    def distribute(strategy, dataset):
        return strategy.experimental_distribute_dataset(dataset)

    rules = parity.LAYOUTS if "model" in mesh else None
    strategy = tfpar.HybridStrategy(mesh, layouts=rules)
    parity.assert_close(loop(None, wrap, None), loop(strategy, wrap, distribute))


def test_datasets_from_a_function(float64):
    strategy = tfpar.HybridStrategy("data=2,model=2", layouts=parity.LAYOUTS)
    parity.assert_close(loop(None, "around run", None), loop(strategy, "around run", from_function))


def test_number_of_replicas():
    strategy = tfpar.HybridStrategy("data=4,model=2")
    seen = []
    assert strategy.num_replicas_in_sync == 4
    with strategy.scope():
        assert strategy.num_replicas_in_sync == 4 and 64 * strategy.num_replicas_in_sync == 256

        @tf.function
        def step():
            strategy.run(lambda: seen.append(strategy.num_replicas_in_sync))
            seen.append(strategy.num_replicas_in_sync)

        step()
    assert seen == [1, 4]
    assert isinstance(strategy, tf.distribute.Strategy)
    assert tfpar.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"]).num_replicas_in_sync == 3


def test_keras_losses_in_scope_are_not_divided(float64):
    strategy = tfpar.HybridStrategy("data=4")
    expected = float(keras.losses.MeanSquaredError()(Y, X[:, :1]))
    with strategy.scope():
        assert float(keras.losses.MeanSquaredError()(Y, X[:, :1])) == expected


def test_values_from_a_function():
    strategy = tfpar.HybridStrategy("data=4")
    value = strategy.experimental_distribute_values_from_function(
        lambda context: tf.fill([2], context.replica_id_in_sync_group * 10 + context.num_replicas_in_sync)
    )
    assert [list(v.numpy()) for v in strategy.experimental_local_results(value)] == [
        [4, 4],
        [14, 14],
        [24, 24],
        [34, 34],
    ]


def test_eager_gradients_and_updates_of_a_model_on_a_mesh(float64):
    def eager(strategy):
        keras.utils.set_random_seed(0)
        with strategy.scope() if strategy else parity.contextlib.nullcontext():
            model, optimizer = parity.mlp(), keras.optimizers.Adam(0.01)
        for _ in range(3):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(X) - Y) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)
        return [g.numpy() for g in gradients], model.get_weights()

    parity.assert_close(eager(None), eager(parity.strategy_for("data=2,model=2")))


def test_gradients_through_a_users_function_outside_run(float64):
    with tfpar.HybridStrategy("data=2,model=2", layouts=parity.LAYOUTS).scope():
        model = parity.mlp()

    @tf.function
    def gradient(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        return tape.gradient(loss, model.trainable_variables)

    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(X) - Y) ** 2)
        eager = tape.gradient(loss, model.trainable_variables)
        parity.assert_close([g.numpy() for g in eager], [g.numpy() for g in gradient(X, Y)])
        model.set_weights([w + 0.1 for w in model.get_weights()])


def test_run_eagerly(float64):
    parity.assert_parity(
        lambda: parity.compiled(parity.mlp(), run_eagerly=True, metrics=["mae"]),
        lambda m: m.fit(X[:21], Y[:21], batch_size=8, epochs=2, verbose=0),
        check=lambda m: (m.predict(X, verbose=0), m.evaluate(X, Y, verbose=0)),
    )


def test_several_strategies_and_models_in_one_process(float64):
    def build():
        return parity.compiled(parity.mlp())

    def fit(m):
        return m.fit(X, Y, batch_size=8, epochs=1, shuffle=False, verbose=0)

    one = parity.train(None, build, lambda m: (fit(m), fit(m))[1])
    models = []
    for mesh in parity.MESHES:
        many = parity.train(parity.strategy_for(mesh), build, fit)
        models.append(many.model)
    first = tfpar.Mesh({"data": 2}, devices=["CPU:4", "CPU:6"])
    models.append(parity.train(tfpar.HybridStrategy(first), build, fit).model)
    for model in models:
        fit(model)
        parity.assert_close(list(one.weights.values()), model.get_weights())


def test_transfer_learning_shares_layers_between_models(float64):
    def build():
        base = parity.mlp()
        base.trainable = False
        inputs = keras.Input((8,))
        return parity.compiled(keras.Model(inputs, layers.Dense(2, name="top")(base(inputs))))

    y = np.concatenate([Y, -Y], 1)
    parity.assert_parity(build, lambda m: m.fit(X, y, batch_size=8, epochs=2, verbose=0))
