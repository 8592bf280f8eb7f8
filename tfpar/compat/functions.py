"""Parts of a traced function, which TensorFlow makes only for imported graphs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

# The public `tf.compat.v1.wrap_function` traces anew and without the order of reads and assignments.
from tensorflow.python.eager import wrap_function


def prune(graph: Any, feeds: Sequence[tf.Tensor], fetches: Sequence[tf.Tensor | tf.Operation]) -> Any:
    """The function of a part of a traced graph.

    Args:
        graph: of a concrete function.
        feeds: tensors of the graph that become arguments.
        fetches: tensors that become results, and operations that are run.

    Returns:
        A function of the feeds in their order, returning the fetches in theirs, None for an operation.
    """
    return wrap_function.WrappedFunction(graph, wrap_function.VariableHolder()).prune(list(feeds), list(fetches))


def ancestors(operations: Iterable[tf.Operation]) -> set[tf.Operation]:
    """Operations and all that must run before them."""
    seen, stack = set(), list(operations)
    while stack:
        operation = stack.pop()
        if operation not in seen:
            seen.add(operation)
            stack.extend(tensor.op for tensor in operation.inputs)
            stack.extend(operation.control_inputs)
    return seen
