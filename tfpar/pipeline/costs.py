"""How much work each call of a model is, estimated from the operations of its forward pass."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import keras
import tensorflow as tf

from tfpar import model_graph
from tfpar.pipeline.layer_graph import Call, LayerGraph

ELEMENT = 16  # the time of one element of any other operation, in that of one operation of a matrix product
UPDATE = 8  # the elements that an optimizer reads and writes per weight and step
BATCH = 32  # the examples that a weight's update is weighed against


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one call takes.

    Attributes:
        work: floating-point operations per example and forward pass, other operations and the update in their measure.
        parameters: how many numbers its variables hold.
        sent: per value that it makes, the numbers in it per example.
    """

    work: float
    parameters: int
    sent: tuple[float, ...]


def estimate(model: keras.Model, graph: LayerGraph, inputs: Any) -> list[Cost]:
    """The cost of each call of a model.

    Args:
        model: a built model.
        graph: its calls.
        inputs: a structure with shapes and dtypes, as the model takes.

    Returns:
        One cost per call. A backward pass is taken to cost the same multiple of each.

    Source: 2 m n k operations per product of an (m, k) and a (k, n) matrix; the weight of other operations was measured
    on a CPU (benchmarks/pipeline).
    """
    ends, made = [], []

    def forward(values: Any) -> Any:
        ends.clear(), made.clear()
        known = dict(zip(graph.inputs, graph.standardize(values)))
        for call in graph.calls:
            results = call.run(known, True)
            known |= zip(call.outputs, results)
            ends.append(len(tf.compat.v1.get_default_graph().get_operations()))
            made.append(tuple(sum(map(_numbers, tf.nest.flatten(result))) for result in results))
        return graph.pack([known[number] for number in graph.outputs])

    operations = model_graph.trace(model, inputs, forward).operations
    starts = [0, *ends[:-1]]
    return [_cost(call, operations[start:end], sizes) for call, start, end, sizes in zip(graph.calls, starts, ends, made)]


def _cost(call: Call, operations: list[tf.Operation], sizes: tuple[float, ...]) -> Cost:
    parameters = sum(math.prod(variable.shape) for variable in call.variables)
    work = sum(map(_work, operations)) / model_graph.EXAMPLES + parameters * UPDATE * ELEMENT / BATCH
    return Cost(work, parameters, tuple(size / model_graph.EXAMPLES for size in sizes))


def _work(operation: tf.Operation) -> float:
    """Of one operation on the batch that was traced."""
    if operation.type in _FREE:
        return 0.0
    made = sum(map(_numbers, operation.outputs))
    summed = _summed(operation)
    return 2.0 * made * summed if summed else float(ELEMENT * made)


def _summed(operation: tf.Operation) -> float:
    """How many products are added up for one output of a matrix product or convolution, 0 for other operations."""
    if operation.type in ("MatMul", "BatchMatMulV2"):
        transposed = operation.get_attr("transpose_a" if operation.type == "MatMul" else "adj_x")
        return operation.inputs[0].shape[-2 if transposed else -1] or 1
    if operation.type.startswith("DepthwiseConv"):
        return math.prod(operation.inputs[1].shape[:2])
    if operation.type in ("Conv2D", "Conv3D"):
        return math.prod(operation.inputs[1].shape[:-1])
    return 0


def _numbers(tensor: Any) -> float:
    """How many numbers a tensor holds; 1 for each dim that is not known."""
    shape = getattr(tensor, "shape", ())
    return math.prod(size or 1 for size in shape) if getattr(shape, "rank", 0) is not None else 1


_FREE = {"Const", "Placeholder", "Identity", "Reshape", "Shape", "ExpandDims", "Squeeze", "NoOp", "StopGradient"}
