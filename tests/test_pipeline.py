"""Models in stages have the numbers of one device: schedules, meshes, cuts, losses, optimizers, state, saving."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from parity import assert_alike, assert_close, compiled, mlp, regression, train
from tensorflow.experimental import dtensor

import tfpar
from tfpar import transfer
from tfpar.compat import layer_graph
from tfpar.models.gpt import gpt
from tfpar.pipeline import Action, Schedule

pytestmark = pytest.mark.usefixtures("float64")

TOKENS = np.random.RandomState(0).randint(0, 32, (10, 9)).astype("int32")
X, Y = regression(20)


def pipeline(mesh: str = "pipe=2", microbatches: int = 2, **options) -> tfpar.HybridStrategy:
    """A strategy with stages."""
    return tfpar.HybridStrategy(mesh, microbatches=microbatches, **options)


def assert_equal(build, fit, strategy, check=lambda model: None, atol=1e-9):
    """Weights, slots, logs and what `check` gives are those of one device; returns both."""
    one, many = train(None, build, fit, check), train(strategy, build, fit, check)
    assert_alike(one, many, atol)
    assert any(np.abs(w).max() > 0 for w in many.weights.values())
    return one, many


def small_gpt() -> keras.Model:
    """Two blocks; the loss takes logits."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return compiled(gpt(vocabulary=32, length=8, width=8, heads=2, depth=2), loss=loss, metrics=["accuracy"])


def fit_tokens(model: keras.Model):
    """Six steps, of which two are on a batch of half the size."""
    return model.fit(TOKENS[:, :-1], TOKENS[:, 1:], batch_size=4, epochs=2, verbose=0)


