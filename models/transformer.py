"""Transformers in plain Keras: an encoder with a classifier's head, and encoder and decoder for sequences to sequences.

The norms stand before attention and MLP, as in `gpt.py`, and not behind them as in the paper. Token id 0 is padding.
"""

from __future__ import annotations

import keras
from keras import layers

from tfpar.models.gpt import Embeddings, check_heads


def encoder(
    *,
    vocabulary: int = 512,
    length: int = 64,
    width: int = 128,
    heads: int = 4,
    depth: int = 2,
    classes: int = 2,
    dropout: float = 0.0,
) -> keras.Model:
    """Builds a classifier of sequences: blocks of self-attention, a mean over the tokens, a linear head.

    Args:
        vocabulary: number of token ids; id 0 is padding, which nothing attends to and the mean leaves out.
        length: tokens in a sequence, of which at least one is no padding.
        width: features per token; `heads` must divide it.
        heads: attention heads per block.
        depth: number of blocks.
        classes: number of classes.
        dropout: fraction of features dropped after the embedding, the attention and the MLP, 0 to 1.

    Returns:
        A functional model from int ids of shape (batch, length) to float logits of shape (batch, classes). With the
        default sizes it has 470,786 parameters.

    Raises:
        ValueError: `heads` does not divide `width`.

    Source: Vaswani et al., "Attention Is All You Need", 2017 (the encoder).

    Example:

    >>> from tfpar.models.transformer import encoder
    >>> encoder(vocabulary=64, length=16, width=32, heads=4, depth=1, classes=3).output_shape
    (None, 3)
    """
    check_heads(heads, width)
    ids = keras.Input((length,), dtype="int32", name="ids")
    x = encode(ids, vocabulary, length, width, heads, depth, dropout)
    x = layers.GlobalAveragePooling1D(name="mean")(x, mask=keras.ops.not_equal(ids, 0))
    return keras.Model(ids, layers.Dense(classes, name="head")(x), name="encoder")


def transformer(
    *,
    vocabulary: int = 512,
    target_vocabulary: int | None = None,
    length: int = 64,
    target_length: int | None = None,
    width: int = 128,
    heads: int = 4,
    depth: int = 2,
    dropout: float = 0.0,
) -> keras.Model:
    """Builds a model of sequences given sequences, such as translation.

    The decoder's token at place i sees the whole source and the target up to i, and predicts the target's token i + 1.

    Args:
        vocabulary: number of token ids of the source; id 0 is padding.
        target_vocabulary: number of token ids of the target; None: as the source.
        length: tokens in a source sequence, of which at least one is no padding.
        target_length: tokens in a target sequence; None: as the source. Padding stands at its end.
        width: features per token; `heads` must divide it.
        heads: attention heads per block.
        depth: number of blocks of the encoder, and of the decoder.
        dropout: fraction of features dropped after the embeddings, each attention and each MLP, 0 to 1.

    Returns:
        A functional model from a dict of int ids, `source` of shape (batch, length) and `target` of shape
        (batch, target_length), to float logits of shape (batch, target_length, target_vocabulary). With the default
        sizes it has 1.14 million parameters.

    Raises:
        ValueError: `heads` does not divide `width`.

    Source: Vaswani et al., "Attention Is All You Need", 2017.

    Example:

    >>> from tfpar.models.transformer import transformer
    >>> transformer(vocabulary=64, length=16, target_length=8, width=32, heads=4, depth=1).output_shape
    (None, 8, 64)
    """
    check_heads(heads, width)
    target_length = target_length or length
    target_vocabulary = target_vocabulary or vocabulary
    source = keras.Input((length,), dtype="int32", name="source")
    target = keras.Input((target_length,), dtype="int32", name="target")
    memory = encode(source, vocabulary, length, width, heads, depth, dropout)
    mask = attention_mask(source)
    x = Embeddings(target_vocabulary, target_length, width, name="decoder_embeddings")(target)
    x = layers.Dropout(dropout)(x)
    for i in range(depth):
        x = attend(x, None, f"decoder_{i}", heads, dropout, use_causal_mask=True)
        x = attend(x, memory, f"decoder_{i}_cross", heads, dropout, attention_mask=mask)
        x = feed_forward(x, f"decoder_{i}", dropout)
    x = layers.LayerNormalization(name="decoder_norm")(x)
    logits = layers.Dense(target_vocabulary, name="head")(x)
    return keras.Model({"source": source, "target": target}, logits, name="transformer")


def encode(
    ids: keras.KerasTensor, vocabulary: int, length: int, width: int, heads: int, depth: int, dropout: float
) -> keras.KerasTensor:
    """The encoder: (batch, length) ids to (batch, length, width)."""
    x = Embeddings(vocabulary, length, width, name="embeddings")(ids)
    x = layers.Dropout(dropout)(x)
    mask = attention_mask(ids)
    for i in range(depth):
        x = block(x, f"encoder_{i}", heads, dropout, attention_mask=mask)
    return layers.LayerNormalization(name="encoder_norm")(x)


def block(x: keras.KerasTensor, name: str, heads: int, dropout: float = 0.0, **mask) -> keras.KerasTensor:
    """One encoder block on (batch, length, width): self-attention, then an MLP of four times the width."""
    return feed_forward(attend(x, None, name, heads, dropout, **mask), name, dropout)


def attend(
    x: keras.KerasTensor, memory: keras.KerasTensor | None, name: str, heads: int, dropout: float, **mask
) -> keras.KerasTensor:
    """Adds attention of each token of x to x itself, or to a memory of shape (batch, length, width)."""
    h = layers.LayerNormalization(name=f"{name}_attention_norm")(x)
    attention = layers.MultiHeadAttention(heads, x.shape[-1] // heads, name=f"{name}_attention")
    return x + layers.Dropout(dropout)(attention(h, h if memory is None else memory, **mask))


def feed_forward(x: keras.KerasTensor, name: str, dropout: float) -> keras.KerasTensor:
    """Adds an MLP of four times the width, which sees each token alone."""
    h = layers.LayerNormalization(name=f"{name}_mlp_norm")(x)
    h = layers.Dense(4 * x.shape[-1], activation="gelu", name=f"{name}_up")(h)
    return x + layers.Dropout(dropout)(layers.Dense(x.shape[-1], name=f"{name}_down")(h))


def attention_mask(ids: keras.KerasTensor) -> keras.KerasTensor:
    """True where a token may be attended to, of shape (batch, 1, length)."""
    return keras.ops.expand_dims(keras.ops.not_equal(ids, 0), 1)
