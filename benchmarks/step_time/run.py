"""How long is a training step on a mesh, next to one device and to `tf.distribute.MirroredStrategy`?

    python benchmarks/step_time/run.py --rounds=12 --cases=data=4 --cases=data=2,model=2

All cases train the GPT of `tfpar.models.gpt` in one process and take turns, round by round, because the clock of a shared
machine swings: compare ratios of one run, not times of two. Each round times a few `fit` steps of each case.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import statistics
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

import tfpar
from tfpar.models.gpt import gpt
from tfpar.models.gpt_layouts import tensor_parallel

DEVICES = 4
FLAGS = flags.FLAGS
flags.DEFINE_multi_string("cases", ["data=4", "data=2,model=2", "model=4", "mirrored"], "Meshes, or 'mirrored'.")
flags.DEFINE_integer("rounds", 10, "Rounds; each times every case once.", lower_bound=1)
flags.DEFINE_integer("steps", 4, "Steps of a case in a round.", lower_bound=1)


def strategy_for(case: str) -> tf.distribute.Strategy | None:
    """The strategy of a case; None is one device."""
    if case == "one device":
        return None
    if case == "mirrored":
        return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(DEVICES)])
    return tfpar.HybridStrategy(case, layouts=tensor_parallel() if "model" in case else None)


def prepare(case: str) -> tuple[keras.Model, tf.data.Dataset, float]:
    """A compiled GPT, its data, and the seconds of its first step (trace, compile and run)."""
    keras.utils.set_random_seed(0)
    strategy = strategy_for(case)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = gpt()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(1e-3), loss, jit_compile=False)
    ids = np.random.RandomState(0).randint(0, 512, (16, 128)).astype("int32")
    dataset = tf.data.Dataset.from_tensors((ids, np.roll(ids, -1, 1))).repeat()
    start = time.perf_counter()
    model.fit(dataset, steps_per_epoch=1, verbose=0, shuffle=False)
    return model, dataset, time.perf_counter() - start


def measure(cases: list[str], rounds: int, steps: int) -> None:
    """Prints a table of step times and ratios."""
    prepared = {case: prepare(case) for case in cases}
    seconds: dict[str, list[float]] = {case: [] for case in cases}
    for _ in range(rounds):
        for case, (model, dataset, _) in prepared.items():
            start = time.perf_counter()
            model.fit(dataset, steps_per_epoch=steps, verbose=0, shuffle=False)
            seconds[case].append((time.perf_counter() - start) / steps)
    one, first_one = seconds["one device"], prepared["one device"][2]
    print(f"{'case':18}{'min ms':>8}{'median':>8}{'min ratio':>11}{'median of ratios':>18}{'first step s':>14}{'ratio':>7}")
    for case in cases:
        ratio = statistics.median(a / b for a, b in zip(seconds[case], one))
        first = prepared[case][2]
        print(
            f"{case:18}{min(seconds[case]) * 1e3:8.0f}{statistics.median(seconds[case]) * 1e3:8.0f}"
            f"{min(seconds[case]) / min(one):11.2f}{ratio:18.2f}{first:14.1f}{first / first_one:7.2f}"
        )


def main(_) -> None:
    tfpar.use_logical_cpus(DEVICES)
    versions = {name: importlib.metadata.version(name) for name in ("tensorflow", "keras", "numpy")}
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {versions}")
    measure(["one device", *FLAGS.cases], FLAGS.rounds, FLAGS.steps)


if __name__ == "__main__":
    app.run(main)