def fit_numbers(model: keras.Model):
    """Six steps; the last batch of an epoch has 4 examples, the others 8."""
    return model.fit(X, Y, batch_size=8, epochs=2, verbose=0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("mesh", "options"),
    [("pipe=4", {"schedule": "zb-h1"}), ("pipe=2,data=2,model=2", {"recompute": "stage"})],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_gpt(mesh, options):
    def check(model):
        return model.predict(TOKENS[:7, :-1], verbose=0), model.evaluate(TOKENS[:, :-1], TOKENS[:, 1:], verbose=0)

    assert_equal(small_gpt, fit_tokens, pipeline(mesh, **options), check)


def deep(depth: int) -> keras.Model:
    """As many layers as the devices have virtual stages."""
    inner = [layers.Dense(4, activation="tanh", name=f"layer_{i}") for i in range(depth - 1)]
    return compiled(keras.Sequential([keras.Input((8,)), *inner, layers.Dense(1)]))


def fit_one_shape(model: keras.Model):
    """Five steps on batches of one size."""
    return model.fit(X[:8], Y[:8], batch_size=8, epochs=5, verbose=0)


@pytest.mark.parametrize(
    "mesh",
    [
        "pipe=4",
        "pipe=2,data=2,model=2",
        *(pytest.param(mesh, marks=pytest.mark.long) for mesh in ("pipe=2", "pipe=2,data=2", "pipe=2,model=2")),
    ],
)
def test_every_schedule_on_every_mesh(mesh):
    depth = 8 if mesh == "pipe=4" else 4
    one = train(None, lambda: deep(depth), fit_one_shape)
    for schedule in ("gpipe", "1f1b", "interleaved", "zb-h1"):
        many = train(pipeline(mesh, 4, schedule=schedule), lambda: deep(depth), fit_one_shape)
        for path, weight in one.weights.items():
            assert_close(weight, many.weights[path], what=f"{schedule}: {path}")
        assert_close(one.slots, many.slots, what=schedule)
        assert_close(one.history, many.history, what=schedule)


def test_one_microbatch_and_a_batch_smaller_than_the_number_of_microbatches():
    assert_equal(lambda: compiled(mlp()), fit_numbers, pipeline(microbatches=1))
    assert_equal(lambda: compiled(mlp()), fit_numbers, pipeline(microbatches=6))


def test_a_schedule_of_the_user():
    def actions(stage):
        return tuple(Action(kind, stage, i) for kind, i in [("F", 1), ("F", 0), ("B", 0), ("B", 1)])

    assert_equal(lambda: compiled(mlp()), fit_numbers, pipeline(schedule=Schedule("own", 2, 2, (actions(0), actions(1)))))


# Models


def residual() -> keras.Model:
    """A small ResNet whose BatchNorm is in inference mode."""
    image = keras.Input((8, 8, 3))
    x = layers.Conv2D(4, 3, padding="same")(image)
    for _ in range(2):
        h = layers.ReLU()(layers.BatchNormalization(trainable=False)(x))
        x = x + layers.Conv2D(4, 3, padding="same")(h)
    return compiled(keras.Model(image, layers.Dense(1)(layers.GlobalAveragePooling2D()(x))))


def two_towers() -> keras.Model:
    """Two inputs; a skip from the first layer to the last; the second tower is used late."""
    left, right = keras.Input((8,), name="left"), keras.Input((4,), name="right")
    first = layers.Dense(8, activation="tanh", name="first")(left)
    h = layers.Dense(8, activation="tanh")(layers.Dense(8, activation="tanh")(first))
    h = layers.Concatenate()([h, first, layers.Dense(4)(right)])
    outputs = {"a": layers.Dense(1, name="a")(h), "b": layers.Dense(2, name="b")(first)}
    return compiled(keras.Model({"left": left, "right": right}, outputs), loss={"a": "mse", "b": "mae"})


def test_resnet_with_batch_norm_in_inference_mode():
    images = np.random.RandomState(0).randn(20, 8, 8, 3)
    assert_equal(residual, lambda m: m.fit(images, Y, batch_size=8, epochs=2, verbose=0), pipeline("pipe=2,data=2"))


@pytest.mark.parametrize("mesh", ["pipe=3", "pipe=2,model=2"])
def test_two_towers_with_skips(mesh):
    data = {"left": X, "right": X[:, :4]}, {"a": Y, "b": X[:, :2]}
    assert_equal(two_towers, lambda m: m.fit(*data, batch_size=8, epochs=2, verbose=0), pipeline(mesh))


def test_nested_models_are_cut_inside():
    def build():
        encoder = keras.Sequential([keras.Input((8,)), layers.Dense(8, activation="tanh"), layers.Dense(8)], name="encoder")
        x = keras.Input((8,))
        return compiled(keras.Model(x, layers.Dense(1)(encoder(encoder(x)))))

    _, many = assert_equal(build, fit_numbers, strategy := pipeline())
    paths = [[call.path for call in stage.part.calls] for stage in strategy.trainer.pipeline.stages(many.model)]
    assert all(any("encoder/" in path for path in stage) for stage in paths)


def test_weights_of_two_stages_have_one_gradient_and_stay_equal():
    def build():
        ids = keras.Input((8,), dtype="int32")
        table = layers.ReversibleEmbedding(32, 8, tie_weights=True, name="table")
        h = layers.Dense(8, activation="tanh")(layers.Dense(8)(table(ids)))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizer = keras.optimizers.Adam(0.01, global_clipnorm=0.1)
        return compiled(keras.Model(ids, table(h, reverse=True)), optimizer, loss)

    _, many = assert_equal(build, fit_tokens, strategy := pipeline())
    row = next(row for row in strategy.describe(many.model) if "table" in row.path)
    assert row.stages == (0, 1)
    variable = many.model.get_layer("table").trainable_variables[0].value
    assert len(variable.layouts) == 2
    np.testing.assert_array_equal(*(transfer.to_host(variable.shards(copy)) for copy in range(2)))


class Subclassed(keras.Model):
    """A model with its own call, which declares its stages."""

    def __init__(self):
        super().__init__()
        self.first, self.second = layers.Dense(8, activation="tanh"), layers.Dense(8, activation="tanh")
        self.out = layers.Dense(1)

    def fork(self, x):
        return {"skip": x, "h": self.second(x)}

    def join(self, values):
        return self.out(values["h"] + values["skip"])

    def call(self, x):
        return self.join(self.fork(self.first(x)))

    def stages(self):
        return [self.first, Part(self.second, self.fork), Part(self.out, self.join)]


class Part(layers.Layer):
    """A layer and what is done with it."""

    def __init__(self, layer, function):
        super().__init__()
        self.layer, self.function = layer, function

    def call(self, values):
        return self.function(values)


def test_a_subclass_that_declares_its_stages():
    assert_equal(lambda: compiled(Subclassed()), fit_numbers, pipeline("pipe=3"))


def test_a_list_of_stages():
    def build():
        return compiled(tfpar.pipeline.stages([layers.Dense(8, activation="tanh"), layers.Dense(8), layers.Dense(1)]))

    assert_equal(build, fit_numbers, pipeline())


def test_a_subclass_without_stages_is_refused():
    class Plain(keras.Model):
        def __init__(self):
            super().__init__()
            self.layer = layers.Dense(1)

        def call(self, x):
            return self.layer(x)

    with pipeline().scope():
        model = compiled(Plain())
    with pytest.raises(ValueError, match=r"stages\(\).*tfpar.pipeline.stages"):
        fit_numbers(model)


def test_outputs_that_cannot_be_joined():
    def build():
        x = keras.Input((8,))
        h = layers.Dense(8)(layers.Dense(8)(x))
        return compiled(keras.Model(x, keras.ops.matmul(keras.ops.transpose(h), h)))

    with pipeline().scope():
        model = build()
    with pytest.raises(ValueError, match="cannot be joined.*microbatches=1"):
        model.predict(X, verbose=0)


def test_a_model_with_a_fixed_batch():
    def build():
        x = keras.Input(batch_shape=(4, 6, 3))
        return compiled(keras.Model(x, layers.Dense(1)(layers.LSTM(4)(x))))

    x = np.random.RandomState(0).randn(8, 6, 3)
    fit = lambda m: m.fit(x, Y[:8], batch_size=4, epochs=2, shuffle=False, verbose=0)  # noqa: E731
    assert_equal(build, fit, pipeline(microbatches=1))


# Losses, metrics, state


@pytest.mark.parametrize(
    "reduction",
    ["mean_with_sample_weight", *(pytest.param(name, marks=pytest.mark.long) for name in ("sum_over_batch_size", "sum"))],
)
def test_losses_over_masks_and_weights(reduction):
    """Sequences of different lengths, so that micro-batches count differently; two outputs; l2, activity and clipping."""
    rng = np.random.RandomState(0)
    ids = rng.randint(1, 16, (10, 6)) * (np.arange(6) < rng.randint(1, 7, (10, 1)))
    classes = rng.randint(-1, 3, (10, 6))

    def build():
        x = keras.Input((6,), dtype="int32")
        h = layers.Embedding(16, 8, mask_zero=True, embeddings_regularizer="l2")(x)
        h = layers.LSTM(6, return_sequences=True)(layers.Dense(8, activation="gelu", activity_regularizer="l2")(h))
        model = keras.Model(x, [layers.Dense(3, name="a")(h), layers.Dense(1, name="b")(layers.GlobalAveragePooling1D()(h))])
        cross_entropy = keras.losses.SparseCategoricalCrossentropy(True, ignore_class=-1)
        losses = [cross_entropy, keras.losses.MeanSquaredError(reduction=reduction)]
        optimizer = keras.optimizers.Adam(0.01, global_clipnorm=0.05)
        return compiled(model, optimizer, losses, weighted_metrics=[["accuracy"], ["mae"]])

    weights = [np.tile(np.linspace(0.1, 2, 10)[:, None], (1, 6)), np.linspace(0.1, 3, 10)]
    targets = [classes, ids[:, :1].astype("float64")]
    assert_equal(
        build,
        lambda m: m.fit(ids, targets, sample_weight=weights, batch_size=4, epochs=2, verbose=0),
        pipeline("pipe=3", 3),
    )


def test_a_mask_that_depends_on_weights_is_refused():
    class Threshold(layers.Layer):
        def __init__(self):
            super().__init__()
            self.layer = layers.Dense(4)

        def call(self, x):
            y = self.layer(x)
            layer_graph.set_mask(y, y[..., 0] > 0)
            return y

    with pipeline().scope():
        model = compiled(keras.Sequential([keras.Input((3, 8)), Threshold(), layers.Dense(1)]))
    with pytest.raises(ValueError, match="depends on its weights.*microbatches=1"):
        model.fit(np.ones((4, 3, 8)), np.ones((4, 3, 1)), verbose=0)


class OwnLoss(keras.Model):
    """Overrides how the loss and the metrics are computed."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean(keras.ops.abs(y - y_pred)) + 0.1 * keras.ops.mean(keras.ops.square(x)) * keras.ops.mean(y_pred)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        return super().compute_metrics(x, y, y_pred, sample_weight) | {"constant": 3.0}


def test_own_compute_loss_and_compute_metrics():
    def build():
        x = keras.Input((8,))
        return compiled(OwnLoss(x, layers.Dense(1)(layers.Dense(8, activation="tanh")(x))), metrics=["mae"])

    # the product of means over examples is no mean over examples, so the parts of the batch must be the batch
    assert_equal(build, fit_numbers, pipeline(microbatches=1))


def contrast(y_true, y_pred):
    """Every example against every other."""
    return keras.ops.mean(keras.ops.matmul(y_pred, keras.ops.transpose(y_pred)) ** 2, -1)


def test_a_loss_that_is_no_mean_over_examples_is_refused():
    with pipeline().scope():
        model = compiled(mlp(outputs=3), loss=contrast)
    with pytest.raises(ValueError, match="no mean over examples.*microbatches=1"):
        fit_numbers(model)
    assert_equal(lambda: compiled(mlp(outputs=3), loss=contrast), fit_numbers, pipeline(microbatches=1))


def mean_error(y_true, y_pred):
    """A metric as one number."""
    return keras.ops.mean(keras.ops.abs(y_true - y_pred))


def test_a_metric_of_one_number_is_exact_over_parts_of_different_sizes():
    assert_equal(lambda: compiled(mlp(), metrics=[mean_error]), fit_numbers, pipeline(microbatches=3))


def test_validation_class_weight_callbacks_and_batch_methods():
    labels = (X[:, 0] > 0).astype("int32")

    def build():
        x = keras.Input((8,))
        out = layers.Dense(2)(layers.Dense(8, activation="tanh")(x))
        return compiled(keras.Model(x, out), loss=keras.losses.SparseCategoricalCrossentropy(True), metrics=["accuracy"])

    def fit(model):
        stop = keras.callbacks.ReduceLROnPlateau(monitor="loss", factor=0.5, patience=1, min_delta=10.0)
        history = model.fit(
            X,
            labels,
            batch_size=8,
            epochs=3,
            validation_split=0.3,
            class_weight={0: 1.0, 1: 3.0},
            callbacks=[stop],
            verbose=0,
        )
        batch = model.train_on_batch(X[:6], labels[:6])
        return history.history | {"batch": batch, "test": model.test_on_batch(X[:5], labels[:5])}

    assert_equal(build, fit, pipeline())


def test_batch_norm_has_the_statistics_of_micro_batches():
    """The stated meaning: as one device that runs the forward of one micro-batch after the other."""

    def build():
        return compiled(
            keras.Sequential([keras.Input((8,)), layers.Dense(8), layers.BatchNormalization(), layers.Dense(1)]), "sgd"
        )

    many = train(pipeline(), build, lambda m: m.fit(X[:8], Y[:8], batch_size=8, shuffle=False, verbose=0))
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    one = build()
    for part in (X[:4], X[4:8]):
        one(part, training=True)
    for name in ("moving_mean", "moving_variance"):
        assert_close(getattr(one.layers[1], name).numpy(), many.weights[getattr(many.model.layers[1], name).path])


@pytest.mark.parametrize("mesh", ["pipe=2", "pipe=2,data=2"])
def test_dropout_is_reproducible(mesh):
    def build():
        dropout = layers.Dropout(0.5, seed=3)
        return compiled(keras.Sequential([keras.Input((8,)), layers.Dense(8), dropout, layers.Dense(8), layers.Dense(1)]))

    first, again = (train(pipeline(mesh), build, fit_numbers) for _ in range(2))
    assert_close(list(first.weights.values()), list(again.weights.values()))


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("recompute", [None, "stage"])
def test_forward_and_backward_have_one_mask(rows, recompute):
    """A linear model: the loss shows the mask of the forward, the kernel's gradient that of the backward."""
    with pipeline(microbatches=1, cuts=["out"], recompute=recompute).scope():
        kernel = layers.Dense(8, use_bias=False, name="kernel")
        out = layers.Dense(1, use_bias=False, kernel_initializer="ones", name="out")
        model = keras.Sequential([keras.Input((8,)), kernel, layers.Dropout(0.5, seed=3), out])
        model.compile(keras.optimizers.SGD(1.0), lambda y, y_pred: keras.ops.mean(y_pred))
    before = model.get_weights()[0]
    loss = model.train_on_batch(np.eye(8)[:rows], np.zeros((rows, 1)))
    gradient = before - kernel.kernel.numpy()
    assert_close(float(loss), float(np.sum(gradient * before)))


def test_layers_with_state_stay_in_one_stage():
    def build():
        norm, x = layers.BatchNormalization(name="norm"), keras.Input((8,))
        return compiled(keras.Model(x, layers.Dense(1, name="out")(norm(layers.Dense(8)(norm(layers.Dense(8)(x)))))))

    with pipeline("pipe=4").scope():
        model = build()
    with pytest.raises(ValueError, match="'norm' is called in several stages.*moving_mean"):
        fit_numbers(model)
    assert_equal(build, fit_numbers, pipeline(microbatches=1, cuts=["out"]))


def test_a_layer_that_is_called_often_adds_each_loss_once():
    def build():
        shared, x = layers.Dense(8, activation="tanh", activity_regularizer="l2", kernel_regularizer="l1"), keras.Input((8,))
        h = layers.Dense(8)(shared(layers.Dense(8)(shared(x))))
        return compiled(keras.Model(x, layers.Dense(1)(shared(h))))

    assert_equal(build, fit_numbers, pipeline())


def test_nested_models_cast_their_inputs():
    def build():
        inner = keras.Sequential([keras.Input((8,), dtype="int32"), layers.Embedding(4, 3), layers.Flatten()])
        x = keras.Input((8,))
        return compiled(keras.Model(x, layers.Dense(1)(inner(keras.ops.abs(x)))))

    assert_equal(build, fit_numbers, pipeline())


def test_frozen_models_and_stages():
    def build(frozen):
        model = mlp()
        for layer in model.layers[:frozen]:
            layer.trainable = False
        return compiled(model)

    assert_equal(lambda: build(2), fit_numbers, pipeline(cuts=["out"]))
    with pytest.warns(UserWarning, match="any trainable weights"):
        train(pipeline(), lambda: build(3), fit_numbers)


# Optimizers


def multi() -> keras.optimizers.Optimizer:
    """Two optimizers, of which no stage has weights of both; one clips."""
    first, second = keras.optimizers.Adam(0.01, global_clipnorm=0.01), keras.optimizers.SGD(0.1)
    return keras.optimizers.MultiOptimizer(lambda variable: first if "up" in variable.path else second)


OPTIMIZERS = {
    "clipnorm": lambda: keras.optimizers.Adam(0.01, clipnorm=0.05),
    "global clipnorm": lambda: keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.1),
    "accumulation, clip, average": lambda: keras.optimizers.AdamW(
        0.01, gradient_accumulation_steps=2, global_clipnorm=0.1, use_ema=True, ema_overwrite_frequency=2
    ),
    "nadam with a schedule": lambda: keras.optimizers.Nadam(keras.optimizers.schedules.ExponentialDecay(0.01, 1, 0.5)),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.01, global_clipnorm=0.1), dynamic_growth_steps=2
    ),
    "several optimizers": multi,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer(name):
    assert_equal(lambda: compiled(mlp(), OPTIMIZERS[name]()), fit_numbers, pipeline("pipe=3"))


