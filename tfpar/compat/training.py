"""What Keras' train and test steps do besides the forward pass, for a step in several functions."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.backend.common.name_scope import name_scope
from keras.src.layers.layer import CallContext
from keras.src.losses import loss as keras_loss
from keras.src.trainers.compile_utils import CompileLoss
from keras.src.trainers.trainer import Trainer

from tfpar.compat import TensorFlowTrainer

_stage = threading.local()


def compute_loss(model: keras.Model, x: Any, y: Any, y_pred: Any, sample_weight: Any, training: bool) -> tf.Tensor:
    """The loss of a step, by the model's `compute_loss`, which the user may have overridden."""
    return model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)


def track_loss(model: keras.Model, loss: tf.Tensor, examples: tf.Tensor) -> None:
    """Updates the metric "loss" of a model."""
    model._loss_tracker.update_state(loss, sample_weight=examples)


def overrides(model: keras.Model, name: str) -> bool:
    """Whether the user has overridden a method of Keras' trainer, such as "train_step"."""
    own = getattr(type(model), name)
    return own is not getattr(TensorFlowTrainer, name, None) and own is not getattr(Trainer, name, None)


@contextlib.contextmanager
def losses_of(layers: Sequence[keras.layers.Layer], variables: Sequence[keras.Variable]) -> Iterator[None]:
    """While entered, on this thread, `model.losses` are those of some layers and the regularizers of some variables.

    A pipeline stage holds no others.
    """
    outer = getattr(_stage, "holds", None)
    _stage.holds = layers, variables
    for layer in layers:
        layer._clear_losses()  # those of a call before, as the call of a model does
    try:
        yield
    finally:
        _stage.holds = outer


@contextlib.contextmanager
def calling(model: keras.Model, training: bool) -> Iterator[None]:
    """While entered, on this thread, layers are called as by a call of `model`.

    A layer that is called by itself forgets the losses of its calls before.
    """
    outer, context = global_state.get_global_attribute("current_call_ctx"), CallContext(model)
    context.set_value("training", training)
    global_state.set_global_attribute("current_call_ctx", context)
    try:
        yield
    finally:
        global_state.set_global_attribute("current_call_ctx", outer)


def cut_losses() -> None:
    """Lets `losses_of` work."""
    whole = keras.layers.Layer.losses

    def losses(self):
        if getattr(_stage, "holds", None) is None:
            return whole.fget(self)
        layers, variables = _stage.holds
        own = [loss for layer in layers for loss in layer._get_own_losses()]
        return own + [v.regularizer(v) for v in variables if v.trainable and v.regularizer is not None]

    keras.layers.Layer.losses = property(functools.wraps(whole.fget)(losses))


Reduced = Callable[[tf.Tensor, str, tf.Tensor | None], tf.Tensor]


@contextlib.contextmanager
def reductions(change: Reduced, share: Any = None) -> Iterator[None]:
    """While entered, on this thread, each loss that Keras reduces to a number passes through `change`.

    Args:
        change: takes the number, the reduction, and what it was divided by if that depends on masks or weights of the
            examples (None: it was divided by the number of values, or not at all); returns the number to use.
        share: the part of a step that the losses are for; None for all of it.
    """
    outer = reduced_share(), getattr(_stage, "change", None)
    _stage.share, _stage.change = share, change
    try:
        yield
    finally:
        _stage.share, _stage.change = outer


def reduced_share() -> Any:
    """The `share` of the `reductions` that are entered on this thread."""
    return getattr(_stage, "share", None)


def follow_reductions() -> None:
    """Lets `reductions` work."""
    original = keras_loss.reduce_weighted_values

    @functools.wraps(original)
    def reduce_weighted_values(values, sample_weight=None, mask=None, reduction="sum_over_batch_size", dtype=None):
        loss = original(values, sample_weight, mask, reduction, dtype)
        change = getattr(_stage, "change", None)
        if change is None or len(tf.convert_to_tensor(values).shape) == 0 or reduction in (None, "none"):
            return loss
        divisor = None
        if reduction == "mean_with_sample_weight" and (sample_weight is not None or mask is not None):
            divisor = tf.reduce_sum(keras_loss.apply_mask(sample_weight, mask, loss.dtype, reduction))
        elif reduction != "sum" and mask is not None:
            divisor = tf.reduce_sum(tf.cast(mask, loss.dtype))
        return change(loss, reduction, divisor)

    keras_loss.reduce_weighted_values = reduce_weighted_values


