"""A model as a list of calls of its layers, nested models taken apart.

A call takes values by number and gives values by number, so that the list can be cut anywhere: what crosses a cut are the
values that are made before it and used after it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras

from tfpar.compat import layer_graph as compat


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a layer or another operation.

    Attributes:
        operation: what is called.
        path: the name of the operation and of the nested models around it, such as "backbone/block_1".
        inputs: the values that it needs.
        outputs: the values that it makes.
        run: takes the values so far and `training`, returns as many values as `outputs` has.
    """

    operation: Callable
    path: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    run: Callable[[Mapping[int, Any], bool], list[Any]]

    @property
    def variables(self) -> list[keras.Variable]:
        """The variables of the layer that is called."""
        return list(getattr(self.operation, "variables", ()))

    @property
    def state(self) -> list[keras.Variable]:
        """Those of them that it changes in training."""
        return compat.state_of(self.operation)

    @property
    def layers(self) -> list[keras.layers.Layer]:
        """The layer that is called and those in it."""
        return compat.layers_of(self.operation)


@dataclasses.dataclass(frozen=True)
class LayerGraph:
    """The calls of a model, in an order in which each follows those that it needs.

    Attributes:
        calls: the calls.
        inputs: the values of the model's inputs, flat.
        outputs: the values of the model's outputs, flat.
        standardize: makes a flat list of inputs of what the model is called on.
        pack: makes what the model returns of the values of `outputs`.
    """

    calls: tuple[Call, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    standardize: Callable[[Any], list[Any]]
    pack: Callable[[list[Any]], Any]


def layer_graph(model: keras.Model) -> LayerGraph:
    """The calls of a Functional or Sequential model, or of one that declares `stages()`.

    Args:
        model: a built model.

    Returns:
        Its calls. Nested models are taken apart; a stage that the model declares is one call.

    Raises:
        ValueError: a subclassed model without `stages()`.
    """
    if callable(getattr(model, "stages", None)):
        return _of_stages(model)
    functional = compat.functional(model)
    if functional is None:
        raise ValueError(
            f"The model {model.name!r} is a subclass with its own call, so that tfpar cannot see where to cut it into "
            "pipeline stages. Give it a method stages() that returns a list of layers or functions, each called with what "
            "the one before returned; make it of such a list with tfpar.pipeline.stages([...]); or use a Functional model."
        )
    numbers = _Numbers()
    inputs = [numbers.new(tensor) for tensor in functional.inputs]
    calls = tuple(_calls(functional, numbers, ""))
    return LayerGraph(
        calls=calls,
        inputs=tuple(inputs),
        outputs=tuple(numbers.of(tensor) for tensor in functional.outputs),
        standardize=lambda values: compat.standardize_inputs(functional, values),
        pack=lambda values: keras.tree.pack_sequence_as(compat.output_structure(functional), values),
    )


class _Numbers:
    """Numbers for KerasTensors. A nested model has the same tensors in each of its calls: `within` starts a new call."""

    def __init__(self):
        self._count = 0
        self._numbers: dict[int, int] = {}

    def new(self, tensor: Any) -> int:
        self._numbers[id(tensor)] = self._count
        self._count += 1
        return self._count - 1

    def of(self, tensor: Any) -> int:
        return self._numbers[id(tensor)]

    def same(self, tensor: Any, number: int) -> None:
        self._numbers[id(tensor)] = number


def _calls(model: keras.Model, numbers: _Numbers, prefix: str) -> Iterator[Call]:
    for node in compat.nodes(model):
        inner = compat.functional(node.operation)
        path = prefix + node.operation.name
        given = _plain_inputs(node, inner)
        if given is None:
            yield _call(node, numbers, path)
            continue
        for tensor, outer in given:
            numbers.same(tensor, numbers.of(outer))
        yield from _calls(inner, numbers, path + "/")
        made = [numbers.of(tensor) for tensor in inner.outputs]
        for tensor, number in zip(node.outputs, made):
            numbers.same(tensor, number)


def _plain_inputs(node: Any, inner: keras.Model | None) -> list[tuple[Any, Any]] | None:
    """Each input of a nested model and what a node gives for it; None where it is none, or is called with more than them."""
    if inner is None:
        return None
    args, kwargs = compat.call_arguments(node)
    given, wanted = keras.tree.flatten(args), keras.tree.flatten(compat.input_structure(inner))
    if len(args) != 1 or len(given) != len(wanted) or any(leaf is not None for leaf in keras.tree.flatten(kwargs)):
        return None
    plain = all(isinstance(leaf, keras.KerasTensor) for leaf in given)
    alike = plain and all((len(a.shape), a.dtype) == (len(b.shape), b.dtype) for a, b in zip(given, wanted))
    same_keys = not isinstance(args[0], dict) or sorted(args[0]) == sorted(compat.input_structure(inner))
    return list(zip(wanted, given)) if alike and same_keys else None


def _call(node: Any, numbers: _Numbers, path: str) -> Call:
    needed = {id(tensor): numbers.of(tensor) for tensor in node.input_tensors}
    operation = node.operation

    def run(values: Mapping[int, Any], training: bool) -> list[Any]:
        args, kwargs = node.arguments.fill_in({tensor: values[number] for tensor, number in needed.items()})
        return keras.tree.flatten(compat.with_training(operation, training)(*args, **kwargs))

    outputs = tuple(numbers.new(tensor) for tensor in node.outputs)
    return Call(operation, path, tuple(dict.fromkeys(needed.values())), outputs, run)


def _of_stages(model: keras.Model) -> LayerGraph:
    """The calls of a model with `stages()`: value 0 is what the model is called on, value i what stage i - 1 returns."""
    stages = list(model.stages())
    wrong = [stage for stage in stages if not callable(stage)]
    if not stages or wrong:
        raise ValueError(
            f"The method stages() of the model {model.name!r} returns a list of layers or functions, got "
            f"{wrong[0] if wrong else stages!r}."
        )

    def call(index: int, stage: Callable) -> Call:
        def run(values: Mapping[int, Any], training: bool) -> list[Any]:
            return [compat.with_training(stage, training)(values[index])]

        name = getattr(stage, "name", None) or getattr(stage, "__name__", type(stage).__name__)
        return Call(stage, name, (index,), (index + 1,), run)

    return LayerGraph(
        calls=tuple(call(index, stage) for index, stage in enumerate(stages)),
        inputs=(0,),
        outputs=(len(stages),),
        standardize=lambda values: [values],
        pack=lambda values: values[0],
    )
