"""What strategies share in which Keras' step runs once, so that reductions over replicas have nothing to do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfpar import compat


class OneViewExtended(tf.distribute.StrategyExtended):
    """The part of such a strategy that TensorFlow and Keras call."""

    def _use_merge_call(self) -> bool:
        return False  # Keras' optimizer then stays in the one context

    def update(self, var: Any, fn: Callable, args: tuple = (), kwargs: dict | None = None, group: bool = True) -> Any:
        del group
        return fn(var, *args, **(kwargs or {}))

    def _replica_ctx_update(self, var: Any, fn: Callable, args: tuple = (), kwargs: dict | None = None, group: bool = True):
        return self.update(var, fn, args, kwargs, group)

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        del reduce_op, destinations, options
        return value

    def _gather_to_implementation(self, value: Any, destinations: Any, axis: int, options: Any) -> Any:
        del destinations, axis, options
        return value

    def _get_local_replica_id(self, replica_id_in_sync_group: int) -> int:
        return replica_id_in_sync_group

    def variable_created_in_scope(self, variable: Any) -> bool:
        return getattr(compat.native(variable), "_distribute_strategy", None) is self._container_strategy()

    def value_container(self, value: Any) -> Any:
        return value

    @contextlib.contextmanager
    def colocate_vars_with(self, variable: Any) -> Iterator[None]:
        """Variables made here go where `variable` is; Keras makes an optimizer's slots so, in a strategy's scope or not."""

        def creator(next_creator, **kwargs):
            return next_creator(**kwargs, colocate_with=variable)

        strategy = self._container_strategy()
        is_current = tf.distribute.get_strategy() is strategy
        with contextlib.nullcontext() if is_current else strategy.scope(), tf.variable_creator_scope(creator):
            yield
