"""The layers of keras.layers: each stands between a Dense layer, which its gradient has to reach, and a Dense head.

A layer that is missing from the table is tried without arguments on a sequence.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import keras
import numpy as np
from keras import layers

from model_coverage.case import Case, NotComparable

SEQUENCE, IMAGE, VOLUME = (6, 8), (8, 8, 4), (4, 4, 4, 2)
ABSTRACT = {
    "Layer": "a base class",
    "Wrapper": "a base class",
    "Lambda": "a function, no layer of its own",
    "InputLayer": "an input",
    "FlaxLayer": "another framework",
    "JaxLayer": "another framework",
    "TorchModuleWrapper": "another framework",
    "TFSMLayer": "a saved model",
    "Pipeline": "a sequence of preprocessing layers",
    "StringLookup": "text input",
    "TextVectorization": "text input",
    "Hashing": "integers in and out, no gradient",
    "HashedCrossing": "integers in and out, no gradient",
    "IntegerLookup": "integers in and out, no gradient",
    "Discretization": "integers out, no gradient",
    "CategoryEncoding": "integers in, no gradient",
    "MaxNumBoundingBoxes": "bounding boxes, no gradient",
}
RANDOM = {"AugMix", "CutMix", "MixUp", "RandAugment", "Solarization", "Equalization", "AutoContrast"}
MERGING = {"Add", "Average", "Concatenate", "Maximum", "Minimum", "Multiply", "Subtract"}
ATTENTION = {
    "AdditiveAttention": {},
    "Attention": {"use_scale": True},
    "GroupQueryAttention": {"head_dim": 4, "num_query_heads": 4, "num_key_value_heads": 2},
    "MultiHeadAttention": {"num_heads": 4, "key_dim": 4},
}
CELLS = {"GRUCell", "LSTMCell", "SimpleRNNCell"}


def table() -> dict[str, tuple[tuple[int, ...], dict]]:
    """Input shape without the batch, and arguments."""
    found = {
        "Activation": (SEQUENCE, {"activation": "gelu"}),
        "ActivityRegularization": (SEQUENCE, {"l2": 0.01}),
        "BatchNormalization": (IMAGE, {}),
        "Bidirectional": (SEQUENCE, {"layer": layers.LSTM(4, return_sequences=True)}),
        "CenterCrop": (IMAGE, {"height": 4, "width": 4}),
        "ConvLSTM1D": ((4, 6, 4), {"filters": 4, "kernel_size": 3, "padding": "same"}),
        "ConvLSTM2D": ((3, 6, 6, 4), {"filters": 4, "kernel_size": 3, "padding": "same"}),
        "ConvLSTM3D": ((2, 4, 4, 4, 2), {"filters": 4, "kernel_size": 3, "padding": "same"}),
        "Dense": (SEQUENCE, {"units": 8}),
        "EinsumDense": (SEQUENCE, {"equation": "abc,cde->abde", "output_shape": (6, 4, 4), "bias_axes": "de"}),
        "GroupNormalization": (IMAGE, {"groups": 2}),
        # few bins: where they are narrow, float32 divides by small differences of large numbers
        "MelSpectrogram": ((64,), {"fft_length": 16, "sequence_stride": 8, "num_mel_bins": 4}),
        "Normalization": (SEQUENCE, {"mean": 0.5, "variance": 2.0}),
        "Permute": (SEQUENCE, {"dims": (2, 1)}),
        "PReLU": (SEQUENCE, {}),
        "RepeatVector": ((8,), {"n": 3}),
        "Rescaling": (SEQUENCE, {"scale": 0.5}),
        "Reshape": (SEQUENCE, {"target_shape": (4, 12)}),
        "Resizing": (IMAGE, {"height": 4, "width": 6}),
        "RNN": (SEQUENCE, {"cell": layers.GRUCell(4)}),
        "SpectralNormalization": (SEQUENCE, {"layer": layers.Dense(8)}),
        "StackedRNNCells": (SEQUENCE, {"cells": [layers.LSTMCell(4), layers.LSTMCell(4)]}),
        "STFTSpectrogram": ((64, 1), {"frame_length": 16, "frame_step": 8, "fft_length": 16}),
        "TimeDistributed": (SEQUENCE, {"layer": layers.Dense(4)}),
        "UnitNormalization": (SEQUENCE, {}),
    }
    for cell in ("GRU", "LSTM", "SimpleRNN"):
        found[cell] = (SEQUENCE, {"units": 4, "return_sequences": True})
        found[f"{cell}Cell"] = (SEQUENCE, {"units": 4})
    for rank, shape in enumerate((SEQUENCE, IMAGE, VOLUME), 1):
        convolution = (shape, {"filters": 4, "kernel_size": 3, "padding": "same"})
        for kind in ("Conv", "Convolution"):
            found |= {f"{kind}{rank}D": convolution, f"{kind}{rank}DTranspose": convolution}
            found[f"Separable{kind}{rank}D"] = convolution
        found[f"DepthwiseConv{rank}D"] = (shape, {"kernel_size": 3, "padding": "same"})
        for kind in ("Average", "Max"):
            found[f"Adaptive{kind}Pooling{rank}D"] = (shape, {"output_size": 2})
        for kind in ("AveragePooling", "AvgPool", "MaxPool", "MaxPooling"):
            found[f"{kind}{rank}D"] = (shape, {"pool_size": 2})
        for kind in ("Cropping", "UpSampling", "ZeroPadding"):
            found[f"{kind}{rank}D"] = (shape, {})
        for kind in ("AveragePooling", "AvgPool", "MaxPool", "MaxPooling"):
            found[f"Global{kind}{rank}D"] = (shape, {})
        found[f"SpatialDropout{rank}D"] = (shape, {"rate": 0.0})
    found |= {name: (SEQUENCE, {"rate": 0.0}) for name in ("AlphaDropout", "Dropout", "GaussianDropout")}
    return found | {"GaussianNoise": (SEQUENCE, {"stddev": 0.0})}


def names() -> list[str]:
    """Every layer class, once where it has several names."""
    classes: dict[type, str] = {}
    for name in dir(layers):
        member = getattr(layers, name)
        if inspect.isclass(member) and issubclass(member, keras.Layer) and member.__name__ == name:
            classes.setdefault(member, name)
    return list(classes.values())


def case(name: str) -> Case:
    """The case of a layer."""
    if name in ABSTRACT:
        raise NotComparable(f"{ABSTRACT[name]}")
    if name in RANDOM or name.startswith("Random"):
        raise NotComparable("random or without gradient, for images on their way in; no weights")
    if name in ("Embedding", "ReversibleEmbedding"):
        ids = np.random.RandomState(1).randint(0, 8, (12, 6)).astype("int32")
        return Case(lambda: model((6,), lambda x: getattr(layers, name)(8, 4)(x), before=None, dtype="int32"), ids)
    if name in MERGING:
        return Case(lambda: model(SEQUENCE, lambda x: getattr(layers, name)()([x, layers.Dense(8)(x)])))
    if name == "Dot":
        return Case(lambda: model(SEQUENCE, lambda x: layers.Dot(axes=2)([x, layers.Dense(8)(x)])))
    if name in ATTENTION:
        return Case(lambda: model(SEQUENCE, lambda x: attention(name, x)))
    shape = table().get(name, (SEQUENCE, {}))[0]
    return Case(lambda: model(shape, lambda x: made(name)(x)))


def attention(name: str, x: keras.KerasTensor) -> keras.KerasTensor:
    """Attention of the sequence to itself, the layers of one line in the order of their own call."""
    layer = getattr(layers, name)(**ATTENTION[name])
    return layer([x, x]) if name in ("AdditiveAttention", "Attention") else layer(x, x, use_causal_mask=True)


def made(name: str) -> keras.Layer:
    """The layer; a recurrent cell in the layer that runs it."""
    layer = getattr(layers, name)(**table().get(name, (None, {}))[1])
    return layers.RNN(layer) if name in CELLS or name == "StackedRNNCells" else layer


def model(shape: tuple[int, ...], inner: Callable, before: str | None = "before", dtype: str | None = None) -> keras.Model:
    """Dense, the layer, and a head."""
    x = given = keras.Input(shape, dtype=dtype)
    if before:
        x = layers.Dense(shape[-1], name=before)(x)
    x = layers.Flatten()(inner(x))
    return keras.Model(given, layers.Dense(4, name="head")(x))
