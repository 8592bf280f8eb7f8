"""A stage's forward and backward as separate functions, cut out of one traced graph.

The graph computes a stage's results and, from the gradients of these, the gradients of its inputs and weights. An
operation belongs to the first phase that needs it:

    F    forward: results, and every assignment to a variable
    I    the backward for the inputs
    W    the rest: the backward for the weights

What a later phase needs of an earlier one is kept: its activations. So a backward repeats nothing, and the two parts of
it can run apart (Qi et al., arXiv 2401.10241). With recomputation nothing is kept but what a repeated forward would not
find again: random numbers, and variables that the forward assigns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfpar.compat import functions
from tfpar.pipeline.schedules import BACKWARD, FORWARD, INPUT, WEIGHT


@dataclasses.dataclass(frozen=True)
class Traced:
    """A stage's graph.

    Attributes:
        graph: of a concrete function.
        inputs: what a forward takes.
        upstream: the gradients that a backward takes.
        accumulators: the sums of gradients of the weights so far, which a backward takes too.
        results: what a forward gives.
        input_gradients: what a backward gives for the inputs.
        weight_gradients: what it gives for the weights.
    """

    graph: Any
    inputs: Sequence[tf.Tensor]
    results: Sequence[tf.Tensor]
    upstream: Sequence[tf.Tensor] = ()
    accumulators: Sequence[tf.Tensor] = ()
    input_gradients: Sequence[tf.Tensor] = ()
    weight_gradients: Sequence[tf.Tensor] = ()


@dataclasses.dataclass(frozen=True)
class Phase:
    """One function of a stage.

    Attributes:
        function: takes `takes` in order and returns `gives`, then `keeps`.
        takes: the names of its groups of arguments: "inputs", "upstream", "accumulators", "F", "I".
        gives: how many results of its own it has.
        keeps: the bytes of each tensor that it keeps for later phases.
        kept: of each earlier phase, which of the tensors that it keeps this one takes.
    """

    function: Callable
    takes: tuple[str, ...]
    gives: int
    keeps: tuple[int, ...]
    kept: dict[str, tuple[int, ...]]


def phases(traced: Traced, splits_backward: bool, recompute: bool) -> dict[str, Phase]:
    """Cuts a stage's graph.

    Args:
        traced: the graph.
        splits_backward: whether the backward is taken apart.
        recompute: whether a backward repeats its forward instead of keeping activations.

    Returns:
        The phases by the kinds of actions that run them.
    """
    if splits_backward:
        backward = [(INPUT, traced.input_gradients), (WEIGHT, traced.weight_gradients)]
    else:
        backward = [(BACKWARD, [*traced.input_gradients, *traced.weight_gradients])]
    return _Cutter(traced, recompute).cut([(FORWARD, traced.results), *backward])


def forward_only(traced: Traced) -> dict[str, Phase]:
    """The forward as the one phase of a stage's graph without gradients."""
    return _Cutter(traced, recompute=True).cut([(FORWARD, traced.results)])


@dataclasses.dataclass(frozen=True)
class _Part:
    kind: str
    fetches: Sequence[tf.Tensor]
    effects: Sequence[tf.Operation]


