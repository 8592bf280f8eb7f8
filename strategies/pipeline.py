"""PipelineStrategy: a model cut into stages, each on its own device."""

from __future__ import annotations

from tfpar.global_view import GlobalViewStrategy
from tfpar.mesh import Mesh
from tfpar.pipeline.partition import Cuts
from tfpar.pipeline.plan import Pipeline
from tfpar.pipeline.schedules import Schedule
from tfpar.pipeline.trainer import PipelineTrainer
from tfpar.placement import Placement


class PipelineStrategy(GlobalViewStrategy):
    """Cuts a model into stages, one per device, and a batch into micro-batches: `HybridStrategy("pipe=N", …)`.

    Args:
        stages: how many devices to use.
        microbatches: into how many parts each batch is cut. With 1 the devices work one after the other.
        schedule: "gpipe", "1f1b", "interleaved", "zb-h1", or a `tfpar.pipeline.Schedule` of your own.
        virtual_stages: stages per device, for "interleaved"; 2 if left out.
        cuts: the names of the layers that each stage but the first begins with, or for each stage a list of names. None:
            stages of about equal work.
        recompute: None, or "stage" to run each forward a second time instead of keeping its activations.

    Raises:
        ValueError: an option that does not fit.
        RuntimeError: TensorFlow started before the CPU devices were made.

    Example:

    >>> strategy = tfpar.PipelineStrategy(stages=2, microbatches=2)
    >>> with strategy.scope():
    ...     model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16), keras.layers.Dense(1)])
    ...     model.compile("adam", "mse")
    >>> history = model.fit(np.ones((4, 8)), np.ones((4, 1)), verbose=0)
    """

    def __init__(
        self,
        stages: int,
        microbatches: int = 1,
        schedule: str | Schedule = "1f1b",
        *,
        virtual_stages: int | None = None,
        cuts: Cuts = None,
        recompute: str | None = None,
    ):
        mesh = Mesh({"pipe": stages})
        pipeline = Pipeline(mesh, microbatches, schedule, virtual_stages, cuts, recompute)
        super().__init__(mesh, Placement(mesh, None, pipeline), PipelineTrainer(pipeline))
