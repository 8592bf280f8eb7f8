"""A batch as micro-batches, and what each stage takes of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfpar import devices, input as input_lib, transfer
from tfpar.compat import training as steps
from tfpar.pipeline.layer_graph import LayerGraph
from tfpar.pipeline.stage import Feed, Stage


@dataclasses.dataclass(frozen=True)
class Batch:
    """A batch on the host.

    Attributes:
        inputs: the model's inputs, by their numbers.
        extra: `(x, y, sample_weight)`, x only where the user's own methods take it; None when predicting.
        examples: how many it has.
    """

    inputs: Mapping[int, tf.Tensor]
    extra: Any
    examples: int

    @property
    def flat(self) -> list[tf.Tensor]:
        """Its tensors."""
        return Feed(self.inputs, self.extra).flat

    @property
    def signature(self) -> tuple:
        """Shapes and dtypes of its tensors."""
        return tuple((tuple(leaf.shape), leaf.dtype.name) for leaf in self.flat)


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


def on_host(model: keras.Model, graph: LayerGraph, batch: Any, mode: str) -> Batch:
    """What stages take of a batch.

    Args:
        model: the model.
        graph: its calls.
        batch: what Keras hands to a step: inputs, maybe targets and weights, with the examples as dim 0.
        mode: "train", "test" or "predict".

    Returns:
        The batch with its inputs in the shapes and dtypes that the model was made for.

    Raises:
        ValueError: a ragged, sparse or text tensor, or a batch with no examples.
    """
    x, y, weight = keras.utils.unpack_x_y_sample_weight(_host(input_lib.check(batch)))
    with tf.device(devices.host()):
        inputs = dict(zip(graph.inputs, graph.standardize(x)))
    overridden = any(steps.overrides(model, name) for name in ("compute_loss", "compute_metrics"))
    extra = (x if overridden else None, y, weight) if mode != "predict" else None
    return Batch(inputs, extra, int(tf.nest.flatten(x)[0].shape[0]))


def micro_batches(stages: Sequence[Stage], batch: Batch, count: int) -> list[MicroBatch]:
    """Cuts a batch into parts of sizes that differ by one at most.

    Args:
        stages: the stages of a model.
        batch: the batch.
        count: how many parts; a batch of fewer examples has one part per example.
    """
    parts, start = [], 0
    with tf.device(devices.host()):
        for size in [len(part) for part in np.array_split(np.arange(batch.examples), min(count, batch.examples))]:
            rows = slice(start, start + size)
            part = Batch(input_lib.rows(dict(batch.inputs), rows), input_lib.rows(batch.extra, rows), size)
            feeds = tuple(_feed(stage, part) for stage in stages)
            parts.append(MicroBatch(feeds, size, size / batch.examples, part.signature))
            start += size
    return parts


def _feed(stage: Stage, batch: Batch) -> Feed:
    inputs = {number: batch.inputs[number] for number in stage.part.inputs}
    return Feed(inputs, batch.extra if stage.is_last else None)


def _host(values: Any) -> Any:
    return tf.nest.map_structure(lambda leaf: None if leaf is None else transfer.to_host(leaf), values)
