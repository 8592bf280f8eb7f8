"""Convolutions of groups and channels, and gradients of windows, from operations that split over the batch.

TensorFlow cannot partition the gradients of depthwise convolution and of average pooling. Where the batch is split, they
are written here as what they are: the gradient of the input is the convolution of the result's, spread by the stride, with
the reversed kernel; that of the kernel is a sum of products per position of the kernel, taken per example first so that
one all-reduce sums them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfpar import variables


def keras_conv(conv: Callable) -> Callable:
    """Keras compiles convolutions of groups with XLA, in a function of its own. A step cannot, and the inside of a function
    has layouts of its own: what it gives back would be gathered. Channels go last, without XLA there is no other gradient.
    """

    def in_the_step(inputs, kernel, strides=1, padding="valid", data_format=None, dilation_rate=1):
        first = (data_format or keras.config.image_data_format()) == "channels_first"
        inputs = tf.convert_to_tensor(inputs)
        if inputs.shape[1 if first else -1] == kernel.shape[-2]:
            return conv(inputs, kernel, strides, padding, data_format, dilation_rate)
        images = keras.ops.moveaxis(inputs, 1, -1) if first else inputs
        named = f"N{'DHW'[5 - images.shape.rank :]}C"
        result = tf.nn.convolution(images, kernel, strides, padding.upper(), data_format=named, dilations=dilation_rate)
        return keras.ops.moveaxis(result, -1, 1) if first else result

    return in_the_step


def grouped_conv(conv: Callable) -> Callable:
    """Convolutions of groups, which have no gradient on CPU.

    A few wide groups are a convolution each. Many narrow ones are a depthwise convolution that gives each input channel's
    part of each of its group's results, and the sum of these parts.
    """

    def by_group(input, filter, strides, padding, *args, data_format="NHWC", name=None, **kwargs):
        input, filter = tf.convert_to_tensor(input), tf.convert_to_tensor(filter)
        channels = input.shape.rank - 1 if data_format.endswith("C") else 1
        width, known = filter.shape[-2], input.shape[channels]
        groups = known // width if known else 1  # not known where TensorFlow maps a function over rows (pfor)
        kwargs["data_format"] = data_format
        if groups == 1:
            return conv(input, filter, strides, padding, *args, name=name, **kwargs)
        plain = not args and _is_plain(input, padding, data_format=data_format, dilations=kwargs.get("dilations") or (1,))
        if plain and width < groups and strides[1] == strides[2]:
            return _narrow_groups(input, filter, strides, padding, groups)
        parts = zip(tf.split(input, groups, channels), tf.split(filter, groups, -1))
        return tf.concat([conv(*part, strides, padding, *args, **kwargs) for part in parts], channels)

    return by_group


def _narrow_groups(input: tf.Tensor, filter: tf.Tensor, strides: Sequence[int], padding: str, groups: int) -> tf.Tensor:
    """A convolution of groups as a depthwise one. The filter is (height, width, channels of a group, results)."""
    *window, width, results = filter.shape
    each = results // groups
    filter = tf.transpose(tf.reshape(filter, [*window, width, groups, each]), [0, 1, 3, 2, 4])
    parts = tf.nn.depthwise_conv2d(input, tf.reshape(filter, [*window, groups * width, each]), strides, padding)
    if width == 1:
        return parts
    batch, *image, _ = parts.shape
    parts = tf.reshape(parts, [batch, *image, groups, width, each])
    return tf.reshape(tf.reduce_sum(parts, -2), [batch, *image, results])


def depthwise_input_gradient(gradient: Callable) -> Callable:
    """The gradient of the images of a depthwise convolution."""

    def of_shards(input_sizes, filter, out_backprop, strides, padding, *args, **kwargs):
        sizes = tf.get_static_value(input_sizes)
        if sizes is None or not _splits(out_backprop, padding, *args, **kwargs):
            return gradient(input_sizes, filter, out_backprop, strides, padding, *args, **kwargs)
        batch, *image, channels = map(int, sizes)
        *window, _, multiplier = filter.shape
        spread = _spread(out_backprop, image, window, strides[1:3], padding)
        kernel = tf.reshape(filter, [*window, channels * multiplier, 1])
        for dim, size in enumerate(window):
            kernel = tf.gather(kernel, np.arange(size)[::-1], axis=dim)
        parts = tf.nn.depthwise_conv2d(spread, kernel, [1, 1, 1, 1], "VALID")
        return parts if multiplier == 1 else tf.reduce_sum(tf.reshape(parts, [batch, *image, channels, multiplier]), -1)

    return of_shards


def depthwise_filter_gradient(gradient: Callable) -> Callable:
    """The gradient of the kernel of a depthwise convolution."""

    def of_shards(input, filter_sizes, out_backprop, strides, padding, *args, **kwargs):
        sizes = tf.get_static_value(filter_sizes)
        if sizes is None or not input.shape.is_fully_defined() or not _splits(out_backprop, padding, *args, **kwargs):
            return gradient(input, filter_sizes, out_backprop, strides, padding, *args, **kwargs)
        *window, channels, multiplier = map(int, sizes)
        batch, *results, _ = out_backprop.shape
        steps = strides[1:3]
        edges = [_edges(*dim, padding) for dim in zip(input.shape[1:3], window, steps)]
        input = tf.pad(input, [(0, 0), *edges, (0, 0)]) if np.any(edges) else input
        out_backprop = tf.reshape(out_backprop, [batch, results[0], 1, results[1], channels, multiplier])
        columns = np.arange(window[1])[:, None] + np.arange(results[1]) * steps[1]
        products = []
        for top in range(window[0]):
            rows = input[:, top : top + (results[0] - 1) * steps[0] + 1 : steps[0]]
            shifted = tf.gather(rows, columns, axis=2)[..., None]  # batch, row, window column, column, channel, 1
            products.append(tf.reduce_sum(shifted * out_backprop, [1, 3]))
        return tf.reduce_sum(tf.reshape(tf.stack(products), [window[0], batch, *window[1:], channels, multiplier]), 1)

    return of_shards


def average_gradient(gradient: Callable) -> Callable:
    """The gradient of average pooling of images. A window over the edge is the mean of what it has of the image."""

    def of_shards(orig_input_shape, grad, ksize, strides, padding, data_format="NHWC", name=None):
        sizes = tf.get_static_value(orig_input_shape)
        if sizes is None or ksize[3] != 1 or not _splits(grad, padding, data_format=data_format):
            return gradient(orig_input_shape, grad, ksize, strides, padding, data_format=data_format, name=name)
        image, window, steps = [int(size) for size in sizes[1:3]], ksize[1:3], strides[1:3]
        rows, columns = (_overlap(*dim, padding) for dim in zip(image, window, steps))
        share = np.prod(window) / np.outer(rows, columns)[None, :, :, None]
        spread = _spread(grad * tf.constant(share, grad.dtype), image, window, steps, padding)
        return tf.nn.avg_pool2d(spread, window, 1, "VALID")

    return of_shards


def _is_plain(
    images: tf.Tensor,
    padding: str | bytes,
    explicit_paddings: Sequence[int] = (),
    data_format: str | bytes = "NHWC",
    dilations: Sequence[int] = (1,),
    name: str | None = None,
) -> bool:
    """Whether the sizes and options are what this file is for. Options of gradients are bytes, as they are in the graph."""
    padding, data_format = tf.compat.as_str(padding), tf.compat.as_str(data_format)
    usual = padding in ("SAME", "VALID") and data_format == "NHWC" and set(dilations) == {1}
    return usual and images.shape.rank == 4 and images.shape.is_fully_defined()


def _splits(gradient: tf.Tensor, *options, **named) -> bool:
    """Whether the batch may be split here, and `_is_plain`."""
    return variables.step_mesh().data_size > 1 and _is_plain(gradient, *options, **named)


def _edges(size: int, window: int, stride: int, padding: str) -> tuple[int, int]:
    """How many zeros a dim has on both ends for these windows."""
    missing = max((-(-size // stride) - 1) * stride + window - size, 0) if tf.compat.as_str(padding) == "SAME" else 0
    return missing // 2, missing - missing // 2


def _overlap(size: int, window: int, stride: int, padding: str) -> np.ndarray:
    """How much of each window lies in the image, along one dim."""
    before, after = _edges(size, window, stride, padding)
    starts = np.arange(0, size + before + after - window + 1, stride) - before
    return np.minimum(starts + window, size) - np.maximum(starts, 0)


def _spread(gradient: tf.Tensor, image: list[int], window: list[int], strides: Sequence[int], padding: str) -> tf.Tensor:
    """A result's gradient with zeros between and around, such that windows over it give one of the image's size."""
    batch, *results, channels = gradient.shape
    spans = [(result - 1) * stride + 1 for result, stride in zip(results, strides)]
    if max(strides) > 1:
        (rows, columns), (down, right) = results, strides
        gradient = tf.reshape(gradient, [batch, rows, 1, columns, 1, channels])
        gradient = tf.pad(gradient, [(0, 0), (0, 0), (0, down - 1), (0, 0), (0, right - 1), (0, 0)])
        gradient = tf.reshape(gradient, [batch, rows * down, columns * right, channels])[:, : spans[0], : spans[1]]
    around = []
    for span, size, width, stride in zip(spans, image, window, strides):
        before, _ = _edges(size, width, stride, padding)
        around.append((width - 1 - before, size - 1 + before - (span - 1)))
    return tf.pad(gradient, [(0, 0), *around, (0, 0)]) if np.any(around) else gradient
