"""Operations that DTensor partitions wrongly or not at all.

    none     no expansion: TensorFlow gathers the inputs and runs the operation whole on every device, if an environment
             variable per operation says so. Right but without a speed-up; said once. An operation that is missing from
             the table is found when TensorFlow refuses it, and the step is tried again.
    wrong    an expansion that gives other numbers without an error where a certain dim is split: that dim is gathered
             before the operation is added to the graph, or its gradient made dense, or, where neither helps, the
             operation is refused.

Each entry of `WRONG` was seen to be wrong on TensorFlow 2.21 and has a test with the right value.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfpar import compat, op_gathers, slices, variables
from tfpar.op_gathers import gathered

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
    "Roll",
    "MirrorPad",
    "MirrorPadGrad",
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
    for operation in operations(graph):
        if operation.type in wanted and operation.type not in _warned:
            _warned.add(operation.type)
            warnings.warn(
                f"TensorFlow cannot partition the operation {operation.type} (in {_layer(operation.name)!r}): its inputs "
                "are gathered and every device computes the whole of it. The numbers are right; this part is not sped up.",
                stacklevel=2,
            )


def operations(graph: tf.Graph) -> Iterator[tf.Operation]:
    """The operations of a graph and of the functions in it."""
    yield from graph.get_operations()
    for function in getattr(graph, "_functions", {}).values():
        inner = getattr(function, "graph", None)
        if inner is not None and inner is not graph:
            yield from inner.get_operations()


def _layer(name: str) -> str:
    """The layer part of an operation's name: "gradient_tape/model/pool/AvgPoolGrad" gives "model/pool"."""
    parts = [part for part in name.split("/")[:-1] if part != "gradient_tape"]
    return "/".join(parts) or name


def _whole(operation: Callable) -> Callable:
    """Positions in the whole of one input meet a shard of another. The result is whole too: what uses it could otherwise
    make TensorFlow compute a shard of it only.
    """

    def whole(*args, name=None, **kwargs):
        return gathered(operation(*(gathered(arg) for arg in args), name=name, **kwargs))

    return whole


def _refused(operation: Callable) -> Callable:
    """Each device would find the positions in its own shard."""

    def refuse(*args, **kwargs):
        raise NotImplementedError(
            f"{operation.__name__} gives a tensor whose size depends on values, which a step on a mesh cannot split. Keep "
            "the size: use tf.where(condition, x, y), or multiply by the mask."
        )

    return refuse


def _scatter_nd(scatter: Callable) -> Callable:
    """As `_whole`; 64-bit indices fail. It is also the gradient of `gather_nd`, `top_k` and `sort`."""

    def whole(indices, updates, shape, **kwargs):
        indices, shape = tf.cast(gathered(indices), tf.int32), tf.cast(shape, tf.int32)
        return gathered(scatter(indices, gathered(updates), shape, **kwargs))

    return whole


def _sparse_cross_entropy(cross_entropy: Callable) -> Callable:
    """A label is looked up among a shard's classes: the loss is NaN where logits are split over the classes."""

    def whole(features, labels, **kwargs):
        return cross_entropy(gathered(features, lambda dim: dim == 1), labels, **kwargs)

    return whole


def _strided_slice(strided_slice: Callable) -> Callable:
    """A negative step reverses each shard on its own; a new axis (`x[:, None]`) on a split tensor ends the process."""

    def whole(input, begin, end, strides, *, new_axis_mask=0, **kwargs):
        if new_axis_mask:
            parts = slices.without_new_axes(
                tf.convert_to_tensor(input).shape.rank, begin, end, strides, new_axis_mask, **kwargs
            )
            result = whole(input, *parts.bounds, **parts.masks) if parts.slices else tf.convert_to_tensor(input)
            for dim in parts.new_dims:
                result = tf.expand_dims(result, dim)
            return result
        steps = tf.get_static_value(tf.convert_to_tensor(strides))
        if steps is not None and (steps < 0).any():
            return gathered(strided_slice(gathered(input), begin, end, strides, **kwargs))
        return strided_slice(input, begin, end, strides, **kwargs)

    return whole


def _lookup(gather: Callable) -> Callable:
    """The gradient of looked-up rows is dense, before anything (clipping, loss scale) sees it."""

    def dense(params, *args, **kwargs):
        params = tf.convert_to_tensor(params)
        return gather(variables.dense_gradient(params) if params.dtype.is_floating else params, *args, **kwargs)

    return dense


def _einsum(einsum: Callable) -> Callable:
    """Where one input splits a summed dim and the other splits another dim of both, over one axis, each device pairs
    shards that do not belong together. So that only one dim of both can be split, summed dims are gathered; the first
    one stays split (heads, in an attention's output) where no dim of both is kept.
    """

    def one_split(inputs, equation, **kwargs):
        terms, _, result = equation.replace(" ", "").partition("->")
        terms = terms.split(",")
        if len(terms) == 2 and "." not in equation:
            shared = [label for label in terms[0] if label in terms[1]]
            summed = [label for label in shared if label not in result]
            alone = [label for label in set(terms[0]) ^ set(terms[1]) if label not in result]
            whole = set(alone + (summed if len(summed) < len(shared) else summed[1:]))
            inputs = [gathered(value, lambda dim, term=term: term[dim] in whole) for value, term in zip(inputs, terms)]
        return einsum(inputs, equation, **kwargs)

    return one_split


def _matmul(matmul: Callable) -> Callable:
    """As `_einsum`: with two or more dims before a matrix, the summed dim is gathered."""

    def one_split(x, y, adj_x=False, adj_y=False, **kwargs):
        x, y = tf.convert_to_tensor(x), tf.convert_to_tensor(y)
        if max(x.shape.rank, y.shape.rank) > 3:
            x = gathered(x, lambda dim: dim == x.shape.rank - (2 if adj_x else 1))
            y = gathered(y, lambda dim: dim == y.shape.rank - (1 if adj_y else 2))
        return matmul(x, y, adj_x=adj_x, adj_y=adj_y, **kwargs)

    return one_split


WRONG = {
    "einsum": _einsum,
    "batch_mat_mul": _matmul,
    "batch_mat_mul_v2": _matmul,
    "batch_mat_mul_v3": _matmul,
    "gather_v2": _lookup,
    "scatter_nd": _scatter_nd,
    "gather_nd": _whole,
    "tensor_scatter_update": _whole,
    "tensor_scatter_add": _whole,
    "tensor_scatter_sub": _whole,
    "tensor_scatter_min": _whole,
    "tensor_scatter_max": _whole,
    "where": _refused,
    "boolean_mask": _refused,
    "sparse_softmax_cross_entropy_with_logits": _sparse_cross_entropy,
    "strided_slice": _strided_slice,
}


def _in_steps(wrapper: Callable[[Callable], Callable]) -> Callable[[Callable], Callable]:
    """Applies a wrapper in steps on a mesh only, and only where every tensor has a known rank."""

    def wrap(operation: Callable) -> Callable:
        routed = wrapper(operation)

        def choose(*args, **kwargs):
            routes = variables.step_owner() is not None and not any(
                isinstance(arg, tf.Tensor) and arg.shape.rank is None for arg in args
            )
            return (routed if routes else operation)(*args, **kwargs)

        return choose

    return wrap


compat.before_operations(op_gathers.gather_inputs)
for _operation in REPLICATED:
    replicate(_operation)
for _operation, _wrapper in WRONG.items():
    compat.route(_operation, _in_steps(_wrapper))
