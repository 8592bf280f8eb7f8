"""Warnings for what a step does whole on every device: the operation, its layers and what that costs.

    replicated   TensorFlow cannot partition it: what it reads and makes, from the shapes in the traced graph
    gathered     `op_gathers.py` gathers what it reads: from the collectives of the partitioned program, because only they
                 tell what was split

Each kind of operation is named once in a process.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator

import tensorflow as tf

from tfpar import op_gathers, op_support
from tfpar.collectives import Collective
from tfpar.describe import size_text

_OPAQUE = (tf.variant, tf.resource, tf.string)
_warned: set[str] = set()


def warn_replicated(graph: tf.Graph) -> None:
    """Warns where a traced step has operations that run replicated."""
    kinds: dict[str, list[tf.Operation]] = {}
    for operation in all_operations(graph):
        if op_support.is_replicated(operation.type):
            kinds.setdefault(operation.type, []).append(operation)
    for kind, operations in kinds.items():
        _warn_once(
            kind,
            f"TensorFlow cannot partition the operation {kind} ({_places(o.name for o in operations)}): its inputs are "
            f"gathered and every device computes the whole of it{_held(operations)}. The numbers are right; this part is "
            "not sped up.",
        )


def warn_gathered(graph: tf.Graph, sent: Iterable[Collective]) -> None:
    """Warns where a partitioned step gathers what an operation cannot read split.

    TensorFlow lets the operation that makes a value gather it, if the one that moves it comes next.
    """
    movers: dict[str, str] = {}
    for operation in all_operations(graph):
        if op_gathers.user_of(operation.name):
            movers |= dict.fromkeys((operation.name, *(value.op.name for value in operation.inputs)), operation.name)
    kinds: dict[str, list[tuple[str, int]]] = {}
    for collective in sent:
        if collective.kind == "all-gather" and collective.operation in movers:
            mover = movers[collective.operation]
            kinds.setdefault(op_gathers.user_of(mover), []).append((mover, collective.bytes))
    for kind, gathers in kinds.items():
        _warn_once(
            kind,
            f"The operation {kind} ({_places(name for name, _ in gathers)}) reads tensors whole that are split here: every "
            f"device gathers {size_text(sum(size for _, size in gathers))} for it in a step. The numbers are right.",
        )


def all_operations(graph: tf.Graph) -> Iterator[tf.Operation]:
    """The operations of a graph and of the functions in it."""
    yield from graph.get_operations()
    for function in getattr(graph, "_functions", {}).values():
        inner = getattr(function, "graph", None)
        if inner is not None and inner is not graph:
            yield from inner.get_operations()


def _warn_once(kind: str, text: str) -> None:
    if kind not in _warned:
        _warned.add(kind)
        warnings.warn(text, stacklevel=3)


def _held(operations: Iterable[tf.Operation]) -> str:
    """The bytes of all inputs and results in words; "" where no size is known."""
    tensors = {t.name: t for operation in operations for t in (*operation.inputs, *operation.outputs)}
    sizes = [(t.shape.num_elements() or 0) * t.dtype.size for t in tensors.values() if t.dtype not in _OPAQUE]
    unknown = any(t.shape.num_elements() is None or t.dtype in _OPAQUE for t in tensors.values())
    return f", {'at least ' * unknown}{size_text(sum(sizes))} of inputs and results in a step" if sum(sizes) else ""


def _places(names: Iterable[str]) -> str:
    """The first layer, and how many others there are."""
    layers = list(dict.fromkeys(map(_layer, names)))
    return f"in {layers[0]!r}" + (f" and {len(layers) - 1} more" if layers[1:] else "")


def _layer(name: str) -> str:
    """The layer part of an operation's name: "gradient_tape/model/pool/AvgPoolGrad" gives "model/pool"."""
    parts = [part for part in op_gathers.without_scope(name).split("/")[:-1] if part != "gradient_tape"]
    return "/".join(parts) or name
