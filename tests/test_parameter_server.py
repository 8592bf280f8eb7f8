"""Parameter servers with real processes: the numbers of one device, inputs of fit, modes, saving."""

from __future__ import annotations

import json

import pytest
import servers

import tfpar

pytestmark = pytest.mark.slow

TWO_PARTS = "tf.distribute.experimental.partitioners.FixedShardsPartitioner(2)"
MODEL = f"""
strategy = tfpar.ParameterServerStrategy(variable_partitioner={TWO_PARTS}, mode=os.environ.get("MODE", "sync"))
rng = np.random.RandomState(0)
ids, numbers, targets = rng.randint(0, 50, (70, 4)), rng.randn(70, 8), rng.randn(70, 1)

def tables(optimizer, **compile):
    def build():
        taken, given = keras.Input((4,), dtype="int32"), keras.Input((8,))
        x = layers.Flatten()(layers.Embedding(50, 4, name="table")(taken))
        x = layers.Concatenate()([x, layers.Dense(16, activation="gelu", kernel_regularizer="l2")(given)])
        model = keras.Model([taken, given], layers.Dense(1)(x))
        model.compile(optimizer(), "mse", **compile)
        return model
    return build

def fit(model, **kwargs):
    return model.fit([ids, numbers], targets, batch_size=16, epochs=2, shuffle=False, verbose=0, **kwargs)

def both(build, fit=fit, check=lambda model: None, atol=1e-9, slots=True):
    import parity
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    parity.densify = lambda optimizer: None  # one device as it is: repeated rows stay apart there, and here
    one, many = parity.train(None, build, fit, check), parity.train(strategy, build, fit, check)
    for path in one.weights:
        parity.assert_close(one.weights[path], many.weights[path], atol, path)
    parity.assert_close(one.history, many.history, atol, "history")
    parity.assert_close(one.checked, many.checked, atol, "check")
    if slots:
        parity.assert_close(one.slots, many.slots, atol, "slots")
    return one, many
"""


@pytest.fixture(scope="module")
def cluster():
    with tfpar.local_cluster(workers=2, ps=3, threads=1) as found:
        yield found


OPTIMIZERS = {
    "sgd": "SGD(0.1, momentum=0.9, nesterov=True, clipvalue=0.1)",
    "adam": "Adam(0.01, amsgrad=True)",
    "adamw": "AdamW(0.01, use_ema=True, ema_overwrite_frequency=4)",
    "nadam": "Nadam(0.01, clipnorm=0.05)",
    "rmsprop": "RMSprop(0.01, centered=True, momentum=0.5)",
    "adagrad": "Adagrad(0.1, global_clipnorm=0.05)",
    "adadelta": "Adadelta(1.0)",
    "adamax": "Adamax(0.01)",
    "ftrl": "Ftrl(0.1)",
    "lion": "Lion(0.01)",
    "accumulation": "Adam(0.01, gradient_accumulation_steps=2, global_clipnorm=0.1)",
    "loss scale": "LossScaleOptimizer(keras.optimizers.Adam(0.01, global_clipnorm=0.1), initial_scale=4.0)",
    "schedule": "SGD(keras.optimizers.schedules.CosineDecay(0.1, 10))",
    "adafactor": "Adafactor(0.01)",  # from here on: not by numbers, so on whole weights
    "lamb": "Lamb(0.01)",
    "muon": "Muon(0.01)",
}


QUICK = ["adam", "adagrad", "accumulation", "adafactor", "muon"]


@pytest.mark.parametrize("names", [QUICK, pytest.param([n for n in OPTIMIZERS if n not in QUICK], marks=pytest.mark.long)])
def test_every_optimizer_is_that_of_one_device(cluster, names):
    optimizers = {name: OPTIMIZERS[name] for name in names}
    program = f"""
    for name, optimizer in {optimizers!r}.items():
        one, many = both(tables(lambda: eval("keras.optimizers." + optimizer)))
        print(name, max(float(np.abs(one.weights[p] - many.weights[p]).max()) for p in one.weights))
    """
    out = servers.run(MODEL + servers.textwrap.dedent(program), cluster.tf_config)
    assert [line.rsplit(" ", 1)[0] for line in out.splitlines()] == names


