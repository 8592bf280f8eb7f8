"""One stage of a model: its layers on its mesh, and the functions that run them on a micro-batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfpar import compat, variables
from tfpar.compat import training as steps
from tfpar.mesh import Mesh
from tfpar.pipeline import crossing, phases
from tfpar.pipeline.layer_graph import LayerGraph
from tfpar.pipeline.loss_parts import Parts
from tfpar.pipeline.partition import StagePart
from tfpar.replica_context import GlobalViewContext


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stage on its mesh.

    Attributes:
        model: the whole model.
        graph: its calls.
        part: those of this stage.
        mesh: where it runs.
        is_last: whether it computes the loss.
        first: those of its variables that no earlier stage holds, so that a shared one counts once.
    """

    model: keras.Model
    graph: LayerGraph
    part: StagePart
    mesh: Mesh
    is_last: bool
    first: tuple[keras.Variable, ...]

    @property
    def weights(self) -> list[keras.Variable]:
        """What it trains, in the order of the model."""
        own = {id(variable) for variable in self.part.variables}
        return [variable for variable in self.model.trainable_variables if id(variable) in own]

    @property
    def name(self) -> str:
        """For messages."""
        names = [call.path for call in self.part.calls]
        layers = repr(names[0]) if len(names) == 1 else f"{names[0]!r} to {names[-1]!r}"
        return f"stage {self.part.index} (the layers {layers}) on {', '.join(self.mesh.devices.ravel())}"


def traced(model: keras.Model, mesh: Mesh, function: Callable, *specs: tf.TensorSpec) -> Any:
    """The concrete function of something that is done on a stage's mesh, the model's variables seen as shards."""
    strategy = model.distribute_strategy

    @tf.autograph.experimental.do_not_convert
    def run(*args: tf.Tensor) -> Any:
        with strategy.scope(), GlobalViewContext(strategy), variables.StepView(strategy, mesh):
            return function(*args)

    return tf.function(run, autograph=False).get_concrete_function(*specs)


@dataclasses.dataclass(frozen=True)
class Feed:
    """What a stage takes of a micro-batch from the host.

    Attributes:
        inputs: the model's inputs that it uses, by their numbers.
        batch: for the last stage `(x, y, sample_weight)`, x only where the user's own methods take it; else None.
    """

    inputs: Mapping[int, Any]
    batch: Any

    @property
    def flat(self) -> list[Any]:
        """Its tensors."""
        return [leaf for leaf in tf.nest.flatten((list(self.inputs.values()), self.batch)) if leaf is not None]

    def map(self, change: Callable[[Any], Any]) -> Feed:
        """The same with each tensor changed."""

        def change_all(values: Any) -> Any:
            return tf.nest.map_structure(lambda leaf: None if leaf is None else change(leaf), values)

        return Feed({number: change_all(value) for number, value in self.inputs.items()}, change_all(self.batch))


@dataclasses.dataclass(frozen=True)
class StageProgram:
    """A stage's functions for micro-batches of one shape.

    Attributes:
        phases: by kind of action.
        sent: the shapes and dtypes that go to the next stage, or of the last one the model's outputs.
        form: how to find values in them.
        logs: the structure of the last stage's metrics, which its forward gives last.
        totals: how many numbers its forward takes that are known of a whole batch only, see `loss_parts.py`.
        trained: for each weight, whether the loss depends on it.
        received_floats: how many of the tensors that it receives have a gradient.
        outputs: of the last stage, the shapes and dtypes of the model's outputs for a micro-batch; None elsewhere.
        zeros: makes the sums of gradients that a step starts with; takes any tensor on the mesh.
    """

    phases: Mapping[str, phases.Phase]
    sent: tuple[tf.TensorSpec, ...]
    form: crossing.Form
    logs: Any
    totals: int
    trained: tuple[bool, ...] = ()
    received_floats: int = 0
    outputs: Any = None
    zeros: Callable[[tf.Tensor], list[tf.Tensor]] | None = None


@dataclasses.dataclass(frozen=True)
class Received:
    """What comes from the stage before.

    Attributes:
        specs: shapes and dtypes.
        form: how to find values in that.
    """

    specs: tuple[tf.TensorSpec, ...] = ()
    form: crossing.Form = crossing.Form({}, ())


