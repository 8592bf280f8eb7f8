"""LayoutMap: matching, and every wrong rule is an error that names rule, variable, shape and mend."""

import keras
import numpy as np
import parity
import pytest
from keras import layers

import tfpar

MESH = tfpar.Mesh("data=2,model=4")


def test_one_rule_matches_a_whole_path():
    rules = tfpar.LayoutMap({r".*up/kernel": (None, "model"), r"down/.*": ["model", None]})
    assert rules.match("block/up/kernel", (8, 16), MESH) == (r".*up/kernel", (None, "model"))
    assert rules.match("block/up/kernel_momentum", (8, 16), MESH) == (None, (None, None))
    assert dict(rules) == {r".*up/kernel": (None, "model"), r"down/.*": ("model", None)} and len(rules) == 2


@pytest.mark.parametrize(
    "rules, sentence",
    [
        ({r"a(": (None,)}, r"'a\(' is no regular expression"),
        ({r"a": "model"}, r"'a' has the layout 'model'; write a tuple"),
        ({r"a": (None, 3)}, r"write a tuple"),
        ({r"a": ("model", "model")}, r"splits two dims by the axis 'model'"),
    ],
)
def test_rules_wrong_in_themselves(rules, sentence):
    with pytest.raises(ValueError, match=sentence):
        tfpar.LayoutMap(rules)


@pytest.mark.parametrize(
    "rules, sentence",
    [
        (
            {r".*kernel": (None, "model"), r".*up/.*": (None, "model")},
            r"2 layout rules match the variable 'mlp/up/kernel' of shape \(8, 16\): '\.\*kernel'.* and '.\*up/\.\*'.*Narrow",
        ),
        (
            {r"mlp/up/kernel": ("model",)},
            r"'mlp/up/kernel': \('model',\) has 1 entries, but.* shape \(8, 16\), 2 dims.*Give one",
        ),
        (
            {r".*out/kernel": (None, "model")},
            r"dim 1 of the variable 'mlp/out/kernel', shape \(16, 6\).*size 4.*not divide 6",
        ),
    ],
)
def test_rules_that_do_not_fit_a_variable(rules, sentence):
    strategy = tfpar.HybridStrategy("data=2,model=4", layouts=rules)
    with pytest.raises(ValueError, match=sentence), strategy.scope():
        keras.Sequential([keras.Input((8,)), layers.Dense(16, name="up"), layers.Dense(6, name="out")], name="mlp")


def test_unknown_axes():
    with pytest.raises(ValueError, match=r"names the axis 'modle', but the mesh data=2,model=4 has data, model"):
        tfpar.HybridStrategy(MESH, layouts={r"a": (None, "modle")})
    with pytest.raises(ValueError, match=r"axis 'dta'.*neither 'data'.* nor named by a layout rule"):
        tfpar.HybridStrategy("dta=2")
    with pytest.raises(ValueError, match=r"layouts is \"auto\", .* a tfpar.LayoutMap.*got 3"):
        tfpar.HybridStrategy(MESH, layouts=3)


def test_a_model_axis_that_no_rule_uses_is_said():
    with pytest.warns(UserWarning, match="axis 'model' of size 2 splits no variable"):
        tfpar.HybridStrategy("data=2,model=2", layouts=None)


@pytest.mark.parametrize("use", ["fit", "evaluate", "predict", "describe"])
def test_a_rule_that_matches_nothing(use):
    strategy = tfpar.HybridStrategy(MESH, layouts={r".*upp/kernel": (None, "model")})
    with strategy.scope():
        model = parity.compiled(parity.mlp())
    x, y = parity.regression(8)
    uses = {
        "fit": lambda: model.fit(x, y, verbose=0),
        "evaluate": lambda: model.evaluate(x, y, verbose=0),
        "predict": lambda: model.predict(x, verbose=0),
        "describe": lambda: strategy.describe(model),
    }
    with pytest.raises(ValueError, match=r"'\.\*upp/kernel'.*matches no variable.*up/kernel.*match the whole path"):
        uses[use]()


def test_rules_are_for_the_models_variables_only(float64):
    """A rule for everything of rank 2 does not reach metrics, seeds or an optimizer's own state."""
    rules = {r".*(up|down|out)/kernel": ("model", None)}

    def build():
        model = keras.Sequential(
            [
                keras.Input((8,)),
                layers.Dense(8, name="up"),
                layers.Dropout(0.0, name="dropout"),
                layers.Dense(8, name="down"),
                layers.Dense(4, name="out"),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return parity.compiled(
            model, keras.optimizers.Adafactor(0.01), loss, metrics=[keras.metrics.SparseCategoricalAccuracy()]
        )

    x, _ = parity.regression(16)
    parity.assert_parity(
        build, lambda m: m.fit(x, np.arange(16) % 4, batch_size=8, epochs=2, verbose=0), layouts=tfpar.LayoutMap(rules)
    )
