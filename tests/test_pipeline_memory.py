"""What a stage keeps from forward to backward: as many micro-batches as the schedule says, and bytes freed in time."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers

import tfpar
from tfpar.pipeline import simulation


def trained(schedule: str, microbatches: int = 4, **options):
    """The strategy and the model after two steps of one shape; the second ran on threads."""
    strategy = tfpar.HybridStrategy("pipe=2", microbatches=microbatches, schedule=schedule, **options)
    with strategy.scope():
        inner = [layers.Dense(64, activation="tanh") for _ in range(3)]
        model = keras.Sequential([keras.Input((64,)), *inner, layers.Dense(64)])
        model.compile("adam", "mse")
    x = np.ones((8 * microbatches, 64), "float32")
    model.fit(x, x, batch_size=len(x), epochs=2, verbose=0)
    return strategy, model


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_live_bytes_are_those_of_the_schedule(schedule):
    """One micro-batch alone shows what one keeps; the schedule says how many are kept at once."""
    strategy, model = trained(schedule)
    one = trained(schedule, microbatches=1)
    alone = one[0].trainer.last[one[1]].memory.peaks
    peaks = strategy.trainer.last[model].memory.peaks
    bound = simulation.simulate(strategy.trainer.pipeline.schedule).live_activations
    assert all(size > 0 for size in alone)
    kept = [peak / size for peak, size in zip(peaks, alone)]
    if schedule == "zb-h1":  # the first part of a backward frees what the second does not need
        assert all(1 < number <= limit for number, limit in zip(kept, bound))
    else:
        assert kept == pytest.approx(bound)


def test_recomputation_keeps_no_activations():
    strategy, model = trained("gpipe", recompute="stage")
    assert max(strategy.trainer.last[model].memory.peaks) == 0


def test_nothing_is_held_after_a_step():
    strategy, model = trained("1f1b")
    assert strategy.trainer.last[model].memory.held == [0, 0]
