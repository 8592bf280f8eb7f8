"""Logs that a step of the user's own computes from metrics: computed again, from the metrics of all steps.

A worker's step sees of a metric only what it adds itself, so that what it computes from `metric.result()` is of one batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfpar.compat import functions


class OwnLogs:
    """Which of a step's logs come from metrics, and how.

    Args:
        reads: each read of a metric's variable in the step: the variable, what was read, and whether the step had done all
            its changes to it by then.
        returned: the step's logs.

    Raises:
        NotImplementedError: a log mixes metrics with the batch, or uses a metric before its update.
    """

    def __init__(self, reads: Sequence[tuple[Any, tf.Tensor, bool]], returned: Mapping[str, tf.Tensor]):
        ends = {tensor.op: variable for variable, tensor, is_last in reads if is_last}
        early = {tensor.op for _, tensor, is_last in reads if not is_last}
        self._found: dict[str, tuple[list[Any], list[tf.Tensor], tf.Tensor]] = {}
        self._functions: dict[str, Any] = {}
        for name, tensor in returned.items():
            used, others = _origins(tensor.op, set(ends))
            if not used and not others & early:
                continue
            if others & early or any(operation.type in ("Placeholder", "ReadVariableOp") for operation in others):
                raise NotImplementedError(
                    f"The log {name!r} is computed from a metric and from the batch, or from a metric before its update. On "
                    "parameter servers metrics are known after the step: return metric.result() as it is, and what belongs "
                    "to the batch under a name of its own."
                )
            self._found[name] = [ends[operation] for operation in used], [o.outputs[0] for o in used], tensor

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def value(self, name: str) -> tf.Tensor:
        """A log, from what the metrics' variables hold now."""
        variables, feeds, tensor = self._found[name]
        if name not in self._functions:
            self._functions[name] = functions.prune(tensor.graph, feeds, [tensor])
        return self._functions[name](*(variable.pull() for variable in variables))[0]


def _origins(operation: tf.Operation, ends: set[tf.Operation]) -> tuple[list[tf.Operation], set[tf.Operation]]:
    """What an operation is computed from: the ends that are reached, and all other operations on the way."""
    used, others, stack = [], set(), [operation]
    while stack:
        current = stack.pop()
        if current in ends:
            used += [] if current in used else [current]
        elif current not in others:
            others.add(current)
            stack.extend(tensor.op for tensor in current.inputs)
    return used, others
