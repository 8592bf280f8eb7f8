"""Trains the same thing on one device and on a mesh and compares every number."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfpar

ATOL = 1e-9
LAYOUTS = {r".*up/kernel": (None, "model"), r".*up/bias": ("model",), r".*down/kernel": ("model", None)}
MESHES = ("data=4", "data=2,model=2", "model=4")


@dataclasses.dataclass
class Trained:
    """What a training run leaves behind."""

    model: keras.Model
    history: dict[str, list[float]]
    weights: dict[str, np.ndarray]
    slots: list[np.ndarray]
    checked: Any


def strategy_for(mesh: str, layouts: Any = None) -> tfpar.HybridStrategy:
    """A strategy with those of the rules that a model has variables for, or with a LayoutMap as it is."""
    if not isinstance(layouts, tfpar.LayoutMap):
        layouts = applicable(LAYOUTS | (layouts or {}), tfpar.Mesh(mesh))
    return tfpar.HybridStrategy(mesh, layouts=layouts)


def applicable(rules: dict, mesh: tfpar.Mesh) -> Callable[[keras.Model], tfpar.LayoutMap]:
    """A layout function that keeps the rules that fit a model's variables and the mesh's axes."""

    def layouts(model: keras.Model) -> tfpar.LayoutMap:
        return tfpar.LayoutMap(
            {
                pattern: spec
                for pattern, spec in rules.items()
                if any(re.fullmatch(pattern, v.path) and len(spec) == len(v.shape) for v in model.variables)
                and all(axis is None or axis in mesh.axes for axis in spec)
            }
        )

    return layouts


@contextlib.contextmanager
def as_written(reference: bool) -> Iterator[None]:
    """What one device computes is the measure, so TensorFlow does not rewrite it; a mesh runs with what users have."""
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": reference})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})


def densify(optimizer: keras.optimizers.Optimizer) -> None:
    """Makes a one-device optimizer see summed, dense gradients of embeddings, as on a mesh (see docs/numerics.md)."""
    apply = type(optimizer).apply

    def dense(grads, trainable_variables=None):
        return apply(optimizer, [g if g is None else tf.convert_to_tensor(g) for g in grads], trainable_variables)

    optimizer.apply = dense


def train(
    strategy: Any,
    build: Callable[[], keras.Model],
    fit: Callable[[keras.Model], Any],
    check: Callable[[keras.Model], Any] = lambda model: None,
) -> Trained:
    """Builds under a strategy (None: one device), fits, and collects all numbers; `check` gives extra ones."""
    policy = keras.config.dtype_policy()
    keras.utils.clear_session(free_memory=False)  # forgets the policy too
    keras.config.set_dtype_policy(policy)
    keras.utils.set_random_seed(0)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = build()
    if strategy is None and model.optimizer is not None:
        densify(model.optimizer)
    with as_written(strategy is None):
        history = fit(model)
        checked = check(model)
    optimizer = model.optimizer
    return Trained(
        model=model,
        history=getattr(history, "history", history),
        weights={v.path: v.numpy() for v in model.weights},
        slots=[v.numpy() for v in optimizer.variables] if optimizer else [],
        checked=checked,
    )


def assert_close(expected: Any, actual: Any, atol: float = ATOL, what: str = "") -> None:
    """Compares two structures of numbers."""
    expected, actual = keras.tree.flatten(expected), keras.tree.flatten(actual)
    for a, b in zip(expected, actual, strict=True):
        np.testing.assert_allclose(np.asarray(b, "float64"), np.asarray(a, "float64"), rtol=0, atol=atol, err_msg=what)


def assert_parity(
    build: Callable[[], keras.Model],
    fit: Callable[[keras.Model], Any],
    mesh: str = "data=2,model=2",
    layouts: Any = None,
    check: Callable[[keras.Model], Any] = lambda model: None,
    atol: float = ATOL,
    slots: bool = True,
) -> tuple[Trained, Trained]:
    """Weights, slots, logs and `check`'s numbers on a mesh equal those on one device; the weights did move."""
    one = train(None, build, fit, check)
    many = train(strategy_for(mesh, layouts), build, fit, check)
    assert_alike(one, many, atol, slots)
    return one, many


def assert_alike(one: Trained, many: Trained, atol: float = ATOL, slots: bool = True) -> None:
    """All numbers of two training runs are equal, and those of the first are finite."""
    assert list(one.weights) == list(many.weights)
    for path in one.weights:
        assert_close(one.weights[path], many.weights[path], atol, path)
    if slots:  # Keras builds an optimizer for all of a model's variables under a strategy, for those it is given without
        assert_close(one.slots, many.slots, atol, "optimizer")
    assert_close(one.history, many.history, atol, "history")
    assert_close(one.checked, many.checked, atol, "check")
    assert all(np.all(np.isfinite(w)) for w in one.weights.values())


def mlp(width: int = 8, outputs: int = 1, **layer) -> keras.Model:
    """Eight features in, a column-split and a row-split layer, `outputs` numbers out."""
    return keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(4 * width, activation="gelu", name="up", **layer),
            layers.Dense(width, name="down", **layer),
            layers.Dense(outputs, name="out"),
        ]
    )


def compiled(model: keras.Model, optimizer: Any = None, loss: Any = "mse", **kwargs) -> keras.Model:
    """The model, compiled with Adam unless told otherwise."""
    model.compile(optimizer or keras.optimizers.Adam(0.01), loss, **kwargs)
    return model


def regression(rows: int = 24, features: int = 8, outputs: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """A data set of random features and targets."""
    rng = np.random.RandomState(1)
    return rng.randn(rows, features), rng.randn(rows, outputs)
