"""The functions that Keras' `fit`, `evaluate`, `predict` and their `*_on_batch` twins call.

Keras' own ones trace a loop over a `tf.data` iterator, which DTensor cannot partition. These take host batches, put each
on the mesh, run one traced step and bring the results back as ordinary tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from tfpar import collectives, compat, describe, errors, input as input_lib, op_support, op_warnings, transfer


def install(is_global: Callable[[Any], bool]) -> None:
    """Makes Keras ask this file for its functions where `is_global(strategy)` holds."""

    def choose(model: keras.Model) -> GlobalViewTrainer | None:
        built_under, compiled_under = model.distribute_strategy, compat.strategy_of(getattr(model, "optimizer", None))
        if is_global(compiled_under) and built_under is not compiled_under:
            raise errors.outside_scope(model, compiled_under)
        return built_under.trainer if is_global(built_under) else None

    compat.install_trainer(choose)


class GlobalViewTrainer:
    """Builds a model's step functions; `compat.install_trainer` calls it."""

    def train_function(self, model: keras.Model) -> Callable[[Iterable], Any]:
        """Takes an iterator of host batches, trains on `steps_per_execution` of them, returns the last logs."""
        return over_batches(model, _step(model, model.train_step, is_training=True))

    def test_function(self, model: keras.Model) -> Callable[[Iterable], Any]:
        """The same for evaluation."""
        return over_batches(model, _step(model, model.test_step))

    def predict_function(self, model: keras.Model) -> Callable[[list], Any]:
        """Takes a list of host batches, returns the outputs for all."""
        return joined_outputs(_step(model, model.predict_step))

    def symbolic_build(self, model: keras.Model, iterator: Any, data_batch: Any) -> None:
        """Builds from the dataset's specs, so that no batch of the user's data is drawn for it."""
        model.distribute_strategy.check_owns(model)
        if iterator is not None:
            data_batch = tf.nest.map_structure(_without_optional, compat.dataset_of(iterator).element_spec)
        with model.distribute_strategy.scope():
            compat.symbolic_build(model, data_batch)


def _step(model: keras.Model, step: Callable, is_training: bool = False) -> Callable[[Any], Any]:
    """One step on one host batch, traced for the mesh once the model is known and checked."""
    strategy = model.distribute_strategy
    strategy.check_owns(model)
    if model.jit_compile:
        raise errors.jit_compile(strategy)

    @tf.autograph.experimental.do_not_convert
    def run(batch: Any) -> Any:
        return strategy.run(step, args=(batch,))

    def report(graph: tf.Graph) -> None:
        sent = collectives.of_new_programs()
        op_warnings.warn_replicated(graph)
        op_warnings.warn_gathered(graph, sent)
        if is_training:
            describe.remember_collectives(model, sent)

    execute = run if model.run_eagerly else _Traced(run, report)

    def one_step(batch: Any) -> Any:
        batch = input_lib.distribute(batch, strategy.mesh)
        build(model, batch)
        strategy.lay_out(model, batch)
        with errors.explained(model, strategy):
            return execute(batch)

    return one_step


def build(model: keras.Model, batch: Any) -> None:
    """Makes the variables of a model that `predict` meets unbuilt, so that none is made while a step is traced."""
    if model.built:
        return
    inputs, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    symbolic = keras.tree.map_structure(lambda leaf: keras.KerasTensor(leaf.shape, leaf.dtype.name), inputs)
    with model.distribute_strategy.scope():
        model(symbolic)


class _Traced:
    """A step as a tf.function; operations that TensorFlow cannot partition run replicated, with a warning.

    A refused step is traced anew before it is tried again: TensorFlow crashes on a function that it failed to partition.
    """

    def __init__(self, run: Callable[[Any], Any], report: Callable[[tf.Graph], None]):
        self._run, self._function, self._report = run, tf.function(run), report
        self._graphs_seen = 0

    def __call__(self, batch: Any) -> Any:
        while True:
            try:
                outputs = self._function(batch)
            except tf.errors.OpError as error:
                if not op_support.replicates(error):
                    raise
                self._function, self._graphs_seen = tf.function(self._run), 0
                continue
            if self._function.experimental_get_tracing_count() > self._graphs_seen:
                self._graphs_seen = self._function.experimental_get_tracing_count()
                self._report(self._function.get_concrete_function(batch).graph)
            return outputs


def joined_outputs(step: Callable[[Any], Any]) -> Callable[[list], Any]:
    """The outputs of a step on several batches, as one."""

    def predict(batches: list) -> Any:
        outputs = [transfer.all_to_host(step(batch)) for batch in batches]
        return tf.nest.map_structure(lambda *parts: parts[0] if len(parts) == 1 else tf.concat(parts, 0), *outputs)

    return predict


def over_batches(model: keras.Model, step: Callable[[Any], Any]) -> Callable[[Iterable], Any]:
    """`steps_per_execution` steps; the last one's logs as ordinary tensors. StopIteration where no batch is left."""

    watch = errors.NanWatch(model)

    def function(iterator: Iterable) -> Any:
        logs = None
        for _, batch in zip(range(model.steps_per_execution), iterator):
            logs = step(batch)
        if logs is None:
            raise StopIteration
        logs = transfer.all_to_host(logs)
        watch.see(logs)
        return logs

    return function


def _without_optional(spec: Any) -> Any:
    """Keras wraps a missing target or weight in an Optional so that `tf.data` can carry it."""
    return None if isinstance(spec, tf.OptionalSpec) else spec
