"""Real processes and SIGKILL: workers, servers and the coordinator fail in the middle of training."""

from __future__ import annotations

import os
import time

import pytest
import servers

import tfpar

pytestmark = pytest.mark.slow

REPETITIONS = int(os.environ.get("TFPAR_REPETITIONS", 1))
TRAIN = """
MODE = os.environ.get("MODE", "async")
strategy = tfpar.ParameterServerStrategy(mode=MODE, step_timeout=60.0)
rng = np.random.RandomState(0)
x = rng.randn(480, 8).astype("float32")
with strategy.scope():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8,)), layers.Dense(16, activation="relu"), layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse")

class Tell(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        print("step", int(model.optimizer.iterations), flush=True)
        time.sleep(0.01)

callbacks = [Tell()]
"""


@pytest.fixture(scope="module")
def cluster():
    with tfpar.local_cluster(workers=2, ps=2, threads=1) as found:
        yield found


def train_past_two_backups(process, repetition):
    """Reads what a program does that goes on from its last backup, of which there is one every 20 steps."""
    first = int(servers.read_until(process, lambda line: line.startswith("step"))[-1].split()[1])
    assert first == 40 * repetition + 1
    servers.read_until(process, lambda line: line == f"step {first + 44}")


@pytest.mark.parametrize("mode", ["async", pytest.param("sync", marks=pytest.mark.long)])
def test_a_killed_worker_is_done_without_and_rejoins(cluster, mode):
    """Every batch counts once, whenever the worker dies; when it is back it takes part again."""
    program = f"""
    for repetition in range({REPETITIONS}):
        model.fit(x, x[:, :1], batch_size=8, verbose=0, callbacks=callbacks)
        assert int(model.optimizer.iterations) == 60 * (repetition + 1)
        before = len(strategy.step_log(model))
        print("end", repetition, flush=True)
        sys.stdin.readline()  # the worker has been started again
        until = time.time() + 60
        while 1 not in strategy.dispatcher.alive and time.time() < until:
            time.sleep(0.1)
        assert 1 in strategy.dispatcher.alive
    model.fit(x, x[:, :1], batch_size=8, verbose=0)
    print("rejoined", sum(record.worker == 1 for record in strategy.step_log(model)[before:]))
    """
    process = servers.start(TRAIN + servers.textwrap.dedent(program), cluster.tf_config, MODE=mode)
    try:
        for repetition in range(REPETITIONS):
            kill_at = 60 * repetition + 5 + 11 * repetition
            servers.read_until(process, lambda line, step=kill_at: line == f"step {step}")
            cluster.kill("worker", 1)
            servers.read_until(process, lambda line, number=repetition: line == f"end {number}")
            cluster.restart("worker", 1)
            process.stdin.write("\n")
            process.stdin.flush()
        last = servers.finish(process).splitlines()[-1]
        assert last.startswith("rejoined ") and int(last.split()[1]) > 10
    finally:
        servers.end(process)


def test_a_killed_server_is_an_error_and_training_resumes(cluster, tmp_path):
    """The error comes within 30 s and names the server; the next run goes on from the last backup."""
    resume = f"""
    backup = keras.callbacks.BackupAndRestore("{tmp_path}/backup", save_freq=20)
    started = []
    callbacks += [backup, keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: started or started.append(int(model.optimizer.iterations)))]
    try:
        model.fit(x, x[:, :1], batch_size=8, epochs=4, shuffle=False, verbose=0, callbacks=callbacks)
        print("done", started[0], flush=True)
    except tfpar.servers.ServerLostError as error:
        print("lost", started[0], error, flush=True)
        os._exit(0)
    """
    program = TRAIN + servers.textwrap.dedent(resume)
    for repetition in range(REPETITIONS):
        process = servers.start(program, cluster.tf_config)
        try:
            train_past_two_backups(process, repetition)
            cluster.kill("ps", 1)
            killed = time.monotonic()
            lines = servers.read_until(process, lambda line: line.startswith("lost"))
            assert time.monotonic() - killed < 30
            assert "Parameter server 1 at 127.0.0.1:" in lines[-1]
        finally:
            servers.end(process)
        cluster.restart("ps", 1)
    last = servers.run(program, cluster.tf_config).splitlines()[-1].split()
    assert last[0] == "done" and int(last[1]) == 40 * REPETITIONS


def test_a_killed_coordinator_resumes(cluster, tmp_path):
    """The servers go on; a coordinator that is started again continues from its backup."""
    resume = f"""
    callbacks.append(keras.callbacks.BackupAndRestore("{tmp_path}/backup", save_freq=20))
    model.fit(x, x[:, :1], batch_size=8, epochs=4, shuffle=False, verbose=0, callbacks=callbacks)
    print("done", flush=True)
    """
    program = TRAIN + servers.textwrap.dedent(resume)
    for repetition in range(REPETITIONS):
        process = servers.start(program, cluster.tf_config)
        try:
            train_past_two_backups(process, repetition)
        finally:
            servers.end(process)
    lines = servers.run(program, cluster.tf_config).splitlines()
    assert lines[0] == f"step {40 * REPETITIONS + 1}" and lines[-1] == "done"


@pytest.mark.long
def test_a_worker_that_hangs_is_an_error_in_time(cluster):
    program = """
    try:
        model.fit(x, x[:, :1], batch_size=8, epochs=4, verbose=0, callbacks=callbacks)
    except tfpar.servers.StepTimeoutError as error:
        print("hangs", error, flush=True)
        os._exit(0)
    """
    program = TRAIN.replace("60.0", "5.0") + servers.textwrap.dedent(program)
    process = servers.start(program, cluster.tf_config)
    try:
        servers.read_until(process, lambda line: line == "step 20")
        cluster.pause("worker", 1)
        started = time.monotonic()
        lines = servers.read_until(process, lambda line: line.startswith("hangs"))
        assert time.monotonic() - started < 30
        assert "worker 1 at 127.0.0.1:" in lines[-1] and "step_timeout" in lines[-1]
    finally:
        cluster.resume("worker", 1)
        servers.end(process)
