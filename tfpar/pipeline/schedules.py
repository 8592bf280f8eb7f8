"""Pipeline schedules as data: for each device a list of actions, in the order in which it takes them.

A model is cut into stages, a batch into micro-batches. An action is a forward or a backward of one stage on one micro-batch.
With `v` virtual stages per device, device `d` of `p` holds the stages d, p + d, 2p + d, …

    gpipe          all forwards, then all backwards (Huang et al., arXiv 1811.06965)
    1f1b           one forward, one backward, at most p micro-batches in flight (Narayanan et al., PipeDream-Flush, arXiv
                   2006.09503)
    interleaved    1f1b with several smaller stages per device (Narayanan et al., arXiv 2104.04473)
    zb-h1          1f1b whose backward is taken apart into that for the inputs, which the stage before waits for, and
                   that for the weights, which fills idle time (Qi et al., arXiv 2401.10241)

No TensorFlow in here. `simulation.py` says how long a schedule takes and how much it holds.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator

FORWARD, BACKWARD, INPUT, WEIGHT = "F", "B", "I", "W"


@dataclasses.dataclass(frozen=True, order=True)
class Action:
    """What a device does with one micro-batch at one stage.

    Attributes:
        kind: "F" forward; "B" backward; "I" and "W" the parts of a backward for the inputs and for the weights.
        stage: the stage, counted over the whole model.
        microbatch: the micro-batch.
    """

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A schedule, of this file or of your own.

    Attributes:
        name: for messages.
        microbatches: how many a batch is cut into.
        stages: how many the model is cut into, over all devices.
        actions: per device, in order.
        forward_only: whether it has forwards alone, for evaluation.

    Example:

    >>> from tfpar.pipeline import schedules
    >>> print(schedules.one_forward_one_backward(devices=2, microbatches=2))
    1f1b: 2 devices, 2 stages, 2 micro-batches
    0: F0.0 F0.1 B0.0 B0.1
    1: F1.0 B1.0 F1.1 B1.1
    """

    name: str
    microbatches: int
    stages: int
    actions: tuple[tuple[Action, ...], ...]
    forward_only: bool = False

    def __post_init__(self):
        check(self)

    @property
    def devices(self) -> int:
        """How many devices, or sub-meshes, the stages are spread over."""
        return len(self.actions)

    @property
    def splits_backward(self) -> bool:
        """Whether backwards are taken apart."""
        return any(action.kind == WEIGHT for actions in self.actions for action in actions)

    def __str__(self) -> str:
        lines = [f"{d}: {' '.join(map(str, actions))}" for d, actions in enumerate(self.actions)]
        title = f"{self.name}: {self.devices} devices, {self.stages} stages, {self.microbatches} micro-batches"
        return "\n".join([title, *lines])


