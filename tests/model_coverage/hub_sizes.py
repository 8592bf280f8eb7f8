"""Tiny sizes of the backbones of keras_hub: by the name of an argument in `SIZES`, and in `OWN` what one needs beyond.

Backbones that are made from other models are in hub_composed.py.
"""

from __future__ import annotations

from typing import Any

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
    "filter_dim": 32,
}
OPTIONAL = {"max_sequence_length", "image_shape", "top_k", "head_dim"}
# Open sizes of inputs that are not LENGTH.
LENGTHS = {
    ("MoonshineBackbone", "encoder_input_values"): {0: 1024},
    ("SAMBackbone", "boxes"): {0: 1},
    ("SAMBackbone", "masks"): {0: 1, 1: 16, 2: 16},
    # With the token that SAM3 adds they must be as many as a batch's rows: it takes its mask of (batch, boxes) for one of
    # (queries, keys).
    ("SAM3PromptableConceptBackbone", "boxes"): {0: 3},
    ("SAM3PromptableConceptBackbone", "box_labels"): {0: 3},
    ("Gemma3nBackbone", "images"): {0: 1},
    ("Gemma3nBackbone", "input_features"): {0: 1, 1: 16},
    ("Gemma3nBackbone", "input_features_mask"): {0: 1, 1: 16},
}
# Integers that are below less than the other token ids.
BELOW = {("SAM3PromptableConceptBackbone", "box_labels"): 2}


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
    "CSPNetBackbone": {
        "stem_filters": 8,
        "stem_kernel_size": 3,
        "stem_strides": 4,  # more than 2 where there is a pooling
        "stackwise_depth": [1, 1],
        "stackwise_strides": [1, 2],
        "stackwise_num_filters": [8, 16],
        "block_type": "dark_block",
        "block_ratio": [0.5],  # a stage of type "csp" gives its blocks one half of the channels
        "stage_type": "csp",
        "stem_pooling": "max",
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
