"""What cannot be computed from parts is refused: losses that are no means over examples, metrics that are no sums.

Both are tried on random outputs, before the first update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfpar.pipeline import loss_parts


def check(model: keras.Model, outputs: Any, batches: Sequence[Any]) -> None:
    """Tries the loss and the metrics of a model.

    Args:
        model: a compiled model.
        outputs: shapes and dtypes of what `compute_loss` was given as `y_pred`.
        batches: the parts of a batch, on the coordinator.

    Raises:
        ValueError: the loss of the batch is not computed from those of the parts, or a metric is no sum over steps.
    """
    parts = [keras.utils.unpack_x_y_sample_weight(batch) for batch in batches]
    sizes = [int(tf.nest.flatten(part)[0].shape[0]) for part in parts]
    x, y, weight = tf.nest.map_structure(lambda *leaves: leaves[0] if leaves[0] is None else tf.concat(leaves, 0), *parts)

    def of_batch(spec: tf.TensorSpec) -> tf.TensorSpec:
        return tf.TensorSpec([sum(sizes), *spec.shape[1:]], spec.dtype) if spec.shape.rank else spec

    whole = tf.nest.map_structure(of_batch, outputs)
    if len(parts) > 1:
        loss_parts.check_parts(model, whole, (x, y, weight), sizes)
    check_metrics(model, whole, (x, y, weight))


def check_metrics(model: keras.Model, outputs: Any, batch: Any) -> None:
    """Tries whether what a step adds to metrics of the user's own depends on the steps before.

    Args:
        model: a compiled model.
        outputs: shapes and dtypes of its outputs for the batch.
        batch: `(x, y, sample_weight)`.

    Raises:
        ValueError: it does, as for a metric that keeps the largest value.
    """
    metrics = [inner for metric in model.metrics for inner in getattr(metric, "metrics", [metric])]
    if all(type(metric).__module__.startswith("keras.") for metric in metrics):
        return
    (x, y, weight), variables = batch, model.metrics_variables
    rng = np.random.default_rng(0)

    def added(start: Sequence[tf.Tensor]) -> list[np.ndarray]:
        predicted = tf.nest.map_structure(lambda spec: tf.cast(rng.uniform(0.1, 0.9, spec.shape), spec.dtype), outputs)
        with keras.StatelessScope(state_mapping=list(zip(variables, start))) as scope:
            model.compute_metrics(x, y, predicted, weight)
        ends = [scope.get_current_value(variable) for variable in variables]
        return [np.asarray(start if end is None else end) - np.asarray(start) for start, end in zip(start, ends)]

    nothing = [tf.zeros(variable.shape, variable.dtype) for variable in variables]
    state, rng = added(nothing), np.random.default_rng(1)
    first, rng = added(nothing), np.random.default_rng(1)
    second = added([tf.constant(value, v.dtype) for value, v in zip(state, variables)])
    for variable, a, b in zip(variables, first, second):
        if not np.allclose(a, b, rtol=1e-2, atol=1e-4, equal_nan=True):
            raise ValueError(
                f"The metric variable {variable.path!r} is no sum over steps: what a step adds to it depends on the steps "
                "before. Workers cannot compute it apart. Use a metric that adds up, or compute it from predict()."
            )
