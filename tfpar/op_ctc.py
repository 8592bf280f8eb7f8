"""The CTC loss in a step.

TensorFlow's own has a gradient that DTensor cannot place. This is the forward recursion over time of Graves et al., 2006
(section 4.1), in logarithms and unrolled, whose gradient needs nothing of its own.

    blank   b . b . b     log-probabilities of all paths that end at a blank before label 0, 1, …, L     (batch, L + 1)
    label   . l . l .     … that end at label 0, …, L - 1                                                (batch, L)
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from tfpar import op_gathers

_NEVER = -1e30


def ctc_loss(original: Callable) -> Callable:
    """`keras.ops.ctc_loss`, with the same arguments: labels (batch, L), logits (batch, time, classes), their lengths."""

    def loss(target, output, target_length, output_length, mask_index=0):
        target = op_gathers.gathered(tf.cast(target, tf.int32), "ctc_loss", lambda dim: dim > 0)
        output = op_gathers.gathered(output, "ctc_loss", lambda dim: dim > 0)
        dtype, length, steps = output.dtype, target.shape[1], output.shape[1]
        if length is None or steps is None:
            return original(target, output, target_length, output_length, mask_index)
        scores = tf.nn.log_softmax(tf.cast(output, tf.float32))
        at_labels = tf.gather(scores, target, axis=2, batch_dims=1)
        at_blank = scores[:, :, mask_index : mask_index + 1]
        repeats = tf.concat([tf.equal(target[:, 1:], target[:, :-1]), tf.zeros_like(target[:, :1], tf.bool)], 1)
        label = tf.zeros_like(at_labels[:, 0]) + _NEVER
        blank = tf.concat([tf.zeros_like(at_blank[:, 0]), label], 1)
        output_length = tf.cast(output_length, tf.int32)[:, None]
        for step in range(steps):
            before = _either(blank[:, 1:], tf.where(repeats, _NEVER, label))
            entered = tf.concat([blank[:, :1], before], 1)[:, :-1]
            new_label = _either(entered, label) + at_labels[:, step]
            new_blank = tf.concat([blank[:, :1], _either(blank[:, 1:], label)], 1) + at_blank[:, step]
            goes_on = step < output_length
            label, blank = tf.where(goes_on, new_label, label), tf.where(goes_on, new_blank, blank)
        ends = tf.concat([blank[:, :1], _either(blank[:, 1:], label)], 1)
        last = tf.one_hot(tf.cast(target_length, tf.int32), length + 1, dtype=ends.dtype)
        return tf.cast(-tf.reduce_sum(ends * last, 1), dtype)

    return loss


def _either(one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """The logarithm of the sum of two probabilities."""
    high = tf.stop_gradient(tf.maximum(one, other))
    return high + tf.math.log(tf.exp(one - high) + tf.exp(other - high))
