"""ParameterServerStrategy: variables on server processes, steps on worker processes."""

from __future__ import annotations

import tensorflow as tf

from tfpar.servers.modes import Mode
from tfpar.servers.spread import Partitioner
from tfpar.servers.strategy import ServersStrategy


class ParameterServerStrategy(ServersStrategy):
    """Trains a Keras model whose variables lie on parameter servers and whose steps run on workers.

    This process coordinates: it runs the user's program and `fit`. Workers and servers are other processes, each started
    with `python -m tfpar.servers` and its TF_CONFIG, or all on one machine by `tfpar.local_cluster`.

    Args:
        cluster_resolver: the cluster; None: the one that the environment variable TF_CONFIG describes.
        variable_partitioner: takes `shape` and `dtype` of a variable, returns the number of parts along each dim (only the
            first may have more than 1), such as `tf.distribute.experimental.partitioners.FixedShardsPartitioner(2)`. A
            server gets at most one part of a variable. None: parts of 64 KiB or more.
        mode: "async": each worker's gradients are an update of their own. "sync": a batch is cut over the workers, whose
            gradients make one update, that of one device. "bounded": as "async", but no worker gets too far ahead.
        staleness: for "bounded": a worker starts its step n when every other one has ended its step n - staleness - 1.
        backup_workers: for "sync": workers that repeat the parts of those that are late.
        step_timeout: seconds within which some step must end.
        connect_timeout: seconds to wait for processes that are still starting.

    Raises:
        ValueError: TF_CONFIG is missing or contradicts itself or a server; versions differ; options do not fit.
        TimeoutError: a process does not answer.

    Example, also in docs/parameter_servers.md:

    ```python
    with tfpar.local_cluster(workers=2, ps=2) as cluster:
        strategy = tfpar.ParameterServerStrategy(cluster.resolver)
        with strategy.scope():
            model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16), keras.layers.Dense(1)])
            model.compile("adam", "mse")
        model.fit(np.ones((64, 8)), np.ones((64, 1)))
    ```

    >>> tfpar.ParameterServerStrategy(mode="fast")
    Traceback (most recent call last):
    ValueError: mode is one of 'async', 'sync', 'bounded'; got 'fast'.
    """

    def __init__(
        self,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
        variable_partitioner: Partitioner | None = None,
        mode: str = "async",
        staleness: int | None = None,
        *,
        backup_workers: int = 0,
        step_timeout: float = 600.0,
        connect_timeout: float = 60.0,
    ):
        kept = Mode(mode, staleness, backup_workers)
        super().__init__(cluster_resolver, variable_partitioner, kept, step_timeout, connect_timeout)
