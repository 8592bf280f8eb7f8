"""One case: a model trains three steps on one device and on each mesh, and all weights and losses are compared."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import json
import re
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
import parity
import tensorflow as tf

import tfpar
from tfpar import model_graph

BATCH, STEPS = 4, 3
NUDGES = 3  # of which the largest difference is the noise: one may by chance meet nothing that grows
TOO_NOISY = 1e-4  # a comparison with more noise says nothing
SMALL_RATE = 1e-5  # for a model that would make one device's own rounding that large at the rate of the others
TOLERANCE = {"float64": 1e-8, "float32 inside": 1e-6, "float32": 1e-6}
NUDGE = {"float64": 1e-15, "float32 inside": 1e-7, "float32": 1e-7}  # a few units of rounding
MESHES = ("data=2,model=2", "model=4")
RATES = ("rate", "dropout", "recurrent_dropout", "drop_path_rate", "dropout_rate", "drop_rate", "stddev", "_dropout")


@dataclasses.dataclass
class Case:
    """How a model is made and what goes into it.

    Attributes:
        build: makes the model.
        inputs: (rows, ...) arrays for `fit`, or a function of the model that makes them; None: numbers, or ids below
            `ids`, for the model's inputs.
        ids: token ids are below this.
        rate: Adam's learning rate.
        precisions: what is tried, in this order, until one device can train.
    """

    build: Callable[[], keras.Model]
    inputs: Any = None
    ids: int = 8
    rate: float = 1e-3
    precisions: tuple[str, ...] = ("float64", "float32")


class NotComparable(Exception):
    """Why there is nothing to compare, in words."""


def columns(model: keras.Model) -> dict[str, tuple]:
    """Rules that split every matrix by its last dim and attention by its heads, which no thought-out layout does.

    Kernels of convolutions and recurrences, which TensorFlow refuses to split, stay whole.
    """
    rules = {}
    for v in model.trainable_variables:
        size = v.shape[-1] if len(v.shape) else 0
        recurrent = any(word in v.path for word in ("lstm", "gru", "rnn", "recurrent"))
        if len(v.shape) == 2 and size % 4 == 0 and not recurrent and not v.path.endswith("bias"):
            rules[re.escape(v.path)] = (None, "model")
        elif re.search(r"(query|key|value)/kernel$", v.path) and len(v.shape) == 3 and v.shape[1] % 4 == 0:
            rules[re.escape(v.path)] = (None, "model", None)
    return rules


def no_dropout(model: keras.Model) -> None:
    """Sets every rate of random layers to zero."""
    for layer in model._flatten_layers():
        for name in RATES:
            if name != "rate" or hasattr(layer, "seed_generator"):
                with contextlib.suppress(AttributeError):
                    if isinstance(getattr(layer, name, None), float):
                        setattr(layer, name, 0.0)


def mean_square(target: Any, output: Any) -> Any:
    """The loss of every output."""
    return keras.ops.mean(keras.ops.square(keras.ops.cast(output, target.dtype) - target))


def random_inputs(model: keras.Model, ids: int) -> Any:
    """Arrays of the batches' rows for each input of a functional model."""
    rng = np.random.RandomState(1)

    def array(tensor):
        shape = (BATCH * STEPS, *tensor.shape[1:])
        name = tensor.name
        if "mask" in name:
            return np.ones(shape, "int32" if "int" in tensor.dtype else tensor.dtype)
        if "segment" in name or "type_ids" in name:
            return rng.randint(0, 2, shape).astype("int32")
        if "int" in tensor.dtype:
            return rng.randint(1, ids, shape).astype("int32")
        return rng.uniform(0, 1, shape).astype(tensor.dtype)

    return keras.tree.map_structure(array, model.input)


def digests(arrays: Iterable[np.ndarray]) -> list[bytes]:
    """What tells equal arrays from others without keeping them, which large models have no memory for."""
    return [hashlib.sha256(np.ascontiguousarray(array)).digest() for array in arrays]


