"""The one file that touches private TensorFlow and Keras names, each with its reason.

Every other module imports public API only, so that an upgrade of TensorFlow or Keras is checked here. The package is
developed against TensorFlow 2.21 and Keras 3.15; importing this file fails with the name of what moved.
"""

from __future__ import annotations

import functools
import importlib
import os
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfpar.compat import switches  # noqa: F401 - before the first DTensor function

if keras.backend.backend() != "tensorflow":
    raise ImportError(
        f"tfpar trains Keras on TensorFlow, but Keras uses the backend {keras.backend.backend()!r}. Set the environment "
        "variable KERAS_BACKEND=tensorflow before keras is imported."
    )

# Whether DTensor's device exists already; see `start_dtensor`.
# Public as tf.experimental.dtensor, without these three: the device that tells whether a tensor is a DTensor of any
# mesh, the resource that a variable holds, and the tape that records our own gather of a variable's shards.
from keras.src import backend as keras_backend
from keras.src.backend.common import global_state

# The scope that gives a variable its path ("block/dense/kernel") has no public reader.
from keras.src.backend.common.name_scope import current_path as variable_path_prefix

# Keras divides losses by the number of replicas; see `keep_losses_global`.
from keras.src.losses import loss as keras_loss

# What writes a model's files; see `save_once`.
from keras.src.saving import saving_lib

# `fit` takes a distributed dataset only if its class has TensorFlow's own private name; see `accept_mesh_datasets`.
from keras.src.trainers import data_adapters
from tensorflow.dtensor.python import api as dtensor_api

# TensorFlow's own flag: a SavedModel is being written, so variables must be captured by their handles.
from tensorflow.python.eager import context as tf_context, record as tf_record, tape as tf_tape

# What reads the text of an error; see `shorten_errors`.
from tensorflow.python.framework import error_interpolation
from tensorflow.python.saved_model import save_context as tf_save_context
from tensorflow.python.trackable.base import VARIABLE_VALUE_KEY as VARIABLE_VALUE_KEY, Trackable as Trackable

# Where every Python call and every gradient of an operation passes; see `route`.
_MODULES = """
gen_array_ops gen_image_ops gen_linalg_ops gen_math_ops gen_nn_ops gen_spectral_ops array_ops bincount_ops
control_flow_switch_case functional_ops gen_functional_ops map_fn while_loop linalg.linalg_impl signal.fft_ops
"""
_OPERATIONS = [importlib.import_module(f"tensorflow.python.ops.{name}") for name in _MODULES.split()]
TensorFlowTrainer = next(c for c in keras.Model.__mro__ if c.__name__ == "TensorFlowTrainer")


def tensorflow_has_started() -> bool:
    """Whether TensorFlow's runtime exists, after which logical devices cannot change."""
    return tf_context.context()._initialized


def start_dtensor() -> None:
    """Makes DTensor's device, unless there is one, such that the failure of a step is raised by that step.

    The default is asynchronous: the failure surfaces at some later operation, and all that follows fails with it.
    """
    if dtensor_api._dtensor_singleton is None:
        dtensor_api.reset_dtensor_device(is_async=False)


def number_collectives_apart() -> None:
    """Keeps the collectives of `tf.distribute.MirroredStrategy` apart from DTensor's in one process.

    Both count the groups of devices from the start, and collectives of one number are taken for the same.
    """
    tf.distribute.MirroredStrategy._collective_key_base += 1_000_000


def program_names() -> set[str]:
    """The functions that TensorFlow can run now, among them what DTensor made of a step, which it does not hand out."""
    return set(tf_context.context().list_function_names())


def program(name: str) -> Any:
    """The nodes of one of `program_names`."""
    return tf_context.context().get_function_def(name).node_def


def in_saved_model_export() -> bool:
    """Whether the current trace belongs to a SavedModel that is being written."""
    return tf_save_context.in_save_context()


def record_read(result: tf.Tensor, handle: tf.Tensor) -> None:
    """Tells gradient tapes that `result` is the value of the variable behind `handle`.

    A gather across devices is several operations; to a tape it is one read. `tf.custom_gradient` takes no resource.
    """
    tf_record.record_operation("ReadVariableOp", [result], [handle], lambda gradient: [gradient])


def watch(variable: tf.Variable) -> None:
    """Makes every active tape watch `variable`, as a plain read of it would do."""
    if variable.trainable:
        tf_tape.variable_accessed(variable)


_making = threading.local()


PROGRAM_DUMP = 'note: see current operation: \n"builtin.module"'  # what DTensor prints of a program before its text


def shorten_errors() -> None:
    """Leaves the dump of the whole program out of the text of an error of partitioning.

    TensorFlow searches the text with an expression that takes minutes on such a dump.
    """
    original = error_interpolation.parse_message

    @functools.wraps(original)
    def parse_message(message: str):
        return original(message.partition(PROGRAM_DUMP)[0])

    error_interpolation.parse_message = parse_message


