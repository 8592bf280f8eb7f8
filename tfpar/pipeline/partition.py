"""Where a model is cut into stages, and what crosses each cut."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import keras

from tfpar.pipeline.costs import Cost
from tfpar.pipeline.layer_graph import Call, LayerGraph

TOLERANCE = 1.05  # of the best balance, for a cut that fewer numbers cross

Cuts = Sequence[str | Sequence[str]] | None


@dataclasses.dataclass(frozen=True)
class StagePart:
    """One stage of a model.

    Attributes:
        index: the stage.
        calls: what it runs.
        receives: the values that come from the stage before, used here or only passed on.
        sends: the values that go to the next stage; of the last one, the model's outputs.
        inputs: the values that are inputs of the model and used here.
    """

    index: int
    calls: tuple[Call, ...]
    receives: tuple[int, ...]
    sends: tuple[int, ...]
    inputs: tuple[int, ...]

    @property
    def variables(self) -> list[keras.Variable]:
        """The variables of its layers, each once."""
        return list({id(v): v for call in self.calls for v in call.variables}.values())


def split(graph: LayerGraph, ends: Sequence[int]) -> tuple[StagePart, ...]:
    """The stages of a model that is cut after some calls.

    Args:
        graph: the model's calls.
        ends: for each stage, how many calls it and the stages before it have.

    Returns:
        The stages. A value that is made in stage 0 and used in stage 2 passes through stage 1.
    """
    groups = [graph.calls[start:end] for start, end in itertools.pairwise([0, *ends])]
    made = [{number for call in calls for number in call.outputs} for calls in groups]
    used = [{number for call in calls for number in call.inputs} for calls in groups]
    inputs = set(graph.inputs)
    last = len(groups) - 1
    parts, received = [], ()
    for index, calls in enumerate(groups):
        later = set().union(*used[index + 1 :], graph.outputs) - inputs
        sends = tuple(sorted(later & (made[index] | set(received)))) if index < last else graph.outputs
        here = used[index] | (set(graph.outputs) if index == last else set())
        parts.append(StagePart(index, calls, received, sends, tuple(sorted(here & inputs))))
        received = sends
    return tuple(parts)


def balanced(graph: LayerGraph, costs: Sequence[Cost], stages: int) -> list[int]:
    """Where to cut so that the longest stage is as short as can be.

    Args:
        graph: the model's calls.
        costs: of each call.
        stages: how many to make.

    Returns:
        As `split` takes. Among cuts that are within 5 % of the best, those that the fewest numbers cross.

    Raises:
        ValueError: more stages than calls.
    """
    count = len(graph.calls)
    if stages > count:
        raise ValueError(
            f"A model of {count} layers and operations cannot be cut into {stages} stages. Use fewer stages, or virtual "
            "stages, or take a model with more layers."
        )
    total = [0.0, *itertools.accumulate(cost.work for cost in costs)]
    limit = TOLERANCE * _best(count, stages, lambda start, end, _: total[end] - total[start], max)[0]
    crossing = _crossing(graph, costs)

    def sent(start: int, end: int, stage: int) -> float:
        return math.inf if total[end] - total[start] > limit else crossing[end]

    return _best(count, stages, sent, lambda a, b: a + b)[1]


def named(graph: LayerGraph, cuts: Cuts, stages: int) -> list[int]:
    """Where the user cuts.

    Args:
        graph: the model's calls.
        cuts: the layers that each stage but the first begins with, or for each stage the layers in it, by their names.
        stages: how many to make.

    Returns:
        As `split` takes.

    Raises:
        ValueError: an unknown layer, a wrong number of stages, or stages that do not follow one another.
    """
    names = [call.path for call in graph.calls]
    lists = [[cut] if isinstance(cut, str) else list(cut) for cut in cuts]
    for name in itertools.chain(*lists):
        if not any(_is_named(path, name) for path in names):
            raise ValueError(f"The cut {name!r} is no layer of the model; it has {', '.join(dict.fromkeys(names))}.")
    are_lists = not all(isinstance(cut, str) for cut in cuts)
    if len(cuts) != stages - (not are_lists):
        raise ValueError(
            f"{stages} stages are named by the first layer of each but the first ({stages - 1} names) or by {stages} lists "
            f"of layers, got {len(cuts)}: {list(cuts)!r}."
        )
    firsts = [min(i for i, path in enumerate(names) for name in given if _is_named(path, name)) for given in lists]
    starts = [0, *firsts] if not are_lists else [0, *firsts[1:]]
    lasts = [max(i for i, path in enumerate(names) for name in given if _is_named(path, name)) for given in lists]
    in_order = all(a < b for a, b in itertools.pairwise(starts))
    apart = not are_lists or all(a < b for a, b in zip(lasts, firsts[1:]))
    if not (in_order and apart):
        raise ValueError(
            f"The cuts {list(cuts)!r} are not in the order in which the model runs its layers: {', '.join(names)}."
        )
    return [*starts[1:], len(names)]


def _is_named(path: str, name: str) -> bool:
    """Whether a layer, or a nested model around it, has the name."""
    return name in (path, path.rpartition("/")[2]) or path.startswith(name + "/")


def _crossing(graph: LayerGraph, costs: Sequence[Cost]) -> list[float]:
    """For each place after a number of calls, the numbers per example that cross it."""
    size = {n: s for call, cost in zip(graph.calls, costs) for n, s in zip(call.outputs, cost.sent)}
    last_use = {number: place for place, call in enumerate(graph.calls) for number in call.inputs}
    last_use |= dict.fromkeys(graph.outputs, len(graph.calls))
    crossing = [0.0] * (len(graph.calls) + 1)
    for place, call in enumerate(graph.calls):
        for number in call.outputs:
            for after in range(place + 1, last_use.get(number, place) + 1):
                crossing[after] += size[number]
    crossing[-1] = 0.0
    return crossing


def _best(count: int, stages: int, cost, join) -> tuple[float, list[int]]:
    """The cuts of 0..count into non-empty stages with the least joined cost, by dynamic programming."""
    best = [[(math.inf, 0)] * (count + 1) for _ in range(stages + 1)]
    best[0][0] = (0.0, 0)
    for stage in range(1, stages + 1):
        for end in range(stage, count - (stages - stage) + 1):
            best[stage][end] = min(
                (join(best[stage - 1][start][0], cost(start, end, stage)), start) for start in range(stage - 1, end)
            )
    ends, end = [], count
    for stage in range(stages, 0, -1):
        ends.append(end)
        end = best[stage][end][1]
    return best[stages][count][0], ends[::-1]
