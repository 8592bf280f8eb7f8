"""What the audit runs: the TensorFlow operations that Keras emits, each on small concrete inputs.

`CASES` is a table: name -> (function, inputs). A dim of an input can be split where the mesh's axes divide its size, so
the sizes decide which dims are tried: 8 and 4 are split, 5 and 3 are not. Inputs of floating dtype get gradients too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

_RNG = np.random.RandomState(0)


def _normal(*shape: int) -> np.ndarray:
    return _RNG.randn(*shape)


def _between(low: float, high: float, *shape: int) -> np.ndarray:
    return _RNG.uniform(low, high, shape)


def _ids(size: int, *shape: int) -> np.ndarray:
    return _RNG.randint(0, size, shape).astype("int32")


def _definite(*shape: int) -> np.ndarray:
    x = _normal(*shape)
    return x @ np.swapaxes(x, -1, -2) + 4 * np.eye(shape[-1])


V, W, X, Y = _normal(8), _normal(4), _normal(8, 4), _normal(8, 4)
COLUMN, POSITIVE, UNIT = _normal(8, 1), _between(0.3, 2.0, 8, 4), _between(-0.9, 0.9, 8, 4)
X3, Y3, X4, Y4 = _normal(4, 4, 4), _normal(4, 4, 4), _normal(4, 4, 4, 4), _normal(4, 4, 4, 4)
IDS, LABELS, MATRIX_IDS = _ids(4, 8), _ids(4, 8), _ids(8, 4, 4)
FLAGS, OTHER_FLAGS = X > 0, Y > 0
LINE, IMAGE, VOLUME = _normal(4, 5, 4), _normal(4, 5, 5, 4), _normal(4, 3, 3, 3, 4)
EVEN_LINE, EVEN_IMAGE, EVEN_VOLUME = _normal(4, 8, 4), _normal(4, 4, 4, 4), _normal(4, 4, 4, 4, 4)
DEFINITE = _definite(4, 4, 4)
Case = tuple[Callable[..., Any], tuple[Any, ...]]


def _each(function: Callable[..., Any], names: str, *inputs: Any) -> dict[str, Case]:
    """One case per name: `function(name)` is the operation."""
    return {name: (function(name), inputs) for name in names.split()}


def _math(name: str) -> Callable[..., Any]:
    return getattr(tf.math, name)


def _nn(name: str) -> Callable[..., Any]:
    return getattr(tf.nn, name)


def _keras(name: str) -> Callable[..., Any]:
    return getattr(keras.ops, name)


def _of(inputs: tuple[Any, ...], **functions: Callable[..., Any]) -> dict[str, Case]:
    """Cases that share their inputs."""
    return {name: (function, inputs) for name, function in functions.items()}


def _forward(function: Callable[..., Any]) -> Callable[..., Any]:
    """An operation without a gradient."""
    return lambda *inputs: function(*map(tf.stop_gradient, inputs))


ELEMENTWISE = {
    **_each(_math, "abs ceil cos cosh erf erfc exp expm1 floor negative rint round sigmoid sign sin sinh", X),
    **_each(_math, "softplus square tan tanh atan asinh is_finite is_inf is_nan", X),
    **_each(_math, "log log1p sqrt rsqrt reciprocal lgamma digamma bessel_i0e bessel_i1e", POSITIVE),
    **_each(_math, "acos asin atanh erfinv ndtri", np.abs(UNIT) * 0.9 + 0.05),
    "acosh": (tf.math.acosh, (POSITIVE + 1,)),
    **_each(_nn, "elu gelu leaky_relu relu relu6 selu silu softsign crelu", X),
    **_each(_keras, "celu glu hard_shrink hard_sigmoid hard_silu hard_tanh log_sigmoid soft_shrink", X),
    **_each(_keras, "sparse_plus sparse_sigmoid squareplus tanh_shrink", X),
    **_of(
        (X,),
        clip=lambda x: tf.clip_by_value(x, -0.5, 0.5),
        clip_by_norm=lambda x: tf.clip_by_norm(x, 1.0),
        clip_by_global_norm=lambda x: tf.clip_by_global_norm([x, x**2], 1.0)[0],
        cast=lambda x: tf.cast(tf.cast(x, tf.float32), tf.float64),
        threshold=lambda x: keras.ops.threshold(x, 0.5, 0.25),
        nan_to_num=lambda x: keras.ops.nan_to_num(tf.where(x > 1, tf.constant(np.nan, x.dtype), x)),
        stop_gradient=lambda x: tf.stop_gradient(x) * x,
        zeros_like=lambda x: tf.zeros_like(x) + tf.ones_like(x) * x,
        full_like=lambda x: keras.ops.full_like(x, 2.0) * x,
        polygamma=lambda x: tf.math.polygamma(tf.constant(1.0, tf.float64), tf.abs(x) + 1),
        check_numerics=lambda x: tf.debugging.check_numerics(x, "x"),
        fake_quant=lambda x: tf.cast(tf.quantization.fake_quant_with_min_max_vars(tf.cast(x, tf.float32), -1, 1), x.dtype),
        complex=lambda x: tf.abs(tf.complex(x, x * 2)) + tf.math.real(tf.math.conj(tf.complex(x, x))),
    ),
}

BINARY = {
    **_each(_math, "add multiply divide_no_nan subtract", X, Y),
    **_each(_math, "atan2 divide floordiv floormod maximum minimum squared_difference", X, POSITIVE),
    **_each(_math, "pow xlogy xdivy xlog1py nextafter igamma igammac", POSITIVE, POSITIVE[::-1].copy()),
    **_each(_math, "equal greater less not_equal", X, Y),
    **_each(_math, "logical_and logical_or logical_xor", FLAGS, OTHER_FLAGS),
    "logical_not": (tf.math.logical_not, (FLAGS,)),
    "add a row": (tf.add, (X, W)),
    "multiply by a row": (tf.multiply, (X, W)),
    "multiply by a column": (tf.multiply, (X, COLUMN)),
    "multiply a row by a column": (tf.multiply, (W, COLUMN)),
    "multiply by a scalar": (tf.multiply, (X, np.float64(2.5))),
    "add of rank 3 and 2": (tf.add, (X3, W[None] * COLUMN[:4])),
    "divide by a row": (tf.divide, (X, W)),
    "where": (lambda c, x, y: tf.where(c, x, y), (FLAGS, X, Y)),
    "where with a row": (lambda c, x: tf.where(c, x, 0.0), (FLAGS[0], X)),
    "where with a column": (lambda c, x: tf.where(c, x, 0.0), (FLAGS[:, :1], X)),
    "add_n": (lambda x, y: tf.add_n([x, y, x]), (X, Y)),
    "bitwise": (lambda x, y: tf.bitwise.bitwise_xor(x, tf.bitwise.left_shift(y, 1)), (IDS, LABELS)),
    "logaddexp": (keras.ops.logaddexp, (X, Y)),
    "hypot": (keras.ops.hypot, (X, Y)),
    "betainc": (lambda x, y: tf.math.betainc(x, y, tf.sigmoid(x)), (POSITIVE, POSITIVE[::-1].copy())),
    "bias_add": (tf.nn.bias_add, (X3, W)),
    "bias_add of rank 2": (tf.nn.bias_add, (X, W)),
    "bias_add channels first": (lambda x, b: tf.nn.bias_add(x, b, "NCHW"), (X4, W)),
}


def _reductions(x: np.ndarray, dims: dict[str, Any]) -> dict[str, Case]:
    names = ["sum", "mean", "max", "min", "prod", "logsumexp", "variance", "std", "euclidean_norm"]
    return {
        f"reduce_{name} of {label}": (lambda x, n=name, d=dim: getattr(tf.math, f"reduce_{n}")(x, d), (x,))
        for name in names
        for label, dim in dims.items()
    }


REDUCTIONS = {
    **_reductions(X, {"dim 0": 0, "dim 1": 1, "all dims": None}),
    **_of(
        (X3,),
        **{
            "reduce_sum of dims 0 and 2": lambda x: tf.reduce_sum(x, [0, 2]),
            "reduce_sum keepdims": lambda x: tf.reduce_sum(x, 1, keepdims=True),
            "reduce_max keepdims": lambda x: tf.reduce_max(x, -1, keepdims=True) - x,
            "moments of dims 0 and 1": lambda x: tf.nn.moments(x, [0, 1]),
            "moments keepdims": lambda x: tf.nn.moments(x, [-1], keepdims=True),
            "l2_normalize": lambda x: tf.math.l2_normalize(x, -1),
            "l2_loss": lambda x: tf.nn.l2_loss(x),
            "layer_norm": lambda x: keras.ops.layer_normalization(x, axis=-1),
            "rms_norm": lambda x: keras.ops.rms_normalization(x, axis=-1),
            "softmax": lambda x: tf.nn.softmax(x),
            "softmax of dim 1": lambda x: tf.nn.softmax(x, 1),
            "softmax of two dims": lambda x: keras.ops.softmax(x, (1, 2)),
            "log_softmax": lambda x: tf.nn.log_softmax(x),
            "log_softmax of dim 0": lambda x: tf.nn.log_softmax(x, 0),
            "sparsemax": lambda x: keras.ops.sparsemax(x),
            "weighted_moments": lambda x: tf.nn.weighted_moments(x, [0, 1], tf.abs(x) + 0.1),
            "median": lambda x: keras.ops.median(x, 1),
            "quantile": lambda x: keras.ops.quantile(x, 0.3, 1),
            "average": lambda x: keras.ops.average(x, 1, weights=np.arange(1.0, 5.0)),
            "diff": lambda x: keras.ops.diff(x, axis=1),
            "trapezoid": lambda x: keras.ops.trapezoid(x, axis=1),
        },
    ),
    **{
        f"reduce_{name} of dim {dim}": (lambda x, n=name, d=dim: getattr(tf.math, f"reduce_{n}")(x, d), (FLAGS,))
        for name in ("any", "all")
        for dim in (0, 1, None)
    },
    "reduce_sum of integers": (lambda x: tf.reduce_sum(x, 0), (MATRIX_IDS,)),
    "reduce_max of integers": (lambda x: tf.reduce_max(x, 1), (MATRIX_IDS,)),
    "count_nonzero": (lambda x: tf.math.count_nonzero(x, 1), (X,)),
    "confusion_matrix": (lambda x, y: tf.math.confusion_matrix(x, y, 4), (IDS, LABELS)),
    "in_top_k": (lambda y, x: keras.ops.in_top_k(y, tf.cast(x, "float32"), 2), (LABELS, X)),
    "bincount": (lambda x: tf.math.bincount(x, minlength=8, maxlength=8), (IDS,)),
    "bincount per row": (lambda x: keras.ops.bincount(x, minlength=8), (MATRIX_IDS,)),
    "bincount with weights": (_forward(lambda x, w: keras.ops.bincount(x, weights=w, minlength=4)), (IDS, V)),
    "multi_hot": (lambda x: keras.ops.multi_hot(x, 8), (MATRIX_IDS,)),
    "histogram": (lambda x: tf.histogram_fixed_width(x, [-2.0, 2.0], 4), (X,)),
}


def _along(names: str) -> dict[str, Case]:
    """Cases of functions that take a dim, over each dim of a matrix."""
    functions = {name: getattr(tf.math, name, None) or getattr(tf, name) for name in names.split()}
    return {
        f"{name} of dim {dim}": (lambda x, f=function, d=dim: f(x, axis=d), (X,))
        for name, function in functions.items()
        for dim in (0, 1)
    }


ORDER = {
    **_along("argmax argmin sort argsort cumsum cumprod cumulative_logsumexp"),
    **_of(
        (X,),
        **{
            "sort descending": lambda x: tf.sort(x, 1, "DESCENDING"),
            "cumsum exclusive, reversed": lambda x: tf.cumsum(x, 0, exclusive=True, reverse=True),
            "top_k": lambda x: tf.math.top_k(x, 2),
            "approx_max_k": lambda x: keras.ops.top_k(x, 2, sorted=False)[0],
            "reverse dim 0": lambda x: tf.reverse(x, [0]),
            "reverse dim 1": lambda x: tf.reverse(x, [1]),
            "flip both": lambda x: keras.ops.flip(x),
            "roll dim 0": lambda x: tf.roll(x, 1, 0),
            "roll dim 1": lambda x: tf.roll(x, 1, 1),
            "roll both": lambda x: tf.roll(x, [1, 2], [0, 1]),
            "rot90": lambda x: keras.ops.rot90(x),
        },
    ),
    "reverse_sequence": (lambda x, n: tf.reverse_sequence(x, n, seq_axis=1), (X3, np.array([1, 2, 3, 4], "int32"))),
    "searchsorted": (lambda x, v: tf.searchsorted(tf.sort(x, -1), v), (X, Y)),
    "digitize": (lambda x: keras.ops.digitize(x, np.array([-1.0, 0.0, 1.0])), (X,)),
    "random_shuffle": (_forward(lambda x: tf.sort(tf.random.experimental.stateless_shuffle(x, [1, 2]))), (V,)),
}

STRUCTURE = {
    **_of(
        (X,),
        **{
            "identity": tf.identity,
            "reshape apart": lambda x: tf.reshape(x, (8, 2, 2)),
            "reshape dim 0 apart": lambda x: tf.reshape(x, (2, 4, 4)),
            "reshape dim 0 apart by -1": lambda x: tf.reshape(x, (-1, 4, 4)),
            "reshape to a line": lambda x: tf.reshape(x, (-1,)),
            "reshape across dims": lambda x: tf.reshape(x, (4, 8)),
            "transpose": tf.transpose,
            "expand_dims 0": lambda x: tf.expand_dims(x, 0),
            "expand_dims 1": lambda x: tf.expand_dims(x, 1),
            "expand_dims -1": lambda x: tf.expand_dims(x, -1),
            "new axis": lambda x: x[:, None] - x[None],
            "concat dim 0": lambda x: tf.concat([x, x**2], 0),
            "concat dim 1": lambda x: tf.concat([x, x**2], 1),
            "concat dim -1": lambda x: tf.concat([x, x**2], -1),
            "concat with a constant": lambda x: tf.concat([tf.ones((8, 2), x.dtype), x], 1),
            "stack dim 0": lambda x: tf.stack([x, x**2], 0),
            "stack dim 1": lambda x: tf.stack([x, x**2], 1),
            "stack dim 2": lambda x: tf.stack([x, x**2], 2),
            "unstack dim 0": lambda x: tf.unstack(x, axis=0)[2:4],
            "unstack dim 1": lambda x: tf.unstack(x, axis=1),
            "split dim 0": lambda x: tf.split(x, 2, 0),
            "split dim 1": lambda x: tf.split(x, 2, 1),
            "split dim 1 unevenly": lambda x: tf.split(x, [1, 3], 1),
            "split dim 0 unevenly": lambda x: keras.ops.split(x, [2, 5], 0),
            "keras split": lambda x: keras.ops.split(x, 2, -1),
            "slice dim 0": lambda x: tf.slice(x, [2, 0], [4, 4]),
            "slice dim 1": lambda x: x[:, 1:3],
            "slice one row": lambda x: x[3],
            "slice one column": lambda x: x[:, 1],
            "slice the last row": lambda x: x[-1:],
            "slice every other": lambda x: x[::2, 1::2],
            "slice backwards, dim 0": lambda x: x[::-1],
            "slice backwards, dim 1": lambda x: x[:, ::-1],
            "slice at a tensor": lambda x: x[: tf.reduce_sum(tf.ones((), "int32")) + 3],
            "dynamic slice": lambda x: keras.ops.slice(x, [2, 1], [3, 2]),
            "slice_update": _forward(lambda x: keras.ops.slice_update(x, [2, 1], x[:2, :2] * 2)),
            "pad dim 0": lambda x: tf.pad(x, [[1, 1], [0, 0]]),
            "pad dim 1": lambda x: tf.pad(x, [[0, 0], [1, 2]]),
            "pad with a value": lambda x: tf.pad(x, [[1, 0], [0, 1]], constant_values=3.0),
            "pad reflect": lambda x: tf.pad(x, [[1, 1], [1, 1]], "REFLECT"),
            "pad reflect dim 1": lambda x: tf.pad(x, [[0, 0], [1, 1]], "REFLECT"),
            "pad symmetric": lambda x: tf.pad(x, [[1, 1], [1, 1]], "SYMMETRIC"),
            "tile dim 0": lambda x: tf.tile(x, [2, 1]),
            "tile dim 1": lambda x: tf.tile(x, [1, 2]),
            "tile both": lambda x: tf.tile(x, [2, 3]),
            "repeat dim 0": lambda x: tf.repeat(x, 2, 0),
            "repeat dim 1": lambda x: tf.repeat(x, 2, 1),
            "repeat unevenly": lambda x: tf.repeat(x, [1, 2, 0, 3], 1),
            "broadcast_to": lambda x: tf.broadcast_to(x, (3, 8, 4)),
            "broadcast_to from a row": lambda x: tf.broadcast_to(x[:1], (8, 4)),
            "shape": lambda x: tf.cast(tf.shape(x), x.dtype) * tf.cast(tf.size(x), x.dtype),
            "meshgrid": lambda x: keras.ops.meshgrid(x[0], x[1]),
            "tril": lambda x: keras.ops.tril(x),
            "eye": lambda x: x @ tf.eye(4, dtype=x.dtype),
            "diag": lambda x: tf.linalg.diag(x),
            "one_hot of values": lambda x: tf.one_hot(tf.argmax(x, 1), 4, dtype=x.dtype) * x,
            "range": lambda x: x + tf.range(4, dtype=x.dtype),
            "unfold windows": lambda x: keras.ops.extract_sequences(x, 2, 1),
        },
    ),
    **_of(
        (X4,),
        **{
            "transpose of rank 4": lambda x: tf.transpose(x, (0, 2, 1, 3)),
            "reshape heads together": lambda x: tf.reshape(x, (4, 4, 16)),
            "reshape batch and time": lambda x: tf.reshape(x, (16, 4, 4)),
            "reshape flat": lambda x: tf.reshape(x, (4, -1)),
            "space_to_depth": lambda x: tf.nn.space_to_depth(x, 2),
            "depth_to_space": lambda x: tf.nn.depth_to_space(x, 2),
            "space_to_batch": lambda x: tf.space_to_batch(x, [2, 2], [[0, 0], [0, 0]]),
            "batch_to_space": lambda x: tf.batch_to_space(x, [2, 2], [[0, 0], [0, 0]]),
            "swapaxes": lambda x: keras.ops.swapaxes(x, 1, 3),
            "split of rank 4": lambda x: tf.split(x, 2, 2),
            "cyclic shift": lambda x: tf.roll(x, [-1, -1], [1, 2]),
        },
    ),
    "squeeze": (lambda x: tf.squeeze(x, 1), (COLUMN,)),
    "squeeze in the middle": (lambda x: tf.squeeze(x, [1]), (X[:, None],)),
    "concat of two": (lambda x, y: tf.concat([x, y], 1), (X, Y)),
    "concat of two, dim 0": (lambda x, y: tf.concat([x, y], 0), (X, Y)),
    "stack of two": (lambda x, y: tf.stack([x, y], 1), (X, Y)),
    "tril of rank 3": (lambda x: tf.linalg.band_part(x, -1, 0), (X3,)),
    "diag_part": (tf.linalg.diag_part, (X3,)),
    "set_diag": (lambda x, y: tf.linalg.set_diag(x, y), (X3, X[:4])),
    "trace": (tf.linalg.trace, (X3,)),
}

INDEXING = {
    "gather rows": (lambda x, i: tf.gather(x, i), (X, MATRIX_IDS)),
    "gather columns": (lambda x, i: tf.gather(x, i, axis=1), (X, IDS)),
    "gather with batch_dims": (lambda x, i: tf.gather(x, i, axis=1, batch_dims=1), (X3, _ids(4, 4, 2))),
    "gather of rank 3, axis 1": (lambda x, i: tf.gather(x, i, axis=1), (X3, _ids(4, 4))),
    "take_along_axis": (lambda x, i: keras.ops.take_along_axis(x, i, 1), (X, _ids(4, 8, 2))),
    "embedding lookup": (lambda t, i: tf.nn.embedding_lookup(t, i), (X, MATRIX_IDS)),
    "gather_nd": (lambda x, i: tf.gather_nd(x, i), (X, _ids(4, 4, 2))),
    "gather_nd of rows": (lambda x, i: tf.gather_nd(x, i[:, None]), (X, IDS)),
    "gather_nd with batch_dims": (lambda x, i: tf.gather_nd(x, i[:, None], batch_dims=1), (X, LABELS)),
    "scatter_nd": (lambda i, x: tf.scatter_nd(i[:, None], x, (6, 4)), (IDS, X)),
    "tensor_scatter_nd_update": (lambda x, y: tf.tensor_scatter_nd_update(x, [[5], [0]], y[:2]), (X, Y)),
    "tensor_scatter_nd_add": (lambda x, i, y: tf.tensor_scatter_nd_add(x, i[:, None], y), (X, IDS, Y)),
    "tensor_scatter_nd_sub": (lambda x, i, y: tf.tensor_scatter_nd_sub(x, i[:, None], y), (X, IDS, Y)),
    "tensor_scatter_nd_max": (lambda x, i, y: tf.tensor_scatter_nd_max(x, i[:, None], y), (X, IDS, Y)),
    "tensor_scatter_nd_min": (lambda x, i, y: tf.tensor_scatter_nd_min(x, i[:, None], y), (X, IDS, Y)),
    "one_hot": (lambda i: tf.one_hot(i, 4), (IDS,)),
    "one_hot of rank 2": (lambda i: tf.one_hot(i, 8), (MATRIX_IDS,)),
    "segment_sum": (lambda x, i: tf.math.segment_sum(x, tf.sort(i)), (X, np.array([0, 0, 1, 1, 2, 3, 3, 3], "int32"))),
    "unsorted_segment_sum": (lambda x, i: tf.math.unsorted_segment_sum(x, i, 4), (X, IDS)),
    "unsorted_segment_max": (lambda x, i: tf.math.unsorted_segment_max(x, i, 4), (X, np.arange(8, dtype="int32") % 4)),
    "unsorted_segment_mean": (lambda x, i: tf.math.unsorted_segment_mean(x, i, 4), (X, IDS)),
    "keras segment_sum": (lambda x, i: keras.ops.segment_sum(x, i, 4), (X, IDS)),
    "keras segment_max": (lambda x, i: keras.ops.segment_max(x, i, 4), (X, np.arange(8, dtype="int32") % 4)),
    "dynamic_stitch": (lambda x, y: tf.dynamic_stitch([np.arange(8), np.arange(8, 16)], [x, y]), (X, Y)),
    "sparse cross-entropy": (
        lambda y, x: tf.nn.sparse_softmax_cross_entropy_with_logits(y, x),
        (LABELS, X),
    ),
    "sparse cross-entropy of rank 3": (
        lambda y, x: tf.nn.sparse_softmax_cross_entropy_with_logits(y, x),
        (_ids(4, 4, 4), X3),
    ),
    "softmax cross-entropy": (
        lambda y, x: tf.nn.softmax_cross_entropy_with_logits(tf.nn.softmax(y), x),
        (Y, X),
    ),
    "sigmoid cross-entropy": (lambda y, x: tf.nn.sigmoid_cross_entropy_with_logits(tf.sigmoid(y), x), (Y, X)),
    "weighted cross-entropy": (lambda y, x: tf.nn.weighted_cross_entropy_with_logits(tf.sigmoid(y), x, 2.0), (Y, X)),
}

CASES: dict[str, Case] = ELEMENTWISE | BINARY | REDUCTIONS | ORDER | STRUCTURE | INDEXING
