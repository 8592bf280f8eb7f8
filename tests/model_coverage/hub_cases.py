"""The backbones of keras_hub at tiny sizes, each with the head of its first task that can be built."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import keras
import keras_hub

from model_coverage.case import SMALL_RATE, Case, NotComparable, random_inputs
from model_coverage.hub_composed import COMPOSED, READY
from model_coverage.hub_sizes import BELOW, LENGTH, LENGTHS, OPTIONAL, OWN, SIZES

SMALL_STEPS = ("Gemma3nBackbone", "SAM3PromptableConceptBackbone", "StableDiffusion3Backbone")
ABSTRACT = {"Backbone", "FeaturePyramidBackbone"}
TASKS = ("TextClassifier", "ImageClassifier", "CausalLM", "Seq2SeqLM", "MaskedLM", "ImageSegmenter", "ImageToImage")


def names() -> list[str]:
    """Every backbone, once where it has several names."""
    classes: dict[type, str] = {}
    for name in dir(keras_hub.models):
        if name.endswith("Backbone") and name not in ABSTRACT:
            member = getattr(keras_hub.models, name)
            if member not in classes or member.__name__ == name:
                classes[member] = name
    return sorted(classes.values())


def backbone(name: str) -> keras.Model:
    """The backbone at its tiny size."""
    own = COMPOSED[name]() if name in COMPOSED else OWN.get(name, {})
    parameters = inspect.signature(getattr(keras_hub.models, name).__init__).parameters.values()
    arguments = dict(own)
    for parameter in parameters:
        needed = parameter.default is parameter.empty and parameter.kind == parameter.POSITIONAL_OR_KEYWORD
        if (needed or parameter.name in OPTIONAL) and parameter.name in SIZES:
            arguments.setdefault(parameter.name, SIZES[parameter.name])
        elif needed and parameter.name not in (*own, "self"):
            raise NotComparable(f"no tiny size yet: hub_sizes.py has no {parameter.name!r}")
    model = getattr(keras_hub.models, name)(**arguments)
    READY.get(name, lambda _: None)(model)
    return model


def tasks(name: str) -> list[str]:
    """Tasks of a backbone, in the order in which they are tried."""
    cls = getattr(keras_hub.models, name)
    found = [task for task in dir(keras_hub.models) if getattr(getattr(keras_hub.models, task), "backbone_cls", None) is cls]
    found = [task for task in found if not task.endswith("Preprocessor")]
    return sorted(found, key=lambda task: next((i for i, kind in enumerate(TASKS) if task.endswith(kind)), len(TASKS)))


def heads(name: str) -> Iterator[Callable[[], keras.Model]]:
    """Makers of the backbone's tasks, and of the backbone alone."""
    for task in tasks(name):
        cls = getattr(keras_hub.models, task)
        classes = {"num_classes": 4} if "num_classes" in inspect.signature(cls).parameters else {}
        yield lambda cls=cls, classes=classes: cls(backbone=backbone(name), preprocessor=None, **classes)
    yield lambda: backbone(name)


def build(name: str) -> keras.Model:
    """The first of them that can be built on inputs of known sizes, with its float outputs only."""
    for head in heads(name):
        try:
            inner = head()
            inputs = keras.tree.map_structure(lambda tensor: sized(name, tensor), inner.input)
            outputs = [t for t in keras.tree.flatten(inner(inputs)) if "float" in t.dtype]
            return keras.Model(inputs, outputs[0] if len(outputs) == 1 else outputs, name=type(inner).__name__)
        except (TypeError, ValueError, AttributeError) as error:
            failure = error
    raise failure


def sized(name: str, tensor: keras.KerasTensor) -> keras.KerasTensor:
    """An input like the tensor, with a number for each size that is open."""
    own = LENGTHS.get((name, tensor.name), {})
    whole = [own.get(dim, LENGTH) if size is None else size for dim, size in enumerate(tensor.shape[1:])]
    return keras.Input(whole, dtype=tensor.dtype, name=tensor.name)


def inputs(name: str, model: keras.Model) -> Any:
    """Arrays for the model's inputs."""
    arrays = random_inputs(model, Case.ids)
    for (owner, key), limit in BELOW.items():
        if owner == name:
            arrays[key] %= limit
    return arrays


def case(name: str) -> Case:
    """The case of a backbone."""
    rate = SMALL_RATE if name in SMALL_STEPS else Case.rate
    return Case(lambda: build(name), lambda model: inputs(name, model), rate=rate)