def test_a_synchronous_step_is_that_of_one_device(cluster):
    """Losses that are no plain means, uneven batches, state of layers, and metrics."""
    program = """
    def sequences():
        inputs = keras.Input((6,), dtype="int32")
        x = layers.Embedding(20, 8, mask_zero=True)(inputs)
        x = layers.Bidirectional(layers.GRU(4, return_sequences=True))(x)
        model = keras.Model(inputs, layers.Dense(5)(x))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=3)
        model.compile(keras.optimizers.Adam(0.01), loss, weighted_metrics=["accuracy"])
        return model

    words = rng.randint(0, 20, (22, 6)) * (np.arange(6) < rng.randint(1, 7, (22, 1)))
    labels, weights = rng.randint(0, 5, (22, 6)), rng.rand(22, 6)

    def fit_words(model):
        return model.fit(words, labels, sample_weight=weights, batch_size=5, epochs=2, shuffle=False, verbose=0)

    def see(model):
        return model.evaluate(words, labels, batch_size=7, verbose=0), model.predict(words, batch_size=9, verbose=0)

    both(sequences, fit_words, see)

    metrics = lambda: ["mae", keras.metrics.R2Score(), keras.metrics.AUC(num_thresholds=20, name="auc")]
    both(lambda: tables(lambda: keras.optimizers.Adam(0.01), metrics=metrics())(), lambda model: model.fit(
        [ids, numbers], targets > 0, batch_size=16, epochs=2, shuffle=False, verbose=0))

    class Tracked(keras.Model):  # logs under other names than the metrics'
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.total, self.error = keras.metrics.Mean("total_loss"), keras.metrics.MeanAbsoluteError("error")

        @property
        def metrics(self):
            return [self.total, self.error]

        def train_step(self, data):
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            with tf.GradientTape() as tape:
                predicted = self(x, training=True)
                loss = keras.ops.mean(keras.ops.square(y - predicted))
            weights = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
            self.total.update_state(loss, keras.ops.shape(x)[0])
            self.error.update_state(y, predicted)
            both = self.total.result() * self.error.result()
            return {"loss": self.total.result(), "mae": self.error.result(), "product": both, "batch": loss}

    def tracked():
        inputs = keras.Input((8,))
        model = Tracked(inputs, layers.Dense(1)(inputs))
        model.compile(keras.optimizers.Adam(0.01))
        return model

    both(tracked, lambda model: model.fit(numbers, targets, batch_size=16, epochs=2, shuffle=False, verbose=0))

    class Norm(keras.Model):  # a step of the user's own
        def train_step(self, data):
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
            return {"loss": loss}

    def two():
        inputs = keras.Input((8,))
        model = keras.Model(inputs, [layers.Dense(1, name="a")(inputs), layers.Dense(1, name="b")(inputs)])
        model.compile(keras.optimizers.Adam(0.01), ["mse", "mae"], loss_weights=[1.0, 0.3])
        return model

    both(two, lambda model: model.fit(numbers, [targets, targets], batch_size=16, epochs=2, shuffle=False, verbose=0))

    def own():
        inputs = keras.Input((8,))
        model = Norm(inputs, layers.Dense(1)(inputs))
        model.compile("adam", "mse")
        return model

    both(own, lambda model: [model.train_on_batch(numbers[i:i + 9], targets[i:i + 9]) for i in range(0, 60, 9)])

    def contrast(y, predicted):
        return keras.ops.mean(keras.ops.square(keras.ops.matmul(predicted, keras.ops.transpose(predicted))))

    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), layers.Dense(3)])
        model.compile("adam", contrast)
    try:
        model.fit(numbers, targets, batch_size=8, verbose=0)
    except ValueError as error:
        print(error)

    class Largest(keras.metrics.Metric):
        def __init__(self):
            super().__init__()
            self.largest = self.add_variable((), "zeros", name="largest")

        def update_state(self, y, predicted, sample_weight=None):
            self.largest.assign(keras.ops.maximum(self.largest, keras.ops.max(predicted)))

        def result(self):
            return self.largest

    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), layers.Dense(1)])
        model.compile("adam", "mse", metrics=[Largest()])
    try:
        model.fit(numbers, targets, batch_size=8, verbose=0)
    except ValueError as error:
        print(error)
    """
    out = servers.run(MODEL + servers.textwrap.dedent(program), cluster.tf_config)
    assert "is no mean over examples" in out and "largest' is no sum over steps" in out


