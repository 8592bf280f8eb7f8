"""Convolutions of channels and groups, and average pooling, stay split over the batch; their gradients are one device's."""

import keras
import numpy as np
import parity
import pytest
import tensorflow as tf
from keras import layers

import tfpar
from tfpar import collectives, transfer

RNG = np.random.RandomState(0)
IMAGES = RNG.randn(4, 7, 6, 4)


def kernel(*shape):
    return RNG.randn(*shape)


def depthwise(strides, padding, window, multiplier=1):
    filters = kernel(*window, 4, multiplier)
    return lambda x, k: tf.nn.depthwise_conv2d(x, k, [1, strides, strides, 1], padding), filters


def grouped(strides, padding, window, groups, filters):
    return lambda x, k: keras.ops.conv(x, k, strides, padding.lower()), kernel(*window, 4 // groups, filters)


def channels_first(groups, filters):
    conv = lambda x, k: keras.ops.conv(keras.ops.moveaxis(x, -1, 1), k, 1, "valid", "channels_first")  # noqa: E731
    return conv, kernel(3, 2, 4 // groups, filters)


def average(window, strides, padding):
    return lambda x, k: tf.nn.avg_pool2d(x * k, window, strides, padding), np.ones(())


CASES = {
    "depthwise": depthwise(1, "SAME", (3, 3)),
    "depthwise, edges": depthwise(1, "VALID", (3, 2), 2),
    "depthwise, even window": depthwise(2, "SAME", (2, 4)),
    "depthwise, strided": depthwise(2, "SAME", (3, 3), 3),
    "depthwise, strided edges": depthwise(2, "VALID", (3, 3)),
    "depthwise, rest of the image": depthwise(3, "VALID", (2, 2)),
    "depthwise, stride above the window": depthwise(3, "SAME", (1, 2)),
    "depthwise, window above the image": depthwise(1, "SAME", (9, 1)),
    "groups of one channel": grouped(1, "SAME", (3, 3), 4, 4),
    "groups of one channel, more filters": grouped(2, "SAME", (3, 3), 4, 8),
    "two groups": grouped(1, "VALID", (2, 2), 2, 4),
    "groups, channels first": channels_first(4, 8),
    "average": average((2, 2), 2, "VALID"),
    "average with overlap": average((3, 2), 1, "SAME"),
    "average, strided": average((3, 3), 2, "SAME"),
    "average, stride above the window": average((2, 1), 3, "VALID"),
}


def value_and_gradients(operation):
    def compute(x, k):
        with tf.GradientTape() as tape:
            tape.watch((x, k))
            y = operation(x, k)
            total = tf.reduce_sum(y * np.cos(np.arange(y.shape.num_elements())).reshape(y.shape))
        return y, *tape.gradient(total, (x, k))

    return compute


@pytest.mark.parametrize(
    "name, mesh",
    [(name, "data=2,model=2") for name in CASES]
    + [(name, mesh) for name in ("depthwise, strided", "average, strided") for mesh in ("data=4", "model=4")],
)
def test_value_and_gradients(name, mesh):
    operation, filters = CASES[name]
    compute = tf.function(value_and_gradients(operation))
    expected = [value.numpy() for value in compute(tf.constant(IMAGES), tf.constant(filters))]
    strategy = tfpar.HybridStrategy(mesh)
    axis = "data" if "data" in mesh else None
    x = transfer.to_mesh(IMAGES, strategy.mesh.layout([axis, None, None, None]))
    k = transfer.to_mesh(filters, strategy.mesh.layout([None] * filters.ndim))
    collectives.of_new_programs()  # those of other tests
    step = tf.function(value_and_gradients(operation))
    results = strategy.run(step, args=(x, k))
    sent = {collective.kind for collective in collectives.of_new_programs()}
    if name != "two groups":  # the gradient that joins them is gathered where it is the result of the step
        assert sent == ({"all-reduce"} if axis else set()), sent  # the kernel's gradient, and nothing of the images
    for value, one in zip(results, expected):
        np.testing.assert_allclose(strategy.gather(value, 0).numpy().reshape(one.shape), one, rtol=0, atol=1e-12)


def test_groups_with_a_batch_of_unknown_size():
    images, filters = RNG.randn(4, 7, 6, 6), kernel(3, 3, 2, 6)
    strategy = tfpar.HybridStrategy("data=2,model=2")

    def conv(x):
        return keras.ops.conv(x, tf.constant(filters), 1, "same")

    step = tf.function(conv, input_signature=[tf.TensorSpec([None, 7, 6, 6], tf.float64)])
    x = transfer.to_mesh(images, strategy.mesh.layout(["data", None, None, None]))
    found = strategy.gather(strategy.run(step, args=(x,)), 0)
    np.testing.assert_allclose(found, conv(tf.constant(images)), rtol=0, atol=1e-12)


def test_average_pooling_of_small_images():
    """TensorFlow's gradient is wrong on one device. Pooling is linear: <pool(x), w> is <x, gradient> for every x."""
    weights = RNG.randn(4, 3, 4, 1)

    def pool(x):
        return tf.nn.avg_pool2d(x, [1, 5], 1, "SAME")

    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = tf.reduce_sum(pool(x) * weights)
        return tape.gradient(total, x)

    strategy = tfpar.HybridStrategy("data=4")
    x = transfer.to_mesh(RNG.randn(4, 3, 4, 1), strategy.mesh.layout(["data", None, None, None]))
    found = strategy.gather(strategy.run(tf.function(gradient), args=(x,)), 0).numpy()
    other = RNG.randn(4, 3, 4, 1)
    np.testing.assert_allclose(np.sum(pool(other) * weights), np.sum(other * found), rtol=0, atol=1e-12)


def convnet():
    return parity.compiled(
        keras.Sequential(
            [
                keras.Input((12, 12, 3)),
                layers.Conv2D(8, 3, padding="same"),
                layers.Conv2D(8, 7, padding="same", groups=8),
                layers.Conv2D(8, 1, groups=2),
                layers.AveragePooling2D(2),
                layers.SeparableConv2D(8, 3),
                layers.DepthwiseConv2D(3, 2, padding="same", depth_multiplier=2),
                layers.GlobalAveragePooling2D(),
                layers.Dense(3),
            ]
        )
    )


def test_a_convnet_sends_gradients_only(float64):
    images, targets = RNG.randn(16, 12, 12, 3), RNG.randn(16, 3)

    def fit(model):
        return model.fit(images, targets, batch_size=8, epochs=1, shuffle=False, verbose=0)

    _, many = parity.assert_parity(convnet, fit, "data=4")
    assert {c.kind for c in many.model.distribute_strategy.describe(many.model).collectives} == {"all-reduce"}
