"""Parameter servers on one machine: rows per second, bytes per step, and how evenly servers are filled.

    python benchmarks/parameter_server/run.py --questions=speed --cases=async-1-1 --rounds=12

Each coordinator is a process of its own, because a process connects to one cluster. A case takes turns with one device,
round by round, because the clock of a shared machine swings: compare ratios of one run, not times of two.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from absl import app, flags

BATCH, SMALL = 1024, 8  # rows of a step; a step of 8 rows is little more than its fixed cost
USERS, ITEMS, WIDTH, DENSE = 50_000, 20_000, 32, (512, 256, 128)
IDS, TABLE_WIDTH, TABLE_BATCH = 4, 16, 256
FLAGS = flags.FLAGS
flags.DEFINE_list("questions", ["speed", "bytes", "balance"], "Which to answer.")
flags.DEFINE_list(
    "cases",
    ["async-1-1", "async-1-2", "async-2-1", "async-2-2", "sync-2-1", "sync-2-2"],
    "For speed: mode, workers and servers.",
)
flags.DEFINE_integer("rounds", 6, "For speed: rounds; each times one device and the case once.", lower_bound=1)
flags.DEFINE_integer("steps", 10, "Steps in a round.", lower_bound=1)
flags.DEFINE_list("tables", ["1000", "10000", "100000", "1000000"], "For bytes: rows of the table.")
flags.DEFINE_list("optimizers", ["SGD", "Adagrad", "Adam"], "For bytes: optimizers.")
flags.DEFINE_string("coordinate", None, "What this process coordinates; the benchmark starts such processes.")


class Coordinator:
    """A process that trains what it is told.

    Args:
        what: a case, "one device", "bytes" or "balance-N".
        *arguments: more flags.
    """

    def __init__(self, what: str, *arguments: str):
        command = [sys.executable, __file__, f"--coordinate={what}", *arguments]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)

    def ask(self, *request: int) -> dict:
        """Sends numbers, waits for the answer."""
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        while line := self._process.stdout.readline():
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"{self._process.args} ended with {self._process.wait()}; run it by hand to see why.")

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()


# The processes that train.


def recommender():
    """Two embeddings and an MLP: 2.2 million numbers in embeddings, 0.2 million in dense layers, Adagrad."""
    import keras

    keras.utils.set_random_seed(0)
    user, item = keras.Input((), dtype="int32"), keras.Input((), dtype="int32")
    x = [keras.layers.Embedding(USERS, WIDTH)(user), keras.layers.Embedding(ITEMS, WIDTH)(item)]
    x = keras.layers.Concatenate()(x)
    for width in DENSE:
        x = keras.layers.Dense(width, "relu")(x)
    model = keras.Model([user, item], keras.layers.Dense(1)(x))
    model.compile(keras.optimizers.Adagrad(0.01), keras.losses.BinaryCrossentropy(from_logits=True), jit_compile=False)
    return model


def ratings(batch: int):
    """Random users, items and labels, the same eight batches again and again."""
    import numpy as np
    import tensorflow as tf

    random = np.random.RandomState(0)
    users, items = (random.randint(0, count, 8 * batch).astype("int32") for count in (USERS, ITEMS))
    labels = random.randint(0, 2, (8 * batch, 1)).astype("float32")
    return tf.data.Dataset.from_tensor_slices(((users, items), labels)).batch(batch).cache().repeat()


def answers(answer) -> None:
    """Reads requests from standard input, until it ends."""
    for line in sys.stdin:
        print(json.dumps(answer(*json.loads(line))), flush=True)


def coordinate_speed(what: str) -> None:
    """Answers a batch size and a number of steps with the seconds of a step, and of it those of a worker's part."""
    import tfpar

    with contextlib.ExitStack() as stack:
        strategy = None
        if what != "one device":
            mode, workers, servers = what.split("-")
            cluster = stack.enter_context(tfpar.local_cluster(int(workers), int(servers)))
            strategy = tfpar.ParameterServerStrategy(cluster.resolver, mode=mode)
        made = {}

        def answer(batch: int, steps: int) -> dict:
            if batch not in made:
                with strategy.scope() if strategy else contextlib.nullcontext():
                    made[batch] = recommender(), ratings(batch)
            model, data = made[batch]
            start = time.perf_counter()
            model.fit(data, steps_per_epoch=steps, verbose=0, shuffle=False)
            seconds = (time.perf_counter() - start) / steps
            found = strategy.step_log(model)[-steps:] if strategy else []
            worker = statistics.mean(step.ended - step.started for step in found) if found else 0.0
            return {"step": seconds, "worker": worker}

        answers(answer)


def coordinate_bytes() -> None:
    """Answers the numbers of a table and an optimizer with bytes and seconds per step."""
    import keras
    import numpy as np
    import tensorflow as tf
    from proxy import CountedCluster

    import tfpar

    with CountedCluster(1, 2) as cluster:
        spec = tf.train.ClusterSpec(cluster.cluster)
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(spec, rpc_layer="grpc")
        strategy = tfpar.ParameterServerStrategy(resolver)

        def answer(table: int, optimizer: int) -> dict:
            rows, name = int(FLAGS.tables[table]), FLAGS.optimizers[optimizer]
            with strategy.scope():
                layers = [keras.layers.Embedding(rows, TABLE_WIDTH), keras.layers.Flatten(), keras.layers.Dense(1)]
                model = keras.Sequential([keras.Input((IDS,), dtype="int32"), *layers])
                model.compile(getattr(keras.optimizers, name)(0.01), "mse", jit_compile=False)
            ids = np.random.RandomState(0).randint(0, rows, (8 * TABLE_BATCH, IDS)).astype("int32")
            data = tf.data.Dataset.from_tensor_slices((ids, np.ones((len(ids), 1), "float32"))).batch(TABLE_BATCH).repeat()
            model.fit(data, steps_per_epoch=3, verbose=0, shuffle=False)
            before, start = cluster.bytes(), time.perf_counter()
            model.fit(data, steps_per_epoch=FLAGS.steps, verbose=0, shuffle=False)
            seconds, after = time.perf_counter() - start, cluster.bytes()
            moved = {task: [(b - a) / FLAGS.steps for a, b in zip(before[task], after[task])] for task in after}
            unique = statistics.mean(len(np.unique(batch)) for batch in np.split(ids, 8))
            return {"moved": moved, "unique": unique, "seconds": seconds / FLAGS.steps}

        answers(answer)


