"""Where models are cut, how long a wait lasts, and what a timeline shows."""

from __future__ import annotations

import json
import time

import keras
import numpy as np
import pytest
from keras import layers

import tfpar
from tfpar import model_graph
from tfpar.pipeline import costs, partition, schedules, timeline, workers
from tfpar.pipeline.costs import Cost
from tfpar.pipeline.layer_graph import layer_graph
from tfpar.pipeline.schedules import FORWARD, Action


def residual(blocks: int = 4) -> keras.Model:
    """Inside a block two values cross, between blocks one."""
    inputs = keras.Input((16,))
    x = inputs
    for _ in range(blocks):
        x = x + layers.Dense(16)(layers.Dense(16, activation="relu")(x))
    return keras.Model(inputs, x)


def test_cuts_are_balanced_and_between_blocks():
    model = residual()
    graph = layer_graph(model)
    estimated = costs.estimate(model, graph, model_graph.input_specs(model))
    ends = partition.balanced(graph, estimated, 2)
    assert ends == [6, 12]
    first, second = partition.split(graph, ends)
    assert len(first.sends) == 1 and second.receives == first.sends
    assert second.sends == graph.outputs


def test_a_cut_has_the_least_longest_stage():
    """Against every way to cut."""
    graph = layer_graph(keras.Sequential([keras.Input((4,)), *(layers.Dense(4) for _ in range(7))]))
    work = np.random.RandomState(0).randint(1, 9, 7)
    ends = partition.balanced(graph, [Cost(float(w), 0, (4.0,)) for w in work], 3)
    longest = max(work[a:b].sum() for a, b in zip([0, *ends], ends))
    every = [max(work[:i].sum(), work[i:j].sum(), work[j:].sum()) for i in range(1, 6) for j in range(i + 1, 7)]
    assert longest <= partition.TOLERANCE * min(every)


def test_work_is_that_of_the_products():
    """2 m n k operations for a product; a wide layer costs as much as its width says."""
    model = keras.Sequential([keras.Input((64,)), layers.Dense(64, use_bias=False), layers.Dense(256, use_bias=False)])
    narrow, wide = costs.estimate(model, layer_graph(model), model_graph.input_specs(model))
    assert wide.work == pytest.approx(4 * narrow.work)
    assert narrow.parameters == 64 * 64 and wide.sent == (256,)


def test_a_value_passes_through_stages_that_do_not_use_it():
    inputs = keras.Input((4,))
    first = layers.Dense(4)(inputs)
    last = layers.Dense(4)(layers.Dense(4)(first)) + first
    graph = layer_graph(keras.Model(inputs, [last, first]))
    parts = partition.split(graph, [1, 2, 3, 4])
    number = graph.calls[0].outputs[0]
    assert all(number in part.receives for part in parts[1:])
    assert parts[-1].sends == graph.outputs and parts[0].inputs == graph.inputs


# Waits


def test_a_wait_has_an_end():
    team, mailbox = workers.Workers(2), workers.Mailbox(limit=0.3)
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="No stage has ended an action"):
        team.each(2, lambda device: mailbox.take("never") if device else None, mailbox)
    assert time.monotonic() - start < 5
    assert team.each(2, lambda device: device, workers.Mailbox()) == [0, 1]


def test_the_first_failure_ends_all_waits_and_is_raised():
    team, mailbox = workers.Workers(2), workers.Mailbox()

    def work(device):
        if device == 0:
            mailbox.take("never")
        raise KeyError("what happened")

    with pytest.raises(KeyError, match="what happened"):
        team.each(2, work, mailbox)


def test_a_schedule_for_fewer_micro_batches():
    whole = schedules.interleaved(devices=2, microbatches=4)
    part = schedules.restricted(whole, 3)
    assert {a.microbatch for actions in part.actions for a in actions} == {0, 1, 2}
    alone = schedules.restricted(whole, 1, forward_only=True)
    assert alone.actions == ((Action(FORWARD, 0, 0), Action(FORWARD, 2, 0)), (Action(FORWARD, 1, 0), Action(FORWARD, 3, 0)))


# Timeline


@pytest.fixture(scope="module")
def trained():
    """A model after two steps in two stages."""
    with tfpar.PipelineStrategy(stages=2, microbatches=3).scope():
        model = keras.Sequential([keras.Input((8,)), layers.Dense(8), layers.Dense(1)])
        model.compile("adam", "mse")
    model.fit(np.ones((6, 8)), np.ones((6, 1)), epochs=2, verbose=0)
    return model


def test_timeline(trained, tmp_path):
    shown = timeline(trained)
    assert len(shown.events) == 2 * 2 * 3
    assert 0 < shown.bubble < 1 and 0 < shown.simulated().bubble < 1
    for stage in (0, 1):
        own = [event for event in shown.events if event.device == stage]
        assert [event.action for event in own] == list(shown.schedule.actions[stage])
        assert all(a.end <= b.start for a, b in zip(own, own[1:]))
    shown.save(tmp_path / "step.json")
    trace = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert {event["name"] for event in trace if event["ph"] == "X"} == {str(event.action) for event in shown.events}
    shown.save(tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match=r"\.json or \.png"):
        shown.save(tmp_path / "step.txt")


def test_timeline_of_an_evaluation_and_of_a_model_without_stages(trained):
    trained.predict(np.ones((2, 8)), verbose=0)
    assert {event.action.kind for event in timeline(trained).events} == {FORWARD}
    with pytest.raises(ValueError, match="no step of the model"):
        timeline(keras.Sequential([keras.Input((8,)), layers.Dense(1)]))
