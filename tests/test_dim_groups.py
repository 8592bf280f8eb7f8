"""Groups of dims: what belongs to them is there once."""

import keras
import numpy as np
from keras import layers, ops

import tfpar
from tfpar import model_graph
from tfpar.dim_groups import DimGroups
from tfpar.dim_rules import RULES


def test_a_product_of_two_dims_of_one_group_takes_each_variable_once():
    """They were taken twice by each such product: a recurrence of 8 steps needed 16 GiB, and no such group was split."""
    x = keras.Input((6, 16))
    heads = ops.reshape(layers.Dense(16, name="up")(x), (-1, 6, 4, 4))
    for _ in range(3):
        heads = ops.einsum("bqkh,bkhd->bqhd", ops.softmax(ops.einsum("bqhd,bkhd->bqkh", heads, heads), 2), heads)
    model = keras.Model(x, layers.Dense(16, name="down")(ops.reshape(heads, (-1, 6, 16))))
    groups = DimGroups(model_graph.trace(model, model.input), 2, RULES).groups
    found = [(variable.path, dim) for group in groups for variable, dim in group.variables]
    assert sorted(found) == sorted((v.path, dim) for v in model.weights for dim in range(len(v.shape)))
    assert all(len(group.rows) <= 1 for group in groups)


class EightRows(layers.Layer):
    """Takes batches of eight rows only."""

    def call(self, x):
        return x * np.arange(1.0, 9.0, dtype="float32")[:, None]

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype)


def test_a_model_for_one_number_of_rows_is_traced_with_its_first_batch():
    with tfpar.HybridStrategy("data=2,model=2").scope():
        up, down = layers.Dense(16, activation="relu", name="up"), layers.Dense(8, name="down")
        model = keras.Sequential([keras.Input((8,)), EightRows(), up, down])
        model.compile("sgd", "mse")
    x = np.ones((8, 8), "float32")
    model.fit(x, x, batch_size=8, verbose=0)
    layouts = {row.path.split("/", 1)[-1]: row.layout for row in model.distribute_strategy.describe(model)}
    assert [layout for path, layout in layouts.items() if "kernel" in path] == [(None, "model"), ("model", None)]
