"""What each TensorFlow operation does with the dims of its inputs, for `dim_groups.py`.

`RULES` are those that an axis can split as TensorFlow partitions them; docs/op_support.md has the measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfpar.dim_groups import DimGroups, Rule, Unknown


def _element_wise(groups: DimGroups, operation: tf.Operation) -> None:
    """Dims that are aligned from the right go together; one of size 1 is repeated, which needs no split."""
    for output in operation.outputs:
        for tensor in operation.inputs:
            shift = (output.shape.rank or 0) - (tensor.shape.rank or 0)
            for dim in range(tensor.shape.rank or 0):
                if shift >= 0 and tensor.shape[dim] == output.shape[dim + shift]:
                    groups.join((output, dim + shift), (tensor, dim))


def _one_to_one(groups: DimGroups, operation: tf.Operation) -> None:
    """The i-th output is the i-th input."""
    for tensor, output in zip(operation.inputs, operation.outputs):
        for dim in range(output.shape.rank or 0):
            groups.join((output, dim), (tensor, dim))


def _free(groups: DimGroups, operation: tf.Operation) -> None:
    """Makes a value out of none: it can be split in any way."""


def _labels(groups: DimGroups, operation: tf.Operation, terms: Sequence[str], result: str) -> None:
    """A sum of products, in the notation of einsum."""
    output = operation.outputs[0]
    weights = [weight for weight in map(groups.weight, operation.inputs) if weight is not None]
    for label in dict.fromkeys("".join(terms)):
        places = [(t, i) for t, term in zip(operation.inputs, terms) for i, other in enumerate(term) if other == label]
        if label in result:
            group = groups.join((output, result.index(label)), *places)
            group.batched |= len(places) == 2 and bool(weights)
        elif len(places) == 2:
            group = groups.join(*places)
            group.rows += weights
            group.sums_activations |= not weights
        else:
            groups.pin(*places[0], f"is summed by {operation.type}")


def _einsum(groups: DimGroups, operation: tf.Operation) -> None:
    equation = operation.get_attr("equation").decode()
    terms, _, result = equation.partition("->")
    if "." in equation or any(len(set(term)) < len(term) for term in terms.split(",")):
        groups.pin_all(operation)
    else:
        _labels(groups, operation, terms.split(","), result)


def _matmul(groups: DimGroups, operation: tf.Operation) -> None:
    flags = ("transpose_a", "transpose_b") if operation.type == "MatMul" else ("adj_x", "adj_y")
    left, right = (operation.get_attr(flag) for flag in flags)
    ranks = [tensor.shape.rank for tensor in operation.inputs]
    batch = "abcdefgh"[: max(ranks) - 2]
    first = batch[len(batch) - ranks[0] + 2 :] + ("km" if left else "mk")
    second = batch[len(batch) - ranks[1] + 2 :] + ("nk" if right else "kn")
    broadcast = any(1 in tensor.shape[:-2] for tensor in operation.inputs)
    if broadcast:
        groups.pin_all(operation)
    else:
        _labels(groups, operation, (first, second), batch + "mn")


def _reshape(groups: DimGroups, operation: tf.Operation) -> None:
    """Of dims that are merged or taken apart, the first carries the split, if each of its parts is whole."""
    tensor, output = operation.inputs[0], operation.outputs[0]
    if 0 in tensor.shape or not tensor.shape.is_fully_defined():
        groups.pin_all(operation)
        return
    for ours, theirs in _factors(tuple(tensor.shape), tuple(output.shape)):
        exact = len(ours) == len(theirs) == 1
        lead = [dims[0] for dims in (ours, theirs) if dims]
        if len(lead) == 2 and (
            exact or (tensor.shape[lead[0]] % groups.parts == 0 and output.shape[lead[1]] % groups.parts == 0)
        ):
            groups.join((tensor, lead[0]), (output, lead[1]))
        elif ours:
            groups.pin(tensor, ours[0], f"is {tensor.shape[ours[0]]}, too few to split")
        for dim in ours[1:]:
            groups.pin(tensor, dim, "is the inner of two dims that are merged")
        for dim in theirs[1:]:
            groups.make_whole(output, dim)


def _factors(old: tuple[int, ...], new: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Dims of two shapes of one size, grouped so that the products agree; dims of size 1 are left out."""
    found, ours, theirs, i, j = [], [], [], 0, 0
    left = [dim for dim, size in enumerate(old) if size != 1]
    right = [dim for dim, size in enumerate(new) if size != 1]
    a = b = 1
    while i < len(left) or j < len(right):
        if (a <= b and i < len(left)) or j == len(right):
            a *= old[left[i]]
            ours.append(left[i])
            i += 1
        else:
            b *= new[right[j]]
            theirs.append(right[j])
            j += 1
        if a == b:
            found.append((ours, theirs))
            ours, theirs, a, b = [], [], 1, 1
    return found


