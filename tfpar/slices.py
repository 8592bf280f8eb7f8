"""Slices without new axes or removed dims: what `x[:, None, 1:, 0]` is before its `None` becomes an `expand_dims`, and
before its `0`, of which a dim of size 1 is left, becomes a reshape.

TensorFlow packs a slice into begin, end and strides, one entry per part of the index, and bit masks over these parts.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

_MASKS = ("begin_mask", "end_mask", "ellipsis_mask", "shrink_axis_mask")


@dataclasses.dataclass(frozen=True)
class Parts:
    """A slice taken apart.

    Attributes:
        bounds: begin, end and strides of the parts that are no new axes.
        masks: their masks, by the names of `tf.strided_slice`.
        new_dims: the dims of the result that are new, in the order in which to expand them.
        slices: whether a part is left.
    """

    bounds: tuple[Any, Any, Any]
    masks: dict[str, int]
    new_dims: tuple[int, ...]
    slices: bool


def without_new_axes(rank: int, begin: Any, end: Any, strides: Any, new_axis_mask: int, **options: Any) -> Parts:
    """Takes the new axes out of a slice.

    Args:
        rank: dims of the tensor that is sliced.
        begin: first positions, one per part.
        end: positions after the last, one per part.
        strides: steps, one per part.
        new_axis_mask: bit i tells that part i is a new axis.
        **options: the other masks of `tf.strided_slice`.

    Returns:
        The parts.
    """
    masks = {name: int(options.get(name) or 0) for name in _MASKS}
    number = int(tf.convert_to_tensor(strides).shape[0])
    ellipsis = [i for i in range(number) if masks["ellipsis_mask"] >> i & 1]
    new = [i for i in range(number) if new_axis_mask >> i & 1 and i not in ellipsis]
    kept = [i for i in range(number) if i not in new]
    dims_of_ellipsis = rank - (len(kept) - len(ellipsis))
    new_dims, dim = [], 0
    for i in range(number):
        if i in new:
            new_dims.append(dim)
        dim += dims_of_ellipsis if i in ellipsis else 0 if i in kept and masks["shrink_axis_mask"] >> i & 1 else 1
    return Parts(
        bounds=tuple(_chosen(bound, kept) for bound in (begin, end, strides)),
        masks={name: sum((mask >> i & 1) << position for position, i in enumerate(kept)) for name, mask in masks.items()},
        new_dims=tuple(new_dims),
        slices=bool(kept),
    )


def keeping_dims(rank: int, begin: Any, end: Any, **options: Any) -> tuple[Any, Any, dict[str, int], list[int]] | None:
    """Makes a slice that keeps the dims that another removes.

    Args:
        rank: dims of the tensor that is sliced.
        begin: first positions, one per part, none of them a new axis.
        end: positions after the last, one per part.
        **options: the masks of `tf.strided_slice`.

    Returns:
        Begin, end and masks of the slice, and the dims of size 1 that it has too many; None where the positions are not
        known while tracing.
    """
    first, last = (tf.get_static_value(tf.convert_to_tensor(bound)) for bound in (begin, end))
    if first is None or last is None:
        return None
    first, last = np.array(first), np.array(last)
    masks = {name: int(options.get(name) or 0) for name in _MASKS}
    ellipsis = [i for i in range(len(first)) if masks["ellipsis_mask"] >> i & 1]
    dims = []
    for i in range(len(first)):
        if masks["shrink_axis_mask"] >> i & 1 and i not in ellipsis:
            dims.append(i + (rank - len(first) if ellipsis and i > ellipsis[0] else 0))
            last[i] = first[i] + 1
            masks["begin_mask"] &= ~(1 << i)
            masks["end_mask"] = masks["end_mask"] | 1 << i if first[i] == -1 else masks["end_mask"] & ~(1 << i)
    return first, last, masks | {"shrink_axis_mask": 0}, dims


def _chosen(bound: Any, kept: list[int]) -> Any:
    """Some entries of a bound: numbers where they are known while tracing, else tensors."""
    bound = tf.convert_to_tensor(bound)
    known = tf.get_static_value(bound)
    return tf.gather(bound, kept) if known is None else tf.constant([known[i] for i in kept], bound.dtype)
