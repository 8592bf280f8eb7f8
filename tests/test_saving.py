"""What a mesh saves is what one device saves, and the reverse, optimizer included; files load without tfpar."""

import os
import subprocess
import sys
import textwrap

import keras
import numpy as np
import parity
import pytest
import tensorflow as tf

import tfpar

X, Y = parity.regression(24)


def build():
    return parity.compiled(parity.mlp())


def fit(model, epochs=1):
    return model.fit(X, Y, batch_size=8, epochs=epochs, shuffle=False, verbose=0)


def strategy():
    return tfpar.HybridStrategy("data=2,model=2", layouts=tfpar.LayoutMap(parity.LAYOUTS))


def save_checkpoint(model, path):
    return tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(path)


def trained_pair():
    one = parity.train(None, build, fit)
    many = parity.train(strategy(), build, fit)
    return one.model, many.model


@pytest.mark.parametrize("kind", ["model.keras", "x.weights.h5", "checkpoint"])
def test_a_mesh_continues_where_one_device_stopped_and_the_reverse(kind, tmp_path, float64):
    one, many = trained_pair()
    for source, under in ((one, strategy()), (many, None)):
        path = str(tmp_path / f"{under is None}_{kind}")
        if kind == "model.keras":
            source.save(path)
        elif kind == "x.weights.h5":
            source.save_weights(path)
        else:
            path = save_checkpoint(source, path)
        restored = parity.train(under, build, fit).model  # holds other numbers than `source` until it loads
        if kind == "model.keras":
            with under.scope() if under else parity.contextlib.nullcontext():
                restored = keras.saving.load_model(path)
        elif kind == "x.weights.h5":
            restored.load_weights(path)
        else:
            tf.train.Checkpoint(model=restored, optimizer=restored.optimizer).restore(path).assert_consumed()
        parity.assert_close(source.get_weights(), restored.get_weights(), 0)
        if kind != "x.weights.h5":
            parity.assert_close(
                [v.numpy() for v in source.optimizer.variables], [v.numpy() for v in restored.optimizer.variables], 0
            )
            expected, actual = fit(source, 2).history, fit(restored, 2).history
            parity.assert_close(expected, actual)
            parity.assert_close(source.get_weights(), restored.get_weights())


def test_files_have_the_same_entries(tmp_path, float64):
    import h5py

    one, many = trained_pair()

    def entries(model, name):
        path = str(tmp_path / name)
        model.save_weights(path)
        found = {}
        h5py.File(path).visititems(
            lambda key, item: found.update({key: item[()]}) if isinstance(item, h5py.Dataset) else None
        )
        return found

    a, b = entries(one, "a.weights.h5"), entries(many, "b.weights.h5")
    assert a.keys() == b.keys()
    for key in a:
        np.testing.assert_allclose(a[key], b[key], rtol=0, atol=1e-9)
    a, b = (dict(tf.train.list_variables(save_checkpoint(m, str(tmp_path / n)))) for m, n in ((one, "a"), (many, "b")))
    assert a == b


def test_set_weights_get_weights_and_other_meshes(float64):
    _, many = trained_pair()
    with tfpar.HybridStrategy("data=4").scope():
        other = build()
    other.set_weights(many.get_weights())
    parity.assert_close(many.get_weights(), other.get_weights(), 0)
    parity.assert_close(many.predict(X, verbose=0), other.predict(X, verbose=0))


@pytest.mark.parametrize("how", ["export", "saved_model", "user function"])
def test_saved_model_holds_plain_variables(how, tmp_path):
    with strategy().scope():
        model = build()
    fit(model)
    expected, path = model.predict(X, verbose=0), str(tmp_path / "saved")
    x = tf.constant(X, tf.float32)
    if how == "export":
        model.export(path, verbose=False)
        loaded = tf.saved_model.load(path)
        served = loaded.serve(x)
    elif how == "saved_model":
        tf.saved_model.save(model, path)
        served = tf.saved_model.load(path).signatures["serving_default"](x)
        served = next(iter(served.values()))
    else:
        served = tf.function(model)(x)
    np.testing.assert_allclose(served, expected, rtol=1e-5, atol=1e-6)


def test_files_load_without_tfpar(tmp_path):
    with strategy().scope():
        model = build()
    fit(model)
    model.save(tmp_path / "m.keras")
    model.export(str(tmp_path / "saved"), verbose=False)
    np.save(tmp_path / "x.npy", X.astype("float32"))
    np.save(tmp_path / "y.npy", model.predict(X, verbose=0))
    program = """
        import sys
        sys.modules["tfpar"] = None
        import keras, numpy as np, tensorflow as tf
        x, y = np.load("x.npy"), np.load("y.npy")
        model = keras.saving.load_model("m.keras")
        assert int(model.optimizer.iterations) == 3
        np.testing.assert_allclose(model.predict(x, verbose=0), y, rtol=1e-5, atol=1e-6)
        loaded = tf.saved_model.load("saved")
        np.testing.assert_allclose(loaded.serve(x), y, rtol=1e-5, atol=1e-6)
        model.fit(x, x[:, :1], verbose=0)
    """
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
