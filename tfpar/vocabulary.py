"""Rows of a table and classes of logits that are split over devices: lookups and cross-entropy without gathering them.

TensorFlow's own lookup gathers a table whose rows are split, and its sparse cross-entropy is wrong on split classes. As in
Megatron-LM (arXiv 1909.08053) each device works on its own rows or classes and one sum over the devices joins the results:
of the looked-up rows for a lookup; of a maximum, a sum and the label's logit per example for the cross-entropy; of a
maximum and its first index for `argmax`.
"""

from __future__ import annotations

import tensorflow as tf


def lookup(table: tf.Tensor, ids: tf.Tensor, parts: int) -> tf.Tensor:
    """The rows of a table whose dim 0 is split; its gradient is dense.

    Args:
        table: of shape (rows, ...); `parts` divides the rows.
        ids: integers of any shape, each at least 0 and less than the number of rows.
        parts: into how many parts the rows are split.

    Returns:
        A tensor of the shape of `ids` and then that of a row.
    """
    rows, row = table.shape[0] // parts, table.shape[1:]
    flat = tf.reshape(tf.cast(ids, tf.int32), (-1,))

    @tf.custom_gradient
    def rows_of(table: tf.Tensor):
        own = tf.reshape(table, (parts, rows, *row))
        found = tf.gather(own, tf.broadcast_to(flat % rows, (parts, flat.shape[0])), axis=1, batch_dims=1)
        mine = tf.reshape(tf.equal(flat // rows, tf.range(parts)[:, None]), (parts, flat.shape[0], *[1] * len(row)))

        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            upstream = tf.reshape(upstream, (flat.shape[0], *row))
            return tf.math.unsorted_segment_sum(upstream, flat, table.shape[0])

        return tf.reduce_sum(tf.where(mine, found, tf.zeros((), table.dtype)), 0), gradient

    return tf.reshape(rows_of(table), (*ids.shape, *row))


def first_largest(values: tf.Tensor, output_type: tf.DType) -> tf.Tensor:
    """The index of the largest value along the last dim, of equal ones the first, as `tf.argmax`.

    Args:
        values: numbers of any shape.
        output_type: of the result, an integer type.

    Returns:
        Indices of the shape of `values` without its last dim; 0 where a value is NaN.
    """
    size = values.shape[-1]
    is_largest = tf.equal(values, tf.reduce_max(values, -1, keepdims=True))
    index = tf.reduce_min(tf.where(is_largest, tf.range(size), size), -1)
    return tf.cast(tf.where(tf.equal(index, size), 0, index), output_type)


def sparse_cross_entropy(logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Softmax cross-entropy with integer labels, in operations that work on split classes.

    Args:
        logits: of shape (examples, classes).
        labels: integers of shape (examples,).

    Returns:
        A loss per example; NaN where a label is no class.
    """
    classes = logits.shape[1]
    labels = tf.cast(labels, tf.int32)[:, None]
    is_label = tf.equal(labels, tf.range(classes)[None])
    is_class = tf.squeeze((labels >= 0) & (labels < classes), 1)

    @tf.custom_gradient
    def cross_entropy(logits: tf.Tensor):
        largest = tf.reduce_max(logits, 1, keepdims=True)
        shares = tf.exp(logits - largest)
        total = tf.reduce_sum(shares, 1, keepdims=True)
        picked = tf.reduce_sum(tf.where(is_label, logits, tf.zeros((), logits.dtype)), 1)
        loss = tf.squeeze(largest + tf.math.log(total), 1) - picked

        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            return (shares / total - tf.cast(is_label, logits.dtype)) * upstream[:, None]

        return tf.where(is_class, loss, tf.constant(float("nan"), logits.dtype)), gradient

    return cross_entropy(logits)
