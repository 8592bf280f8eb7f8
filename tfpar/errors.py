"""Sentences for what goes wrong at the border between Keras, TensorFlow and a mesh."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfpar import compat
from tfpar.variables import MeshVariable


def outside_scope(model: keras.Model, strategy: Any) -> ValueError:
    """A model was compiled in a strategy's scope and built elsewhere."""
    other = compat.strategy_of(model)
    built = "outside every strategy's scope" if other is None else f"under {other!r}"
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


def check_model(model: keras.Model, strategy: Any) -> None:
    """Raises ValueError where a variable of the model, its metrics or its optimizer was not made under `strategy`."""
    owners = [("model", model.name, model.variables)]
    if getattr(model, "optimizer", None) is not None:
        owners.append(("optimizer", model.optimizer.name, model.optimizer.variables))
    owners += [("metric", metric.name, metric.variables) for metric in model.metrics]
    for kind, name, variables in owners:
        for variable in variables:
            native = compat.native(variable)
            made_under = getattr(native, "_distribute_strategy", None)
            if native is None or (isinstance(native, MeshVariable) and made_under is strategy):
                continue
            where = "outside every strategy's scope" if made_under is None else f"under {made_under!r}"
            raise ValueError(
                f"The {kind} {name!r} was made {where}: its variable {variable.path!r} is not on the mesh of {strategy!r}. "
                f"Make the {kind} inside `with strategy.scope():` (for an optimizer or a metric, call compile there too)."
            )


@contextlib.contextmanager
def explained(strategy: Any) -> Iterator[None]:
    """Puts a sentence above TensorFlow's own text where partitioning a step fails."""
    try:
        yield
    except tf.errors.OpError as error:
        raise type(error)(error.node_def, error.op, _explanation(error, strategy)) from error


def _explanation(error: tf.errors.OpError, strategy: Any) -> str:
    return (
        f"TensorFlow could not run a step under {strategy!r}. What it said, for a report:\n\n{error.message}"
    )
