"""The update: each server runs the optimizer on the parts that it holds, where gradients have been sent already.

Optimizers that treat each number of a weight by itself run on the parts. Others (Muon, Lamb, Adafactor, a user's own) see
each weight whole, on the server of its first part. What depends on all gradients, a norm to clip by and whether all are
finite, is computed in two rounds, as over pipeline stages. An optimizer's scalars have a copy on each server.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import optimizers

from tfpar import compat
from tfpar.compat import training as steps
from tfpar.replica_context import ServersContext
from tfpar.servers.programs import Signature, scaled, unpacked
from tfpar.servers.variables import ServerVariable
from tfpar.servers.views import UpdateView

# Each number of a weight is updated from the same number of gradient and slots, in Keras 3.15.
ELEMENTWISE = (
    optimizers.SGD,
    optimizers.Adam,
    optimizers.AdamW,
    optimizers.Nadam,
    optimizers.Adamax,
    optimizers.RMSprop,
    optimizers.Adagrad,
    optimizers.Adadelta,
    optimizers.Ftrl,
    optimizers.Lion,
)


@dataclasses.dataclass(frozen=True)
class Group:
    """What one server updates.

    Attributes:
        device: the server.
        variables: in the order of the optimizer's call.
        gradients: one each, None where there is none.
        view: how the variables look there.
    """

    device: str
    variables: list[keras.Variable]
    gradients: list[Any]
    view: UpdateView


def update_function(model: keras.Model, signature: Signature, results: Sequence[dict[str, Any]]) -> Any:
    """Traces the update of one or several workers' results.

    Args:
        model: the model.
        signature: what the results stand for.
        results: of each worker, tensors.

    Returns:
        A concrete function of the flat tensors of the results that returns the values of the model's metrics.
    """
    strategy = model.distribute_strategy
    form = [_relaxed(result) for result in results]

    @tf.autograph.experimental.do_not_convert
    def run(*flat: tf.Tensor) -> Any:
        found = tf.nest.pack_sequence_as(form, list(flat), expand_composites=True)
        with strategy.scope(), ServersContext(strategy):
            for call, (optimizer, variables, has) in enumerate(signature.updates):
                updated = [compat.native(variable) for variable, has_gradient in zip(variables, has) if has_gradient]
                pieces = [_added(v, [of["gradients"][call][i] for of in found]) for i, v in enumerate(updated)]
                _apply(optimizer, variables, has, pieces)
            for i, (variable, adds) in enumerate(zip(signature.changed, signature.adds)):
                _change(variable, adds, [of["changes"][i] for of in found])
            for of in found:
                for variable, delta in zip(signature.metrics, unpacked(signature.metrics, of["metrics"])):
                    variable.assign_add(delta)
            return model.get_metrics_result()

    specs = tf.nest.flatten(form, expand_composites=True)
    return tf.function(run, autograph=False).get_concrete_function(*specs)


def flat(results: Sequence[dict[str, Any]]) -> list[tf.Tensor]:
    """The tensors that an update takes."""
    return tf.nest.flatten([{key: of[key] for key in _TAKEN} for of in results], expand_composites=True)


def _relaxed(result: dict[str, Any]) -> dict[str, Any]:
    """Specs of a result, whatever the number of touched rows."""

    def spec(value: Any) -> Any:
        if isinstance(value, tf.IndexedSlices):
            whole = [None, *value.values.shape[1:]]
            return tf.IndexedSlicesSpec(whole, value.values.dtype, value.indices.dtype, None, [None])
        return tf.TensorSpec(value.shape, value.dtype)

    return tf.nest.map_structure(spec, {key: result[key] for key in _TAKEN})


_TAKEN = ("gradients", "changes", "metrics")


def _added(variable: ServerVariable, pieces: Sequence[list[Any]]) -> list[Any]:
    """The sum over workers of a gradient's pieces, each on its server."""
    return [_sum(found, variable, part) for part, found in enumerate(zip(*pieces))]


def _sum(found: Sequence[Any], variable: ServerVariable, part: int) -> Any:
    if not isinstance(found[0], tf.IndexedSlices):
        with tf.device(found[0].device):
            return found[0] if len(found) == 1 else tf.add_n(list(found))
    with tf.device(found[0].values.device):  # rows that repeat stay apart, as in a batch of one device
        shape = tf.constant(variable.parts[part].shape.as_list(), tf.int64)
        if len(found) == 1:
            return tf.IndexedSlices(found[0].values, found[0].indices, shape)
        return tf.IndexedSlices(tf.concat([f.values for f in found], 0), tf.concat([f.indices for f in found], 0), shape)


def _apply(optimizer: Any, variables: Sequence[keras.Variable], has: Sequence[bool], pieces: list) -> None:
    groups = _groups(optimizer, variables, has, pieces)
    parts = steps.inner_optimizers(optimizer)
    clips = [part for part in parts if getattr(part, "clipnorm", None) or getattr(part, "global_clipnorm", None)]
    asks_finite = hasattr(optimizer, "check_finite")
    squares, finite = _facts(optimizer, clips, groups, asks_finite)
    for group in groups:
        with tf.device(group.device), group.view:

            def clip(part: Any, clipped: list, group: Group = group) -> list:
                own = {id(variable) for variable in steps.weights_of(part)}
                order = [v for v, g in zip(group.variables, group.gradients) if g is not None and id(v) in own]
                return _clipped(part, clipped, [squares[id(part)][id(v)] for v in order], list(squares[id(part)].values()))

            with steps.narrowed(optimizer, group.variables, clip, lambda _: finite, clips_each=True):
                optimizer.apply(group.gradients, group.variables)
    _spread_copies(groups)


