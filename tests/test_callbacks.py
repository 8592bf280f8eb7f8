"""Keras' callbacks do under a mesh what they do on one device."""

import keras
import numpy as np
import parity
import pytest
import tensorflow as tf
from keras import callbacks

import tfpar

X, Y = parity.regression(24)


def build():
    return parity.compiled(parity.mlp(), metrics=["mae"])


def test_early_stopping_restores_the_best_weights(float64):
    def fit(m):
        stop = callbacks.EarlyStopping(monitor="val_loss", patience=1, restore_best_weights=True)
        return m.fit(X[:16], Y[:16], batch_size=8, epochs=12, validation_data=(X[16:], -Y[16:]), callbacks=[stop], verbose=0)

    one, many = parity.assert_parity(build, fit)
    assert len(one.history["loss"]) < 12


def test_model_checkpoint(tmp_path, float64):
    def fit(m):
        path = str(tmp_path / (m.name + "_{epoch}.keras"))
        return m.fit(X, Y, batch_size=8, epochs=3, callbacks=[callbacks.ModelCheckpoint(path, monitor="loss")], verbose=0)

    one, many = parity.assert_parity(build, fit)
    for epoch in (1, 3):
        loaded = keras.saving.load_model(tmp_path / f"{many.model.name}_{epoch}.keras")
        assert int(loaded.optimizer.iterations) == 3 * epoch
    parity.assert_close(list(many.weights.values()), loaded.get_weights(), 0)


def test_learning_rate_callbacks(float64):
    def fit(m):
        rates = [
            callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
            callbacks.ReduceLROnPlateau(monitor="loss", patience=0, min_delta=10.0),
        ]
        return m.fit(X, Y, batch_size=8, epochs=3, callbacks=rates, verbose=0)

    one, many = parity.assert_parity(build, fit)
    assert many.history["learning_rate"][-1] < 0.01


def test_csv_logger(tmp_path, float64):
    def fit(m):
        log = callbacks.CSVLogger(tmp_path / f"{len(list(tmp_path.iterdir()))}.csv")
        return m.fit(X, Y, batch_size=8, epochs=3, callbacks=[log], verbose=0)

    parity.assert_parity(build, fit)
    one, many = (np.genfromtxt(tmp_path / f"{i}.csv", delimiter=",", skip_header=1) for i in (0, 1))
    np.testing.assert_allclose(one, many, rtol=0, atol=1e-9)


def test_tensorboard(tmp_path):
    with parity.strategy_for("data=2,model=2").scope():
        model = build()
    board = callbacks.TensorBoard(tmp_path, histogram_freq=1, update_freq=1, write_graph=True)
    model.fit(X, Y, batch_size=8, epochs=2, callbacks=[board], validation_data=(X, Y), verbose=0)
    events = [
        value.tag
        for file in tmp_path.rglob("*tfevents*")
        for event in tf.compat.v1.train.summary_iterator(str(file))
        for value in event.summary.value
    ]
    assert "epoch_loss" in events and any("kernel" in tag or "up" in tag for tag in events)


class Interrupt(callbacks.Callback):
    """Stops the run as a crash would."""

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            raise KeyboardInterrupt


def test_backup_and_restore(tmp_path, float64):
    def interrupted(m):
        backup = callbacks.BackupAndRestore(tmp_path / f"{m.name}{isinstance(m.distribute_strategy, tfpar.HybridStrategy)}")
        with pytest.raises(KeyboardInterrupt):
            m.fit(X, Y, batch_size=8, epochs=4, shuffle=False, callbacks=[backup, Interrupt()], verbose=0)
        return m.fit(X, Y, batch_size=8, epochs=4, shuffle=False, callbacks=[backup], verbose=0)

    one, many = parity.assert_parity(build, interrupted)
    straight = parity.train(None, build, lambda m: m.fit(X, Y, batch_size=8, epochs=4, shuffle=False, verbose=0))
    parity.assert_close(straight.weights, many.weights)


def test_user_callback_sees_plain_numbers():
    seen = {}

    class Look(callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen[batch] = {key: float(value) for key, value in logs.items()}
            seen["weights"] = self.model.get_weights()[0].shape
            seen["rate"] = float(self.model.optimizer.learning_rate)
            seen["steps"] = int(self.model.optimizer.iterations)

        def on_predict_batch_end(self, batch, logs=None):
            seen["outputs"] = np.asarray(logs["outputs"]).shape

    with parity.strategy_for("data=2,model=2").scope():
        model = build()
    model.fit(X, Y, batch_size=8, callbacks=[Look()], verbose=0)
    model.predict(X, batch_size=8, callbacks=[Look()], verbose=0)
    assert set(seen[2]) == {"loss", "mae"} and seen["weights"] == (8, 32)
    assert seen["steps"] == 3 and seen["outputs"] == (8, 1)


def test_stop_training_and_terminate_on_nan():
    with parity.strategy_for("data=2,model=2").scope():
        model = build()
    history = model.fit(X, np.full_like(Y, np.nan), epochs=5, callbacks=[callbacks.TerminateOnNaN()], verbose=0)
    assert len(history.history["loss"]) == 1 and np.isnan(history.history["loss"][0])


def test_metrics_built_in_and_of_the_user(float64):
    class Largest(keras.metrics.Metric):
        def __init__(self, name="largest"):
            super().__init__(name=name)
            self.value = self.add_weight(shape=(), initializer="zeros", name="value")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.value.assign(keras.ops.maximum(self.value, keras.ops.max(keras.ops.abs(y_true))))

        def result(self):
            return self.value

    def build():
        probability = keras.Sequential(
            [
                keras.Input((8,)),
                keras.layers.Dense(8, name="up"),
                keras.layers.Dense(1, activation="sigmoid", name="out"),
            ]
        )
        measures = [
            keras.metrics.AUC(name="auc"),
            keras.metrics.Precision(name="p"),
            keras.metrics.BinaryAccuracy(),
            keras.metrics.F1Score(threshold=0.5),
            Largest(),
            lambda y, p: keras.ops.mean(keras.ops.abs(y - p), -1),
        ]
        return parity.compiled(probability, loss="binary_crossentropy", metrics=measures, weighted_metrics=["mae"])

    labels = (Y > 0).astype("float64")
    parity.assert_parity(
        build,
        lambda m: m.fit(X[:21], labels[:21], batch_size=8, epochs=2, validation_data=(X, labels), verbose=0),
        check=lambda m: m.evaluate(X, labels, batch_size=7, verbose=0, return_dict=True),
    )
