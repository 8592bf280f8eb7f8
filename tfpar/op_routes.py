"""What takes the place of a TensorFlow function in a step where DTensor would give other numbers, or none.

Each wrapper takes the function and returns one with the same arguments; `op_support.WRONG` says which takes which.
"""

from __future__ import annotations

import functools
import string
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tfpar import slices, variables, vocabulary
from tfpar.op_gathers import gathered, is_shape


def whole(operation: Callable) -> Callable:
    """Positions in the whole of one input meet a shard of another. The result is whole too: what uses it could otherwise
    make TensorFlow compute a shard of it only.
    """

    def whole(*args, name=None, **kwargs):
        user = operation.__name__
        return gathered(operation(*(gathered(arg, user) for arg in args), name=name, **kwargs), user)

    return whole


def refused(operation: Callable) -> Callable:
    """Each device would find the positions in its own shard."""

    def refuse(*args, **kwargs):
        raise NotImplementedError(
            f"{operation.__name__} gives a tensor whose size depends on values, which a step on a mesh cannot split. Keep "
            "the size: use tf.where(condition, x, y), or multiply by the mask."
        )

    return refuse


def fatal(operation: Callable) -> Callable:
    """The process would end inside TensorFlow, also where nothing is split."""

    def refuse(*args, **kwargs):
        raise NotImplementedError(
            f"{operation.__name__} in a step on a mesh would end the process inside TensorFlow. Compute it outside the step."
        )

    return refuse


def scatter_nd(scatter: Callable) -> Callable:
    """As `whole`; 64-bit indices fail. It is also the gradient of `gather_nd`, `top_k` and `sort`."""

    def whole(indices, updates, shape, **kwargs):
        indices, updates = _as_rows(tf.cast(gathered(indices, "scatter_nd"), tf.int32), gathered(updates, "scatter_nd"))
        return gathered(scatter(indices, updates, tf.cast(shape, tf.int32), **kwargs), "scatter_nd")

    return whole


def tensor_scatter(scatter: Callable) -> Callable:
    """As `whole`, for `tf.tensor_scatter_nd_update` and its kin."""

    def whole(tensor, indices, updates, name=None):
        user = scatter.__name__
        indices, updates = _as_rows(gathered(indices, user), gathered(updates, user))
        return gathered(scatter(gathered(tensor, user), indices, updates, name=name), user)

    return whole


