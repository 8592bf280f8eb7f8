"""Operations that run on some splits of their inputs only: what else is split is gathered before they are added.

TensorFlow refuses them otherwise, or ends the process. `GATHERED` says for each kind of operation which dims must be
whole; the other dims stay split. That costs nothing where the dims are whole already.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfpar import variables

_MATCH = "match"  # in a relayout: leave this dim as it is
_SCOPE = re.compile(r"(?:^|(?<=/))whole_for_(\w+?)(?:_\d+)?/")  # in the names of the operations that gather

RESULTS = -1  # what stands for the results beside the numbers of the inputs

Dims = Callable[[int], bool]
Rule = Callable[[list[tf.Tensor]], dict[int, Dims]]


def gathered(value: Any, user: str, dims: Dims = lambda dim: True) -> tf.Tensor:
    """The tensor with the chosen dims whole on every device.

    A relayout can leave at most one dim as it is. To leave more, each chosen dim is merged into one before it and taken
    apart again: of merged dims DTensor keeps only the split of the first. This moves and costs nothing where the dim is
    whole already.

    Args:
        value: the tensor.
        user: the operation that needs it whole; it is part of the names of what is added, see `user_of`.
        dims: tells which dims must be whole; all by default.
    """
    value = tf.convert_to_tensor(value)
    rank = value.shape.rank
    if not any(map(dims, range(rank))):
        return value
    whole = [dims(dim) or value.shape[dim] == 1 for dim in range(rank)]
    with tf.name_scope(f"whole_for_{user}"):
        if rank - sum(whole) <= 1 or not value.shape.is_fully_defined():
            none = not value.shape.is_fully_defined()
            spec = [dtensor.UNSHARDED if none or whole[dim] else _MATCH for dim in range(rank)]
            return dtensor.relayout(value, variables.step_mesh().layout(spec))
        order = sorted(range(rank), key=lambda dim: whole[dim]) if whole[0] else list(range(rank))
        value = value if order == list(range(rank)) else tf.transpose(value, order)
        merged: list[int] = []
        for size, join in zip(value.shape, (whole[dim] for dim in order)):
            merged[len(merged) - join :] = [merged[-1] * size] if join else [size]
        value = tf.reshape(tf.identity(tf.reshape(value, merged)), value.shape)
        return value if order == list(range(rank)) else tf.transpose(value, np.argsort(order))


def user_of(name: str) -> str | None:
    """The operation for which an operation of this name gathers, None where it gathers for none."""
    match = _SCOPE.search(f"{name}/")
    return match[1] if match else None


def without_scope(name: str) -> str:
    """An operation's name without what `gathered` added to it."""
    return _SCOPE.sub("", f"{name}/").removesuffix("/")


def _all(dim: int) -> bool:
    return True


def _but_the_batch(dim: int) -> bool:
    return dim > 0


def _at(position: int, axis: int) -> Rule:
    """Input `position` is gathered along the dims that input `axis` names."""

    def rule(inputs: list[tf.Tensor]) -> dict[int, Dims]:
        named = tf.get_static_value(inputs[axis])
        rank = inputs[position].shape.rank
        dims = _all if named is None else {int(dim) % rank for dim in np.ravel(named)}.__contains__
        return {position: dims, RESULTS: dims}

    return rule


def _where(position: int, amount: int, none: int) -> Rule:
    """Input `position` is gathered along the dims for which input `amount` has a row that is not `none`."""

    def rule(inputs: list[tf.Tensor]) -> dict[int, Dims]:
        amounts = tf.get_static_value(inputs[amount])
        if amounts is None:
            return {position: _all, RESULTS: _all}
        sizes = inputs[position].shape  # a dim of size 1 is whole, and what it is repeated to can be split
        dims = {dim for dim, entry in enumerate(amounts) if np.any(entry != none) and sizes[dim] != 1}.__contains__
        return {position: dims, RESULTS: dims}

    return rule


def is_shape(value: tf.Tensor) -> bool:
    """Whether a value may be a shape, which TensorFlow must know before the step runs."""
    return value.dtype.is_integer and value.shape.rank is not None and value.shape.rank <= 1


def _joined(inputs: list[tf.Tensor]) -> dict[int, Dims]:
    """The dim along which tensors are joined. With a negative axis, TensorFlow joins shards where what follows splits it."""
    *parts, axis = inputs
    if is_shape(parts[0]):
        return {}
    named = tf.get_static_value(axis)
    dims = _all if named is None else {int(named) % parts[0].shape.rank}.__contains__
    return dict.fromkeys((*range(len(parts)), RESULTS), dims)


def _last(number: int) -> Rule:
    """The last dims of all inputs and of results of the same rank."""

    def rule(inputs: list[tf.Tensor]) -> dict[int, Dims]:
        firsts = [value.shape.rank - number for value in inputs]
        dims = {i: (lambda dim, first=first: dim >= first) for i, first in enumerate(firsts)}
        return {**dims, RESULTS: dims[0]}

    return rule


def _twice_the_same(inputs: list[tf.Tensor]) -> dict[int, Dims]:
    """The result of `x @ x^T` would be split twice over one axis."""
    return {1: _all} if inputs[0] is inputs[1] else {}


