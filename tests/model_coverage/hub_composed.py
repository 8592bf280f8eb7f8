"""Tiny sizes of the backbones of keras_hub that are made from other models: functions that make their arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import keras_hub
from keras_hub.src.models.stable_diffusion_3.t5_encoder import T5Encoder  # exported nowhere
from keras_hub.src.models.vae.vae_backbone import VAEBackbone

from model_coverage.hub_sizes import IMAGE, LENGTH, OWN, RESNET, SIZES

COMPOSED: dict[str, Callable[[], dict[str, Any]]] = {}


def resnet(image_shape: tuple[int | None, ...] = (64, 64, 3), **sizes: Any) -> keras.Model:
    """A tiny image encoder for the backbones that take one."""
    return keras_hub.models.ResNetBackbone(**RESNET | sizes, image_shape=image_shape)


COMPOSED["BASNetBackbone"] = lambda: {
    "image_encoder": resnet(
        (None, None, 3), block_type="bottleneck_block", input_conv_filters=[8], stackwise_num_filters=[64, 8, 8, 8]
    ),
    "num_classes": 2,
    "projection_filters": 8,  # those of the encoder's first convolution; the decoder has eight times as many
    "image_shape": (64, 64, 3),
}
COMPOSED["DeepLabV3Backbone"] = lambda: {
    "image_encoder": resnet(),
    "spatial_pyramid_pooling_key": "P4",
    "upsampling_size": 8,
    "dilation_rates": [2, 4],
    "image_shape": (64, 64, 3),
}
COMPOSED["RetinaNetBackbone"] = lambda: {
    "image_encoder": resnet(),
    "min_level": 3,
    "max_level": 4,
    "use_p5": False,
    "image_shape": (64, 64, 3),
}
COMPOSED["SegFormerBackbone"] = lambda: {
    "image_encoder": keras_hub.models.MiTBackbone(**OWN["MiTBackbone"], image_shape=IMAGE),
    "projection_filters": 16,
}
COMPOSED["PARSeqBackbone"] = lambda: {
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
    COMPOSED[f"{_name}Backbone"] = lambda name=_name: {
        "vision_encoder": getattr(keras_hub.models, f"{name}VisionEncoder")(**VISION, hidden_dim=32),
        "text_encoder": getattr(keras_hub.models, f"{name}TextEncoder")(
            **TEXT, embedding_dim=32, hidden_dim=32, max_sequence_length=LENGTH
        ),
        "projection_dim": 16,
    }
COMPOSED["SigLIPBackbone"] = lambda: {
    "vision_encoder": keras_hub.models.SigLIPVisionEncoder(**VISION, hidden_dim=32),
    "text_encoder": keras_hub.models.SigLIPTextEncoder(
        **TEXT, embedding_dim=32, hidden_dim=32, max_sequence_length=LENGTH, projection_dim=32
    ),
}
BLIP2 = {"num_heads": 4, "num_layers": 1, "hidden_dim": 32, "intermediate_dim": 64}
BLIP2_QUERIES = {"num_query_tokens": 4, "dropout": 0.0}
COMPOSED["BLIP2Backbone"] = lambda: {
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
COMPOSED["SAMBackbone"] = lambda: {
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
COMPOSED["DepthAnythingBackbone"] = lambda: {
    "image_encoder": keras_hub.models.DINOV2Backbone(
        **VISION | {"num_layers": 4, "patch_size": 4}, hidden_dim=32, position_embedding_shape=IMAGE
    ),
    "reassemble_factors": [4, 2, 1, 0.5],  # one for each layer of the encoder
    "neck_hidden_dims": [8, 8, 16, 16],
    "fusion_hidden_dim": 16,
    "head_hidden_dim": 8,
    "head_in_index": -1,
    "feature_keys": ["stage1", "stage2", "stage3", "stage4"],
}
COMPOSED["DFineBackbone"] = lambda: {
    "backbone": keras_hub.models.HGNetV2Backbone(
        **OWN["HGNetV2Backbone"]
        | {
            "depths": [1, 1, 1, 1],
            "hidden_sizes": [16, 16, 16, 16],
            "stackwise_stage_filters": [[8, 8, 16, 1, 2, 3]] + [[16, 8, 16, 1, 2, 3]] * 3,
            "apply_downsample": [False, True, True, True],
            "use_lightweight_conv_block": [False, False, True, True],
            "image_shape": (64, 64, 3),
            "out_features": ["stage3", "stage4"],
        }
    ),
    "encoder_in_channels": [16, 16],
    "decoder_in_channels": [16, 16],
    "encoder_hidden_dim": 16,
    "hidden_dim": 16,
    "num_labels": 4,
    "num_denoising": 0,
    "learn_initial_query": False,
    "num_queries": 8,
    "anchor_image_size": (64, 64),
    "feat_strides": [16, 32],
    "num_feature_levels": 2,
    "encode_proj_layers": [1],
    "encoder_ffn_dim": 32,
    "num_encoder_layers": 1,
    "hidden_expansion": 1.0,
    "depth_multiplier": 0.5,
    "eval_idx": -1,
    "num_decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 32,
    "decoder_n_points": [2, 2],
    "lqe_hidden_dim": 16,
    "num_lqe_layers": 2,
    "image_shape": (64, 64, 3),
}
CLIP_TEXT = TEXT | {"embedding_dim": 32, "hidden_dim": 32, "max_sequence_length": LENGTH, "intermediate_output_index": -2}
COMPOSED["StableDiffusion3Backbone"] = lambda: {
    "mmdit_patch_size": 2,
    "mmdit_hidden_dim": 32,
    "mmdit_num_layers": 2,
    "mmdit_num_heads": 4,
    "mmdit_position_size": 4,
    "mmdit_qk_norm": "rms_norm",
    "mmdit_dual_attention_indices": (0,),
    "vae": VAEBackbone(
        **{f"{part}_num_filters": [32] * 4 for part in ("encoder", "decoder")},  # groups of 32 are normalized
        **{f"{part}_num_blocks": [1] * 4 for part in ("encoder", "decoder")},
        sampler_method="mode",
        sample_channels=8,
    ),
    "clip_l": keras_hub.models.CLIPTextEncoder(**CLIP_TEXT, name="clip_l"),
    "clip_g": keras_hub.models.CLIPTextEncoder(**CLIP_TEXT, name="clip_g"),
    "t5": T5Encoder(**TEXT, hidden_dim=64),  # as wide as both encoders of CLIP together
    "latent_channels": 4,
    "image_shape": IMAGE,
}
# What a model needs before its first step: its noise levels are else made while a step is traced, which fails.
READY = {"StableDiffusion3Backbone": lambda model: model.configure_scheduler(4)}
DETR = {"num_heads": 4, "hidden_dim": 32, "intermediate_dim": 64}
COMPOSED["SAM3PromptableConceptBackbone"] = lambda: {
    "vision_encoder": keras_hub.layers.SAM3VisionEncoder(
        **VISION,
        hidden_dim=32,
        fpn_hidden_dim=32,
        fpn_scale_factors=[4.0, 2.0, 1.0, 0.5],
        pretrain_image_shape=(16, 16, 3),
        window_size=2,
        global_attn_indexes=[1],
    ),
    "text_encoder": keras_hub.layers.SAM3TextEncoder(**TEXT, embedding_dim=32, hidden_dim=32, max_sequence_length=LENGTH),
    "geometry_encoder": keras_hub.layers.SAM3GeometryEncoder(**DETR, num_layers=1, roi_size=3),
    "detr_encoder": keras_hub.layers.SAM3DetrEncoder(**DETR, num_layers=1),
    # KerasHub declares its masks as many as the hidden size, though they are as many as the queries.
    "detr_decoder": keras_hub.layers.SAM3DetrDecoder(
        **DETR, num_layers=2, num_queries=DETR["hidden_dim"], image_shape=IMAGE, patch_size=SIZES["patch_size"]
    ),
    "mask_decoder": keras_hub.layers.SAM3MaskDecoder(num_upsampling_stages=3, hidden_dim=32, num_heads=4),
}
AUDIO = {
    "hidden_size": 16,
    "input_feat_size": 16,
    "sscp_conv_channel_size": [4, 8],
    "sscp_conv_kernel_size": [(3, 3), (3, 3)],
    "sscp_conv_stride_size": [(2, 2), (2, 2)],
    "sscp_conv_group_norm_eps": 1e-5,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-6,
    "gradient_clipping": 1.0,
    "residual_weight": 0.5,
    "num_attention_heads": 4,
    "attention_chunk_size": 4,
    "num_attention_context_right": 0,
    "num_attention_context_left": 5,
    "attention_logit_cap": 50.0,
    "conv_kernel_size": 5,
    "reduction_factor": 1,
}
# Some of the ids below 8 stand for images and for sounds, so that their encoders have gradients.
COMPOSED["Gemma3nBackbone"] = lambda: {
    "text_vocab_size": 16,
    "text_hidden_size": 32,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": [64, 64],
    "hidden_activation": "gelu_approximate",
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 4,
    "rope_theta": 10000.0,
    "max_position_embeddings": LENGTH,
    "vocab_size_per_layer_input": 16,
    "hidden_size_per_layer_input": 4,
    "altup_num_inputs": 2,
    "laurel_rank": 4,
    "vision_encoder_config": keras_hub.models.MobileNetV5Backbone(
        **OWN["MobileNetV5Backbone"], image_shape=IMAGE
    ).get_config(),
    "vision_hidden_size": 16,
    "vision_vocab_size": 4,
    "vision_vocab_offset": 16,
    "vision_soft_tokens_per_image": 16,
    "image_token_id": 3,
    "audio_encoder_config": AUDIO,
    "audio_hidden_size": 16,
    "audio_vocab_size": 4,
    "audio_vocab_offset": 20,
    "audio_soft_tokens_per_image": 4,
    "audio_token_id": 5,
}
