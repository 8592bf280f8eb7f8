"""The operations of a model's forward pass, as a TensorFlow graph with a placeholder per variable and per input."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfpar.compat import functions

EXAMPLES = 2  # the batch that the graph is made for, unless the model's inputs have a size of their own
LENGTHS = (16, 64, 224)  # tried for dims whose size is not known, such as the length of a sequence or the width of an image


@dataclasses.dataclass(frozen=True)
class ModelGraph:
    """A traced forward pass.

    Attributes:
        operations: in an order in which each follows its inputs.
        variables: the variable that a placeholder stands for, by the placeholder's name.
        outputs: the model's outputs.
    """

    operations: list[tf.Operation]
    variables: dict[str, keras.Variable]
    outputs: list[tf.Tensor]


def trace(
    model: keras.Model, inputs: Any, forward: Callable[[Any], Any] | None = None, examples: int = EXAMPLES
) -> ModelGraph:
    """Traces `model(inputs, training=True)`; no variable is read or changed.

    Args:
        model: a built model.
        inputs: a structure of `keras.KerasTensor`, or anything with a shape and a dtype, as `model` takes.
        forward: what to trace on the inputs instead of the model.
        examples: the size of the batch, unless the model's inputs have one of their own.

    Returns:
        The graph, whose calls of functions are not looked into.

    Raises:
        Exception: whatever the model raises on symbolic values.
    """
    shapes = [tuple(leaf.shape)[1:] for leaf in keras.tree.flatten(inputs)]
    if all(None not in shape for shape in shapes):
        return _trace(model, inputs, forward, 0, examples)
    for length in LENGTHS:
        try:
            return _trace(model, inputs, forward, length, examples)
        except (ValueError, tf.errors.InvalidArgumentError) as error:
            failure = error
    raise failure


def _trace(model: keras.Model, inputs: Any, forward: Callable[[Any], Any] | None, length: int, examples: int) -> ModelGraph:
    graph = functions.FuncGraph("forward")  # other than a tf.Graph, it takes constants that were made outside of it
    with graph.as_default():
        names, mapping = {}, []
        for variable in model.variables:
            value = tf.compat.v1.placeholder(variable.dtype, tuple(variable.shape))
            names[value.op.name] = variable
            mapping.append((variable, value))
        values = keras.tree.map_structure(
            lambda leaf: tf.compat.v1.placeholder(
                leaf.dtype, (_examples(leaf, examples), *(length if size is None else size for size in leaf.shape[1:]))
            ),
            inputs,
        )
        with keras.StatelessScope(state_mapping=mapping):
            outputs = forward(values) if forward else model(values, training=True)
        outputs = [tf.convert_to_tensor(leaf) for leaf in keras.tree.flatten(outputs)]
    return ModelGraph(graph.get_operations(), names, outputs)


def _examples(leaf: Any, examples: int) -> int:
    return isinstance(leaf, keras.KerasTensor) and leaf.shape[0] or examples


def input_specs(model: keras.Model, batch: Any = None) -> Any:
    """What `model` is called on, as far as it is known.

    Args:
        model: a built model.
        batch: a batch as `fit` gets it, if there is one already.

    Returns:
        A structure with shapes and dtypes, None where it is not known.
    """
    if batch is not None:
        return keras.utils.unpack_x_y_sample_weight(batch)[0]
    if isinstance(model, keras.Sequential):
        return model.inputs[0] if model.inputs else None
    try:
        return model.input
    except (AttributeError, ValueError):  # a model without a graph of layers; Keras keeps the shapes that it was built with
        shape = (model.get_build_config() or {}).get("input_shape")
        if isinstance(shape, tuple) and all(isinstance(size, int) for size in shape[1:]):
            return keras.KerasTensor(shape, model.compute_dtype)
        return None
