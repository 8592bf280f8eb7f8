"""One step: what each action of a schedule does with a micro-batch, and what is held in between."""

from __future__ import annotations

import dataclasses
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfpar import input as input_lib, transfer
from tfpar.pipeline import crossing
from tfpar.pipeline.batches import MicroBatch
from tfpar.pipeline.schedules import BACKWARD, FORWARD, INPUT, WEIGHT, Action
from tfpar.pipeline.stage import Stage, StageProgram
from tfpar.pipeline.workers import Aborted, Mailbox, StageError


@dataclasses.dataclass(frozen=True)
class Event:
    """An action that was carried out.

    Attributes:
        device: which of the schedule's devices did it.
        action: what.
        start: when it began, in seconds of `time.perf_counter`.
        end: when it ended.
    """

    device: int
    action: Action
    start: float
    end: float


class Run:
    """The state of one step.

    Args:
        stages: the stages of the model.
        programs: per micro-batch, the functions of each stage.
        parts: the micro-batches.
        totals: what the last stage's losses are divided by on the whole batch.
        mailbox: what stages hand to each other.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        programs: Sequence[Sequence[StageProgram]],
        parts: Sequence[MicroBatch],
        totals: Sequence[float],
        mailbox: Mailbox,
    ):
        self._stages, self.programs, self._parts, self._mailbox = stages, programs, parts, mailbox
        self._totals = totals
        self._held: dict[tuple[int, int], dict[str, Any]] = {}
        self.events: list[Event] = []
        self.memory = Memory(len({id(stage.mesh) for stage in stages}))
        self.sums: list[list[tf.Tensor]] = [[] for _ in stages]
        self.losses: list[list[float]] = [[] for _ in stages]
        self.outputs: dict[int, list[tf.Tensor]] = {}
        self.logs: Any = {}

    def act(self, device: int, action: Action) -> None:
        """Carries out one action, after waiting for what it needs.

        Raises:
            StageError: it failed.
        """
        stage, program = self._stages[action.stage], self.programs[action.microbatch][action.stage]
        try:
            arrived = self._arrived(stage, action)
            start = time.perf_counter()
            self._do(device, stage, program, action, arrived)
            self.events.append(Event(device, action, start, time.perf_counter()))
        except (Aborted, StageError, TimeoutError):
            raise
        except Exception as error:
            raise StageError(
                f"{stage.name} failed at micro-batch {action.microbatch}, {_KINDS[action.kind]}: {error}"
            ) from error

    def _arrived(self, stage: Stage, action: Action) -> list[tf.Tensor]:
        """What another stage has sent for an action."""
        from_before = action.kind == FORWARD and action.stage > 0
        from_after = action.kind in (BACKWARD, INPUT) and not stage.is_last
        return self._mailbox.take(action) if from_before or from_after else []

    def _do(self, device: int, stage: Stage, program: StageProgram, action: Action, arrived: list[tf.Tensor]) -> None:
        index, i = action.stage, action.microbatch
        phase, mesh = program.phases[action.kind], stage.mesh
        moved = [crossing.move(value, mesh.dtensor_mesh) for value in arrived]
        if action.kind == FORWARD:
            feed = input_lib.distribute(self._parts[i].feeds[index].flat, mesh)
            numbers = [self._parts[i].share, *self._totals[: program.totals]]
            scalars = [transfer.to_mesh(np.float64(number), mesh.layout(())) for number in numbers]
            held = self._held[index, i] = {"inputs": [*moved, *feed, *scalars], "share": scalars[0]}
        else:
            held = self._held[index, i]
            if action.kind != WEIGHT:
                held["upstream"] = moved
        if "accumulators" in phase.takes and not self.sums[index]:
            self.sums[index] = list(program.zeros(held["share"]))
        groups = held | {"accumulators": self.sums[index]}
        arguments = [tensor for name in phase.takes for tensor in groups[name]]
        arguments += [held[kind][n] for kind, numbers in phase.kept.items() for n in numbers]
        results = phase.function(*arguments)
        own, kept = results[: phase.gives], results[phase.gives :]
        del groups, arguments, results, moved
        if kept:
            held[action.kind] = dict(enumerate(kept))
            self.memory.hold(device, kept, phase.keeps)
        self._release(held, program, action)
        self._hand_on(stage, program, action, own)

    def _release(self, held: dict[str, Any], program: StageProgram, action: Action) -> None:
        """Lets go of what no later phase of this micro-batch takes."""
        kinds = list(program.phases)
        later = [program.phases[kind] for kind in kinds[kinds.index(action.kind) + 1 :]]
        for name in [name for name in held if name != "share"]:
            if name in ("inputs", "upstream"):
                if not any(name in phase.takes for phase in later) and (name != "upstream" or action.kind != FORWARD):
                    del held[name]
                continue
            needed = {n for phase in later for n in phase.kept.get(name, ())}
            held[name] = {n: tensor for n, tensor in held[name].items() if n in needed}
        if not later:
            del self._held[action.stage, action.microbatch]

    def _hand_on(self, stage: Stage, program: StageProgram, action: Action, own: list[tf.Tensor]) -> None:
        index, i = action.stage, action.microbatch
        if action.kind == FORWARD:
            sent, part, logs = own[: len(program.sent)], own[len(program.sent)], own[len(program.sent) + 1 :]
            self.losses[index].append(float(transfer.to_host(part)))
            if not stage.is_last:
                self._mailbox.put(Action(FORWARD, index + 1, i), sent)
            else:
                self.outputs[i] = sent
                self.logs = tf.nest.pack_sequence_as(program.logs, logs)
            return
        count = program.received_floats
        if index > 0 and action.kind in (BACKWARD, INPUT):
            self._mailbox.put(Action(action.kind, index - 1, i), own[:count])
        if action.kind in (BACKWARD, WEIGHT):
            self.sums[index] = list(own[count:] if action.kind == BACKWARD else own)


class Memory:
    """Bytes of activations that devices hold, counted as tensors live and die.

    Args:
        devices: how many.

    Attributes:
        held: now, per device.
        peaks: the most at once, per device.
    """

    def __init__(self, devices: int):
        self._lock = threading.Lock()
        self.held, self.peaks = [0] * devices, [0] * devices

    def hold(self, device: int, tensors: Sequence[tf.Tensor], sizes: Sequence[int]) -> None:
        """Counts tensors, whose bytes are given, until nothing refers to them."""
        self._add(device, sum(sizes))
        for tensor, size in zip(tensors, sizes):
            weakref.finalize(tensor, self._add, device, -size)

    def _add(self, device: int, size: int) -> None:
        with self._lock:
            self.held[device] += size
            self.peaks[device] = max(self.peaks[device], self.held[device])


_KINDS: Mapping[str, str] = {
    FORWARD: "forward",
    BACKWARD: "backward",
    INPUT: "backward for its inputs",
    WEIGHT: "backward for its weights",
}
