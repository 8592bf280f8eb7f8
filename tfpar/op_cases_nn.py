"""What the audit runs, continued: products, convolutions, images, linear algebra, loops, random numbers, losses."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from tfpar import op_cases as c

Case = c.Case


def _kernel(*shape: int) -> np.ndarray:
    return np.random.RandomState(len(shape)).randn(*shape)


def _einsum(equation: str, sizes: dict[str, int] | None = None) -> Case:
    sizes = sizes or {}
    terms = equation.replace("...", "xy").split("->")[0].split(",")
    inputs = tuple(_kernel(*(sizes.get(label, 4) for label in term)) for term in terms)
    return lambda *values: tf.einsum(equation, *values), inputs


def _layer(layer: str, *args, x: np.ndarray = c.X, **kwargs) -> Case:
    """A Keras layer without weights on one input."""
    return lambda value: getattr(keras.layers, layer)(*args, dtype="float64", **kwargs)(value), (x,)


def _loss(loss: str, y: np.ndarray = c.POSITIVE, x: np.ndarray = c.UNIT, **kwargs) -> Case:
    return lambda t, p: getattr(keras.losses, loss)(t, p, **kwargs), (y, x)


EQUATIONS = (
    "ab,bc->ac abc,cd->abd abc,bd->acd abc,cde->abde abcd,cde->abe abc,abc->abc aecd,abcd->acbe acbe,aecd->abcd "
    "btgkh,bskh->bgkts bgkts,bskh->btgkh bqc,bkc->bqk bqk,bkc->bqc ij->ji ij->i ii->i ij,kl->ijkl ij,ij-> ijk->ik "
    "bi,bj->bij bij,bj->bi ...a,ab->...b a...,ab->b... bnqk,bknh->bqnh"
)
PRODUCTS = {
    "matmul": (tf.matmul, (c.X, _kernel(4, 4))),
    "matmul of a transposed": (lambda x, y: tf.matmul(x, y, transpose_a=True), (c.X, c.Y)),
    "matmul by a transposed": (lambda x, y: tf.matmul(x, y, transpose_b=True), (c.X, c.Y)),
    "matmul of rank 3": (tf.matmul, (c.X3, c.Y3)),
    "matmul of rank 3, transposed": (lambda x, y: tf.matmul(x, y, transpose_b=True), (c.X3, c.Y3)),
    "matmul of rank 3 and 2": (tf.matmul, (c.X3, c.X[:4])),
    "matmul of rank 4": (tf.matmul, (c.X4, c.Y4)),
    "matmul of rank 4, transposed": (lambda x, y: tf.matmul(x, y, transpose_a=True), (c.X4, c.Y4)),
    "matvec": (tf.linalg.matvec, (c.X3, c.X[:4])),
    "keras dot": (keras.ops.dot, (c.X3, c.X[:4])),
    "keras inner": (c._forward(keras.ops.inner), (c.X, c.Y)),
    "keras outer": (keras.ops.outer, (c.V, c.W)),
    "keras vdot": (keras.ops.vdot, (c.X, c.Y)),
    "keras cross": (keras.ops.cross, (_kernel(4, 3), _kernel(4, 3) + 1)),
    "tensordot": (lambda x, y: tf.tensordot(x, y, 1), (c.X3, c.X[:4])),
    "tensordot of two dims": (lambda x, y: tf.tensordot(x, y, [[1, 2], [0, 1]]), (c.X3, c.Y3)),
    "dot layer": (lambda x, y: keras.layers.Dot(-1, normalize=True, dtype="float64")([x, y]), (c.X, c.Y)),
    "matmul with itself": (lambda x: tf.matmul(x, x, transpose_b=True), (c.X,)),
    "matmul with itself, transposed": (lambda x: tf.matmul(x, x, transpose_a=True), (c.X,)),
    "matmul of rank 3 with itself": (lambda x: tf.matmul(x, x, transpose_b=True), (c.X3,)),
    "correlate": (lambda x, y: keras.ops.correlate(x, y, "valid"), (c.V, c.W)),
    "dot_product_attention": (
        lambda q, k: keras.ops.dot_product_attention(q, k, k * 2),
        (c.X4, c.Y4),
    ),
    **{f"einsum {equation}": _einsum(equation) for equation in EQUATIONS.split()},
}


def _conv2d(stride: int | list[int] = 1, padding: str = "SAME", dilation: int = 1):
    return lambda x, k: tf.nn.conv2d(x, k, stride, padding, dilations=dilation)


K1, K2, K3 = _kernel(3, 4, 4), _kernel(3, 3, 4, 4), _kernel(3, 3, 3, 4, 4)
CONVOLUTIONS = {
    "conv1d": (lambda x, k: tf.nn.conv1d(x, k, 1, "SAME"), (c.LINE, K1)),
    "conv1d, time split": (lambda x, k: tf.nn.conv1d(x, k, 1, "SAME"), (c.EVEN_LINE, K1)),
    "conv1d causal": (lambda x, k: tf.nn.conv1d(tf.pad(x, [[0, 0], [2, 0], [0, 0]]), k, 1, "VALID"), (c.EVEN_LINE, K1)),
    "conv1d dilated": (lambda x, k: keras.ops.conv(x, k, 1, "same", dilation_rate=2), (c.LINE, K1)),
    "conv2d": (_conv2d(), (c.IMAGE, K2)),
    "conv2d valid": (_conv2d(padding="VALID"), (c.IMAGE, K2)),
    "conv2d strided": (_conv2d(2), (c.IMAGE, K2)),
    "conv2d dilated": (lambda x, k: keras.ops.conv(x, k, 1, "same", dilation_rate=2), (c.IMAGE, K2)),
    "conv2d 1x1": (_conv2d(), (c.IMAGE, _kernel(1, 1, 4, 4))),
    "conv2d of split images": (_conv2d(), (c.EVEN_IMAGE, K2)),
    "conv2d grouped": (lambda x, k: keras.ops.conv(x, k, 1, "same"), (c.IMAGE, _kernel(3, 3, 2, 4))),
    "conv2d of a small batch": (_conv2d(), (c.IMAGE[:1], K2)),
    "conv3d": (lambda x, k: tf.nn.conv3d(x, k, [1] * 5, "SAME"), (c.VOLUME, K3)),
    "conv3d strided": (lambda x, k: tf.nn.conv3d(x, k, [1, 2, 2, 2, 1], "VALID"), (c.VOLUME, K3)),
    "depthwise_conv2d": (lambda x, k: tf.nn.depthwise_conv2d(x, k, [1] * 4, "SAME"), (c.IMAGE, _kernel(3, 3, 4, 2))),
    "depthwise_conv1d": (lambda x, k: keras.ops.depthwise_conv(x, k, 1, "same"), (c.LINE, _kernel(3, 4, 1))),
    "separable_conv2d": (
        lambda x, k, p: keras.ops.separable_conv(x, k, p, 1, "same"),
        (c.IMAGE, _kernel(3, 3, 4, 1), _kernel(1, 1, 4, 4)),
    ),
    "conv1d_transpose": (lambda x, k: keras.ops.conv_transpose(x, k, 2, "same"), (c.LINE, K1)),
    "conv2d_transpose": (lambda x, k: keras.ops.conv_transpose(x, k, 2, "same"), (c.IMAGE, K2)),
    "conv3d_transpose": (lambda x, k: keras.ops.conv_transpose(x, k, 2, "same"), (c.VOLUME, K3)),
    "unfold": (lambda x: keras.ops.image.extract_patches(x, 2, 2), (c.EVEN_IMAGE,)),
    "extract_patches": (lambda x: tf.image.extract_patches(x, [1, 2, 2, 1], [1, 2, 2, 1], [1] * 4, "SAME"), (c.EVEN_IMAGE,)),
    "dilation2d": (lambda x, k: tf.nn.dilation2d(x, k, [1] * 4, "SAME", "NHWC", [1] * 4), (c.IMAGE, _kernel(3, 3, 4))),
    **{
        f"{kind}_pool of {name}{' with overlap' * (strides == 1)}": (
            lambda x, k=kind, s=strides: getattr(keras.ops, f"{k}_pool")(tf.cast(x, "float32"), 2, s, "same"),
            (x,),
        )
        for kind in ("max", "average")
        for name, x in {"lines": c.EVEN_LINE, "images": c.EVEN_IMAGE, "volumes": c.EVEN_VOLUME}.items()
        for strides in (1, 2)
    },
    "LRN": (lambda x: tf.cast(tf.nn.lrn(tf.cast(x, "float32")), "float64"), (c.EVEN_IMAGE,)),
    "fused batch norm": (
        lambda x, g: tf.compat.v1.nn.fused_batch_norm(tf.cast(x, "float32"), tf.cast(g, "float32"), [0.0] * 4)[0],
        (c.EVEN_IMAGE, c.W),
    ),
    "fused batch norm, inference": (
        lambda x, m: tf.cast(
            tf.compat.v1.nn.fused_batch_norm(
                *(tf.cast(x, "float32"), [1.0] * 4, [0.5] * 4, tf.cast(m, "float32"), [2.0] * 4), is_training=False
            )[0],
            "float64",
        ),
        (c.EVEN_IMAGE, c.W),
    ),
    "batch_normalization": (
        lambda x, m: keras.ops.batch_normalization(x, m, tf.abs(m) + 1, axis=-1),
        (c.EVEN_IMAGE, c.W),
    ),
}

IMAGES = {
    **{
        f"resize {method}": (lambda x, m=method: tf.cast(tf.image.resize(x, (8, 8), m), x.dtype), (c.EVEN_IMAGE,))
        for method in ("nearest", "bilinear", "bicubic")
    },
    **{
        f"resize {method}": (c._forward(lambda x, m=method: tf.image.resize(x, (8, 8), m)), (c.EVEN_IMAGE,))
        for method in ("area", "lanczos3")
    },
    "upsampling nearest": _layer("UpSampling2D", 2, x=c.EVEN_IMAGE),
    "upsampling bilinear": _layer("UpSampling2D", 2, interpolation="bilinear", x=c.EVEN_IMAGE),
    "upsampling of lines": _layer("UpSampling1D", 2, x=c.EVEN_LINE),
    "zero padding": _layer("ZeroPadding2D", 1, x=c.EVEN_IMAGE),
    "cropping": _layer("Cropping2D", 1, x=c.EVEN_IMAGE),
    "crop_and_resize": (
        lambda x: tf.image.crop_and_resize(tf.cast(x, "float32"), [[0.0, 0.0, 0.5, 0.5]] * 4, [0, 1, 2, 3], (2, 2)),
        (c.EVEN_IMAGE,),
    ),
    "flip_left_right": (tf.image.flip_left_right, (c.EVEN_IMAGE,)),
    "rgb_to_grayscale": (lambda x: tf.image.rgb_to_grayscale(x), (c._between(0, 1, 4, 4, 4, 3),)),
    "rgb_to_hsv": (tf.image.rgb_to_hsv, (c._between(0, 1, 4, 4, 4, 3),)),
    "adjust_contrast": (c._forward(lambda x: tf.image.adjust_contrast(x, 0.5)), (c.EVEN_IMAGE,)),
    "affine_transform": (
        lambda x: keras.ops.image.affine_transform(x, np.array([[1.0, 0, 1, 0, 1, 0, 0, 0]] * 4), "bilinear"),
        (c.EVEN_IMAGE,),
    ),
    "map_coordinates": (
        lambda x: keras.ops.image.map_coordinates(x, np.array([[0.5, 1.5, 2.5], [0.5, 2.0, 1.0]]), 1),
        (c.X,),
    ),
}

ALGEBRA = {
    "cholesky": (tf.linalg.cholesky, (c.DEFINITE,)),
    "inv": (tf.linalg.inv, (c.DEFINITE,)),
    "det": (tf.linalg.det, (c.DEFINITE,)),
    "slogdet": (lambda x: tf.linalg.slogdet(x)[1], (c.DEFINITE,)),
    "qr": (lambda x: tf.matmul(*tf.linalg.qr(x)), (c.DEFINITE,)),
    "svd": (lambda x: tf.linalg.svd(x, compute_uv=False), (c.DEFINITE,)),
    "eigh": (lambda x: tf.linalg.eigh(x)[0], (c.DEFINITE,)),
    "lu": (c._forward(lambda x: tf.linalg.lu(x)[0]), (c.DEFINITE,)),
    "solve": (tf.linalg.solve, (c.DEFINITE, c.X3)),
    "triangular_solve": (lambda a, b: tf.linalg.triangular_solve(a, b), (c.DEFINITE, c.X3)),
    "cholesky_solve": (lambda a, b: tf.linalg.cholesky_solve(a, b), (c.DEFINITE, c.X3)),
    "lstsq": (lambda a, b: tf.linalg.lstsq(a, b), (c.DEFINITE, c.X3)),
    "norm": (lambda x: tf.norm(x), (c.X,)),
    "norm of dim 1": (lambda x: tf.norm(x, axis=1), (c.X,)),
    "norm of a matrix": (lambda x: keras.ops.norm(x, "fro", axis=(1, 2)), (c.X3,)),
    "expm": (lambda x: tf.linalg.expm(x / 8), (c.DEFINITE,)),
    "logdet": (tf.linalg.logdet, (c.DEFINITE,)),
    "fft": (lambda x: tf.abs(tf.signal.fft(tf.cast(x, tf.complex128))), (c.X,)),
    "fft2d": (lambda x: tf.abs(tf.signal.fft2d(tf.cast(x, tf.complex128))), (c.X3,)),
    "rfft": (lambda x: tf.abs(tf.signal.rfft(x)), (c.X,)),
    "irfft": (lambda x: tf.signal.irfft(tf.signal.rfft(x)), (c.X,)),
    "stft": (lambda x: keras.ops.stft(x, 4, 2, 4, center=False), (np.tile(c.X, 2),)),
}


def _while(x):
    return tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 1.1 + 0.1 * x), (tf.constant(0), x))[1]


LOOPS = {
    "while_loop": (_while, (c.X,)),
    "cond": (lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: x * 2, lambda: x - 1), (c.X,)),
    "cond of products": (lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: tf.sin(x) * x, lambda: x * x), (c.X,)),
    "switch_case": (lambda x: tf.switch_case(tf.cast(tf.reduce_sum(x) > 0, "int32"), [lambda: x * 2, lambda: x]), (c.X,)),
    "keras cond": (lambda x: keras.ops.cond(keras.ops.any(x > 0), lambda: x * 2, lambda: x), (c.X,)),
    "map_fn": (lambda x: tf.map_fn(lambda row: tf.reduce_sum(row**2), x), (c.X,)),
    "keras map": (lambda x: keras.ops.map(lambda row: row**2, x), (c.X,)),
    "vectorized_map": (lambda x: tf.vectorized_map(lambda row: tf.reduce_sum(row) * row, x), (c.X,)),
    "scan": (lambda x: tf.scan(lambda total, row: total + row**2, x), (c.X,)),
    "keras scan": (lambda x: keras.ops.scan(lambda total, row: (total + row, total * row), x[0] * 0, x), (c.X,)),
    "keras associative_scan": (lambda x: tf.reshape(keras.ops.associative_scan(tf.add, x), (8, 4)), (c.X,)),
    "foldl": (lambda x: tf.foldl(lambda total, row: total + row**2, x), (c.X,)),
    "keras fori_loop": (lambda x: keras.ops.fori_loop(0, 3, lambda i, y: y * 1.1 + x, x), (c.X,)),
    "TensorArray": (lambda x: tf.TensorArray(x.dtype, 8).unstack(x).stack(), (c.X,)),
    "custom_gradient": (lambda x: tf.custom_gradient(lambda y: (y**2, lambda g: g * y))(x), (c.X,)),
    "recompute_grad": (lambda x: tf.recompute_grad(lambda y: tf.tanh(y) ** 2)(x), (c.X,)),
}

RANDOM = {  # only the range of the numbers is compared: they differ per shard
    "stateless uniform": (lambda x: tf.floor(tf.random.stateless_uniform((8, 4), [1, 2], dtype=x.dtype)) + x, (c.X,)),
    "stateless normal": (lambda x: tf.random.stateless_normal((8, 4), [1, 2], dtype=x.dtype) * 0 + x, (c.X,)),
    "stateless truncated normal": (
        lambda x: tf.cast(tf.abs(tf.random.stateless_truncated_normal(x.shape, [1, 2])) > 2.01, x.dtype) + x,
        (c.X,),
    ),
    "stateless categorical": (lambda x: tf.random.stateless_categorical(x, 3, [1, 2]) // 4, (c.X,)),
    "stateless integers": (
        lambda x: tf.cast(tf.random.stateless_uniform((8, 4), [1, 2], 0, 5, "int32") // 5, x.dtype) + x,
        (c.X,),
    ),
    "dropout at rate 0": (lambda x: tf.nn.experimental.stateless_dropout(x, 1e-12, [1, 2]), (c.X,)),
    "stateless gamma": (lambda x: tf.random.stateless_gamma((8, 4), [1, 2], 1.5, dtype=x.dtype) * 0 + x, (c.X,)),
    "stateless binomial": (
        lambda x: tf.cast(tf.random.stateless_binomial((8, 4), [1, 2], [4.0] * 4, [0.5] * 4) // 5, x.dtype) + x,
        (c.X,),
    ),
}

PROBABILITIES = np.exp(c.X) / np.exp(c.X).sum(1, keepdims=True)
LOSSES = {
    **{
        name: _loss(name)
        for name in [
            "mean_squared_error",
            "mean_absolute_error",
            "mean_absolute_percentage_error",
            "mean_squared_logarithmic_error",
            "cosine_similarity",
            "huber",
            "log_cosh",
            "hinge",
            "squared_hinge",
            "categorical_hinge",
            "kl_divergence",
            "poisson",
        ]
    },
    "binary_crossentropy": _loss("binary_crossentropy", c._ids(2, 8, 4).astype("float64"), np.abs(c.UNIT)),
    "binary_focal_crossentropy": _loss("binary_focal_crossentropy", c._ids(2, 8, 4).astype("float64"), np.abs(c.UNIT)),
    "categorical_crossentropy": _loss("categorical_crossentropy", PROBABILITIES, np.abs(c.UNIT)),
    "categorical_crossentropy of logits": _loss("categorical_crossentropy", PROBABILITIES, c.X, from_logits=True),
    "categorical_focal_crossentropy": _loss("categorical_focal_crossentropy", PROBABILITIES, np.abs(c.UNIT)),
    "sparse_categorical_crossentropy": _loss("sparse_categorical_crossentropy", c.LABELS, PROBABILITIES),
    "sparse_categorical_crossentropy, one class ignored": _loss(
        "sparse_categorical_crossentropy", c.LABELS, c.X, from_logits=True, ignore_class=1
    ),
    "ctc": (lambda y, x: keras.losses.ctc(y, tf.nn.softmax(x)), (c._ids(3, 4, 2) + 1, c.X3)),
    "dice": _loss("dice"),
    "tversky": _loss("tversky"),
    "circle": _loss("circle", c.LABELS, c.X / np.linalg.norm(c.X, axis=1, keepdims=True)),
    "category encoding multi_hot": _layer("CategoryEncoding", 8, output_mode="multi_hot", x=c.MATRIX_IDS),
    "category encoding one_hot": _layer("CategoryEncoding", 8, output_mode="one_hot", x=c.IDS),
    "category encoding count": _layer("CategoryEncoding", 8, output_mode="count", x=c.MATRIX_IDS),
    "hashing": (lambda x: keras.layers.Hashing(8, dtype="int32")(x), (c.MATRIX_IDS,)),
    "discretization": _layer("Discretization", bin_boundaries=[-1.0, 0.0, 1.0], x=c.X),
    "integer lookup": _layer("IntegerLookup", vocabulary=[1, 2, 3], x=c.MATRIX_IDS),
    "group normalization": (
        lambda x: keras.layers.GroupNormalization(2, center=False, scale=False, dtype="float64")(x),
        (c.EVEN_IMAGE,),
    ),
    "unit normalization": _layer("UnitNormalization"),
    "global pooling": _layer("GlobalMaxPooling2D", x=c.EVEN_IMAGE),
    "adaptive pooling": _layer("AdaptiveAveragePooling2D", 2, x=c.EVEN_IMAGE),
    "repeat vector": _layer("RepeatVector", 3),
    "permute": _layer("Permute", (2, 1), x=c.X3),
    "pixel_shuffle": (lambda x: tf.nn.depth_to_space(x, 2, "NHWC"), (c.EVEN_IMAGE,)),
    "normalization": _layer("Normalization", mean=[0.0, 1, 2, 3], variance=[1.0, 2, 3, 4]),
}

CASES: dict[str, Case] = PRODUCTS | CONVOLUTIONS | IMAGES | ALGEBRA | LOOPS | RANDOM | LOSSES
