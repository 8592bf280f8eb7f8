"""Every Keras optimizer and every optimizer option trains as on one device."""

import keras
import numpy as np
import parity
import pytest
import tensorflow as tf
from keras import layers, optimizers

X, Y = parity.regression(32)
IDS = np.random.RandomState(3).randint(0, 12, (32, 5)).astype("int32")

OPTIMIZERS = {
    name: lambda name=name: getattr(optimizers, name)(learning_rate=0.01)
    for name in (
        "SGD", "Adam", "AdamW", "Adamax", "Adadelta", "Adafactor", "Adagrad", "Ftrl", "Lamb", "Lion", "Nadam", "RMSprop",
        "ScheduleFreeAdamW",
    )
    if hasattr(optimizers, name)
}  # fmt: skip
OPTIMIZERS |= {
    "Muon": lambda: optimizers.Muon(learning_rate=0.01, exclude_layers=["out"]),
    "MultiOptimizer": lambda: optimizers.MultiOptimizer(
        lambda v: optimizers.Adam(0.01) if "kernel" in v.path else optimizers.SGD(0.02, momentum=0.5)
    ),
    "momentum": lambda: optimizers.SGD(0.01, momentum=0.9, nesterov=True),
    "amsgrad": lambda: optimizers.Adam(0.01, amsgrad=True),
    "centered": lambda: optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    "clipnorm": lambda: optimizers.Adam(0.01, clipnorm=0.05),
    "global_clipnorm": lambda: optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.05),
    "clipvalue": lambda: optimizers.Adam(0.01, clipvalue=0.01),
    "ema": lambda: optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9),
    "ema with overwrite": lambda: optimizers.SGD(0.01, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3),
    "accumulation": lambda: optimizers.Adam(0.01, gradient_accumulation_steps=3),
    "weight decay": lambda: optimizers.AdamW(0.01, weight_decay=0.1),
    "cosine": lambda: optimizers.Adam(optimizers.schedules.CosineDecay(0.1, 20, warmup_steps=2, warmup_target=0.2)),
    "exponential": lambda: optimizers.SGD(optimizers.schedules.ExponentialDecay(0.1, 2, 0.9), momentum=0.9),
    "callable rate": lambda: optimizers.SGD(lambda: 0.05),
    "loss scale": lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.01), dynamic_growth_steps=3),
    "fixed loss scale": lambda: optimizers.Adam(0.01, loss_scale_factor=128.0),
}


def with_embedding(optimizer):
    """Rows looked up, a column-split and a row-split layer, so that slots of every kind of layout exist."""
    ids, x = keras.Input((5,), dtype="int32"), keras.Input((8,))
    h = layers.Concatenate()([layers.Flatten()(layers.Embedding(12, 4, name="table")(ids)), x])
    h = layers.Dense(16, activation="tanh", name="up")(h)
    model = keras.Model([ids, x], layers.Dense(1, name="out")(layers.Dense(8, name="down")(h)))
    model.compile(optimizer(), "mse")
    model.optimizer.build(model.trainable_variables)  # ScheduleFreeAdamW starts wrongly when built inside a step
    return model


def test_all_keras_optimizers_are_here():
    public = {
        name
        for name, value in vars(optimizers).items()
        if isinstance(value, type) and issubclass(value, optimizers.Optimizer) and value is not optimizers.Optimizer
    }
    assert public <= set(OPTIMIZERS) | {"LossScaleOptimizer"}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("mesh", ["data=2,model=2"])
def test_optimizer(name, mesh, float64):
    layouts = {r"table/embeddings": (None, "model")}
    one, _ = parity.assert_parity(
        lambda: with_embedding(OPTIMIZERS[name]),
        lambda m: m.fit([IDS, X], Y, batch_size=8, epochs=2, verbose=0),
        mesh=mesh,
        layouts=layouts,
    )
    assert int(one.model.optimizer.iterations) == (8 if name != "accumulation" else 2)


@pytest.mark.parametrize("mesh", ["data=4", "model=4"])
@pytest.mark.parametrize("name", ["momentum", "Adam", "global_clipnorm"])
def test_optimizer_on_one_axis(name, mesh, float64):
    parity.assert_parity(
        lambda: with_embedding(OPTIMIZERS[name]),
        lambda m: m.fit([IDS, X], Y, batch_size=8, epochs=2, verbose=0),
        mesh=mesh,
    )


@pytest.mark.parametrize("rule", [("model", None), (None, "model"), ("data", None), (None, None)])
def test_embedding_layouts(rule, float64):
    parity.assert_parity(
        lambda: with_embedding(OPTIMIZERS["Adam"]),
        lambda m: m.fit([IDS, X], Y, batch_size=8, epochs=2, verbose=0),
        layouts={r"table/embeddings": rule},
    )


def test_slots_have_their_variables_layout():
    strategy = parity.strategy_for("data=2,model=2")
    with strategy.scope():
        model = with_embedding(OPTIMIZERS["Adam"])
    model.fit([IDS, X], Y, batch_size=8, verbose=0)
    by_path = {v.path: v._value.layout.sharding_specs for v in model.variables}
    for variable in model.optimizer.variables[2:]:
        owner = next(p for p in by_path if p.replace("/", "_") in variable.path)
        assert variable._value.layout.sharding_specs == by_path[owner], variable.path


def test_two_optimizers_in_one_train_step(float64):
    class TwoOptimizers(keras.Model):
        def __init__(self):
            super().__init__()
            self.a, self.b = layers.Dense(8, activation="tanh", name="up"), layers.Dense(1, name="out")
            self.second = optimizers.SGD(0.05, momentum=0.9)

        def call(self, x):
            return self.b(self.a(x))

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            gradients = tape.gradient(loss, self.a.trainable_variables + self.b.trainable_variables)
            self.optimizer.apply(gradients[:2], self.a.trainable_variables)
            self.second.apply(gradients[2:], self.b.trainable_variables)
            return {"loss": loss}

    parity.assert_parity(
        lambda: parity.compiled(TwoOptimizers()),
        lambda m: m.fit(X, Y, batch_size=8, epochs=2, verbose=0),
        slots=False,
    )
