"""The optimizer's step: each device of a schedule updates its weights and its copies of the optimizer's scalars.

What depends on all gradients is computed in two parts: each device gives its sums of squares and whether its gradients are
finite, and takes the whole norm and the answer for all. So clipping by the global norm and a loss scale work over all
stages as on one device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfpar import compat, transfer
from tfpar.compat import training as steps
from tfpar.mesh import Mesh
from tfpar.pipeline import crossing
from tfpar.pipeline.stage import Stage, traced


@dataclasses.dataclass(frozen=True)
class Holder:
    """A device of a schedule and the weights of its stages.

    Attributes:
        model: the model.
        mesh: where.
        weights: what it trains.
        has_gradient: for each weight, whether the loss depends on it.
        first: the ids of those of its weights that no earlier device holds, so that a shared one counts once.
    """

    model: keras.Model
    mesh: Mesh
    weights: tuple[keras.Variable, ...]
    has_gradient: tuple[bool, ...]
    first: frozenset[int]

    @property
    def trained(self) -> list[keras.Variable]:
        """The weights with a gradient."""
        return [variable for variable, has in zip(self.weights, self.has_gradient) if has]


@dataclasses.dataclass(frozen=True)
class Update:
    """A device's part of an optimizer's step.

    Attributes:
        facts: takes the gradients, returns one sum of squares per optimizer that clips by the global norm, then whether
            all gradients are finite; None where the optimizer asks for neither.
        apply: takes the gradients, then (where there are facts) the norms and the answer for all devices.
    """

    facts: Callable | None
    apply: Callable


def holders(stages: Sequence[Stage], has_gradient: Mapping[int, bool]) -> list[Holder]:
    """The devices of a schedule, in the order of their first stages.

    Args:
        stages: the stages of a model.
        has_gradient: for the id of each weight, whether the loss depends on it.
    """
    found, seen = [], set()
    for mesh in dict.fromkeys(stage.mesh for stage in stages):
        own = {id(variable) for stage in stages if stage.mesh == mesh for variable in stage.weights}
        weights = tuple(variable for variable in stages[0].model.trainable_variables if id(variable) in own)
        has = tuple(has_gradient[id(variable)] for variable in weights)
        found.append(Holder(stages[0].model, mesh, weights, has, frozenset(own - seen)))
        seen |= own
    return found


def gradients(holder: Holder, sums: Sequence[Mapping[int, tf.Tensor]]) -> list[tf.Tensor]:
    """A device's gradients; that of a weight which several stages use is the sum of theirs.

    Args:
        holder: the device.
        sums: per stage, the gradients by the ids of the weights.
    """
    values = []
    for variable in holder.trained:
        parts = [found[id(variable)] for found in sums if id(variable) in found]
        moved = [crossing.move(part, holder.mesh.dtensor_mesh) for part in parts]
        values.append(moved[0] if len(moved) == 1 else tf.add_n(moved))
    return values


def update(holder: Holder) -> Update:
    """Traces a device's part of the optimizer's step."""
    optimizer = holder.model.optimizer
    parts = [part for part in steps.inner_optimizers(optimizer) if getattr(part, "global_clipnorm", None)]
    asks = bool(parts) or hasattr(optimizer, "check_finite")
    specs = [tf.TensorSpec(variable.shape, variable.dtype) for variable in holder.trained]

    def facts(*values: tf.Tensor) -> list[tf.Tensor]:
        pairs = [(value, v) for value, v in zip(values, holder.trained) if id(v) in holder.first]
        finite = [tf.reduce_all(tf.math.is_finite(value)) for value, _ in pairs]
        return [*(_squares(part, pairs, optimizer) for part in parts), tf.reduce_all(tf.stack([True, *finite]))]

    def apply(*arguments: tf.Tensor) -> None:
        values, known = iter(arguments[: len(specs)]), arguments[len(specs) :]

        def clip(part: keras.optimizers.Optimizer, clipped: list) -> list:
            norm = known[parts.index(part)]
            scale = part.global_clipnorm * tf.minimum(1.0 / norm, 1.0 / tf.constant(part.global_clipnorm, tf.float64))
            scale += norm - norm  # not a number where the norm is not finite, as in Keras
            return [None if value is None else value * tf.cast(scale, value.dtype) for value in clipped]

        with steps.narrowed(optimizer, holder.weights, clip, lambda _: known[-1]):
            optimizer.apply([next(values) if has else None for has in holder.has_gradient], list(holder.weights))

    known = [*(tf.TensorSpec((), tf.float64) for _ in parts), tf.TensorSpec((), tf.bool)] if asks else []
    return Update(
        traced(holder.model, holder.mesh, facts, *specs) if asks else None,
        traced(holder.model, holder.mesh, apply, *specs, *known),
    )


def joined(found: Sequence[Sequence[tf.Tensor]]) -> list[np.ndarray]:
    """The facts for all devices from those of each: norms from sums of squares, and whether all are finite."""
    *squares, finite = zip(*([transfer.to_host(fact).numpy() for fact in facts] for facts in found))
    return [*(np.sqrt(np.sum(part, dtype="float64")) for part in squares), np.asarray(all(finite))]


def _squares(part: keras.optimizers.Optimizer, pairs: list, whole: keras.optimizers.Optimizer) -> tf.Tensor:
    """The sum of squares of what an optimizer would clip: gradients without their scale, or the mean of those added up."""
    known = {id(variable) for variable in steps.weights_of(part)}
    total = tf.zeros((), tf.float64)
    for gradient, variable in pairs:
        if id(variable) in known:
            total += tf.cast(tf.reduce_sum(tf.square(steps.clipped_value(part, whole, gradient, variable))), tf.float64)
    return total


def place_state(model: keras.Model, meshes: Sequence[Mesh], stages: Sequence[Stage]) -> None:
    """Gives the optimizer's scalars a copy on every device that uses them, and the metrics a place with the last stage.

    Args:
        model: a model whose own variables have their places.
        meshes: of the schedule's devices.
        stages: the model's stages.
    """
    last = stages[-1].mesh
    for variable in model.metrics_variables:
        compat.native(variable).place(last.layout([None] * len(variable.shape)))
    if model.optimizer is None:
        return
    steps.build_optimizer(model)
    followers = {id(slot) for variable in model.trainable_variables for slot in compat.native(variable).followers}
    for part in steps.inner_optimizers(model.optimizer):
        known = {id(variable) for variable in steps.weights_of(part)}
        scales = hasattr(part, "check_finite")
        users = [mesh for mesh in meshes if scales or _holds(stages, mesh, known)]
        for variable in steps.own_state(part):
            if id(compat.native(variable)) not in followers:
                layouts = [mesh.layout([None] * len(variable.shape)) for mesh in users or meshes[:1]]
                compat.native(variable).place(*layouts)


def _holds(stages: Sequence[Stage], mesh: Mesh, known: set[int]) -> bool:
    return any(stage.mesh == mesh and any(id(v) in known for v in stage.weights) for stage in stages)
