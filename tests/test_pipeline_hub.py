"""KerasHub's GPT-2 and BERT in stages: nested backbones, shared embeddings, padding masks."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from parity import assert_close, train

import tfpar

hub = pytest.importorskip("keras_hub")
pytestmark = pytest.mark.usefixtures("float64")

SIZES = {"vocabulary_size": 24, "num_layers": 2, "num_heads": 2, "hidden_dim": 8, "intermediate_dim": 16, "dropout": 0.0}
RNG = np.random.RandomState(0)
IDS = RNG.randint(1, 24, (8, 6))
PADDING = np.arange(6) < RNG.randint(2, 7, (8, 1))


def gpt2() -> keras.Model:
    """A language model whose output head is its embedding."""
    model = hub.models.GPT2CausalLM(hub.models.GPT2Backbone(**SIZES, max_sequence_length=6), preprocessor=None)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, weighted_metrics=["accuracy"])
    return model


def bert() -> keras.Model:
    """A classifier of the first token."""
    backbone = hub.models.BertBackbone(**SIZES, max_sequence_length=6)
    model = hub.models.BertTextClassifier(backbone, num_classes=3, preprocessor=None, dropout=0.0)
    model.compile(keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


CASES = {
    "gpt2": (gpt2, ({"token_ids": IDS, "padding_mask": PADDING}, np.roll(IDS, -1, 1), PADDING.astype("float64"))),
    "bert": (bert, ({"token_ids": IDS, "segment_ids": IDS * 0, "padding_mask": PADDING}, IDS[:, 0] % 3)),
}


@pytest.mark.parametrize(
    ("name", "mesh"), [("gpt2", "pipe=2,data=2,model=2"), pytest.param("bert", "pipe=2", marks=pytest.mark.long)]
)
def test_model(name, mesh):
    build, data = CASES[name]

    def fit(model):
        return model.fit(*data[:2], sample_weight=data[2] if len(data) > 2 else None, batch_size=8, epochs=5, verbose=0)

    strategy = tfpar.HybridStrategy(mesh, microbatches=2)
    one, many = train(None, build, fit), train(strategy, build, fit)
    for stage in strategy.trainer.pipeline.stages(many.model):
        assert any("backbone/transformer_layer" in call.path for call in stage.part.calls)
    for path, weight in one.weights.items():
        assert_close(weight, many.weights[path], what=path)
    assert_close(one.history, many.history)
