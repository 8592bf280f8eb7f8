"""What Keras knows of a model's graph of layers, which has no public reader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras.src import backend

# Passes `training` to the operations of a graph that take it.
from keras.src.models import functional as keras_functional


def functional(model: Any) -> keras.Model | None:
    """The Functional model that a call of `model` runs: itself, or that inside a Sequential; None where there is none.

    Also None where the user has overridden `call`, which may do more.
    """
    if isinstance(model, keras.Sequential) and type(model).call is keras.Sequential.call:
        return model._functional
    is_graph = isinstance(model, keras_functional.Functional) and type(model).call is keras_functional.Functional.call
    return model if is_graph else None


def nodes(model: keras.Model) -> Iterator[Any]:
    """The calls of a Functional model's operations, each after those that it needs.

    Yields:
        Keras' nodes: `operation`, `arguments` (with `fill_in`), `input_tensors` and `outputs` (KerasTensors).
    """
    for depth in sorted(model._nodes_by_depth, reverse=True):
        for node in model._nodes_by_depth[depth]:
            if node.operation is not None and not node.is_input:
                yield node


def call_arguments(node: Any) -> tuple[tuple, dict]:
    """What the operation of a node is called with, KerasTensors among it."""
    return node.arguments.args, node.arguments.kwargs


def input_structure(model: keras.Model) -> Any:
    """A Functional model's inputs in the structure that it was made with."""
    return model._inputs_struct


def output_structure(model: keras.Model) -> Any:
    """A Functional model's outputs in the structure that its call returns."""
    return keras_functional.unpack_singleton(model._outputs_struct)


def standardize_inputs(model: keras.Model, inputs: Any) -> list[Any]:
    """The inputs of a Functional model as a list, with the ranks and dtypes that it was made for."""
    return model._standardize_inputs(inputs)


def with_training(operation: Callable, training: bool) -> Callable:
    """The operation, called with `training` if it takes it."""
    return keras_functional.operation_fn(operation, training=training)


def takes_training(model: keras.Model) -> bool:
    """Whether a model's `call` has the argument `training`."""
    return model._call_has_training_arg


def mask_of(value: Any) -> Any:
    """The mask that Keras attached to a tensor, None where there is none."""
    return backend.get_keras_mask(value)


def set_mask(value: Any, mask: Any) -> None:
    """Attaches a mask to a tensor, as Keras' layers do."""
    backend.set_keras_mask(value, mask)


def layers_of(operation: Any) -> list[keras.layers.Layer]:
    """A layer and all layers in it; nothing for an operation that is no layer."""
    return list(operation._flatten_layers()) if isinstance(operation, keras.layers.Layer) else []


def state_of(operation: Any) -> list[keras.Variable]:
    """What a layer changes when it is called in training, such as averages; not seeds, and nothing if it is frozen."""
    return [variable for layer in layers_of(operation) if layer.trainable for variable in layer._non_trainable_variables]
