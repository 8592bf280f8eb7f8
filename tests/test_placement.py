"""When a layout is decided, what a device holds meanwhile, and the table that says so."""

import re

import keras
import numpy as np
import parity
import pytest
from keras import layers
from tensorflow.experimental import dtensor

import tfpar
from tfpar import transfer

X, Y = parity.regression(16)


def live_bytes(model):
    """Bytes of variables that each device really holds, from the shards themselves."""
    held = np.zeros(4, int)
    for variable in [*model.variables, *model.optimizer.variables]:
        for i, shard in enumerate(dtensor.unpack(variable._value.shards())):
            held[i] += shard.numpy().nbytes
    return held


def wide(depth=3):
    """Only layers that the rules split, wide enough that biases do not matter."""
    inner = [layers.Dense(64, name=f"{i}_up") if i % 2 == 0 else layers.Dense(64, name=f"{i}_down") for i in range(depth)]
    return parity.compiled(keras.Sequential([keras.Input((64,)), *inner], name="m"))


RULES = {r".*up/kernel": (None, "model"), r".*up/bias": ("model",), r".*down/kernel": ("model", None)}


def late(model):
    return tfpar.LayoutMap(RULES)


@pytest.mark.parametrize("layouts", [tfpar.LayoutMap(RULES), late], ids=["rules", "function of the model"])
def test_describe_tells_what_devices_hold(layouts):
    strategy = tfpar.HybridStrategy("data=2,model=2", layouts=layouts)
    with strategy.scope():
        model = wide()
    table = strategy.describe(model)
    assert (live_bytes(model) == table.device_bytes).all()
    rows = {row.path: row for row in table}
    up = rows["m/0_up/kernel"]
    assert (up.kind, up.shape, up.dtype, up.layout) == ("weight", (64, 64), "float32", (None, "model"))
    assert (up.bytes, up.device_bytes, up.reason) == (16384, 8192, r"rule '.*up/kernel'")
    slot = next(row for row in table if row.owner == "m/0_up/kernel")
    assert slot.kind == "slot" and slot.layout == (None, "model") and slot.device_bytes == 8192
    assert rows["m/1_down/bias"].reason == "no rule matches" and rows["m/1_down/bias"].layout == (None,)
    text = str(table)
    assert re.search(r"0_up/kernel .* 8.0 KiB .*  rule '\.\*up/kernel'$", text, re.MULTILINE)
    assert "0_up/kernel" in text and "-, model" in text and "Each device holds" in text and "replicated" in text
    model.fit(np.ones((8, 64)), np.ones((8, 64)), verbose=0)
    assert (live_bytes(model) == strategy.describe(model).device_bytes).all()


def test_describe_needs_variables():
    strategy = parity.strategy_for("data=2")
    with strategy.scope():
        model = keras.Sequential([layers.Dense(2)])
    with pytest.raises(ValueError, match="no variables yet.*Build it first"):
        strategy.describe(model)


def test_a_waiting_variable_is_spread_over_all_devices():
    strategy = tfpar.HybridStrategy("data=2,model=2", layouts=late)
    with strategy.scope():
        model = wide()
    kernel = model.get_layer("0_up").kernel._value
    assert sorted(kernel.layout.sharding_specs) == ["data", "model"]
    assert {shard.shape.num_elements() for shard in dtensor.unpack(kernel.shards())} == {1024}


def test_between_creation_and_the_first_fit(capsys, tmp_path, float64):
    strategy = tfpar.HybridStrategy("data=2,model=2", layouts=late)

    def build():
        return parity.compiled(parity.mlp())

    reference = parity.train(None, build, lambda m: None)
    waiting = parity.train(tfpar.HybridStrategy("data=2,model=2", layouts=late), build, lambda m: None).model
    parity.assert_close(reference.model.get_weights(), waiting.get_weights(), 0)
    parity.assert_close(reference.model(X).numpy(), waiting(X).numpy())
    waiting.summary()
    assert "Total params" in capsys.readouterr().out
    trained = parity.train(None, build, lambda m: m.fit(X, Y, verbose=0)).model
    trained.save_weights(tmp_path / "w.weights.h5")
    waiting.load_weights(tmp_path / "w.weights.h5")
    parity.assert_close(trained.get_weights(), waiting.get_weights(), 0)
    waiting.optimizer.build(waiting.trainable_variables)
    before = waiting.optimizer.variables[2]._value
    waiting.fit(X, Y, verbose=0)
    assert waiting.optimizer.variables[2]._value is before
    assert before.layout.sharding_specs == [dtensor.UNSHARDED, "model"]
    del strategy


def test_a_layout_function_trains_as_rules_do(float64):
    one, _ = parity.assert_parity(
        lambda: parity.compiled(parity.mlp()), lambda m: m.fit(X, Y, batch_size=8, epochs=3, verbose=0), layouts={}
    )
    assert len(one.weights) == 6


def test_a_layout_function_that_is_wrong():
    strategy = tfpar.HybridStrategy("data=2,model=2", layouts=lambda model: {r"nothing": (None,)})
    with strategy.scope():
        model = parity.compiled(parity.mlp())
    with pytest.raises(ValueError, match="'nothing'.*matches no variable"):
        model.fit(X, Y, verbose=0)


def test_weights_split_over_the_batch_axis(float64):
    """Each device keeps its share of the weights and slots, and gathers a weight when it is read."""
    rules = {r".*(up|down)/kernel": ("data", "model"), r".*up/bias": ("data",)}
    parity.assert_parity(
        lambda: parity.compiled(parity.mlp()),
        lambda m: m.fit(X, Y, batch_size=8, epochs=3, verbose=0),
        layouts=tfpar.LayoutMap(rules),
        check=lambda m: (m.predict(X, verbose=0), m(X).numpy()),
    )