def _transpose(groups: DimGroups, operation: tf.Operation) -> None:
    for dim, source in enumerate(_static(1)(operation)):
        groups.join((operation.outputs[0], dim), (operation.inputs[0], source))


def _matching(groups: DimGroups, tensor: tf.Tensor, output: tf.Tensor, dims: Sequence[int | None], reason: str) -> None:
    """The i-th dim of the output is the `dims[i]`-th of the input; all other dims stay whole."""
    for dim, source in enumerate(dims):
        if source is not None:
            groups.join((output, dim), (tensor, source))
        elif output.shape[dim] != 1 and output.op.type != "Tile":
            groups.make_whole(output, dim)
    for dim in set(range(tensor.shape.rank)) - set(dims):
        groups.pin(tensor, dim, reason)


def _expand_dims(groups: DimGroups, operation: tf.Operation) -> None:
    dims: list[int | None] = list(range(operation.inputs[0].shape.rank))
    (at,) = _static(1)(operation)
    dims.insert(at if at >= 0 else len(dims) + 1 + at, None)
    _matching(groups, operation.inputs[0], operation.outputs[0], dims, "")


def _squeeze(groups: DimGroups, operation: tf.Operation) -> None:
    tensor = operation.inputs[0]
    gone = {dim % tensor.shape.rank for dim in operation.get_attr("squeeze_dims")}
    gone = gone or {dim for dim, size in enumerate(tensor.shape) if size == 1}
    kept = [dim for dim in range(tensor.shape.rank) if dim not in gone]
    _matching(groups, tensor, operation.outputs[0], kept, "is removed")


def _same_but(axes: Callable[[tf.Operation], Any], reason: str) -> Rule:
    """Every tensor has the same dims, of which those at `axes` stay whole."""

    def rule(groups: DimGroups, operation: tf.Operation) -> None:
        rank = operation.outputs[0].shape.rank
        whole = {int(axis) % rank for axis in axes(operation)} if rank else set()
        inputs = [tensor for tensor in operation.inputs if tensor.shape.rank == rank]
        for dim in range(rank):
            if dim not in whole:
                groups.join(*((tensor, dim) for tensor in (*inputs, *operation.outputs)))
                continue
            for tensor in inputs:
                groups.pin(tensor, dim, f"{reason} {operation.type}")
            for tensor in operation.outputs:
                groups.make_whole(tensor, dim)

    return rule


def _static(index: int) -> Callable[[tf.Operation], Any]:
    """The numbers in one input."""

    def numbers(operation: tf.Operation) -> list:
        value = tf.get_static_value(operation.inputs[index])
        if value is None:
            raise Unknown
        return value.flatten().tolist()

    return numbers


def _reduce(groups: DimGroups, operation: tf.Operation) -> None:
    """Dims that a sum, mean or maximum goes over stay whole."""
    tensor, output = operation.inputs[0], operation.outputs[0]
    gone = {axis % tensor.shape.rank for axis in _static(1)(operation)}
    keep = operation.get_attr("keep_dims")
    dims = [None if dim in gone else dim for dim in range(tensor.shape.rank) if keep or dim not in gone]
    _matching(groups, tensor, output, dims, f"is reduced by {operation.type}")


def _tile(groups: DimGroups, operation: tf.Operation) -> None:
    """A dim that is repeated is whole before; after, it can be split as any made value."""
    tensor, output = operation.inputs[0], operation.outputs[0]
    dims = [dim if tensor.shape[dim] == size else None for dim, size in enumerate(output.shape)]
    _matching(groups, tensor, output, dims, "is repeated")