def test_only_touched_rows_and_gradients_travel(cluster):
    """Counted in the graph of a worker's step: what crosses between devices, by the operations that read and send it."""
    program = """
    keras.config.set_floatx("float32")
    with strategy.scope():
        model = tables(lambda: keras.optimizers.Adam(0.01))()
    fit(model)
    steps = model.train_function.__self__
    batch = tuple(tf.constant(part[:16]) for part in (ids, numbers)), tf.constant(targets[:16])
    graph = steps._program.trace(batch).graph
    table = strategy.extended.spread
    reads = [op for op in graph.get_operations() if op.type == "ReadVariableOp"]
    used = [op for op in reads if op.outputs[0].consumers()]
    print(sorted(str(op.outputs[0].shape) for op in used if op.outputs[0].shape.rank == 2 and op.outputs[0].shape[1] == 4))
    print(sum(op.type == "ResourceGather" for op in graph.get_operations()))
    pieces = [p for variable in steps._program.trace(batch).structured_outputs["gradients"][0] for p in variable]
    print([(type(p).__name__, p.device[-28:-13]) for p in pieces if isinstance(p, tf.IndexedSlices)])
    """
    lines = servers.run(MODEL + servers.textwrap.dedent(program), cluster.tf_config).splitlines()
    assert lines[1] == "2"  # one lookup per part, and no read of the table that anything uses
    assert lines[2].count("IndexedSlices") == 2


@pytest.mark.parametrize("mode", ["async", pytest.param("sync", marks=pytest.mark.long)])
def test_fit_takes_what_users_give_it(cluster, mode):
    program = """
    def fresh(**compile):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            inputs = keras.Input((8,))
            x = layers.Dropout(0.1)(layers.BatchNormalization()(layers.Dense(16, activation="relu")(inputs)))
            model = keras.Model(inputs, layers.Dense(1)(x))
            model.compile("adam", "mse", metrics=["mae"], **compile)
        return model

    x, y = numbers.astype("float32"), targets.astype("float32")
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    seen = []

    class See(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append((batch, int(self.model.optimizer.iterations), sorted(logs)))

    model = fresh()
    history = model.fit(x, y, batch_size=8, epochs=3, validation_data=(x, y), validation_batch_size=20, verbose=0,
                        callbacks=[See()])
    assert [s[:2] for s in seen] == [(i % 9, i + 1) for i in range(27)], seen
    assert {tuple(s[2]) for s in seen} == {("loss", "mae")}
    assert sorted(history.history) == ["loss", "mae", "val_loss", "val_mae"]
    assert history.history["loss"][-1] < history.history["loss"][0]

    def pipeline(context):
        dataset = tf.data.Dataset.from_tensor_slices((x, y))
        return dataset.shard(context.num_input_pipelines, context.input_pipeline_id).batch(8)

    def count(steps, *args, **kwargs):
        before = int(model.optimizer.iterations)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.fit(*args, verbose=0, **kwargs)
        assert int(model.optimizer.iterations) - before == steps, (steps, int(model.optimizer.iterations) - before)

    count(14, dataset.batch(10), epochs=2)
    count(12, dataset.batch(10).repeat(), steps_per_epoch=4, epochs=3)
    count(5, ((x[i:i + 14], y[i:i + 14]) for i in range(0, 70, 14)))
    count(10, lambda context: pipeline(context).repeat(), steps_per_epoch=5, epochs=2)
    count(10 if strategy.mode.name == "async" else 5, pipeline)  # two workers with 35 examples each
    count(3, strategy.distribute_datasets_from_function(pipeline), steps_per_epoch=3)
    count(4, x, y, batch_size=8, epochs=9, callbacks=[keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: setattr(model, "stop_training", batch == 3))])
    count(9, x, y, batch_size=8, callbacks=[keras.callbacks.LearningRateScheduler(lambda epoch: 0.5)])
    assert abs(float(model.optimizer.learning_rate) - 0.5) < 1e-6

    with tf.device("/cpu:0"):
        one = keras.models.clone_model(model)
        one.compile("adam", "mse", metrics=["mae"])
        one.set_weights(model.get_weights())
    for size in 7, 70, 100:
        found = model.evaluate(x, y, batch_size=size, verbose=0)
        np.testing.assert_allclose(found, one.evaluate(x, y, verbose=0), rtol=1e-5)
        np.testing.assert_allclose(model.predict(x, batch_size=size, verbose=0), one.predict(x, verbose=0), atol=1e-5)
    np.testing.assert_allclose(model(x[:3]), one(x[:3]), atol=1e-5)
    np.testing.assert_allclose(model.predict(pipeline, steps=2, verbose=0).shape, (16, 1))
    assert model.predict_on_batch(x[:3]).shape == (3, 1) and len(model.test_on_batch(x[:8], y[:8])) == 2

    try:
        model.fit(lambda context: dataset.batch(8), verbose=0)
        raise AssertionError
    except ValueError as error:
        assert "was made outside of it" in str(error), error
    model = fresh(steps_per_execution=4)
    count(9, x, y, batch_size=8)
    print(strategy.mode.name, "ok")
    """
    assert servers.run(MODEL + servers.textwrap.dedent(program), cluster.tf_config, MODE=mode).endswith(f"{mode} ok\n")


