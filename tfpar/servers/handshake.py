"""Before a coordinator connects: does every process answer, is it who the cluster says, does it run the same TensorFlow?

TensorFlow connects without these questions. Where a process is missing or belongs to another job it waits for many minutes
or fails later with a text that does not name the process.
"""

from __future__ import annotations

import concurrent.futures
import json
import socket
import time

import tensorflow as tf

from tfpar.servers.config import Cluster
from tfpar.servers.server import IDENTITY


def check(cluster: Cluster, limit: float) -> None:
    """Asks every worker and parameter server who it is.

    Args:
        cluster: the cluster of the coordinator.
        limit: seconds to wait for processes that are still starting.

    Raises:
        TimeoutError: a process does not answer.
        ValueError: a process is another task than the cluster says, knows another cluster, or runs another version.
    """
    tasks = [(job, i, address) for job in ("worker", "ps") for i, address in enumerate(cluster.jobs[job])]
    until = time.monotonic() + limit
    with concurrent.futures.ThreadPoolExecutor(len(tasks)) as threads:
        answers = list(threads.map(lambda task: ask(task[2], until), tasks))
    silent = [(job, i, address, found) for (job, i, address), found in zip(tasks, answers) if isinstance(found, str)]
    if silent:
        lines = "; ".join(f"{job} {i} at {address} ({why})" for job, i, address, why in silent)
        raise TimeoutError(
            f"No answer within {limit:.0f} seconds from {lines}. Start it with `python -m tfpar.servers`, or correct "
            "its address in TF_CONFIG, which may be that of an earlier job."
        )
    for (job, i, address), found in zip(tasks, answers):
        if found is not None:
            _compare(cluster, address, (job, i), found)


def ask(address: str, until: float) -> dict | str | None:
    """What the process at an address says of itself.

    Args:
        address: host and port.
        until: when to give up, in `time.monotonic` seconds.

    Returns:
        What `server.identity` gives; None from a TensorFlow server that was not started by this package; a text, if there
        was no answer.
    """
    with tf.Graph().as_default():
        place = tf.raw_ops.VarHandleOp(dtype=tf.string, shape=[], shared_name=IDENTITY, container=IDENTITY)
        said = tf.raw_ops.ReadVariableOp(resource=place, dtype=tf.string)
    why = "nothing listens there"
    while True:
        left = until - time.monotonic()
        if not listens(address, min(2.0, max(left, 0.1))):
            why = "nothing listens there"
        else:
            milliseconds = int(1000 * min(5.0, max(left, 0.5)))
            # Without a filter the session would wait for every task that the process knows.
            options = tf.compat.v1.ConfigProto(operation_timeout_in_ms=milliseconds, device_filters=["/job:none"])
            try:
                with tf.compat.v1.Session(f"grpc://{address}", graph=said.graph, config=options) as session:
                    return json.loads(session.run(said))
            except (tf.errors.FailedPreconditionError, tf.errors.NotFoundError):
                return None
            except (tf.errors.DeadlineExceededError, tf.errors.UnavailableError, tf.errors.CancelledError):
                why = "something listens there that is no TensorFlow server, or hangs"
        if time.monotonic() >= until:
            return why
        time.sleep(0.2)


def listens(address: str, limit: float) -> bool:
    """Whether a process accepts connections at an address."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=limit).close()
    except OSError:
        return False
    return True


def _compare(cluster: Cluster, address: str, expected: tuple[str, int], found: dict) -> None:
    if (found["job"], found["index"]) != expected:
        raise ValueError(
            f"The process at {address} says that it is {found['job']} {found['index']}, not {expected[0]} {expected[1]}: "
            "its TF_CONFIG and this one's contradict each other. Start all processes with the same cluster."
        )
    for job in ("worker", "ps"):
        if list(cluster.jobs[job]) != found["cluster"].get(job):
            raise ValueError(
                f"The process at {address} knows other addresses of {job!r} than this one: {found['cluster'].get(job)} "
                f"there, {list(cluster.jobs[job])} here. Start all processes with the same cluster in TF_CONFIG."
            )
    if found["tensorflow"] != tf.__version__:
        raise ValueError(
            f"The process at {address} runs TensorFlow {found['tensorflow']}, the coordinator {tf.__version__}. Functions "
            "are sent between them, so install one version everywhere."
        )