def _gather(groups: DimGroups, operation: tf.Operation) -> None:
    """Rows of a table: the table's other dims are the result's last, and the rows can be split as a vocabulary."""
    table, indices, output = operation.inputs[0], operation.inputs[1], operation.outputs[0]
    if operation.get_attr("batch_dims") or _static(2)(operation) != [0] or table.op.type not in ("Placeholder", "Cast"):
        groups.pin_all(operation)
        return
    if _reads_inputs(groups, indices):
        groups.of(table, 0).lookups = True
    else:
        groups.pin(table, 0, "has its rows looked up by constants")
    for dim in range(indices.shape.rank):
        groups.join((output, dim), (indices, dim))
    for dim in range(1, table.shape.rank):
        groups.join((output, dim - 1 + indices.shape.rank), (table, dim))


def _reads_inputs(groups: DimGroups, tensor: tf.Tensor) -> bool:
    """Whether a value depends on an input of the model."""
    seen, waiting = set(), [tensor.op]
    while waiting:
        operation = waiting.pop()
        if operation.type == "Placeholder" and groups.weight(operation.outputs[0]) is None:
            return True
        if operation.type != "Shape" and operation not in seen:
            seen.add(operation)
            waiting += [source.op for source in operation.inputs]
    return False


def _slice(groups: DimGroups, operation: tf.Operation) -> None:
    """Dims of which all is taken go on; others stay whole."""
    tensor, output = operation.inputs[0], operation.outputs[0]
    new, shrunk = operation.get_attr("new_axis_mask"), operation.get_attr("shrink_axis_mask")
    if operation.get_attr("ellipsis_mask") or tf.get_static_value(operation.inputs[1]) is None:
        groups.pin_all(operation)
        return
    dims: list[int | None] = []
    source = 0
    for i in range(operation.inputs[1].shape[0]):
        if new >> i & 1:
            dims.append(None)
        else:
            dims += [] if shrunk >> i & 1 else [source]
            source += 1
    dims += range(source, tensor.shape.rank)
    same = [d if d is not None and tensor.shape[d] == output.shape[i] else None for i, d in enumerate(dims)]
    _matching(groups, tensor, output, same, "is cut")


_ELEMENT_WISE = (
    *("Abs", "Acos", "Add", "AddN", "AddV2", "Asin", "Atan", "Atan2", "BiasAdd", "Cast", "Ceil", "CheckNumerics", "Cos"),
    *("Cosh", "Div", "DivNoNan", "Elu", "Equal", "Erf", "Erfc", "Exp", "Expm1", "Floor", "FloorDiv", "FloorMod", "Greater"),
    *("GreaterEqual", "Identity", "LeakyRelu", "Less", "LessEqual", "Log", "Log1p", "LogicalAnd", "LogicalNot", "LogicalOr"),
    *("Maximum", "Minimum", "Mul", "MulNoNan", "Neg", "NotEqual", "OnesLike", "Pow", "PreventGradient", "RealDiv"),
    *("Reciprocal", "Relu", "Relu6", "Round", "Rsqrt", "Select", "SelectV2", "Selu", "Sigmoid", "Sign", "Sin", "Sinh"),
    *("Softplus", "Softsign", "Sqrt", "Square", "SquaredDifference", "StopGradient", "Sub", "Tan", "Tanh", "Xdivy"),
    *("Xlogy", "ZerosLike"),
)
_MAKES_VALUES = (
    *("Assert", "Const", "Fill", "NoOp", "Range", "Shape", "StatelessRandomGetKeyCounter", "StatelessRandomNormalV2"),
    *("StatelessRandomUniformIntV2", "StatelessRandomUniformV2", "StatelessTruncatedNormalV2"),
)
RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENT_WISE, _element_wise),
    **dict.fromkeys(_MAKES_VALUES, _free),
    **dict.fromkeys(("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"), _matmul),
    **dict.fromkeys(("Max", "Min", "Mean", "Sum", "Prod", "All", "Any"), _reduce),
    **dict.fromkeys(("Softmax", "LogSoftmax"), _same_but(lambda operation: (-1,), "is normalized by")),
    "ConcatV2": _same_but(lambda operation: _static(len(operation.inputs) - 1)(operation), "is joined by"),
    "Split": _same_but(_static(0), "is taken apart by"),
    "Cumsum": _same_but(_static(1), "is summed up by"),
    "Einsum": _einsum,
    "ExpandDims": _expand_dims,
    "GatherV2": _gather,
    "IdentityN": _one_to_one,
    "Reshape": _reshape,
    "Squeeze": _squeeze,
    "StridedSlice": _slice,
    "Tile": _tile,
    "Transpose": _transpose,
}
