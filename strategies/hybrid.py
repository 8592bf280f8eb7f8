"""HybridStrategy: any mix of data, tensor and pipeline parallelism on one mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfpar.global_view import GlobalViewStrategy
from tfpar.mesh import Mesh
from tfpar.pipeline.plan import PIPE, Pipeline
from tfpar.pipeline.trainer import PipelineTrainer
from tfpar.placement import Layouts, Placement


class HybridStrategy(GlobalViewStrategy):
    """Trains an unmodified Keras model on a mesh of devices, with the numbers of one device.

    Args:
        mesh: `"data=2,model=2"`, a dict of axis sizes, or a `tfpar.Mesh`.
        layouts: "auto": the axis `model` splits what the model's operations let it split, see `tfpar.AutoLayout`. A
            `tfpar.LayoutMap` (or the dict for one) says which axis splits which dim of which variable. A function of the
            complete model returns one; it is called, and "auto" looks at the model, once per model before its first step,
            and until then each variable is spread over all devices. None: every variable is replicated.
        **pipeline: for a mesh with the axis `pipe`, how models are run in stages: `microbatches`, `schedule`,
            `virtual_stages`, `cuts` and `recompute` as of `tfpar.PipelineStrategy`.

    Raises:
        ValueError: a wrong mesh or rule; an axis that nothing uses.
        RuntimeError: TensorFlow started before the CPU devices were made.

    Example:

    >>> strategy = tfpar.HybridStrategy(mesh="data=2,model=2")
    >>> with strategy.scope():
    ...     model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16), keras.layers.Dense(1)])
    ...     model.compile("adam", "mse")
    >>> history = model.fit(np.ones((4, 8)), np.ones((4, 1)), verbose=0)
    """

    def __init__(self, mesh: str | Mapping[str, int] | Mesh, layouts: Layouts = "auto", **pipeline: Any):
        mesh = Mesh(mesh)
        stages = Pipeline(mesh, **pipeline) if PIPE in mesh.axes else None
        if pipeline and stages is None:
            raise ValueError(
                f'{", ".join(pipeline)} are for a mesh with the axis {PIPE!r}, such as "pipe=2,{mesh}"; got {mesh}.'
            )
        super().__init__(mesh, Placement(mesh, layouts, stages), PipelineTrainer(stages) if stages else None)