def coordinate_balance(servers: int) -> None:
    """Answers with the bytes on each server, and those of each weight with its slots, in order."""
    import tfpar

    with tfpar.local_cluster(1, servers) as cluster:
        strategy = tfpar.ParameterServerStrategy(cluster.resolver)

        def answer() -> dict:
            with strategy.scope():
                model = recommender()
                model.optimizer.build(model.trainable_variables)
            weights = [2 * 4 * weight.shape.num_elements() for weight in (v.value for v in model.weights)]
            return {"servers": list(strategy.server_bytes.values()), "weights": weights}

        answers(answer)


# The benchmark.


def speed() -> None:
    """Prints rows per second of each case next to one device."""
    print(f"\nspeed: {FLAGS.rounds} rounds of {FLAGS.steps} steps of {BATCH} and of {SMALL} rows, medians")
    print(f"{'':12} {BATCH} rows: {'':35} | {SMALL} rows, ms:")
    titles = ("rows/s", "one device", "ratio", "ms", "of worker", "ms", "of worker", "one device")
    print(f"{'case':12}" + "".join(f"{title:>11}" for title in titles))
    with Coordinator("one device") as one:
        for size in (BATCH, SMALL):
            one.ask(size, 3)
        for case in FLAGS.cases:
            with Coordinator(case) as other:
                for size in (BATCH, SMALL):
                    other.ask(size, 6)
                times = {size: [] for size in (BATCH, SMALL)}
                for _ in range(FLAGS.rounds):
                    for size, found in times.items():
                        found.append((one.ask(size, FLAGS.steps), other.ask(size, FLAGS.steps)))
            numbers = [_middle(BATCH / own["step"] for _, own in times[BATCH])]
            numbers.append(_middle(BATCH / alone["step"] for alone, _ in times[BATCH]))
            ratio = _middle(alone["step"] / own["step"] for alone, own in times[BATCH])
            parts = [_middle(1e3 * own[part] for _, own in times[size]) for size in times for part in ("step", "worker")]
            parts.append(_middle(1e3 * alone["step"] for alone, _ in times[SMALL]))
            print(
                f"{case:12}{numbers[0]:11,.0f}{numbers[1]:11,.0f}{ratio:11.2f}" + "".join(f"{part:11.1f}" for part in parts),
                flush=True,
            )


def bytes_moved() -> None:
    """Prints the bytes of a step for each size of a table."""
    print(f"\nbytes: table × {TABLE_WIDTH} float32, batch {TABLE_BATCH} × {IDS} ids, 1 worker, 2 servers, kB per step")
    titles = ("table, kB", "rows used", "to servers", "from them", "to worker", "from it", "all", "ms")
    print(f"{'optimizer':10}{'rows':>9}" + "".join(f"{title:>11}" for title in titles))
    settings = [f"--tables={','.join(FLAGS.tables)}", f"--optimizers={','.join(FLAGS.optimizers)}", f"--steps={FLAGS.steps}"]
    with Coordinator("bytes", *settings) as coordinator:
        for i, name in enumerate(FLAGS.optimizers):
            for j, rows in enumerate(map(int, FLAGS.tables)):
                found = coordinator.ask(j, i)
                ways = [
                    sum(moved[way] for task, moved in found["moved"].items() if task.startswith(job)) / 1e3
                    for job in ("ps", "worker")
                    for way in (0, 1)
                ]
                numbers = [rows * TABLE_WIDTH * 4 / 1e3, found["unique"], *ways, sum(ways), found["seconds"] * 1e3]
                print(f"{name:10}{rows:9,}" + "".join(f"{number:11,.1f}" for number in numbers), flush=True)


def balance() -> None:
    """Prints the bytes on each server, and what whole weights in turn would give."""
    print("\nbalance: kB of weights and slots on each server")
    for servers in (2, 3):
        with Coordinator(f"balance-{servers}") as coordinator:
            found = coordinator.ask()
        turns = [sum(found["weights"][i::servers]) for i in range(servers)]
        for name, sizes in (("default", found["servers"]), ("whole, in turn", turns)):
            shown = " ".join(f"{size / 1e3:9,.1f}" for size in sizes)
            print(
                f"{servers} servers, {name:15} {shown:30} max / mean {max(sizes) / statistics.mean(sizes):.3f}", flush=True
            )


def _middle(values) -> float:
    return statistics.median(values)


def main(argv: list[str]) -> None:
    """Prints a table per question."""
    del argv
    what = FLAGS.coordinate
    if what is None:
        versions = {name: importlib.metadata.version(name) for name in ("tensorflow", "keras", "numpy")}
        print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {versions}")
        for question in FLAGS.questions:
            {"speed": speed, "bytes": bytes_moved, "balance": balance}[question]()
    elif what == "bytes":
        coordinate_bytes()
    elif what.startswith("balance"):
        coordinate_balance(int(what.rpartition("-")[2]))
    else:
        coordinate_speed(what)


if __name__ == "__main__":
    app.run(main)
