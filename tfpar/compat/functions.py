"""Functions while they are traced, and parts of them, which TensorFlow makes only for imported graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

# The public `tf.compat.v1.wrap_function` traces anew and without the order of reads and assignments.
from tensorflow.python.eager import context as tf_context, wrap_function

# Where every operation of a function passes; see `before_operations`.
from tensorflow.python.framework.func_graph import FuncGraph

# What the tapes follow; see `is_recorded`.
from tensorflow.python.ops import gradients_util


def before_captures(change: Callable[[tf.Tensor], tf.Tensor]) -> None:
    """Lets a tensor from outside of a function change before the function's graph takes it in.

    Args:
        change: takes the tensor, returns the one to use.
    """
    original = FuncGraph.capture

    @functools.wraps(original)
    def capture(self, tensor, *args, **kwargs):
        return original(self, change(tensor), *args, **kwargs)

    FuncGraph.capture = capture


def before_operations(change: Callable[[str, list[Any]], list[Any]]) -> None:
    """Lets the inputs of an operation change before it is added to a function's graph, by whoever adds it.

    The gradient functions of TensorFlow add operations that no Python function of `compat.route` stands for.

    Args:
        change: takes the operation's type ("Conv2D") and its inputs, returns the inputs to use.
    """
    original = FuncGraph._create_op_internal

    @functools.wraps(original)
    def create(self, op_type, inputs, *args, **kwargs):
        return original(self, op_type, change(op_type, inputs), *args, **kwargs)

    FuncGraph._create_op_internal = create


def place_operations(mesh_of: Callable[[str], Any]) -> None:
    """Lets an operation that is added to a function's graph name its mesh; by default DTensor infers it from its neighbours.

    Args:
        mesh_of: takes the operation's type, returns a DTensor mesh or None.
    """
    original = FuncGraph._create_op_internal

    @functools.wraps(original)
    def create(self, op_type, *args, **kwargs):
        operation = original(self, op_type, *args, **kwargs)
        mesh = mesh_of(op_type)
        if mesh is not None:
            operation._set_attr("_mesh", tf.compat.v1.AttrValue(s=mesh.to_string().encode()))
        return operation

    FuncGraph._create_op_internal = create


def forgo_optionals(in_step: Callable[[], bool]) -> None:
    """Lets the gradients of `tf.cond` and `tf.switch_case` in a step take what they need as tensors, not as optional values.

    DTensor ends the process at an optional value of a branch that reads a variable, and at those of a second gradient.
    TensorFlow itself has a way without them, for XLA: what the other branch would have computed is an empty tensor.
    """
    original = tf_context.optionals_in_gradients_enabled
    tf_context.optionals_in_gradients_enabled = lambda: original() and not in_step()


def is_recorded(tensor: tf.Tensor) -> bool:
    """Whether a gradient tape follows a tensor."""
    return gradients_util.PossibleTapeGradientTypes([tensor]) != gradients_util.POSSIBLE_GRADIENT_TYPES_NONE


def prune(graph: Any, feeds: Sequence[tf.Tensor], fetches: Sequence[tf.Tensor | tf.Operation]) -> Any:
    """The function of a part of a traced graph.

    Args:
        graph: of a concrete function.
        feeds: tensors of the graph that become arguments.
        fetches: tensors that become results, and operations that are run.

    Returns:
        A function of the feeds in their order, returning the fetches in theirs, nothing for an operation.
    """
    part = wrap_function.WrappedFunction(graph, wrap_function.VariableHolder()).prune(list(feeds), list(fetches))
    specs = [tf.TensorSpec(feed.shape, feed.dtype) for feed in feeds]
    # traced once more, because TensorFlow optimizes the function of a part less: it took up to three times as long
    return Flat(tf.function(lambda *arguments: part(*arguments), autograph=False).get_concrete_function(*specs), part.graph)


class Flat:
    """A concrete function of tensors, called without TensorFlow's check of each argument, which takes its time.

    Args:
        function: takes and returns tensors, or nothing.
        graph: what it does.
    """

    def __init__(self, function: Any, graph: Any):
        self._function, self.graph = function, graph

    def __call__(self, *tensors: tf.Tensor) -> list[tf.Tensor]:
        outputs = self._function._call_flat(list(tensors), self._function.captured_inputs)
        return [leaf for leaf in tf.nest.flatten(outputs) if isinstance(leaf, tf.Tensor)]


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


def effects(graph: Any) -> list[tf.Operation]:
    """The operations that a traced function must run for what they do: assignments, assertions, prints."""
    return [operation for operation in graph.control_outputs if operation.type not in ("ReadVariableOp", "Placeholder")]


def forget_order(operation: tf.Operation, before: set[tf.Operation]) -> None:
    """Lets an operation no longer wait for some others, which have run before its function is called."""
    waits = [other for other in operation.control_inputs if other not in before]
    if len(waits) < len(operation.control_inputs):
        operation._remove_all_control_inputs()
        operation._add_control_inputs(waits)
