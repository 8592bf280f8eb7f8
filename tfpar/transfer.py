"""Values between the host and a mesh, one shard at a time.

TensorFlow's `relayout` puts the whole value on every device before it splits it. Here each device receives its own
slice only, so that no device ever holds more than its share.

    host value  --to_mesh-->  one slice per device, packed into a DTensor  --to_host-->  host value
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfpar import devices


def shard_slices(layout: dtensor.Layout, shape: tuple[int, ...], location: dict[str, int]) -> tuple[slice, ...]:
    """The part of a tensor that the device at `location` (axis name to index) holds under `layout`."""
    slices = []
    for dim, axis in zip(shape, layout.sharding_specs):
        if axis == dtensor.UNSHARDED:
            slices.append(slice(None))
        else:
            size = dim // layout.mesh.dim_size(axis)
            slices.append(slice(location[axis] * size, (location[axis] + 1) * size))
    return tuple(slices)


def is_replicated(layout: dtensor.Layout) -> bool:
    """Whether every device holds the whole tensor."""
    return all(axis == dtensor.UNSHARDED for axis in layout.sharding_specs)


def to_mesh(value: Any, layout: dtensor.Layout) -> tf.Tensor:
    """Lays an ordinary value out over a mesh.

    Args:
        value: an eager tensor or array of any dtype; a DTensor is gathered first.
        layout: the layout to give it; each split dim must be divisible by its axis.

    Returns:
        A DTensor. Each device of this process received its own slice and nothing else.
    """
    value = to_host(value)
    shape = tuple(value.shape)
    shards, by_slices = [], {}
    mesh = layout.mesh
    for device, location in zip(mesh.local_devices(), mesh.local_device_locations()):
        slices = shard_slices(layout, shape, location)
        key = tuple((s.start, s.stop) for s in slices)
        if key not in by_slices:
            with tf.device(devices.host()):
                by_slices[key] = value if is_replicated(layout) else value[slices]
        with tf.device(device):
            shards.append(tf.identity(by_slices[key]))
    return dtensor.pack(shards, layout)


def to_host(value: Any) -> tf.Tensor:
    """The whole of a DTensor as an ordinary tensor on this process' CPU; other tensors and arrays unchanged.

    With several processes a split value is gathered by a collective, so all processes must call this together.
    """
    if not tf.is_tensor(value):
        with tf.device(devices.host()):
            return tf.convert_to_tensor(value)
    if not tf.executing_eagerly() or not isinstance(value, tf.Tensor) or not dtensor.is_dtensor(value):
        return value
    layout = dtensor.fetch_layout(value)
    if dtensor.num_clients() > 1 and not is_replicated(layout):
        layout = dtensor.Layout.replicated(layout.mesh, value.shape.rank)
        value = dtensor.relayout(value, layout)
    shards = dtensor.unpack(value)
    with tf.device(devices.host()):
        if is_replicated(layout):
            return tf.identity(shards[0])
        return tf.convert_to_tensor(_assemble(shards, layout, tuple(value.shape)))


def all_to_host(values: Any) -> Any:
    """A structure of values as `to_host` gives each."""
    return tf.nest.map_structure(to_host, values)


def _assemble(shards: list[tf.Tensor], layout: dtensor.Layout, shape: tuple[int, ...]) -> np.ndarray:
    whole = None
    for shard, location in zip(shards, layout.mesh.local_device_locations()):
        if any(index and axis not in layout.sharding_specs for axis, index in location.items()):
            continue  # a copy of a shard that another device has given
        part = shard.numpy()
        whole = np.empty(shape, part.dtype) if whole is None else whole
        whole[shard_slices(layout, shape, location)] = part
    return whole


def split(value: tf.Tensor, layout: dtensor.Layout, axis: str) -> tuple[tf.Tensor, ...]:
    """The shards of a DTensor along one axis as ordinary tensors, whole along every other axis."""
    whole = to_host(value)
    if axis not in layout.sharding_specs:
        return (whole,)
    names = layout.mesh.dim_names
    shards = []
    for index in range(layout.mesh.dim_size(axis)):
        location = dict.fromkeys(names, 0) | {axis: index}
        slices = shard_slices(layout, tuple(whole.shape), location)
        keep = [s if spec == axis else slice(None) for s, spec in zip(slices, layout.sharding_specs)]
        shards.append(whole[tuple(keep)])
    return tuple(shards)


def bytes_per_device(layout: dtensor.Layout, shape: tuple[int, ...], dtype: tf.DType) -> int:
    """How many bytes of a tensor each device holds under `layout`."""
    cells = int(np.prod(shape, dtype=np.int64)) * dtype.size
    return cells // int(np.prod([layout.mesh.dim_size(axis) for axis in sharded_axes(layout)], dtype=np.int64))


def sharded_axes(layout: dtensor.Layout) -> list[str]:
    """The axes that split a tensor, in the order of its dims."""
    return list(itertools.filterfalse(lambda axis: axis == dtensor.UNSHARDED, layout.sharding_specs))