def train(
    case: Case, strategy: Any, order: np.ndarray, nudge: float = 0.0, seed: int = 0
) -> tuple[dict[str, np.ndarray], list[float], int]:
    """Weights and losses after three steps, and the number of split weights.

    `order` permutes the rows of each batch; `nudge` changes every weight by that part of it at the start, `seed` says how.
    """
    keras.utils.clear_session(free_memory=True)
    keras.utils.set_random_seed(0)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = case.build()
        no_dropout(model)
        model.compile(keras.optimizers.Adam(case.rate), mean_square, jit_compile=False)
    if not model.trainable_weights:
        raise NotComparable("no trainable weights")
    x = case.inputs(model) if callable(case.inputs) else case.inputs
    x = random_inputs(model, case.ids) if x is None else x
    rng = np.random.RandomState(2)
    outputs = keras.tree.map_structure(
        lambda t: rng.normal(size=(BATCH * STEPS, *(size or 1 for size in t.shape[1:]))).astype(keras.config.floatx()),
        model.output if hasattr(model, "output") else model.outputs[0],
    )
    x, outputs = keras.tree.map_structure(lambda value: value[order], (x, outputs))
    if strategy is None:
        apply = type(model.optimizer).apply

        def dense(grads, variables=None):  # see docs/numerics.md: a mesh has dense gradients of embeddings
            return apply(model.optimizer, [g if g is None else tf.convert_to_tensor(g) for g in grads], variables)

        model.optimizer.apply = dense
    if nudge:
        noise, start = np.random.RandomState(3 + seed), model.get_weights()
        model.set_weights([w if w.dtype.kind != "f" else w + w * nudge * noise.uniform(-1, 1, w.shape) for w in start])
    start = digests(v.numpy() for v in model.weights)
    with parity.as_written(strategy is None):
        history = model.fit(x, outputs, batch_size=BATCH, epochs=1, shuffle=False, verbose=0)
    weights = {f"{i} {v.path}": v.numpy() for i, v in enumerate(model.weights)}
    if digests(weights.values()) == start:
        raise NotComparable("no weight changed in training")
    table = strategy.describe(model) if strategy else []
    split = sum(row.kind == "weight" and any(row.layout or ()) for row in table)
    return weights, [value for values in history.history.values() for value in values], split


def difference(one: tuple, other: tuple) -> tuple[float, str]:
    """The largest difference of a weight or a loss, relative to a loss above 1, and where."""
    losses = np.abs(np.subtract(one[1], other[1])) / np.maximum(1.0, np.abs(one[1]))
    found = {"loss": float(np.max(losses))}
    for (name, a), b in zip(one[0].items(), other[0].values()):
        if a.size and a.dtype.kind in "fiub":
            found[name.split(" ", 1)[1]] = float(np.max(np.abs(a.astype("float64") - b.astype("float64"))))
    return max(((e if np.isfinite(e) else np.inf, name) for name, e in found.items()), default=(0.0, ""))


def reason(error: BaseException) -> str:
    """An error in one line."""
    text = str(error)
    said = re.search(r"\berror: (.+)", text) or re.search(r"(.*(?:op does not implement|INVALID_ARGUMENT: ).*)", text)
    said = said[1] if said else next((line for line in text.splitlines() if line.strip()), "")
    operation = re.search(r'current operation: .*?"(tf\.\w+)"', text)
    operation = f"{operation[1]}: " if operation else ""
    return f"{type(error).__name__}: {operation}{said.strip()}"[:300]