def test_no_device_holds_more_than_its_share_while_a_value_is_laid_out(monkeypatch):
    seen = []
    pack = dtensor.pack
    monkeypatch.setattr(transfer.dtensor, "pack", lambda shards, layout: (seen.append(shards), pack(shards, layout))[1])
    layout = tfpar.Mesh("data=2,model=2").layout(("model", "data"))
    value = np.arange(64.0).reshape(8, 8)
    tensor = transfer.to_mesh(value, layout)
    assert [shard.shape for shard in seen[0]] == [(4, 4)] * 4
    np.testing.assert_array_equal(transfer.to_host(tensor), value)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16", "int32", "int64", "uint8", "bool"])
@pytest.mark.parametrize("spec", [("data", None), (None, "model"), ("model", "data"), (None, None)])
def test_values_survive_the_way_to_a_mesh_and_back(dtype, spec):
    import tensorflow as tf

    value = tf.cast(np.arange(32).reshape(4, 8) % 7, dtype)
    back = transfer.to_host(transfer.to_mesh(value, tfpar.Mesh("data=2,model=4").layout(spec)))
    assert back.dtype == value.dtype and bool(tf.reduce_all(back == value))


class Unbuilt(keras.Model):
    """Makes its variables when it is first called."""

    def __init__(self):
        super().__init__()
        self.up, self.down = layers.Dense(8, name="up"), layers.Dense(1, name="down")

    def call(self, x):
        return self.down(self.up(x))


def call_in_scope(model):
    with model.distribute_strategy.scope():
        return model(X).numpy()


@pytest.mark.parametrize("first", ["fit", "predict", "predict_on_batch", "evaluate", "call"])
def test_a_model_that_is_built_by_its_first_use(first, float64):
    uses = {
        "fit": lambda m: m.fit(X, Y, batch_size=8, verbose=0, shuffle=False).history,
        "predict": lambda m: m.predict(X, verbose=0),
        "predict_on_batch": lambda m: m.predict_on_batch(X[:4]),
        "evaluate": lambda m: m.evaluate(X, Y, verbose=0),
        "call": call_in_scope,
    }
    one, many = parity.assert_parity(
        lambda: parity.compiled(Unbuilt()), lambda m: (uses[first](m), uses["fit"](m))[1], check=uses["predict"], slots=False
    )
    assert many.model.up.kernel._value.layout.sharding_specs == [dtensor.UNSHARDED, "model"]


def test_rules_reach_a_model_that_its_first_fit_builds(float64):
    """And not its metrics, whose variables are made at the same time."""
    rules = tfpar.LayoutMap({r"unbuilt.*/up/kernel": (None, "model"), r"(?!unbuilt).*": (None, None, None, "model")})
    with tfpar.HybridStrategy("data=2,model=2", layouts=rules).scope():
        model = parity.compiled(Unbuilt(), metrics=["mae", keras.metrics.AUC()])
    with pytest.raises(ValueError, match="matches no variable"):
        model.fit(X, Y > 0, batch_size=8, verbose=0)
    assert model.up.kernel._value.layout.sharding_specs == [dtensor.UNSHARDED, "model"]
    assert model.up.kernel._value.path == model.up.kernel.path
    parity.assert_parity(
        lambda: parity.compiled(Unbuilt(), metrics=["mae"]),
        lambda m: m.fit(X, Y, batch_size=8, verbose=0),
        layouts=tfpar.LayoutMap({r".*up/kernel": (None, "model"), r".*down/kernel": ("model", None)}),
    )


def test_a_model_without_compile_predicts():
    with parity.strategy_for("data=2,model=2").scope():
        model = parity.mlp()
    np.testing.assert_allclose(model.predict(X, verbose=0), model(X).numpy(), rtol=1e-5, atol=1e-6)
    assert "up/kernel" in str(model.distribute_strategy.describe(model))


def test_rules_may_be_for_several_models(float64):
    strategy = tfpar.HybridStrategy(
        "data=2,model=2", layouts={r"a/.*kernel": (None, "model"), r"b/.*kernel": ("model", None)}
    )
    with strategy.scope():
        a = keras.Sequential([keras.Input((8,)), layers.Dense(4)], name="a")
        b = keras.Sequential([keras.Input((8,)), layers.Dense(4)], name="b")
        a.compile("sgd", "mse"), b.compile("sgd", "mse")
    a.fit(X, Y, verbose=0), b.fit(X, Y, verbose=0)
    assert [m.layers[0].kernel._value.layout.sharding_specs for m in (a, b)] == [
        ["unsharded", "model"],
        ["model", "unsharded"],
    ]


def test_a_layout_decided_too_late_changes_no_number(float64):
    import tensorflow as tf

    def run(strategy):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = parity.compiled(parity.mlp())
        step = tf.function(lambda: strategy.run(lambda: model(tf.ones((4, 8), tf.float64))))
        before = strategy.gather(step(), 0).numpy()
        model.fit(X, Y, batch_size=8, verbose=0, shuffle=False)
        return before, strategy.gather(step(), 0).numpy(), model.get_weights()

    with pytest.warns(UserWarning, match=r"keeps its first layout.*Call strategy.lay_out\(model\)"):
        many = run(parity.strategy_for("data=2,model=2"))
    parity.assert_close(run(tfpar.HybridStrategy("data=1")), many)
