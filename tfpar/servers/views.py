"""What a variable on servers is to the code that runs: whole, a value that a worker's step read, or one server's part.

a worker's step (`WorkerStep`)       each variable is read once; what the step would change is kept, and becomes a
                                     result of the step: no step changes anything itself
an optimizer's step (`UpdateView`)   one server's part of each variable, so that only gradients travel
everywhere else                      the whole value, as on one device
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from tfpar import compat
from tfpar.compat import servers

_entered = threading.local()
SEED_STRIDE = 1 << 20  # random draws of one worker before it meets the numbers of the next


class _View:
    def __enter__(self):
        self._outer = getattr(_entered, "view", None)
        _entered.view = self
        return self

    def __exit__(self, *error: Any) -> None:
        _entered.view = self._outer


def current() -> Any:
    """The view that is entered on this thread, None in eager code and elsewhere."""
    return None if tf.executing_eagerly() else getattr(_entered, "view", None)


@dataclasses.dataclass
class Change:
    """What a step would do to a variable.

    Attributes:
        variable: which.
        delta: what to add to it; None: it takes `value`, because values of its dtype cannot be added.
        value: what the step reads from then on.
    """

    variable: Any
    delta: tf.Tensor | None
    value: tf.Tensor


class WorkerStep(_View):
    """While entered, variables are read once from their servers, and changed in this step's own sight only.

    Args:
        worker: the number of the worker, a scalar int64 tensor. Random seeds differ by it, so that workers which read one
            seed draw different numbers; worker 0 draws those of one device.

    Attributes:
        gradients: per call of an optimizer: it, the variables and their gradients.
    """

    def __init__(self, worker: tf.Tensor):
        self._worker, self._graph = worker, tf.compat.v1.get_default_graph()
        self._read: dict[int, tf.Tensor] = {}
        self._changes: dict[int, Change] = {}
        self._updated: set[int] = set()
        self._metric_reads: list[tuple[Any, tf.Tensor, Change | None]] = []
        self.gradients: list[tuple[Any, list[Any], list[Any]]] = []

    @property
    def changes(self) -> list[Change]:
        """What the step would change, apart from what optimizers do."""
        return list(self._changes.values())

    @property
    def metric_reads(self) -> list[tuple[Any, tf.Tensor, bool]]:
        """Each read of a metric's variable: it, the value, and whether it came after all changes of the step to it."""
        return [(v, value, self._changes.get(id(v)) is change) for v, value, change in self._metric_reads]

    def read(self, variable: Any) -> tf.Tensor:
        """The value, once from the servers, as one read to gradient tapes."""
        if id(variable) in self._updated:
            raise NotImplementedError(
                f"A step reads the variable {variable.path!r} after an optimizer has changed it. On parameter servers an "
                "update happens after the step; compute all gradients and logs from the weights before apply_gradients."
            )
        with self._outside_of_loops():
            change = self._changes.get(id(variable))
            value = tf.identity(self._start(variable) if change is None else change.value)
            if variable.kind == "metric":
                self._metric_reads.append((variable, value, change))
            if change is not None:
                return value
            value._tfpar_read = variable
            compat.watch(variable)
            compat.record_read(value, variable.handle)
        return value

    def rows(self, variable: Any, ids: tf.Tensor) -> tf.Tensor | None:
        """Rows of a variable, of which only those travel; None where this is not possible."""
        in_loop = tf.compat.v1.get_default_graph() is not self._graph
        if in_loop or id(variable) in self._changes or not variable.is_parted:
            return None
        compat.watch(variable)
        return variable.lookup(ids)

    def assign(self, variable: Any, value: Any) -> None:
        """The variable has another value for the rest of the step."""
        self._refuse_loop(variable)
        value = tf.cast(tf.convert_to_tensor(value), variable.dtype)
        value.shape.assert_is_compatible_with(variable.shape)
        is_number = variable.dtype.is_floating or variable.dtype.is_integer or variable.dtype.is_complex
        with servers.stop_recording():
            delta = value - self._start(variable) if is_number else None
        self._changes[id(variable)] = Change(variable, delta, value)

    def add(self, variable: Any, delta: Any) -> None:
        """The variable has a value that is larger by `delta` for the rest of the step."""
        self._refuse_loop(variable)
        delta = tf.cast(tf.convert_to_tensor(delta), variable.dtype)
        before = self._changes.get(id(variable))
        with servers.stop_recording():
            total = delta if before is None else before.delta + delta
            self._changes[id(variable)] = Change(variable, total, self._start(variable) + total)

    def update(self, optimizer: Any, gradients: list[Any], variables: list[Any]) -> None:
        """Keeps the gradients that an optimizer was given."""
        self._refuse_loop(variables[0])
        self.gradients.append((optimizer, list(gradients), list(variables)))
        self._updated |= {id(compat.native(variable)) for variable, g in zip(variables, gradients) if g is not None}

    def _start(self, variable: Any) -> tf.Tensor:
        """The value at the start of the step. A metric starts at 0: what a step adds to it does not depend on more."""
        if id(variable) not in self._read:
            with servers.stop_recording():
                is_metric = variable.kind == "metric"
                value = tf.zeros(variable.shape, variable.dtype) if is_metric else variable.pull()
                if variable.kind == "seed":
                    offset = tf.stack([tf.zeros((), tf.int64), self._worker * SEED_STRIDE])
                    value += tf.cast(offset, value.dtype)
            self._read[id(variable)] = value
        return self._read[id(variable)]

    @contextlib.contextmanager
    def _outside_of_loops(self) -> Iterator[None]:
        """Where a loop's body is traced, in the graph around it: a loop takes the value in."""
        if tf.compat.v1.get_default_graph() is self._graph:
            yield
        else:
            with self._graph.as_default(), tf.control_dependencies(None):
                yield

    def _refuse_loop(self, variable: Any) -> None:
        if tf.compat.v1.get_default_graph() is not self._graph:
            raise NotImplementedError(
                f"The variable {variable.path!r} is changed in a branch or a loop of a tf.function (tf.cond, "
                "tf.while_loop), which a step on parameter servers cannot follow. Compute the new value there and assign it "
                "outside."
            )


