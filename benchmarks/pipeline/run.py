"""A GPT in pipeline stages next to one device: step time, and the bubble measured and simulated.

    python benchmarks/pipeline/run.py --rounds=8

All cases train the GPT of `tfpar.models.gpt` on batches of 16 × 128 tokens in 4 micro-batches, and take turns, round by
round, because the clock of a shared machine swings: compare ratios of one run, not times of two. PyTorch's
`torch.distributed.pipelining` runs in processes of its own (`torch_worker.py`), which wait while the others run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

import tfpar
from tfpar.models.gpt import gpt

CASES = {  # name: mesh and options
    "1f1b": ("pipe=2", {"schedule": "1f1b"}),
    "1f1b-model": ("pipe=2,model=2", {"schedule": "1f1b"}),
    "gpipe": ("pipe=2", {"schedule": "gpipe"}),
    "zb-h1": ("pipe=2", {"schedule": "zb-h1"}),
    "interleaved": ("pipe=2", {"schedule": "interleaved"}),
    "recompute": ("pipe=2", {"schedule": "1f1b", "recompute": "stage"}),
}
FLAGS = flags.FLAGS
flags.DEFINE_list("cases", list(CASES), "Which cases to run beside one device.")
flags.DEFINE_integer("rounds", 8, "Rounds; each times every case once.", lower_bound=1)
flags.DEFINE_integer("steps", 3, "Steps of a case in a round.", lower_bound=1)
flags.DEFINE_integer("microbatches", 4, "Parts of a batch.", lower_bound=1)
flags.DEFINE_string("timeline", None, "Where to save the last step of the first case, as .png or .json.")
flags.DEFINE_string("torch", sys.executable if importlib.util.find_spec("torch") else None, "A Python that has PyTorch.")


def batch() -> tuple[np.ndarray, np.ndarray]:
    """Token ids and those that follow."""
    ids = np.random.RandomState(0).randint(0, 512, (16, 128)).astype("int32")
    return ids, np.roll(ids, -1, 1)


def tensorflow_case(strategy: tf.distribute.Strategy | None, parts: int = 1) -> tuple[Callable[[int], float], keras.Model]:
    """A function that trains a number of steps and returns the seconds of one, and the model.

    Args:
        strategy: None for one device.
        parts: on one device, the micro-batches of a step, whose gradients Keras adds up: the work of a pipeline.
    """
    keras.utils.set_random_seed(0)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = gpt()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        adds_up = parts if parts > 1 else None
        model.compile(keras.optimizers.Adam(1e-3, gradient_accumulation_steps=adds_up), loss, jit_compile=False)
    dataset = tf.data.Dataset.from_tensor_slices(batch()).batch(16 // parts).repeat()

    def seconds(steps: int) -> float:
        start = time.perf_counter()
        model.fit(dataset, steps_per_epoch=steps * parts, verbose=0, shuffle=False)
        return (time.perf_counter() - start) / steps

    start = time.perf_counter()
    seconds(1)
    print(f"  first step {time.perf_counter() - start:.1f} s")
    return seconds, model


def main(argv: list[str]) -> None:
    """Prints one line per case."""
    del argv
    tfpar.use_logical_cpus(4)
    cases, models, workers = {}, {}, {}
    print("one device")
    cases["one device"], _ = tensorflow_case(None)
    cases["one device in parts"], _ = tensorflow_case(None, FLAGS.microbatches)
    for name in FLAGS.cases:
        print(name)
        mesh, options = CASES[name]
        strategy = tfpar.HybridStrategy(mesh, microbatches=FLAGS.microbatches, **options)
        cases[name], models[name] = tensorflow_case(strategy)
    if FLAGS.torch:
        from torch_worker import TorchCase

        workers = {name: TorchCase(FLAGS.torch, *sizes) for name, sizes in TORCH.items()}
        cases |= {name: worker.seconds for name, worker in workers.items()}
    times = {name: [] for name in cases}
    for _ in range(FLAGS.rounds):
        for name, seconds in cases.items():
            times[name].append(seconds(FLAGS.steps))
    base, parts = times["one device"], times["one device in parts"]
    print(f"{platform.machine()}, {os.cpu_count()} cores, TensorFlow {tf.__version__}, Keras {keras.__version__}")
    print(f"{FLAGS.rounds} rounds of {FLAGS.steps} steps, {FLAGS.microbatches} micro-batches")
    print(f"{'case':22} {'median ms':>10} {'least ms':>9} {'ratio':>6} {'in parts':>9}  bubble: measured, simulated")
    for name, found in times.items():
        ratio, to_parts = (statistics.median(a / b for a, b in zip(found, other)) for other in (base, parts))
        bubble = ""
        if name in models:
            shown = tfpar.pipeline.timeline(models[name])
            bubble = f"{shown.bubble:.2f}, {shown.simulated().bubble:.2f}"
        print(
            f"{name:22} {statistics.median(found) * 1e3:10.0f} {min(found) * 1e3:9.0f} {ratio:6.2f} {to_parts:9.2f}"
            f"  {bubble}"
        )
    for worker in workers.values():
        worker.close()
    if FLAGS.timeline:
        tfpar.pipeline.timeline(models[FLAGS.cases[0]]).save(FLAGS.timeline)


TORCH = {  # stages, micro-batches, port
    "PyTorch": (1, 1, 29501),
    "PyTorch in parts": (1, 4, 29502),
    "PyTorch 1f1b": (2, 4, 29503),
}

if __name__ == "__main__":
    app.run(main)