def _groups(optimizer: Any, variables: Sequence[keras.Variable], has: Sequence[bool], pieces: list) -> list[Group]:
    """The servers that update something, with the parts that each updates."""
    found: dict[str, list[tuple[keras.Variable, Any, int | None]]] = {}
    left = iter(pieces)
    for variable, has_gradient in zip(variables, has):
        native, own = compat.native(variable), next(left) if has_gradient else None
        homes = native.homes
        if homes.is_split and _is_elementwise(optimizer, variable):
            for part, device in enumerate(homes.devices):
                found.setdefault(device, []).append((variable, None if own is None else own[part], part))
        else:
            device = homes.devices[0]
            with tf.device(device):
                gradient = None if own is None else _whole(own, native)
            found.setdefault(device, []).append((variable, gradient, None))
    groups = []
    for device, members in found.items():
        parts = {id(compat.native(v)): part for v, _, part in members if part is not None}
        view = UpdateView(device, parts)
        if any(gradient is not None for _, gradient, _ in members):
            groups.append(Group(device, [v for v, _, _ in members], [g for _, g, _ in members], view))
    return groups


def _is_elementwise(optimizer: Any, variable: keras.Variable) -> bool:
    used = [part for part in steps.inner_optimizers(optimizer) if not hasattr(part, "check_finite")]
    used = [part for part in used if not isinstance(getattr(part, "optimizers", None), list | tuple)]
    return variable.constraint is None and all(type(part) in ELEMENTWISE for part in used)


def _whole(pieces: list[Any], variable: ServerVariable) -> Any:
    if len(pieces) == 1:
        return pieces[0]
    if isinstance(pieces[0], tf.IndexedSlices):
        indices = [piece.indices + first for piece, first in zip(pieces, variable.homes.bounds)]
        values = tf.concat([piece.values for piece in pieces], 0)
        return tf.IndexedSlices(values, tf.concat(indices, 0), tf.constant(variable.shape.as_list(), tf.int64))
    return tf.concat(pieces, 0)


def _facts(optimizer: Any, clips: list, groups: list[Group], asks_finite: bool) -> tuple[dict, Any]:
    """Per optimizer that clips, the sum of squares of each variable's gradient; and whether all gradients are finite."""
    squares: dict[int, dict[int, list]] = {id(part): {} for part in clips}
    finite = []
    for group in groups:
        with tf.device(group.device), group.view:
            for variable, gradient in zip(group.variables, group.gradients):
                if gradient is None:
                    continue
                if asks_finite:
                    finite.append(tf.reduce_all(tf.math.is_finite(_values(gradient))))
                for part in clips:
                    if any(variable is known for known in steps.weights_of(part)):
                        value = steps.clipped_value(part, optimizer, gradient, variable)
                        square = tf.cast(tf.reduce_sum(tf.square(value)), tf.float64)
                        squares[id(part)].setdefault(id(variable), []).append(square)
    added = {part: {v: tf.add_n(found) for v, found in of.items()} for part, of in squares.items()}
    return added, tf.reduce_all(tf.stack(finite)) if finite else None


def _clipped(part: Any, gradients: list, own: list[tf.Tensor], every: list[tf.Tensor]) -> list:
    """Gradients clipped by the norm of each or of all, whose squares are known."""

    if part.clipnorm:
        limit = tf.constant(part.clipnorm, tf.float64)
        return [scaled(g, limit / tf.maximum(tf.sqrt(square), limit)) for g, square in zip(gradients, own, strict=True)]
    norm, limit = tf.sqrt(tf.add_n(every)), tf.constant(part.global_clipnorm, tf.float64)
    scale = limit * tf.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)  # not a number where the norm is not finite
    return [scaled(tf.convert_to_tensor(gradient), scale) for gradient in gradients]  # dense, as in Keras


def _values(gradient: Any) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _spread_copies(groups: list[Group]) -> None:
    """Copies what an optimizer keeps on every server, such as its iterations, to the servers that did not change it."""
    for native in {key: variable for group in groups for key, variable in group.view.changed.items()}.values():
        copies = dict(zip(native.homes.devices, native.parts))
        fresh = [group.device for group in groups if id(native) in group.view.changed]
        with tf.device(fresh[0]):
            value = copies[fresh[0]].read_value()
        for device, copy in copies.items():
            if device not in fresh:
                with tf.device(device):
                    copy.assign(value, read_value=False)


def _change(variable: ServerVariable, adds: bool, pieces: Sequence[list[tf.Tensor]]) -> None:
    """Does what steps would have done to a variable that no optimizer updates."""
    for part, (device, resource) in enumerate(zip(variable.homes.devices, variable.parts)):
        with tf.device(device):
            own = [of[min(part, len(of) - 1)] for of in pieces]
            if not adds:
                resource.assign(own[-1], read_value=False)
                continue
            total = own[0] if len(own) == 1 else tf.add_n(own)
            if len(own) > 1 and not variable.dtype.is_floating:
                total = total // tf.constant(len(own), total.dtype)  # each part of one step counts it: the mean
            resource.assign(resource.read_value() + total, read_value=False)
