"""The demo: a small GPT learns English on a mesh, then the same training runs on one device.

    python -m tfpar.demo --mesh=data=2,model=2 --steps=300

The text is the help pages inside every CPython, so nothing is downloaded. All numbers repeat with the same `--seed`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from pydoc_data.topics import topics

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags, logging

import tfpar
from tfpar.models.gpt import gpt
from tfpar.models.gpt_layouts import tensor_parallel

FLAGS = flags.FLAGS
flags.DEFINE_string("mesh", "data=2,model=2", "Axes of the mesh and their sizes.")
flags.DEFINE_enum("device_type", "CPU", ["CPU", "GPU", "TPU"], "Devices of the mesh. GPU and TPU: not yet run.")
flags.DEFINE_integer("steps", 300, "Training steps.", lower_bound=1)
flags.DEFINE_integer("batch", 16, "Sequences per step.", lower_bound=1)
flags.DEFINE_integer("length", 64, "Characters per sequence.", lower_bound=2, upper_bound=4096)
flags.DEFINE_integer("width", 128, "Features per character.", lower_bound=1)
flags.DEFINE_integer("depth", 2, "Blocks.", lower_bound=1)
flags.DEFINE_integer("heads", 4, "Attention heads per block; they must divide the width.", lower_bound=1)
flags.DEFINE_integer("microbatches", 4, "Parts of a batch, for a mesh with the axis pipe.", lower_bound=1)
flags.DEFINE_enum("schedule", "1f1b", ["gpipe", "1f1b", "interleaved", "zb-h1"], "Order of stages, for the axis pipe.")
flags.DEFINE_float("learning_rate", 2e-3, "Adam's.", lower_bound=0.0)
flags.DEFINE_integer("seed", 0, "Of weights, data and sampling.", lower_bound=0)
flags.DEFINE_bool("compare", True, "Train the same on one device afterwards.")
flags.DEFINE_integer("sample_length", 300, "Characters to sample from the trained model.", lower_bound=0)


@dataclasses.dataclass(frozen=True)
class Data:
    """Sequences of character ids, the next characters as targets.

    Attributes:
        vocabulary: the character of each id.
        train: inputs and targets, int32 of shape (steps * batch, length).
        held_out: the same from text that is not trained on.
    """

    vocabulary: list[str]
    train: tuple[np.ndarray, np.ndarray]
    held_out: tuple[np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Result:
    """What a training gave.

    Attributes:
        before: loss per character on the held-out text before the first step.
        after: the same after the last step.
        speed: trained tokens (characters) per second, the first step (tracing) left out; None with a single step.
    """

    before: float
    after: float
    speed: float | None


class DenseAdam(keras.optimizers.Adam):
    """Adam that first sums an embedding's gradients per character, as a mesh does; Keras' sparse path does not."""

    def apply(self, grads, trainable_variables=None):
        """Applies dense gradients."""
        return super().apply([tf.convert_to_tensor(gradient) for gradient in grads], trainable_variables)


class Stopwatch(keras.callbacks.Callback):
    """Measures steps per second, without the first step, which is traced."""

    def on_train_begin(self, logs=None):
        """Forgets earlier steps."""
        self.ends: list[float] = []

    def on_train_batch_end(self, batch, logs=None):
        """Notes the end of a step."""
        self.ends.append(time.perf_counter())

    def steps_per_second(self) -> float | None:
        """The mean over all steps but the first."""
        return (len(self.ends) - 1) / (self.ends[-1] - self.ends[0]) if len(self.ends) > 1 else None


def encode(text: str) -> tuple[np.ndarray, list[str]]:
    """Numbers the characters of a text; returns the ids and the character of each id."""
    vocabulary = sorted(set(text))
    numbers = {character: number for number, character in enumerate(vocabulary)}
    return np.array([numbers[character] for character in text], "int32"), vocabulary


def windows(ids: np.ndarray, count: int, length: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Random stretches of a text: ids and, for each, the id that follows."""
    starts = rng.integers(0, len(ids) - length, count)
    rows = ids[starts[:, None] + np.arange(length + 1)]
    return rows[:, :-1], rows[:, 1:]