def follow_variable_creation() -> None:
    """Remembers which Keras variable is being made and by whom, for `variable_in_the_making`.

    TensorFlow's creator of a variable learns only a name. Keras' name scope tells more, but not for the variables of a
    model that is built from shapes: their values are made later, when the scope has gone.
    """

    def remembered(method: Callable) -> Callable:
        @functools.wraps(method)
        def wrapper(self, *args, **kwargs):
            outer = getattr(_making, "variable", None)
            _making.variable = self
            try:
                return method(self, *args, **kwargs)
            finally:
                _making.variable = outer

        return wrapper

    def initialized(self, *args, **kwargs):
        stack = global_state.get_global_attribute("name_scope_stack") or []
        self._tfpar_maker = next((scope.caller for scope in reversed(stack) if scope.caller is not None), None)
        return initialize(self, *args, **kwargs)

    initialize = keras.Variable.__init__
    keras.Variable.__init__ = remembered(functools.wraps(initialize)(initialized))
    keras.Variable._deferred_initialize = remembered(keras.Variable._deferred_initialize)


def variable_in_the_making(name: str | None) -> tuple[str, Any]:
    """The path of the variable that is being made now, and the object (layer, optimizer, metric, …) that makes it.

    Args:
        name: what TensorFlow knows; the path of a `tf.Variable` of the user's is the name scope and this.
    """
    variable = getattr(_making, "variable", None)
    if variable is not None:
        return variable.path, variable._tfpar_maker
    return "/".join(filter(None, (variable_path_prefix(), name))), None


def maker_of(variable: keras.Variable) -> Any:
    """The layer, optimizer or metric in whose scope a Keras variable was made, None where it is not known."""
    return getattr(variable, "_tfpar_maker", None)


def native(variable: Any) -> Any:
    """The `tf.Variable` inside a Keras variable; anything else unchanged.

    `keras.Variable.value` would autocast under mixed precision and return a tensor.
    """
    return variable._value if isinstance(variable, keras.Variable) else variable


def strategy_of(owner: Any) -> tf.distribute.Strategy | None:
    """The strategy that a Keras model or optimizer was created under, None for the default one."""
    strategy = getattr(owner, "_distribute_strategy", None) or getattr(owner, "_distribution_strategy", None)
    is_default = strategy is None or type(strategy).__name__ == "_DefaultDistributionStrategy"
    return None if is_default else strategy


def install_trainer(choose: Callable[[keras.Model], Any]) -> None:
    """Lets a model's strategy build the functions that `fit`, `evaluate` and `predict` call.

    Keras' own trainer traces a loop over a `tf.data` iterator and pulls a batch from the user's data to build the model.

    Args:
        choose: called with the model; returns an object with `train_function(model)`, `test_function(model)`,
            `predict_function(model)` and `symbolic_build(model, iterator, data_batch)`, or None to leave Keras alone.
    """

    def replaces(name: str, replacement: Callable) -> None:
        original = getattr(TensorFlowTrainer, name)

        @functools.wraps(original)
        def method(self, *args, **kwargs):
            trainer = choose(self)
            return original(self, *args, **kwargs) if trainer is None else replacement(trainer, self, *args, **kwargs)

        setattr(TensorFlowTrainer, name, method)

    def make(kind: str) -> Callable:
        def make_function(trainer, model, force=False):
            attribute = f"{kind}_function"
            if getattr(model, attribute) is None or force:
                setattr(model, attribute, getattr(trainer, attribute)(model))
            return getattr(model, attribute)

        return make_function

    for kind in ("train", "test", "predict"):
        replaces(f"make_{kind}_function", make(kind))
    replaces(
        "_maybe_symbolic_build",
        lambda trainer, model, iterator=None, data_batch=None: trainer.symbolic_build(model, iterator, data_batch),
    )


def symbolic_build(model: keras.Model, data_batch: Any) -> None:
    """Builds the model, its metrics and its loss from a batch's shapes and dtypes alone."""
    model._symbolic_build(data_batch=data_batch)


def dataset_of(epoch_iterator: Any) -> Any:
    """The distributed dataset that a Keras epoch iterator draws from."""
    return epoch_iterator._distributed_dataset


def accept_mesh_datasets() -> None:
    """Lets `fit` take any `tf.distribute.DistributedDataset`; Keras asks for one class by its private name."""
    original = data_adapters.is_tf_dataset

    @functools.wraps(original)
    def is_tf_dataset(x):
        return isinstance(x, tf.distribute.DistributedDataset) or original(x)

    data_adapters.is_tf_dataset = is_tf_dataset


