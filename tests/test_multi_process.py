"""Two processes with two logical CPU devices each train one model, with the numbers of one device."""

import json
import os
import subprocess
import sys

import cluster
import keras
import numpy as np
import parity
import pytest

PROGRAM = """
    import json
    import keras
    import numpy as np
    import tfpar

    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    strategy = tfpar.HybridStrategy(MESH, layouts=LAYOUTS)
    assert strategy.mesh.devices.ravel().tolist() == ["task:0/CPU:0", "task:0/CPU:1", "task:1/CPU:0", "task:1/CPU:1"]
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([
            keras.Input((8,)),
            keras.layers.Dense(32, activation="gelu", name="up"),
            keras.layers.Dense(8, name="down"),
            keras.layers.Dense(1, name="out"),
        ])
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    rng = np.random.RandomState(1)
    x, y = rng.randn(24, 8), rng.randn(24, 1)
    history = model.fit(x[:21], y[:21], batch_size=8, epochs=3, shuffle=False, verbose=0, validation_data=(x, y))
    print(json.dumps({
        "history": history.history,
        "weights": [w.tolist() for w in model.get_weights()],
        "predictions": model.predict(x, verbose=0).tolist(),
        "called": model(x).numpy().tolist(),
        "held": [row.device_bytes for row in strategy.describe(model)],
    }))
"""


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["model=2,data=2", pytest.param("data=2,model=2", marks=pytest.mark.long)])
def test_two_processes(mesh, float64):
    layouts = {r".*up/kernel": (None, "model"), r".*up/bias": ("model",), r".*down/kernel": ("model", None)}
    program = PROGRAM.replace("MESH", repr(mesh)).replace("LAYOUTS", repr(layouts))
    results = [json.loads(out.strip().splitlines()[-1]) for out in cluster.run_clients(program, 2)]
    x, y = parity.regression(24)

    def fit(m):
        return m.fit(x[:21], y[:21], batch_size=8, epochs=3, shuffle=False, verbose=0, validation_data=(x, y))

    one = parity.train(None, lambda: parity.compiled(parity.mlp(), metrics=["mae"]), fit, lambda m: m.predict(x, verbose=0))
    for result in results:
        parity.assert_close(one.history, result["history"])
        for expected, actual in zip(one.weights.values(), result["weights"], strict=True):
            np.testing.assert_allclose(np.asarray(actual), expected, rtol=0, atol=1e-9)
        np.testing.assert_allclose(result["predictions"], one.checked, rtol=0, atol=1e-9)
        np.testing.assert_allclose(result["called"], keras.ops.convert_to_numpy(one.model(x)), rtol=0, atol=1e-9)
        assert result["held"][0] == 8 * 32 * 8 // 2


START = """
    import os
    import keras
    import numpy as np
    import tfpar

    client = int(os.environ["DTENSOR_CLIENT_ID"])
    rules = {r".*up/kernel": (None, "model"), r".*down/kernel": ("model", None)}
    strategy = tfpar.HybridStrategy("data=2,model=2", layouts=rules)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(32, name="up"), keras.layers.Dense(1, name="down")])
        model.compile("adam", "mse")
    rng = np.random.RandomState(1)
    x, y = rng.randn(24, 8), rng.randn(24, 1)
"""

OUT_OF_STEP = {
    "unequal numbers of batches": """
    rows = 24 if client == 0 else 8
    model.fit(x[:rows], y[:rows], batch_size=4, epochs=2, verbose=0)
    """,
    "one process stops": """
    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = client == 1 and epoch == 1
    model.fit(x, y, batch_size=4, epochs=4, verbose=0, callbacks=[Stop()])
    """,
}


@pytest.mark.slow
@pytest.mark.parametrize("case", ["unequal numbers of batches", pytest.param("one process stops", marks=pytest.mark.long)])
def test_processes_out_of_step_end_with_a_sentence(case):
    (code, _, error), (other, *_) = cluster.end_clients(START + OUT_OF_STEP[case], 2, timeout=120)
    assert code != 0 and other == 0
    assert "was broken off: devices took part in different collectives" in error
    assert "give each the same number of batches" in error


@pytest.mark.slow
def test_processes_save_to_one_path_and_stop_together(tmp_path):
    program = """
    callbacks = [
        keras.callbacks.ModelCheckpoint("FOLDER/model.keras"),
        keras.callbacks.ModelCheckpoint("FOLDER/model.weights.h5", save_weights_only=True),
        keras.callbacks.BackupAndRestore("FOLDER/backup", delete_checkpoint=False),
        keras.callbacks.EarlyStopping("loss", min_delta=100.0, patience=1),
    ]
    history = model.fit(x, y, batch_size=8, epochs=9, verbose=0, callbacks=callbacks)
    weights = model.get_weights()
    with strategy.scope():
        again = keras.saving.load_model("FOLDER/model.keras")
    for a, b in zip(weights, again.get_weights()):
        np.testing.assert_array_equal(a, b)
    model.set_weights([0 * w for w in weights])
    resumed = model.fit(x, y, batch_size=8, epochs=4, verbose=0, callbacks=callbacks[2:3])
    print(len(history.epoch), len(resumed.epoch))
    """
    outputs = cluster.run_clients(START + program.replace("FOLDER", str(tmp_path)), 2)
    assert [out.split() for out in outputs] == [["2", "2"]] * 2
    model = keras.saving.load_model(tmp_path / "model.keras")
    model.load_weights(tmp_path / "model.weights.h5")
    assert int(model.optimizer.iterations) == 6


@pytest.mark.slow
def test_a_process_alone_ends_instead_of_waiting():
    program = """
import tfpar
tfpar.devices.START_TIMEOUT = 3.0
tfpar.HybridStrategy("data=4")
"""
    jobs = ",".join(f"127.0.0.1:{port}" for port in cluster.free_ports(2))
    environment = {"DTENSOR_CLIENT_ID": "0", "DTENSOR_NUM_CLIENTS": "2", "DTENSOR_JOBS": jobs, "DTENSOR_JOB_NAME": "worker"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | environment | {"TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode != 0
    assert f"Waiting at most 3 s for all 2 processes of DTENSOR_JOBS={jobs}" in done.stderr
    assert "_wait_for_all_processes" in done.stderr
