"""A multilayer perceptron in plain Keras."""

from __future__ import annotations

from collections.abc import Sequence

import keras
from keras import layers


def mlp(
    *,
    features: int = 64,
    widths: Sequence[int] = (256, 64),
    outputs: int = 10,
    activation: str = "relu",
    dropout: float = 0.0,
) -> keras.Model:
    """Builds the model: a hidden layer per width, then a linear head.

    Args:
        features: numbers per example.
        widths: features of each hidden layer; at least one.
        outputs: numbers per example that come out, such as logits of classes.
        activation: a Keras activation, behind every hidden layer.
        dropout: fraction of features dropped behind every hidden layer, 0 to 1.

    Returns:
        A functional model from floats of shape (batch, features) to floats of shape (batch, outputs). With the default
        sizes it has 33,738 parameters.

    Raises:
        ValueError: no hidden layer, or a size below 1.

    Source: Rumelhart et al., "Learning Representations by Back-Propagating Errors", 1986.

    Example:

    >>> from tfpar.models.mlp import mlp
    >>> mlp(features=8, widths=(16, 8), outputs=3).output_shape
    (None, 3)
    """
    if not widths or min(features, outputs, *widths) < 1:
        raise ValueError(
            f"An MLP has at least one hidden layer and sizes of at least 1, got features={features}, "
            f"widths={tuple(widths)} and outputs={outputs}."
        )
    numbers = keras.Input((features,), name="features")
    x = numbers
    for i, width in enumerate(widths):
        x = layers.Dense(width, activation=activation, name=f"hidden_{i}")(x)
        x = layers.Dropout(dropout, name=f"hidden_{i}_dropout")(x)
    return keras.Model(numbers, layers.Dense(outputs, name="head")(x), name="mlp")
