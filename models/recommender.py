"""A recommender in plain Keras (DLRM): a table per categorical feature, products of all pairs, two MLPs; and click data."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import numpy as np
from keras import layers

RULE_SEED = 1906  # of the rule behind `clicks`
TASTES = 4  # numbers per row of the first two tables, whose product is their interaction
TAIL = 1.25  # the k-th most frequent row of a table appears in proportion to 1 / k ** TAIL


def recommender(
    *,
    tables: Sequence[int] = (20_000, 5_000),
    dense: int = 8,
    width: int = 16,
    bottom: Sequence[int] = (32,),
    top: Sequence[int] = (64, 32),
) -> keras.Model:
    """Builds the model: numbers go through the bottom MLP to a vector as wide as an embedding; the top MLP reads that vector
    and the dot products of all pairs of vectors.

    Args:
        tables: rows of each categorical feature's embedding table; at least one.
        dense: numbers per example.
        width: features per embedding.
        bottom: features of each hidden layer below the products.
        top: features of each hidden layer above them.

    Returns:
        A functional model from a dict of "categories", int ids of shape (batch, len(tables)), and "numbers", floats of shape
        (batch, dense), to one float logit per example, of shape (batch, 1). With the default sizes it has 0.4 million
        parameters.

    Raises:
        ValueError: no table, or a size below 1.

    Source: Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems", 2019,
        arXiv:1906.00091.

    Example:

    >>> from tfpar.models.recommender import recommender
    >>> recommender(tables=(100, 10), dense=4, width=8).output_shape
    (None, 1)
    """
    _check_sizes(tables, dense=dense, width=width, bottom=bottom, top=top)
    categories = keras.Input((len(tables),), dtype="int32", name="categories")
    numbers = keras.Input((dense,), name="numbers")
    x = numbers
    for i, features in enumerate([*bottom, width]):
        x = layers.Dense(features, activation="relu", name=f"bottom_{i}")(x)
    vectors = [layers.Embedding(rows, width, name=f"table_{i}")(categories[:, i]) for i, rows in enumerate(tables)]
    x = layers.Concatenate(name="features")([x, PairProducts(name="products")([x, *vectors])])
    for i, features in enumerate(top):
        x = layers.Dense(features, activation="relu", name=f"top_{i}")(x)
    inputs = {"categories": categories, "numbers": numbers}
    return keras.Model(inputs, layers.Dense(1, name="click")(x), name="recommender")


@keras.saving.register_keras_serializable("tfpar")
class PairProducts(layers.Layer):
    """The dot product of each pair of n vectors of shape (batch, width): numbers of shape (batch, n * (n - 1) / 2)."""

    def call(self, vectors):
        stacked = keras.ops.stack(vectors, axis=1)
        products = keras.ops.matmul(stacked, keras.ops.swapaxes(stacked, 1, 2))
        firsts, seconds = np.tril_indices(len(vectors), -1)
        flat = keras.ops.reshape(products, (-1, len(vectors) ** 2))
        return keras.ops.take(flat, firsts * len(vectors) + seconds, axis=1)

    def compute_output_shape(self, input_shape):
        return (input_shape[0][0], len(input_shape) * (len(input_shape) - 1) // 2)


def clicks(
    rows: int, *, tables: Sequence[int] = (20_000, 5_000), dense: int = 8, seed: int = 0
) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Draws examples and whether they were clicked, from a known rule.

    The log-odds of a click are a sum: an effect of each category's row, the product of two vectors that belong to the rows
    of the first two tables, and a weighted sum of the numbers. A few rows of each table are frequent and most are rare. The
    rule depends on `tables` and `dense` alone, so that data of another seed tests what was learned.

    Args:
        rows: number of examples.
        tables: rows of each categorical feature.
        dense: numbers per example.
        seed: of the examples.

    Returns:
        The inputs of `recommender`, labels (0 or 1) and the probabilities of a click, both floats of shape (rows, 1). The
        AUC of the probabilities is the best that can be expected of a model; with the default sizes it is about 0.84.

    Raises:
        ValueError: no table, or a size below 1.

    Example:

    >>> from tfpar.models.recommender import clicks
    >>> inputs, labels, probabilities = clicks(100, tables=(50, 10), dense=4, seed=1)
    >>> inputs["categories"].shape, inputs["numbers"].shape, labels.shape
    ((100, 2), (100, 4), (100, 1))
    """
    _check_sizes(tables, rows=rows, dense=dense)
    rule, rng = np.random.default_rng(RULE_SEED), np.random.default_rng(seed)
    weights = rule.normal(size=dense) / np.sqrt(dense)
    numbers = rng.normal(size=(rows, dense)).astype("float32")
    log_odds = numbers @ weights
    ids, tastes = [], []
    for i, size in enumerate(tables):
        frequencies = 1 / np.arange(1, size + 1) ** TAIL
        by_rank = rule.permutation(size)  # so that the frequent rows lie all over the table
        ids.append(by_rank[rng.choice(size, rows, p=frequencies / frequencies.sum())])
        log_odds += rule.normal(size=size)[ids[i]]
        if i < 2:
            tastes.append(rule.normal(size=(size, TASTES))[ids[i]])
    if len(tastes) == 2:
        log_odds += (tastes[0] * tastes[1]).sum(1) / np.sqrt(TASTES)
    probabilities = 1 / (1 + np.exp(-log_odds))
    labels = rng.random(rows) < probabilities
    inputs = {"categories": np.stack(ids, 1).astype("int32"), "numbers": numbers}
    return inputs, labels.astype("float32")[:, None], probabilities.astype("float32")[:, None]


def _check_sizes(tables: Sequence[int], **sizes: int | Sequence[int]) -> None:
    if not tables or np.min(np.concatenate([np.ravel(size) for size in (tables, *sizes.values())])) < 1:
        got = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(f"There must be a table, and sizes must be at least 1; got tables={tables}, {got}.")
