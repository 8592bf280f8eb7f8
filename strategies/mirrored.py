"""MirroredStrategy: data parallelism."""

from __future__ import annotations

from collections.abc import Sequence

from tfpar.global_view import GlobalViewStrategy
from tfpar.mesh import Mesh
from tfpar.placement import Placement


class MirroredStrategy(GlobalViewStrategy):
    """Splits each batch over all devices and keeps a copy of every variable on each: `HybridStrategy("data=N")`.

    Unlike `tf.distribute.MirroredStrategy` it has one program on the global batch, so BatchNorm, clipping, gradient
    accumulation and losses that return a mean give one device's numbers.

    Args:
        devices: names such as `["CPU:0", "CPU:1"]`. None: every TPU, GPU or logical CPU device that TensorFlow has, of
            the first of these kinds. On a CPU that is one device, unless `tfpar.use_logical_cpus` made more.

    Raises:
        ValueError: a device that does not exist, or that is named twice.
        RuntimeError: TensorFlow started before the CPU devices were made.

    Example:

    >>> strategy = tfpar.MirroredStrategy(["CPU:0", "CPU:1"])
    >>> strategy.num_replicas_in_sync
    2
    >>> with strategy.scope():
    ...     model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    ...     model.compile("adam", "mse")
    >>> history = model.fit(np.ones((4, 8)), np.ones((4, 1)), verbose=0)
    """

    def __init__(self, devices: Sequence[str] | None = None):
        mesh = Mesh("data=-1", devices=devices)
        super().__init__(mesh, Placement(mesh))
