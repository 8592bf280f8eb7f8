"""Pipeline: what a strategy knows about stages, their meshes and their schedule."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import keras

from tfpar import model_graph
from tfpar.mesh import Mesh
from tfpar.pipeline import costs, partition, schedules
from tfpar.pipeline.layer_graph import layer_graph
from tfpar.pipeline.partition import Cuts
from tfpar.pipeline.schedules import Schedule
from tfpar.pipeline.stage import Stage

PIPE = "pipe"


class Pipeline:
    """How models are cut and run in stages.

    Args:
        mesh: a mesh with an axis `pipe`.
        microbatches: how many parts a batch is cut into.
        schedule: "gpipe", "1f1b", "interleaved", "zb-h1" or a `schedules.Schedule`.
        virtual_stages: stages per index along `pipe`, for "interleaved".
        cuts: the layers that each stage but the first begins with, or for each stage its layers, by name. None: stages
            of equal work.
        recompute: None, or "stage" to run forwards a second time instead of keeping activations.

    Raises:
        ValueError: an option that does not fit.
    """

    def __init__(
        self,
        mesh: Mesh,
        microbatches: int = 1,
        schedule: str | Schedule = "1f1b",
        virtual_stages: int | None = None,
        cuts: Cuts = None,
        recompute: str | None = None,
    ):
        if recompute not in (None, "stage"):
            raise ValueError(f'recompute is None or "stage", got {recompute!r}.')
        groups = mesh.axes[PIPE]
        self.meshes = [mesh.submesh(**{PIPE: index}) for index in range(groups)]
        self.schedule = _schedule(schedule, groups, microbatches, virtual_stages)
        self.recompute = recompute == "stage"
        self._cuts = cuts
        self._stages: weakref.WeakKeyDictionary[keras.Model, tuple[Stage, ...]] = weakref.WeakKeyDictionary()

    @property
    def microbatches(self) -> int:
        """Into how many parts a batch is cut."""
        return self.schedule.microbatches

    def mesh_of(self, stage: int) -> Mesh:
        """Where a stage runs."""
        return self.meshes[self.device_of(stage)]

    def device_of(self, stage: int) -> int:
        """The schedule's device that runs a stage."""
        return next(d for d, actions in enumerate(self.schedule.actions) if any(a.stage == stage for a in actions))

    def meshes_of(self, stages: Sequence[int]) -> list[Mesh]:
        """Where some stages run, each mesh once."""
        return [self.meshes[device] for device in sorted({self.device_of(stage) for stage in stages})]

    def stages(self, model: keras.Model, batch: Any = None) -> tuple[Stage, ...]:
        """The stages of a model; decided once.

        Args:
            model: a built model.
            batch: a batch, for a model whose input shapes are not known without it.

        Raises:
            ValueError: the model cannot be cut.
        """
        if model not in self._stages:
            self._stages[model] = self._cut(model, batch)
        return self._stages[model]

    def homes(self, model: keras.Model, batch: Any = None) -> dict[int, list[int]]:
        """The stages of each variable, by its id; the last one of a variable that no layer uses."""
        stages = self.stages(model, batch)
        homes: dict[int, list[int]] = {id(variable): [] for variable in model.variables}
        for stage in stages:
            for variable in stage.part.variables:
                homes.setdefault(id(variable), []).append(stage.part.index)
        return {key: found or [len(stages) - 1] for key, found in homes.items()}

    def _cut(self, model: keras.Model, batch: Any) -> tuple[Stage, ...]:
        graph, count = layer_graph(model), self.schedule.stages
        if self._cuts is not None:
            ends = partition.named(graph, self._cuts, count)
        elif count == 1:
            ends = [len(graph.calls)]
        else:
            known = model_graph.input_specs(model)
            inputs = model_graph.input_specs(model, batch) if known is None else known
            ends = partition.balanced(graph, costs.estimate(model, graph, inputs), count)
        stages, seen = [], set()
        for part in partition.split(graph, ends):
            _check_state(part, seen)
            first = tuple(variable for variable in part.variables if id(variable) not in seen)
            seen.update(map(id, first))
            stages.append(Stage(model, graph, part, self.mesh_of(part.index), part.index == count - 1, first))
        return tuple(stages)


def _check_state(part: partition.StagePart, earlier: set[int]) -> None:
    """Raises ValueError where a stage shares state with an earlier one; each would change a copy of its own."""
    for call in part.calls:
        for variable in call.state:
            if id(variable) in earlier:
                raise ValueError(
                    f"The layer {call.path!r} is called in several stages, among them {part.index}, and changes its state "
                    f"{variable.path!r} in each: the copies would differ. Name cuts that leave its calls in one stage, or "
                    "use a layer for each."
                )


def _schedule(schedule: str | Schedule, groups: int, microbatches: int, virtual: int | None) -> Schedule:
    if isinstance(schedule, Schedule):
        if schedule.devices != groups:
            raise ValueError(
                f"The schedule {schedule.name!r} is for {schedule.devices} devices, but the axis {PIPE!r} has the size "
                f"{groups}."
            )
        return schedule
    if schedule not in schedules.SCHEDULES:
        raise ValueError(
            f"The schedule is one of {', '.join(map(repr, schedules.SCHEDULES))} or a tfpar.pipeline.Schedule, got "
            f"{schedule!r}."
        )
    if virtual is not None and schedule != "interleaved":
        raise ValueError(f'virtual_stages is for the schedule "interleaved", got virtual_stages={virtual} and {schedule!r}.')
    options = {} if virtual is None else {"virtual": virtual}
    return schedules.SCHEDULES[schedule](groups, microbatches, **options)
