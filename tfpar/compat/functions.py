"""Functions while they are traced, and parts of them, which TensorFlow makes only for imported graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

# The public `tf.compat.v1.wrap_function` traces anew and without the order of reads and assignments.
from tensorflow.python.eager import record as tf_record, wrap_function

# Where every operation of a function passes; see `before_operations`.
from tensorflow.python.framework.func_graph import FuncGraph

# Where every branch passes that two tapes record; see `refuse_second_gradients`.
from tensorflow.python.ops import cond_v2, control_flow_util_v2, gradients_util


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


def refuse_second_gradients(error: Callable[[], Exception | None]) -> None:
    """Lets `tf.cond` under more than one gradient tape run, and its gradient raise an error.

    TensorFlow makes it a function of its own there, which hands its gradient optional values. DTensor ends the process
    where it meets one that no `tf.cond` of the same function made.

    Args:
        error: what to raise, None to leave TensorFlow its way.
    """
    original = control_flow_util_v2.run_as_function_for_tape_gradients

    @functools.wraps(original)
    def run(make_operation, inputs):
        twice = gradients_util.PossibleTapeGradientTypes(inputs) == gradients_util.POSSIBLE_GRADIENT_TYPES_HIGHER_ORDER
        refusal = error() if twice and make_operation.__module__ == cond_v2.__name__ else None
        if refusal is None:
            return original(make_operation, inputs)

        def refuse(*gradients):
            raise refusal

        with tf_record.stop_recording():
            outputs = original(make_operation, inputs)
        tf_record.record_operation("If", outputs, inputs, refuse)
        return outputs

    control_flow_util_v2.run_as_function_for_tape_gradients = run


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
