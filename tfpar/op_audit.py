"""The audit: every operation of `op_cases.py` on every sharding of its inputs, against one device.

    python -m tfpar.op_support --audit                      all of them
    python -m tfpar.op_support --audit --only="conv.*"      some

An operation may end its process, so cases run in a worker process, which is started anew when it dies or takes too long:

    1  audit      one request per case and sharding to the worker, and its outcome back
    2  serve      the worker: reads requests, writes outcomes
    3  outcome    one case on the mesh: values and gradients against one device in float64

An outcome is one of `op_table.OUTCOMES`, with what TensorFlow said.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import select
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from absl import flags
from tensorflow.experimental import dtensor

import tfpar
from tfpar import op_cases, op_cases_nn, op_support, op_table, op_warnings, transfer, variables

_AUDIT = flags.DEFINE_bool("audit", False, "run the operations of op_cases.py on all shardings")
_ONLY = flags.DEFINE_string("only", ".*", "a regular expression for the names of the operations to run")
_WRITE = flags.DEFINE_string("write", "", "the file for the table: docs/op_support.md; with --only its other rows stay")
_JSON = flags.DEFINE_string("json", "", "a file to which all outcomes are added, one a line")

AXES = {"data": 2, "model": 2}
SHARDINGS_PER_CASE = 14
SECONDS_PER_CASE = 60.0
CASES_PER_WORKER = 400  # a process keeps all that it traced
CASES: dict[str, op_cases.Case] = op_cases.CASES | op_cases_nn.CASES

_MOVES = "output layout of Relayout op"  # in the text of an error about two moves of one tensor, as only the audit has them
_RUNNING = "function_node"  # in the text of an error that a partitioned function met while it ran

Spec = tuple[str | None, ...]
Sharding = tuple[Spec, ...]
Results = dict[str, list[tuple[Sharding, tuple[str, ...], str, str]]]


def specs(shape: tuple[int, ...]) -> list[Spec]:
    """Every way to split a tensor's dims over the axes, each axis at most once; whole first."""
    choices = [[None, *(axis for axis, size in AXES.items() if dim % size == 0)] for dim in shape]
    found = itertools.product(*choices)
    return sorted((s for s in found if all(s.count(axis) < 2 for axis in AXES)), key=lambda s: -s.count(None))


def shardings(inputs: tuple[Any, ...]) -> list[Sharding]:
    """The combinations of splits that are tried.

    Both axes have one size, so of two that differ by swapping them one is taken: dim 0 over data, others over model. Of
    many inputs and dims: all that split one input, and a fixed sample of the rest.
    """
    found = [s for s in itertools.product(*(specs(np.shape(value)) for value in inputs)) if any(map(any, s))]
    found = [s for s in found if _first_axis(s) == ("data" if any(spec and spec[0] for spec in s) else "model")]
    first = [s for s in found if sum(map(any, s)) == 1]
    rest = [s for s in found if s not in first]
    room = max(SHARDINGS_PER_CASE - len(first), 4)
    return first + [rest[i] for i in sorted(set(np.linspace(0, len(rest) - 1, room).astype(int)))] if rest else first


def _first_axis(sharding: Sharding) -> str:
    """The axis of the first dim 0 that is split, or of the first split dim where there is none."""
    heads = [spec[0] for spec in sharding if spec and spec[0]]
    return heads[0] if heads else next(axis for spec in sharding for axis in spec if axis)


