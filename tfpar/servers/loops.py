"""Steps on several workers, one update at a time: which worker gets which batch, and what its results do.

State changes in `Loop.step` alone, on the thread that called it. Between two calls weights, slots and metrics are those
after a whole number of updates, whatever workers are doing.
"""

from __future__ import annotations

import collections
import dataclasses
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfpar.servers import input as input_lib
from tfpar.servers.dispatch import Dispatcher, Ended, WorkerLostError
from tfpar.servers.modes import Mode


@dataclasses.dataclass(eq=False)
class Task:
    """A batch, or a part of one, on its way.

    Attributes:
        loop: whose it is.
        number: of the part in its batch.
        batch: on the coordinator; None: the worker draws from its own pipeline.
        home: the worker that has the batch, where the coordinator has not.
        share: of the batch's examples.
        examples: their number.
        version: how many updates there had been when it was started.
    """

    loop: Loop
    number: int = 0
    batch: Any = None
    home: int | None = None
    share: float = 1.0
    examples: int = 1
    version: int = 0


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """A step that became part of an update.

    Attributes:
        update: the number of the update, from 0.
        worker: who computed it.
        step: its number among the worker's steps.
        staleness: how many updates other steps made between its start and its own.
        started: seconds since the first step.
        ended: seconds since the first step.
    """

    update: int
    worker: int
    step: int
    staleness: int
    started: float
    ended: float


class Source:
    """Where a loop's batches come from.

    Args:
        iterator: what Keras handed over.
        pipelines: makes and draws from the pipelines of workers.
        call: calls a function that may have to wait.
    """

    def __init__(self, iterator: Iterator[Any], pipelines: Pipelines | None, call: Callable[[Callable[[], Any]], Any]):
        self._call = call
        served = isinstance(iterator, input_lib.ServedIterator)
        self.pipelines = pipelines if served and iterator.dataset.on_workers else None
        self._iterator, self._steps = iterator, iterator.steps_per_epoch if served else None
        self.drawn = 0

    @property
    def spec(self) -> Any:
        """Shapes and dtypes of the batches of workers' own pipelines."""
        return self.pipelines.spec

    def draw(self) -> Any:
        """The next batch of the coordinator. StopIteration at the end of the data or of the epoch's steps."""
        self.count()
        return self._call(lambda: input_lib.as_tensors(next(self._iterator)))

    def count(self) -> None:
        """Counts a batch that is about to be drawn. StopIteration where the epoch has no more steps."""
        if self._steps is not None and self.drawn >= self._steps:
            raise StopIteration
        self.drawn += 1

    def end_step(self, updates: int) -> None:
        """Begins another epoch on the same iterator where one has had all its updates."""
        if self._steps is not None and updates % self._steps == 0:
            self.drawn = 0


class Pipelines:
    """The input pipelines of workers, made anew on a worker that was lost.

    Args:
        dataset: gives the pipeline of each worker.
    """

    def __init__(self, dataset: input_lib.ServedDataset):
        self._dataset, self._iterators = dataset, {}
        self.spec = input_lib.without_missing(dataset.element_spec)

    def draw(self, worker: int) -> Any:
        """The next batch of a worker, which stays there, or `DRY` at the end; called on its thread."""
        if worker not in self._iterators:
            self._iterators[worker] = iter(self._dataset.of_worker(worker))
        found = self._iterators[worker].get_next_as_optional()  # an error at the end would stay with the worker's thread
        return input_lib.without_missing(found.get_value()) if found.has_value() else DRY

    def lose(self, worker: int) -> None:
        """Forgets the pipeline of a worker that is gone."""
        self._iterators.pop(worker, None)


@dataclasses.dataclass
class Engine:
    """What a loop uses.

    Attributes:
        dispatcher: the workers.
        prepare: takes a batch or its specs; returns a function of a batch, the worker, the share and the totals, which is
            called on the worker's thread.
        divisors: the same, for what losses are divided by; returns None where no loss asks.
        update: takes the steps that make an update, returns the logs.
        mode: how workers keep step.
        records: takes each step that became part of an update.
        made: how many updates there have been.
    """

    dispatcher: Dispatcher
    prepare: Callable[[Any], Callable[[Any, int, float, Sequence[float]], Any]]
    divisors: Callable[[Any], Callable | None]
    update: Callable[[Sequence[Ended]], Any]
    mode: Mode
    records: collections.deque[StepRecord] | None = None
    made: int = 0


