"""What goes wrong is said in a sentence: what was got, what was expected, how to mend it."""

import os
import subprocess
import sys
import textwrap
import warnings

import keras
import numpy as np
import parity
import pytest
import scipy.sparse
import tensorflow as tf
from keras import layers

import tfpar

X, Y = parity.regression(16)


def strategy():
    return parity.strategy_for("data=2,model=2")


def test_model_built_outside_the_scope():
    model = parity.mlp()
    with strategy().scope():
        model.compile("adam", "mse")
    with pytest.raises(ValueError, match=r"was built outside every strategy's scope, but compiled under Hybrid.*inside the"):
        model.fit(X, Y, verbose=0)


def test_model_built_and_compiled_outside_the_scope():
    model = parity.compiled(parity.mlp())
    with strategy().scope(), pytest.raises(ValueError, match=r"model .* was made outside every strategy's scope"):
        model.fit(X, Y, verbose=0)


@pytest.mark.parametrize(
    "other", [lambda: tf.distribute.MirroredStrategy(["CPU:0"]), lambda: tfpar.HybridStrategy("data=4")]
)
def test_model_built_under_another_strategy(other):
    with other().scope():
        model = parity.mlp()
    with strategy().scope():
        model.compile("adam", "mse")
    with pytest.raises(ValueError, match=r"was built under .*Strategy.*, but compiled under HybridStrategy"):
        model.fit(X, Y, verbose=0)


@pytest.mark.parametrize("use", ["fit", "train_on_batch"])
def test_optimizer_made_outside_the_scope(use):
    optimizer = keras.optimizers.Adam()
    with strategy().scope():
        model = parity.compiled(parity.mlp(), optimizer)
    with pytest.raises(ValueError, match=r"optimizer 'adam' was made outside.*Make the optimizer inside"):
        model.fit(X, Y, verbose=0) if use == "fit" else model.train_on_batch(X, Y)


def test_metric_made_outside_the_scope():
    metric = keras.metrics.AUC(name="area")
    with strategy().scope():
        model = parity.compiled(parity.mlp(), metrics=[metric])
    with pytest.raises(ValueError, match=r"metric 'area' was made outside"):
        model.fit(X, Y > 0, verbose=0)


def test_part_of_a_model_made_outside_the_scope():
    inner = parity.mlp()
    with strategy().scope():
        model = parity.compiled(keras.Sequential([keras.Input((8,)), inner]))
    with pytest.raises(ValueError, match=r"its variable '.*up/kernel' is not on the devices"):
        model.fit(X, Y, verbose=0)


def test_jit_compile():
    with strategy().scope():
        model = parity.compiled(parity.mlp(), jit_compile=True)
    with pytest.raises(ValueError, match=r"jit_compile=True does not work under .*Leave jit_compile at 'auto'"):
        model.fit(X, Y, verbose=0)


def ragged():
    rows = tf.ragged.constant([[1.0, 2.0], [3.0]] * 4)
    return tf.data.Dataset.from_tensor_slices((rows, Y[:8])).batch(4)


def sparse():
    rows = tf.sparse.from_dense(np.eye(8, dtype="float32"))
    return tf.data.Dataset.from_tensor_slices((rows, Y[:8])).batch(4)


@pytest.mark.parametrize(
    "data, sentence",
    [
        (ragged, r"dense tensors, got a ragged tensor; .*to_tensor\(\)"),
        (sparse, r"dense tensors, got a sparse tensor; .*to_dense\(x\)"),
        (lambda: tf.data.Dataset.from_tensor_slices((np.array(["a"] * 8), Y[:8])).batch(4), r"numbers, got text"),
    ],
    ids=["ragged", "sparse", "text"],
)
def test_inputs_that_cannot_be_split(data, sentence):
    with strategy().scope():
        model = parity.compiled(keras.Sequential([layers.Dense(1)]))
    with pytest.raises(ValueError, match=sentence):
        model.fit(data(), verbose=0)


def test_scipy_input():
    with strategy().scope():
        model = parity.compiled(parity.mlp())
    with pytest.raises(ValueError, match="got a sparse tensor"):
        model.fit(scipy.sparse.csr_matrix(np.eye(8)), Y[:8], verbose=0)


def test_a_batch_with_no_examples():
    with strategy().scope():
        model = parity.compiled(parity.mlp())
    with pytest.raises(ValueError, match=r"batch with no examples \(shape \(0, 8\)\).*Drop empty batches"):
        model.train_on_batch(X[:0], Y[:0])
    empty = tf.data.Dataset.from_generator(
        lambda: iter([(X[:4], Y[:4]), (X[:0], Y[:0])]),
        output_signature=(tf.TensorSpec((None, 8), tf.float64), tf.TensorSpec((None, 1), tf.float64)),
    )
    with pytest.raises(ValueError, match="batch with no examples"):
        model.fit(empty, verbose=0)


def test_nan_loss_is_said_once():
    with strategy().scope():
        model = parity.compiled(parity.mlp())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(X, Y * np.nan, batch_size=4, epochs=2, verbose=0)
    messages = [str(w.message) for w in caught if "is NaN" in str(w.message)]
    assert len(messages) == 1 and "lower the learning rate" in messages[0]


