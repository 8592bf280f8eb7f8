"""The part of a parameter-server strategy that TensorFlow and Keras call.

From `fit` to a server:

    1. Keras' fit calls the functions that `trainer.py` makes; each call is one update
    2. `loops.py` hands batches to free workers and takes their results
    3. a worker runs the function of `programs.py`; `dispatch.py` sends it through TensorFlow's ClusterCoordinator
    4. the servers run the function of `updates.py` on what they hold
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfpar import compat, errors, training
from tfpar.compat import servers
from tfpar.one_view import OneViewExtended
from tfpar.replica_context import ServersContext
from tfpar.servers import config, handshake
from tfpar.servers.dispatch import Dispatcher, server_lost
from tfpar.servers.input import ServedDataset
from tfpar.servers.loops import StepRecord
from tfpar.servers.modes import Mode
from tfpar.servers.spread import HOST, Homes, Partitioner, Spread, default_partitioner
from tfpar.servers.trainer import ServerTrainer
from tfpar.servers.variables import ServerVariable


class ServersStrategy(servers.ServerStrategy):
    """What `tfpar.ParameterServerStrategy` does; see there.

    Args:
        resolver: the cluster; None: TF_CONFIG says.
        partitioner: how to split variables; None: see `default_partitioner`.
        mode: how workers keep step.
        step_timeout: seconds within which some step must end.
        connect_timeout: seconds to wait for processes that are still starting.
    """

    def __init__(
        self,
        resolver: tf.distribute.cluster_resolver.ClusterResolver | None,
        partitioner: Partitioner | None,
        mode: Mode,
        step_timeout: float,
        connect_timeout: float,
    ):
        cluster = config.from_environment() if resolver is None else config.from_resolver(resolver)
        if cluster.job != "chief":
            raise ValueError(
                f"This process is {cluster.job} {cluster.index}, a server, but it runs the coordinator's program. Start it "
                "with `python -m tfpar.servers`, and this program with the task type 'chief'."
            )
        workers = len(cluster.jobs["worker"])
        if mode.backup_workers >= workers:
            raise ValueError(f"backup_workers={mode.backup_workers} leaves none of {workers} workers to compute.")
        handshake.check(cluster, connect_timeout)
        devices = [f"/job:ps/replica:0/task:{i}/device:CPU:0" for i in range(len(cluster.jobs["ps"]))]
        spread = Spread(devices, partitioner or default_partitioner(len(devices)))
        super().__init__(config.resolver(cluster), lambda strategy: ServersExtended(strategy, spread, workers))
        self._cluster, self._mode, self._limit = cluster, mode, step_timeout
        self._dispatcher: Dispatcher | None = None
        self._trainer = ServerTrainer()

    @property
    def mode(self) -> Mode:
        """How workers keep step."""
        return self._mode

    @property
    def trainer(self) -> ServerTrainer:
        """What builds the functions that Keras' `fit` calls."""
        return self._trainer

    @property
    def dispatcher(self) -> Dispatcher:
        """The workers."""
        if self._dispatcher is None:
            self._dispatcher = Dispatcher(self, self._cluster, self._limit)
        return self._dispatcher

    @property
    def server_bytes(self) -> dict[str, int]:
        """The bytes of variables on each server, slots and copies of scalars included."""
        return dict(self.extended.spread.bytes)

    def step_log(self, model: keras.Model) -> list[StepRecord]:
        """The steps of a model's last `fit`, in the order of their updates.

        Args:
            model: made in this strategy's scope.
        """
        return self._trainer.records(model)

    def check_owns(self, model: keras.Model) -> None:
        """Raises ValueError where a variable of the model, its metrics or its optimizer was made elsewhere."""
        errors.check_model(model, self)

    def __repr__(self) -> str:
        jobs = self._cluster.jobs
        return f"{type(self).__name__}({len(jobs['worker'])} workers, {len(jobs['ps'])} servers, mode={self._mode.name!r})"


