"""Where batches come from: the coordinator, or a pipeline on every worker."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf


class ServedDataset(tf.distribute.DistributedDataset):
    """What `fit` draws batches from under a `ParameterServerStrategy`.

    Args:
        source: a `tf.data.Dataset`, which the coordinator reads, so that each batch is used once; or a function of a
            `tf.distribute.InputContext` that returns one, which every worker calls for a pipeline of its own.
        workers: how many workers there are.

    Attributes:
        steps_per_epoch: what `fit` was given, None if nothing.
    """

    def __init__(self, source: tf.data.Dataset | Callable[[tf.distribute.InputContext], tf.data.Dataset], workers: int):
        self._source, self._workers = source, workers
        self.steps_per_epoch: int | None = None
        self._example = source if isinstance(source, tf.data.Dataset) else self.of_worker(0)

    def of_worker(self, worker: int) -> tf.data.Dataset:
        """The pipeline of a worker, made where it is called.

        Raises:
            ValueError: the function returns no dataset.
        """
        try:
            found = self._source(tf.distribute.InputContext(self._workers, worker, 1))
        except tf.errors.InvalidArgumentError as error:
            if "Failed copying input tensor" not in str(error):
                raise
            raise ValueError(
                "The function given to fit uses a tf.data.Dataset that was made outside of it, on the coordinator, which "
                "cannot go to a worker. Make the whole dataset inside the function, from files or arrays."
            ) from error
        if not isinstance(found, tf.data.Dataset):
            raise ValueError(
                f"The function given to fit returned {type(found).__name__}, expected a batched tf.data.Dataset made from "
                "the tf.distribute.InputContext that it is called with."
            )
        return found

    @property
    def on_workers(self) -> bool:
        """Whether workers have pipelines of their own."""
        return not isinstance(self._source, tf.data.Dataset)

    def __iter__(self) -> ServedIterator:
        return ServedIterator(self)

    def batches(self) -> Iterator[Any]:
        """The batches, read by the coordinator."""
        return iter(self._source if not self.on_workers else self._source(tf.distribute.InputContext()))

    @property
    def element_spec(self) -> Any:
        """Shapes and dtypes of a batch."""
        return self._example.element_spec

    def cardinality(self) -> tf.Tensor:
        """The number of batches, as `tf.data.Dataset.cardinality`; unknown where workers have pipelines of their own."""
        return tf.constant(tf.data.UNKNOWN_CARDINALITY, tf.int64) if self.on_workers else self._source.cardinality()

    def __len__(self) -> int:
        return len(self._source)


class ServedIterator:
    """One pass over a dataset; `fit` hands it to the step functions, which draw from it as workers become free."""

    def __init__(self, dataset: ServedDataset):
        self.dataset, self.steps_per_epoch = dataset, dataset.steps_per_epoch
        self._batches: list[Iterator[Any]] = []  # one, once something has been drawn
        self._dropped = _dropped()

    def __iter__(self) -> ServedIterator:
        return self

    def __next__(self) -> Any:
        if not self._batches:
            self._batches.append(self.dataset.batches())
        return next(self._batches[0])

    def __del__(self):
        if self._batches:
            self._dropped.put(self._batches)

    def get_next(self) -> Any:
        """The next batch; `tf.errors.OutOfRangeError` at the end, as of `tf.distribute.DistributedIterator`."""
        try:
            return next(self)
        except StopIteration:
            raise tf.errors.OutOfRangeError(None, None, "The dataset has no more batches.") from None


@functools.cache
def _dropped() -> queue.SimpleQueue[list[Iterator[Any]]]:
    """Takes lists of iterators that nobody uses any more; a thread empties them.

    Who drops an iterator of `tf.data` waits for its tuning thread to end. That thread looks whether it shall end, sleeps up
    to as long as it has lived, and often misses the call to wake up: in TensorFlow 2.21 the callbacks of a cancellation come
    before `IsCancelled`, which `Model::OptimizeLoop` asks. Measured: 2.5 s after a fit of 4 s.
    """
    dropped: queue.SimpleQueue[list[Iterator[Any]]] = queue.SimpleQueue()

    def empty() -> None:
        while True:
            dropped.get().clear()

    threading.Thread(target=empty, name="tfpar-iterators", daemon=True).start()
    return dropped


def without_missing(batch: Any) -> Any:
    """A batch, or its specs, with None for what is missing, which Keras wraps in an Optional for `tf.data`."""
    missing = tf.experimental.Optional | tf.OptionalSpec
    return tf.nest.map_structure(lambda leaf: None if isinstance(leaf, missing) else leaf, batch)


def as_tensors(batch: Any) -> Any:
    """A batch of arrays or tensors as tensors, with None for what is missing."""

    def tensor(leaf: Any) -> Any:
        is_ready = leaf is None or isinstance(leaf, tf.Tensor | tf.RaggedTensor | tf.SparseTensor)
        return leaf if is_ready else tf.convert_to_tensor(leaf)

    return tf.nest.map_structure(tensor, without_missing(batch))


def examples(batch: Any) -> int:
    """The number of examples of a batch."""
    for leaf in tf.nest.flatten(batch):
        if leaf is not None and (isinstance(leaf, tf.RaggedTensor | tf.SparseTensor) or leaf.shape.rank):
            return int(leaf.shape[0] if leaf.shape[0] is not None else leaf.dense_shape[0])
    return 1


def cut(batch: Any, sizes: list[int]) -> list[Any]:
    """A batch in parts of some sizes; None and scalars belong to each of them."""

    def part(leaf: Any, first: int, size: int) -> Any:
        if leaf is None or (not isinstance(leaf, tf.RaggedTensor | tf.SparseTensor) and not leaf.shape.rank):
            return leaf
        if isinstance(leaf, tf.SparseTensor):
            rest = tf.shape(leaf, tf.int64)[1:]
            start = tf.concat([[first], tf.zeros_like(rest)], 0)
            return tf.sparse.slice(leaf, start, tf.concat([[size], rest], 0))
        return leaf[first : first + size]

    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [tf.nest.map_structure(lambda leaf, f=f, n=n: part(leaf, f, n), batch) for f, n in zip(starts, sizes)]


def even(examples: int, parts: int) -> list[int]:
    """Sizes of at most `parts` parts, none empty, that differ by at most one."""
    parts = max(1, min(parts, examples))
    return [examples // parts + (i < examples % parts) for i in range(parts)]
