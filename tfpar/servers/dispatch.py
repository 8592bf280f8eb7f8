"""Runs steps on workers through TensorFlow's coordinator, and says why one did not end."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfpar.compat import servers
from tfpar.servers import handshake
from tfpar.servers.config import Cluster

WATCH = 1.0  # seconds between two looks at the servers while nothing arrives
PROBE = 5.0  # seconds in which a server must accept a connection


class ServerLostError(RuntimeError):
    """A parameter server is gone, and the variables on it."""


class StepTimeoutError(RuntimeError):
    """A worker or a server has not ended something within the limit."""


@dataclasses.dataclass(frozen=True)
class Ended:
    """A step that ended.

    Attributes:
        worker: which ran it.
        task: what `start` was given.
        value: its result.
        error: what it raised instead.
    """

    worker: int
    task: Any
    value: Any = None
    error: BaseException | None = None


class Dispatcher:
    """The workers of a cluster, each of which does one thing at a time.

    Args:
        strategy: connected to the cluster.
        cluster: the addresses.
        limit: seconds within which something must end.
    """

    def __init__(self, strategy: servers.ServerStrategy, cluster: Cluster, limit: float):
        self._coordinator = servers.Coordinator(strategy)
        self._cluster, self._limit = cluster, limit
        self._ended: queue.Queue[Ended] = queue.Queue()
        self.running: dict[int, Any] = {}
        self._since: dict[int, float] = {}
        self._used: dict[int, list[Any]] = {worker: [] for worker in range(len(cluster.jobs["worker"]))}
        self.devices = [f"/job:worker/replica:0/task:{i}/device:CPU:0" for i in range(len(cluster.jobs["worker"]))]
        self._own = _OwnThread()

    @property
    def count(self) -> int:
        """How many workers the cluster has."""
        return len(self.devices)

    @property
    def alive(self) -> list[int]:
        """The workers that are not lost."""
        return [worker for worker in range(self.count) if not self._coordinator.is_lost(worker)]

    @property
    def idle(self) -> list[int]:
        """The workers that could take a step."""
        return [worker for worker in self.alive if worker not in self.running]

    def start(self, worker: int, task: Any, work: Callable[[], Any]) -> None:
        """Lets a worker run something.

        Args:
            worker: its number.
            task: comes back with the result.
            work: called on the worker's thread, its operations placed on the worker.
        """

        def run() -> None:
            # Here and not on the main thread, which would wait for a worker that hangs to forget its tensors.
            self._used[worker].clear()
            try:
                ended = Ended(worker, task, work())
            except BaseException as error:
                ended = Ended(worker, task, error=error)
            lost = ended.error is not None and self._is_worker_lost(worker, ended.error)
            if not lost:
                self._ended.put(ended)
                return
            self._coordinator.lose(worker, ended.error)
            self._ended.put(dataclasses.replace(ended, error=self._lost(worker, ended.error)))
            while isinstance(handshake.ask(self._cluster.jobs["worker"][worker], time.monotonic() + PROBE), str):
                time.sleep(WATCH)
            # TensorFlow's coordinator connects to the worker anew when it sees an error that it takes for a worker's
            # failure. Told so before the worker is back it waits for a connection that is never tried again.
            said = f"{self.devices[worker]} was gone and is back; connecting to it anew"
            raise tf.errors.UnavailableError(None, None, said) from ended.error

        self.running[worker], self._since[worker] = task, time.monotonic()
        self._coordinator.start(worker, run)

    def next_ended(self) -> Ended:
        """Waits for any step to end.

        Returns:
            The step, with what it raised, which is a `WorkerLostError` where the worker is gone and the step must be done
            again. Its task is None where a worker has come back and there was none.

        Raises:
            ServerLostError: a parameter server is gone.
            StepTimeoutError: a worker has taken longer than the limit, or none has been there for as long.
        """
        until = time.monotonic() + self._limit
        while True:
            late = self._late()
            if late or (not self.running and time.monotonic() > until):
                raise StepTimeoutError(self._stuck(late))
            try:
                ended = self._ended.get(timeout=WATCH)
            except queue.Empty:
                self.check_servers()
                if self.idle and not self.running:
                    return Ended(self.idle[0], None)
                continue
            self.running.pop(ended.worker, None)
            self._used[ended.worker] += [ended.value, getattr(ended.task, "batch", None)]
            return ended

    def call(self, function: Callable[[], Any]) -> Any:
        """Calls a function that uses TensorFlow, from a thread of its own: TensorFlow may wait for a process that hangs.

        Raises:
            ServerLostError: a parameter server is gone.
            StepTimeoutError: the function has not ended within the limit.
            Exception: what the function raised.
        """
        ended, until = self._own.start(function), time.monotonic() + self._limit
        while True:
            try:
                value, error = ended.get(timeout=WATCH)
            except queue.Empty:
                self.check_servers()
                if time.monotonic() > until:
                    raise StepTimeoutError(self._stuck(self._late())) from None
                continue
            if error is not None:
                self.check_servers(error)
                raise error
            return value

    def check_servers(self, error: BaseException | None = None) -> None:
        """Raises ServerLostError where a parameter server does not answer, or an error says that it has lost its state."""
        for i, address in enumerate(self._cluster.jobs["ps"]):
            if not handshake.listens(address, PROBE):
                raise server_lost(f"Parameter server {i} at {address} does not answer any more") from error
        if isinstance(error, tf.errors.OpError) and _names_lost_state(error):
            raise server_lost("A parameter server has lost its variables; it was started again, it seems") from error

    def _is_worker_lost(self, worker: int, error: BaseException) -> bool:
        if not isinstance(error, tf.errors.OpError):
            return False
        return servers.is_worker_failure(error) or not handshake.listens(self._cluster.jobs["worker"][worker], PROBE)

    def _lost(self, worker: int, error: BaseException) -> WorkerLostError:
        return WorkerLostError(worker, self._cluster.jobs["worker"][worker], f"is gone ({type(error).__name__})")

    def _late(self) -> list[int]:
        """The workers that have taken longer than the limit."""
        now = time.monotonic()
        return [worker for worker in self.running if now > self._since[worker] + self._limit]

    def _stuck(self, late: list[int]) -> str:
        addresses = self._cluster.jobs["worker"]
        who = ", ".join(f"worker {i} at {addresses[i]}" for i in late)
        what = "has not ended its step"
        if not late:
            who = "No worker is there" if not self.alive else "Servers"
            what = "and none has come back" if not self.alive else "an update has not ended"
        return (
            f"{who} {what} within {self._limit:.0f} seconds. Look why the process hangs or start it again, then run this "
            "program again from its last backup; or give ParameterServerStrategy a larger step_timeout, in seconds."
        )


class WorkerLostError(RuntimeError):
    """A worker is gone; the step that it ran changed nothing."""

    def __init__(self, worker: int, address: str, what: str):
        super().__init__(f"Worker {worker} at {address} {what}. Others do its step; it takes part again when it is back.")


class _OwnThread:
    """A thread that does not keep the process from ending, unlike those of `concurrent.futures`."""

    def __init__(self):
        self._work: queue.Queue = queue.Queue()
        threading.Thread(target=self._run, name="tfpar-servers", daemon=True).start()

    def start(self, function: Callable[[], Any]) -> queue.Queue:
        """Gives it something to do; the result, or None and the error, arrives in the queue."""
        ended: queue.Queue = queue.Queue()
        self._work.put((function, ended))
        return ended

    def _run(self) -> None:
        while True:
            function, ended = self._work.get()
            try:
                ended.put((function(), None))
            except BaseException as error:
                ended.put((None, error))


def server_lost(what: str) -> ServerLostError:
    """The error, with what to do."""
    return ServerLostError(
        f"{what}, so that its part of the weights is lost. Start all parameter servers, then run this program again: fit "
        "with keras.callbacks.BackupAndRestore goes on from its last backup, tf.train.Checkpoint and load_weights do too."
    )


def _names_lost_state(error: tf.errors.OpError) -> bool:
    """Whether a server says that it does not know a variable or this coordinator."""
    text = str(error)
    lost = ("Could not find variable", "does not exist", "context_id", "Unable to find the relevant tensor remote_handle")
    return "/job:ps" in text and any(part in text for part in lost)
