"""Automatic layouts: what they split and why, and that the numbers stay those of one device."""

from __future__ import annotations

import keras
import numpy as np
import parity
import pytest
from keras import layers, ops

import tfpar
from tfpar import compat
from tfpar.models.gpt import gpt

MESHES = ("data=2,model=2", "model=4")
RNG = np.random.RandomState(0)
SEQUENCES, IDS = RNG.randn(8, 6, 16), RNG.randint(0, 32, (8, 6)).astype("int32")
LOGITS = keras.losses.SparseCategoricalCrossentropy


class Experts(layers.Layer):
    """Four feed-forward experts, each of which sees every token."""

    def build(self, *shapes):
        self.up = self.add_weight(shape=(4, 16, 8), name="up")
        self.down = self.add_weight(shape=(4, 8, 16), name="down")

    def call(self, x, weights):
        hidden = ops.relu(ops.einsum("btd,edf->betf", x, self.up))
        return ops.einsum("betd,bte->btd", ops.einsum("betf,efd->betd", hidden, self.down), weights)


class OwnDense(layers.Layer):
    """A layer that Keras does not know."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], self.units), name="kernel")
        self.bias = self.add_weight(shape=(self.units,), name="bias")

    def call(self, x):
        return ops.matmul(x, self.kernel) + self.bias


class Subclassed(keras.Model):
    """A model without a graph of layers."""

    def __init__(self):
        super().__init__(name="own")
        self.norm = layers.LayerNormalization()
        self.up, self.down = layers.Dense(32, activation="gelu", name="up"), layers.Dense(16, name="down")

    def call(self, x):
        return self.norm(x + self.down(self.up(x)))


def functional(outputs, shape=(6, 16), dtype=None):
    inputs = keras.Input(shape, dtype=dtype)
    return keras.Model(inputs, outputs(inputs))


def normed(x, y):
    return layers.LayerNormalization()(x + y)


def glu(x):
    gate, up = layers.Dense(32, activation="silu", name="gate")(x), layers.Dense(32, name="up")(x)
    return normed(x, layers.Dense(16, name="down")(layers.Dropout(0.0)(gate * up)))


def attention(heads):
    return lambda x: normed(x, layers.MultiHeadAttention(heads, 4, name="mha")(x, x, use_causal_mask=True))


def grouped(key_value_heads):
    return lambda x: normed(x, layers.GroupQueryAttention(4, 4, key_value_heads, name="gqa")(x, x))


def fused_heads(x):
    """Attention of matrices and reshapes, the heads in the middle of a dim."""
    q, k, v = (ops.reshape(layers.Dense(16, name=name)(x), (-1, 6, 4, 4)) for name in "qkv")
    scores = ops.softmax(ops.matmul(ops.transpose(q, (0, 2, 1, 3)), ops.transpose(k, (0, 2, 3, 1))) / 2.0)
    mixed = ops.transpose(ops.matmul(scores, ops.transpose(v, (0, 2, 1, 3))), (0, 2, 1, 3))
    return normed(x, layers.Dense(16, name="out")(ops.reshape(mixed, (-1, 6, 16))))


def experts(x):
    return normed(x, Experts(name="experts")(x, layers.Dense(4, activation="softmax", name="gate")(x)))


def tied(vocabulary):
    def outputs(ids):
        embedding = layers.ReversibleEmbedding(vocabulary, 16, name="embedding")
        return embedding(layers.LayerNormalization()(embedding(ids)), reverse=True)

    return outputs


def untied(vocabulary):
    def outputs(ids):
        x = layers.Embedding(vocabulary, 16, name="embedding")(ids)
        return layers.Dense(vocabulary, name="head")(layers.LayerNormalization()(x))

    return outputs


def chain(x):
    for i, units in enumerate((32, 32, 16, 16)):
        x = layers.Dense(units, activation="relu", name=f"dense_{i}")(x)
    return x


def convolution(x):
    x = layers.Dense(8, name="stem")(x)
    x = layers.Conv1D(8, 3, activation="relu", name="conv")(x)
    x = layers.Dense(32, activation="relu", name="up")(layers.Flatten()(x))
    return layers.Dense(16, name="down")(x)


def nested(x):
    inner = keras.Sequential([keras.Input((6, 16)), layers.Dense(32, name="up"), layers.Dense(16, name="down")])
    return normed(x, inner(x))


# Name: model, what is split (the end of the path: dim).
MODELS = {
    "glu": (glu, {"gate/kernel": 1, "gate/bias": 0, "up/kernel": 1, "up/bias": 0, "down/kernel": 0}),
    "heads": (
        attention(4),
        {"query/kernel": 1, "key/kernel": 1, "value/kernel": 1, "attention_output/kernel": 0}
        | {"query/bias": 0, "key/bias": 0, "value/bias": 0},
    ),
    "odd heads": (attention(3), {}),
    "grouped heads": (
        grouped(4),
        {"query/kernel": 1, "key/kernel": 1, "value/kernel": 1, "attention_output/kernel": 0}
        | {"query/bias": 0, "key/bias": 0, "value/bias": 0},
    ),
    "one key head": (grouped(1), {"query/kernel": 1, "query/bias": 0, "attention_output/kernel": 0}),
    "fused heads": (
        fused_heads,
        {"q/kernel": 1, "k/kernel": 1, "v/kernel": 1, "out/kernel": 0, "q/bias": 0, "k/bias": 0, "v/bias": 0},
    ),
    "chain": (
        chain,
        {"dense_0/kernel": 1, "dense_0/bias": 0, "dense_1/kernel": 0}
        | {"dense_2/kernel": 1, "dense_2/bias": 0, "dense_3/kernel": 0},
    ),
    "convolution": (convolution, {"up/kernel": 1, "up/bias": 0, "down/kernel": 0}),
    "nested": (nested, {"up/kernel": 1, "up/bias": 0, "down/kernel": 0}),
}
VOCABULARIES = {
    "tied": (tied(32), {"embedding/embeddings": 0}),
    "untied": (untied(32), {"embedding/embeddings": 0, "head/kernel": 1, "head/bias": 0}),
    "tied, odd": (tied(33), {}),
    "untied, odd": (untied(33), {}),
}


def split_dims(strategy, model):
    """The dim that each split weight is split by, by the end of its path."""
    rows = [row for row in strategy.describe(model) if row.kind != "slot"]
    return {"/".join(row.path.split("/")[-2:]): row.layout.index("model") for row in rows if "model" in row.layout}


def fit(model, x, y):
    return model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)


def check(build, x, y, mesh, expected):
    """Three steps have the numbers of one device, and what should be split is split."""
    one = parity.train(None, build, lambda model: fit(model, x, y))
    strategy = tfpar.HybridStrategy(mesh)
    many = parity.train(strategy, build, lambda model: fit(model, x, y))
    for path in one.weights:
        parity.assert_close(one.weights[path], many.weights[path], parity.ATOL, path)
    parity.assert_close(one.slots, many.slots)
    assert split_dims(strategy, many.model) == expected
    return strategy, many.model


@pytest.mark.filterwarnings("ignore:The axis 'model'")
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_layer_pairs(name, mesh, float64):
    outputs, expected = MODELS[name]
    y = RNG.randn(8, *functional(outputs).output_shape[1:])
    check(lambda: parity.compiled(functional(outputs)), SEQUENCES, y, mesh, expected)


@pytest.mark.filterwarnings("ignore:The axis 'model'")
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", VOCABULARIES)
def test_vocabularies(name, mesh, float64):
    outputs, expected = VOCABULARIES[name]

    def build():
        return parity.compiled(functional(outputs, (6,), "int32"), loss=LOGITS(from_logits=True), metrics=["accuracy"])

    strategy, model = check(build, IDS, np.roll(IDS, -1, 1), mesh, expected)
    found = strategy.describe(model).collectives
    whole_logits = 4 // strategy.mesh.data_size * 6 * 32
    if expected:
        assert found and not [c for c in found if c.kind == "all-gather" and np.prod(c.shape) >= whole_logits]


def test_experts(monkeypatch, float64):
    monkeypatch.setattr("tfpar.autolayout._KERAS", ("keras.", f"{__name__}."))
    y = RNG.randn(8, 6, 16)
    check(lambda: parity.compiled(functional(experts)), SEQUENCES, y, "data=2,model=2", {"experts/up": 0, "experts/down": 0})


def test_other_losses_get_whole_classes(float64):
    build = lambda: parity.compiled(functional(untied(32), (6,), "int32"), loss="mse")  # noqa: E731
    check(build, IDS, RNG.randn(8, 6, 32), "data=2,model=2", {"embedding/embeddings": 0})


def test_a_model_without_a_graph_is_laid_out_by_its_first_batch(float64):
    build = lambda: parity.compiled(Subclassed())  # noqa: E731
    check(build, SEQUENCES, RNG.randn(8, 6, 16), "data=2,model=2", {"up/kernel": 1, "up/bias": 0, "down/kernel": 0})


def own_pair(first, second):
    def outputs(x):
        return normed(x, second(OwnDense(16, name="down"))(ops.relu(first(OwnDense(32, name="up"))(x))))

    return outputs


@pytest.mark.filterwarnings("ignore:The axis 'model'")
def test_own_layers_are_whole_unless_they_declare_a_role(float64):
    y = RNG.randn(8, 6, 16)
    plain = own_pair(lambda layer: layer, lambda layer: layer)
    check(lambda: parity.compiled(functional(plain)), SEQUENCES, y, "data=2,model=2", {})
    declared = own_pair(tfpar.layouts.column, tfpar.layouts.row)
    expected = {"up/kernel": 1, "up/bias": 0, "down/kernel": 0}
    strategy, model = check(lambda: parity.compiled(functional(declared)), SEQUENCES, y, "data=2,model=2", expected)
    assert {row.reason for row in strategy.describe(model) if any(row.layout)} == {"declared column", "declared row"} | {
        "as its weight"
    }


def test_rules_and_roles_win(float64):
    def outputs(x):
        whole = tfpar.layouts.replicated(layers.Dense(32, name="up"))
        x = normed(x, layers.Dense(16, name="down")(whole(x)))
        return normed(x, layers.Dense(16, name="second")(layers.Dense(32, name="first")(x)))

    strategy = tfpar.HybridStrategy("data=2,model=2", layouts=tfpar.AutoLayout({"second/kernel": (None, "model")}))
    with strategy.scope():
        model = functional(outputs)
    assert split_dims(strategy, model) == {"second/kernel": 1}
    reasons = {row.path: row.reason for row in strategy.describe(model)}
    assert reasons["second/kernel"] == "rule 'second/kernel'"
    assert reasons["up/kernel"] == "declared replicated"
    assert "kept whole in up/kernel by declared replicated" in reasons["down/kernel"]
    with pytest.raises(ValueError, match="matches no variable"):
        tfpar.HybridStrategy("data=2,model=2", layouts=tfpar.AutoLayout({"third": (None,)})).lay_out(model)


def test_an_indivisible_width_declared_as_columns_stays_whole():
    strategy = tfpar.HybridStrategy("model=4")
    with strategy.scope():
        model = functional(own_pair(tfpar.layouts.column, lambda layer: layer), (6, 16))
        odd = functional(lambda x: tfpar.layouts.column(layers.Dense(7, name="odd"))(x))
    assert split_dims(strategy, model) == {"up/kernel": 1, "up/bias": 0}
    with pytest.warns(UserWarning, match="The axis 'model' of size 4 splits no variable"):
        reasons = {row.path: row.reason for row in strategy.describe(odd)}
    assert reasons["odd/kernel"] == "declared column, but 4 does not divide its dim of 7"


def test_a_model_that_cannot_be_traced_stays_whole():
    class Untraceable(keras.Model):
        def call(self, x):
            return x if int(x[0, 0]) else -x

    strategy = tfpar.HybridStrategy("data=2,model=2")
    with strategy.scope():
        model = Untraceable()
        model.dense = layers.Dense(4)
        model.dense.build((None, 4))
        model.build((None, 4))
    with pytest.warns(UserWarning, match="its forward pass could not be traced|splits no variable"):
        assert not any(any(row.layout) for row in strategy.describe(model))


def test_repeated_heads_are_not_gathered():
    strategy = tfpar.HybridStrategy("data=2,model=2")
    with strategy.scope():
        model = parity.compiled(functional(grouped(2)))
    model.fit(SEQUENCES, SEQUENCES, batch_size=8, verbose=0)
    assert {collective.kind for collective in strategy.describe(model).collectives} == {"all-reduce"}


@pytest.mark.parametrize("mesh", MESHES)
def test_two_all_reduces_per_block_and_direction(mesh):
    """As Megatron-LM (arXiv 1909.08053): one after attention and one after the MLP, forward and backward."""
    depth, batch, length, width, vocabulary = 2, 4, 8, 20, 32
    strategy = tfpar.HybridStrategy(mesh)
    with strategy.scope():
        model = gpt(vocabulary=vocabulary, length=length, width=width, heads=4, depth=depth)
        model.compile("adam", LOGITS(from_logits=True))
    assert strategy.describe(model).collectives == ()
    ids = RNG.randint(0, vocabulary, (batch, length)).astype("int32")
    model.fit(ids, ids, batch_size=batch, verbose=0)
    table = strategy.describe(model)
    assert {c.kind for c in table.collectives} == {"all-reduce"}
    examples = batch // strategy.mesh.data_size
    activations = [c for c in table.collectives if c.shape in ((examples, length, width), (examples * length, width))]
    blocks = [c for c in activations if "block" in c.operation or "AddN" in c.operation]
    forward = [c for c in blocks if not c.operation.startswith(("gradient_tape", "AddN"))]
    assert len(forward) == 2 * depth and len(blocks) == 4 * depth
    assert len(activations) == 4 * depth + 2  # and of the embedding forward, of the head backward
    assert max(c.bytes for c in activations) == 4 * examples * length * width
    assert f"{len(table.collectives)} all-reduces of" in str(table)


def test_tensor_parallel_strategy():
    strategy = tfpar.TensorParallelStrategy(["CPU:0", "CPU:1"])
    assert strategy.mesh.axes == {"model": 2}
    with strategy.scope():
        model = functional(glu)
    assert split_dims(strategy, model) == MODELS["glu"][1]
    assert all(row.device_bytes == row.bytes // 2 for row in strategy.describe(model) if any(row.layout))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("head", [tied, untied])
def test_no_device_holds_whole_logits(head, mesh):
    """The largest tensor of the program that each device runs is smaller than its examples' logits of all classes."""
    before, classes = compat.program_names(), 512
    strategy = tfpar.HybridStrategy(mesh)
    with strategy.scope():
        model = functional(head(classes), (6,), "int32")
        model.compile("adam", LOGITS(from_logits=True), metrics=["accuracy"])
    model.fit(IDS, IDS, batch_size=8, verbose=0)
    programs = [compat.program(name) for name in compat.program_names() - before]
    nodes = [node for nodes in programs if any(n.op.startswith("Collective") for n in nodes) for node in nodes]
    shapes = [shape for node in nodes if "_output_shapes" in node.attr for shape in node.attr["_output_shapes"].list.shape]
    largest = max(np.prod([dim.size for dim in shape.dim], dtype=int) for shape in shapes)
    whole = 8 // strategy.mesh.data_size * 6 * classes
    assert largest < whole


