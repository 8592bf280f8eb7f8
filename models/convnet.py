"""A small convolutional network in plain Keras: stages of two convolutions, a mean over the image, a linear head."""

from __future__ import annotations

from collections.abc import Sequence

import keras
from keras import layers


def convnet(
    *,
    image_shape: tuple[int, int, int] = (32, 32, 3),
    filters: Sequence[int] = (32, 64),
    classes: int = 10,
    dropout: float = 0.0,
) -> keras.Model:
    """Builds the model.

    Args:
        image_shape: height, width and channels of an image, in pixels.
        filters: channels of each stage. A stage is two 3x3 convolutions with batch normalization; between stages, max
            pooling halves height and width.
        classes: number of classes.
        dropout: fraction of features dropped before the head, 0 to 1.

    Returns:
        A functional model from floats of shape (batch, height, width, channels) to float logits of shape
        (batch, classes). With the default sizes it has 66,794 parameters.

    Raises:
        ValueError: no stage, or an image that is too small for its stages.

    Source: Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition", 2014; with
        the batch normalization of Ioffe and Szegedy, 2015.

    Example:

    >>> from tfpar.models.convnet import convnet
    >>> convnet(image_shape=(8, 8, 1), filters=(4, 8), classes=10).output_shape
    (None, 10)
    """
    if not filters:
        raise ValueError("A convnet has at least one stage, got filters=().")
    least = 2 ** (len(filters) - 1)
    if min(image_shape[:2]) < least:
        raise ValueError(
            f"{len(filters)} stages halve an image {len(filters) - 1} times, so it needs at least {least} pixels in height "
            f"and width; got image_shape={tuple(image_shape)}. Use larger images or fewer stages."
        )
    images = keras.Input(image_shape, name="images")
    x = images
    for i, channels in enumerate(filters):
        if i:
            x = layers.MaxPooling2D(2, name=f"stage_{i}_pool")(x)
        for j in range(2):
            # The normalization subtracts the mean, so a bias before it would do nothing.
            x = layers.Conv2D(channels, 3, padding="same", use_bias=False, name=f"stage_{i}_conv_{j}")(x)
            # Keras' momentum of 0.99 needs hundreds of steps until evaluation sees the statistics that training saw.
            x = layers.BatchNormalization(momentum=0.9, name=f"stage_{i}_norm_{j}")(x)
            x = layers.Activation("relu", name=f"stage_{i}_relu_{j}")(x)
    x = layers.GlobalAveragePooling2D(name="mean")(x)
    x = layers.Dropout(dropout, name="dropout")(x)
    return keras.Model(images, layers.Dense(classes, name="head")(x), name="convnet")
