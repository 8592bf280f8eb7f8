"""The program of a worker or a parameter server: TensorFlow's own server, which says who it is.

    TF_CONFIG='{"cluster": …, "task": {"type": "ps", "index": 0}}' python -m tfpar.servers

It runs until it is stopped. A coordinator reads who it is before it connects, so that a wrong address or version is an
error that names the process (`handshake.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path

if __package__ in (None, ""):  # run as a file or by launcher.py, which spares the import of tfpar and Keras
    sys.modules["keras"] = None  # TensorFlow imports it where it is installed, a third of a server's start, and does without
    sys.path.insert(0, str(Path(__file__).parent))
    import config as config_lib

    sys.path.pop(0)
else:
    from tfpar.servers import config as config_lib

IDENTITY = "tfpar_identity"
READY, ENDED = "tfpar server listens", "tfpar server ended with"
THREADS = 16  # operations at a time; steps of several workers wait in one server, and must not wait for each other


def check_port(cluster: config_lib.Cluster) -> None:
    """Raises OSError where another process listens on this one's port. TensorFlow would share the port with it."""
    host, _, port = cluster.address.rpartition(":")
    with socket.socket() as found:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # past connections of a killed server do not count
        try:
            found.bind((host if host in ("localhost", "127.0.0.1") else "", int(port)))
        except OSError as error:
            raise OSError(
                f"{cluster.job} {cluster.index} cannot listen on {cluster.address}: {error.strerror}. Stop the process that "
                "has the port (a server of an earlier job, perhaps), or give the task another port in every TF_CONFIG."
            ) from error


def identity(cluster: config_lib.Cluster) -> dict:
    """What a server says of itself."""
    import tensorflow as tf

    jobs = {job: list(addresses) for job, addresses in cluster.jobs.items()}
    return {"job": cluster.job, "index": cluster.index, "tensorflow": tf.__version__, "cluster": jobs}


def start(cluster: config_lib.Cluster):
    """Starts the server of a task, with its identity to read, and returns it.

    Args:
        cluster: the cluster, and which task this process is.

    Raises:
        OSError: the port is in use.
        ValueError: the task is the coordinator.
    """
    import tensorflow as tf

    if cluster.job == "chief":
        raise ValueError("This process is the chief, which coordinates and runs the user's program; it is no server.")
    check_port(cluster)
    threads = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=max(THREADS, os.cpu_count() or 1))
    spec = tf.train.ClusterSpec({job: list(addresses) for job, addresses in cluster.jobs.items()})
    server = tf.distribute.Server(spec, job_name=cluster.job, task_index=cluster.index, protocol="grpc", config=threads)
    here = f"/job:{cluster.job}/task:{cluster.index}"
    alone = tf.compat.v1.ConfigProto(device_filters=[here])  # do not wait for the rest of the cluster
    with tf.Graph().as_default(), tf.device(f"{here}/device:CPU:0"):
        place = tf.raw_ops.VarHandleOp(dtype=tf.string, shape=[], shared_name=IDENTITY, container=IDENTITY)
        said = tf.raw_ops.AssignVariableOp(resource=place, value=tf.constant(json.dumps(identity(cluster))))
        with tf.compat.v1.Session(server.target, config=alone) as session:
            session.run(said)
    return server


def run(parent: int | None = None) -> None:
    """Runs the task that TF_CONFIG describes, until it is stopped.

    Args:
        parent: a process; where it ends, the task ends too.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    server = start(config_lib.from_environment())
    print(f"{READY}: process {os.getpid()}", flush=True)
    if parent is not None:

        def watch() -> None:
            while os.getppid() == parent:
                time.sleep(0.5)
            os._exit(0)

        threading.Thread(target=watch, daemon=True).start()
    server.join()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Runs a worker or a parameter server, as TF_CONFIG says.")
    parser.parse_args()
    try:
        run()
    except (OSError, ValueError) as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from error


if __name__ == "__main__":
    main()
