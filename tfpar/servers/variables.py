"""ServerVariable: a `tf.Variable` whose rows lie on several parameter servers, or with a copy on each."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfpar import compat
from tfpar.compat import servers
from tfpar.servers import views
from tfpar.servers.spread import Homes

_numbers = itertools.count()


class ServerVariable(servers.BaseResourceVariable):
    """A variable on parameter servers. Made by a strategy's scope, not by hand.

    Args:
        value: the initial value.
        homes: where it lives.
        make: makes a `tf.Variable` on the current device from an initial value.
        path: the Keras path, for messages.
        kind: "metric", "optimizer", "seed" or "weight": who uses it.
        follows: the variable whose homes it shares, for an optimizer's slot.
        **kwargs: what `tf.Variable` takes.
    """

    def __init__(
        self,
        value: tf.Tensor,
        *,
        homes: Homes,
        make: Callable[[tf.Tensor], tf.Variable],
        path: str,
        kind: str,
        follows: ServerVariable | None,
        **kwargs: Any,
    ):
        self.homes, self.path, self.kind = homes, path, kind
        self.leader: ServerVariable = self if follows is None else follows.leader
        self.parts: list[tf.Variable] = []
        for part, device in enumerate(homes.devices):
            with tf.device(device):
                self.parts.append(make(value[homes.rows(part)] if homes.is_split else value))
        name = kwargs.pop("name", None) or "Variable"
        super().__init__(
            shape=value.shape,
            dtype=value.dtype,
            handle=self.parts[0].handle,
            handle_name=name,
            unique_id=f"{name}_tfpar_{next(_numbers)}",
            **kwargs,
        )

    @property
    def is_parted(self) -> bool:
        """Whether it has rows on servers, one part or several."""
        return self.homes.bounds is not None and self.shape.rank > 0

    def pull(self) -> tf.Tensor:
        """The whole value on the current device, unknown to gradient tapes."""
        with servers.stop_recording():
            if not self.homes.is_split:
                return self._on(0, lambda part: part.read_value())
            return tf.concat([self._on(i, lambda part: part.read_value()) for i in range(len(self.parts))], 0)

    def lookup(self, ids: tf.Tensor) -> tf.Tensor:
        """Rows by their numbers, each sent once; one read with `IndexedSlices` as its gradient to gradient tapes.

        Args:
            ids: integers of any shape.

        Returns:
            Shape `ids.shape + self.shape[1:]`.
        """
        with servers.stop_recording():
            flat = tf.reshape(ids, [-1])
            unique, position = tf.unique(flat)
            bounds, last = self.homes.bounds, len(self.parts) - 1
            found = []
            for i in range(last + 1):
                # ids out of range go to the first or the last part, whose server refuses them
                mine = tf.ones_like(unique, tf.bool) if i == 0 else unique >= bounds[i]
                mine = mine if i == last else mine & (unique < bounds[i + 1])
                where = tf.cast(tf.where(mine)[:, 0], tf.int32)
                wanted = tf.gather(unique, where) - bounds[i]
                found.append((where, self._on(i, lambda part, wanted=wanted: part.sparse_read(wanted))))
            rows = found[0][1] if last == 0 else tf.dynamic_stitch(*zip(*found))
            rows = tf.reshape(tf.gather(rows, position), tf.concat([tf.shape(ids), self.shape[1:]], 0))
            rows.set_shape(ids.shape + self.shape[1:])

        def gradient(upstream: tf.Tensor) -> tf.IndexedSlices:
            values = tf.reshape(upstream, tf.concat([tf.shape(flat), self.shape[1:]], 0))
            return tf.IndexedSlices(values, flat, tf.constant(self.shape.as_list(), flat.dtype))

        servers.record_lookup(rows, self.handle, gradient)
        return rows

    def _read_variable_op(self, no_copy: bool = False) -> tf.Tensor:
        del no_copy
        view = views.current()
        if isinstance(view, views.WorkerStep):
            return view.read(self)
        local = view.local(self) if isinstance(view, views.UpdateView) else None
        value = tf.identity(self.pull()) if local is None else local.read_value()
        compat.watch(self)
        compat.record_read(value, self.handle)
        return value

    def value(self) -> tf.Tensor:
        return self._read_variable_op()

    def read_value(self) -> tf.Tensor:
        return self._read_variable_op()

    def read_value_no_copy(self) -> tf.Tensor:
        return self._read_variable_op()

    def numpy(self) -> np.ndarray:
        if not tf.executing_eagerly():
            raise NotImplementedError("numpy() is only available when eager execution is enabled.")
        return self.pull().numpy()

    def sparse_read(self, indices: Any, name: str | None = None) -> tf.Tensor:
        return tf.gather(self.read_value(), indices, name=name)

    def gather_nd(self, indices: Any, name: str | None = None) -> tf.Tensor:
        return tf.gather_nd(self.read_value(), indices, name=name)

    def assign(self, value: Any, use_locking=None, name=None, read_value: bool = True):
        del use_locking, name
        view = views.current()
        value = tf.cast(tf.convert_to_tensor(value, dtype_hint=self.dtype), self.dtype)
        if isinstance(view, views.WorkerStep):
            view.assign(self, value)
        elif isinstance(view, views.UpdateView) and (local := view.write(self)) is not None:
            local.assign(value, read_value=False)
        else:
            if not value.shape.is_compatible_with(self.shape):
                raise ValueError(
                    f"The variable {self.path!r} has the shape {self.shape}, got a value of shape {value.shape}."
                )
            for i in range(len(self.parts)):
                rows = value[self.homes.rows(i)] if self.homes.is_split else value
                self._on(i, lambda part, rows=rows: part.assign(rows, read_value=False))
        return self if read_value else None

    def assign_add(self, delta: Any, use_locking=None, name=None, read_value: bool = True):
        return self._add(delta, 1, read_value)

    def assign_sub(self, delta: Any, use_locking=None, name=None, read_value: bool = True):
        return self._add(delta, -1, read_value)

    def _add(self, delta: Any, sign: int, read_value: bool):
        view = views.current()
        delta = tf.cast(tf.convert_to_tensor(delta, dtype_hint=self.dtype), self.dtype)
        if isinstance(view, views.WorkerStep):
            view.add(self, delta if sign > 0 else -delta)
            return self if read_value else None
        value = self.read_value()
        return self.assign(value + delta if sign > 0 else value - delta, read_value=read_value)

    def _on(self, part: int, use: Callable[[tf.Variable], Any]) -> Any:
        with tf.device(self.homes.devices[part]):
            return use(self.parts[part])

    # The format of a checkpoint is that of one device.

    _gather_saveables_for_checkpoint = compat.Trackable._gather_saveables_for_checkpoint

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {compat.VARIABLE_VALUE_KEY: self.read_value()}

    def _restore_from_tensors(self, restored_tensors: dict[str, tf.Tensor]):
        return self.assign(restored_tensors[compat.VARIABLE_VALUE_KEY])

    def __repr__(self) -> str:
        return f"<ServerVariable path={self.path!r} shape={self.shape} dtype={self.dtype.name} on {self.homes.devices}>"


def _scatter(kind: str) -> Callable:
    """A `scatter_*` method: in place on one server's part, elsewhere on the whole value."""
    update = getattr(tf, f"tensor_scatter_nd_{kind}")

    def method(self, sparse_delta: tf.IndexedSlices, use_locking: bool = False, name: str | None = None):
        del use_locking, name
        view = views.current()
        local = view.write(self) if isinstance(view, views.UpdateView) else None
        if local is not None:
            getattr(local, f"scatter_{kind}")(sparse_delta)
            return self
        return self.assign(
            update(self.read_value(), sparse_delta.indices[:, None], tf.cast(sparse_delta.values, self.dtype))
        )

    return functools.wraps(getattr(servers.BaseResourceVariable, f"scatter_{kind}"))(method)


def _scatter_nd(kind: str) -> Callable:
    """A `scatter_nd_*` method, on the whole value."""
    update = getattr(tf, f"tensor_scatter_nd_{kind}")

    def method(self, indices: Any, updates: Any, name: str | None = None):
        return self.assign(update(self.read_value(), indices, updates))

    return functools.wraps(getattr(servers.BaseResourceVariable, f"scatter_nd_{kind}"))(method)


for _kind in ("add", "sub", "update", "max", "min"):
    setattr(ServerVariable, f"scatter_{_kind}", _scatter(_kind))
    setattr(ServerVariable, f"scatter_nd_{_kind}", _scatter_nd(_kind))


def _shape_seen(native: Any) -> tf.TensorShape | None:
    """The shape of the part that an optimizer sees, None where it sees the whole."""
    view = views.current()
    if not isinstance(view, views.UpdateView) or not isinstance(native, ServerVariable):
        return None
    local = view.local(native)
    return None if local is None else local.shape


servers.show_parts(_shape_seen)
servers.add_in_place(lambda native: isinstance(native, ServerVariable))
views.route_lookups()
