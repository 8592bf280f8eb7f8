"""The models of tfpar.models train as on one device, save, and refuse wrong sizes."""

import keras
import numpy as np
import parity
import pytest

import tfpar
from tfpar.models.convnet import convnet
from tfpar.models.gpt import gpt
from tfpar.models.mlp import mlp
from tfpar.models.recommender import PairProducts, clicks, recommender
from tfpar.models.transformer import encoder, transformer
from tfpar.models.vit import vit

RNG = np.random.RandomState(3)
IDS = RNG.randint(1, 12, (12, 6)).astype("int32")
IDS[::3, 4:] = 0  # padding
IMAGES = RNG.randn(12, 8, 8, 3)
CLASSES = RNG.randint(0, 4, (12,))
TOKENS = RNG.randint(0, 12, (12, 6))
TABLES = {"tables": (8, 4, 6), "dense": 4}
CLICKED, WHETHER, _ = clicks(12, **TABLES)
SIZES = {"vocabulary": 12, "length": 6, "width": 16, "heads": 4, "depth": 1}

MODELS = {
    "mlp": (lambda: mlp(features=6, widths=(16, 8), outputs=4), RNG.randn(12, 6), CLASSES),
    "convnet": (lambda: convnet(image_shape=(8, 8, 3), filters=(4, 8), classes=4), IMAGES, CLASSES),
    "vit": (lambda: vit(image_shape=(8, 8, 3), patch=4, width=16, heads=4, depth=1, classes=4), IMAGES, CLASSES),
    "encoder": (lambda: encoder(**SIZES, classes=4), IDS, CLASSES),
    "transformer": (lambda: transformer(**SIZES), {"source": IDS, "target": TOKENS.astype("int32")}, TOKENS),
    "gpt": (lambda: gpt(**SIZES), IDS, TOKENS),
    "recommender": (lambda: recommender(**TABLES, width=8, bottom=(8,), top=(16, 8)), CLICKED, WHETHER),
}
LOSSES = dict.fromkeys(MODELS, keras.losses.SparseCategoricalCrossentropy) | {"recommender": keras.losses.BinaryCrossentropy}
LAYOUTS = {
    r".*attention/(query|key|value)/kernel": (None, "model", None),
    r".*attention/(query|key|value)/bias": ("model", None),
    r".*attention/attention_output/kernel": ("model", None, None),
    r".*hidden_0/kernel": (None, "model"),
    r".*hidden_1/kernel": ("model", None),
    r".*table_\d/embeddings": ("model", None),
    r".*top_0/kernel": (None, "model"),
    r".*top_1/kernel": ("model", None),
    r".*head/kernel": (None, "model"),
    r".*head/bias": ("model",),
}
WRONG = {
    "no hidden layer": (lambda: mlp(widths=()), "at least one hidden layer"),
    "no width": (lambda: mlp(widths=(8, 0)), "sizes of at least 1"),
    "no stage": (lambda: convnet(filters=()), "at least one stage"),
    "small image": (lambda: convnet(image_shape=(3, 8, 1), filters=(4, 4, 4)), "at least 4 pixels"),
    "patch": (lambda: vit(image_shape=(8, 9, 1), patch=4), "patch must divide"),
    "no table": (lambda: recommender(tables=()), "There must be a table"),
    "no rows": (lambda: recommender(tables=(8, 0)), "sizes must be at least 1"),
    "no table to click": (lambda: clicks(4, tables=()), "There must be a table"),
    "vit heads": (lambda: vit(width=30, heads=4), "heads must divide width"),
    "encoder heads": (lambda: encoder(width=30, heads=4), "heads must divide width"),
    "transformer heads": (lambda: transformer(width=30, heads=4), "heads must divide width"),
}


