"""TensorParallelStrategy: every device holds a part of the weights."""

from __future__ import annotations

from collections.abc import Sequence

from tfpar.global_view import GlobalViewStrategy
from tfpar.mesh import Mesh
from tfpar.placement import Layouts, Placement


class TensorParallelStrategy(GlobalViewStrategy):
    """Splits a model's weights over all devices, each of which computes on the whole batch: `HybridStrategy("model=N")`.

    Args:
        devices: names such as `["CPU:0", "CPU:1"]`. None: every TPU, GPU or logical CPU device that TensorFlow has, of
            the first of these kinds. On a CPU that is one device, unless `tfpar.use_logical_cpus` made more.
        layouts: as of `tfpar.HybridStrategy`.

    Raises:
        ValueError: a device that does not exist, or that is named twice; a wrong rule.
        RuntimeError: TensorFlow started before the CPU devices were made.

    Example:

    >>> strategy = tfpar.TensorParallelStrategy(["CPU:0", "CPU:1"])
    >>> with strategy.scope():
    ...     model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16), keras.layers.Dense(1)])
    ...     model.compile("adam", "mse")
    >>> history = model.fit(np.ones((4, 8)), np.ones((4, 1)), verbose=0)
    """

    def __init__(self, devices: Sequence[str] | None = None, layouts: Layouts = "auto"):
        mesh = Mesh("model=-1", devices=devices)
        super().__init__(mesh, Placement(mesh, layouts))
