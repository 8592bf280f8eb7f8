"""The loss of a batch from the losses of its micro-batches.

A mean over examples is the mean of the micro-batches' means, each weighted by its share of the examples. A mean over what
a mask leaves, or by the weights of examples, is not: a micro-batch of short sequences counts less. It needs what the whole
batch is divided by, before the first backward. That comes from masks, which come from the inputs, so it is computed on
the host from a graph of the whole model in which all else is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfpar import input as input_lib
from tfpar.compat import functions, training as steps
from tfpar.pipeline.layer_graph import LayerGraph


class Parts:
    """While entered, losses of a micro-batch are such that their sum, by share of examples, is the loss of the batch.

    Args:
        share: the micro-batch's share of the examples.

    Attributes:
        totals: placeholders for what each loss that depends on masks or weights is divided by on the whole batch.
    """

    def __init__(self, share: tf.Tensor):
        self._share, self.totals = share, []
        self._scope = steps.reductions(self._change, share)

    def __enter__(self) -> Parts:
        self._scope.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._scope.__exit__(*error)

    def _change(self, loss: tf.Tensor, reduction: str, divisor: tf.Tensor | None) -> tf.Tensor:
        def total() -> tf.Tensor:
            self.totals.append(tf.compat.v1.placeholder(tf.float64, ()))
            return self.totals[-1]

        return corrected(loss, reduction, divisor, tf.cast(self._share, loss.dtype), total)


def check_parts(model: keras.Model, outputs: Any, batch: Any, sizes: Sequence[int]) -> None:
    """Tries, on random outputs, whether the loss of a batch is the sum of its parts.

    It is not where a loss compares examples with each other, as contrastive losses do, or where a loss of the user's is
    no mean over examples. Trained on micro-batches such a model would learn something else, without an error.

    Args:
        model: a compiled model.
        outputs: shapes and dtypes of the model's outputs for the batch, in their structure.
        batch: `(x, y, sample_weight)` on the host, as `compute_loss` takes them.
        sizes: the number of examples of each micro-batch.

    Raises:
        ValueError: it is not.
    """
    rng, count = np.random.default_rng(0), sum(sizes)
    predicted = tf.nest.map_structure(lambda spec: tf.cast(rng.uniform(0.1, 0.9, spec.shape), spec.dtype), outputs)
    totals: list[tf.Tensor] = []

    def record(loss: tf.Tensor, reduction: str, divisor: tf.Tensor | None) -> tf.Tensor:
        totals.extend([] if divisor is None else [divisor])
        return loss

    def loss_of(rows: slice, change: steps.Reduced) -> float:
        x, y, weight, y_pred = input_lib.rows((*batch, predicted), rows)
        with keras.StatelessScope(), steps.losses_of((), ()), steps.reductions(change):
            return float(steps.compute_loss(model, x, y, y_pred, weight, True))

    whole, parts, start = loss_of(slice(0, count), record), 0.0, 0
    for size in sizes:
        share, left = size / count, list(totals)

        def change(loss: tf.Tensor, reduction: str, divisor: tf.Tensor | None, share=share, left=left) -> tf.Tensor:
            return corrected(loss, reduction, divisor, tf.constant(share, loss.dtype), lambda: left.pop(0))

        parts += share * loss_of(slice(start, start + size), change)
        start += size
    if np.isfinite(whole) and not np.isclose(parts, whole, rtol=1e-2, atol=1e-3 * abs(whole)):
        raise ValueError(
            f"The loss of the model {model.name!r} is no mean over examples, so that it cannot be computed from "
            f"micro-batches: on random outputs that of a batch is {whole:.4g}, that of its {len(sizes)} parts {parts:.4g}. "
            "Use microbatches=1, or a loss that does not compare examples with each other."
        )


def corrected(
    loss: tf.Tensor, reduction: str, divisor: tf.Tensor | None, share: tf.Tensor, total: Callable[[], tf.Tensor]
) -> tf.Tensor:
    """A micro-batch's loss such that the sum over micro-batches, by share, is that of the batch.

    Args:
        loss: what Keras reduced to a number.
        reduction: how.
        divisor: what it was divided by, if that depends on masks or weights.
        share: the micro-batch's share of the examples.
        total: gives the divisor of the whole batch.
    """
    if reduction == "sum":
        return loss / share
    if divisor is None:
        return loss
    return tf.math.divide_no_nan(loss * divisor, share * tf.cast(total(), loss.dtype))


def divisors(model: keras.Model, graph: LayerGraph, inputs: Any, batch: Any) -> Callable[[Sequence[tf.Tensor]], list]:
    """A function on the host that computes what `Parts.totals` stands for.

    Args:
        model: a compiled model.
        graph: its calls.
        inputs: its inputs, by their numbers, with shapes and dtypes.
        batch: `(x, y, sample_weight)` as `compute_loss` takes them, with shapes and dtypes.

    Returns:
        Takes the tensors of inputs and batch in their flat order.

    Raises:
        ValueError: a mask depends on the weights.
    """
    found: list[tf.Tensor] = []
    feeds: list[tf.Tensor] = []
    weights: set[tf.Operation] = set()

    def place(leaf: Any) -> tf.Tensor | None:
        if leaf is None:
            return None
        feeds.append(tf.compat.v1.placeholder(leaf.dtype, leaf.shape))
        return feeds[-1]

    def record(loss: tf.Tensor, reduction: str, divisor: tf.Tensor | None) -> tf.Tensor:
        if divisor is not None:
            found.append(tf.cast(divisor, tf.float64))
        return loss

    @tf.autograph.experimental.do_not_convert
    def whole() -> None:
        values = {number: place(leaf) for number, leaf in inputs.items()}
        x, y, weight = tf.nest.map_structure(place, batch)
        mapping = [(v, tf.compat.v1.placeholder(v.dtype, v.shape)) for v in [*model.variables, *model.metrics_variables]]
        weights.update(value.op for _, value in mapping)
        with keras.StatelessScope(state_mapping=mapping), steps.reductions(record):
            for call in graph.calls:
                values |= zip(call.outputs, call.run(values, True))
            steps.compute_loss(model, x, y, graph.pack([values[number] for number in graph.outputs]), weight, True)

    traced = tf.function(whole, autograph=False).get_concrete_function().graph
    if functions.ancestors(tensor.op for tensor in found) & weights:
        raise ValueError(
            f"The loss of the model {model.name!r} is a mean over a mask that depends on its weights, so that it is not "
            "known before all micro-batches have passed. Use microbatches=1, or a mask that depends on the inputs alone."
        )
    return functions.prune(traced, feeds, found)