def test_layouts_follow_a_later_compile():
    strategy = tfpar.HybridStrategy("data=2,model=2")
    with strategy.scope():
        model = functional(untied(32), (6,), "int32")
    assert split_dims(strategy, model) == {"embedding/embeddings": 0}
    with strategy.scope():
        model.compile("adam", LOGITS(from_logits=True))
    assert split_dims(strategy, model) == VOCABULARIES["untied"][1]
    model.fit(IDS, IDS, verbose=0)
    with strategy.scope():
        model.compile("adam", "mse")
    assert split_dims(strategy, model) == VOCABULARIES["untied"][1]  # a traced step holds its variables


def test_inputs_of_unknown_length_and_shared_layers(float64):
    a, ids = RNG.randn(8, 8), IDS[:, :5]
    y = RNG.randn(8, 16)

    def build():
        numbers, tokens = keras.Input((8,), name="numbers"), keras.Input((None,), dtype="int32", name="tokens")
        up, down = layers.Dense(16, activation="relu", name="up"), layers.Dense(16, name="down")
        pooled = layers.GlobalAveragePooling1D()(layers.Embedding(32, 8, name="embedding")(tokens))
        return parity.compiled(keras.Model({"numbers": numbers, "tokens": tokens}, down(up(numbers)) + down(up(pooled))))

    expected = {"embedding/embeddings": 0, "up/kernel": 1, "up/bias": 0, "down/kernel": 0}
    check(build, {"numbers": a, "tokens": ids}, y, "data=2,model=2", expected)


class Scaled(layers.Layer):
    """A layer with one trained number."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self, x):
        return self.scale * x


def test_a_trained_number(float64):
    expected = {"gate/kernel": 1, "gate/bias": 0, "up/kernel": 1, "up/bias": 0, "down/kernel": 0}
    build = lambda: parity.compiled(functional(lambda x: Scaled(name="scaled")(glu(x))))  # noqa: E731
    strategy, model = check(build, SEQUENCES, RNG.randn(8, 6, 16), "data=2,model=2", expected)
    assert {row.path: row.reason for row in strategy.describe(model)}["scaled/scale"] == "auto: a scalar"


def test_a_constant_between_layers(float64):
    def outputs(x):
        positions = ops.reshape(ops.arange(96.0, dtype="float64"), (6, 16)) / 96
        return layers.Dense(16, name="down")(layers.Dense(32, activation="gelu", name="up")(x + positions))

    expected = {"up/kernel": 1, "up/bias": 0, "down/kernel": 0}
    check(lambda: parity.compiled(functional(outputs)), SEQUENCES, RNG.randn(8, 6, 16), "data=2,model=2", expected)
