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
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfpar import compat, devices, model_graph
from tfpar.autolayout import MODEL, AutoLayout
from tfpar.layouts import Decision, LayoutMap, Spec
from tfpar.mesh import DATA, Mesh
from tfpar.pipeline.plan import Pipeline
from tfpar.variables import MeshVariable

Layouts = str | AutoLayout | LayoutMap | Mapping[str, Any] | Callable[[keras.Model], LayoutMap] | None


class Placement:
    """Decides the layout of every variable made under one strategy.

    Args:
        mesh: the devices and axes.
        layouts: a `LayoutMap` (or the dict for one), or what decides when the model is complete: "auto", an `AutoLayout`,
            or a function of the model that returns a `LayoutMap`. None: every variable is replicated.
        pipeline: cuts models into stages, each of which holds its own variables; None without the axis `pipe`.
    """

    def __init__(self, mesh: Mesh, layouts: Layouts = None, pipeline: Pipeline | None = None):
        layouts = AutoLayout() if layouts == "auto" else layouts
        self._whole, self.pipeline = mesh, pipeline
        self._mesh = mesh = pipeline.meshes[0] if pipeline else mesh
        self._auto = layouts if isinstance(layouts, AutoLayout) and mesh.axes.get(layouts.axis, 1) > 1 else None
        layouts = layouts.rules if isinstance(layouts, AutoLayout) else layouts
        self._plan = layouts if callable(layouts) and not isinstance(layouts, Mapping) else None
        self._rules = LayoutMap() if self._plan or layouts is None else _as_layout_map(layouts)
        self._rules.check_axes(mesh)
        self._matched: set[str | None] = set()
        self._settled: weakref.WeakKeyDictionary[keras.Model, dict[int, Decision]] = weakref.WeakKeyDictionary()
        self._basis: weakref.WeakKeyDictionary[keras.Model, tuple] = weakref.WeakKeyDictionary()
        if self._plan is None:
            _check_axes_used(mesh, self._rules.axes | ({self._auto.axis} if self._auto else set()))

    def create(self, strategy: tf.distribute.Strategy, **kwargs) -> MeshVariable:
        """Makes a variable with the arguments of a `tf.Variable` creator."""
        options = {key: kwargs[key] for key in _KEPT if kwargs.get(key) is not None}
        initial, reference = kwargs["initial_value"], kwargs.get("colocate_with")
        path, maker = compat.variable_in_the_making(kwargs.get("name"))
        with tf.init_scope(), tf.device(devices.host()):
            value = tf.convert_to_tensor(initial() if callable(initial) else initial, dtype=kwargs.get("dtype"))
            follows = reference if _can_follow(reference, value) else None
            layouts = [self._whole.layout(self._first_spec(path, maker, value))] if follows is None else follows.layouts
            return MeshVariable(
                value, mesh_layouts=layouts, path=path, follows=follows, gather_axes=frozenset({DATA}), **options
            )

    def settle(self, model: keras.Model, batch: Any = None) -> None:
        """Gives a complete model's variables their layouts and checks that every rule found a variable.

        Once, except that automatic layouts are decided anew where the model was compiled or got its inputs since, as long
        as no step was traced.

        Args:
            model: a built model whose variables were made under this placement.
            batch: the first batch, where there is one.

        Raises:
            ValueError: a rule that matches no variable, or does not fit the one that it matches.
        """
        if model in self._settled and not (self._auto and self._knows_more(model, batch)):
            return
        rules = _as_layout_map(self._plan(model)) if self._plan else self._rules
        rules.check_axes(self._mesh)
        rules.check_all_used([variable.path for variable in model.variables], already=self._matched)
        if self._auto:
            decisions = self._auto.decide(model, self._mesh, batch)
        else:
            decisions = {id(variable): _by_rule(rules, variable, self._mesh) for variable in model.variables}
        if self._plan or self._auto:
            _check_axes_used(self._mesh, {axis for decision in decisions.values() for axis in decision.spec})
        if self._plan or self._auto or self.pipeline:
            homes = self.pipeline.homes(model, batch) if self.pipeline else {}
            for variable in model.variables:
                meshes = self.pipeline.meshes_of(homes[id(variable)]) if self.pipeline else [self._mesh]
                compat.native(variable).place(*(mesh.layout(decisions[id(variable)].spec) for mesh in meshes))
        self._settled[model], self._basis[model] = decisions, _basis(model, batch)

    def _knows_more(self, model: keras.Model, batch: Any) -> bool:
        """Whether automatic layouts were decided without the loss or the inputs that there are now, and can still change."""
        basis = _basis(model, batch)
        was, self._basis[model] = self._basis.get(model, basis), basis
        return was != basis and not any(compat.native(v).traced for v in model.variables)

    def reason(self, model: keras.Model, variable: keras.Variable) -> str:
        """Why a settled model's variable has its layout: the rule that matched, or what automatic layouts found."""
        decision = self._settled[model].get(id(variable))
        return decision.reason if decision else "made after the layouts were decided"

    def _first_spec(self, path: str, maker: Any, value: tf.Tensor) -> Spec:
        rank = value.shape.rank
        if isinstance(maker, (keras.optimizers.Optimizer, keras.metrics.Metric)):
            return (None,) * rank
        if self._plan is not None or self._auto is not None or self.pipeline is not None:
            return _spread(value.shape, self._whole)
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
        'layouts is "auto", a tfpar.AutoLayout, a tfpar.LayoutMap, a dict of rules, or a function of the model that returns '
        f"rules; got {layouts!r}."
    )


def _basis(model: keras.Model, batch: Any) -> tuple:
    """What automatic layouts depend on besides the model."""
    return id(getattr(model, "loss", None)), model_graph.input_specs(model, batch) is not None


def _by_rule(rules: LayoutMap, variable: keras.Variable, mesh: Mesh) -> Decision:
    pattern, spec = rules.match(variable.path, variable.shape, mesh)
    return Decision(spec, "no rule matches" if pattern is None else f"rule {pattern!r}")


def _check_axes_used(mesh: Mesh, used: Iterable[str | None]) -> None:
    """An axis that splits neither the batch nor a variable makes its devices repeat each other's work."""
    for axis, size in mesh.axes.items():
        if size == 1 or axis == DATA or axis in used:
            continue
        if axis != MODEL:
            raise ValueError(
                f"The axis {axis!r} of the mesh {mesh} is neither {DATA!r}, which splits the batch, nor named by a layout "
                f"rule, so its {size} devices would repeat each other's work. Rename it, or add rules that use it."
            )
        warnings.warn(
            f"The axis {axis!r} of size {size} splits no variable: its devices repeat each other's work. "
            "strategy.describe(model) gives each variable's reason; rules in layouts=tfpar.LayoutMap({...}) split more.",
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
