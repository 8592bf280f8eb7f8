"""Batches on a mesh: ordinary `tf.data` in, each device's slice of each batch out.

The batch dim is split by the axis `data`. A batch that this axis does not divide (often the last) goes to every device
whole: the same numbers, only the work is repeated for that one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.experimental import dtensor

from tfpar import transfer
from tfpar.mesh import DATA, Mesh

_UNSPLITTABLE = {
    (
        tf.RaggedTensor,
        tf.RaggedTensorSpec,
    ): "a ragged tensor; make it dense first, for example dataset.map(lambda x, y: (x.to_tensor(), y))",
    (
        tf.SparseTensor,
        tf.SparseTensorSpec,
    ): "a sparse tensor; make it dense first, for example dataset.map(lambda x, y: (tf.sparse.to_dense(x), y))",
}


_LOOP_IN_PYTHON = (
    "A tf.function cannot draw batches of a mesh. Loop in Python and call a tf.function for each batch: "
    "`for batch in dataset: step(batch)`."
)


def distribute(batch: Any, mesh: Mesh) -> Any:
    """Puts one batch on the mesh.

    Args:
        batch: a nested structure of tensors or arrays with the batch as dim 0; None, scalars and what is on a mesh
            already are allowed.
        mesh: where to.

    Returns:
        The structure with DTensors: dim 0 split by the axis `data` where all of the batch's leaves have a number of
        examples that the axis divides, else replicated.

    Raises:
        ValueError: a ragged, sparse or text tensor, or a batch with no examples.
    """
    batch = check(batch)
    leaves = [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]
    divides = all(leaf.shape[0] % mesh.data_size == 0 for leaf in map(tf.convert_to_tensor, leaves) if leaf.shape.rank)

    def lay_out(leaf: Any) -> Any:
        if leaf is None:
            return None
        if tf.is_tensor(leaf) and dtensor.is_dtensor(leaf):
            return leaf
        rank = len(leaf.shape) if hasattr(leaf, "shape") else tf.convert_to_tensor(leaf).shape.rank
        split = rank > 0 and divides and DATA in mesh.axes
        return transfer.to_mesh(leaf, mesh.layout(([DATA] if split else [None] * min(rank, 1)) + [None] * (rank - 1)))

    return tf.nest.map_structure(lay_out, batch)


def check(batch: Any) -> Any:
    """A batch with None for what is missing, which Keras wraps in an Optional so that `tf.data` can carry it.

    Raises:
        ValueError: a ragged, sparse or text tensor, or a batch with no examples.
    """
    batch = tf.nest.map_structure(lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, batch)
    for leaf in tf.nest.flatten(batch):
        if leaf is not None:
            _refuse(leaf)
    return batch


def rows(batch: Any, which: slice) -> Any:
    """Some examples of a structure of tensors; None and scalars belong to all of them."""
    return tf.nest.map_structure(lambda leaf: leaf[which] if leaf is not None and leaf.shape.rank else leaf, batch)


def _refuse(leaf: Any) -> None:
    for kinds, mend in _UNSPLITTABLE.items():
        if isinstance(leaf, kinds):
            raise ValueError(f"A batch on a mesh holds dense tensors, got {mend}.")
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if dtype is not None and tf.as_dtype(dtype) == tf.string:
        raise ValueError(
            "A batch on a mesh holds numbers, got text. Turn text into ids in the input pipeline, for example "
            "dataset.map(lambda x, y: (vectorize(x), y)), rather than in the model."
        )
    if shape is not None and shape[:1] == (0,):
        raise ValueError(
            f"Got a batch with no examples (shape {tuple(shape)}). Drop empty batches, for example with "
            "dataset.filter(lambda x, y: tf.shape(x)[0] > 0)."
        )


class MeshDataset(tf.distribute.DistributedDataset):
    """An iterable of batches on a mesh, what `strategy.experimental_distribute_dataset` returns.

    Args:
        dataset: a batched `tf.data.Dataset`.
        mesh: where the batches go; None: they stay on the host, for pipeline stages that take their parts of them.
        group: called with an iterator of host batches, returns an iterator of global batches. Left out: each batch of
            the dataset is a global batch.
    """

    def __init__(self, dataset: tf.data.Dataset, mesh: Mesh | None, group: Callable[[Iterator], Iterator] | None = None):
        for spec in tf.nest.flatten(dataset.element_spec):
            _refuse(spec)
        self._dataset, self._mesh, self._group = dataset, mesh, group or (lambda batches: batches)

    def __iter__(self) -> Iterator[Any]:
        return MeshIterator(self._group(iter(self._dataset)), self._mesh)

    def __len__(self) -> int:
        return len(self._dataset)

    def reduce(self, initial_state: Any, reduce_func: Callable) -> Any:
        """What a loop over the dataset inside a `tf.function` becomes, which cannot be partitioned.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(_LOOP_IN_PYTHON)

    @property
    def element_spec(self) -> Any:
        """Shapes and dtypes of a batch before it is put on the mesh."""
        return self._dataset.element_spec

    def cardinality(self) -> tf.Tensor:
        """The number of batches, as `tf.data.Dataset.cardinality`."""
        return self._dataset.cardinality()


class MeshIterator:
    """Draws host batches and puts each on the mesh."""

    def __init__(self, batches: Iterator[Any], mesh: Mesh | None):
        self._batches, self._mesh = batches, mesh

    def __iter__(self) -> MeshIterator:
        return self

    def __next__(self) -> Any:
        if not tf.executing_eagerly():
            raise NotImplementedError(_LOOP_IN_PYTHON)
        batch = next(self._batches)
        return batch if self._mesh is None else distribute(batch, self._mesh)

    def get_next(self) -> Any:
        """The next batch; `tf.errors.OutOfRangeError` at the end, as of `tf.distribute.DistributedIterator`."""
        try:
            return next(self)
        except StopIteration:
            raise tf.errors.OutOfRangeError(None, None, "The dataset has no more batches.") from None


def concatenate_groups(size: int) -> Callable[[Iterator], Iterator]:
    """Joins `size` batches of one replica each into one global batch; a shorter last group stays shorter."""

    def group(batches: Iterator[Any]) -> Iterator[Any]:
        while parts := [batch for _, batch in zip(range(size), batches)]:
            yield tf.nest.map_structure(lambda *leaves: tf.concat(leaves, 0), *parts)

    return group
