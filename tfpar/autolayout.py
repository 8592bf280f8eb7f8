"""Automatic layouts: which weights of a model an axis splits, from what the model does and not from names.

    1. `model_graph.py`   traces the forward pass
    2. `dim_groups.py`    finds dims that can be split together without communication, by `dim_rules.py`
    3. this file          chooses groups that save the most memory, such that no tensor is split twice by one axis

A group is chosen only if it ends in a sum over devices: a column-parallel layer that feeds a row-parallel one
(Megatron-LM, arXiv 1909.08053), the heads of an attention, the experts of a mixture, the rows of an embedding, the
classes of a head whose loss takes them split. Everything else is replicated, which costs memory but no communication.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfpar import compat, layouts, model_graph
from tfpar.dim_groups import DimGroups, Group
from tfpar.dim_rules import RULES
from tfpar.layouts import Decision, LayoutMap
from tfpar.mesh import Mesh

MODEL = "model"
_KERAS = ("keras.", "keras_hub.")


class AutoLayout:
    """Layouts found from the model. `layouts="auto"` is `AutoLayout()`.

    Args:
        rules: a `tfpar.LayoutMap` or the dict for one. A variable that a rule matches gets the rule's layout; automatic
            layouts go round it.
        axis: the axis of the mesh that splits weights.

    Example:

    >>> strategy = tfpar.HybridStrategy("data=2,model=2", layouts="auto")
    >>> with strategy.scope():
    ...     model = keras.Sequential([
    ...         keras.Input((8,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(8)])
    >>> [row.layout for row in strategy.describe(model)]
    [(None, 'model'), ('model',), ('model', None), (None,)]
    """

    def __init__(self, rules: LayoutMap | Mapping[str, Sequence[str | None]] = (), axis: str = MODEL):
        self.rules = rules if isinstance(rules, LayoutMap) else LayoutMap(rules)
        self.axis = axis

    def decide(self, model: keras.Model, mesh: Mesh, batch: Any = None) -> dict[int, Decision]:
        """The layout of each variable of a complete model.

        Args:
            model: a built model.
            mesh: the mesh that it trains on.
            batch: a batch as `fit` gets it, for a model that has no graph of layers; None where there is none yet.

        Returns:
            Decisions by the `id` of the variable.
        """
        decisions = self._given(model, mesh)
        parts = mesh.axes.get(self.axis, 1)
        found = self._found(model, parts, decisions, batch) if parts > 1 else {}
        for variable in model.variables:
            if id(variable) not in decisions:
                decisions[id(variable)] = found.get(id(variable), _replicated(variable, "no axis to split it by"))
        return decisions

    def _given(self, model: keras.Model, mesh: Mesh) -> dict[int, Decision]:
        """What the user's rules and roles say."""
        given = {}
        for variable in model.variables:
            pattern, spec = self.rules.match(variable.path, variable.shape, mesh)
            if pattern is not None:
                given[id(variable)] = Decision(spec, f"rule {pattern!r}")
        for layer, role in layouts.declared_roles(model):
            for variable in layer.variables:
                if id(variable) not in given:
                    given[id(variable)] = layouts.role_layout(variable, role, self.axis, mesh)
        return given

    def _found(self, model: keras.Model, parts: int, given: Mapping[int, Decision], batch: Any) -> dict[int, Decision]:
        inputs = model_graph.input_specs(model, batch)
        if inputs is None:
            reason = "the inputs of the model are not known before its first batch"
            return {id(v): _replicated(v, reason) for v in model.variables}
        try:
            graph = _traced(model, inputs)
        except Exception as error:  # a user's own `call` may fail in any way on symbolic values
            warnings.warn(
                f"The model {model.name!r} stays replicated, because its forward pass could not be traced for automatic "
                f"layouts ({type(error).__name__}: {error}). Pass layouts=tfpar.LayoutMap({{...}}).",
                stacklevel=2,
            )
            return {id(v): _replicated(v, "its model could not be traced") for v in model.variables}
        groups = [group for group in DimGroups(graph, parts, RULES, takes_split_classes(model)).groups if group.variables]
        for variable in model.variables:
            if id(variable) not in given and not _is_kerass(variable):
                _pin(groups, variable, "belongs to a layer of your own, which has no declared role")
        self._follow(groups, given)
        return _decisions(model, _choose(groups, parts), groups, parts, self.axis)

    def _follow(self, groups: Iterable[Group], given: Mapping[int, Decision]) -> None:
        """A group that a user splits in part goes first; one that he keeps whole is pinned."""
        for group in groups:
            for variable, dim in group.variables:
                decision = given.get(id(variable))
                if decision is not None and decision.spec[dim] == self.axis:
                    group.wanted = True
                elif decision is not None:
                    group.pinned = group.pinned or f"is kept whole in {variable.path} by {decision.reason}"


def _traced(model: keras.Model, inputs: Any) -> model_graph.ModelGraph:
    """The forward pass of a small batch or, where the model refuses that, of one with as many rows as its first batch."""
    try:
        return model_graph.trace(model, inputs)
    except Exception:
        leaves = [leaf for leaf in keras.tree.flatten(inputs) if not isinstance(leaf, keras.KerasTensor)]
        rows = {leaf.shape[0] for leaf in leaves if len(leaf.shape)}
        if len(rows) != 1 or None in rows:
            raise
        return model_graph.trace(model, inputs, examples=rows.pop())


def takes_split_classes(model: keras.Model) -> bool:
    """Whether the compiled loss works on logits that are split over the classes (`op_support.py`)."""
    loss = getattr(model, "loss", None)
    return isinstance(loss, keras.losses.SparseCategoricalCrossentropy) and bool(loss.from_logits)


def _is_kerass(variable: keras.Variable) -> bool:
    maker = compat.maker_of(variable)
    return maker is None or f"{type(maker).__module__}.".startswith(_KERAS)


def _pin(groups: Iterable[Group], variable: keras.Variable, reason: str) -> None:
    for group in groups:
        if any(other is variable for other, _ in group.variables):
            group.pinned = group.pinned or reason


def kind(group: Group) -> str | None:
    """What a group is in a model, None where a split would need more than an all-reduce."""
    rows = {id(weight) for weight in group.rows}
    columns = [v for v, _ in group.variables if id(v) not in rows and v.trainable]
    if group.whole and not group.batched:
        return None
    if group.batched and (group.rows or group.sums_activations):
        return "experts"
    if group.sums_activations:
        return None
    if group.rows and columns:
        return "pair"
    if group.lookups:
        return "vocabulary"
    return "classes" if group.is_output and columns else None


def why_whole(group: Group, parts: int) -> str | None:
    """Why a group cannot be split, None where it can."""
    if group.pinned:
        return group.pinned
    uneven = [size for size in group.sizes if size % parts]
    if uneven:
        return f"has the size {min(uneven)}, which {parts} does not divide"
    if kind(group) is None:
        return "is no part of a pair" if not group.whole else group.whole
    return None


def _choose(groups: Sequence[Group], parts: int) -> list[Group]:
    """Those that save the most bytes per all-reduce first; none that shares a variable or a tensor with a chosen one."""
    chosen, tensors, variables = [], set(), set()
    for group in sorted(groups, key=lambda group: (not group.wanted, -_worth(group))):
        ours = {name for name, _ in group.dims}
        theirs = {id(variable) for variable, _ in group.variables}
        twice = len(theirs) < len(group.variables) or len(ours) < len(group.dims)
        if why_whole(group, parts) or twice or tensors & ours or variables & theirs:
            continue
        chosen.append(group)
        tensors |= ours
        variables |= theirs
    return chosen


def _worth(group: Group) -> float:
    """The bytes of a group's variables per sum over devices that its split brings."""
    size = sum(int(np.prod(v.shape)) * tf.as_dtype(v.dtype).size for v, _ in group.variables)
    return size / max(1, len({id(weight) for weight in group.rows}) + group.lookups + group.sums_activations)


def _decisions(
    model: keras.Model, chosen: Sequence[Group], groups: Sequence[Group], parts: int, axis: str
) -> dict[int, Decision]:
    split = {id(variable): (dim, group) for group in chosen for variable, dim in group.variables}
    decisions = {}
    for variable in model.variables:
        if id(variable) in split:
            dim, group = split[id(variable)]
            spec = tuple(axis if i == dim else None for i in range(len(variable.shape)))
            decisions[id(variable)] = Decision(spec, _reason(variable, group))
        else:
            decisions[id(variable)] = _replicated(variable, _reason_whole(variable, groups, parts))
    return decisions


def _reason(variable: keras.Variable, group: Group) -> str:
    """Why a variable is split: what the group is and the weights at its other end."""
    what = kind(group) or "split by a rule"
    is_row = any(weight is variable for weight in group.rows)
    other_end = [v for v, _ in group.variables if not any(v is row for row in group.rows)] if is_row else group.rows
    other_end = sorted(other_end, key=lambda v: -len(v.shape))
    role = {"pair": "rows" if is_row else "columns"}.get(what, what)
    return f"auto: {role}" + (f", a pair with {other_end[0].path}" if what == "pair" else "")


def _reason_whole(variable: keras.Variable, groups: Iterable[Group], parts: int) -> str:
    """Why a variable is whole: what holds for its largest dim."""
    if len(variable.shape) == 0:
        return "a scalar"
    largest = max(range(len(variable.shape)), key=lambda dim: variable.shape[dim])
    for group in groups:
        if any(v is variable and dim == largest for v, dim in group.variables):
            return f"dim {largest} {why_whole(group, parts) or 'is not split, so that no tensor is split twice'}"
    return "not used in the forward pass"


def _replicated(variable: keras.Variable, reason: str) -> Decision:
    return Decision((None,) * len(variable.shape), f"auto: {reason}")
