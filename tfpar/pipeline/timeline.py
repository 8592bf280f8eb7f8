"""When each stage did what in a step: as a trace for a browser, and as a picture beside the simulated schedule."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import keras

from tfpar.pipeline.run import Event
from tfpar.pipeline.schedules import BACKWARD, FORWARD, INPUT, WEIGHT, Schedule, restricted
from tfpar.pipeline.simulation import Simulation, simulate


class Timeline:
    """The actions of a model's last step.

    Args:
        events: what was done, and when.
        schedule: what was planned.

    Attributes:
        events: in order of their start, in seconds from that of the first.
    """

    def __init__(self, events: Sequence[Event], schedule: Schedule):
        first = min(event.start for event in events)
        shifted = [Event(e.device, e.action, e.start - first, e.end - first) for e in events]
        self.events = tuple(sorted(shifted, key=lambda event: event.start))
        self.schedule = schedule

    @property
    def time(self) -> float:
        """Seconds from the first action's start to the last one's end."""
        return max(event.end for event in self.events)

    @property
    def bubble(self) -> float:
        """The share of the devices' time in which they wait, 0 to 1; with its own costs, see `simulated`."""
        busy = sum(event.end - event.start for event in self.events)
        return 1.0 - busy / (self.time * self.schedule.devices)

    def simulated(self) -> Simulation:
        """The same schedule with the mean time of each kind of action, in seconds."""
        costs = {}
        for kind in (FORWARD, BACKWARD, INPUT, WEIGHT):
            times = [event.end - event.start for event in self.events if event.action.kind == kind]
            costs[kind] = sum(times) / len(times) if times else 0.0
        return simulate(self.schedule, costs)

    def save(self, path: str | os.PathLike) -> None:
        """Writes the timeline.

        Args:
            path: ends in ".json": the Chrome trace format, for Perfetto (ui.perfetto.dev) or chrome://tracing. In ".png":
                a picture of the step above the simulated one; needs matplotlib (`pip install tfpar[notebooks]`).

        Raises:
            ValueError: another ending.
        """
        path = os.fspath(path)
        if path.endswith(".json"):
            with open(path, "w") as file:
                json.dump({"traceEvents": self._trace(), "displayTimeUnit": "ms"}, file)
        elif path.endswith(".png"):
            self._draw(path)
        else:
            raise ValueError(f"A timeline is saved as .json or .png, got {path!r}.")

    def _trace(self) -> list[dict[str, Any]]:
        """Source of the format: "Trace Event Format", Google, 2016."""
        names = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": device, "args": {"name": f"device {device}"}}
            for device in range(self.schedule.devices)
        ]
        boxes = [
            {
                "ph": "X",
                "name": str(event.action),
                "cat": _NAMES[event.action.kind],
                "pid": 0,
                "tid": event.device,
                "ts": event.start * 1e6,
                "dur": (event.end - event.start) * 1e6,
                "args": {"stage": event.action.stage, "micro-batch": event.action.microbatch},
            }
            for event in self.events
        ]
        return names + boxes

    def _draw(self, path: str) -> None:
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise ImportError("A picture of a timeline needs matplotlib: pip install 'tfpar[notebooks]'.") from None
        plan = self.simulated()
        planned = [
            Event(device, action, plan.starts[action], plan.ends[action])
            for device, actions in enumerate(self.schedule.actions)
            for action in actions
        ]
        figure = Figure(figsize=(12, 1.2 + 0.9 * self.schedule.devices), layout="constrained")
        both = figure.subplots(2, 1, sharex=True)
        rows = (("measured", self.events, self.time, self.bubble), ("simulated", planned, plan.time, plan.bubble))
        for axes, (name, events, time, bubble) in zip(both, rows):
            for event in events:
                span, y = (event.start * 1e3, (event.end - event.start) * 1e3), -event.device
                axes.broken_barh([span], (y - 0.4, 0.8), facecolors=_COLORS[event.action.kind], edgecolors="white")
                if span[1] > 0.015 * time * 1e3:
                    axes.text(span[0] + span[1] / 2, y, str(event.action), ha="center", va="center", fontsize=6)
            axes.set_yticks(
                [-d for d in range(self.schedule.devices)], [f"device {d}" for d in range(self.schedule.devices)]
            )
            axes.set_title(f"{name}: {time * 1e3:.0f} ms, {bubble:.0%} idle", fontsize=9, loc="left")
        both[1].set_xlabel("milliseconds")
        figure.savefig(path, dpi=120)


def timeline(model: keras.Model) -> Timeline:
    """The timeline of a model's last step.

    Args:
        model: a model that was trained, evaluated or asked for predictions under a strategy with pipeline stages.

    Returns:
        The actions with their times; `save` writes them.

    Raises:
        ValueError: there was no step yet, or the model has no stages.

    Example:

    >>> strategy = tfpar.PipelineStrategy(stages=2, microbatches=2)
    >>> with strategy.scope():
    ...     model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16), keras.layers.Dense(1)])
    ...     model.compile("adam", "mse")
    >>> history = model.fit(np.ones((4, 8)), np.ones((4, 1)), verbose=0)
    >>> [str(event.action) for event in tfpar.pipeline.timeline(model).events if event.device == 0]
    ['F0.0', 'F0.1', 'B0.0', 'B0.1']
    """
    pipeline = getattr(getattr(model.distribute_strategy, "placement", None), "pipeline", None)
    run = model.distribute_strategy.trainer.last.get(model) if pipeline else None
    if run is None:
        raise ValueError(
            f"There is no step of the model {model.name!r} in stages yet. Train it with fit under a strategy whose mesh has "
            "the axis 'pipe'."
        )
    count = 1 + max(event.action.microbatch for event in run.events)
    forward_only = all(event.action.kind == FORWARD for event in run.events)
    return Timeline(run.events, restricted(pipeline.schedule, count, forward_only))


_NAMES = {FORWARD: "forward", BACKWARD: "backward", INPUT: "backward for inputs", WEIGHT: "backward for weights"}
_COLORS = {FORWARD: "#9ecae1", BACKWARD: "#fdae6b", INPUT: "#fdd0a2", WEIGHT: "#c7e9c0"}