def test_a_gradient_that_is_not_finite_in_one_stage_stops_the_update_of_all():
    class Explodes(layers.Layer):
        def call(self, x):
            @tf.custom_gradient
            def identity(value):
                return tf.identity(value), lambda g: g * np.inf

            return identity(x)

    def build():
        parts = [keras.Input((8,)), layers.Dense(4), Explodes(), layers.Dense(1)]
        return compiled(keras.Sequential(parts), keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)))

    _, many = assert_equal(build, fit_numbers, pipeline(cuts=["dense_1"]))
    assert int(many.model.optimizer.iterations) == 0


@pytest.mark.parametrize("policy, rtol", [("mixed_float16", 5e-3), ("mixed_bfloat16", 3e-2)])
def test_mixed_precision(policy, rtol):
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy(policy)

    def build():
        optimizer = keras.optimizers.Adam(0.01)
        if policy == "mixed_float16":  # with a scale at which neither the whole batch nor a part of it overflows
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=256.0)
        return compiled(mlp(), optimizer)

    one, many = (train(strategy, build, fit_numbers, lambda m: m.predict(X, verbose=0)) for strategy in (None, pipeline()))
    np.testing.assert_allclose(many.history["loss"], one.history["loss"], rtol=rtol)
    np.testing.assert_allclose(many.checked, one.checked, rtol=rtol, atol=2 * rtol)
    if policy == "mixed_float16":
        assert len(many.model.optimizer.dynamic_scale.value.layouts) == 2


