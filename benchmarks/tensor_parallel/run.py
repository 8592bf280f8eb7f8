"""Automatic layouts next to hand-written Megatron-LM rules and to Keras on JAX: step time and bytes per device.

    python benchmarks/tensor_parallel/run.py --mesh=data=2,model=2 --rounds=10

All cases train the GPT of `tfpar.models.gpt` and take turns, round by round, because the clock of a shared machine swings:
compare ratios of one run, not times of two. Keras on JAX runs in a process of its own (`jax_worker.py`), which waits while
the others run.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

import tfpar
from tfpar.models.gpt import gpt

RULES = {  # Megatron-LM (arXiv 1909.08053): two all-reduces per block and direction; vocabulary and head are whole
    r".*(query|key|value)/kernel": (None, "model", None),
    r".*(query|key|value)/bias": ("model", None),
    r".*attention_output/kernel": ("model", None, None),
    r".*up/kernel": (None, "model"),
    r".*up/bias": ("model",),
    r".*down/kernel": ("model", None),
}
FLAGS = flags.FLAGS
flags.DEFINE_string("mesh", "data=2,model=2", "Axes and sizes.")
flags.DEFINE_integer("rounds", 10, "Rounds; each times every case once.", lower_bound=1)
flags.DEFINE_integer("steps", 4, "Steps of a case in a round.", lower_bound=1)
flags.DEFINE_bool("jax", importlib.util.find_spec("jax") is not None, "Whether to run Keras on JAX too.")


def batch() -> tuple[np.ndarray, np.ndarray]:
    """Token ids and those that follow."""
    ids = np.random.RandomState(0).randint(0, 512, (16, 128)).astype("int32")
    return ids, np.roll(ids, -1, 1)


def tensorflow_case(strategy: tf.distribute.Strategy | None) -> tuple[Callable[[int], float], keras.Model]:
    """A function that trains a number of steps and returns the seconds of one, and the model."""
    keras.utils.set_random_seed(0)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = gpt()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(1e-3), loss, jit_compile=False)
    dataset = tf.data.Dataset.from_tensors(batch()).repeat()

    def seconds(steps: int) -> float:
        start = time.perf_counter()
        model.fit(dataset, steps_per_epoch=steps, verbose=0, shuffle=False)
        return (time.perf_counter() - start) / steps

    seconds(1)
    return seconds, model


class JaxCase:
    """Keras on JAX in a process of its own, on one device (`mesh` None) or with `RULES`."""

    def __init__(self, mesh: str | None):
        worker = Path(__file__).with_name("jax_worker.py")
        environment = os.environ | {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
        self._process = subprocess.Popen(
            [sys.executable, str(worker), json.dumps({"mesh": mesh and tfpar.Mesh(mesh).axes, "rules": RULES})],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self(1)

    def __call__(self, steps: int) -> float:
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"The process of Keras on JAX ended with the exit code {self._process.wait()}.")
        return float(line)

    def close(self) -> None:
        """Ends the process."""
        self._process.stdin.close()
        self._process.wait(timeout=60)


def measure(cases: dict[str, Callable[[int], float]], base: dict[str, str], rounds: int, steps: int) -> None:
    """Prints, for each case, its step time and its ratio to the case that is its base."""
    seconds: dict[str, list[float]] = {case: [] for case in cases}
    for _ in range(rounds):
        for case, run in cases.items():
            seconds[case].append(run(steps))
    print(f"{'case':26}{'min ms':>8}{'median':>8}{'min ratio':>11}{'median of ratios':>18}  to")
    for case in cases:
        ratio = statistics.median(a / b for a, b in zip(seconds[case], seconds[base[case]]))
        print(
            f"{case:26}{min(seconds[case]) * 1e3:8.0f}{statistics.median(seconds[case]) * 1e3:8.0f}"
            f"{min(seconds[case]) / min(seconds[base[case]]):11.2f}{ratio:18.2f}  {base[case]}"
        )


def print_bytes(name: str, strategy: tfpar.HybridStrategy, model: keras.Model) -> None:
    """How much of the weights and slots each device holds, and what a step sends."""
    table = strategy.describe(model)
    split = [row for row in table if "model" in row.layout]
    whole, held = sum(row.bytes for row in split), sum(row.device_bytes for row in split)
    sent = ", ".join(str(line) for line in str(table).splitlines() if line.startswith("A training step"))
    print(
        f"{name}: {len(split)} of {len(table.rows)} variables and slots are split, {whole / table.bytes:.0%} of the bytes; "
        f"a device holds {held / whole:.4f} of them, 1/N is {1 / strategy.mesh.axes['model']:.4f}. {sent}"
    )


def main(_) -> None:
    tfpar.use_logical_cpus(tfpar.Mesh(FLAGS.mesh).size)
    packages = ("tensorflow", "keras", "numpy", *(("jax",) if FLAGS.jax else ()))
    versions = {name: importlib.metadata.version(name) for name in packages}
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {versions}")
    by_hand, auto = tfpar.HybridStrategy(FLAGS.mesh, layouts=tfpar.LayoutMap(RULES)), tfpar.HybridStrategy(FLAGS.mesh)
    models = {"one device": tensorflow_case(None), "rules": tensorflow_case(by_hand), "auto": tensorflow_case(auto)}
    cases: dict[str, Callable[[int], float]] = {name: run for name, (run, _) in models.items()}
    base = {"one device": "one device", "rules": "one device", "auto": "rules"}
    workers = {"JAX, one device": JaxCase(None), "JAX, rules": JaxCase(FLAGS.mesh)} if FLAGS.jax else {}
    base |= dict.fromkeys(workers, "JAX, one device")
    measure(cases | workers, base, FLAGS.rounds, FLAGS.steps)
    print_bytes("rules", by_hand, models["rules"][1])
    print_bytes("auto", auto, models["auto"][1])
    for worker in workers.values():
        worker.close()


if __name__ == "__main__":
    app.run(main)
