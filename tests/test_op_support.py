"""Operations that DTensor partitions wrongly, or not at all, give one device's value and gradient in a step."""

import itertools
import warnings

import keras
import numpy as np
import parity
import pytest
import tensorflow as tf
from keras import layers
from tensorflow.experimental import dtensor

import tfpar
from tfpar import input as input_lib, op_gathers, op_support, op_warnings, transfer, variables

RNG = np.random.RandomState(0)
X, LABELS = RNG.randn(8, 4), np.arange(8, dtype="int32") % 4

OPERATIONS = {
    "sparse cross-entropy": lambda x: tf.nn.sparse_softmax_cross_entropy_with_logits(LABELS, x),
    "keras sparse cross-entropy": lambda x: keras.losses.sparse_categorical_crossentropy(LABELS, x, from_logits=True),
    "new axis": lambda x: x[:, None] - x[None],
    "new axes with slices": lambda x: x[..., None, 1:3] + x[:, None, 0, None, None],
    "new axis with a reversal": lambda x: x[::-1, None],
    "part of a reversal": lambda x: 0.7 * x + 0.3 * x[::-1],
    "sort": lambda x: tf.sort(x, 1),
    "gather_nd by row": lambda x: tf.gather_nd(x, np.stack([np.arange(8), LABELS], 1)),
    "tensor_scatter_nd_update": lambda x: tf.tensor_scatter_nd_update(x, [[5], [0]], 2.0 * x[:2]),
    "tensor_scatter_nd_add": lambda x: tf.tensor_scatter_nd_add(x, [[7], [7]], x[2:4] ** 2),
    "gather_nd at a grid of places": lambda x: tf.gather_nd(x, GRID),
    "scatter_nd to a grid of places": lambda x: tf.scatter_nd(GRID, tf.reshape(x, (2, 2, 2, 2, 2)), (8, 4)),
    "tensor_scatter_nd_add to a grid of places": lambda x: tf.tensor_scatter_nd_add(
        x, GRID, tf.reshape(x**2, (2, 2, 2, 2, 2))
    ),
    "top_k": lambda x: tf.math.top_k(x, 2).values,
    "reversed rows": lambda x: x[::-1],
    "reversed columns": lambda x: x[:, ::-1],
    "scatter_nd": lambda x: tf.scatter_nd(tf.constant(LABELS[:, None], tf.int64), x, [6, 4]),
    "gather_nd": lambda x: tf.gather_nd(x, [[0], [5]]),
    "gather in two batch dims": lambda x: tf.gather(tf.reshape(x, (4, 2, 4)), PICKS, batch_dims=2),
    "gather of a later dim": lambda x: tf.gather(tf.reshape(x, (4, 2, 2, 2)), PICKS[:, 0] % 2, axis=3, batch_dims=1),
    "gather in all but the last dim": lambda x: tf.gather(x, PICKS[:, 0].repeat(2, 0), batch_dims=-1),
    "cumprod": lambda x: tf.math.cumprod(x, 1),
    "softsign": lambda x: tf.nn.softsign(x),
    "stack": lambda x: moved(tf.stack([x, x**2, x**3])[None]),
    "concatenation": lambda x: split_last(tf.concat([x, x**2], -1)),
    "split of rows": lambda x: tf.concat(tf.split(x, 2), 1),
    "split of columns": lambda x: tf.split(x, [1, 3], 1)[1],
    "padded rows": lambda x: tf.pad(x, [[1, 1], [0, 0]]),
    "padded columns": lambda x: tf.pad(x, [[0, 0], [1, 2]], constant_values=2.0),
    "reflected": lambda x: tf.pad(x, [[1, 1], [1, 1]], "REFLECT"),
    "tiled": lambda x: tf.tile(x, [2, 3]),
    "rolled": lambda x: tf.roll(x, [1, 2], [0, 1]),
    "repeated": lambda x: tf.repeat(tf.repeat(x, 2, 0), [1, 2, 0, 3], 1),
    "product with itself": lambda x: tf.matmul(x, x, transpose_b=True),
    "sort, split": lambda x: split_last(tf.sort(x, 1)),
    "rows of rank 3": lambda x: tf.transpose(tf.reshape(x, (4, 2, 4)), (1, 0, 2))[1] @ MATRIX,
    "squeeze": lambda x: split_last(tf.squeeze(x[:, None, :, None], [1, -1]) * tf.squeeze(x[:, None])),
    "depthwise convolution of lines": lambda x: split_first(
        keras.ops.depthwise_conv(tf.reshape(x, (4, 4, 2)), KERNEL[:, 0, :, :2].reshape(2, 2, 1), 1, "same")
    ),
    "slice of rows": lambda x: split_last(tf.slice(x, [2, 0], [4, -1]))[None],
    "slice from a computed place": lambda x: tf.reshape(
        keras.ops.slice(tf.reshape(x, (4, 2, 4)), (0, 0, keras.ops.cumsum(keras.ops.array([1, 1]))[1]), (4, 2, 2)),
        (4, 2, 2, 1),
    ),
    "einsum of all dims": lambda x: tf.einsum("...a,ab->...b", tf.reshape(x, (4, 2, 4)), MATRIX),
    "einsum of first dims": lambda x: tf.einsum("a...,ab->b...", tf.transpose(x), MATRIX),
    "rfft": lambda x: tf.abs(tf.signal.rfft(x, [6])),
    "irfft": lambda x: tf.signal.irfft(tf.complex(x, 2 * x)) + tf.signal.irfft(tf.complex(x[:, :3], x[:, 1:]), [5])[:, :1],
    "map_fn": lambda x: tf.map_fn(lambda row: tf.reduce_sum(row**2), x),
    "keras map": lambda x: keras.ops.map(lambda row: row**2, x),
    "foldl": lambda x: tf.foldl(lambda total, row: total * row, x),
    "foldr": lambda x: tf.foldr(lambda total, row: total - row**2, x, x[0]),
    "scan": lambda x: tf.scan(lambda total, row: total + row**2, x, reverse=True),
    "keras scan": lambda x: keras.ops.scan(lambda total, row: (total + row, total * row), x[0], x)[1],
    "keras associative_scan": lambda x: tf.reshape(keras.ops.associative_scan(tf.add, x), (8, 4)),
    "switch_case": lambda x: tf.switch_case(tf.cast(tf.reduce_sum(x) > 0, "int32"), [lambda: x * 2, lambda: x]),
    "ctc": lambda x: keras.ops.ctc_loss(
        LABELS.reshape(4, 2) % 2 + 1, tf.reshape(x, (4, 4, 2)) @ MIX, [2, 1, 2, 2], [4, 3, 4, 4]
    ),
    "convolution": lambda x: tf.nn.conv2d(tf.reshape(x, (8, 2, 2, 1)), KERNEL, 1, "SAME"),
    "convolution of columns": lambda x: tf.nn.conv2d(x[:, None, None], KERNEL4, 1, "SAME"),
    "grouped convolution": lambda x: keras.ops.conv(x[:, None, None], KERNEL4[:, :, :2], 1, "same"),
    "convolution in 3 dims": lambda x: tf.nn.conv3d(tf.reshape(x, (8, 1, 2, 2, 1)), KERNEL[None], [1] * 5, "SAME"),
    "max pooling": lambda x: tf.nn.max_pool2d(x[:, None, None], 2, 1, "SAME"),
    "average pooling": lambda x: tf.nn.avg_pool2d(x[:, None, None], 2, 1, "SAME"),
    "resize": lambda x: tf.cast(tf.image.resize(x[:, None, None], (2, 2)), x.dtype),
    "cholesky": lambda x: tf.linalg.cholesky(0.1 * tf.reshape(x, (8, 2, 2)) + 3 * np.eye(2)),
}
KERNEL, KERNEL4, MIX = RNG.randn(2, 2, 1, 3), RNG.randn(1, 1, 4, 4), RNG.randn(2, 4)
GRID = np.stack(np.divmod((np.arange(32) * 5 % 24).reshape(2, 2, 2, 2, 2), 4), -1).astype("int32")
MATRIX, PICKS = RNG.randn(4, 4), RNG.randint(0, 4, (4, 2, 3))
LAYOUTS = {"batch": ("data", None), "columns": (None, "model"), "both": ("data", "model")}


