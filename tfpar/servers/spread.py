"""On which servers a variable lives: parts of its rows by a partitioner, each on the server with the fewest bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

Partitioner = Callable[..., Sequence[int]]

HOST = "/job:chief/replica:0/task:0/device:CPU:0"  # the coordinator, which keeps metrics
SMALLEST_PART = 64 << 10  # bytes; a smaller part costs a message and saves no time


@dataclasses.dataclass(frozen=True)
class Homes:
    """Where a variable lives.

    Attributes:
        devices: one per part, or per copy.
        bounds: the first row of each part, and at the end the number of rows; None: every device has a whole copy.
    """

    devices: tuple[str, ...]
    bounds: tuple[int, ...] | None = None

    @property
    def is_split(self) -> bool:
        """Whether no device has all of it."""
        return self.bounds is not None and len(self.devices) > 1

    def rows(self, part: int) -> slice:
        """The rows of a part."""
        return slice(self.bounds[part], self.bounds[part + 1])


def default_partitioner(servers: int) -> Partitioner:
    """At most one part per server, none smaller than 64 KiB.

    Args:
        servers: how many there are.
    """

    def parts(shape: tf.TensorShape, dtype: tf.DType) -> list[int]:
        return [max(1, min(servers, _bytes(shape, dtype, None) // SMALLEST_PART)), *[1] * (shape.rank - 1)]

    return parts


class Spread:
    """Gives each new variable its homes, and counts the bytes of each server.

    Args:
        devices: of the servers.
        partitioner: takes `shape` and `dtype`, returns the number of parts along each dim, of which all but the first are 1.
    """

    def __init__(self, devices: Sequence[str], partitioner: Partitioner):
        self.devices, self._partitioner = tuple(devices), partitioner
        self.bytes = dict.fromkeys(devices, 0)

    def place(self, shape: tf.TensorShape, dtype: tf.DType, path: str) -> Homes:
        """Chooses the homes of a variable's parts.

        Args:
            shape: of the variable.
            dtype: of the variable.
            path: its name, for messages.

        Raises:
            ValueError: the partitioner's answer is not as expected.
        """
        bounds = self._bounds(shape, dtype, path)
        homes, sizes = [], dict(self.bytes)
        for first, last in zip(bounds, bounds[1:]):
            free = [device for device in self.devices if device not in homes]
            homes.append(min(free, key=sizes.__getitem__))
            sizes[homes[-1]] += _bytes(shape, dtype, last - first)
        self.count(found := Homes(tuple(homes), tuple(bounds)), shape, dtype)
        return found

    def count(self, homes: Homes, shape: tf.TensorShape, dtype: tf.DType) -> None:
        """Adds the bytes of a variable whose homes are known, such as an optimizer's slot."""
        for part, device in enumerate(homes.devices):
            rows = None if homes.bounds is None else homes.bounds[part + 1] - homes.bounds[part]
            self.bytes[device] += _bytes(shape, dtype, rows)

    def _bounds(self, shape: tf.TensorShape, dtype: tf.DType, path: str) -> list[int]:
        if not shape.rank or not shape[0]:
            return [0, shape[0] if shape.rank else 1]
        answer = list(self._partitioner(shape=shape, dtype=dtype))
        if len(answer) != shape.rank or not answer or answer[0] < 1 or any(parts != 1 for parts in answer[1:]):
            raise ValueError(
                f"variable_partitioner returned {answer} for {path!r} of shape {tuple(shape)}; expected one number of parts "
                "per dim, at least 1 for the first and 1 for all others, because variables are split by rows."
            )
        parts = min(answer[0], shape[0], len(self.devices))
        sizes = [len(rows) for rows in np.array_split(np.arange(shape[0]), parts)]
        return [0, *np.cumsum(sizes).tolist()]


def _bytes(shape: tf.TensorShape, dtype: tf.DType, rows: int | None) -> int:
    dims: list[Any] = list(shape)
    if rows is not None and dims:
        dims[0] = rows
    return int(np.prod(dims, dtype="int64")) * max(dtype.size, 1)