def gpipe(devices: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards.

    Args:
        devices: number of devices, each with one stage.
        microbatches: number of micro-batches.

    Returns:
        The schedule. Each device holds the activations of all micro-batches at once.
    """
    _check_sizes(devices, microbatches)
    return Schedule(
        "gpipe",
        microbatches,
        devices,
        tuple(
            tuple(Action(kind, device, i) for kind in (FORWARD, BACKWARD) for i in range(microbatches))
            for device in range(devices)
        ),
    )


def one_forward_one_backward(devices: int, microbatches: int) -> Schedule:
    """Alternating forwards and backwards after a warm-up.

    Args:
        devices: number of devices, each with one stage.
        microbatches: number of micro-batches.

    Returns:
        The schedule. Device `d` holds the activations of at most `devices - d` micro-batches.
    """
    _check_sizes(devices, microbatches)

    def order(device: int) -> Iterator[Action]:
        warm = min(devices - device - 1, microbatches)
        yield from (Action(FORWARD, device, i) for i in range(warm))
        for i in range(microbatches):
            if warm + i < microbatches:
                yield Action(FORWARD, device, warm + i)
            yield Action(BACKWARD, device, i)

    return Schedule("1f1b", microbatches, devices, tuple(tuple(order(device)) for device in range(devices)))


def interleaved(devices: int, microbatches: int, virtual: int = 2) -> Schedule:
    """1F1B over `virtual` stages per device.

    Args:
        devices: number of devices.
        microbatches: number of micro-batches, a multiple of `devices`.
        virtual: stages per device.

    Returns:
        The schedule, whose bubble is that of 1F1B divided by `virtual`.

    Raises:
        ValueError: `devices` does not divide `microbatches`.
    """
    _check_sizes(devices, microbatches)
    if virtual < 1 or microbatches % devices:
        raise ValueError(
            f"An interleaved schedule works on groups of {devices} micro-batches, one per device, with at least one virtual "
            f"stage; got {microbatches} micro-batches and {virtual} virtual stages. Choose a multiple of {devices}."
        )
    total = microbatches * virtual

    def nth(device: int, kind: str, n: int) -> Action:
        group, within = divmod(n, devices * virtual)
        chunk, i = divmod(within, devices)
        chunk = chunk if kind == FORWARD else virtual - 1 - chunk
        return Action(kind, chunk * devices + device, group * devices + i)

    def order(device: int) -> Iterator[Action]:
        warm = min((devices - device - 1) * 2 + (virtual - 1) * devices, total)
        yield from (nth(device, FORWARD, n) for n in range(warm))
        for n in range(total):
            if warm + n < total:
                yield nth(device, FORWARD, warm + n)
            yield nth(device, BACKWARD, n)

    stages = devices * virtual
    return Schedule("interleaved", microbatches, stages, tuple(tuple(order(device)) for device in range(devices)))


def zero_bubble_h1(devices: int, microbatches: int) -> Schedule:
    """1F1B with the weights' part of each backward moved to where the device would wait.

    Args:
        devices: number of devices, each with one stage.
        microbatches: number of micro-batches.

    Returns:
        The schedule. Each device holds what belongs to at most `devices` micro-batches.
    """
    _check_sizes(devices, microbatches)

    def order(device: int) -> Iterator[Action]:
        forwards = min(devices - device, microbatches)
        yield from (Action(FORWARD, device, i) for i in range(forwards))
        for i in range(microbatches):
            yield Action(INPUT, device, i)
            if i >= device:
                yield Action(WEIGHT, device, i - device)
            if forwards + i < microbatches:
                yield Action(FORWARD, device, forwards + i)
        yield from (Action(WEIGHT, device, i) for i in range(max(0, microbatches - device), microbatches))

    return Schedule("zb-h1", microbatches, devices, tuple(tuple(order(device)) for device in range(devices)))


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "zb-h1": zero_bubble_h1,
}


def restricted(schedule: Schedule, microbatches: int, forward_only: bool = False) -> Schedule:
    """A schedule for a batch of fewer micro-batches, or without backwards.

    Args:
        schedule: any schedule.
        microbatches: how many there are; the actions of others are left out.
        forward_only: whether to leave out all backwards.

    Returns:
        The schedule with the actions that are left, in the same order.
    """
    if microbatches == schedule.microbatches and not forward_only:
        return schedule
    kept = [
        [a for a in actions if a.microbatch < microbatches and not (forward_only and a.kind != FORWARD)]
        for actions in schedule.actions
    ]
    return Schedule(schedule.name, microbatches, schedule.stages, tuple(map(tuple, kept)), forward_only)


def needs(action: Action, stages: int, splits_backward: bool) -> list[Action]:
    """The actions whose results an action needs.

    Args:
        action: any action of a schedule.
        stages: how many there are.
        splits_backward: whether the schedule has "I" and "W" instead of "B".

    Returns:
        At most two actions: of the same stage, and of the stage next to it.
    """
    backward = INPUT if splits_backward else BACKWARD
    if action.kind == FORWARD:
        return [Action(FORWARD, action.stage - 1, action.microbatch)] if action.stage else []
    if action.kind == WEIGHT:
        return [Action(INPUT, action.stage, action.microbatch)]
    own = [Action(FORWARD, action.stage, action.microbatch)]
    last = action.stage == stages - 1
    return own if last else [*own, Action(backward, action.stage + 1, action.microbatch)]


def check(schedule: Schedule) -> None:
    """Raises ValueError for a schedule that is not complete or that cannot end.

    Args:
        schedule: any schedule.

    Raises:
        ValueError: an action is missing, done twice, unknown or on two devices of one stage, or all devices wait.
    """
    found = [action for actions in schedule.actions for action in actions]
    backward = (INPUT, WEIGHT) if schedule.splits_backward else (BACKWARD,)
    kinds = (FORWARD,) if schedule.forward_only else (FORWARD, *backward)
    wanted = [Action(k, s, i) for k in kinds for s in range(schedule.stages) for i in range(schedule.microbatches)]
    known, number = set(wanted), collections.Counter(found)
    for action in found:
        if action not in known:
            raise ValueError(f"The schedule {schedule.name!r} has the action {action}, expected one of {_listed(wanted)}.")
        if number[action] > 1:
            raise ValueError(f"The schedule {schedule.name!r} has the action {action} twice, expected each once.")
    missing = sorted(known - set(found))
    if missing:
        raise ValueError(f"The schedule {schedule.name!r} lacks the actions {_listed(missing)}.")
    for stage in range(schedule.stages):
        homes = {d for d, actions in enumerate(schedule.actions) for action in actions if action.stage == stage}
        if len(homes) > 1:
            raise ValueError(
                f"The schedule {schedule.name!r} has stage {stage} on the devices {sorted(homes)}; a stage has one."
            )
    done = {action for _, action in in_order(schedule)}
    waiting = {d: next((a for a in actions if a not in done), None) for d, actions in enumerate(schedule.actions)}
    listed = "; ".join(f"device {device} waits to do {action}" for device, action in waiting.items() if action)
    if listed:
        raise ValueError(f"The schedule {schedule.name!r} never ends: {listed}. Each needs an action that comes later.")


def in_order(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    """Lets each device go as far as it can, in turn, until all have ended or all wait.

    Args:
        schedule: any schedule.

    Yields:
        A device and its next action, after all actions that this one needs.
    """
    done, next_of = set(), [0] * schedule.devices
    moved = True
    while moved:
        moved = False
        for device, actions in enumerate(schedule.actions):
            while next_of[device] < len(actions):
                action = actions[next_of[device]]
                if not done.issuperset(needs(action, schedule.stages, schedule.splits_backward)):
                    break
                yield device, action
                done.add(action)
                next_of[device] += 1
                moved = True


def _check_sizes(devices: int, microbatches: int) -> None:
    if devices < 1 or microbatches < 1:
        raise ValueError(
            "A schedule needs at least one device and one micro-batch, got "
            f"{devices} devices and {microbatches} micro-batches."
        )


def _listed(actions: list[Action]) -> str:
    return ", ".join(map(str, actions[:5])) + (", …" if len(actions) > 5 else "")
