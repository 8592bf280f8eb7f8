"""MeshVariable: a `tf.Variable` whose value is split over a mesh.

It has two views, so that Keras and user code need not know about the mesh:

    inside `strategy.run` in a `tf.function`   the handle of the shards; TensorFlow's DTensor partitions what is done
    everywhere else                            an ordinary whole tensor: reads gather, assignments lay out

The second view is what makes `get_weights`, saving, `model(x)`, checkpoints and eager debugging the same as on one
device. A layout may change until the first step: `place` moves the value and everything that follows the variable (an
optimizer's slots) one by one, in the same Python objects.
"""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfpar import compat, devices, transfer
from tfpar.mesh import Mesh

_step = threading.local()


class StepView:
    """While entered, on this thread, variables of `owner` are what a traced step sees: shards, not whole values.

    Args:
        owner: the strategy whose step is traced.
        mesh: where the step runs, if that is a part of the strategy's mesh: a pipeline stage's.
    """

    def __init__(self, owner: tf.distribute.Strategy, mesh: Mesh | None = None):
        self._entered = owner, mesh or owner.mesh

    def __enter__(self):
        self._outer = getattr(_step, "owner", None), getattr(_step, "mesh", None)
        _step.owner, _step.mesh = self._entered

    def __exit__(self, *error):
        _step.owner, _step.mesh = self._outer


def step_owner() -> tf.distribute.Strategy | None:
    """The strategy whose step is being traced on this thread, None in eager code and outside `strategy.run`."""
    return None if tf.executing_eagerly() else getattr(_step, "owner", None)


def step_mesh() -> Mesh | None:
    """The mesh that the step that is being traced on this thread runs on, None elsewhere."""
    return None if step_owner() is None else _step.mesh


@tf.custom_gradient
def dense_gradient(value: tf.Tensor):
    """The value itself; its gradient is summed into a dense tensor where rows were looked up.

    DTensor has no scatter on variables, and Keras' optimizers give repeated rows other numbers on `IndexedSlices` than
    on the sum that they stand for.
    """
    return tf.identity(value), tf.convert_to_tensor


def parts_of_rows(value: tf.Tensor) -> int:
    """Into how many parts dim 0 of a value is split, if it was read from a variable, maybe into another dtype; else 1."""
    if value.op.type == "Cast":
        value = value.op.inputs[0]
    layout = getattr(value, "_tfpar_layout", None)
    axis = layout.sharding_specs[0] if layout is not None and layout.rank else dtensor.UNSHARDED
    return 1 if axis == dtensor.UNSHARDED else layout.mesh.dim_size(axis)


