"""A worker's step as a function: it reads weights from the servers and returns what shall change, and changes nothing.

    coordinator        batch, the worker's number, its share of the batch
        │
    worker             reads weights, or rows of them        ◄── servers
        │              forward, backward
        ├──────────►   gradients, cut to the servers' parts  ──► servers, where the update finds them
        └──────────►   what metrics add, logs, outputs       ──► coordinator

So a step that is lost with its worker is done again by another one, and a gradient counts once.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpar import compat
from tfpar.compat import training as steps
from tfpar.pipeline.loss_parts import corrected
from tfpar.replica_context import ServersContext
from tfpar.servers.own_logs import OwnLogs
from tfpar.servers.spread import HOST
from tfpar.servers.variables import ServerVariable
from tfpar.servers.views import Change, WorkerStep


@dataclasses.dataclass(frozen=True)
class Signature:
    """What the tensors of a step's result stand for.

    Attributes:
        updates: per call of an optimizer: it, its variables, and for each of those whether it has a gradient.
        changed: the variables on servers that the step changes otherwise.
        adds: for each of those, whether the result is a difference; else it is the new value.
        metrics: the variables of metrics that it changes.
        divisors: how many numbers the losses need that are known of the whole batch only.
    """

    updates: tuple[tuple[keras.optimizers.Optimizer, tuple[keras.Variable, ...], tuple[bool, ...]], ...]
    changed: tuple[ServerVariable, ...]
    adds: tuple[bool, ...]
    metrics: tuple[ServerVariable, ...]
    divisors: int


class Program:
    """One of a model's steps, traced for a batch's shapes.

    Args:
        model: a built model.
        step: `model.train_step`, `test_step` or `predict_step`.
        in_parts: whether several workers each take a part of a batch, whose results are added.
    """

    def __init__(self, model: keras.Model, step: Callable[[Any], Any], in_parts: bool):
        self._model, self._step, self._in_parts = model, step, in_parts
        self._is_own = steps.overrides(model, step.__name__)
        self._function = tf.function(self._run, autograph=False, reduce_retracing=True)
        self._divisors = tf.function(self._divisors_of, autograph=False, reduce_retracing=True)
        self.signature: Signature | None = None
        self.own_logs: OwnLogs | None = None  # of a step that the user has overridden
        self.outputs: Any = None  # shapes and dtypes of the outputs that compute_loss was given

    def trace(self, batch: Any) -> Any:
        """The concrete function for a batch; call it with `arguments`."""
        return self._function.get_concrete_function(*self.arguments(batch, 0, 1.0, [0.0]))

    def trace_divisors(self, batch: Any) -> Any:
        """A function of the same arguments that gives what the losses of the batch are divided by, by masks or weights."""
        return self._divisors.get_concrete_function(*self.arguments(batch, 0, 1.0, [0.0]))

    @staticmethod
    def arguments(batch: Any, worker: int, share: float, totals: Sequence[float]) -> tuple:
        """What a traced step takes.

        Args:
            batch: the part of the batch.
            worker: the worker's number.
            share: the part's share of the examples.
            totals: what the losses of the whole batch are divided by.
        """
        with tf.device(HOST):  # made on a worker, they would stop every other thread until the worker answers
            return batch, tf.constant(worker, tf.int64), tf.constant(share, tf.float64), tf.constant(totals, tf.float64)

    @property
    def untracked(self) -> set[str]:
        """The names of metrics that the step does not update, for which its own logs count."""
        updated = {id(variable) for variable in self.signature.metrics}
        metrics = [metric for metric in self._model.metrics if metric.variables]
        return {m.name for m in metrics if not any(id(compat.native(v)) in updated for v in m.variables)}

    @tf.autograph.experimental.do_not_convert
    def _run(self, batch: Any, worker: tf.Tensor, share: tf.Tensor, totals: tf.Tensor) -> dict[str, Any]:
        found = 0

        def change(loss: tf.Tensor, reduction: str, divisor: tf.Tensor | None) -> tf.Tensor:
            def total() -> tf.Tensor:
                nonlocal found
                found += 1
                return totals[found - 1]

            return corrected(loss, reduction, divisor, tf.cast(share, loss.dtype), total)

        parts = steps.reductions(change, share) if self._in_parts else contextlib.nullcontext()
        with self._entered(worker, share) as step, parts:
            returned = self._step(batch)
        scale = share if self._in_parts else None
        self._sign(step, found)
        returned = tf.nest.map_structure(tf.convert_to_tensor, returned)
        if self._is_own and isinstance(returned, dict):
            self.own_logs = OwnLogs(step.metric_reads, returned)
        return {
            "gradients": [
                [
                    _pieces(scaled(g, share) if self._in_parts and self._is_own else g, compat.native(v))
                    for g, v in zip(grads, variables)
                    if g is not None
                ]
                for _, grads, variables in step.gradients
            ],
            "changes": [_change(change, scale) for change in step.changes if change.variable.kind != "metric"],
            "metrics": _packed([change for change in step.changes if change.variable.kind == "metric"]),
            "returned": returned,
        }

    @tf.autograph.experimental.do_not_convert
    def _divisors_of(self, batch: Any, worker: tf.Tensor, share: tf.Tensor, totals: tf.Tensor) -> list[tf.Tensor]:
        del totals
        found: list[tf.Tensor] = []

        def record(loss: tf.Tensor, reduction: str, divisor: tf.Tensor | None) -> tf.Tensor:
            if divisor is not None:
                found.append(tf.cast(divisor, tf.float64))
            return loss

        with self._entered(worker, share), steps.reductions(record, share):
            self._step(batch)
        return found

    @contextlib.contextmanager
    def _entered(self, worker: tf.Tensor, share: tf.Tensor):
        strategy = self._model.distribute_strategy
        with strategy.scope(), ServersContext(strategy), WorkerStep(worker) as step, contextlib.ExitStack() as undo:
            for optimizer in optimizers_of(self._model):

                def apply(grads, trainable_variables=None, optimizer=optimizer):
                    step.update(optimizer, grads, trainable_variables or steps.weights_of(optimizer))

                changes = {"apply": apply}
                if self._in_parts and not self._is_own:  # before the backward, so that a part overflows as the batch does

                    def scale_loss(loss, scale=optimizer.scale_loss):
                        return scale(loss * tf.cast(share, loss.dtype))

                    changes["scale_loss"] = scale_loss
                undo.enter_context(steps.attributes(optimizer, changes))
            undo.enter_context(steps.attributes(self._model, {"compute_loss": self._compute_loss}))
            yield step

    def _compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        self.outputs = tf.nest.map_structure(lambda leaf: tf.TensorSpec(leaf.shape, leaf.dtype), y_pred)
        return type(self._model).compute_loss(self._model, x, y, y_pred, sample_weight, training)

    def _sign(self, step: WorkerStep, divisors: int) -> None:
        updates = tuple((o, tuple(vs), tuple(g is not None for g in gs)) for o, gs, vs in step.gradients)
        state = [change for change in step.changes if change.variable.kind != "metric"]
        metrics = tuple(change.variable for change in step.changes if change.variable.kind == "metric")
        changed, adds = tuple(change.variable for change in state), tuple(change.delta is not None for change in state)
        self.signature = Signature(updates, changed, adds, metrics, divisors)


def optimizers_of(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """The optimizer that a model is compiled with, and those that its own `train_step` may use."""
    found = [model.optimizer, *vars(model).values()]
    return list({id(o): o for o in found if isinstance(o, keras.optimizers.Optimizer)}.values())


def scaled(gradient: Any, factor: tf.Tensor) -> Any:
    """A gradient, dense or of rows, times a number."""
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values * tf.cast(factor, gradient.values.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)


def _pieces(value: Any, variable: ServerVariable) -> list[Any]:
    """A gradient or a difference cut into what belongs to each part of a variable, and sent there."""
    homes, pieces = variable.homes, []
    for part, device in enumerate(homes.devices if homes.bounds is not None else homes.devices[:1]):
        piece = value
        if homes.is_split and isinstance(value, tf.IndexedSlices):
            first, last = homes.bounds[part], homes.bounds[part + 1]
            mine = tf.where((value.indices >= first) & (value.indices < last))[:, 0]
            piece = tf.IndexedSlices(tf.gather(value.values, mine), tf.gather(value.indices, mine) - first)
        elif homes.is_split:
            piece = value[homes.rows(part)]
        with tf.device(device):
            if isinstance(piece, tf.IndexedSlices):  # without its shape, which eager code would fetch again and again
                piece = tf.IndexedSlices(tf.identity(piece.values), tf.identity(piece.indices))
            else:
                piece = tf.identity(piece)
        pieces.append(piece)
    return pieces


def _change(change: Change, share: tf.Tensor | None) -> list[tf.Tensor]:
    """What a step adds to a variable on servers; of parts the mean over the examples, for floating numbers."""
    value = change.value if change.delta is None else change.delta
    if share is not None and value.dtype.is_floating:
        value = value * tf.cast(share, value.dtype)
    return _pieces(value, change.variable)


def _packed(changes: Sequence[Change]) -> dict[str, tf.Tensor]:
    """What a step adds to metrics, one vector per dtype, so that few messages bring it to the coordinator."""
    found: dict[str, list[tf.Tensor]] = {}
    for change in changes:
        if change.delta is None:
            raise NotImplementedError(
                f"The metric variable {change.variable.path!r} has the dtype {change.variable.dtype.name}. What several "
                "workers add to a metric is added up, so that its variables must hold numbers."
            )
        found.setdefault(change.delta.dtype.name, []).append(tf.reshape(change.delta, [-1]))
    return {dtype: tf.concat(parts, 0) for dtype, parts in found.items()}


def unpacked(variables: Sequence[ServerVariable], vectors: dict[str, tf.Tensor]) -> list[tf.Tensor]:
    """What to add to each metric's variable, from the vectors of a step."""
    starts, found = dict.fromkeys(vectors, 0), []
    for variable in variables:
        size, dtype = variable.shape.num_elements(), variable.dtype.name
        found.append(tf.reshape(vectors[dtype][starts[dtype] : starts[dtype] + size], variable.shape))
        starts[dtype] += size
    return found