class _Cutter:
    """Gives each operation of a graph to the first part that needs it."""

    def __init__(self, traced: Traced, recompute: bool):
        self._traced, self._recompute = traced, recompute
        self._late = {tensor.op for tensor in (*traced.upstream, *traced.accumulators)}
        self._given = {tensor.op for tensor in traced.inputs} | self._late
        operations = traced.graph.get_operations()
        self._effects = functions.effects(traced.graph)
        changed = {tensor.ref() for op in self._effects for tensor in op.inputs if tensor.dtype == tf.resource}
        reads = {op for op in operations if op.type == "ReadVariableOp" and op.inputs[0].ref() in changed}
        # DTensor draws other numbers where it splits them otherwise, which it may do in another function
        self._drawn = reads | {op for op in operations if op.type.startswith("StatelessRandom")}
        self._varying = _descendants(operations, self._given | self._drawn)

    def cut(self, phases: Sequence[tuple[str, Sequence[tf.Tensor]]]) -> dict[str, Phase]:
        late = _descendants(self._traced.graph.get_operations(), self._late)
        early = [op for op in self._effects if op not in late]
        when = {phases[0][0]: early, phases[-1][0]: [op for op in self._effects if op in late]}
        parts = [_Part(kind, fetches, when.get(kind, ())) for kind, fetches in phases]
        home: dict[tf.Operation, str] = {}
        for part in parts:
            done = set(home)
            for operation in functions.ancestors([*(t.op for t in part.fetches), *part.effects]):
                home.setdefault(operation, part.kind)
                if operation not in done:
                    functions.forget_order(operation, done)
        needed = {part.kind: self._needed(part, home) for part in parts}
        keeps = {
            part.kind: list(dict.fromkeys(t.ref() for other in parts for t in needed[other.kind] if home[t.op] == part.kind))
            for part in parts
        }
        return {part.kind: self._phase(part, needed[part.kind], keeps, home) for part in parts}

    def _needed(self, part: _Part, home: dict[tf.Operation, str]) -> list[tf.Tensor]:
        """The tensors that a part takes from earlier ones."""
        found: dict[Any, tf.Tensor] = {}
        seen, stack = set(), [*(tensor.op for tensor in part.fetches), *part.effects]
        for tensor in part.fetches:  # a result of an earlier part
            if home[tensor.op] != part.kind and tensor.op not in self._given and self._is_kept(tensor.op, home):
                found[tensor.ref()] = tensor
        while stack:
            operation = stack.pop()
            if operation in seen or operation in self._given:
                continue
            seen.add(operation)
            for tensor in operation.inputs:
                if home[tensor.op] != part.kind and self._is_kept(tensor.op, home):
                    found[tensor.ref()] = tensor
                else:
                    stack.append(tensor.op)
        return list(found.values())

    def _is_kept(self, operation: tf.Operation, home: dict[tf.Operation, str]) -> bool:
        """Whether a later part takes what an operation made, rather than making it again.

        What comes from weights alone is made again: a read or a cast, which would be kept once per micro-batch.
        """
        if operation in self._given or operation not in self._varying:
            return False
        return operation in self._drawn or not self._recompute or home[operation] != FORWARD

    def _phase(self, part: _Part, needed: list[tf.Tensor], keeps: dict[str, list], home: dict[tf.Operation, str]) -> Phase:
        groups = {
            "inputs": self._traced.inputs,
            "upstream": self._traced.upstream,
            "accumulators": self._traced.accumulators,
        }
        reached = self._reached(part, {tensor.ref() for tensor in needed})
        takes = [name for name, tensors in groups.items() if any(t.op in reached for t in tensors)]
        kept = {
            kind: tuple(i for i, ref in enumerate(refs) if any(ref == t.ref() for t in needed))
            for kind, refs in keeps.items()
            if kind != part.kind
        }
        kept = {kind: indices for kind, indices in kept.items() if indices}
        feeds = [tensor for name in takes for tensor in groups[name]]
        feeds += [keeps[kind][i].deref() for kind, indices in kept.items() for i in indices]
        own = [ref.deref() for ref in keeps[part.kind]]
        function = functions.prune(self._traced.graph, feeds, [*part.fetches, *own, *part.effects])
        repeated = [op.name for op in function.graph.get_operations() if _changes_state(op)] if part.kind != FORWARD else []
        if repeated:
            raise NotImplementedError(f"A backward would assign variables a second time: {', '.join(repeated)}.")
        return Phase(function, tuple(takes), len(part.fetches), tuple(map(_bytes, own)), kept)

    def _reached(self, part: _Part, stops: set) -> set[tf.Operation]:
        seen, stack = set(), [*part.fetches, *(tensor for op in part.effects for tensor in op.inputs)]
        while stack:
            tensor = stack.pop()
            if tensor.ref() in stops or tensor.op in seen:
                continue
            seen.add(tensor.op)
            stack.extend(tensor.op.inputs)
        return seen


def _descendants(operations: Iterable[tf.Operation], sources: set[tf.Operation]) -> set[tf.Operation]:
    """The sources and all that is computed from them; each operation follows its inputs."""
    found = set(sources)
    for operation in operations:
        if any(tensor.op in found for tensor in operation.inputs):
            found.add(operation)
    return found


def _changes_state(operation: tf.Operation) -> bool:
    return operation.type.startswith("Assign") and operation.type.endswith("VariableOp")


def _bytes(tensor: tf.Tensor) -> int:
    return tensor.shape.num_elements() * tensor.dtype.size