class MeshVariable(dtensor.DVariable):
    """A variable on a mesh. Made by a strategy's scope, not by hand.

    Args:
        initial_value: a whole value of any kind TensorFlow converts.
        mesh_layouts: how to split it, and on which mesh. More than one: it has a copy on each mesh, of which a step
            sees the one on its own mesh; the first counts everywhere else.
        path: the Keras path, for messages and tables.
        gather_axes: axes whose split is undone on each read in a step (those that also split the batch).
        follows: the variable whose layout this one takes over, for an optimizer's slot.
        **kwargs: what `tf.Variable` takes.
    """

    def __init__(
        self,
        initial_value: Any,
        *,
        mesh_layouts: Sequence[dtensor.Layout],
        path: str,
        gather_axes: frozenset[str] = frozenset(),
        follows: MeshVariable | None = None,
        **kwargs,
    ):
        with tf.device(devices.host()):
            value = tf.convert_to_tensor(initial_value, dtype=kwargs.get("dtype"))
        self._copies: list[tuple[dtensor.Layout, tf.Tensor]] = []
        super().__init__(transfer.to_mesh(value, mesh_layouts[0]), **kwargs)
        self._copies += [self._copy(value, layout) for layout in mesh_layouts[1:]]
        self.path = path
        self._traced = False
        self._gather_axes = gather_axes
        self._followers: list[weakref.ref[MeshVariable]] = []
        if follows is not None:
            follows._followers.append(weakref.ref(self))

    # DTensor's own checkpoints have another format; the base class writes what one device writes.
    _gather_saveables_for_checkpoint = compat.Trackable._gather_saveables_for_checkpoint

    @property
    def handle(self) -> tf.Tensor:
        """The resource that holds the shards."""
        return self._here()[1]

    @property
    def _handle(self) -> Any:
        """A proxy: TensorFlow's eager fast path takes only the resource itself, to read past `_read_variable_op`."""
        return weakref.proxy(self.handle)

    @_handle.setter
    def _handle(self, handle: tf.Tensor) -> None:
        self._copies[:1] = [(self._first_layout, handle)]

    @property
    def layout(self) -> dtensor.Layout:
        """How the shards that a step sees, or those of the first copy, are split."""
        return self._here()[0]

    @layout.setter
    def layout(self, layout: dtensor.Layout) -> None:
        """TensorFlow sets it when a variable is made, before the handle."""
        self._first_layout = layout

    @property
    def layouts(self) -> list[dtensor.Layout]:
        """The layout of each copy."""
        return [layout for layout, _ in self._copies]

    def _here(self) -> tuple[dtensor.Layout, tf.Tensor]:
        """The copy on the mesh of the step that is being traced on this thread, else the first."""
        mesh = step_mesh()
        here = (copy for copy in self._copies if mesh is not None and copy[0].mesh == mesh.dtensor_mesh)
        return next(here, self._copies[0])

    def _copy(self, value: tf.Tensor, layout: dtensor.Layout) -> tuple[dtensor.Layout, tf.Tensor]:
        variable = dtensor.DVariable(transfer.to_mesh(value, layout), dtype=self.dtype, name=self._handle_name[:-2])
        return layout, variable.handle

    @property
    def traced(self) -> bool:
        """Whether a traced step uses this variable, after which its layout cannot change."""
        return self._traced

    @property
    def followers(self) -> list[MeshVariable]:
        """The variables that take over this one's layout: an optimizer's slots."""
        return [follower for follower in (reference() for reference in self._followers) if follower is not None]

    def place(self, *layouts: dtensor.Layout) -> None:
        """Moves the value, and all that follows this variable, to other layouts or meshes, one copy for each.

        A variable that a traced step uses stays where it is, with a warning: the step holds its present shards.
        """
        if list(layouts) != self.layouts and self._traced:
            warnings.warn(
                f"The variable {self.path!r} keeps its first layout, because a step that uses it was traced before its "
                "layout was decided; the numbers do not change. Call strategy.lay_out(model) before the first step.",
                stacklevel=2,
            )
        elif list(layouts) != self.layouts:
            value = transfer.to_host(self.shards())
            self._copies = [self._copy(value, layout) for layout in layouts]
        for follower in self.followers:
            follower.place(*layouts)

    def shards(self, copy: int = 0) -> tf.Tensor:
        """The value as a DTensor, eagerly, without gathering it.

        Args:
            copy: which, where there are several; all hold the same value.
        """
        layout, handle = self._copies[copy]
        with dtensor.default_mesh(layout.mesh):
            return tf.raw_ops.ReadVariableOp(resource=handle, dtype=self.dtype)

    def _read_variable_op(self, no_copy: bool = False) -> tf.Tensor:
        if self._in_step("read"):
            value = super()._read_variable_op(no_copy)
            if self._gather_axes.intersection(self.layout.sharding_specs):
                return self._gathered(value)
            value._tfpar_layout = self.layout  # see parts_of_rows
            return value
        graph = tf.compat.v1.get_default_graph()
        if tf.executing_eagerly():
            value = transfer.to_host(self.shards())
        elif compat.in_saved_model_export() or not hasattr(graph, "capture_call_time_value"):
            return super()._read_variable_op(no_copy)
        else:  # a user's own tf.function on ordinary tensors reads the whole value, anew at each call
            value = graph.capture_call_time_value(
                lambda: transfer.to_host(self.shards()), tf.TensorSpec(self.shape, self.dtype), key=("tfpar", id(self))
            )
        compat.watch(self)
        compat.record_read(value, self.handle)
        return value

    def read_value_no_copy(self) -> tf.Tensor:
        return self.read_value()

    def numpy(self) -> np.ndarray:
        if not tf.executing_eagerly():
            raise NotImplementedError("numpy() is only available when eager execution is enabled.")
        return transfer.to_host(self.shards()).numpy()

    def sparse_read(self, indices: Any, name: str | None = None) -> tf.Tensor:
        return tf.gather(self.read_value(), indices, name=name)

    def gather_nd(self, indices: Any, name: str | None = None) -> tf.Tensor:
        return tf.gather_nd(self.read_value(), indices, name=name)

    def assign(self, value: Any, use_locking=None, name=None, read_value: bool = True):
        if self._in_step("assigned"):
            return super().assign(value, use_locking, name, read_value)
        if not tf.executing_eagerly():
            raise RuntimeError(
                f"The variable {self.path!r} is split over a mesh and is assigned in a tf.function outside strategy.run. "
                "Call the function's body through strategy.run, or assign outside the tf.function."
            )
        value = tf.cast(transfer.to_host(tf.convert_to_tensor(value, dtype_hint=self.dtype)), self.dtype)
        if value.shape != self.shape:
            raise ValueError(f"The variable {self.path!r} has the shape {self.shape}, got a value of shape {value.shape}.")
        for layout, handle in self._copies:
            shards = transfer.to_mesh(value, layout)
            with dtensor.default_mesh(layout.mesh):
                tf.raw_ops.AssignVariableOp(resource=handle, value=shards)
        return self if read_value else None

    def assign_add(self, delta: Any, use_locking=None, name=None, read_value: bool = True):
        if self._in_step("assigned"):
            return super().assign_add(delta, use_locking, name, read_value)
        return self.assign(self.read_value() + tf.cast(delta, self.dtype), read_value=read_value)

    def assign_sub(self, delta: Any, use_locking=None, name=None, read_value: bool = True):
        if self._in_step("assigned"):
            return super().assign_sub(delta, use_locking, name, read_value)
        return self.assign(self.read_value() - tf.cast(delta, self.dtype), read_value=read_value)

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {compat.VARIABLE_VALUE_KEY: self.read_value()}

    def _restore_from_tensors(self, restored_tensors: dict[str, tf.Tensor]):
        return self.assign(restored_tensors[compat.VARIABLE_VALUE_KEY])

    def _in_step(self, action: str) -> bool:
        owner = step_owner()
        if owner is not None and owner is not self._distribute_strategy:
            raise RuntimeError(
                f"The variable {self.path!r} of {self._distribute_strategy!r} is {action} in a step of {owner!r}. "
                "Build the model, its metrics and its optimizer in the scope of the strategy that trains them."
            )
        mesh = step_mesh()
        if mesh is not None and all(layout.mesh != mesh.dtensor_mesh for layout in self.layouts):
            raise RuntimeError(
                f"The variable {self.path!r} is {action} in a pipeline stage that does not hold it. A stage holds the "
                "variables of the layers that it calls; one that other layers use too must be an attribute of each."
            )
        self._traced = self._traced or owner is not None
        return owner is not None

    def _gathered(self, value: tf.Tensor) -> tf.Tensor:
        spec = [dtensor.UNSHARDED if axis in self._gather_axes else axis for axis in self.layout.sharding_specs]
        return dtensor.relayout(value, dtensor.Layout(spec, self.layout.mesh))


def _scatter(update: Callable) -> Callable:
    """A `scatter_*` method: the update on the whole value, then one assignment; DTensor cannot scatter into variables."""

    @functools.wraps(update)
    def method(self, sparse_delta: tf.IndexedSlices, use_locking: bool = False, name: str | None = None):
        indices = tf.expand_dims(sparse_delta.indices, -1)
        return self.assign(update(self.read_value(), indices, tf.cast(sparse_delta.values, self.dtype)), name=name)

    return method


def _scatter_nd(update: Callable) -> Callable:
    """A `scatter_nd_*` method, as `_scatter`."""

    @functools.wraps(update)
    def method(self, indices: Any, updates: Any, name: str | None = None):
        return self.assign(update(self.read_value(), indices, updates), name=name)

    return method


for _kind in ("add", "sub", "update", "max", "min"):
    _update = getattr(tf, f"tensor_scatter_nd_{_kind}")
    setattr(MeshVariable, f"scatter_{_kind}", _scatter(_update))
    setattr(MeshVariable, f"scatter_nd_{_kind}", _scatter_nd(_update))