# The transformer has an encoder in it, and a decoder as GPT is one.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in ("encoder", "gpt") else []) for name in MODELS]
)
def test_trains_with_rules_and_with_automatic_layouts_as_on_one_device(name, float64):
    build, x, y = MODELS[name]

    def train(strategy):
        loss = LOSSES[name](from_logits=True)
        return parity.train(
            strategy,
            lambda: parity.compiled(build(), loss=loss),
            lambda m: m.fit(x, y, batch_size=4, epochs=1, verbose=0, shuffle=False),
        )

    one = train(None)
    for strategy in (parity.strategy_for("data=2,model=2", LAYOUTS), tfpar.HybridStrategy("data=2,model=2")):
        many = train(strategy)
        parity.assert_alike(one, many)
        assert any("model" in row.layout for row in strategy.describe(many.model))


@pytest.mark.parametrize("name", MODELS)
def test_saves(name, tmp_path):
    build, x, _ = MODELS[name]
    model = build()
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    parity.assert_close(model.predict(x, verbose=0), loaded.predict(x, verbose=0), 1e-6)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_sizes(name):
    build, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        build()


def test_padding_changes_nothing():
    short, padded = IDS[:, :4], np.pad(IDS[:, :4], ((0, 0), (0, 2)))
    long_model, short_model = encoder(**SIZES, classes=4), encoder(**SIZES | {"length": 4}, classes=4)
    for weight, longer in zip(short_model.weights, long_model.weights):
        weight.assign(longer[: weight.shape[0]])
    parity.assert_close(long_model(padded), short_model(short), 1e-5)


def test_the_decoder_does_not_see_later_tokens_nor_padding():
    model = transformer(**SIZES)
    target = TOKENS.astype("int32")
    before = model({"source": IDS, "target": target}).numpy()
    later = target.copy()
    later[:, 3:] = (later[:, 3:] + 1) % 12
    parity.assert_close(before[:, :3], model({"source": IDS, "target": later}).numpy()[:, :3], 1e-5)
    assert np.abs(before - model({"source": np.flip(IDS, 1).copy(), "target": target}).numpy()).max() > 1e-3


def test_products_are_those_of_all_pairs():
    vectors = [RNG.randn(3, 5) for _ in range(4)]
    expected = [np.sum(vectors[i] * vectors[j], axis=1) for i in range(4) for j in range(i)]
    parity.assert_close(np.stack(expected, 1), PairProducts()(vectors), 1e-5)


def test_clicks_are_those_of_their_seed():
    def drawn(**kwargs):
        return keras.tree.flatten(clicks(1000, tables=(50, 20), dense=3, **kwargs))

    parity.assert_close(drawn(seed=1), drawn(seed=1), 0)
    assert all(np.any(a != b) for a, b in zip(drawn(seed=1), drawn(seed=2)))


def test_clicks_follow_their_rule():
    inputs, labels, probabilities = clicks(20_000, seed=1)
    assert auc(labels, probabilities) == pytest.approx(0.84, abs=0.01)
    for low in np.arange(0, 1, 0.2):  # the part that is clicked is the probability
        chosen = (probabilities >= low) & (probabilities < low + 0.2)
        assert labels[chosen].mean() == pytest.approx(probabilities[chosen].mean(), abs=0.03)
    counts = np.bincount(inputs["categories"][:, 0], minlength=20_000)
    assert counts.max() > 2000 and np.sum(counts == 0) > 15_000  # heavy-tailed
    often, (others, _, again) = np.argmax(counts), clicks(20_000, seed=2)
    assert effect(inputs, probabilities, often) == pytest.approx(effect(others, again, often), abs=0.1)  # one rule for all


def effect(inputs, probabilities, row):
    """The mean log-odds where the first category is `row`."""
    chosen = probabilities[inputs["categories"][:, 0] == row].astype("float64")
    return np.mean(np.log(chosen / (1 - chosen)))


def auc(labels, scores):
    """The chance that an example with label 1 has the higher score of two."""
    ranks = np.argsort(np.argsort(scores[:, 0])) + 1
    ones = labels[:, 0] == 1
    count = ones.sum()
    return (ranks[ones].sum() - count * (count + 1) / 2) / (count * (len(ones) - count))