def _always(dims: dict[int, Dims]) -> Rule:
    return lambda inputs: dims


def _images(*positions: int, whole: tuple[int, ...] = ()) -> Rule:
    """Inputs and results of which the batch dim can be split, and inputs that must be whole."""
    return _always(dict.fromkeys((*positions, RESULTS), _but_the_batch) | dict.fromkeys(whole, _all))


def _whole(*positions: int) -> Rule:
    return _always(dict.fromkeys((*positions, RESULTS), _all))


def _kernel_gradient(*positions: int) -> Rule:
    return _always(dict.fromkeys(positions, _but_the_batch) | {RESULTS: _all})


def _each(rule: Rule, names: str) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


GATHERED: dict[str, Rule] = {
    **_each(_images(0, whole=(1,)), "Conv2D Conv3D DepthwiseConv2dNative"),
    **_each(_images(2, whole=(1,)), "Conv2DBackpropInput Conv3DBackpropInputV2"),
    **_each(_kernel_gradient(0, 2), "Conv2DBackpropFilter Conv3DBackpropFilterV2"),
    "DepthwiseConv2dNativeBackpropInput": _whole(1, 2),
    "DepthwiseConv2dNativeBackpropFilter": _whole(0, 2),
    **_each(_images(0), "MaxPool AvgPool MaxPool3D AvgPool3D LRN AdjustContrastv2"),
    **_each(_images(1), "AvgPoolGrad AvgPool3DGrad"),
    **_each(_images(0, 1, 2), "MaxPoolGrad MaxPool3DGrad LRNGrad"),
    **_each(_images(0), "ResizeNearestNeighbor ResizeNearestNeighborGrad ResizeBilinear ResizeBilinearGrad"),
    **_each(_twice_the_same, "MatMul BatchMatMulV2"),
    "ConcatV2": _joined,
    "Split": _at(1, axis=0),
    "SplitV": _at(0, axis=2),
    **_each(_where(0, amount=1, none=0), "Pad PadV2"),
    "Tile": _where(0, amount=1, none=1),
    **_each(_last(2), "Cholesky CholeskyGrad MatrixInverse MatrixDeterminant LogMatrixDeterminant Qr Svd Lu"),
    **_each(_last(2), "SelfAdjointEigV2 MatrixSolve MatrixTriangularSolve MatrixSolveLs"),
    **_each(_last(1), "FFT IFFT RFFT IRFFT TopKV2"),
    **_each(_last(2), "FFT2D IFFT2D RFFT2D IRFFT2D"),
    **_each(_last(3), "FFT3D IFFT3D RFFT3D IRFFT3D"),
}
FATAL = {
    "LookupTableFindV2": "A lookup table (IntegerLookup, StringLookup, TextVectorization) in a step on a mesh would end the "
    "process inside TensorFlow. Look the ids up in the dataset, with dataset.map, not in the model.",
    "FusedBatchNormV3": "fused_batch_norm in a step on a mesh would end the process inside TensorFlow. Use "
    "keras.layers.BatchNormalization, which does not use it.",
}


def gather_inputs(kind: str, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
    """The inputs of an operation that is about to be added to a step, gathered where `GATHERED` says so.

    Raises:
        NotImplementedError: the operation would end the process.
    """
    if (kind not in GATHERED and kind not in FATAL) or variables.step_owner() is None:
        return inputs
    if kind in FATAL:
        raise NotImplementedError(FATAL[kind])
    if any(value.shape.rank is None for value in inputs):
        return inputs
    dims = GATHERED[kind](inputs)
    return [gathered(value, kind, dims[i]) if i in dims else value for i, value in enumerate(inputs)]


def mesh_of(kind: str) -> dtensor.Mesh | None:
    """The mesh that an operation must name in a step.

    TensorFlow ends the process where the tensor that a RelayoutLike is like has no mesh yet when it looks for it: a
    constant, or what is computed from other RelayoutLikes alone, which second gradients meet.
    """
    mesh = variables.step_mesh() if kind == "RelayoutLike" else None
    return mesh and mesh.dtensor_mesh


def gather_results(function: Callable) -> Callable:
    """The function that adds such an operation, its results gathered too: what uses them could otherwise make TensorFlow
    ask the operation for a shard.
    """

    def gathered_results(*args, **kwargs):
        results = function(*args, **kwargs)
        return tf.nest.map_structure(_gather_result, results)

    return gathered_results


def _gather_result(value: Any) -> Any:
    rule = GATHERED.get(value.op.type) if isinstance(value, tf.Tensor) else None
    if rule is None or value.shape.rank is None or any(given.shape.rank is None for given in value.op.inputs):
        return value
    dims = rule(list(value.op.inputs)).get(RESULTS)
    return value if dims is None else gathered(value, value.op.type, dims)


def functions() -> list[str]:
    """The Python functions that add the operations of `GATHERED`: "Conv2DBackpropInput" is conv2d_backprop_input."""
    kinds = [kind for kind in GATHERED if "MatMul" not in kind]
    return [re.sub(r"(?<=[a-z0-9DN])(?=[A-Z][a-z0-9]|V$|KV)", "_", kind).lower() for kind in kinds]