class Loop:
    """What all modes share.

    Args:
        engine: what to use.
        iterator: what Keras handed over.
    """

    def __init__(self, engine: Engine, iterator: Iterator[Any]):
        self.engine, self.iterator = engine, iterator
        served = isinstance(iterator, input_lib.ServedIterator)
        self.source = Source(iterator, Pipelines(iterator.dataset) if served else None, engine.dispatcher.call)
        self.updates = 0
        self._started: dict[int, float] = {}
        self._first = time.monotonic()
        self._clocks = dict.fromkeys(range(engine.dispatcher.count), 0)

    def step(self) -> Any:
        """Makes one update and returns its logs. StopIteration where there is no batch left."""
        raise NotImplementedError

    def clocks(self) -> dict[int, int]:
        """How many steps each live worker has ended; one that came back counts as the slowest of the others."""
        alive = self.engine.dispatcher.alive
        known = [self._clocks[worker] for worker in alive if self._clocks[worker] is not None]
        for worker in alive:
            if self._clocks[worker] is None:
                self._clocks[worker] = min(known, default=0)
        return {worker: self._clocks[worker] for worker in alive}

    def run(self, worker: int, task: Task, compute: Callable[[Any, int], Any]) -> None:
        """Starts a task on a worker: `compute` with its batch and the worker; gives `DRY` where there is no batch."""
        pipelines = self.source.pipelines

        def work() -> Any:
            batch = pipelines.draw(worker) if task.batch is None else task.batch
            return DRY if batch is DRY else compute(batch, worker)

        self._started[worker], task.version = time.monotonic(), self.updates
        self.engine.dispatcher.start(worker, task, work)

    def ended(self) -> Ended:
        """The next step that ended; with an error where its worker was lost.

        Raises:
            Exception: what the step raised, if it is one of this loop.
        """
        found = self.engine.dispatcher.next_ended()
        if found.error is not None and not isinstance(found.error, WorkerLostError):
            self.engine.dispatcher.check_servers(found.error)
            if found.task.loop is self:
                raise found.error
        elif found.error is not None:
            warnings.warn(str(found.error), stacklevel=2)
            self._clocks[found.worker] = None
            if self.source.pipelines:
                self.source.pipelines.lose(found.worker)
        return found

    def record(self, ended: Ended) -> None:
        """Counts a step that becomes part of the next update."""
        step = self._clocks[ended.worker] or 0
        self._clocks[ended.worker] = step + 1
        if self.engine.records is not None:
            started, now = self._started[ended.worker] - self._first, time.monotonic() - self._first
            stale = self.updates - ended.task.version
            self.engine.records.append(StepRecord(self.engine.made, ended.worker, step, stale, started, now))

    def update(self, ended: Sequence[Ended]) -> Any:
        """Makes an update of the results of steps."""
        logs = self.engine.update(ended)
        self.updates += 1
        self.engine.made += 1
        self.source.end_step(self.updates)
        return logs


class FreeLoop(Loop):
    """Each result is an update: the modes "async" and "bounded", and evaluation in every mode."""

    def __init__(self, engine: Engine, iterator: Iterator[Any]):
        super().__init__(engine, iterator)
        self._again: collections.deque[Task] = collections.deque()
        self._running = 0
        self._dry: set[int] = set()  # workers whose pipelines have ended

    def step(self) -> Any:
        while True:
            self._fill()
            if not self._running and not self._again and not self._waits_for_workers():
                raise StopIteration
            ended = self.ended()
            if ended.task is None or ended.task.loop is not self:
                continue
            self._running -= 1
            if ended.error is not None:
                self._again.append(ended.task)
            elif ended.value is DRY:
                self._dry.add(ended.worker)
                self.source.drawn -= 1
            else:
                self.record(ended)
                return self.update([ended])

    def _fill(self) -> None:
        """Gives every free worker that may start something to do."""
        clocks = self.clocks()
        for worker in sorted(self.engine.dispatcher.idle, key=lambda worker: clocks.get(worker, 0)):
            if worker in self._dry or worker not in clocks or not self.engine.mode.may_start(worker, clocks):
                continue
            task = self._again.popleft() if self._again else self._next()
            if task is None:
                return
            self._running += 1
            compute = self.engine.prepare(self.source.spec if task.batch is None else task.batch)
            self.run(worker, task, lambda batch, worker, compute=compute: compute(batch, worker, 1.0, [0.0]))

    def _waits_for_workers(self) -> bool:
        """Whether there may be batches, but all workers are lost for the moment."""
        return not self.engine.dispatcher.alive

    def _next(self) -> Task | None:
        try:
            if self.source.pipelines:
                self.source.count()
                return Task(self)
            return Task(self, batch=self.source.draw())
        except (StopIteration, tf.errors.OutOfRangeError):
            return None


