"""A cluster of real processes on this machine, for notebooks and tests."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import tensorflow as tf

from tfpar.servers import config, server
from tfpar.servers.config import Cluster

START_LIMIT = 120.0  # seconds; importing TensorFlow takes 3 to 10, in every process


class LocalCluster:
    """Workers and parameter servers on 127.0.0.1, each a process; made by `tfpar.local_cluster`.

    Leaving the `with` block, or `stop`, ends them; they also end with this process.
    """

    def __init__(self, workers: int, ps: int, threads: int | None):
        if workers < 1 or ps < 1:
            raise ValueError(f"A cluster needs at least one worker and one parameter server, got {workers=} and {ps=}.")
        ports = [f"127.0.0.1:{port}" for port in _free_ports(workers + ps)]
        self.cluster = Cluster({"worker": tuple(ports[:workers]), "ps": tuple(ports[workers:])})
        self._threads, self._logs = threads, tempfile.TemporaryDirectory(prefix="tfpar-servers-")
        self._processes: dict[tuple[str, int], subprocess.Popen] = {}
        try:
            tasks = [(job, i) for job in ("ps", "worker") for i in range(len(self.cluster.jobs[job]))]
            for task in tasks:
                self._launch(*task)
            for task in tasks:
                self._await(*task)
        except BaseException:
            self.stop()
            raise

    @property
    def resolver(self) -> tf.distribute.cluster_resolver.SimpleClusterResolver:
        """What `tfpar.ParameterServerStrategy` takes."""
        return config.resolver(self.cluster)

    @property
    def tf_config(self) -> str:
        """The TF_CONFIG of a coordinator in another process."""
        return self.cluster.as_config("chief", 0)

    def pid(self, job: str, index: int) -> int:
        """The process id of "worker" or "ps" number `index`."""
        return self._processes[job, index].pid

    def kill(self, job: str, index: int) -> None:
        """Kills a process at once (SIGKILL), as a machine that fails."""
        self._processes[job, index].kill()
        self._processes[job, index].wait()

    def pause(self, job: str, index: int) -> None:
        """Stops a process from running (SIGSTOP) until `resume`, as a machine that hangs."""
        self._processes[job, index].send_signal(signal.SIGSTOP)

    def resume(self, job: str, index: int) -> None:
        """Lets a paused process run."""
        self._processes[job, index].send_signal(signal.SIGCONT)

    def restart(self, job: str, index: int) -> None:
        """Starts a killed process again, at its address."""
        self._launch(job, index)
        self._await(job, index)

    def stop(self) -> None:
        """Ends all processes."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
        self._processes.clear()
        with contextlib.suppress(OSError):
            self._logs.cleanup()

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"LocalCluster({self.cluster})"

    def _launch(self, job: str, index: int) -> None:
        environment = os.environ | {"TF_CONFIG": self.cluster.as_config(job, index)}
        environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        if self._threads is not None:
            environment |= {name: str(self._threads) for name in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")}
        command = [sys.executable, "-P", server.__file__, f"--parent={os.getpid()}"]
        with open(self._log(job, index), "w") as log:
            self._processes[job, index] = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def _await(self, job: str, index: int) -> None:
        process, until = self._processes[job, index], time.monotonic() + START_LIMIT
        while server.READY not in (said := self._log(job, index).read_text()):
            if process.poll() is not None or time.monotonic() > until:
                what = f"took longer than {START_LIMIT:.0f} s to start"
                if process.poll() is not None:
                    what = f"ended with {process.returncode}"
                raise RuntimeError(f"The process of {job} {index} {what}. It said:\n{said[-2000:]}")
            time.sleep(0.05)

    def _log(self, job: str, index: int) -> Path:
        return Path(self._logs.name) / f"{job}-{index}.log"


def local_cluster(workers: int = 2, ps: int = 2, *, threads: int | None = None) -> LocalCluster:
    """Starts workers and parameter servers as processes on this machine.

    Args:
        workers: how many processes compute steps.
        ps: how many hold the variables.
        threads: CPU threads that one operation may use in each process; all cores if left out.

    Returns:
        The cluster, a context manager that ends the processes. `.resolver` is for `tfpar.ParameterServerStrategy`.

    Raises:
        ValueError: less than one worker or server.
        RuntimeError: a process did not start.

    Example:

    >>> with tfpar.local_cluster(workers=1, ps=1) as cluster:
    ...     print(sorted(cluster.resolver.cluster_spec().as_dict()))
    ['ps', 'worker']
    """
    return LocalCluster(workers, ps, threads)


def _free_ports(count: int) -> Sequence[int]:
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in found:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in found]