@pytest.mark.parametrize("where", ["elsewhere", pytest.param("on the same servers", marks=pytest.mark.long)])
def test_models_come_back(cluster, tmp_path, where):
    """With the same bits, on one device and on another number of servers, or where they were saved."""
    save = f"""
    build = tables(lambda: keras.optimizers.Adam(0.01, use_ema=True))
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = build()
    fit(model)
    model.save("{tmp_path}/m.keras")
    model.save_weights("{tmp_path}/m.weights.h5")
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).write("{tmp_path}/ckpt")
    state = [v.numpy() for v in [*model.weights, *model.optimizer.variables]]
    np.savez("{tmp_path}/state.npz", *state, out=model.predict([ids, numbers], verbose=0))
    """
    load = f"""
    saved = dict(np.load("{tmp_path}/state.npz"))
    out, state = saved.pop("out"), list(saved.values())
    build = tables(lambda: keras.optimizers.Adam(0.01, use_ema=True))
    def check(model):
        for expected, v in zip(state, [*model.weights, *model.optimizer.variables], strict=True):
            np.testing.assert_array_equal(v.numpy(), expected)
        np.testing.assert_allclose(model.predict([ids, numbers], verbose=0), out, atol=1e-6)
        fit(model)
    with scope():
        check(keras.models.load_model("{tmp_path}/m.keras"))
        model = build()
        model.optimizer.build(model.trainable_variables)
        model.load_weights("{tmp_path}/m.weights.h5")
        np.testing.assert_allclose(model.predict([ids, numbers], verbose=0), out, atol=1e-6)
        model = build()
        model.optimizer.build(model.trainable_variables)
        tf.train.Checkpoint(model=model, optimizer=model.optimizer).read("{tmp_path}/ckpt").assert_consumed()
        check(model)
    print("ok")
    """
    save, load = servers.textwrap.dedent(save), servers.textwrap.dedent(load)
    servers.run(MODEL + save, cluster.tf_config)
    if where == "on the same servers":
        servers.run(MODEL.partition("rng =")[0] + "scope = strategy.scope\n" + _data() + load, cluster.tf_config)
        return
    one_device = "scope = contextlib.nullcontext\n" + _data() + load
    servers.run(one_device)
    with tfpar.local_cluster(workers=1, ps=1, threads=1) as other:
        first = MODEL.partition("rng =")[0].replace(TWO_PARTS, "None")
        servers.run(first + "scope = strategy.scope\n" + _data() + load, other.tf_config)
        servers.run(MODEL + servers.textwrap.dedent(ONE_WORKER), other.tf_config, MODE="async")