def moved(x):
    """The tensor, in a step with data in its last dim, wherever data was; for TensorFlow that is another kind of move."""
    owner = variables.step_owner()
    return x if owner is None else dtensor.relayout(x, owner.mesh.layout([None] * (x.shape.rank - 1) + ["data"]))


def split_last(x):
    """The tensor, in a step with model in its last dim."""
    owner = variables.step_owner()
    return x if owner is None else dtensor.relayout(x, owner.mesh.layout([None] * (x.shape.rank - 1) + ["model"]))


def split_first(x):
    """The tensor, in a step with data in its first dim."""
    owner = variables.step_owner()
    return x if owner is None else dtensor.relayout(x, owner.mesh.layout(["data"] + [None] * (x.shape.rank - 1)))


def in_a_step(function, layout):
    """The function of X, laid out over a mesh, in a traced step; its results as arrays."""
    strategy = tfpar.HybridStrategy("data=2,model=2")
    x = transfer.to_mesh(X, strategy.mesh.layout(LAYOUTS[layout]))
    results = strategy.run(tf.function(function), args=(x,))
    return [result.numpy() for result in tf.nest.flatten(strategy.gather(results, 0))]


def value_and_gradient(operation):
    def compute(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = operation(x)
            total = tf.reduce_sum(y * np.arange(1.0, y.shape.num_elements() + 1).reshape(y.shape))
        return y, tf.convert_to_tensor(tape.gradient(total, x))

    return compute


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_value_and_gradient(name, layout):
    compute = value_and_gradient(OPERATIONS[name])
    expected = [result.numpy() for result in tf.function(compute)(tf.constant(X))]
    actual = in_a_step(compute, layout)
    assert [a.shape for a in actual] == [e.shape for e in expected]
    parity.assert_close(expected, actual, 1e-6 if name in ("ctc", "resize") else 1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_inner_product(layout):
    """That of Keras has no known size on one device, so it is compared with a product of matrices."""
    expected = tf.function(value_and_gradient(lambda x: tf.matmul(x, X, transpose_b=True)))(tf.constant(X))
    parity.assert_close(expected, in_a_step(value_and_gradient(lambda x: keras.ops.inner(x, X)), layout), 1e-12)


@pytest.mark.parametrize("rank", [3, 4, 5])
def test_an_axis_moves_from_one_dim_to_another(rank):
    strategy = parity.strategy_for("data=2,model=2", tfpar.LayoutMap())
    value = RNG.randn(*[2, 4, 6, 4, 2][:rank])
    for before, after in itertools.permutations(range(rank), 2):
        layouts = [strategy.mesh.layout([None] * dim + ["data"] + [None] * (rank - dim - 1)) for dim in (before, after)]
        move = tf.function(lambda x, layout=layouts[1]: dtensor.relayout(x * 1.0, layout))
        result = strategy.run(move, args=(transfer.to_mesh(value, layouts[0]),))
        np.testing.assert_array_equal(strategy.gather(result, 0), value)


PRODUCTS = {  # where one input splits a summed dim and the other another dim of both, TensorFlow pairs the wrong shards
    "bij,cij->bc": [(None, None, "model"), (None, "model", None)],
    "bij,bji->b": [(None, "model", None), ("data", "model", None)],
    "bij,bij->b": [(None, None, "model"), ("data", "model", None)],
    "abcd,cde->abe": [("data", None, None, "model"), ("model", None, None)],
    "aecd,abcd->acbe": [("data", None, None, "model"), (None, None, "model", None)],
    "bi,jk->bk": [("model", "data"), ("data", "model")],
    "matmul": [("data", "model", None, None), (None, None, "model", None)],
}


@pytest.mark.parametrize("equation", PRODUCTS)
def test_products_of_inputs_that_split_different_dims(equation):
    layouts = PRODUCTS[equation]
    values = [RNG.randn(*[4] * len(layout)) for layout in layouts]

    def product(a, b):
        with tf.GradientTape() as tape:
            tape.watch([a, b])
            result = tf.matmul(a, b) if equation == "matmul" else tf.einsum(equation, a, b)
            total = tf.reduce_sum(result**2)
        return result, *tape.gradient(total, [a, b])

    strategy = parity.strategy_for("data=2,model=2", tfpar.LayoutMap())
    args = tuple(transfer.to_mesh(value, strategy.mesh.layout(layout)) for value, layout in zip(values, layouts))
    actual = strategy.gather(strategy.run(tf.function(product), args=args), 0)
    parity.assert_close(tf.function(product)(*map(tf.constant, values)), actual, 1e-11)


@pytest.mark.parametrize("use", [("data", None, None), ("model", None, "data"), (None, "data", "model")])
@pytest.mark.parametrize("spec", [(None, None, None), ("data", None, None), (None, "model", None), ("data", None, "model")])
def test_a_transpose_is_used_with_another_split(spec, use):
    strategy = parity.strategy_for("data=2,model=2", tfpar.LayoutMap())
    value = RNG.randn(4, 4, 4)

    def compute(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            result = dtensor.relayout(tf.transpose(x * 1.0, (1, 2, 0)), strategy.mesh.layout(use))
            total = tf.reduce_sum(result**3)
        return result * 1.0, tape.gradient(total, x)

    args = (transfer.to_mesh(value, strategy.mesh.layout(spec)),)
    result, gradient = strategy.gather(strategy.run(tf.function(compute), args=args), 0)
    np.testing.assert_array_equal(result, value.transpose(1, 2, 0))
    np.testing.assert_allclose(gradient, 3 * value**2, atol=1e-12)


SLICES = {
    "first": (lambda x: x[1], [1, 2]),
    "middle": (lambda x: x[:, -1], [0, 2]),
    "last": (lambda x: x[..., -2], [0, 1]),
    "two": (lambda x: x[2, ..., -1], [1]),
    "new": (lambda x: x[:, None, 0, 1:3], [0, None, None]),
}


@pytest.mark.parametrize("name", SLICES)
def test_the_dims_that_a_slice_keeps_stay_split(name):
    function, dims = SLICES[name]
    strategy = parity.strategy_for("data=2,model=2", tfpar.LayoutMap())
    value = RNG.randn(4, 4, 4)
    for spec in itertools.permutations(["data", "model", None]):
        result = strategy.run(tf.function(function), args=(transfer.to_mesh(value, strategy.mesh.layout(spec)),))
        found = [None if axis == "unsharded" else axis for axis in dtensor.fetch_layout(result).sharding_specs]
        assert found == [None if dim is None else spec[dim] for dim in dims], spec
        np.testing.assert_array_equal(strategy.gather(result, 0), function(value))


@pytest.mark.parametrize("chosen", [(3,), (1, 2), (0,), (0, 3), (2,), (0, 1, 2)])
def test_chosen_dims_are_whole_and_others_stay_split(chosen):
    strategy = parity.strategy_for("data=2,model=2", tfpar.LayoutMap())
    value = RNG.randn(4, 4, 4, 4)
    for spec in itertools.permutations(["data", "model", None, None]):
        x = transfer.to_mesh(value, strategy.mesh.layout(spec))
        result = strategy.run(tf.function(lambda x: op_gathers.gathered(x, "test", chosen.__contains__) * 1.0), args=(x,))
        found = dtensor.fetch_layout(result).sharding_specs
        for dim, axis in enumerate(spec):
            kept = axis and dim not in chosen
            assert found[dim] == (axis if kept else "unsharded"), (spec, found)
        np.testing.assert_array_equal(strategy.gather(result, 0), value)


@pytest.mark.parametrize("operation", [lambda x: tf.boolean_mask(x, x > 0), lambda x: tf.where(x > 0)])
def test_sizes_that_depend_on_values_are_refused(operation):
    with pytest.raises(NotImplementedError, match=r"(where|boolean_mask) gives a tensor whose size depends on values"):
        in_a_step(operation, "batch")


@pytest.mark.parametrize("metric", ["MeanIoU", "BinaryIoU", "AUC", "RecallAtPrecision", "R2Score", "PearsonCorrelation"])
def test_metrics_on_such_operations(metric, float64):
    options = {"MeanIoU": (2,), "BinaryIoU": (), "RecallAtPrecision": (0.5,)}.get(metric, ())

    def build():
        model = parity.mlp(outputs=1)
        model.add(layers.Activation("sigmoid"))
        return parity.compiled(model, loss="binary_crossentropy", metrics=[getattr(keras.metrics, metric)(*options)])

    x, y = parity.regression(21)
    y = (y > 0).astype("float64")
    parity.assert_parity(build, lambda m: m.fit(x, y, batch_size=8, epochs=2, verbose=0))


class Calls(keras.Layer):
    """A function as a layer."""

    def __init__(self, function, name=None):
        super().__init__(name=name)
        self.function = function

    def call(self, x):
        return self.function(x)


def warnings_of(*parts, **parity_options):
    """What a training of a layer "up" and the parts says about operations that run whole; its numbers are right."""
    op_warnings._warned.clear()
    x, y = parity.regression(24)

    def build():
        return parity.compiled(
            keras.Sequential([keras.Input((8,)), layers.Dense(8, name="up"), *[part() for part in parts], layers.Dense(1)])
        )

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parity.assert_parity(build, lambda m: m.fit(x, y, batch_size=8, epochs=2, verbose=0), **parity_options)
    return [str(w.message) for w in caught if "The numbers are right" in str(w.message)]


def test_an_operation_missing_from_the_table_is_found_and_named_once(float64):
    assert not op_support.is_replicated("ReverseSequence")
    (message,) = warnings_of(lambda: Calls(lambda x: tf.reverse_sequence(x, [8] * 8, seq_axis=1), name="back"))
    assert "ReverseSequence (in 'sequential_1/back_1')" in message
    # forward and backward, each with an input and a result of 8 × 8 numbers of 8 bytes
    assert "computes the whole of it, 2.0 KiB of inputs and results in a step" in message


def test_a_cost_that_is_not_known_is_a_lower_limit(float64):
    def kept(x):
        return tf.TensorArray(x.dtype, 8).unstack(x).stack()

    assert any("TensorListStack" in m and "at least" in m for m in warnings_of(lambda: Calls(kept, name="list")))


def test_an_operation_that_gathers_what_is_split_is_named_with_its_bytes(float64):
    def part():
        return Calls(lambda x: tf.concat(tf.split(x, [3, 5], 1)[::-1], 1), name="halves")

    rules = {r".*up/kernel": (None, "model"), r".*up/bias": ("model",)}
    assert not [m for m in warnings_of(part, mesh="data=4") if "reads tensors whole" in m]
    messages = warnings_of(part, mesh="data=2,model=2", layouts=rules)
    (message,) = [m for m in messages if "SplitV" in m]
    assert "halves" in message and "every device gathers 256 B for it" in message  # 8 / 2 × 8 numbers of 8 bytes


@pytest.mark.parametrize(
    "operation, sentence",
    [
        (lambda x: tf.linalg.expm(x[:4]), "matrix_exponential in a step on a mesh would end the process"),
        (lambda x: layers.IntegerLookup(vocabulary=[1, 2])(tf.cast(x, "int64")), "Look the ids up in the dataset"),
    ],
)
def test_what_would_end_the_process_is_refused(operation, sentence):
    with pytest.raises(NotImplementedError, match=sentence):
        in_a_step(operation, "batch")


IMAGES, IDS = RNG.randn(16, 6, 6, 4), RNG.randint(0, 6, (16, 3)).astype("int32")
LAYERS = {
    "grouped convolution": (lambda: [layers.Conv2D(4, 3, groups=2), layers.Flatten()], IMAGES, {}),
    "convolutions over time": (lambda: [layers.TimeDistributed(layers.Conv1D(3, 3)), layers.Flatten()], IMAGES, {}),
    "recurrences over time": (lambda: [layers.TimeDistributed(layers.LSTM(3)), layers.Flatten()], IMAGES[:, :2], {}),
    "fused projections": (
        lambda: [layers.Dense(24, name="up"), Calls(lambda x: sum(keras.ops.split(x, 3, -1))), layers.Flatten()],
        IMAGES[:, 0],
        {},
    ),
    "multi-hot categories": (lambda: [layers.CategoryEncoding(6, output_mode="multi_hot")], IDS, {}),
    "counted categories": (lambda: [layers.CategoryEncoding(6, output_mode="count")], IDS, {}),
    "split LSTM": (
        lambda: [layers.LSTM(4)],
        IMAGES[:, 0],
        {r".*lstm.*/kernel": (None, "model"), r".*recurrent_kernel": (None, "model"), r".*lstm_cell/bias": ("model",)},
    ),
    "split convolutions": (
        lambda: [layers.Conv2D(8, 3, name="one"), layers.Conv2D(4, 3, name="two"), layers.Flatten()],
        IMAGES,
        {r".*one/kernel": (None,) * 3 + ("model",), r".*one/bias": ("model",), r".*two/kernel": (None, None, "model", None)},
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_on_such_operations(name, float64):
    parts, x, rules = LAYERS[name]
    y = RNG.randn(16, 1)

    def build():
        return parity.compiled(
            keras.Sequential([keras.Input(x.shape[1:], dtype=x.dtype.name), *parts(), layers.Dense(1, name="out")])
        )

    parity.assert_parity(build, lambda m: m.fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False), layouts=rules)


def test_nothing_changes_outside_a_step():
    value = tf.constant(X)
    np.testing.assert_array_equal(value[::-1], X[::-1])
    np.testing.assert_array_equal(tf.where(value > 0), np.argwhere(X > 0))
    assert tf.scatter_nd(tf.constant([[0]], tf.int64), tf.constant([1.0]), tf.constant([3], tf.int64)).shape == (3,)
    assert tf.scatter_nd([[1]], [2.0], [3], bad_indices_policy="IGNORE")[1] == 2.0
    assert value[:, None, ::-1].shape == (8, 1, 4)
    with tf.GradientTape() as tape:  # TensorFlow's own gradient passes a further argument
        tape.watch(value)
        total = tf.reduce_sum(tf.gather_nd(value, [[0, 1]]))
    assert tape.gradient(total, value) is not None
    assert input_lib.distribute({"a": None}, tfpar.Mesh("data=2")) == {"a": None}