def uses(name: str, number: int) -> list[tuple[str, ...]]:
    """The ways in which what follows an operation splits its results: TensorFlow may let that choose the operation's own
    split. No way, data first and model last, or the two swapped; in turn where there are many shardings.
    """
    if name in op_cases.ELEMENTWISE or name in op_cases.BINARY:
        return [()] * number
    ways = [(), ("data", "model"), ("model", "data")]
    return [ways[(i + i // (number // 3)) % 3] if number % 9 == 0 else ways[i % 3] for i in range(number)]


def _used(result: tf.Tensor, use: tuple[str, ...], moved: bool) -> tf.Tensor:
    """The result, split by what follows it: moved to that split, or met by a tensor that has it."""
    owner = variables.step_owner()
    if not use or owner is None or not result.shape.rank or not result.shape.is_fully_defined():
        return result
    spec = [None] * result.shape.rank
    for dim, axis in ((-1, use[1]), (0, use[0])):
        if result.shape[dim] % AXES[axis] == 0:
            spec[dim] = axis
    if moved:
        return dtensor.relayout(result, owner.mesh.layout(spec))
    if result.dtype == tf.bool:
        return result
    return result + dtensor.relayout(tf.zeros(result.shape, result.dtype), owner.mesh.layout(spec))


def values_and_gradients(
    function: Callable[..., Any], sharding: Sharding = (), use: tuple[str, ...] = (), moved: bool = True
) -> Callable[..., list[tf.Tensor]]:
    """The results of a function, and the gradients of a weighted sum of them with regard to its floating inputs, split as
    these are, which is what an optimizer does.
    """

    def compute(*inputs):
        watched = [value for value in inputs if value.dtype.is_floating]
        with tf.GradientTape() as tape:
            tape.watch(watched)
            results = [tf.convert_to_tensor(result) for result in tf.nest.flatten(function(*inputs))]
            results = [_used(result, use, moved) for result in results]
            total = tf.add_n([_weighted(result) for result in results if result.dtype.is_floating] or [0.0])
        gradients = tape.gradient(total, watched) if watched else []
        layouts = [spec for value, spec in zip(inputs, sharding) if value.dtype.is_floating] or [None] * len(watched)
        found = [(tf.convert_to_tensor(g), spec) for g, spec in zip(gradients, layouts) if g is not None]
        owner = variables.step_owner()
        return results + [g if owner is None else dtensor.relayout(g, owner.mesh.layout(spec)) for g, spec in found]

    return tf.function(compute, autograph=False)


def _weighted(result: tf.Tensor) -> tf.Tensor:
    weights = np.arange(1.0, 1 + max(result.shape.num_elements() or 1, 1)) / 8
    weights = weights.reshape(result.shape) if result.shape.is_fully_defined() else 1.0
    return tf.cast(tf.reduce_sum(result * tf.cast(weights, result.dtype)), tf.float64)


@functools.cache
def one_device(name: str) -> list[np.ndarray]:
    """What a case gives on one device."""
    function, inputs = CASES[name]
    return [np.asarray(result) for result in values_and_gradients(function)(*map(tf.constant, inputs))]


def outcome(name: str, sharding: Sharding, use: tuple[str, ...], strategy: tf.distribute.Strategy) -> tuple[str, str]:
    """Runs one case on one sharding of its inputs: one of `op_table.OUTCOMES`, and what is to be said about it."""
    expected, (function, inputs) = one_device(name), CASES[name]
    moved = bool(use)
    layouts = [strategy.mesh.layout(spec) for spec in sharding]
    inputs = tuple(transfer.to_mesh(value, layout) for value, layout in zip(inputs, layouts))
    while True:
        compute = values_and_gradients(function, sharding, use, moved)
        step = tf.function(lambda *values, compute=compute: strategy.run(compute, args=values), autograph=False)
        try:
            actual = [np.asarray(result) for result in transfer.all_to_host(step(*inputs))]
            break
        except Exception as error:
            operation = op_support.refused(error) if isinstance(error, tf.errors.OpError) else None
            if operation is not None and not op_support.is_replicated(operation):
                op_support.replicate(operation)
            elif moved and _MOVES in _shortened(error):
                moved = False
            else:
                return "refused", _shortened(error)
    operations = list(op_warnings.all_operations(step.get_concrete_function(*inputs).graph))
    if [a.shape for a in actual] != [e.shape for e in expected]:
        return "WRONG", f"shapes {[a.shape for a in actual]}"
    errors = [_error(a, e) for a, e in zip(actual, expected)]
    single = any(result.dtype == tf.float32 for operation in operations for result in operation.outputs)
    if not max(errors) <= (1e-4 if single else 1e-9):
        return "WRONG", f"off by {max(errors):.2g} in result {int(np.argmax(errors))}"
    replicated = {operation.type for operation in operations if op_support.is_replicated(operation.type)}
    return ("replicated", ", ".join(sorted(replicated))) if replicated else ("right", "")


def _error(actual: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference, relative where numbers are large; infinite where one of two is not a number."""
    kind = np.complex128 if np.iscomplexobj(expected) else np.float64
    actual, expected = actual.astype(kind), expected.astype(kind)
    same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    with np.errstate(invalid="ignore"):
        error = np.where(same, 0.0, np.abs(actual - expected) / np.maximum(1.0, np.abs(expected)))
    return float(np.max(np.where(np.isnan(error), np.inf, error), initial=0.0))


def _shortened(error: Exception) -> str:
    text = error.message if isinstance(error, tf.errors.OpError) else f"{type(error).__name__}: {error}"
    return re.sub(r"\s+", " ", text)[:300]


def serve() -> None:
    """The worker: a line of JSON in, a line of JSON out, until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what TensorFlow prints is no answer
    tfpar.use_logical_cpus(4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        strategy = tfpar.HybridStrategy(AXES)
        for line in sys.stdin:
            name, sharding, use = json.loads(line)
            try:
                found = outcome(name, sharding, use, strategy)
            except Exception as error:  # the case does not run on one device either
                found = "no case", _shortened(error)
            print(json.dumps(found), file=answers, flush=True)


class Worker:
    """A process that runs cases, started when it is needed and after it died; `program` is what it runs."""

    def __init__(self, program: str = "from tfpar import op_audit; op_audit.serve()"):
        self._program, self._process, self._cases = program, None, 0

    def run(self, *case: Any) -> tuple[str, str]:
        """One case's outcome, "died" where the process does not live to tell it."""
        found = self._run(*case)
        if found[0] == "refused" and _RUNNING in found[1]:  # what was broken off breaks off all that follows
            fresh, self._cases = self._cases == 1, CASES_PER_WORKER
            return found if fresh else self.run(*case)
        return found

    def _run(self, *case: Any) -> tuple[str, str]:
        if self._process is None or self._cases >= CASES_PER_WORKER:
            self.stop()
            self._start()
        self._cases += 1
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(case) + "\n")
            self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], SECONDS_PER_CASE)
        answer = self._process.stdout.readline() if ready else ""
        if answer:
            return tuple(json.loads(answer))
        said = f"exit {self._process.wait()}" if ready else f"no answer in {SECONDS_PER_CASE:.0f} s"
        self.stop()
        return "died", said

    def stop(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = None

    def _start(self) -> None:
        self._cases = 0
        self._process = subprocess.Popen(
            [sys.executable, "-c", self._program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"},
        )


def audit(names: Iterable[str], see: Callable[..., None] = lambda *found: None) -> Results:
    """Runs cases on all their shardings.

    Args:
        names: keys of `CASES`.
        see: called with each name, sharding, use, outcome and what is said about it.

    Returns:
        For each name a list of (sharding, use, outcome, what is said).
    """
    worker, results = Worker(), {}
    try:
        for name in names:
            results[name] = []
            tried = shardings(CASES[name][1])
            for sharding, use in dict.fromkeys(zip(tried * 3 if len(tried) <= 6 else tried, uses(name, 3 * len(tried)))):
                found = (sharding, use, *worker.run(name, sharding, use))
                results[name].append(found)
                see(name, *found)
    finally:
        worker.stop()
    return results


def main(arguments: list[str]) -> None:
    """The command; see the top of this file."""
    del arguments
    names = [name for name in CASES if re.fullmatch(_ONLY.value, name)]
    start = time.time()

    def see(name, sharding, use, found, said):
        if _JSON.value:
            with open(_JSON.value, "a") as file:
                print(json.dumps([name, sharding, use, found, said]), file=file)
        if found not in ("right", "replicated"):
            print(f"{found:<8} {name}: {op_table.spelled(sharding, use)}: {said}", flush=True)

    results = audit(names, see)
    for found, number in op_table.counts(results).items():
        print(f"{found:<10} {number}")
    if _WRITE.value:
        page = Path(_WRITE.value)
        before = page.read_text() if _ONLY.value != _ONLY.default and page.exists() else ""
        page.write_text(op_table.table(results, time.time() - start, before))
