"""A sample of `make coverage`; docs/coverage.md has a line per class and is what the results say."""

import json
from pathlib import Path

import keras
import numpy as np
import pytest
from model_coverage import case, page, run

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "coverage.md").read_text()
SAMPLE = ["layers/Conv2D", "layers/GroupQueryAttention", "keras_hub/BertBackbone"]
MORE = ["keras_hub/GPT2Backbone"]


def check(one: case.Case) -> None:
    """Trains on one device and on a mesh and compares."""
    (result,) = case.compare(one, ("data=2,model=2",))
    assert result["ok"], result.get("trace") or result
    assert result["error"] <= case.TOLERANCE["float64"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SAMPLE, *(pytest.param(name, marks=pytest.mark.long) for name in MORE)])
def test_class(name):
    check(run.case_of(name))


def test_every_class_has_a_line():
    for title, group in zip(PAGE.split("\n## ")[1:], run.GROUPS):
        listed = [line.split(" | ")[0].removeprefix("| ") for line in title.splitlines() if line.startswith("| ")]
        assert listed[2:] == run.GROUPS[group].names()


def test_the_page_is_what_the_results_say():
    results = json.loads((ROOT / "tests" / "model_coverage" / "results.json").read_text())
    made = page.page(run.names(), results, {})
    assert made.split("\n## ")[1:] == PAGE.split("\n## ")[1:]


@pytest.mark.parametrize(
    ("mesh", "noise", "ok"),
    [
        (1.1, [1.1, 1.1], None),  # the second with the rows in order
        (1 + 1e-6, [1.1, 1 + 1e-6], True),
        (1.1, [1.1, 1.0, 1.0, 1.0], False),
        (1 + 1e-6, [1 + 1e-6], True),
        (1 + 1e-6, [1.0, 1.0, 1 + 1e-6], True),
        (1.1, [1.0, 1.0, 1.0], False),
        (1.0, [], True),
    ],
)
def test_wrong_numbers_are_a_failure_with_a_cause(mesh, noise, ok, monkeypatch):
    trained = iter([({"0 w": np.full(2, value)}, [1.0], 0) for value in (1.0, mesh, *noise)])
    monkeypatch.setattr(case, "train", lambda *args, **kwargs: next(trained))
    monkeypatch.setattr(case, "has_float32_inside", lambda case: False)
    (result,) = case.compare(case.Case(lambda: None), ("data=2",))
    assert result["ok"] is ok
    assert ok is not False or "w is 1.0e-01 off" in result["cause"]
    assert next(trained, None) is None  # every nudge was looked at


CHILD = """
import json, sys, time
names, meshes, _ = json.loads(sys.argv[1])
print(json.dumps({"case": names[0]}), flush=True)
print(json.dumps({"case": names[0], "mesh": meshes[0], "ok": True}), flush=True)
if names[1:] and not meshes[1:]:
    print(json.dumps({"case": names[1]}), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(("names", "meshes"), [(["a"], ["m"]), (["a"], ["m", "n"]), (["a", "b"], ["m"])])
def test_what_a_process_has_left_in_memory_is_not_the_need_of_the_next(names, meshes, monkeypatch):
    kept, processes = [], set()

    def memory(pid):  # the limit is broken after each process's first result
        processes.add(pid)
        return 99.0 if len(kept) >= len(processes) else 0.0

    monkeypatch.setattr(run, "CHILD", CHILD)
    monkeypatch.setattr(run, "memory", memory)
    run.FLAGS(["run"])
    left = names
    while left:  # as main does: a process may be ended before it has said that it began with the next
        left = run.run(left, meshes, kept.append)
    found = [(result["case"], result["mesh"], result["ok"]) for result in kept]
    assert found == [(name, mesh, True) for name in names for mesh in meshes]
    assert len(processes) == len(kept)


@pytest.mark.parametrize(("softmax_dtype", "found"), [(None, False), ("float32", True)])
def test_a_model_of_float64_that_computes_in_float32_is_found(softmax_dtype, found, float64):
    def build():
        inputs = keras.Input((4,))
        positions = keras.ops.arange(4, dtype="float32")  # depends on no input and no weight
        x = keras.layers.Dense(4)(inputs) + keras.ops.cast(positions, "float64")
        return keras.Model(inputs, keras.layers.Softmax(dtype=softmax_dtype)(x))

    assert case.has_float32_inside(case.Case(build)) is found
