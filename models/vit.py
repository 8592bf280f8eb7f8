"""A vision transformer in plain Keras: patches of an image as tokens, a class token, blocks, a linear head."""

from __future__ import annotations

import keras
from keras import layers

from tfpar.models.gpt import check_heads
from tfpar.models.transformer import block


def vit(
    *,
    image_shape: tuple[int, int, int] = (32, 32, 3),
    patch: int = 4,
    width: int = 128,
    heads: int = 4,
    depth: int = 4,
    classes: int = 10,
    dropout: float = 0.0,
) -> keras.Model:
    """Builds the model.

    Args:
        image_shape: height, width and channels of an image, in pixels.
        patch: height and width of a patch, in pixels; it must divide those of the image.
        width: features per token; `heads` must divide it.
        heads: attention heads per block.
        depth: number of blocks.
        classes: number of classes.
        dropout: fraction of features dropped after the embedding, the attention and the MLP, 0 to 1.

    Returns:
        A functional model from floats of shape (batch, height, width, channels) to float logits of shape
        (batch, classes). With the default sizes it has 0.81 million parameters.

    Raises:
        ValueError: `heads` does not divide `width`, or `patch` does not divide the image.

    Source: Dosovitskiy et al., "An Image is Worth 16x16 Words", 2020.

    Example:

    >>> from tfpar.models.vit import vit
    >>> vit(image_shape=(8, 8, 1), patch=2, width=32, heads=4, depth=1).output_shape
    (None, 10)
    """
    check_heads(heads, width)
    if image_shape[0] % patch or image_shape[1] % patch:
        raise ValueError(
            f"patch must divide an image's height and width, got patch={patch} and image_shape={tuple(image_shape)}."
        )
    images = keras.Input(image_shape, name="images")
    x = layers.Conv2D(width, patch, strides=patch, name="patches")(images)
    x = layers.Reshape((-1, width), name="tokens")(x)
    x = ClassToken(name="class_token")(x)
    x = layers.Dropout(dropout)(x)
    for i in range(depth):
        x = block(x, f"block_{i}", heads, dropout)
    x = layers.LayerNormalization(name="final_norm")(x)
    return keras.Model(images, layers.Dense(classes, name="head")(x[:, 0]), name="vit")


@keras.saving.register_keras_serializable("tfpar")
class ClassToken(layers.Layer):
    """Puts a learned token before the others, (batch, n, width) to (batch, n + 1, width), and adds learned positions."""

    def build(self, input_shape):
        _, tokens, width = input_shape
        self.token = self.add_weight(shape=(1, 1, width), initializer="zeros", name="token")
        self.positions = self.add_weight(
            shape=(1, tokens + 1, width), initializer=keras.initializers.RandomNormal(stddev=0.02), name="positions"
        )

    def call(self, x):
        token = keras.ops.broadcast_to(self.token, (keras.ops.shape(x)[0], 1, x.shape[-1]))
        return keras.ops.concatenate([token, x], axis=1) + self.positions

    def compute_output_shape(self, input_shape):
        batch, tokens, width = input_shape
        return (batch, tokens + 1, width)
