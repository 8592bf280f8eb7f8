"""What parameter servers need of TensorFlow's own strategy and coordinator, and of Keras' `fit`, with the reasons."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

# `fit` learns how long an epoch is in the epoch iterator only; see `follow_epochs`.
from keras.src.backend.common.stateless_scope import in_stateless_scope
from keras.src.backend.tensorflow import trainer as keras_trainer

# The coordinator gives a closure to whichever worker is free. Its resources are for one worker, and so are our steps.
from tensorflow.python.distribute.coordinator import cluster_coordinator

# Reads of several servers are one read to a gradient tape.
from tensorflow.python.eager import record as tf_record

# Public as tf.Variable, which makes its own resource; ours stands for resources on several servers.
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable as BaseResourceVariable

from tfpar import compat

stop_recording = tf_record.stop_recording


class ServerStrategy(tf.distribute.ParameterServerStrategy):
    """TensorFlow's own strategy, which connects to the cluster, with another way to place variables and run steps.

    Args:
        resolver: the cluster.
        extended: makes the part of the strategy that TensorFlow and Keras call; called with the strategy.
    """

    def __init__(self, resolver: tf.distribute.cluster_resolver.ClusterResolver, extended: Callable[[Any], Any]):
        log = tf.get_logger()
        before = log.level
        log.setLevel("WARNING")  # it says that it is another strategy, on devices that it will not use
        try:
            super().__init__(resolver)
        finally:
            log.setLevel(before)
        self._extended = extended(self)
        self._extended._retrace_functions_for_each_device = False  # what a strategy sets on the one that it is made with


class Coordinator:
    """TensorFlow's `ClusterCoordinator`, told which worker takes what.

    It has a thread per worker, waits for one that was lost, and connects to it again.

    Args:
        strategy: a `ServerStrategy`.
    """

    def __init__(self, strategy: ServerStrategy):
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self._cluster = self._coordinator._cluster

    def start(self, worker: int, work: Callable[[], Any]) -> None:
        """Calls `work` on the worker's thread, its operations placed on the worker.

        An error of `work` that `is_worker_failure` holds for makes the thread wait for the worker to come back.
        """
        closure = cluster_coordinator.ResourceClosure(work, self._cluster.resource_cancellation_mgr)
        self._cluster.closure_queue.put(closure, tag=worker)

    def lose(self, worker: int, error: BaseException) -> None:
        """Marks a worker as lost, before anybody gives it something that the coordinator would throw away."""
        self._cluster.workers[worker]._is_dead_with_error = error

    def is_lost(self, worker: int) -> bool:
        """Whether the worker failed and has not come back."""
        return bool(self._cluster.workers[worker]._is_dead_with_error)


def is_worker_failure(error: BaseException) -> bool:
    """Whether an error says that a worker is gone, in TensorFlow's own judgement."""
    return cluster_coordinator._is_worker_failure(error)


def record_lookup(rows: tf.Tensor, handle: tf.Tensor, gradient: Callable[[tf.Tensor], tf.IndexedSlices]) -> None:
    """Tells gradient tapes that `rows` were looked up in the variable behind `handle`, as `compat.record_read`."""
    tf_record.record_operation("ResourceGather", [rows], [handle], lambda upstream: [gradient(upstream)])


def add_in_place(is_ours: Callable[[Any], bool]) -> None:
    """Lets `keras.Variable.assign_add` and `assign_sub` add, where the native variable is ours.

    Keras reads, adds and writes, and loses what others add between.
    """
    for name in ("assign_add", "assign_sub"):
        original = getattr(keras.Variable, name)

        def method(self, value, original=original, name=name):
            native = compat.native(self)
            if not is_ours(native) or in_stateless_scope():
                return original(self, value)
            getattr(native, name)(tf.cast(tf.convert_to_tensor(value), native.dtype))
            return value

        setattr(keras.Variable, name, functools.wraps(original)(method))


def show_parts(shape_of: Callable[[Any], tf.TensorShape | None]) -> None:
    """Lets a Keras variable have the shape of the part of it that an optimizer sees; Keras checks it on assignment.

    Args:
        shape_of: called with the native variable; None: the variable's own shape.
    """
    whole = keras.Variable.shape

    def shape(self):
        part = shape_of(compat.native(self))
        return whole.fget(self) if part is None else part

    keras.Variable.shape = property(functools.wraps(whole.fget)(shape))


def follow_epochs(served: type, distribute: Callable[[tf.distribute.Strategy, Callable], Any]) -> None:
    """Lets `fit` take a function of an input context, and tells a dataset how many steps an epoch has.

    Args:
        served: the class of the datasets that are told, by their attribute `steps_per_epoch`.
        distribute: makes one from a strategy and a function; returns None where the strategy takes no functions.
    """
    iterator = keras_trainer.TFEpochIterator
    original = iterator.__init__

    @functools.wraps(original)
    def init(self, distribute_strategy=None, x=None, *args, **kwargs):
        made = distribute(distribute_strategy, x) if callable(x) and not isinstance(x, type) else None
        original(self, distribute_strategy, x if made is None else made, *args, **kwargs)
        if isinstance(self._distributed_dataset, served):
            self._distributed_dataset.steps_per_epoch = self.steps_per_epoch

    iterator.__init__ = init