# Life of a model


def test_save_and_load_both_ways(tmp_path):
    one = train(None, lambda: compiled(mlp()), fit_numbers).model
    many = train(pipeline(), lambda: compiled(mlp()), fit_numbers).model
    many.save(tmp_path / "many.keras")
    one.save(tmp_path / "one.keras")
    plain = keras.models.load_model(tmp_path / "many.keras")
    with pipeline("pipe=2,data=2").scope():
        staged = keras.models.load_model(tmp_path / "one.keras")
    for model in (one, many, plain, staged):
        fit_numbers(model)
    for model in (many, plain, staged):
        assert_close([v.numpy() for v in one.weights], [v.numpy() for v in model.weights])
        assert_close([v.numpy() for v in one.optimizer.variables], [v.numpy() for v in model.optimizer.variables])


def test_use_before_the_first_fit():
    with pipeline().scope():
        model = compiled(mlp())
    values = [w + 1 for w in model.get_weights()]
    model.set_weights(values)
    lines = []
    model.summary(print_fn=lines.append)
    assert "up" in "".join(lines)
    assert_close(values, model.get_weights())
    one = mlp()
    one.set_weights(values)
    assert_close(one(X), model(X))


def test_describe_has_stages_and_no_device_holds_a_foreign_one():
    model = train(strategy := pipeline("pipe=2,model=2"), lambda: compiled(mlp(width=16)), fit_numbers).model
    table = strategy.describe(model)
    assert {row.stages for row in table if row.kind == "weight"} == {(0,), (1,)}
    for index in (0, 1):
        held = sum(row.device_bytes for row in table if index in row.stages)
        assert table.stage_bytes[index] == held
        assert _devices(model, index) == {f"CPU:{2 * index}", f"CPU:{2 * index + 1}"}
    assert "stage" in str(table)


