"""Loops over a dim of a tensor in a step: unrolled, or all rows at once.

TensorFlow keeps the rows of such a loop in a TensorList, whose gradient DTensor gives a wrong shape. Each function here
takes the original and returns what takes its place; where the number of rows is not known it calls the original. A loop in a
branch is refused where it has a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfpar import variables
from tfpar.compat import functions


def _rows(values: Any) -> list[Any] | None:
    """The rows along dim 0 of all tensors of a structure, None where their number is not known."""
    tensors = [tf.convert_to_tensor(value) for value in tf.nest.flatten(values)]
    if not tensors or any(tensor.shape.rank in (None, 0) or tensor.shape[0] is None for tensor in tensors):
        return None
    columns = [tf.unstack(tensor) for tensor in tensors]
    return [tf.nest.pack_sequence_as(values, row) for row in zip(*columns)]


def _stacked(rows: list[Any]) -> Any:
    return tf.nest.map_structure(lambda *leaves: tf.stack(leaves), *rows)


def map_fn(original: Callable) -> Callable:
    """`tf.map_fn`: all rows at once, one after the other where TensorFlow has no such form of an operation in it."""

    def mapped(fn, elems, *args, **kwargs):
        rows = _rows(elems)
        if not rows:
            return original(fn, elems, *args, **kwargs)
        try:
            return tf.vectorized_map(fn, elems, fallback_to_while_loop=False)
        except (ValueError, NotImplementedError):
            return _stacked([fn(row) for row in rows])

    return mapped


def fold(reverse: bool) -> Callable[[Callable], Callable]:
    """`tf.foldl` and `tf.foldr`."""

    def wrap(original: Callable) -> Callable:
        def folded(fn, elems, initializer=None, **kwargs):
            rows = _rows(elems)
            if not rows:
                return original(fn, elems, initializer, **kwargs)
            rows = rows[::-1] if reverse else rows
            total, rows = (rows[0], rows[1:]) if initializer is None else (initializer, rows)
            for row in rows:
                total = fn(total, row)
            return total

        return folded

    return wrap


def scan(original: Callable) -> Callable:
    """`tf.scan`."""

    def scanned(fn, elems, initializer=None, *args, reverse=False, **kwargs):
        rows = _rows(elems)
        if not rows:
            return original(fn, elems, initializer, *args, reverse=reverse, **kwargs)
        rows = rows[::-1] if reverse else rows
        results, rows = ([rows[0]], rows[1:]) if initializer is None else ([], rows)
        for row in rows:
            results.append(fn(results[-1] if results else initializer, row))
        return _stacked(results[::-1] if reverse else results)

    return scanned


def keras_scan(original: Callable) -> Callable:
    """`keras.ops.scan`."""

    def scanned(f, init, xs=None, length=None, reverse=False, unroll=1):
        rows = [None] * int(length) if xs is None and length is not None else _rows(xs) if xs is not None else None
        if not rows:
            return original(f, init, xs, length, reverse, unroll)
        carry, results = init, []
        for row in rows[::-1] if reverse else rows:
            carry, result = f(carry, row)
            results.append(result)
        return carry, _stacked(results[::-1] if reverse else results)

    return scanned


def keras_associative_scan(original: Callable) -> Callable:
    """`keras.ops.associative_scan`: one element after the other."""

    def scanned(f, elems, reverse=False, axis=0):
        moved = keras.tree.map_structure(lambda value: keras.ops.moveaxis(value, axis, 0), elems)
        rows = _rows(moved)
        if not rows:
            return original(f, elems, reverse, axis)
        results: list[Any] = []
        for row in rows[::-1] if reverse else rows:
            one = keras.tree.map_structure(lambda value: value[None], row)
            results.append(f(results[-1], one) if results else one)
        joined = keras.tree.map_structure(lambda *leaves: tf.concat(leaves, 0), *(results[::-1] if reverse else results))
        return keras.tree.map_structure(lambda value: keras.ops.moveaxis(value, 0, axis), joined)

    return scanned


def switch_case(original: Callable) -> Callable:
    """`tf.switch_case`: one `tf.cond` per branch."""

    def switched(branch_index, branch_fns, default=None, name="switch_case"):
        branches = branch_fns.items() if isinstance(branch_fns, dict) else branch_fns
        branches = [branch if isinstance(branch, tuple) else (i, branch) for i, branch in enumerate(branches)]
        branches.sort(key=lambda branch: branch[0])
        chosen = default or branches[-1][1]
        for position, branch in branches:
            chosen = _either(tf.equal(branch_index, position), branch, chosen)
        return chosen()

    return switched


def _either(condition: tf.Tensor, one: Callable, other: Callable) -> Callable:
    return lambda: tf.cond(condition, one, other)


def while_loop(original: Callable) -> Callable:
    """`tf.while_loop`: where it has a gradient its results are whole, as what it keeps is. TensorFlow ends the process where
    what follows asks such a loop for a shard.
    """

    def looped(*args, **kwargs):
        return tf.nest.map_structure(_whole_if_recorded, original(*args, **kwargs))

    return looped


def _whole_if_recorded(value: Any) -> Any:
    is_array = isinstance(value, tf.Tensor) and value.shape.rank and value.dtype.is_floating
    return _whole(value) if is_array and functions.is_recorded(value) else value


@tf.custom_gradient
def _whole(value: tf.Tensor):
    """The tensor, whole, and its gradient too: a RelayoutLike would ask for a layout itself."""
    layout = variables.step_mesh().layout([None] * value.shape.rank)
    whole = tf.identity(dtensor.relayout(value, layout))  # where a relayout follows, two cannot be neighbours
    return whole, lambda gradient: dtensor.relayout(tf.identity(gradient), layout)


def branch_values(original: Callable) -> Callable:
    """What stands for the values that a branch keeps for its gradient in the others; of a loop they are TensorLists."""

    def fake(dtype, shape, name=None):
        if dtype == tf.variant:
            raise NotImplementedError(
                "The gradient of a loop in a branch (tf.while_loop in tf.cond or tf.switch_case) in a step on a mesh would "
                "end the process inside TensorFlow. Put the branch into the loop, or write the loop in Python."
            )
        return original(dtype, shape, name)

    return fake
