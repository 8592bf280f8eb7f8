"""Operations that DTensor partitions wrongly or not at all.

    none     no expansion: TensorFlow gathers the inputs and runs the operation whole on every device, if an environment
             variable per operation says so. Right but without a speed-up; said once. An operation that is missing from
             the table is found when TensorFlow refuses it, and the step is tried again.
    wrong    an expansion that gives other numbers without an error where a certain dim is split: that dim is gathered
             before the operation is added to the graph.

Each entry of `WRONG` was seen to be wrong on TensorFlow 2.21 and has a test with the right value.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator

import tensorflow as tf
from tensorflow.experimental import dtensor

from tfpar import compat, variables

_MATCH = "match"  # in a relayout: leave this dim as it is
_VARIABLE = "DTENSOR_ENABLE_REPLICATED_SPMD_AS_DEFAULT_TF."
_REFUSED = re.compile(r"'tf\.(\w+)' op does not implement layout propagation")

REPLICATED = (
    # TensorLists hold what loops keep for their gradients.
    "EmptyTensorList",
    "TensorListReserve",
    "TensorListFromTensor",
    "TensorListStack",
    "TensorListGetItem",
    "TensorListSetItem",
    "TensorListPushBack",
    "TensorListPopBack",
    "TensorListLength",
    "TensorListElementShape",
    # Convolutions and pooling
    "AvgPoolGrad",
    "AvgPool3DGrad",
    "DepthwiseConv2dNative",
    "DepthwiseConv2dNativeBackpropFilter",
    "DepthwiseConv2dNativeBackpropInput",
    "LRN",
    "LRNGrad",
    # Order and structure
    "ReverseV2",
    "Size",
    "MatrixDiagPartV3",
    # Element-wise and cumulative
    "Cumprod",
    "SoftsignGrad",
)

_warned: set[str] = set()


def replicate(operation: str) -> None:
    """Lets one TensorFlow operation, named as in a graph ("AvgPoolGrad"), run replicated where it has no expansion."""
    os.environ[_VARIABLE + operation.upper()] = "1"


def is_replicated(operation: str) -> bool:
    """Whether an operation without expansion may run replicated."""
    return _VARIABLE + operation.upper() in os.environ


def refused(error: tf.errors.OpError) -> str | None:
    """The operation that TensorFlow refused for want of an expansion, None where the error says something else."""
    match = _REFUSED.search(error.message)
    return match[1] if match else None


def warn_replicated(graph: tf.Graph, operations: tuple[str, ...] = REPLICATED) -> None:
    """Warns, once per kind of operation, where a traced step has operations that run replicated."""
    wanted = set(operations) - _warned
    for operation in _operations(graph):
        if operation.type in wanted and operation.type not in _warned:
            _warned.add(operation.type)
            warnings.warn(
                f"TensorFlow cannot partition the operation {operation.type} (in {_layer(operation.name)!r}): its inputs "
                "are gathered and every device computes the whole of it. The numbers are right; this part is not sped up.",
                stacklevel=2,
            )


def _operations(graph: tf.Graph) -> Iterator[tf.Operation]:
    yield from graph.get_operations()
    for function in getattr(graph, "_functions", {}).values():
        inner = getattr(function, "graph", None)
        if inner is not None and inner is not graph:
            yield from inner.get_operations()


def _layer(name: str) -> str:
    """The layer part of an operation's name: "gradient_tape/model/pool/AvgPoolGrad" gives "model/pool"."""
    parts = [part for part in name.split("/")[:-1] if part != "gradient_tape"]
    return "/".join(parts) or name


def _gathered(value: tf.Tensor, dims: Callable[[int], bool] = lambda dim: True) -> tf.Tensor:
    """In a step on a mesh, the tensor with the chosen dims whole on every device; elsewhere the tensor itself."""
    owner = variables.step_owner()
    value = tf.convert_to_tensor(value)
    if owner is None or value.shape.rank is None:
        return value
    spec = [dtensor.UNSHARDED if dims(dim) else _MATCH for dim in range(value.shape.rank)]
    return dtensor.relayout(value, owner.mesh.layout(spec))


def _scatter_nd(scatter: Callable) -> Callable:
    """Global indices meet a shard's shape; 64-bit indices fail. It is also the gradient of `top_k` and `gather_nd`."""

    def whole(indices, updates, shape, name=None):
        if variables.step_owner() is None:
            return scatter(indices, updates, shape, name=name)
        indices, shape = tf.cast(_gathered(indices), tf.int32), tf.cast(shape, tf.int32)
        return scatter(indices, _gathered(updates), shape, name=name)

    return whole


def _where(where: Callable) -> Callable:
    """Each device would find its shard's own positions."""
    return lambda condition, name=None: where(_gathered(condition), name=name)


def _boolean_mask(boolean_mask: Callable) -> Callable:
    """Positions in the whole mask meet a shard of the tensor."""

    def whole(tensor, mask, *args, **kwargs):
        return boolean_mask(_gathered(tensor), _gathered(mask), *args, **kwargs)

    return whole


def _sparse_cross_entropy(cross_entropy: Callable) -> Callable:
    """A label is looked up among a shard's classes: the loss is NaN where logits are split over the classes."""

    def whole(features, labels, name=None):
        return cross_entropy(_gathered(features, lambda dim: dim == 1), labels, name=name)

    return whole


def _strided_slice(strided_slice: Callable) -> Callable:
    """A negative step reverses each shard on its own."""

    def whole(input, begin, end, strides, *args, **kwargs):
        steps = tf.get_static_value(tf.convert_to_tensor(strides))
        if steps is not None and (steps < 0).any():
            input = _gathered(input)
        return strided_slice(input, begin, end, strides, *args, **kwargs)

    return whole


WRONG = {
    "scatter_nd": _scatter_nd,
    "where": _where,
    "boolean_mask": _boolean_mask,
    "sparse_softmax_cross_entropy_with_logits": _sparse_cross_entropy,
    "strided_slice": _strided_slice,
}

for _operation in REPLICATED:
    replicate(_operation)
for _operation, _wrapper in WRONG.items():
    compat.route(_operation, _wrapper)
