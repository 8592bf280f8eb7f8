"""The global view: one program on whole tensors, which DTensor partitions over a mesh.

From `fit` to a collective:

    1. Keras' fit calls the functions that `training.py` makes
    2. they trace `strategy.run` into one tf.function per step (this file: `call_for_each_replica`, once, not per replica)
    3. in it, variables are handles of shards (`variables.py`) and the batch is split (`input.py`)
    4. TensorFlow's DTensor turns the function into one program per device, with collectives between them

TensorFlow's own strategies on DTensor raise where Keras calls `all_reduce` and `extended.update`, because a replica has
no meaning in the global view. Here there is one "replica", which is everything: gradients are global already, reducing
them is the identity, and BatchNorm, dropout, losses, clipping and metrics keep their one-device meaning.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfpar import compat, describe, errors, input as input_lib, training, transfer, variables
from tfpar.compat import training as steps
from tfpar.mesh import DATA, Mesh
from tfpar.one_view import OneViewExtended
from tfpar.placement import Placement
from tfpar.replica_context import GlobalViewContext, in_step


class GlobalViewStrategy(tf.distribute.Strategy):
    """What all strategies on one global view share; see `tfpar.HybridStrategy` for use.

    Args:
        mesh: devices and axes.
        placement: decides each variable's layout.
        trainer: builds the functions of `fit`; left out: one program per step.
    """

    def __init__(self, mesh: Mesh, placement: Placement, trainer: training.GlobalViewTrainer | None = None):
        super().__init__(GlobalViewExtended(self, mesh, placement))
        self._mesh, self._placement = mesh, placement
        self._trainer = trainer or training.GlobalViewTrainer()
        mesh.dtensor_mesh  # noqa: B018  makes the devices now, while TensorFlow has not started

    @property
    def mesh(self) -> Mesh:
        """The devices and axes that this strategy trains on."""
        return self._mesh

    @property
    def trainer(self) -> training.GlobalViewTrainer:
        """What builds the functions that Keras' `fit` calls."""
        return self._trainer

    @property
    def placement(self) -> Placement:
        """The decision which layout each variable gets."""
        return self._placement

    def run(self, fn: Callable, args: tuple = (), kwargs: dict | None = None, options: Any = None) -> Any:
        """Runs `fn` once on the whole batch.

        Call it in a `tf.function`, or pass a `tf.function`, to run on the mesh. Called eagerly with a Python function
        it runs on whole tensors on one device, which is slow and good for debugging.

        Args:
            fn: the step.
            args: its positional arguments; batches as `experimental_distribute_dataset` gives them.
            kwargs: its keyword arguments.
            options: not used.

        Returns:
            What `fn` returns.
        """
        del options
        return self.extended.call_for_each_replica(fn, args, kwargs)

    def reduce(self, reduce_op: Any, value: Any, axis: int | None = None) -> Any:
        """Combines a value over replicas, of which the global view has one.

        Args:
            reduce_op: "SUM" or "MEAN".
            value: what `run` returned.
            axis: a dim to sum or average over, usually 0, the examples. None: the value is global and stays as it is.

        Returns:
            An ordinary tensor outside a `tf.function`.
        """
        value = transfer.all_to_host(value)
        if axis is None:
            return value
        reduce = {"SUM": tf.reduce_sum, "MEAN": tf.reduce_mean}[getattr(reduce_op, "value", reduce_op).upper()]
        return tf.nest.map_structure(lambda leaf: reduce(leaf, axis), value)

    def gather(self, value: Any, axis: int) -> Any:
        """The whole of a value as an ordinary tensor; it is global, so there is nothing to concatenate along `axis`."""
        del axis
        return transfer.all_to_host(value)

    def describe(self, model: Any) -> describe.Description:
        """The layout and the bytes on each device of every variable of a model.

        Args:
            model: a built model made in this strategy's scope.

        Returns:
            A table for `print`, and an iterable of rows; see `tfpar.describe.Description`.
        """
        return describe.describe(self, model)

    def lay_out(self, model: Any, batch: Any = None) -> None:
        """Gives the variables of a complete model their final layouts and checks the layout rules.

        `fit`, `evaluate`, `predict` and `describe` do this themselves. Call it before the first step of a loop of your
        own, unless `layouts` is a `LayoutMap`.

        Args:
            model: a built model made in this strategy's scope.
            batch: a batch, from which automatic layouts learn the inputs of a model that has no graph of layers.

        Raises:
            ValueError: a rule that matches no variable, or does not fit the one that it matches.
        """
        self._placement.settle(model, batch)

    def check_owns(self, model: Any) -> None:
        """Raises ValueError where a variable of the model, its metrics or its optimizer was made elsewhere."""
        errors.check_model(model, self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(mesh={str(self._mesh)!r})"


class GlobalViewExtended(OneViewExtended):
    """The part of a strategy that TensorFlow and Keras call."""

    def __init__(self, strategy: GlobalViewStrategy, mesh: Mesh, placement: Placement):
        super().__init__(strategy)
        self._mesh, self._placement = mesh, placement
        self._input_mesh = None if placement.pipeline else mesh

    # Steps

    def call_for_each_replica(self, fn: Callable, args: tuple = (), kwargs: dict | None = None) -> Any:
        strategy, kwargs = self._container_strategy(), kwargs or {}
        traced = isinstance(fn, tf.types.experimental.GenericFunction)
        if tf.executing_eagerly():
            move = self._to_mesh if traced else transfer.to_host
            args, kwargs = tf.nest.map_structure(move, (args, kwargs))
        if self._placement.pipeline is not None and (traced or not tf.executing_eagerly()):
            raise errors.loop_over_stages(strategy)
        with strategy.scope(), GlobalViewContext(strategy), variables.StepView(strategy):
            return fn(*args, **kwargs)

    def _to_mesh(self, value: Any) -> Any:
        """An ordinary tensor or array on every device; anything else unchanged."""
        if not isinstance(value, (tf.Tensor, np.ndarray)) or dtensor.is_dtensor(value):
            return value
        return transfer.to_mesh(value, self._mesh.layout([None] * len(value.shape)))

    @property
    def _num_replicas_in_sync(self) -> int:
        """1 inside a step, where Keras and TensorFlow divide by it; the data-parallel size where users multiply by it."""
        is_current = tf.distribute.get_strategy() is self._container_strategy()
        in_step = is_current and (not tf.distribute.in_cross_replica_context() or variables.step_owner() is not None)
        return 1 if in_step else self._mesh.data_size

    def _local_results(self, value: Any) -> tuple:
        if tf.executing_eagerly() and isinstance(value, tf.Tensor) and dtensor.is_dtensor(value):
            return transfer.split(value, dtensor.fetch_layout(value), DATA)
        return (value,)

    # Variables

    def _create_variable(self, next_creator: Callable, **kwargs) -> variables.MeshVariable:
        del next_creator
        return self._placement.create(self._container_strategy(), **kwargs)

    @property
    def worker_devices(self) -> tuple[str, ...]:
        return tuple(self._mesh.dtensor_mesh.local_devices())

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        return self.worker_devices

    # Input

    def _experimental_distribute_dataset(self, dataset: tf.data.Dataset, options: Any) -> input_lib.MeshDataset:
        del options
        return input_lib.MeshDataset(dataset, self._input_mesh)

    def _distribute_datasets_from_function(self, dataset_fn: Callable, options: Any) -> input_lib.MeshDataset:
        del options
        context = tf.distribute.InputContext(num_replicas_in_sync=self._mesh.data_size)
        group = input_lib.concatenate_groups(self._mesh.data_size)
        return input_lib.MeshDataset(dataset_fn(context), self._input_mesh, group)

    def _experimental_distribute_values_from_function(self, value_fn: Callable) -> Any:
        count = self._mesh.data_size
        contexts = [tf.distribute.experimental.ValueContext(i, count) for i in range(count)]
        values = [tf.nest.map_structure(tf.convert_to_tensor, value_fn(context)) for context in contexts]
        joined = tf.nest.map_structure(
            lambda *leaves: tf.concat(leaves, 0) if leaves[0].shape.rank else tf.stack(leaves), *values
        )
        return input_lib.distribute(joined, self._mesh)

    def _in_multi_worker_mode(self) -> bool:
        return dtensor.num_clients() > 1

    @property
    def should_checkpoint(self) -> bool:
        return dtensor.client_id() == 0

    @property
    def should_save_summary(self) -> bool:
        return dtensor.client_id() == 0


def _is_global(strategy: Any) -> bool:
    return isinstance(strategy, GlobalViewStrategy)


compat.follow_variable_creation()
compat.keep_losses_global(_is_global)
compat.number_collectives_apart()
compat.shorten_errors()
compat.accept_mesh_datasets()
compat.unroll_recurrence(lambda: variables.step_owner() is not None)
compat.save_once(
    shared=lambda model: dtensor.num_clients() > 1 and _is_global(compat.strategy_of(model)),
    is_writer=lambda: dtensor.client_id() == 0,
    wait=lambda model: dtensor.barrier(compat.strategy_of(model).mesh.dtensor_mesh, timeout_in_ms=600_000),
)
training.install(_is_global)
steps.track_losses_by_step(in_step, steps.reduced_share)
