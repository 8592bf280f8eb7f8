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
