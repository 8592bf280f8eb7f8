"""The functions that Keras' `fit`, `evaluate` and `predict` call for a model on parameter servers."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfpar import errors, training
from tfpar.compat import training as steps
from tfpar.servers import checks, updates
from tfpar.servers.loops import Ended, Engine, FreeLoop, Loop, StepRecord, SyncLoop, Task
from tfpar.servers.modes import Mode
from tfpar.servers.programs import Program
from tfpar.servers.spread import HOST

LOG_LENGTH = 100_000  # steps that are remembered


class ServerTrainer(training.GlobalViewTrainer):
    """Builds a model's step functions; `compat.install_trainer` calls it."""

    def __init__(self):
        self._records: weakref.WeakKeyDictionary[keras.Model, collections.deque] = weakref.WeakKeyDictionary()

    def train_function(self, model: keras.Model) -> Callable[[Iterable], Any]:
        records = self._records[model] = collections.deque(maxlen=LOG_LENGTH)
        return Steps(model, model.train_step, model.distribute_strategy.mode, records).over_batches

    def test_function(self, model: keras.Model) -> Callable[[Iterable], Any]:
        return Steps(model, model.test_step, Mode()).over_batches

    def predict_function(self, model: keras.Model) -> Callable[[list], Any]:
        return Steps(model, model.predict_step, Mode("sync"), predicts=True).outputs

    def records(self, model: keras.Model) -> list[StepRecord]:
        """The training steps of a model since it was compiled."""
        return list(self._records.get(model, ()))


class Steps:
    """One of a model's steps on the workers of its strategy.

    Args:
        model: the model.
        step: its `train_step`, `test_step` or `predict_step`.
        mode: how workers keep step.
        records: where to note the steps.
        predicts: whether the step returns outputs, not logs.

    Raises:
        ValueError: the model asks for XLA or for eager steps, or was made elsewhere.
    """

    def __init__(self, model: keras.Model, step: Callable, mode: Mode, records: Any = None, predicts: bool = False):
        strategy = model.distribute_strategy
        strategy.check_owns(model)
        if model.jit_compile:
            raise errors.jit_compile(strategy)
        if model.run_eagerly:
            raise ValueError(
                f"run_eagerly=True does not work under {strategy!r}: steps run in other processes, as functions. Debug on "
                "one device, without a strategy."
            )
        self._model, self._strategy, self._mode, self._predicts = model, strategy, mode, predicts
        self._program = Program(model, step, in_parts=mode.name == "sync" and not predicts)
        self._updates: dict[int, Any] = {}
        self._loop: Loop | None = None
        self._is_checked = predicts
        update = self._join if predicts else self._update
        self._engine = Engine(strategy.dispatcher, self._prepare, self._divisors, update, mode, records)
        self._watch = errors.NanWatch(model)

    def over_batches(self, iterator: Iterator[Any]) -> Any:
        """`steps_per_execution` updates; the last one's logs. StopIteration where no batch is left."""
        if self._loop is None or self._loop.iterator is not iterator:
            self._loop = (SyncLoop if self._mode.name == "sync" else FreeLoop)(self._engine, iterator)
        logs = None
        for _ in range(self._model.steps_per_execution):
            try:
                logs = self._loop.step()
            except StopIteration:
                break
        if logs is None:
            raise StopIteration
        self._watch.see(logs)
        return logs

    def outputs(self, batches: Sequence[Any]) -> Any:
        """The outputs for batches, each cut over the workers, as one."""
        found = [SyncLoop(self._engine, iter([batch])).step() for batch in batches]
        return _joined(found)

    def _prepare(self, batch: Any) -> Callable[[Any, int, float, Sequence[float]], Any]:
        """Traces the step for a batch or its specs, on this thread; the result is called on the workers' threads."""
        training.build(self._model, batch)
        if self._model.optimizer is not None and not self._predicts:
            steps.build_optimizer(self._model)
        concrete = self._program.trace(batch)

        def compute(batch: Any, worker: int, share: float, totals: Sequence[float]) -> Any:
            result = concrete(*Program.arguments(batch, worker, share, totals))
            if self._predicts:
                return _on_host(result["returned"])
            brought = ("metrics",) if self._program.own_logs is None else ("metrics", "returned")
            return result | {name: _on_host(result[name]) for name in brought}

        return compute

    def _divisors(self, batch: Any) -> Callable | None:
        if self._program.signature is None:
            self._prepare(batch)
        if not self._program.signature.divisors:
            return None
        concrete = self._program.trace_divisors(batch)

        def compute(batch: Any, worker: int, share: float, totals: Sequence[float]) -> list[float]:
            found = concrete(*Program.arguments(batch, worker, share, totals))
            return [float(number) for number in found]

        return compute

    def _update(self, ended: Sequence[Ended]) -> Any:
        """Makes an update of the results of steps; returns the logs."""
        results = [one.value for one in ended]
        if not self._is_checked:
            self._check([one.task for one in ended])
        if len(results) not in self._updates:
            self._updates[len(results)] = updates.update_function(self._model, self._program.signature, results)
        update, flat = self._updates[len(results)], updates.flat(results)
        metrics = self._strategy.dispatcher.call(lambda: update(*flat))
        own_logs = self._program.own_logs
        if own_logs is None:
            return metrics
        returned, shares = results[0]["returned"], [one.task.share for one in ended]
        tracked = {name: value for name, value in metrics.items() if name not in self._program.untracked}

        def log(name: str) -> Any:
            if name in tracked or name in own_logs:
                return tracked[name] if name in tracked else own_logs.value(name)
            return _mean([of["returned"][name] for of in results], shares)

        return {name: log(name) for name in returned}

    def _join(self, ended: Sequence[Ended]) -> Any:
        """The outputs for a batch from those for its parts."""
        for one in ended if len(ended) > 1 else ():
            wrong = [leaf.shape for leaf in tf.nest.flatten(one.value) if leaf.shape[:1] != (one.task.examples,)]
            if wrong:
                raise ValueError(
                    f"The model {self._model.name!r} has an output of shape {tuple(wrong[0])} for {one.task.examples} "
                    "examples, so that the outputs of several workers cannot be joined. Predict on one device: load the "
                    "saved model without a strategy."
                )
        return _joined([one.value for one in ended])

    def _check(self, parts: Sequence[Task]) -> None:
        """Refuses what workers cannot compute apart, before the first update."""
        self._is_checked = True
        outputs, is_here = self._program.outputs, all(part.batch is not None and part.home is None for part in parts)
        if outputs is not None and is_here:
            checks.check(self._model, outputs, [part.batch for part in parts])


def _on_host(value: Any) -> Any:
    """Tensors of a worker, brought to the coordinator; the worker's step has ended then."""
    with tf.device(HOST):
        return tf.nest.map_structure(tf.identity, value, expand_composites=True)


def _joined(parts: Sequence[Any]) -> Any:
    return tf.nest.map_structure(lambda *leaves: _concat(leaves), *parts)


def _concat(leaves: Sequence[Any]) -> Any:
    if len(leaves) == 1 or leaves[0] is None or not leaves[0].shape.rank:
        return leaves[0]
    return tf.concat(leaves, 0)


def _mean(values: Sequence[Any], shares: Sequence[float]) -> Any:
    """A log of a model's own: of one step as it is, of parts the mean over the examples."""
    if len(values) == 1:
        return values[0]
    return np.average([np.asarray(value) for value in values], axis=0, weights=shares)