def test_mlir_has_a_sentence_above_it():
    class Product(keras.Layer):
        def build(self, shape):
            self.left = self.add_weight(shape=(4, 4), name="left")
            self.right = self.add_weight(shape=(4, 4), name="right")

        def call(self, x):
            return x + keras.ops.mean(keras.ops.matmul(self.left, self.right))

    layouts = {r".*left": (None, "one"), r".*right": ("two", None)}
    with tfpar.HybridStrategy("one=2,two=2", layouts=layouts).scope():
        model = parity.compiled(keras.Sequential([keras.Input((4,)), Product()], name="net"))
    with pytest.raises(tf.errors.OpError) as caught:
        model.fit(np.ones((4, 4)), np.ones((4, 4)), verbose=0)
    first = caught.value.message.splitlines()[0]
    assert first.startswith("TensorFlow could not run a step of the model 'net' on the mesh one=2,two=2")
    assert "Replicate the variables of the layer" in first and "SPMD" in caught.value.message.split("\n\n", 1)[1]


def test_other_failures_keep_their_words():
    class Failing(keras.Layer):
        def call(self, x):
            tf.debugging.assert_less(x, 0.5, message="too large")
            return x

    with strategy().scope():
        model = parity.compiled(keras.Sequential([keras.Input((8,)), Failing(), layers.Dense(1)], name="net"))
    with pytest.raises(tf.errors.OpError, match="step of the model 'net'"):
        model.fit(X, Y, verbose=0)


def test_a_broken_collective_is_not_taken_for_a_wrong_layout():
    from tfpar import errors

    model = parity.mlp()
    with pytest.raises(tf.errors.UnavailableError) as caught, errors.explained(model, strategy()):
        raise tf.errors.UnavailableError(
            None, None, "Collective ops is aborted by: Socket closed [[{{node DTensorAllReduceOp}}]]"
        )
    assert "took part in different collectives, because a process failed" in caught.value.message
    assert "Replicate" not in caught.value.message and "Socket closed" in caught.value.message


def test_loops_over_batches_inside_a_function():
    dataset = strategy().experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(X).batch(8))

    @tf.function
    def over_dataset():
        for batch in dataset:
            tf.print(batch)

    @tf.function
    def over_iterator():
        for batch in iter(dataset):
            tf.print(batch)

    for loop in (over_dataset, over_iterator):
        with pytest.raises(NotImplementedError, match="Loop in Python and call a tf.function for each batch"):
            loop()


def test_a_layout_function_that_leaves_an_axis_unused():
    with tfpar.HybridStrategy("data=2,expert=2", layouts=lambda model: {}).scope():
        model = parity.compiled(parity.mlp())
    with pytest.raises(ValueError, match="axis 'expert' .* nor named by a layout rule"):
        model.fit(X, Y, verbose=0)


@pytest.mark.parametrize("devices", [2, "CPU:0", []])
def test_devices_are_a_list_of_names(devices):
    with pytest.raises(ValueError, match=r'devices is a list of names such as \["CPU:0", "CPU:1"\]'):
        tfpar.MirroredStrategy(devices)


def test_a_variable_of_another_mesh_in_a_step():
    with strategy().scope():
        variable = keras.Variable([1.0, 2.0], name="v")
    other = tfpar.HybridStrategy("data=2")
    with pytest.raises(RuntimeError, match=r"'v' of HybridStrategy\(mesh='data=2,model=2'\) is read in a step of"):
        tf.function(lambda: other.run(lambda: variable.value * 2.0))()


def test_assignment_in_a_function_outside_run():
    with strategy().scope():
        variable = keras.Variable([1.0, 2.0], name="v")

    @tf.function
    def assign():
        variable.assign([3.0, 4.0])

    with pytest.raises(
        RuntimeError, match=r"'v' is split over a mesh and is assigned in a tf.function outside strategy.run"
    ):
        assign()


def test_assignment_of_another_shape():
    with strategy().scope():
        variable = keras.Variable([1.0, 2.0], name="v")
    with pytest.raises(ValueError, match="shape"):
        variable.assign([1.0])
    with pytest.raises(ValueError, match="'v' has the shape"):
        variable._value.assign([1.0])


def test_tensorflow_started_too_early():
    program = """
        import tensorflow as tf
        tf.constant(1)
        import tfpar
        try:
            tfpar.HybridStrategy(mesh="data=2,model=2", layouts={".*x": ("model",)})
        except RuntimeError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    assert "already started with 1 logical CPU device, but 4 are needed" in done.stdout, done.stderr[-2000:]
    assert "Call tfpar.use_logical_cpus(4), or make the strategy, before" in done.stdout


def test_another_keras_backend():
    program = "import keras; keras.backend.backend = lambda: 'jax'; import tfpar"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    assert "Keras uses the backend 'jax'. Set the environment variable KERAS_BACKEND=tensorflow" in done.stderr