def _devices(model: keras.Model, stage: int) -> set[str]:
    """The devices of the live shards of a stage's variables and their slots."""
    found = set()
    for variable in model.distribute_strategy.trainer.pipeline.stages(model)[stage].part.variables:
        for owned in (variable.value, *variable.value.followers):
            found |= {shard.device.rpartition("device:")[2] for shard in dtensor.unpack(owned.shards())}
    return found


# Errors


def test_own_train_step_is_refused():
    class Own(keras.Model):
        def train_step(self, data):
            return super().train_step(data)

    with pipeline().scope():
        x = keras.Input((8,))
        model = compiled(Own(x, layers.Dense(1)(layers.Dense(4)(x))))
    with pytest.raises(ValueError, match="own train_step.*compute_loss"):
        fit_numbers(model)


def test_own_loops_are_refused():
    strategy = pipeline()
    with strategy.scope():
        model = compiled(mlp())

    @tf.function
    def step(x):
        return strategy.run(model, (x,))

    with pytest.raises(NotImplementedError, match="stages of a pipeline"):
        step(tf.constant(X))


class Breaks(layers.Layer):
    """Fails on inputs above a limit, when it runs."""

    def call(self, x):
        with tf.control_dependencies([tf.debugging.assert_less(tf.reduce_max(x), tf.constant(100.0, x.dtype), "too large")]):
            return tf.identity(x)


