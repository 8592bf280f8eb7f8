"""How long a schedule takes, how long devices wait, and how many activations they hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from tfpar.pipeline.schedules import BACKWARD, FORWARD, INPUT, WEIGHT, Action, Schedule, in_order, needs

EQUAL = {FORWARD: 1.0, BACKWARD: 2.0, INPUT: 1.0, WEIGHT: 1.0}


@dataclasses.dataclass(frozen=True)
class Simulation:
    """A schedule with times.

    Attributes:
        schedule: what was simulated.
        starts: when each action starts.
        ends: when it ends.
    """

    schedule: Schedule
    starts: Mapping[Action, float]
    ends: Mapping[Action, float]

    @property
    def time(self) -> float:
        """When the last action ends."""
        return max(self.ends.values())

    @property
    def bubble(self) -> float:
        """The share of the devices' time in which they wait, 0 to 1."""
        busy = sum(self.ends[action] - self.starts[action] for action in self.ends)
        return 1.0 - busy / (self.time * self.schedule.devices)

    @property
    def live_activations(self) -> tuple[int, ...]:
        """Per device, the most stage inputs that it holds at once: from the forward until nothing needs them any more."""
        last = WEIGHT if self.schedule.splits_backward else BACKWARD
        peaks = []
        for actions in self.schedule.actions:
            held = peak = 0
            for action in actions:
                held += action.kind == FORWARD
                peak = max(peak, held)
                held -= action.kind == last
            peaks.append(peak)
        return tuple(peaks)

    def grid(self) -> str:
        """One line per device, one column per unit of time; "." is waiting. Costs must be whole numbers."""
        rows = []
        for actions in self.schedule.actions:
            cells = ["."] * round(self.time)
            for action in actions:
                for t in range(round(self.starts[action]), round(self.ends[action])):
                    cells[t] = f"{action.kind}{action.microbatch}"
            width = max(2, *(len(cell) for cell in cells))
            rows.append(" ".join(cell.ljust(width) for cell in cells).rstrip())
        return "\n".join(rows)


def simulate(schedule: Schedule, costs: Mapping[str, float] = EQUAL, transfer: float = 0.0) -> Simulation:
    """Starts each action as soon as its device is free and what it needs has arrived.

    Args:
        schedule: a schedule.
        costs: the time of an action of each kind, in any unit.
        transfer: the time from the end of an action to its result's arrival on another device, in the same unit.

    Returns:
        The times.

    Example:

    >>> from tfpar.pipeline import schedules, simulation
    >>> print(simulation.simulate(schedules.zero_bubble_h1(devices=2, microbatches=3)).grid())
    F0 F1 .  I0 W0 F2 I1 W1 I2 W2
    .  F0 I0 F1 I1 W0 F2 I2 W1 W2
    """
    home = {action: device for device, actions in enumerate(schedule.actions) for action in actions}
    starts: dict[Action, float] = {}
    ends: dict[Action, float] = {}
    free = [0.0] * schedule.devices
    for device, action in in_order(schedule):
        needed = needs(action, schedule.stages, schedule.splits_backward)
        arrivals = [ends[other] + transfer * (home[other] != device) for other in needed]
        starts[action] = max([free[device], *arrivals])
        ends[action] = free[device] = starts[action] + costs[action.kind]
    return Simulation(schedule, starts, ends)
