"""Wrong clusters are errors in seconds that name the task; modes, partitioners and placing without processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import servers
import tensorflow as tf

import tfpar
from tfpar.servers import config, local, server
from tfpar.servers.modes import Mode
from tfpar.servers.spread import Spread, default_partitioner

JOBS = {"worker": ["127.0.0.1:1001"], "ps": ["127.0.0.1:1002"]}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "TF_CONFIG is not set"),
        ("{", "is not as expected (JSONDecodeError"),
        ("[]", "is not as expected (TypeError"),
        (json.dumps({"cluster": JOBS}), "is not as expected (KeyError: 'task')"),
        (json.dumps({"cluster": JOBS, "task": {"type": "chief"}}), "is not as expected (KeyError: 'index')"),
        (json.dumps({"cluster": JOBS, "task": {"type": "worker", "index": 1}}), "said to be worker 1, which is not in"),
        (json.dumps({"cluster": JOBS, "task": {"type": "chief", "index": 1}}), "said to be chief 1, which is not in"),
        (json.dumps({"cluster": JOBS, "task": {"type": "ps", "index": 0}}), "This process is ps 0, a server, but it runs"),
        (json.dumps({"cluster": {"ps": JOBS["ps"]}, "task": {"type": "chief", "index": 0}}), "has no 'worker'"),
        (json.dumps({"cluster": JOBS | {"gpu": ["a:1"]}, "task": {"type": "chief", "index": 0}}), "got 'gpu'"),
        (json.dumps({"cluster": JOBS | {"ps": ["host"]}, "task": {"type": "chief", "index": 0}}), "expected host:port"),
        (json.dumps({"cluster": JOBS | {"ps": JOBS["worker"]}, "task": {"type": "chief", "index": 0}}), "have one address"),
    ],
)
def test_a_wrong_tf_config_is_an_error(text, said, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(ValueError) as error:
        tfpar.ParameterServerStrategy()
    assert said in str(error.value)


def test_tf_config_and_resolver_are_read(monkeypatch):
    text = config.Cluster({job: tuple(found) for job, found in JOBS.items()}).as_config("worker", 0)
    monkeypatch.setenv("TF_CONFIG", text)
    cluster = config.from_environment()
    assert (cluster.job, cluster.index, cluster.address) == ("worker", 0, "127.0.0.1:1001")
    assert config.from_resolver(config.resolver(config.Cluster(cluster.jobs))).jobs == cluster.jobs


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"name": "fast"}, "'async', 'sync', 'bounded'; got 'fast'"),
        ({"name": "bounded"}, "which needs it"),
        ({"name": "async", "staleness": 1}, "staleness goes with"),
        ({"name": "bounded", "staleness": -1}, "0 or more; got -1"),
        ({"name": "async", "backup_workers": 1}, 'goes with mode="sync"'),
        ({"name": "sync", "backup_workers": -1}, "0 or more; got -1"),
    ],
)
def test_wrong_modes_are_errors(options, said):
    with pytest.raises(ValueError, match=said):
        Mode(**options)


def test_variables_go_where_the_fewest_bytes_are():
    spread = Spread(["a", "b", "c"], default_partitioner(3))
    big, small = tf.TensorShape([10_000, 64]), tf.TensorShape([64])
    assert spread.place(big, tf.float32, "table").bounds == (0, 3334, 6667, 10_000)
    assert spread.place(small, tf.float32, "bias").devices == ("b",)
    assert spread.place(tf.TensorShape([]), tf.float32, "scalar").devices == ("c",)
    assert spread.bytes == {"a": 3334 * 256, "b": 3333 * 256 + 256, "c": 3333 * 256 + 4}
    assert default_partitioner(2)(shape=tf.TensorShape([1025, 16]), dtype=tf.float32) == [1, 1]
    assert Spread(["a"], lambda shape, dtype: [4]).place(small, tf.float32, "bias").devices == ("a",)


@pytest.mark.parametrize("answer", [[0], [1, 2], [2, 2], []])
def test_a_wrong_partitioner_is_an_error(answer):
    with pytest.raises(ValueError, match="variable_partitioner returned"):
        Spread(["a", "b"], lambda shape, dtype: answer).place(tf.TensorShape([8, 8]), tf.float32, "kernel")


def test_a_server_whose_port_is_in_use_says_so():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        cluster = config.Cluster({"worker": ("127.0.0.1:1",), "ps": (f"127.0.0.1:{taken.getsockname()[1]}",)}, "ps", 0)
        environment = os.environ | {"TF_CONFIG": cluster.as_config("ps", 0)}
        command = [sys.executable, "-P", server.__file__]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode and f"ps 0 cannot listen on {cluster.address}" in done.stderr


def test_servers_end_with_their_launcher_and_one_that_cannot_start_is_an_error(monkeypatch):
    with tfpar.local_cluster(workers=1, ps=1) as cluster:
        pids = [cluster.pid("worker", 0), cluster.pid("ps", 0)]
        taken = [int(address.rpartition(":")[2]) for jobs in cluster.cluster.jobs.values() for address in jobs]
        monkeypatch.setattr(local, "_free_ports", lambda count: taken)
        with pytest.raises(
            RuntimeError, match=r"(?s)process of ps 0 ended with 1.*ps 0 cannot listen on 127.0.0.1:\d+: .*Stop the"
        ):
            tfpar.local_cluster(workers=1, ps=1)
        cluster._launcher.kill()
        until = time.monotonic() + 30
        while any(Path(f"/proc/{pid}/exe").exists() for pid in pids) and time.monotonic() < until:  # a dead one has none
            time.sleep(0.1)
        assert time.monotonic() < until
        with pytest.raises(RuntimeError, match="ps 0 was not started: its launcher ended with -9"):
            cluster.restart("ps", 0)


@pytest.mark.slow
def test_processes_that_do_not_fit_are_errors_that_name_the_task():
    """One real server of each kind; a coordinator with a cluster that is stale, foreign or another one."""
    program = """
    import json, socket
    tried = json.loads(os.environ["CASES"])
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        for name, jobs in tried.items():
            jobs = json.loads(json.dumps(jobs).replace("SILENT", f"127.0.0.1:{silent.getsockname()[1]}"))
            os.environ["TF_CONFIG"] = json.dumps({"cluster": jobs, "task": {"type": "chief", "index": 0}})
            start = time.time()
            try:
                if name == "version":
                    tf.__version__ = "2.20.0"
                tfpar.ParameterServerStrategy(connect_timeout=6.0)
            except (TimeoutError, ValueError) as error:
                print(name, "|", round(time.time() - start), "|", type(error).__name__, "|", error)
    """
    with tfpar.local_cluster(workers=1, ps=1, threads=1) as cluster:
        worker, ps = cluster.cluster.jobs["worker"][0], cluster.cluster.jobs["ps"][0]
        cases = {
            "stale": {"worker": [worker], "ps": ["127.0.0.1:1"]},
            "silent": {"worker": ["SILENT"], "ps": [ps]},
            "swapped": {"worker": [ps], "ps": [worker]},
            "other": {"worker": [worker], "ps": [ps, worker.replace("127.0.0.1", "localhost")]},
            "version": {"worker": [worker], "ps": [ps]},
        }
        started = time.monotonic()
        lines = servers.run(program, CASES=json.dumps(cases)).splitlines()
        assert time.monotonic() - started < 90
    said = {line.split(" | ")[0]: line.split(" | ")[1:] for line in lines}
    assert list(said) == list(cases)
    assert all(int(seconds) <= 15 for seconds, _, _ in said.values())
    assert "ps 0 at 127.0.0.1:1 (nothing listens there)" in said["stale"][2]
    assert "is no TensorFlow server" in said["silent"][2] and "worker 0 at" in said["silent"][2]
    assert "says that it is" in said["swapped"][2] and "contradict" in said["swapped"][2]
    assert "contradict" in said["other"][2] or "other addresses of 'ps'" in said["other"][2]
    assert "runs TensorFlow 2.21.0, the coordinator 2.20.0" in said["version"][2]