def test_an_error_names_the_stage_and_ends_the_step_on_all():
    strategy = pipeline("pipe=3", 4)
    with strategy.scope():
        model = compiled(
            keras.Sequential([keras.Input((8,)), layers.Dense(8), Breaks(name="breaks"), layers.Dense(8), layers.Dense(1)])
        )
    fit_numbers(model)
    weights = model.get_weights()
    bad = X.copy()
    bad[-1] = 1e4
    with pytest.raises(RuntimeError, match=r"(?s)stage \d.*breaks.*micro-batch 3, forward.*too large"):
        model.train_on_batch(bad[-8:], Y[-8:])
    assert_close(weights, model.get_weights())
    fit_numbers(model)
    assert np.isfinite(model.get_weights()[0]).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mesh": "pipe=2", "schedule": "2f2b"}, "one of 'gpipe'"),
        ({"mesh": "pipe=2", "recompute": "all"}, '"stage"'),
        ({"mesh": "pipe=2", "virtual_stages": 2}, "interleaved"),
        ({"mesh": "pipe=2", "microbatches": 0}, "at least one"),
        ({"mesh": "pipe=2", "microbatches": 3, "schedule": "interleaved"}, "multiple of 2"),
        ({"mesh": "data=2", "microbatches": 3}, "axis 'pipe'"),
    ],
)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        tfpar.HybridStrategy(**options)


@pytest.mark.parametrize(
    ("cuts", "message"),
    [
        (["nowhere"], "no layer of the model.*up, down, out"),
        (["down", "out"], "1 names.*got 2"),
        ([["out"], ["up"]], "not in the order"),
    ],
)
def test_cuts_that_do_not_fit(cuts, message):
    with (strategy := pipeline(cuts=cuts)).scope():
        model = compiled(mlp())
    with pytest.raises(ValueError, match=message):
        strategy.describe(model)


@pytest.mark.parametrize("cuts", [["out"], [["up", "down"], ["out"]]])
def test_cuts_by_name(cuts):
    _, many = assert_equal(lambda: compiled(mlp()), fit_numbers, strategy := pipeline(cuts=cuts))
    parts = [[call.path for call in stage.part.calls] for stage in strategy.trainer.pipeline.stages(many.model)]
    assert parts == [["up", "down"], ["out"]]


def test_more_stages_than_layers():
    with (strategy := pipeline("pipe=4")).scope():
        model = compiled(mlp())
    with pytest.raises(ValueError, match="3 layers and operations cannot be cut into 4 stages"):
        strategy.describe(model)
