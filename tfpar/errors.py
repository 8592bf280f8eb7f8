"""Sentences for what goes wrong at the border between Keras, TensorFlow and a mesh."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfpar import compat

_OPERATION = re.compile(r"'tf\.(\w+)' op")
_PARTITIONING = re.compile(r"layout propagation|SPMD|dtensor/mlir|dtensor_graph_to_mlir|tf\.DTensorLayout")
_COLLECTIVE = re.compile(r"Collective ops is aborted|CollectiveReduce|Socket closed|heartbeat", re.IGNORECASE)


def outside_scope(model: keras.Model, strategy: Any) -> ValueError:
    """A model was compiled in a strategy's scope and built elsewhere."""
    other = compat.strategy_of(model)
    built = "outside every strategy's scope" if other is None else f"under another strategy, {other!r}"
    return ValueError(
        f"The model {model.name!r} was built {built}, but compiled under {strategy!r}. "
        "Build and compile it inside the same `with strategy.scope():`."
    )


def jit_compile(strategy: Any) -> ValueError:
    """XLA was asked for."""
    return ValueError(
        f"jit_compile=True does not work under {strategy!r}: XLA cannot compile TensorFlow's partitioned functions on CPU "
        "and GPU. Leave jit_compile at 'auto', which is off under a strategy, or pass jit_compile=False to compile()."
    )


def loop_over_stages(strategy: Any) -> NotImplementedError:
    """`strategy.run` was called in a tf.function under a mesh with pipeline stages."""
    return NotImplementedError(
        f"strategy.run in a tf.function does not work under {strategy!r}: one function cannot hold the stages of a "
        "pipeline. Train with fit or train_on_batch, or use a mesh without the axis 'pipe'."
    )


def check_model(model: keras.Model, strategy: Any) -> None:
    """Raises ValueError where a variable of the model, its metrics or its optimizer was not made under `strategy`."""
    owners = [("model", model.name, model.variables)]
    if getattr(model, "optimizer", None) is not None:
        owners.append(("optimizer", model.optimizer.name, model.optimizer.variables))
    metrics = [inner for metric in model.metrics for inner in getattr(metric, "metrics", [metric])]
    owners += [("metric", metric.name, metric.variables) for metric in metrics]
    for kind, name, variables in owners:
        for variable in variables:
            native = compat.native(variable)
            made_under = getattr(native, "_distribute_strategy", None)
            if native is None or made_under is strategy:
                continue
            where = "outside every strategy's scope" if made_under is None else f"under another strategy, {made_under!r}"
            raise ValueError(
                f"The {kind} {name!r} was made {where}: its variable {variable.path!r} is not on the devices of "
                f"{strategy!r}. Make the {kind} inside `with strategy.scope():`, call compile there too, and build or first "
                "call there a model whose layers do not know their input shapes."
            )


class NanWatch:
    """Warns once where a step's loss was not a number, one step late: looking at the newest loss would wait for it.

    Args:
        model: whose losses these are.
    """

    def __init__(self, model: keras.Model):
        self._name, self._before, self._warned = model.name, None, False

    def see(self, logs: Any) -> None:
        """Takes the logs of the newest step and looks at those of the step before."""
        before, self._before = self._before, logs.get("loss") if isinstance(logs, dict) else None
        if self._warned or before is None or not np.isnan(np.asarray(before)).any():
            return
        self._warned = True
        warnings.warn(
            f"The loss of the model {self._name!r} is NaN, expected a number; the weights are lost. Look for NaN in the "
            "data, lower the learning rate or clip gradients (clipnorm=1.0); keras.callbacks.TerminateOnNaN() stops it.",
            stacklevel=2,
        )


@contextlib.contextmanager
def explained(model: keras.Model, strategy: Any) -> Iterator[None]:
    """Puts a sentence above TensorFlow's own text where it cannot partition or run a step."""
    try:
        yield
    except tf.errors.OpError as error:
        raise type(error)(error.node_def, error.op, _explanation(error, model, strategy)) from error


def _explanation(error: tf.errors.OpError, model: keras.Model, strategy: Any) -> str:
    text = error.message.partition(compat.PROGRAM_DUMP)[0]
    operation = _OPERATION.search(text)
    if not operation and not _PARTITIONING.search(error.message):
        if isinstance(error, tf.errors.UnavailableError) or _COLLECTIVE.search(error.message):
            return (
                f"A step of the model {model.name!r} under {strategy!r} was broken off: devices took part in different "
                "collectives, because a process failed or processes had other batches or models. Look for the "
                "first error of all processes, and give each the same number of batches and shapes. TensorFlow's own "
                f"words:\n\n{text}"
            )
        return f"A step of the model {model.name!r} under {strategy!r} failed: {text}"
    named = f" at the operation {operation[1]}" if operation else ""
    return (
        f"TensorFlow could not run a step of the model {model.name!r} on the mesh {strategy.mesh}{named}: some dim of its "
        "inputs is split in a way that it cannot compute on. Replicate the variables of the layer that uses it (remove "
        "their layout rules), or make the layer's batch dim the only one that is split. TensorFlow's own words:\n\n"
        f"{text}"
    )