def round_up(number: int, multiple: int) -> int:
    """The next multiple, so that an axis divides it; the ids above the vocabulary are never a target."""
    return -(-number // multiple) * multiple


def load(text: str, *, steps: int, batch: int, length: int, seed: int) -> Data:
    """Sequences from the first nine tenths of a text for training, and 4 batches from the rest."""
    ids, vocabulary = encode(text)
    cut = len(ids) * 9 // 10
    train = windows(ids[:cut], steps * batch, length, np.random.default_rng(seed))
    return Data(vocabulary, train, windows(ids[cut:], 4 * batch, length, np.random.default_rng(seed)))


def build(strategy: tfpar.HybridStrategy | None, sizes: dict[str, int], learning_rate: float, seed: int) -> keras.Model:
    """The compiled model, on the strategy's mesh or, without one, on one device."""
    keras.utils.set_random_seed(seed)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = gpt(**sizes)
        model.compile(DenseAdam(learning_rate), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def train(model: keras.Model, data: Data, batch: int) -> Result:
    """Fits the model once over the training sequences, in their order."""
    stopwatch = Stopwatch()
    before = model.evaluate(*data.held_out, batch_size=batch, verbose=0)
    model.fit(*data.train, batch_size=batch, shuffle=False, callbacks=[stopwatch])
    after = model.evaluate(*data.held_out, batch_size=batch, verbose=0)
    rate = stopwatch.steps_per_second()
    return Result(before, after, rate and rate * batch * data.train[0].shape[1])


def sample(
    model: keras.Model, vocabulary: list[str], length: int, *, start: str, seed: int, temperature: float = 0.5
) -> str:
    """Continues a text by `length` characters, each drawn from the model's softmax at a temperature."""
    rng, window = np.random.default_rng(seed), model.input_shape[1]
    ids = [vocabulary.index(character) for character in start]
    for _ in range(length):
        seen = ids[-window:]
        row = np.zeros((1, window), "int32")
        row[0, : len(seen)] = seen  # attention is causal, so what stands behind the text does not matter
        logits = model.predict_on_batch(row)[0, len(seen) - 1, : len(vocabulary)].astype("float64") / temperature
        chances = np.exp(logits - logits.max())
        ids.append(rng.choice(len(vocabulary), p=chances / chances.sum()))
    return "".join(vocabulary[i] for i in ids)


def comparison(mesh: str, on_mesh: Result, on_one: Result, apart: float) -> str:
    """A table of both trainings' losses and differences; `apart` is that of the predicted probabilities."""
    rows = [
        (f"loss on the mesh {mesh}", f"{on_mesh.after:.6f}"),
        ("loss on one device", f"{on_one.after:.6f}"),
        ("difference of the losses", f"{abs(on_mesh.after - on_one.after):.1e}"),
        ("largest difference of a predicted probability", f"{apart:.1e}"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def largest_difference(model: keras.Model, other: keras.Model, data: Data, batch: int) -> float:
    """How far any two predicted probabilities of two models are apart on the held-out text, at most."""
    ids, _ = data.held_out
    one, two = (tf.nn.softmax(m.predict(ids, batch_size=batch, verbose=0)) for m in (model, other))
    return float(tf.reduce_max(tf.abs(one - two)))


def speed(result: Result) -> str:
    """A result's speed as text."""
    if result.speed is None:
        return "Speed: not measured with one step."
    return f"Speed: {result.speed:,.0f} tokens per second, the first step left out."


def python() -> str:
    """How a user here starts the interpreter that runs this."""
    path = os.path.relpath(sys.executable)
    return "python" if path.startswith(os.pardir) else path


def main(argv: list[str]) -> None:
    """Runs the demo."""
    logging.set_verbosity(logging.WARNING)
    if argv[1:]:
        sys.exit(f"demo: got {argv[1]!r}; every setting is a flag, such as --steps=200.")
    data = load("\n".join(topics.values()), steps=FLAGS.steps, batch=FLAGS.batch, length=FLAGS.length, seed=FLAGS.seed)
    sizes = {name: FLAGS[name].value for name in ("length", "width", "depth", "heads")}
    try:
        mesh = tfpar.Mesh(FLAGS.mesh, device_type=FLAGS.device_type)
        sizes["vocabulary"] = round_up(len(data.vocabulary), mesh.axes.get("model", 1))
        stages = {name: FLAGS[name].value for name in ("microbatches", "schedule")} if "pipe" in mesh.axes else {}
        strategy = tfpar.HybridStrategy(mesh, layouts=tensor_parallel() if "model" in mesh.axes else None, **stages)
        model = build(strategy, sizes, FLAGS.learning_rate, FLAGS.seed)
    except ValueError as error:
        sys.exit(f"demo: {error}")

    print(f"Mesh {mesh}: {mesh.size} {mesh.device_type} devices.\n")
    print(strategy.describe(model))
    print(f"\nTraining on the mesh, on Python's help pages ({FLAGS.batch} × {FLAGS.length} characters per step):")
    on_mesh = train(model, data, FLAGS.batch)
    print(f"Loss per character on text kept back: {on_mesh.before:.3f} before, {on_mesh.after:.3f} after.")
    print(speed(on_mesh))
    if FLAGS.sample_length:
        print("\nThe trained model continues 'The ':\n")
        print(sample(model, data.vocabulary, FLAGS.sample_length, start="The ", seed=FLAGS.seed))

    if FLAGS.compare:
        print("\nThe same model, data and seed on one device:")
        with tf.device(f"{mesh.device_type}:0"):
            single = build(None, sizes, FLAGS.learning_rate, FLAGS.seed)
            on_one = train(single, data, FLAGS.batch)
        print(f"{speed(on_one)}\n\nAfter training, on text kept back:")
        print(comparison(str(mesh), on_mesh, on_one, largest_difference(model, single, data, FLAGS.batch)))
        if mesh.device_type == "CPU":
            print("CPU devices of a mesh share this machine's cores: they show that the numbers agree, not a speed-up.")
    print(f"\nTry another mesh: {python()} -m tfpar.demo --mesh=data=4 --steps=200")


if __name__ == "__main__":
    app.run(main)
