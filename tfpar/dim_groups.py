"""Which dims of a model's variables can be split together, found from what its operations do with each dim.

Two dims belong to one group where splitting one splits the other without communication: the output features of a layer,
its bias, the features of the activation after it, the input features of the next layer. A group is pinned where an
operation needs the dim whole: a mean over features, a softmax, a convolution. A group that ends in a sum of products
with a weight (`rows`) is Megatron-LM's pair of a column-parallel and a row-parallel layer (arXiv 1909.08053); the heads
of an attention, gated units, experts and a vocabulary are the same thing with other operations between.

What each operation does with dims is in `dim_rules.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import keras
import tensorflow as tf

from tfpar.model_graph import ModelGraph

Dim = tuple[str, int]  # a tensor's name and the index of one of its dims
Rule = Callable[["DimGroups", tf.Operation], None]


@dataclasses.dataclass
class Group:
    """Dims that are split together.

    Attributes:
        dims: of tensors of the graph.
        variables: of variables, as pairs of the variable and the dim.
        sizes: of all dims; an axis can split the group if it divides each.
        rows: weights that are summed over along it: the row-parallel ends of a pair.
        sums_activations: whether products of two activations are summed over it.
        batched: whether it counts the matrices of a weight, such as experts.
        lookups: whether rows of a table are looked up along it by the model's inputs.
        is_output: whether it is the last dim of an output of the model.
        whole: what makes a value along it that is whole on every device, None where nothing does.
        pinned: why it must stay whole, None where it need not.
        wanted: whether a rule of the user's splits a part of it.
    """

    dims: set[Dim] = dataclasses.field(default_factory=set)
    variables: list[tuple[keras.Variable, int]] = dataclasses.field(default_factory=list)
    sizes: set[int] = dataclasses.field(default_factory=set)
    rows: list[keras.Variable] = dataclasses.field(default_factory=list)
    sums_activations: bool = False
    batched: bool = False
    lookups: bool = False
    is_output: bool = False
    whole: str | None = None
    pinned: str | None = None
    wanted: bool = False

    def absorb(self, other: Group) -> None:
        """Takes over all that another group has."""
        self.dims |= other.dims
        self.variables += other.variables
        self.sizes |= other.sizes
        self.rows += other.rows
        self.sums_activations |= other.sums_activations
        self.batched |= other.batched
        self.lookups |= other.lookups
        self.is_output |= other.is_output
        self.whole = self.whole or other.whole
        self.pinned = self.pinned or other.pinned


class Unknown(Exception):
    """What a rule needs, such as the axis of a concatenation, is known only when a step runs."""


class DimGroups:
    """The groups of a graph.

    Args:
        graph: a traced forward pass.
        parts: into how many parts a group would be split.
        rules: what each type of operation does, called with the groups and the operation. One that has no rule needs all
            that goes in whole, and gives all that comes out whole.
        splittable_outputs: whether the last dim of the model's outputs may be split.
    """

    def __init__(self, graph: ModelGraph, parts: int, rules: Mapping[str, Rule], splittable_outputs: bool = False):
        self.parts = parts
        self._variables = graph.variables
        self._group: dict[Dim, Group] = {}
        for operation in graph.operations:
            if operation.type == "Placeholder":
                self._start(operation)
                continue
            try:
                rules.get(operation.type, DimGroups.pin_all)(self, operation)
            except Unknown:
                self.pin_all(operation)
        for output in graph.outputs:
            for dim in range(output.shape.rank or 0):
                if splittable_outputs and dim == output.shape.rank - 1:
                    self.of(output, dim).is_output = True
                else:
                    self.pin(output, dim, "is an output of the model")

    @property
    def groups(self) -> list[Group]:
        """Each group once, in the order of the graph."""
        return list({id(group): group for group in self._group.values()}.values())

    def of(self, tensor: tf.Tensor, dim: int) -> Group:
        """The group of one dim."""
        key = (tensor.name, dim)
        if key not in self._group:
            self._group[key] = Group(dims={key}, sizes={tensor.shape[dim]})
        return self._group[key]

    def join(self, *dims: tuple[tf.Tensor, int]) -> Group:
        """Makes one group of the groups of several dims."""
        first = self.of(*dims[0])
        for tensor, dim in dims[1:]:
            group = self.of(tensor, dim)  # after the one before has joined: both may have been in one group
            if group is not first:
                first.absorb(group)
                for key in group.dims:
                    self._group[key] = first
        return first

    def _start(self, placeholder: tf.Operation) -> None:
        """A variable's dims, or those of an input of the model, which the batch axis splits."""
        value, variable = placeholder.outputs[0], self._variables.get(placeholder.name)
        for dim in range(value.shape.rank or 0):
            if variable is None:
                self.pin(value, dim, "is a dim of the model's input")
            else:
                self.of(value, dim).variables.append((variable, dim))

    def weight(self, tensor: tf.Tensor) -> keras.Variable | None:
        """The variable that a tensor is, maybe in another shape or dtype."""
        while tensor.op.type in ("Reshape", "Transpose", "Cast", "Identity"):
            tensor = tensor.op.inputs[0]
        return self._variables.get(tensor.op.name)

    def pin(self, tensor: tf.Tensor, dim: int, reason: str) -> None:
        """Says that a dim must stay whole."""
        group = self.of(tensor, dim)
        group.pinned = group.pinned or reason

    def make_whole(self, tensor: tf.Tensor, dim: int) -> None:
        """Says that an operation gives a dim whole to every device."""
        group = self.of(tensor, dim)
        group.whole = group.whole or f"comes whole out of {tensor.op.type}"

    def pin_all(self, operation: tf.Operation) -> None:
        """Says that an operation takes and gives everything whole."""
        for tensor in operation.inputs:
            for dim in range(tensor.shape.rank or 0):
                self.pin(tensor, dim, f"goes through {operation.type}")
        for tensor in operation.outputs:
            for dim in range(tensor.shape.rank or 0):
                self.make_whole(tensor, dim)
