"""Operations that run on some splits of their inputs only: what else is split is gathered before they are added.

TensorFlow refuses them otherwise, or ends the process. `GATHERED` says for each kind of operation which dims must be
whole; the other dims stay split. That costs nothing where the dims are whole already.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfpar import variables

_MATCH = "match"  # in a relayout: leave this dim as it is

Dims = Callable[[int], bool]


def gathered(value: Any, dims: Dims = lambda dim: True) -> tf.Tensor:
    """The tensor with the chosen dims whole on every device.

    A relayout can leave at most one dim as it is. To leave more, each chosen dim is merged into the one before it and
    taken apart again: of merged dims DTensor keeps only the split of the first. This moves and costs nothing where the
    dim is whole already.
    """
    value = tf.convert_to_tensor(value)
    rank = value.shape.rank
    chosen = [dims(dim) for dim in range(rank)]
    if not any(chosen):
        return value
    if rank - sum(chosen) <= 1 or not value.shape.is_fully_defined():
        merge = not value.shape.is_fully_defined()
        spec = [dtensor.UNSHARDED if merge or chosen[dim] else _MATCH for dim in range(rank)]
        return dtensor.relayout(value, variables.step_owner().mesh.layout(spec))
    order = sorted(range(rank), key=lambda dim: chosen[dim]) if chosen[0] else list(range(rank))
    value, chosen = tf.transpose(value, order) if chosen[0] else value, [chosen[dim] for dim in order]
    merged: list[int] = []
    for size, join in zip(value.shape, chosen):
        merged[len(merged) - join :] = [merged[-1] * size] if join else [size]
    value = tf.reshape(tf.identity(tf.reshape(value, merged)), value.shape)
    return value if order == sorted(order) else tf.transpose(value, np.argsort(order))


def _all(dim: int) -> bool:
    return True


def _but_the_batch(dim: int) -> bool:
    return dim > 0


def _at(position: int, axis: int) -> Callable[[list[tf.Tensor]], dict[int, Dims]]:
    """Input `position` is gathered along the dims that input `axis` names."""

    def rule(inputs: list[tf.Tensor]) -> dict[int, Dims]:
        named = tf.get_static_value(inputs[axis])
        if named is None:
            return {position: _all}
        rank = inputs[position].shape.rank
        return {position: {int(dim) % rank for dim in np.ravel(named)}.__contains__}

    return rule


def _where(position: int, amount: int, none: int) -> Callable[[list[tf.Tensor]], dict[int, Dims]]:
    """Input `position` is gathered along the dims for which input `amount` has a row that is not `none`."""

    def rule(inputs: list[tf.Tensor]) -> dict[int, Dims]:
        amounts = tf.get_static_value(inputs[amount])
        if amounts is None:
            return {position: _all}
        return {position: {dim for dim, entry in enumerate(amounts) if np.any(entry != none)}.__contains__}

    return rule


def _inputs(**rules: Dims) -> Callable[[list[tf.Tensor]], dict[int, Dims]]:
    """The same dims always: `_0=_all` gathers all dims of the first input."""
    fixed = {int(name[1:]): rule for name, rule in rules.items()}
    return lambda inputs: fixed


def _last(number: int) -> Callable[[list[tf.Tensor]], dict[int, Dims]]:
    """The last dims of all inputs."""

    def rule(inputs: list[tf.Tensor]) -> dict[int, Dims]:
        firsts = [value.shape.rank - number for value in inputs]
        return {i: (lambda dim, first=first: dim >= first) for i, first in enumerate(firsts)}

    return rule


_IMAGES_AND_KERNEL = _inputs(_0=_but_the_batch, _1=_all)
_BATCH_OF_THREE = _inputs(_0=_but_the_batch, _1=_but_the_batch, _2=_but_the_batch)
_KERNEL_AND_GRADIENT = _inputs(_1=_all, _2=_but_the_batch)
_IMAGES_AND_GRADIENT = _inputs(_0=_but_the_batch, _2=_but_the_batch)


def _twice_the_same(inputs: list[tf.Tensor]) -> dict[int, Dims]:
    """The result of `x @ x^T` would be split twice over one axis."""
    return {1: _all} if inputs[0] is inputs[1] else {}


GATHERED: dict[str, Callable[[list[tf.Tensor]], dict[int, Dims]]] = {
    "Conv2D": _IMAGES_AND_KERNEL,
    "Conv2DBackpropInput": _KERNEL_AND_GRADIENT,
    "Conv2DBackpropFilter": _IMAGES_AND_GRADIENT,
    "Conv3D": _IMAGES_AND_KERNEL,
    "Conv3DBackpropInputV2": _KERNEL_AND_GRADIENT,
    "Conv3DBackpropFilterV2": _IMAGES_AND_GRADIENT,
    "DepthwiseConv2dNative": _inputs(_0=_all, _1=_all),
    "DepthwiseConv2dNativeBackpropInput": _inputs(_1=_all, _2=_all),
    "DepthwiseConv2dNativeBackpropFilter": _inputs(_0=_all, _2=_all),
    "MatMul": _twice_the_same,
    "BatchMatMulV2": _twice_the_same,
    "Split": _at(1, axis=0),
    "SplitV": _at(0, axis=2),
    "Pad": _where(0, amount=1, none=0),
    "PadV2": _where(0, amount=1, none=0),
    "Tile": _where(0, amount=1, none=1),
    **dict.fromkeys(("ResizeNearestNeighbor", "ResizeNearestNeighborGrad"), _inputs(_0=_but_the_batch)),
    **dict.fromkeys(("ResizeBilinear", "ResizeBilinearGrad"), _inputs(_0=_but_the_batch)),
    **dict.fromkeys(("MaxPool", "AvgPool", "MaxPool3D", "AvgPool3D", "LRN", "AdjustContrastv2"), _inputs(_0=_but_the_batch)),
    **dict.fromkeys(("AvgPoolGrad", "AvgPool3DGrad"), _inputs(_1=_but_the_batch)),
    **dict.fromkeys(("MaxPoolGrad", "MaxPool3DGrad", "LRNGrad"), _BATCH_OF_THREE),
    **dict.fromkeys(("Cholesky", "MatrixInverse", "MatrixDeterminant", "LogMatrixDeterminant"), _last(2)),
    **dict.fromkeys(("CholeskyGrad", "Qr", "Svd", "SelfAdjointEigV2", "Lu", "MatrixSolve"), _last(2)),
    **dict.fromkeys(("MatrixTriangularSolve", "MatrixSolveLs", "BatchCholesky"), _last(2)),
    **dict.fromkeys(("FFT", "IFFT", "RFFT", "IRFFT"), _last(1)),
    **dict.fromkeys(("FFT2D", "IFFT2D", "RFFT2D", "IRFFT2D"), _last(2)),
    **dict.fromkeys(("FFT3D", "IFFT3D", "RFFT3D", "IRFFT3D"), _last(3)),
}


FATAL = {
    "LookupTableFindV2": "A lookup table (IntegerLookup, StringLookup, TextVectorization) in a step on a mesh would end the "
    "process inside TensorFlow. Look the ids up in the dataset, with dataset.map, not in the model."
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
    return [gathered(value, dims[i]) if i in dims else value for i, value in enumerate(inputs)]
