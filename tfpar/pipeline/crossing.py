"""What passes from a stage to the next: values and their masks as a flat list of tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfpar.compat import layer_graph as compat


@dataclasses.dataclass(frozen=True)
class Form:
    """How to find values in a flat list of tensors.

    Attributes:
        templates: the structure of each value, by its number, with placeholders for its tensors.
        masked: which of the tensors have a mask; the masks follow the tensors.
    """

    templates: Mapping[int, Any]
    masked: tuple[int, ...]

    def unpack(self, tensors: Sequence[tf.Tensor]) -> dict[int, Any]:
        """The values, by their numbers."""
        leaves, masks = tensors[: len(tensors) - len(self.masked)], tensors[len(tensors) - len(self.masked) :]
        for index, mask in zip(self.masked, masks):
            compat.set_mask(leaves[index], mask)
        values, start = {}, 0
        for number, template in self.templates.items():
            count = len(keras.tree.flatten(template))
            values[number] = keras.tree.pack_sequence_as(template, leaves[start : start + count])
            start += count
        return values


def pack(values: Mapping[int, Any], numbers: Sequence[int]) -> tuple[list[tf.Tensor], Form]:
    """Values as a flat list of tensors, each one a result of its own.

    Args:
        values: structures of tensors.
        numbers: which of them.

    Returns:
        The tensors, and how to find the values in them.
    """
    found = [leaf for number in numbers for leaf in keras.tree.flatten(values[number])]
    masks = [compat.mask_of(leaf) for leaf in found]
    masked = tuple(index for index, mask in enumerate(masks) if mask is not None)
    templates = {number: keras.tree.map_structure(lambda leaf: 0, values[number]) for number in numbers}
    return [tf.identity(tensor) for tensor in (*found, *(masks[i] for i in masked))], Form(templates, masked)


def move(value: tf.Tensor, mesh: dtensor.Mesh) -> tf.Tensor:
    """A DTensor on another mesh of the same shape: each shard goes from a device to its counterpart."""
    layout = dtensor.fetch_layout(value)
    if layout.mesh == mesh:
        return value
    shards = []
    for device, shard in zip(mesh.local_devices(), dtensor.unpack(value)):
        with tf.device(device):
            shards.append(tf.identity(shard))
    return dtensor.pack(shards, dtensor.Layout(layout.sharding_specs, mesh))
