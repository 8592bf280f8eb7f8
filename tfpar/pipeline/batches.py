"""A batch as micro-batches, and what each stage takes of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfpar import devices, input as input_lib
from tfpar.compat import training as steps
from tfpar.pipeline.stage import Feed, Stage


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """A part of a batch.

    Attributes:
        feeds: what each stage takes of it, on the host.
        examples: how many it has.
        share: its share of the examples of the batch.
        signature: its shapes and dtypes; functions are made once for each.
    """

    feeds: tuple[Feed, ...]
    examples: int
    share: float
    signature: tuple


def micro_batches(stages: Sequence[Stage], batch: Any, count: int, mode: str) -> list[MicroBatch]:
    """Cuts a batch into parts of sizes that differ by one at most.

    Args:
        stages: the stages of a model.
        batch: what Keras hands to a step: inputs, maybe targets and weights, with the examples as dim 0.
        count: how many parts; a batch of fewer examples has one part per example.
        mode: "train", "test" or "predict".

    Returns:
        The parts.

    Raises:
        ValueError: a ragged, sparse or text tensor, or a batch with no examples.
    """
    batch = input_lib.check(batch)
    x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
    model, graph = stages[0].model, stages[0].graph
    with tf.device(devices.host()):
        inputs = dict(zip(graph.inputs, graph.standardize(x)))
        overridden = any(steps.overrides(model, name) for name in ("compute_loss", "compute_metrics"))
        extra = (x if overridden else None, y, weight) if mode != "predict" else None
        examples = int(tf.nest.flatten(x)[0].shape[0])
        sizes = [len(part) for part in np.array_split(np.arange(examples), min(count, examples))]
        parts, start = [], 0
        for size in sizes:
            rows = slice(start, start + size)
            feeds = tuple(_feed(stage, inputs, extra).map(lambda leaf, rows=rows: _rows(leaf, rows)) for stage in stages)
            signature = tuple((tuple(leaf.shape), leaf.dtype.name) for feed in feeds for leaf in feed.flat)
            parts.append(MicroBatch(feeds, size, size / examples, signature))
            start += size
    return parts


def _feed(stage: Stage, inputs: dict[int, Any], extra: Any) -> Feed:
    return Feed({number: inputs[number] for number in stage.part.inputs}, extra if stage.is_last else None)


def _rows(leaf: Any, rows: slice) -> tf.Tensor:
    """Some examples; a scalar goes to every micro-batch."""
    leaf = tf.convert_to_tensor(leaf)
    return leaf[rows] if leaf.shape.rank else leaf
