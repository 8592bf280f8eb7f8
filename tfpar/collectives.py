"""What devices send each other in a step: the collectives of the program that DTensor made of it."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable

import numpy as np
import tensorflow as tf

from tfpar import compat

_KINDS = {"AllReduce": "all-reduce", "AllGather": "all-gather", "AllScatter": "all-scatter", "AllToAll": "all-to-all"}
_NAMED = re.compile(r"DTensor(All\w+?)Op")
_seen: set[str] = set()


@dataclasses.dataclass(frozen=True)
class Collective:
    """One exchange between devices.

    Attributes:
        kind: "all-reduce", "all-gather", "all-scatter" or "all-to-all".
        operation: the operation that it belongs to, as a path of layers; of the gradient, if it starts with
            "gradient_tape".
        shape: of the tensor that each device has afterwards.
        dtype: such as "float32".
        bytes: of that tensor.
    """

    kind: str
    operation: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


def of_new_programs() -> tuple[Collective, ...]:
    """The collectives of all programs that were made since the last call, in no order."""
    programs = compat.program_names() - _seen
    _seen.update(programs)
    return tuple(c for name in programs for c in _collectives(compat.program(name)))


def _collectives(nodes: Iterable) -> Iterable[Collective]:
    for node in nodes:
        if not node.op.startswith("Collective") or "_layout" not in node.attr:  # not of a mesh
            continue
        named = _NAMED.search(node.name)
        shape = tuple(dim.size for dim in node.attr["_output_shapes"].list.shape[0].dim)
        dtype = tf.as_dtype(node.attr["T"].type)
        yield Collective(
            kind=_KINDS.get(named[1], named[1]) if named else "all-reduce",
            operation=node.name.rsplit("/", 1)[0] if named else node.name,
            shape=shape,
            dtype=dtype.name,
            bytes=int(np.prod(shape, dtype=np.int64)) * dtype.size,
        )


def summary(found: Iterable[Collective]) -> list[tuple[str, int, int]]:
    """Number and bytes per kind, the most bytes first."""
    numbers, sizes = collections.Counter(), collections.Counter()
    for collective in found:
        numbers[collective.kind] += 1
        sizes[collective.kind] += collective.bytes
    return [(kind, numbers[kind], size) for kind, size in sizes.most_common()]
