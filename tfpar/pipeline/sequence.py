"""A model made of a list of stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from tfpar.compat import layer_graph as compat


def stages(parts: Sequence[Callable], name: str | None = None) -> keras.Model:
    """A model that calls layers, models or functions one after the other, and can be cut between any two.

    For a model that is no graph of Keras layers: a subclass, or parts that hand each other lists or dicts of tensors.

    Args:
        parts: each is called with what the one before returned, the first with the model's inputs.
        name: of the model.

    Returns:
        A model. Variables of layers are tracked; those of plain functions are not, so wrap layers that a function calls
        in a `keras.layers.Layer`.

    Raises:
        ValueError: no parts, or one that cannot be called.

    Example:

    >>> strategy = tfpar.PipelineStrategy(stages=2, microbatches=2)
    >>> with strategy.scope():
    ...     model = tfpar.pipeline.stages([keras.layers.Dense(16, activation="relu"), keras.layers.Dense(1)])
    ...     model.compile("adam", "mse")
    >>> history = model.fit(np.ones((4, 8)), np.ones((4, 1)), verbose=0)
    """
    parts = list(parts)
    wrong = [part for part in parts if not callable(part)]
    if not parts or wrong:
        raise ValueError(f"stages takes a list of layers, models or functions, got {wrong[0] if wrong else parts!r}.")
    return _Stages(parts, name=name or "stages")


class _Stages(keras.Model):
    """The model that `stages` makes."""

    def __init__(self, parts: list[Callable], **kwargs: Any):
        super().__init__(**kwargs)
        self.parts = parts

    def stages(self) -> list[Callable]:
        """What a pipeline cuts."""
        return list(self.parts)

    def call(self, inputs: Any, training: bool = False) -> Any:
        for part in self.parts:
            inputs = compat.with_training(part, training)(inputs)
        return inputs
