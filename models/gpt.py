"""A small GPT in plain Keras: token and position embeddings, pre-norm blocks, a language-model head.

Nothing here knows about devices; `gpt_layouts.py` beside it holds the layout rules.
"""

from __future__ import annotations

import keras
from keras import layers


def gpt(
    *,
    vocabulary: int = 512,
    length: int = 128,
    width: int = 256,
    heads: int = 4,
    depth: int = 4,
    dropout: float = 0.0,
) -> keras.Model:
    """Builds the model.

    Args:
        vocabulary: number of token ids.
        length: tokens in a sequence.
        width: features per token; `heads` must divide it.
        heads: attention heads per block.
        depth: number of blocks.
        dropout: fraction of features dropped after the embedding, the attention and the MLP, 0 to 1.

    Returns:
        A functional model from int ids of shape (batch, length) to float logits of shape (batch, length, vocabulary).
        With the default sizes it has 3.45 million parameters.

    Source: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.

    Example:

    >>> from tfpar.models.gpt import gpt
    >>> gpt(vocabulary=64, length=16, width=32, heads=4, depth=1).output_shape
    (None, 16, 64)
    """
    check_heads(heads, width)
    ids = keras.Input((length,), dtype="int32", name="ids")
    x = Embeddings(vocabulary, length, width, name="embeddings")(ids)
    x = layers.Dropout(dropout)(x)
    for i in range(depth):
        h = layers.LayerNormalization(name=f"block_{i}_attention_norm")(x)
        attention = layers.MultiHeadAttention(heads, width // heads, name=f"block_{i}_attention")
        x = x + layers.Dropout(dropout)(attention(h, h, use_causal_mask=True))
        h = layers.LayerNormalization(name=f"block_{i}_mlp_norm")(x)
        h = layers.Dense(4 * width, activation="gelu", name=f"block_{i}_up")(h)
        x = x + layers.Dropout(dropout)(layers.Dense(width, name=f"block_{i}_down")(h))
    x = layers.LayerNormalization(name="final_norm")(x)
    return keras.Model(ids, layers.Dense(vocabulary, name="head")(x), name="gpt")


@keras.saving.register_keras_serializable("tfpar")
class Embeddings(layers.Layer):
    """The sum of a token's and a position's vector.

    Args:
        vocabulary: number of token ids.
        length: longest sequence.
        width: features per token.
    """

    def __init__(self, vocabulary: int, length: int, width: int, **kwargs):
        super().__init__(**kwargs)
        self.sizes = {"vocabulary": vocabulary, "length": length, "width": width}
        self.tokens = layers.Embedding(vocabulary, width, name="tokens")
        self.positions = layers.Embedding(length, width, name="positions")

    def build(self, input_shape):
        self.tokens.build(input_shape)
        self.positions.build(input_shape[1:])

    def call(self, ids):
        return self.tokens(ids) + self.positions(keras.ops.arange(ids.shape[1]))

    def get_config(self):
        return super().get_config() | self.sizes


def check_heads(heads: int, width: int) -> None:
    """Raises a ValueError where heads do not share the features evenly."""
    if width % heads:
        raise ValueError(f"heads must divide width, got heads={heads} and width={width}.")
