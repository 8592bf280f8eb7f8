"""The models of keras.applications, at the smallest images they take."""

from __future__ import annotations

import functools

import keras

from model_coverage.case import SMALL_RATE, Case

SIZES = (32, 48, 64, 71, 75, 96, 128, 224, 331)
# At 32 by 32 the noise of one device is 1e-4 for B3 and S, the smallest of these, which says nothing; B3 has 9e-12 here.
LARGER = dict.fromkeys(("EfficientNetV2B3", "EfficientNetV2S", "EfficientNetV2M", "EfficientNetV2L"), 64)

# 350 million weights, their slots and gradients on four logical devices in float64 are more than 24 GiB.
SINGLE = ("ConvNeXtXLarge",)


def names() -> list[str]:
    """The model functions, which are the capitalized names."""
    return [name for name in dir(keras.applications) if name[0].isupper()]


@functools.cache
def smallest(name: str) -> int:
    """The smallest height and width that the function takes."""
    for size in SIZES[:-1]:
        try:
            build(name, size)
        except ValueError:
            continue
        return size
    return SIZES[-1]


def build(name: str, size: int, **sizes) -> keras.Model:
    """The model with random weights and four classes."""
    function = getattr(keras.applications, name)
    return function(weights=None, input_shape=(size, size, 3), classes=4, classifier_activation=None, **sizes)


def case(name: str, **sizes) -> Case:
    """The case of a model."""
    size = LARGER.get(name) or smallest(name)  # found by making models, so before the seed is set
    precisions = ("float32",) if name in SINGLE else Case.precisions
    return Case(lambda: build(name, size, **sizes), rate=SMALL_RATE, precisions=precisions)