def track_losses_by_step(in_step: Callable[[], bool], share: Callable[[], Any]) -> None:
    """Lets the losses of a model's outputs be the means over steps, as Keras logs them on one device.

    Keras weights each by the size of its batch, but only where a trace knows it: not on one device, where batches of
    different sizes have one trace, but in a step on a mesh.

    Args:
        in_step: whether a step is being traced.
        share: the part of a step that the trace is for; None for all of it.
    """
    build = CompileLoss.build

    @functools.wraps(build)
    def build_and_wrap(self, *args, **kwargs):
        build(self, *args, **kwargs)
        for metric in filter(None, self.metrics):
            metric.update_state = by_step(metric.update_state)

    def by_step(update: Callable) -> Callable:
        @functools.wraps(update)
        def update_state(values, sample_weight=None):
            return update(values, sample_weight=share() if in_step() else sample_weight)

        return update_state

    CompileLoss.build = build_and_wrap

    update_mean = keras.metrics.Mean.update_state

    @functools.wraps(update_mean)
    def update_by_share(self, values, sample_weight=None):
        """One number for a part of a step counts as that part; Keras counts it as a batch."""
        is_number = share() is not None and sample_weight is None and len(tf.convert_to_tensor(values).shape) == 0
        return update_mean(self, values, sample_weight=share() if is_number else sample_weight)

    keras.metrics.Mean.update_state = update_by_share


def inner_optimizers(optimizer: keras.optimizers.Optimizer) -> list[keras.optimizers.Optimizer]:
    """An optimizer and those that it wraps."""
    inner = getattr(optimizer, "inner_optimizer", None)
    wrapped = [inner] if inner is not None else list(getattr(optimizer, "optimizers", []))
    return [optimizer, *(deeper for part in wrapped for deeper in inner_optimizers(part))]


def weights_of(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """The model's variables that an optimizer was built for."""
    return optimizer._trainable_variables


def own_state(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """An optimizer's own variables, not those of one that it wraps."""
    return optimizer._variables


def accumulated(optimizer: keras.optimizers.Optimizer, variable: keras.Variable) -> keras.Variable:
    """What an optimizer with `gradient_accumulation_steps` has added up for a variable."""
    return optimizer._accumulated_gradients[optimizer._get_variable_index(variable)]


def clipped_value(
    part: keras.optimizers.Optimizer, whole: keras.optimizers.Optimizer, gradient: Any, variable: keras.Variable
) -> tf.Tensor:
    """The numbers whose norm an optimizer clips by: a gradient without its scale, or the mean of those added up.

    Args:
        part: the optimizer that clips.
        whole: the model's, which may wrap it with a loss scale.
        gradient: dense or `IndexedSlices`.
        variable: what it is the gradient of.
    """
    steps, factor, scale = part.gradient_accumulation_steps, part.loss_scale_factor, getattr(whole, "dynamic_scale", None)
    stays_sparse = isinstance(gradient, tf.IndexedSlices) and not steps and factor is None
    value = gradient.values if stays_sparse else tf.convert_to_tensor(gradient)  # Keras' own sums make it dense
    for divisor in (scale, factor):
        value = value if divisor is None else value / tf.cast(divisor, value.dtype)
    return (value + accumulated(part, variable)) / steps if steps else value


def build_optimizer(model: keras.Model) -> None:
    """Makes the slots of a compiled model's optimizer, if they are not made yet."""
    optimizer = model.optimizer
    if not optimizer.built:
        with model.distribute_strategy.scope(), name_scope(optimizer.name, caller=optimizer):
            optimizer.build(model.trainable_variables)


@contextlib.contextmanager
def narrowed(
    optimizer: keras.optimizers.Optimizer,
    variables: Sequence[keras.Variable],
    clip: Callable[[keras.optimizers.Optimizer, list], list],
    is_finite: Callable[[list], tf.Tensor],
    clips_each: bool = False,
) -> Iterator[None]:
    """While entered, an optimizer knows of some of its variables only; the lists by index keep their places.

    Args:
        optimizer: a built optimizer.
        variables: what it shall know of.
        clip: takes the place of clipping by the norm of all gradients; called with the optimizer and the gradients.
        is_finite: takes the place of the check of gradients under a loss scale.
        clips_each: whether `clip` also takes the place of clipping by the norm of each gradient.
    """
    with contextlib.ExitStack() as undo:
        for part in inner_optimizers(optimizer):
            keys = {part._var_key(v) for v in variables}
            known = [part._var_key(v) in keys for v in part._trainable_variables]
            changes = {
                "_trainable_variables": [v for v, k in zip(part._trainable_variables, known) if k],
                "_trainable_variables_indices": {k: i for k, i in part._trainable_variables_indices.items() if k in keys},
            }
            if getattr(part, "use_ema", False):
                averages = zip(part._model_variables_moving_average, known)
                changes["_model_variables_moving_average"] = [a for a, k in averages if k]
            if getattr(part, "gradient_accumulation_steps", None):
                sums = zip(part._accumulated_gradients, known)
                changes["_accumulated_gradients"] = [g if k else None for g, k in sums]
            if getattr(part, "global_clipnorm", None) or (clips_each and getattr(part, "clipnorm", None)):
                changes["_clip_gradients"] = functools.partial(clip, part)
            if hasattr(part, "check_finite"):
                changes["check_finite"] = is_finite
            undo.enter_context(attributes(part, changes))
        yield


@contextlib.contextmanager
def attributes(owner: Any, changes: dict[str, Any]) -> Iterator[None]:
    """Sets attributes past Keras' tracking of them, and sets them back."""
    attributes, missing = vars(owner), object()
    before = {name: attributes.get(name, missing) for name in changes}
    attributes.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is missing:
                del attributes[name]
            else:
                attributes[name] = value