def _as_rows(indices: tf.Tensor, updates: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Indices as a matrix, and updates to match. Where updates have more dims than the result, TensorFlow takes layouts for
    them that the result does not have, which can end the process.
    """
    if indices.shape.rank is None or updates.shape.rank is None:
        return indices, updates
    dims = indices.shape.rank - 1
    places, width, rest = indices.shape[:-1], indices.shape[-1], updates.shape[dims:]
    is_known = width is not None and rest.is_fully_defined()
    if dims < 2 or not is_known or not places.is_compatible_with(updates.shape[:dims]):  # TensorFlow's own error follows
        return indices, updates
    number = -1 if places.num_elements() is None else places.num_elements()
    return tf.reshape(indices, [number, width]), tf.reshape(updates, [number, *rest])


def _may_be_split(value: tf.Tensor) -> bool:
    """Whether a step's layouts can split the last dim of a value."""
    mesh = variables.step_mesh()
    return mesh.size > mesh.data_size and value.shape.is_fully_defined() and value.shape.rank > 1


def argmax(argmax: Callable) -> Callable:
    """Logits that are split over the classes would be gathered for a metric."""

    def split(input, dimension, output_type=tf.int64, **kwargs):
        values = tf.convert_to_tensor(input)
        if _may_be_split(values) and tf.get_static_value(dimension) in (-1, values.shape.rank - 1):
            return vocabulary.first_largest(values, output_type)
        return argmax(input, dimension, output_type, **kwargs)

    return split


def sparse_cross_entropy(cross_entropy: Callable) -> Callable:
    """A label is looked up among a shard's classes: the loss is NaN where logits are split over the classes."""

    def split(features, labels, **kwargs):
        features = tf.convert_to_tensor(features)
        if _may_be_split(features):
            return vocabulary.sparse_cross_entropy(features, labels), None
        return cross_entropy(features, labels, **kwargs)

    return split


def strided_slice(strided_slice: Callable) -> Callable:
    """A negative step reverses each shard on its own; a new axis (`x[:, None]`) on a split tensor ends the process; dims
    behind one that is removed (`x[0]`) get the split of the dim before them.
    """

    def whole(input, begin, end, strides, *, new_axis_mask=0, **kwargs):
        if new_axis_mask:
            parts = slices.without_new_axes(
                tf.convert_to_tensor(input).shape.rank, begin, end, strides, new_axis_mask, **kwargs
            )
            result = whole(input, *parts.bounds, **parts.masks) if parts.slices else tf.convert_to_tensor(input)
            for dim in parts.new_dims:
                result = tf.expand_dims(result, dim)
            return result
        value = tf.convert_to_tensor(input)
        if kwargs.get("shrink_axis_mask") and value.shape.rank > 1 and value.shape.is_fully_defined():
            kept = slices.keeping_dims(value.shape.rank, begin, end, **kwargs)
            if kept:
                first, last, masks, dims = kept
                return tf.squeeze(whole(value, first, last, strides, **kwargs | masks), dims)
        steps = tf.get_static_value(tf.convert_to_tensor(strides))
        if steps is not None and (steps < 0).any():
            user = "strided_slice"
            return gathered(strided_slice(gathered(input, user), begin, end, strides, **kwargs), user)
        return strided_slice(input, begin, end, strides, **kwargs)

    return whole


def static_slice(dynamic: Callable) -> Callable:
    """`tf.slice`, whose result has no known size in TensorFlow's partitioning, also where the size is known."""

    def static(input, begin, size, name=None):
        begin, size = tf.convert_to_tensor(begin), tf.convert_to_tensor(size)
        first, number = tf.get_static_value(begin), tf.get_static_value(size)
        input = tf.convert_to_tensor(input)
        if first is not None and number is not None:
            ends = [a + n if n >= 0 else whole for a, n, whole in zip(first, number, input.shape)]
            return tf.strided_slice(input, first, ends, name=name)
        if number is not None and input.shape.is_fully_defined() and min(number, default=-1) >= 0:
            for dim, taken in enumerate(number):  # a computed begin, such as a sum of sizes: rows from there on
                if taken != input.shape[dim]:
                    input = tf.gather(input, begin[dim] + tf.range(taken, dtype=begin[dim].dtype), axis=dim)
            return input
        return dynamic(input, begin, size, name=name)

    return static


def squeeze(squeeze: Callable) -> Callable:
    """A reshape: what uses the result of a squeeze could make TensorFlow compute a shard of another shape."""

    def reshaped(input, axis=None, name=None):
        value = tf.convert_to_tensor(input)
        named = np.ravel([] if axis is None else axis).astype(int)
        if not value.shape.is_fully_defined() or any(value.shape[dim] != 1 for dim in named):  # an error that says so
            return squeeze(input, axis, name=name)
        dims = {dim % value.shape.rank for dim in named} or {dim for dim, size in enumerate(value.shape) if size == 1}
        return tf.reshape(value, [size for dim, size in enumerate(value.shape) if dim not in dims], name=name)

    return reshaped


def transpose(transpose: Callable) -> Callable:
    """TensorFlow refuses to split what a transpose gives another way than what it takes, but not so of an einsum."""

    def as_einsum(x, perm, name=None):
        value, order = tf.convert_to_tensor(x), tf.get_static_value(tf.convert_to_tensor(perm))
        if order is None or not value.dtype.is_floating:
            return transpose(x, perm, name=name)
        labels = string.ascii_letters[: value.shape.rank]
        equation = f"{labels}->{''.join(labels[dim] for dim in order)}"
        return tf.raw_ops.Einsum(inputs=[value], equation=equation, name=name)

    return as_einsum


def lookup(gather: Callable) -> Callable:
    """The gradient of looked-up rows is dense, before anything (clipping, loss scale) sees it. Rows that are split would be
    gathered, the whole table on each device. Rows of each example of a batch: see `_rows_of_batches`.
    """

    def dense(params, indices, axis, batch_dims=0, **kwargs):
        params, indices = tf.convert_to_tensor(params), tf.convert_to_tensor(indices)
        parts, dim = variables.parts_of_rows(params), tf.get_static_value(axis)
        if parts > 1 and batch_dims == 0 and dim == 0 and indices.shape.is_fully_defined():
            return vocabulary.lookup(params, indices, parts)
        batch_dims += indices.shape.rank if batch_dims < 0 else 0  # TensorFlow partitions no negative number
        whole = params.shape.is_fully_defined() and indices.shape.is_fully_defined()
        if batch_dims and whole and params.dtype.is_floating and dim is not None:
            dim = int(dim) % params.shape.rank
            take = functools.partial(gather, indices=indices, axis=dim, batch_dims=batch_dims, **kwargs)
            return _rows_of_batches(take, params, indices, dim, batch_dims)
        params = variables.dense_gradient(params) if params.dtype.is_floating else params
        return gather(params, indices, axis, batch_dims=batch_dims, **kwargs)

    return dense


def _rows_of_batches(take: Callable, params: tf.Tensor, indices: tf.Tensor, axis: int, batch_dims: int) -> tf.Tensor:
    """A gather with `batch_dims`. TensorFlow's gradient asks for sizes when the step runs, which DTensor refuses from two
    batch dims on; here they are known.
    """
    sizes, positions = list(params.shape), list(indices.shape[batch_dims:])
    batch, between, behind = sizes[:batch_dims], sizes[batch_dims:axis], sizes[axis + 1 :]
    batches, rows = int(np.prod(batch)), sizes[axis]

    def gradient(upstream):
        dims = list(range(upstream.shape.rank))
        found = dims[axis : axis + len(positions)]  # moved behind the batch dims, where one sum over rows is enough
        order = dims[:batch_dims] + found + dims[batch_dims:axis] + dims[axis + len(positions) :]
        values = upstream if order == dims else tf.transpose(upstream, order)
        firsts = tf.constant(np.arange(batches)[:, None] * rows, indices.dtype)
        numbers = tf.reshape(tf.reshape(indices, [batches, -1]) + firsts, [-1])
        values = tf.reshape(values, [numbers.shape[0], *between, *behind])
        sums = tf.math.unsorted_segment_sum(values, numbers, batches * rows)
        sums = tf.reshape(sums, [*batch, rows, *between, *behind])
        dims = list(range(len(sizes)))
        order = dims[:batch_dims] + dims[batch_dims + 1 : axis + 1] + [batch_dims] + dims[axis + 1 :]
        return sums if order == dims else tf.transpose(sums, order)

    return tf.custom_gradient(lambda value: (take(value), gradient))(params)


def einsum(einsum: Callable) -> Callable:
    """With two summed dims of which one input splits one and the other the other, over one axis, each device pairs shards
    that do not belong together. So the first summed dim can be split (heads, in an attention's output) and the others
    are gathered, as are dims of one input alone that are summed.
    """

    def one_split(inputs, equation, **kwargs):
        inputs = [tf.convert_to_tensor(value) for value in inputs]
        equation = _without_ellipsis(equation.replace(" ", ""), inputs)
        terms, _, result = equation.partition("->")
        terms = terms.split(",")
        if len(terms) == 2 and "." not in equation:
            summed = [label for label in terms[0] if label in terms[1] and label not in result]
            alone = [label for label in set(terms[0]) ^ set(terms[1]) if label not in result]
            whole = set(alone + summed[1:])
            inputs = [
                gathered(value, "einsum", lambda dim, term=term: term[dim] in whole) for value, term in zip(inputs, terms)
            ]
        return einsum(inputs, equation, **kwargs)

    return one_split


def _without_ellipsis(equation: str, inputs: Sequence[tf.Tensor]) -> str:
    """The equation with a label for each dim of "...", which TensorFlow does not partition; itself, if dims broadcast."""
    terms, _, result = equation.partition("->")
    free = [label for label in string.ascii_letters if label not in equation]
    sizes: dict[str, int] = {}
    spelled = []
    for term, value in zip(terms.split(","), inputs):
        dims = value.shape.rank - len(term.replace("...", ""))
        labels = "".join(free[len(free) - dims :]) if "..." in term and dims else ""
        first = term.find("...")
        if any(sizes.setdefault(label, value.shape[first + i]) != value.shape[first + i] for i, label in enumerate(labels)):
            return equation
        spelled.append((term.replace("...", labels), labels))
    longest = max((labels for _, labels in spelled), key=len)
    return ",".join(term for term, _ in spelled) + "->" + result.replace("...", longest)


def repeat(repeat: Callable) -> Callable:
    """With one number per element TensorFlow masks a larger tensor, whose size then depends on values; with one number for
    all it repeats by a number that is known in the step only, which would gather the tensor.
    """

    def looked_up(input, repeats, axis=None, **kwargs):
        counts = tf.get_static_value(tf.convert_to_tensor(repeats))
        input = tf.convert_to_tensor(input)
        if counts is None or not input.shape.is_fully_defined():
            return repeat(input, repeats, axis, **kwargs)
        input = tf.reshape(input, [-1]) if axis is None else input
        axis = (axis or 0) % input.shape.rank
        sizes = list(input.shape)
        if np.size(counts) > 1:
            return tf.gather(input, np.repeat(np.arange(sizes[axis]), counts), axis=axis)
        number = int(np.ravel(counts)[0])
        tiled = tf.tile(tf.expand_dims(input, axis + 1), [number if dim == axis + 1 else 1 for dim in range(len(sizes) + 1)])
        return tf.reshape(tiled, [*sizes[:axis], sizes[axis] * number, *sizes[axis + 1 :]])

    return looked_up


def pack(pack: Callable) -> Callable:
    """`tf.stack`: as a concatenation it is refused in fewer cases."""

    def concatenated(values, axis=0, name=None):
        values = [tf.convert_to_tensor(value) for value in values]
        if is_shape(values[0]) or any(not value.shape.rank for value in values):
            return pack(values, axis=axis, name=name)
        axis = axis % (values[0].shape.rank + 1)
        return tf.concat([tf.expand_dims(value, axis) for value in values], axis)

    return concatenated


def unpack(unpack: Callable) -> Callable:
    """`tf.unstack`: each device would take the rows of its own shard."""

    def gathered_rows(value, num, axis=0, name=None):
        value = tf.convert_to_tensor(value)
        value = gathered(value, "unpack", lambda dim: dim == axis % value.shape.rank)
        return unpack(value, num, axis=axis, name=name)

    return gathered_rows


def bincount(bincount: Callable) -> Callable:
    """`tf.math.bincount` with a fixed number of bins, whose result has no known size in TensorFlow. `CategoryEncoding`
    calls it.
    """

    def counted(
        arr, weights=None, minlength=None, maxlength=None, dtype=tf.int32, name=None, axis=None, binary_output=False
    ):
        if not isinstance(minlength, int) or minlength != maxlength:
            return bincount(arr, weights, minlength, maxlength, dtype, name, axis, binary_output)
        arr = tf.cast(arr, tf.int32)
        hot = tf.one_hot(arr, minlength, dtype=dtype if weights is None else tf.convert_to_tensor(weights).dtype)
        hot = hot if weights is None or binary_output else hot * tf.expand_dims(weights, -1)
        dims = [-2] if axis == -1 else list(range(arr.shape.rank))
        return tf.reduce_max(hot, dims) if binary_output else tf.reduce_sum(hot, dims)

    return counted


def inner(inner: Callable) -> Callable:
    """`keras.ops.inner`, which asks for the number of dims when the step runs."""

    def known(x1, x2):
        x1, x2 = tf.convert_to_tensor(x1), tf.convert_to_tensor(x2)
        if x1.dtype != x2.dtype or not x1.dtype.is_floating or not x1.shape.rank or not x2.shape.rank:
            return inner(x1, x2)
        return tf.tensordot(x1, x2, [[-1], [-1]])

    return known