@dataclasses.dataclass(eq=False)
class UpdateView(_View):
    """While entered, an optimizer sees what one server holds.

    Args:
        device: the server.
        parts: by the id of a variable, the number of the part that is meant; slots go with their variable. A split
            variable that is not in it is read whole, and assigned to all its servers.
        changed: the variables with a copy on each server of which this one's was changed.
    """

    device: str
    parts: Mapping[int, int]
    changed: dict[int, Any] = dataclasses.field(default_factory=dict)

    def write(self, variable: Any) -> tf.Variable | None:
        """As `local`, for a change of the variable."""
        if variable.homes.bounds is None:
            self.changed[id(variable)] = variable
        return self.local(variable)

    def local(self, variable: Any) -> tf.Variable | None:
        """The resource of a variable that is meant, None for all of them."""
        homes = variable.homes
        if homes.bounds is None:
            return variable.parts[homes.devices.index(self.device)] if self.device in homes.devices else None
        if not homes.is_split:
            return variable.parts[0]
        part = self.parts.get(id(variable.leader))
        return None if part is None else variable.parts[part]


def route_lookups() -> None:
    """Lets `tf.gather` on a variable that a worker's step has read take rows from the servers, not the whole variable."""

    def wrap(gather: Callable) -> Callable:
        def lookup(params, indices, axis, batch_dims=0, **kwargs):
            step = current()
            if isinstance(step, WorkerStep) and batch_dims == 0:
                found = _rows(step, params, indices, axis)
                if found is not None:
                    return found
            return gather(params, indices, axis, batch_dims=batch_dims, **kwargs)

        return lookup

    compat.route("gather_v2", wrap)


def _rows(step: WorkerStep, params: Any, indices: Any, axis: Any) -> tf.Tensor | None:
    if tf.get_static_value(tf.convert_to_tensor(axis)) != 0:
        return None
    source = params = tf.convert_to_tensor(params)
    if params.op.type == "Cast" and not hasattr(params, "_tfpar_read"):  # mixed precision
        source = params.op.inputs[0]
    variable = getattr(source, "_tfpar_read", None)
    if variable is None:
        return None
    found = step.rows(variable, tf.convert_to_tensor(indices))
    return None if found is None else tf.cast(found, params.dtype)