ONE_WORKER = """
def build():
    inputs = keras.Input((8,))
    x = layers.Dropout(0.3)(layers.BatchNormalization()(layers.Dense(16, activation="relu")(inputs)))
    model = keras.Model(inputs, layers.Dense(1)(x))
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model

both(build, lambda model: model.fit(numbers, targets, batch_size=16, epochs=2, shuffle=False, verbose=0),
     lambda model: model.predict(numbers, verbose=0))
"""


def _data() -> str:
    return "rng =" + MODEL.partition("rng =")[2].partition("def both")[0]


SLOWED = """
def slowed(mode, **options):
    strategy = tfpar.ParameterServerStrategy(mode=mode, **options)
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((8,)), layers.Dense(4), layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse")
    dispatcher = strategy.dispatcher
    start = dispatcher.start
    def late(worker, task, work):  # worker 1 takes 0.15 s longer
        start(worker, task, lambda: (time.sleep(0.15 * (worker == 1)), work())[1])
    dispatcher.start = late
    rng = np.random.RandomState(0)
    x = rng.randn(8 * 40, 8).astype("float32")
    model.fit(x, x[:, :1], batch_size=8, verbose=0)
    return model, strategy.step_log(model)
"""


@pytest.mark.parametrize("staleness", [1, *(pytest.param(k, marks=pytest.mark.long) for k in (0, 3))])
def test_no_worker_gets_too_far_ahead(cluster, staleness):
    """The step log with one slowed worker. A step may start when every worker has ended the one `staleness` + 1 before."""
    program = f"""
    model, log = slowed("bounded", staleness={staleness})
    events = sorted([(r.started, 0, r.worker, r.step) for r in log] + [(r.ended, 1, r.worker, r.step) for r in log])
    done, ahead = [0, 0], []
    for _, ends, worker, step in events:
        if ends:
            done[worker] = step + 1
        else:
            ahead.append(step - min(done))
    print(max(ahead), len(log), int(model.optimizer.iterations), sum(r.worker == 1 for r in log))
    """
    ahead, steps, iterations, of_slow = map(
        int, servers.run(SLOWED + servers.textwrap.dedent(program), cluster.tf_config).split()
    )
    assert steps == iterations == 40
    assert ahead == staleness
    assert 20 - staleness <= of_slow <= 20


def test_a_slow_worker_does_less_in_async_and_is_repeated_with_a_backup(cluster):
    program = """
    model, log = slowed("async")
    print(sum(r.worker == 1 for r in log), max(r.staleness for r in log))
    weights = model.get_weights()
    model, log = slowed("sync", backup_workers=1)
    print(sum(r.worker == 1 for r in log), len(log))
    """
    lines = servers.run(SLOWED + servers.textwrap.dedent(program), cluster.tf_config).splitlines()
    of_slow, stale = map(int, lines[0].split())
    assert 0 < of_slow < 15 and stale > 1
    of_slow, steps = map(int, lines[1].split())
    assert steps == 40 and of_slow < 15


def test_server_bytes_are_even_and_state_is_spread(cluster):
    program = """
    strategy = tfpar.ParameterServerStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,), dtype="int32"), layers.Embedding(100_000, 16), layers.Flatten(),
                                  layers.Dense(64), layers.Dense(1)])
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
    import json
    print(json.dumps(list(strategy.server_bytes.values())))
    """
    found = json.loads(servers.run(program, cluster.tf_config))
    assert len(found) == 3 and max(found) / (sum(found) / 3) < 1.01
