"""Trains the GPT with Keras on JAX: reads numbers of steps from standard input, answers the seconds of one step.

Started by `run.py`, with the mesh and the layout rules as JSON.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys
import time
from pathlib import Path

os.environ["XLA_FLAGS"] = (  # read when JAX starts
    f"--xla_force_host_platform_device_count={math.prod((json.loads(sys.argv[1])['mesh'] or {}).values())}"
)

import keras
import numpy as np

SPEC = json.loads(sys.argv[1])


def gpt() -> keras.Model:
    """The model of tfpar/models/gpt.py, read as a file: importing tfpar needs Keras on TensorFlow."""
    file = Path(__file__).parents[2] / "models" / "gpt.py"
    spec = importlib.util.spec_from_file_location("gpt", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.gpt()


def main() -> None:
    if SPEC["mesh"]:
        names, sizes = list(SPEC["mesh"]), tuple(SPEC["mesh"].values())
        mesh = keras.distribution.DeviceMesh(sizes, names, keras.distribution.list_devices())
        layouts = keras.distribution.LayoutMap(mesh)
        for pattern, axes in SPEC["rules"].items():
            layouts[pattern] = tuple(axes)
        batch_axis = "data" if "data" in names else None
        keras.distribution.set_distribution(keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name=batch_axis))
    keras.utils.set_random_seed(0)
    model = gpt()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss)
    ids = np.random.RandomState(0).randint(0, 512, (16, 128)).astype("int32")
    targets = np.roll(ids, -1, 1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what else is printed is no answer
    for line in sys.stdin:
        steps = int(line)
        x, y = np.tile(ids, (steps, 1)), np.tile(targets, (steps, 1))
        start = time.perf_counter()
        model.fit(x, y, batch_size=16, verbose=0, shuffle=False)
        answers.write(f"{(time.perf_counter() - start) / steps}\n")
        answers.flush()


if __name__ == "__main__":
    main()