def compare(case: Case, meshes: tuple[str, ...] = MESHES, layouts: str = "default") -> Any:
    """Yields a result per mesh: dict(mesh, ok, error, where, floor, seconds, cause).

    `layouts` is "default", those of a strategy that is told none, or "columns".
    """
    chosen = {} if layouts == "default" else {"layouts": columns}
    rows = np.arange(BATCH * STEPS)
    reversed_rows = rows.reshape(STEPS, BATCH)[:, ::-1].reshape(-1)
    # a model that draws a number per row, or mixes rows, is another one with its rows reversed
    start, noises = time.time(), ((reversed_rows, []), (rows, []))
    try:
        one, precision = on_one_device(case, rows)
    except Exception as error:
        cause = str(error) if isinstance(error, NotComparable) else f"one device: {reason(error)}"
        yield from ({"mesh": mesh, "ok": None, "cause": cause} for mesh in meshes)
        return
    spent = time.time() - start
    for mesh in meshes:
        start = time.time()
        try:
            many = train(case, tfpar.HybridStrategy(mesh, **chosen), rows)
            error, where = difference(one, many)
            if precision == "float64" and error > TOLERANCE[precision] and has_float32_inside(case):
                precision = "float32 inside"
            result = {"mesh": mesh, "ok": error <= TOLERANCE[precision], "error": error}
            result |= {"split": many[2], "weights": len(many[0])}
            if not result["ok"]:
                for order, noise in noises:
                    while error > 10 * max(noise, default=0.0) and len(noise) < NUDGES:
                        nudged = train(case, None, order, NUDGE[precision], seed=len(noise))
                        noise.append(difference(one, nudged)[0])
                    floor = max(noise)
                    if floor <= TOO_NOISY:
                        break
                result |= {"floor": floor, "ok": error <= 10 * floor, "where": where}
                if floor > TOO_NOISY:
                    result |= {"ok": None, "cause": f"one device's own noise is {floor:.0e}"}
                elif not result["ok"]:
                    result["cause"] = f"wrong numbers: {where} is {error:.1e} off"
        except Exception as error:
            result = {"mesh": mesh, "ok": False, "cause": reason(error), "trace": traceback.format_exc()[-6000:]}
        gc.collect()
        seconds = {"seconds": round(time.time() - start, 1), "one_device_seconds": round(spent, 1)}
        yield result | seconds | {"precision": precision}


def on_one_device(case: Case, rows: np.ndarray) -> tuple[tuple, str]:
    """What one device gives in the first precision in which it does not fail; and which of them it was."""
    for precision in case.precisions:
        keras.config.set_floatx(precision)
        keras.config.set_dtype_policy(precision)
        try:
            one = train(case, None, rows)
        except NotComparable:
            raise
        except Exception:
            if precision == case.precisions[-1]:
                raise
            continue
        if not all(np.isfinite(w).all() for w in one[0].values() if w.dtype.kind == "f") or not np.isfinite(one[1]).all():
            raise NotComparable("not finite on one device")
        break
    return one, precision


def has_float32_inside(case: Case) -> bool:
    """Whether a model in float64 casts its values to float32 on their way, as many of KerasHub do for a softmax or norm."""
    keras.utils.clear_session(free_memory=True)
    model = case.build()
    graph = model_graph.trace(model, model.input)
    values = set()  # the names of tensors that depend on an input or a weight of floating dtype
    for operation in graph.operations:
        if operation.type == "Placeholder" or any(tensor.name in values for tensor in operation.inputs):
            values |= {tensor.name for tensor in operation.outputs if tensor.dtype.is_floating}
            if any(tensor.dtype == tf.float32 and operation.inputs for tensor in operation.outputs):
                return True
    return False


def main(names: list[str], meshes: list[str], layouts: str) -> None:
    """Runs cases of one process and prints a line per start and per result, which run.py reads."""
    from model_coverage.run import case_of

    tfpar.use_logical_cpus(4)
    for name in names:
        print(json.dumps({"case": name}), flush=True)
        try:
            case = case_of(name)
        except NotComparable as error:
            case = None
            for mesh in meshes:
                print(json.dumps({"case": name, "mesh": mesh, "ok": None, "cause": str(error)}), flush=True)
        if case is not None:
            for result in compare(case, meshes, layouts):
                print(json.dumps({"case": name} | result), flush=True)
                if "trace" in result:  # what an error broke off can break off what follows: run.py starts another process
                    return