def route(operation: str, wrapper: Callable[[Callable], Callable]) -> None:
    """Wraps the Python function that adds one kind of operation to a graph, for callers in TensorFlow and Keras alike.

    DTensor partitions some operations wrongly without an error; their inputs must change before they are added.

    Args:
        operation: the function's name in one of TensorFlow's modules, such as "scatter_nd", or that and its public
            name, such as "scan_v2 as scan".
        wrapper: takes the original function, returns the replacement.
    """
    operation, _, public = operation.partition(" as ")
    modules = _OPERATIONS[::-1] if public else _OPERATIONS
    original = next(getattr(module, operation) for module in modules if hasattr(module, operation))
    replacement = functools.wraps(original)(wrapper(original))
    for module in (*_OPERATIONS, tf, tf.linalg, tf.math, tf.nn, tf.signal):
        for name in (operation, public):
            if getattr(module, name, None) is original:
                setattr(module, name, replacement)


def route_keras(operation: str, wrapper: Callable[[Callable], Callable]) -> None:
    """As `route`, for a function of Keras' TensorFlow backend, such as "core.scan"."""
    name, _, operation = operation.partition(".")
    module = getattr(keras_backend, name)
    original = getattr(module, operation)
    setattr(module, operation, functools.wraps(original)(wrapper(original)))


def unroll_recurrence(in_step: Callable[[], bool]) -> None:
    """Unrolls recurrent layers in a step on a mesh.

    DTensor has no expansion for the lists that a loop keeps for its gradient, so a loop would run whole on every device;
    and collectives of two iterations that do not depend on each other meet in the wrong order and fail. Unrolled, a
    recurrence is split over the batch like every other layer. The fused GPU kernels have no expansion either.
    """

    def rnn(step_function, inputs, initial_states, go_backwards=False, mask=None, *args, unroll=False, **kwargs):
        if in_step():
            unroll = True
            if go_backwards and mask is not None:  # unrolled, Keras zeroes the outputs by the mask of the other direction
                time = 0 if kwargs.get("time_major") else 1
                inputs, mask = keras.tree.map_structure(lambda sequence: backwards(sequence, time), (inputs, mask))
                go_backwards = False
        return original_rnn(step_function, inputs, initial_states, go_backwards, mask, *args, unroll=unroll, **kwargs)

    def backwards(sequence, time):
        sequence = tf.convert_to_tensor(sequence)
        return tf.gather(sequence, list(range(sequence.shape[time] - 1, -1, -1)), axis=time)

    def fused(original):
        @functools.wraps(original)
        def kernel(*args, **kwargs):
            if in_step():
                raise NotImplementedError  # Keras then takes the path above
            return original(*args, **kwargs)

        return kernel

    original_rnn = keras_backend.rnn
    keras_backend.rnn = functools.wraps(original_rnn)(rnn)
    keras_backend.lstm, keras_backend.gru = fused(keras_backend.lstm), fused(keras_backend.gru)


def save_once(
    shared: Callable[[keras.Model], bool], is_writer: Callable[[], bool], wait: Callable[[keras.Model], None]
) -> None:
    """Lets one of several processes write a model's files while all read the variables, which gathers them.

    Keras has no hook between: processes that save to one path would write it at the same time.

    Args:
        shared: whether several processes train the model.
        is_writer: whether this process writes; the files of the others go nowhere.
        wait: called with the model when this process has written; returns when all have.
    """

    def once(save: Callable) -> Callable:
        @functools.wraps(save)
        def method(model, filepath, *args, **kwargs):
            if not shared(model):
                return save(model, filepath, *args, **kwargs)
            with tempfile.TemporaryDirectory() as nowhere:
                save(model, filepath if is_writer() else os.path.join(nowhere, os.path.basename(filepath)), *args, **kwargs)
            wait(model)

        return method

    for name in ("save_model", "save_weights_only"):
        setattr(saving_lib, name, once(getattr(saving_lib, name)))

    backup = keras.callbacks.BackupAndRestore
    save_backup, end = backup._save_model, backup.on_train_end

    def save_model(self):
        if shared(self.model) and not is_writer():
            self.model.save_weights(filepath=self._weights_path, overwrite=True)
        else:
            save_backup(self)

    def on_train_end(self, logs=None):
        if is_writer() or not shared(self.model):
            end(self, logs)

    backup._save_model, backup.on_train_end = functools.wraps(save_backup)(save_model), functools.wraps(end)(on_train_end)


def keep_losses_global(is_global: Callable[[tf.distribute.Strategy], bool]) -> None:
    """Stops Keras from dividing losses by the number of replicas where one program sees the global batch.

    Keras scales a loss by 1/`num_replicas_in_sync` because the gradients of replicas are summed later. In the global
    view nothing is summed, also not in a user's own loop in `strategy.scope()` but outside `strategy.run`.
    """
    for name in ("scale_loss_for_distribution", "unscale_loss_for_distribution"):
        original = getattr(keras_loss, name)

        def scale(value, original=original):
            return value if is_global(tf.distribute.get_strategy()) else original(value)

        setattr(keras_loss, name, functools.wraps(original)(scale))
