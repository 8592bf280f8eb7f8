"""The audit of operations tells right from wrong, and outlives the processes that it starts."""

import time

import pytest

from tfpar import op_audit, op_table

PROGRAM = """
import os, signal, time
import numpy as np
import tensorflow as tf
from tfpar import op_audit, variables

def on_a_mesh(step, elsewhere=lambda x: x):
    return lambda x: (elsewhere if variables.step_owner() is None else step)(x)

def fails(x):
    raise NotImplementedError("not on a mesh")

def with_gradient(factor):
    return tf.custom_gradient(lambda x: (x, lambda upstream: upstream * factor))

functions = {
    "right": tf.square,
    "replicated": lambda x: tf.roll(x, 1, 0),
    "fails": on_a_mesh(fails),
    "wrong value": on_a_mesh(lambda x: x + 1e-6),
    "wrong gradient": on_a_mesh(with_gradient(1 + 1e-6)),
    "wrong shape": on_a_mesh(lambda x: x[:4]),
    "not a number": on_a_mesh(lambda x: x * np.nan),
    "dies": on_a_mesh(lambda x: os.kill(os.getpid(), signal.SIGSEGV)),
    "never ends": on_a_mesh(lambda x: time.sleep(1000)),
    "no case": fails,
}
op_audit.CASES |= {name: (function, (np.arange(32.0).reshape(8, 4),)) for name, function in functions.items()}
op_audit.serve()
"""
OUTCOMES = {
    "right": ("right", ""),
    "replicated": ("replicated", "Roll"),
    "fails": ("refused", "NotImplementedError: not on a mesh"),
    "wrong value": ("WRONG", "in result 0"),
    "wrong gradient": ("WRONG", "in result 1"),
    "wrong shape": ("WRONG", "shapes [(4, 4), (8, 4)]"),
    "not a number": ("WRONG", "off by inf"),
    "no case": ("no case", "not on a mesh"),
}
SPLIT = (("data", "model"),)


@pytest.mark.slow
def test_outcomes(monkeypatch):
    worker = op_audit.Worker(PROGRAM)
    try:
        for name, (outcome, said) in OUTCOMES.items():
            found = worker.run(name, SPLIT, ())
            assert found[0] == outcome and said in found[1], (name, found)
        assert worker.run("dies", SPLIT, ()) == ("died", "exit -11")
        assert worker.run("right", SPLIT, ()) == ("right", "")
        assert worker.run("identity", (("data", None),), ("data", "model")) == (
            "right",
            "",
        )  # which TensorFlow moves once only
        monkeypatch.setattr(op_audit, "SECONDS_PER_CASE", 2.0)
        start = time.time()
        assert worker.run("never ends", SPLIT, ()) == ("died", "no answer in 2 s")
        assert time.time() - start < 20
    finally:
        worker.stop()


def test_the_table_counts_what_was_found_and_lists_what_is_not_right():
    row, columns = (("data", None),), ((None, "model"),)
    results = {
        "one": [(row, (), "right", ""), (columns, (), "replicated", "Roll")],
        "two": [(row, (), "WRONG", "off by 1 in result 0"), (columns, ("data", "model"), "died", "exit -11")],
    }
    assert op_table.counts(results) == {"right": 1, "replicated": 1, "refused": 0, "WRONG": 1, "died": 1}
    text = op_table.table(results, 60.0)
    assert "| `one` | 1 | 1 |  |  |  |  |" in text
    assert "| `two` |  |  |  | 1 | 1 | WRONG: `d-`; died: `-m > d m` |" in text
    again = op_table.table({"two": [(row, (), "right", "")]}, 60.0, text)
    assert "1 minutes. Again on" in again and "`two`.\n" in again
    assert "| `one` | 1 | 1 |  |  |  |  |\n| `two` | 1 |  |  |  |  |  |\n" in again
    assert [line.rsplit(" ", 2)[1] for line in again.splitlines() if line.startswith(("| right", "| WRONG"))] == ["2", "0"]


def test_every_operation_has_splits_to_try():
    for name, (_, inputs) in op_audit.CASES.items():
        tried = op_audit.shardings(inputs)
        assert tried and len(set(tried)) == len(tried) < 40, name
        assert all(any(axis for spec in sharding for axis in spec) for sharding in tried), name