class ServersExtended(OneViewExtended):
    """The part of a strategy that TensorFlow and Keras call.

    Args:
        strategy: whose.
        spread: the servers.
        workers: how many.
    """

    def __init__(self, strategy: tf.distribute.Strategy, spread: Spread, workers: int):
        super().__init__(strategy)
        self.spread, self._workers = spread, workers

    def call_for_each_replica(self, fn: Callable, args: tuple = (), kwargs: dict | None = None) -> Any:
        strategy = self._container_strategy()
        with strategy.scope(), ServersContext(strategy):
            return fn(*args, **(kwargs or {}))

    @property
    def _num_replicas_in_sync(self) -> int:
        return 1

    def _local_results(self, value: Any) -> tuple:
        return (value,)

    # Variables

    def _create_variable(self, next_creator: Callable, **kwargs: Any) -> ServerVariable:
        path, maker = compat.variable_in_the_making(kwargs.get("name"))
        reference, initial = kwargs.pop("colocate_with", None), kwargs["initial_value"]
        with self._explained(path), tf.init_scope(), tf.device(HOST):
            value = tf.convert_to_tensor(initial() if callable(initial) else initial, dtype=kwargs.get("dtype"))
            kind = _kind(maker, reference, value)
            follows = reference if isinstance(reference, ServerVariable) and reference.shape == value.shape else None
            return ServerVariable(
                value,
                homes=self._homes(kind, value, path, reference, follows),
                make=lambda part: _plain(next_creator, part, kwargs.get("name")),
                path=path,
                kind=kind,
                follows=follows,
                distribute_strategy=self._container_strategy(),
                **{name: kwargs[name] for name in _KEPT if name in kwargs},
            )

    @contextlib.contextmanager
    def _explained(self, path: str) -> Iterator[None]:
        try:
            yield
        except tf.errors.UnavailableError as error:
            raise server_lost(f"A server does not take the variable {path!r}; it is gone, or was stopped") from error

    def _homes(self, kind: str, value: tf.Tensor, path: str, reference: Any, follows: ServerVariable | None) -> Homes:
        if kind == "metric":
            return Homes((HOST,), (0, value.shape[0] if value.shape.rank else 1))
        if follows is not None:
            homes = follows.homes
        elif isinstance(reference, ServerVariable):  # a slot of another shape
            homes = Homes(reference.homes.devices[:1], (0, value.shape[0] if value.shape.rank else 1))
        elif kind == "optimizer":
            homes = Homes(self.spread.devices)
        else:
            return self.spread.place(value.shape, value.dtype, path)
        self.spread.count(homes, value.shape, value.dtype)
        return homes

    @property
    def worker_devices(self) -> tuple[str, ...]:
        return tuple(f"/job:worker/replica:0/task:{i}/device:CPU:0" for i in range(self._workers))

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        return self.spread.devices

    # Input

    def _experimental_distribute_dataset(self, dataset: tf.data.Dataset, options: Any) -> ServedDataset:
        del options
        return ServedDataset(dataset, self._workers)

    def _distribute_datasets_from_function(self, dataset_fn: Callable, options: Any) -> ServedDataset:
        del options
        return ServedDataset(dataset_fn, self._workers)

    def _in_multi_worker_mode(self) -> bool:
        return False  # one process runs the user's program

    @property
    def should_checkpoint(self) -> bool:
        return True

    @property
    def should_save_summary(self) -> bool:
        return True


_KEPT = ("trainable", "name", "synchronization", "aggregation", "constraint")


def _kind(maker: Any, reference: Any, value: tf.Tensor) -> str:
    if isinstance(maker, keras.metrics.Metric):
        return "metric"
    if isinstance(maker, keras.random.SeedGenerator):
        return "seed"
    is_scalar = maker is None and not value.shape.rank  # some optimizers make theirs where nobody can tell
    if reference is None and (isinstance(maker, keras.optimizers.Optimizer) or is_scalar):
        return "optimizer"
    return "weight"


def _plain(next_creator: Callable, value: tf.Tensor, name: str | None) -> tf.Variable:
    """A variable of TensorFlow's own on the current device."""
    return next_creator(initial_value=tf.identity(value), trainable=False, name=name, dtype=value.dtype)


def _is_served(strategy: Any) -> bool:
    return isinstance(strategy, ServersStrategy)


def _distribute(strategy: Any, function: Callable) -> ServedDataset | None:
    return strategy.distribute_datasets_from_function(function) if _is_served(strategy) else None


servers.follow_epochs(ServedDataset, _distribute)
training.install(_is_served)
