"""The backbones of keras_hub at tiny sizes, each with the head of its first task that can be built.

Sizes are looked up by the name of a constructor's argument; what a backbone needs beyond that is in `OWN`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import keras
import keras_hub

from model_coverage.case import Case, NotComparable

LENGTH, IMAGE = 8, (32, 32, 3)
SIZES = {
    "vocabulary_size": 16,
    "vocab_size": 16,
    "num_layers": 2,
    "num_layers_enc": 1,
    "num_layers_dec": 1,
    "encoder_num_layers": 1,
    "decoder_num_layers": 1,
    "num_heads": 4,
    "num_attention_heads": 4,
    "num_query_heads": 4,
    "num_key_value_heads": 2,
    "encoder_num_heads": 4,
    "decoder_num_heads": 4,
    "head_dim": 8,
    "head_size": 8,
    "hidden_dim": 32,
    "hidden_size": 32,
    "embedding_dim": 16,
    "intermediate_dim": 64,
    "mlp_dim": 64,
    "moe_intermediate_dim": 32,
    "shared_expert_intermediate_dim": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "top_k": 2,
    "max_sequence_length": LENGTH,
    "image_shape": IMAGE,
    "patch_size": 8,
    "filter_dim": 16,
}
OPTIONAL = {"max_sequence_length", "image_shape", "top_k", "head_dim"}
# Open sizes of inputs that are not LENGTH.
LENGTHS = {("MoonshineBackbone", "encoder_input_values"): {0: 1024}}
ABSTRACT = {"Backbone", "FeaturePyramidBackbone"}
TASKS = ("TextClassifier", "ImageClassifier", "CausalLM", "Seq2SeqLM", "MaskedLM", "ImageSegmenter", "ImageToImage")


def resnet(image_shape: tuple[int | None, ...] = (64, 64, 3)) -> keras.Model:
    """A tiny image encoder for the backbones that take one."""
    return keras_hub.models.ResNetBackbone(**RESNET, image_shape=image_shape)


RESNET = {
    "input_conv_filters": [64],
    "input_conv_kernel_sizes": [3],
    "stackwise_num_filters": [64, 64, 64, 64],  # the first must be 64
    "stackwise_num_blocks": [1, 1, 1, 1],
    "stackwise_num_strides": [1, 2, 2, 2],
    "block_type": "basic_block",
}
T5GEMMA = {
    f"{part}_{name}": value
    for part in ("encoder", "decoder")
    for name, value in {
        "hidden_dim": 32,
        "intermediate_dim": 64,
        "num_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "layer_types": ["full_attention"],
    }.items()
}
SMOLLM = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rope_layer_enabled_list": [True, True],
    "layer_types": ["full_attention"] * 2,
    "mlp_bias": False,
    "layer_norm_epsilon": 1e-6,
    "max_position_embeddings": LENGTH,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 1.0,
}
MOBILENET = {
    "stackwise_expansion": [[8], [16, 16]],
    "stackwise_num_blocks": [1, 2],
    "stackwise_num_filters": [[8], [16, 16]],
    "stackwise_kernel_size": [[3], [3, 5]],
    "stackwise_num_strides": [[2], [2, 1]],
    "stackwise_se_ratio": [[0.25], [None, 0.25]],
    "stackwise_activation": [["relu"], ["hard_swish", "hard_swish"]],
    "stackwise_padding": [[1], [1, 2]],
    "output_num_filters": 32,
    "depthwise_filters": 8,
    "depthwise_stride": 2,
    "depthwise_residual": False,
    "last_layer_filter": 16,
    "input_activation": "relu",
}
EFFICIENTNET = {
    "stackwise_kernel_sizes": [3, 3],
    "stackwise_num_repeats": [1, 2],
    "stackwise_input_filters": [8, 8],
    "stackwise_output_filters": [8, 16],
    "stackwise_expansion_ratios": [1, 4],
    "stackwise_squeeze_and_excite_ratios": [0.25, 0.25],
    "stackwise_strides": [1, 2],
    "stackwise_block_types": ["v1", "unfused"],
    "stackwise_width_coefficients": [1.0, 1.0],
    "stackwise_depth_coefficients": [1.0, 1.0],
    "stackwise_force_input_filters": [0, 0],
    "stackwise_nores_option": [False, False],
    "input_shape": IMAGE,
    "num_features": 32,
}
OWN: dict[str, Any] = {
    "AlbertBackbone": {"num_groups": 1},
    "BASNetBackbone": lambda: {
        "image_encoder": resnet((None, None, 3)),
        "num_classes": 2,
        "image_shape": (64, 64, 3),
    },
    "CSPNetBackbone": {
        "stem_filters": 8,
        "stem_kernel_size": 3,
        "stem_strides": 2,
        "stackwise_depth": [1, 1],
        "stackwise_strides": [1, 2],
        "stackwise_num_filters": [8, 16],
        "block_type": "dark_block",
        "stage_type": "csp",
        "stem_pooling": "max",
    },
    "DeepLabV3Backbone": lambda: {
        "image_encoder": resnet(),
        "spatial_pyramid_pooling_key": "P4",
        "upsampling_size": 8,
        "dilation_rates": [2, 4],
        "image_shape": (64, 64, 3),
    },
    "DenseNetBackbone": {"stackwise_num_repeats": [1, 2], "growth_rate": 8},
    "DINOV2Backbone": {"position_embedding_shape": IMAGE},
    "EfficientNetBackbone": EFFICIENTNET,
    "GemmaBackbone": {},
    "Gemma3Backbone": {"image_size": 16},
    "Gemma4Backbone": {"image_size": 16, "sliding_window_pattern": 2},
    "HGNetV2Backbone": {
        "depths": [1, 1],
        "embedding_size": 8,
        "hidden_sizes": [16, 16],
        "stem_channels": [3, 8, 8],
        "hidden_act": "relu",
        "use_learnable_affine_block": False,
        "stackwise_stage_filters": [[8, 8, 16, 1, 2, 3], [16, 8, 16, 1, 2, 3]],
        "apply_downsample": [False, True],
        "use_lightweight_conv_block": [False, True],
        "image_shape": IMAGE,
    },
    "MiTBackbone": {
        "layerwise_depths": [1, 1],
        "num_layers": 2,
        "layerwise_num_heads": [2, 4],
        "layerwise_sr_ratios": [2, 1],
        "max_drop_path_rate": 0.0,
        "layerwise_patch_sizes": [7, 3],
        "layerwise_strides": [4, 2],
        "hidden_dims": [16, 32],
    },
    "MobileNetBackbone": MOBILENET,
    "PaliGemmaBackbone": {
        "image_size": 16,
        "vit_patch_size": 8,
        "vit_num_heads": 4,
        "vit_hidden_dim": 16,
        "vit_num_layers": 1,
        "vit_intermediate_dim": 32,
    },
    "ResNetBackbone": RESNET,
    "RetinaNetBackbone": lambda: {
        "image_encoder": resnet(),
        "min_level": 3,
        "max_level": 4,
        "use_p5": False,
        "image_shape": (64, 64, 3),
    },
    "SegFormerBackbone": lambda: {
        "image_encoder": keras_hub.models.MiTBackbone(**OWN["MiTBackbone"], image_shape=IMAGE),
        "projection_filters": 16,
    },
    "SmolLMBackbone": SMOLLM,
    "SmolLM3Backbone": SMOLLM,
    "SwinTransformerBackbone": {
        "embed_dim": 16,
        "depths": [1, 1],
        "num_heads": [2, 4],
        "window_size": 4,
        "patch_size": 4,
        "drop_path": 0.0,
    },
    "T5GemmaBackbone": T5GEMMA,
    "T5Gemma2Backbone": T5GEMMA,
    "VGGBackbone": {"stackwise_num_repeats": [1, 1], "stackwise_num_filters": [8, 16]},
    "ViTDetBackbone": {"global_attention_layer_indices": [1], "window_size": 2, "num_output_channels": 16},
    "VideoPrismBackbone": {
        "num_frames": 2,
        "num_spatial_layers": 1,
        "num_temporal_layers": 1,
        "num_auxiliary_layers": 0,
    },
    "WhisperBackbone": {"num_mels": 8, "max_encoder_sequence_length": 16, "max_decoder_sequence_length": LENGTH},
    "XceptionBackbone": {"stackwise_conv_filters": [[8, 8], [16, 16]], "stackwise_pooling": [True, False]},
    "Qwen3MoeBackbone": {"top_k": 2},
    "Qwen3_5Backbone": {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "FluxBackbone": {
        "input_channels": 16,
        "mlp_ratio": 2.0,
        "depth": 1,
        "depth_single_blocks": 1,
        "axes_dim": [2, 2, 4],
        "theta": 10000,
        "use_bias": True,
        "image_shape": (8, 16),
        "text_shape": (8, 16),
        "image_ids_shape": (8, 3),
        "text_ids_shape": (8, 3),
        "y_shape": (16,),
    },
    "RWKV7Backbone": {"gate_lora": 8, "mv_lora": 8, "aaa_lora": 8, "decay_lora": 8},
}
OWN["Qwen3_5MoeBackbone"] = OWN["Qwen3_5Backbone"]
OWN["PARSeqBackbone"] = lambda: {
    "image_encoder": keras_hub.models.ViTBackbone(
        image_shape=IMAGE, patch_size=8, num_layers=1, num_heads=4, hidden_dim=32, mlp_dim=64, use_class_token=False
    ),
    "max_label_length": LENGTH,
    "decoder_hidden_dim": 32,
    "num_decoder_layers": 1,
    "num_decoder_heads": 4,
    "decoder_mlp_dim": 64,
}
TEXT = {name: SIZES[name] for name in ("vocabulary_size", "num_layers", "num_heads", "intermediate_dim")}
VISION = {name: SIZES[name] for name in ("patch_size", "num_layers", "num_heads", "intermediate_dim", "image_shape")}
for _name in ("CLIP", "MetaCLIP2"):
    OWN[f"{_name}Backbone"] = lambda name=_name: {
        "vision_encoder": getattr(keras_hub.models, f"{name}VisionEncoder")(**VISION, hidden_dim=32),
        "text_encoder": getattr(keras_hub.models, f"{name}TextEncoder")(
            **TEXT, embedding_dim=32, hidden_dim=32, max_sequence_length=LENGTH
        ),
        "projection_dim": 16,
    }
OWN["SigLIPBackbone"] = lambda: {
    "vision_encoder": keras_hub.models.SigLIPVisionEncoder(**VISION, hidden_dim=32),
    "text_encoder": keras_hub.models.SigLIPTextEncoder(
        **TEXT, embedding_dim=32, hidden_dim=32, max_sequence_length=LENGTH, projection_dim=32
    ),
}
BLIP2 = {"num_heads": 4, "num_layers": 1, "hidden_dim": 32, "intermediate_dim": 64}
BLIP2_QUERIES = {"num_query_tokens": 4, "dropout": 0.0}
OWN["BLIP2Backbone"] = lambda: {
    "vision_encoder": keras_hub.models.BLIP2VisionEncoder(
        **BLIP2,
        **{f"use_{name}": True for name in ("patch_bias", "class_token", "mha_bias", "mlp_bias")},
        image_size=16,
        patch_size=8,
        dropout_rate=0.0,
        layer_norm_epsilon=1e-6,
        initializer_range=0.02,
    ),
    "qformer": keras_hub.models.BLIP2QFormer(
        **BLIP2, **BLIP2_QUERIES, vision_dim=32, cross_attention_frequency=1, layer_norm_epsilon=1e-6
    ),
    "language_model": keras_hub.models.BLIP2CustomOPT(
        **BLIP2, **BLIP2_QUERIES, vocabulary_size=16, max_sequence_length=16, qformer_hidden_dim=32
    ),
}
OWN["SAMBackbone"] = lambda: {
    "image_encoder": keras_hub.models.ViTDetBackbone(
        **{name: value for name, value in VISION.items() if name != "image_shape"},
        **OWN["ViTDetBackbone"],
        hidden_size=16,
        image_shape=IMAGE,
    ),
    "prompt_encoder": keras_hub.layers.SAMPromptEncoder(
        hidden_size=16, image_embedding_size=(4, 4), input_image_size=IMAGE[:2], mask_in_channels=8
    ),
    "mask_decoder": keras_hub.layers.SAMMaskDecoder(
        num_layers=1, hidden_size=16, intermediate_dim=32, num_heads=4, embedding_dim=16, iou_head_hidden_dim=16
    ),
}
OWN["DepthAnythingBackbone"] = lambda: {
    "image_encoder": keras_hub.models.DINOV2Backbone(**VISION, hidden_dim=32, position_embedding_shape=IMAGE),
    "reassemble_factors": [4, 2, 1, 0.5],
    "neck_hidden_dims": [8, 8, 16, 16],
    "fusion_hidden_dim": 16,
    "head_hidden_dim": 8,
    "head_in_index": -1,
    "feature_keys": ["stage1", "stage1", "stage2", "stage2"],
}
OWN["MobileNetV5Backbone"] = (
    {
        "stackwise_block_types": [["er"], ["uir", "uir"]],
        "stackwise_num_blocks": [1, 2],
        "use_msfa": False,
        "num_features": 16,
    }
    | {
        f"stackwise_{key}": [[first], [second, second]]
        for key, first, second in (
            ("num_filters", 8, 16),
            ("act_layers", "relu", "relu"),
            ("exp_ratios", 4.0, 2.0),
            ("se_ratios", 0.0, 0.0),
            ("dw_kernel_sizes", 0, 3),
            ("dw_start_kernel_sizes", 0, 0),
            ("dw_end_kernel_sizes", 0, 0),
            ("exp_kernel_sizes", 3, 0),
            ("pw_kernel_sizes", 1, 0),
            ("num_heads", 0, 0),
            ("key_dims", 0, 0),
            ("value_dims", 0, 0),
            ("kv_strides", 0, 0),
            ("use_cpe", False, False),
        )
    }
    | {"stackwise_strides": [[2], [2, 1]]}
)


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
    own = OWN.get(name, {})
    own = own() if callable(own) else own
    parameters = inspect.signature(getattr(keras_hub.models, name).__init__).parameters.values()
    arguments = dict(own)
    for parameter in parameters:
        needed = parameter.default is parameter.empty and parameter.kind == parameter.POSITIONAL_OR_KEYWORD
        if (needed or parameter.name in OPTIONAL) and parameter.name in SIZES:
            arguments.setdefault(parameter.name, SIZES[parameter.name])
        elif needed and parameter.name not in (*own, "self"):
            raise NotComparable(f"no tiny size yet: hub_cases.py has no {parameter.name!r}")
    return getattr(keras_hub.models, name)(**arguments)


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


def case(name: str) -> Case:
    """The case of a backbone."""
    return Case(lambda: build(name))
