"""The replica context of a strategy in which one program sees the whole batch."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class GlobalViewContext(tf.distribute.ReplicaContext):
    """The one replica context: reductions are the identity, because every value is global."""

    def __init__(self, strategy: tf.distribute.Strategy):
        super().__init__(strategy, replica_id_in_sync_group=0)

    keeps_rows = False  # whether gradients of looked up rows stay `IndexedSlices`

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        del reduce_op, options
        return value if self.keeps_rows else tf.nest.map_structure(tf.convert_to_tensor, value)

    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        del axis, options
        return value


class ServersContext(GlobalViewContext):
    """That of a worker's step and of the update on servers."""

    keeps_rows = True


def in_step() -> bool:
    """Whether a step of such a strategy is being traced on this thread."""
    return not tf.executing_eagerly() and isinstance(tf.distribute.get_replica_context(), GlobalViewContext)