def training_program(stage: Stage, feed: Feed, received: Received, splits_backward: bool, recompute: bool) -> StageProgram:
    """Traces a stage's forward and backward.

    Args:
        stage: the stage.
        feed: shapes and dtypes of what comes from the host.
        received: those of what comes from the stage before.
        splits_backward: whether the backward is taken apart.
        recompute: whether it repeats the forward.

    Returns:
        The functions. A forward takes what is received, the inputs, the batch, the share of the micro-batch in the loss
        and the totals; it gives what is sent, its share of the loss and the metrics. A backward takes the gradients of
        what is sent, where that is differentiable, and the sums of gradients so far; it gives the gradients of what is
        received, and the sums.
    """
    native = [compat.native(variable) for variable in stage.weights]
    found: dict[str, Any] = {}

    def joint() -> None:
        arguments, share = _arguments(feed, received), _placeholder(SHARE)
        with tf.GradientTape() as tape, Parts(share) as parts:
            sources = [tensor for tensor in arguments.received if tensor.dtype.is_floating]
            tape.watch(sources)
            sent, form, loss, logs, outputs = forward(stage, arguments, received.form, "train")
            part = loss * tf.cast(share, loss.dtype)
            targets = [tensor for tensor in sent if tensor.dtype.is_floating]
            scaled = stage.model.optimizer.scale_loss(part)
        upstream = [_placeholder(tensor) for tensor in targets]
        gradients = tape.gradient(
            [scaled, *targets], [*sources, *native], output_gradients=[tf.ones_like(scaled), *upstream]
        )
        of_inputs, of_weights = gradients[: len(sources)], gradients[len(sources) :]
        accumulators = [_placeholder(v) for v, g in zip(native, of_weights) if g is not None]
        summed = [(v, g) for v, g in zip(native, of_weights) if g is not None]
        found["traced"] = phases.Traced(
            graph=tf.compat.v1.get_default_graph(),
            inputs=[*arguments.flat, share, *parts.totals],
            upstream=upstream,
            accumulators=accumulators,
            results=[*sent, tf.identity(part), *keras.tree.flatten(logs)],
            input_gradients=[tf.zeros_like(s) if g is None else tf.identity(g) for g, s in zip(of_inputs, sources)],
            weight_gradients=[_laid_out(total + g, v) for total, (v, g) in zip(accumulators, summed)],
        )
        found["program"] = sent, form, tuple(g is not None for g in of_weights), logs, len(parts.totals), outputs

    traced(stage.model, stage.mesh, joint)
    sent, form, trained, logs, totals, outputs = found["program"]
    parts = phases.phases(found["traced"], splits_backward, recompute)
    summed = [variable for variable, has in zip(native, trained) if has]
    zeros = traced(stage.model, stage.mesh, lambda _: [_laid_out(tf.zeros(v.shape, v.dtype), v) for v in summed], SHARE)
    floats = sum(spec.dtype.is_floating for spec in received.specs)
    return StageProgram(parts, _specs(sent), form, logs, totals, trained, floats, outputs, zeros)


def forward_program(stage: Stage, feed: Feed, received: Received, mode: str) -> StageProgram:
    """Traces a stage's forward alone.

    Args:
        stage: the stage.
        feed: shapes and dtypes of what comes from the host.
        received: those of what comes from the stage before.
        mode: "test" or "predict".

    Returns:
        The one function, as of `training_program`.
    """
    found: dict[str, Any] = {}

    def alone() -> None:
        arguments, share = _arguments(feed, received), _placeholder(SHARE)
        with Parts(share) as parts:
            sent, form, loss, logs, _ = forward(stage, arguments, received.form, mode)
        part = tf.identity(loss * tf.cast(share, loss.dtype))
        found["traced"] = phases.Traced(
            graph=tf.compat.v1.get_default_graph(),
            inputs=[*arguments.flat, share, *parts.totals],
            results=[*sent, part, *keras.tree.flatten(logs)],
        )
        found["program"] = sent, form, logs, len(parts.totals)

    traced(stage.model, stage.mesh, alone)
    sent, form, logs, totals = found["program"]
    return StageProgram(phases.forward_only(found["traced"]), _specs(sent), form, logs, totals)


SHARE = tf.TensorSpec((), tf.float64)


@dataclasses.dataclass(frozen=True)
class _Arguments:
    received: list[tf.Tensor]
    feed: Feed

    @property
    def flat(self) -> list[tf.Tensor]:
        return [*self.received, *self.feed.flat]


def _arguments(feed: Feed, received: Received) -> _Arguments:
    return _Arguments(list(map(_placeholder, received.specs)), feed.map(_placeholder))


def forward(
    stage: Stage, arguments: _Arguments, form: crossing.Form, mode: str
) -> tuple[list[tf.Tensor], crossing.Form, tf.Tensor, Any, Any]:
    """Runs a stage's layers, in a graph.

    Args:
        stage: the stage.
        arguments: what comes from the host and from the stage before.
        form: how to find values in the latter.
        mode: "train", "test" or "predict".

    Returns:
        What goes to the next stage (of the last one, when predicting, the model's outputs) and how to find values in
        that, the stage's own part of the loss, the metrics, and the shapes and dtypes of the model's outputs.
    """
    values = form.unpack(arguments.received) | arguments.feed.inputs
    layers = [layer for call in stage.part.calls for layer in call.layers]
    loss, logs, outputs = None, {}, None
    with steps.losses_of(layers, stage.first):
        for call in stage.part.calls:
            values |= zip(call.outputs, call.run(values, mode == "train"))
        if stage.is_last and mode != "predict":
            x, y, weight = arguments.feed.batch
            y_pred = stage.graph.pack([values[number] for number in stage.part.sends])
            outputs = tf.nest.map_structure(lambda leaf: tf.TensorSpec(leaf.shape, leaf.dtype), y_pred)
            loss = steps.compute_loss(stage.model, x, y, y_pred, weight, mode == "train")
            logs = stage.model.compute_metrics(x, y, y_pred, sample_weight=weight)
            logs = tf.nest.map_structure(tf.convert_to_tensor, logs)
        elif mode != "predict":
            losses = [keras.ops.sum(keras.ops.cast(each, keras.config.floatx())) for each in stage.model.losses]
            loss = keras.ops.sum(losses) if losses else None
    sent, sent_form = crossing.pack(values, () if stage.is_last and mode != "predict" else stage.part.sends)
    return sent, sent_form, tf.zeros((), keras.config.floatx()) if loss is None else loss, logs, outputs


def _laid_out(value: tf.Tensor, variable: Any) -> tf.Tensor:
    """A gradient as its variable: no device holds more of it, and a function sees the same layout in each micro-batch."""
    return dtensor.relayout(tf.cast(value, variable.dtype), variable.layout)


def _placeholder(spec: Any) -> tf.Tensor:
    return tf.compat.v1.placeholder(spec.dtype, spec.shape)


def _specs(tensors: Sequence[tf.Tensor]) -> tuple[tf.TensorSpec, ...]:
    return tuple(tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors)
