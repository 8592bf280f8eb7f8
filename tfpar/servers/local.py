"""A cluster of real processes on this machine, for notebooks and tests."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import re
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

LAUNCHER = Path(server.__file__).with_name("launcher.py")
START_LIMIT = 120.0  # seconds; importing TensorFlow takes 3 to 10
STOP_LIMIT = 30.0  # seconds
RUNS = re.compile(rf"{server.READY}: process (\d+)")

_running: set[subprocess.Popen] = set()  # a cluster that nobody holds goes on, as long as this process


@dataclasses.dataclass
class _Server:
    """A process of the cluster: where what it says is kept, and its process id once it runs."""

    log: Path
    pid: int = 0


class LocalCluster:
    """Workers and parameter servers on 127.0.0.1, each a process; made by `tfpar.local_cluster`.

    Leaving the `with` block, or `stop`, ends them; they also end with this process.
    """

    def __init__(self, workers: int, ps: int, threads: int | None):
        if workers < 1 or ps < 1:
            raise ValueError(f"A cluster needs at least one worker and one parameter server, got {workers=} and {ps=}.")
        ports = [f"127.0.0.1:{port}" for port in _free_ports(workers + ps)]
        self.cluster = Cluster({"worker": tuple(ports[:workers]), "ps": tuple(ports[workers:])})
        self._logs, self._count = tempfile.TemporaryDirectory(prefix="tfpar-servers-"), itertools.count()
        self._servers: dict[tuple[str, int], _Server] = {}
        environment = {"TF_CPP_MIN_LOG_LEVEL": "2"} | os.environ
        if threads is not None:
            environment |= {name: str(threads) for name in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")}
        self._launcher_log = Path(self._logs.name) / "launcher.log"
        with open(self._launcher_log, "w") as log:
            command = [sys.executable, "-P", str(LAUNCHER), str(os.getpid())]
            self._launcher = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log)
        _running.add(self._launcher)
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
        return self._servers[job, index].pid

    def kill(self, job: str, index: int) -> None:
        """Kills a process at once (SIGKILL), as a machine that fails."""
        found = self._servers[job, index]
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            os.kill(found.pid, signal.SIGKILL)
        until = time.monotonic() + START_LIMIT
        while server.ENDED not in found.log.read_text() and self._launcher.poll() is None and time.monotonic() < until:
            time.sleep(0.05)

    def pause(self, job: str, index: int) -> None:
        """Stops a process from running (SIGSTOP) until `resume`, as a machine that hangs."""
        os.kill(self.pid(job, index), signal.SIGSTOP)

    def resume(self, job: str, index: int) -> None:
        """Lets a paused process run."""
        os.kill(self.pid(job, index), signal.SIGCONT)

    def restart(self, job: str, index: int) -> None:
        """Starts a killed process again, at its address."""
        self._launch(job, index)
        self._await(job, index)

    def stop(self) -> None:
        """Ends all processes."""
        with contextlib.suppress(BrokenPipeError):
            self._launcher.stdin.close()  # at which it ends the servers
        try:
            self._launcher.wait(STOP_LIMIT)
        except subprocess.TimeoutExpired:
            self._launcher.kill()  # the servers look for it and end
            self._launcher.wait()
        _running.discard(self._launcher)
        self._servers.clear()
        with contextlib.suppress(OSError):
            self._logs.cleanup()

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"LocalCluster({self.cluster})"

    def _launch(self, job: str, index: int) -> None:
        log = Path(self._logs.name) / f"{job}-{index}-{next(self._count)}.log"
        log.touch()
        self._servers[job, index] = _Server(log)
        task = {"tf_config": self.cluster.as_config(job, index), "log": str(log)}
        with contextlib.suppress(BrokenPipeError):  # where the launcher has ended, `_await` says so
            self._launcher.stdin.write(json.dumps(task).encode() + b"\n")
            self._launcher.stdin.flush()

    def _await(self, job: str, index: int) -> None:
        found, until = self._servers[job, index], time.monotonic() + START_LIMIT
        while not (runs := RUNS.search(said := found.log.read_text())):
            how = re.search(rf"{server.ENDED} (-?\d+)", said)
            if how:
                how, said = f"ended with {how[1]}", said[: how.start()]
            elif self._launcher.poll() is not None:
                how, said = (
                    f"was not started: its launcher ended with {self._launcher.poll()}",
                    self._launcher_log.read_text(),
                )
            elif time.monotonic() > until:
                how = f"took longer than {START_LIMIT:.0f} s to start"
            if how:
                raise RuntimeError(f"The process of {job} {index} {how}. It said:\n{said[-2000:]}")
            time.sleep(0.05)
        found.pid = int(runs[1])


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
