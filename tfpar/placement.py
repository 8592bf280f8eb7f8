"""Placement: when and how a variable gets its layout.

1. `create`   a model's variable is made. If its layout is known (a LayoutMap), it gets it at once. If layouts need
              the whole model, the variable waits, spread over all devices, so that none holds more than its share.
2. use        summary, get_weights, load_weights and model(x) work in either state.
3. `settle`   before the first step the model is known: rules are checked against it and waiting variables are moved
              one by one, with the slots that follow them.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfpar import compat, devices
from tfpar.layouts import LayoutMap, Spec
from tfpar.mesh import DATA, Mesh
from tfpar.variables import MeshVariable

MODEL = "model"
Layouts = LayoutMap | Mapping[str, Any] | Callable[[keras.Model], LayoutMap] | None


class Placement:
    """Decides the layout of every variable made under one strategy.

    Args:
        mesh: the devices and axes.
        layouts: a `LayoutMap` (or the dict for one), or a function of the model that returns one, called once per model
            when the model is complete. None: every variable is replicated.
    """

    def __init__(self, mesh: Mesh, layouts: Layouts = None):
        self._mesh = mesh
        self._plan = layouts if callable(layouts) and not isinstance(layouts, Mapping) else None
        self._rules = LayoutMap() if self._plan or layouts is None else _as_layout_map(layouts)
        self._rules.check_axes(mesh)
        self._matched: set[str | None] = set()
        self._settled: weakref.WeakKeyDictionary[keras.Model, LayoutMap] = weakref.WeakKeyDictionary()
        if self._plan is None:
            _check_axes_used(mesh, self._rules)

    def create(self, strategy: tf.distribute.Strategy, **kwargs) -> MeshVariable:
        """Makes a variable with the arguments of a `tf.Variable` creator."""
        options = {key: kwargs[key] for key in _KEPT if kwargs.get(key) is not None}
        initial, reference = kwargs["initial_value"], kwargs.get("colocate_with")
        path, maker = compat.variable_in_the_making(kwargs.get("name"))
        with tf.init_scope(), tf.device(devices.host()):
            value = tf.convert_to_tensor(initial() if callable(initial) else initial, dtype=kwargs.get("dtype"))
            follows = reference if _can_follow(reference, value) else None
            layout = follows.layout if follows is not None else self._mesh.layout(self._first_spec(path, maker, value))
            return MeshVariable(
                value, mesh_layout=layout, path=path, follows=follows, gather_axes=frozenset({DATA}), **options
            )

    def settle(self, model: keras.Model) -> None:
        """Gives a complete model's variables their final layouts, once, and checks that every rule found a variable.

        Args:
            model: a built model whose variables were made under this placement.

        Raises:
            ValueError: a rule that matches no variable, or does not fit the one that it matches.
        """
        if model in self._settled:
            return
        weights = {variable.path: variable for variable in model.variables}
        rules = _as_layout_map(self._plan(model)) if self._plan else self._rules
        rules.check_axes(self._mesh)
        rules.check_all_used(list(weights), already=self._matched)
        if self._plan:
            _check_axes_used(self._mesh, rules)
            specs = {path: rules.match(path, variable.shape, self._mesh)[1] for path, variable in weights.items()}
            for path, spec in specs.items():
                compat.native(weights[path]).place(self._mesh.layout(spec))
        self._settled[model] = rules

    def reason(self, model: keras.Model, path: str, shape: tuple[int, ...]) -> str:
        """Why a settled model's variable has its layout: the rule that matched, or that none did."""
        pattern, _ = self._settled[model].match(path, shape, self._mesh)
        return "no rule matches" if pattern is None else f"rule {pattern!r}"

    def _first_spec(self, path: str, maker: Any, value: tf.Tensor) -> Spec:
        rank = value.shape.rank
        if isinstance(maker, (keras.optimizers.Optimizer, keras.metrics.Metric)):
            return (None,) * rank
        if self._plan is not None:
            return _spread(value.shape, self._mesh)
        pattern, spec = self._rules.match(path, value.shape, self._mesh)
        self._matched.add(pattern)
        return spec


_KEPT = ("trainable", "name", "dtype", "synchronization", "aggregation", "distribute_strategy", "constraint")


def _as_layout_map(layouts: Any) -> LayoutMap:
    if isinstance(layouts, LayoutMap):
        return layouts
    if isinstance(layouts, Mapping):
        return LayoutMap(layouts)
    raise ValueError(
        f"layouts is a tfpar.LayoutMap, a dict of rules, or a function of the model that returns one; got {layouts!r}."
    )


def _check_axes_used(mesh: Mesh, rules: LayoutMap) -> None:
    """An axis that splits neither the batch nor a variable makes its devices repeat each other's work."""
    for axis, size in mesh.axes.items():
        if size == 1 or axis == DATA or axis in rules.axes:
            continue
        if axis != MODEL:
            raise ValueError(
                f"The axis {axis!r} of the mesh {mesh} is neither {DATA!r}, which splits the batch, nor named by a layout "
                f"rule, so its {size} devices would repeat each other's work. Rename it, or add rules that use it."
            )
        warnings.warn(
            f"The axis {axis!r} of size {size} splits no variable, because no layout rule names it: its devices repeat each "
            "other's work. Pass layouts=tfpar.LayoutMap({...}).",
            stacklevel=2,
        )


def _can_follow(reference: Any, value: tf.Tensor) -> bool:
    return isinstance(reference, MeshVariable) and reference.shape == value.shape


def _spread(shape: tf.TensorShape, mesh: Mesh) -> Spec:
    """A waiting variable's layout: each axis, largest first, splits the largest dim that is free and divisible by it."""
    spec: list[str | None] = [None] * len(shape)
    for axis, size in sorted(mesh.axes.items(), key=lambda item: -item[1]):
        free = [dim for dim in range(len(shape)) if spec[dim] is None and shape[dim] and shape[dim] % size == 0]
        if free and size > 1:
            spec[max(free, key=lambda dim: shape[dim])] = axis
    return tuple(spec)