class SyncLoop(Loop):
    """A batch in parts, whose gradients make one update: the mode "sync"."""

    def step(self) -> Any:
        while True:
            try:
                return self._step(self._parts())
            except _HomeLost:  # with the batch that it had drawn; the others draw again
                self.source.drawn -= 1

    def _step(self, parts: list[Task]) -> Any:
        def work(make: Callable[[Any], Any], totals: list[float]) -> Callable[[Task], Callable[[Any, int], Any]]:
            def of(task: Task) -> Callable[[Any, int], Any]:
                compute = make(task.batch)
                return lambda batch, worker: compute(batch, worker, task.share, totals)

            return of

        totals = [0.0]
        if len(parts) > 1 and self.engine.divisors(parts[0].batch) is not None:
            found = self._all(parts, work(self.engine.divisors, totals))
            totals = np.sum([ended.value for ended in found], axis=0).tolist()
        ended = self._all(parts, work(self.engine.prepare, totals))
        for one in ended:
            self.record(one)
        return self.update(ended)

    def _parts(self) -> list[Task]:
        wanted = max(1, len(self.engine.dispatcher.alive) - self.engine.mode.backup_workers)
        if self.source.pipelines is None:
            batch = self.source.draw()
            count = input_lib.examples(batch)
            sizes = input_lib.even(count, wanted)
            parts = input_lib.cut(batch, sizes) if len(sizes) > 1 else [batch]
            shares = [size / max(count, 1) for size in sizes]
            return [Task(self, i, part, None, *of) for i, (part, of) in enumerate(zip(parts, zip(shares, sizes)))]
        self.source.count()
        drawn = self._all([Task(self, i) for i in range(wanted)], lambda task: lambda batch, worker: batch)
        found = [(one.worker, one.value) for one in drawn if one.value is not DRY]
        if not found:
            raise StopIteration
        counts = [input_lib.examples(batch) for _, batch in found]
        return [Task(self, i, batch, home, n / sum(counts), n) for i, ((home, batch), n) in enumerate(zip(found, counts))]

    def _all(self, tasks: list[Task], work: Callable[[Task], Callable[[Any, int], Any]]) -> list[Ended]:
        """Runs tasks on the workers, again where a worker is lost, and twice where one is free and others are late."""
        results: dict[int, Ended] = {}
        waiting = list(tasks)
        while len(results) < len(tasks):
            for worker in self.engine.dispatcher.idle:
                task = next((t for t in waiting if t.home in (None, worker)), None) or self._late(tasks, waiting, results)
                if task is not None:
                    waiting = [other for other in waiting if other is not task]
                    self.run(worker, task, work(task))
            ended = self.ended()
            if not any(ended.task is task for task in tasks) or ended.task.number in results:
                continue
            if ended.error is None:
                results[ended.task.number] = ended
            elif ended.task.home is not None:
                raise _HomeLost
            elif ended.task not in self.engine.dispatcher.running.values():
                waiting.append(ended.task)
        return [results[i] for i in range(len(tasks))]

    def _late(self, tasks: list[Task], waiting: list[Task], results: dict[int, Ended]) -> Task | None:
        """A part that one worker alone is computing, for a backup worker."""
        if not self.engine.mode.backup_workers or waiting:
            return None
        running = list(self.engine.dispatcher.running.values())
        movable = (task for task in tasks if task.home is None and task.batch is not None)
        return next((task for task in movable if task.number not in results and running.count(task) == 1), None)


class _HomeLost(Exception):
    """The worker is lost that had a part of the batch."""


class _Dry:
    """What a worker draws whose pipeline has ended."""


DRY = _Dry()
