"""The table that the audit writes: docs/op_support.md."""

from __future__ import annotations

import collections
import time
from typing import Any

import keras
import tensorflow as tf

OUTCOMES = {
    "right": "one device's values and gradients, to 1e-9",
    "replicated": "right, with an operation in it that was gathered and ran whole on every device",
    "refused": "an error",
    "WRONG": "other numbers, no error",
    "died": "the process ended, or was stopped after the time limit",
}
_GOOD = ("right", "replicated")


def spelled(sharding: Any, use: Any = ()) -> str:
    """Splits in letters: "d- -m" is dim 0 of the first input over data, dim 1 of the second over model; "> d m": what
    follows splits dim 0 of a result over data and its last dim over model.
    """
    inputs = " ".join("".join(axis[0] if axis else "-" for axis in spec) or "." for spec in sharding)
    return inputs + (f" > {use[0][0]} {use[1][0]}" if use else "")


def counts(results: dict[str, list]) -> dict[str, int]:
    """How many (operation, sharding) had which outcome."""
    found = collections.Counter(outcome for cases in results.values() for _, _, outcome, _ in cases)
    return {outcome: found[outcome] for outcome in OUTCOMES}


def table(results: dict[str, list], seconds: float, before: str = "") -> str:
    """The document: what the outcomes mean, how many there were, and a row per operation.

    Args:
        results: what an audit returned.
        seconds: how long it took.
        before: the document of a whole audit, whose rows stay for operations that this one did not run.
    """
    rows = {line.split("`")[1]: line for line in before.splitlines() if line.startswith("| `")}
    rows |= {name: _row(name, cases) for name, cases in results.items()}
    total = dict.fromkeys(OUTCOMES, 0)
    for row in rows.values():
        for outcome, number in zip(OUTCOMES, row.split(" | ")[1:]):
            total[outcome] += int(number.strip() or 0)
    today = time.strftime("%Y-%m-%d")
    when = f"TensorFlow {tf.__version__}, Keras {keras.__version__}, {today}, {seconds / 60:.0f} minutes."
    for line in before.splitlines():
        if line.startswith("TensorFlow "):
            when = f"{line.partition(' Again ')[0]} Again on {today}: {', '.join(f'`{name}`' for name in results)}."
    lines = [
        "# Operations on a mesh",
        "",
        "Written by `python -m tfpar.op_support --audit --write=docs/op_support.md`; not edited by hand. Each operation ran",
        "forward and with gradients on a mesh `data=2,model=2` of four CPU devices, on several splits of its inputs, and",
        "was compared with one device. The operations are in [tfpar/op_cases.py](../tfpar/op_cases.py) and",
        "[tfpar/op_cases_nn.py](../tfpar/op_cases_nn.py), what takes their place in a step in",
        "[tfpar/op_support.py](../tfpar/op_support.py).",
        "",
        when,
        "",
        "| outcome | meaning | operation and split |",
        "| --- | --- | ---: |",
        *(f"| {outcome} | {meaning} | {total[outcome]} |" for outcome, meaning in OUTCOMES.items()),
        "",
        'A split is written in letters, an input a word: "d- -m" is dim 0 of the first input over `data` and dim 1 of the',
        'second over `model`, "." a scalar. "> d m" means that what follows wants dim 0 of the results over `data`',
        "and their last dim over `model`: they are moved there or, where TensorFlow does not move one tensor twice, added",
        "to a tensor that is split so.",
        "",
        f"| operation | {' | '.join(OUTCOMES)} | not right |",
        f"| --- |{' ---: |' * len(OUTCOMES)} --- |",
    ]
    return "\n".join([*lines, *rows.values()]) + "\n"


def _row(name: str, cases: list) -> str:
    found = collections.Counter(outcome for _, _, outcome, _ in cases)
    return f"| `{name}` | {' | '.join(str(found[outcome] or '') for outcome in OUTCOMES)} | {_rest(cases)} |"


def _rest(cases: list) -> str:
    """Which splits had which other outcome."""
    splits = collections.defaultdict(list)
    for sharding, use, outcome, _ in cases:
        if outcome not in _GOOD:
            splits[outcome].append(f"`{spelled(sharding, use)}`")
    return "; ".join(f"{outcome}: {', '.join(found)}" for outcome, found in splits.items())
