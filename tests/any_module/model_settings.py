"""Values without which tiny twins of transformers' models cannot be built or called, and the shapes of their inputs."""

from typing import Any

VOCABULARY, TOKENS, ROWS, IMAGE, IMAGE_TOKEN = 64, 12, 8, 32, 3

DOTS3: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 8,
    "swa_qk_nope_head_dim": 4,
    "swa_v_head_dim": 8,
}
QWEN4: dict[str, Any] = {
    "head_dim": 8,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 4,
    "indexer_compress_ratio": 2,
}

SETTINGS: dict[str, dict[str, Any]] = {
    "beit": {"num_hidden_layers": 4},
    "bit": {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1], "num_groups": 4},
    "bloom": {"n_layer": 4},
    "blt": {
        "encoder_config": {"hidden_size_global": 32},
        "decoder_config": {"hidden_size_global": 32},
        "encoder_hash_byte_group_vocab": 64,
        "patch_size": 4,
    },
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
    },
    "convnext": {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 3, 1], "patch_size": 2},
    "convnextv2": {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 3, 1], "patch_size": 2},
    "dbrx": {
        "n_layers": 4,
        "n_heads": 4,
        "d_model": 32,
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deit": {"architectures": ["DeiTForImageClassification"]},
    "dinov2": {"num_hidden_layers": 4},
    "dinov2_with_registers": {"num_hidden_layers": 4},
    "distilbert": {"dim": 32, "hidden_dim": 64},
    "donut-swin": {"embed_dim": 16, "depths": [1, 3], "num_heads": [2, 4], "window_size": 2, "patch_size": 4},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "dots3_note": {
        "text_config": DOTS3,
        "vision_config": {
            "hidden_size": 32,
            "num_attention_heads": 4,
            "mlp_layer_types": ["dense"] * 4,
            "num_hidden_layers": 4,
            "adapter_in_dim": 32,
            "adapter_out_dim": 32,
        },
        "audio_config": {
            "hidden_size": 32,
            "num_attention_heads": 4,
            "adapter_input_size": 32,
            "adapter_out_dim": 32,
        },
    },
    "dots3_note_text": DOTS3,
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "lfm2_moe": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "marian": {"decoder_vocab_size": VOCABULARY, "decoder_start_token_id": 0},
    "ministral": {"head_dim": 8},
    "mobilebert": {"intra_bottleneck_size": 32, "embedding_size": 32},
    "levit": {
        "architectures": ["LevitForImageClassification"],
        "hidden_sizes": [16, 24, 32],
        "num_attention_heads": [2, 3, 4],
        "depths": [2, 2, 2],
        "key_dim": [8, 8, 8],
        "patch_size": 16,
    },
    "mobilevitv2": {"patch_size": 1, "width_multiplier": 0.25},
    "nemo_speechlm": {
        "text_config": {"hybrid_override_pattern": "ME*E"},
        "audio_config": {
            "diarization_config": {
                "chunk_length": 16,
                "chunk_left_context": 4,
                "chunk_right_context": 4,
                "fifo_length": 4,
                "speaker_cache_update_period": 12,
            }
        },
    },
    # Experts take all tokens: by default they drop some, by what else is in the batch, and jitter.
    "nllb-moe": {"expert_capacity": 4096, "router_jitter_noise": 0.0, "second_expert_policy": "all"},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "neomme": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {"full_attention": {"partial_rotary_factor": 0.5}},
    },
    "perceiver": {
        "architectures": ["PerceiverForImageClassificationLearned"],
        "max_position_embeddings": TOKENS,
        "num_latents": 8,
        "d_latents": 32,
        "num_self_attends_per_block": 4,
    },
    "pp_lcnet": {"scale": 0.25, "class_expand": 32},
    "reformer": {
        "axial_pos_shape": [3, 4],
        "axial_pos_embds_dim": [16, 16],
        "attn_layers": ["local", "lsh"] * 2,
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "num_buckets": 4,
        "hash_seed": 1,
    },
    "qwen4_exp": {"text_config": QWEN4},
    "qwen4_exp_text": QWEN4,
    "regnet": {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 3, 1], "groups_width": 8},
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 3, 1]},
    "swin": {"embed_dim": 16, "depths": [1, 3], "num_heads": [2, 4], "window_size": 2, "patch_size": 4},
    "swinv2": {"embed_dim": 16, "depths": [1, 3], "num_heads": [2, 4], "window_size": 2, "patch_size": 4},
    "switch_transformers": {"expert_capacity": 4096, "router_jitter_noise": 0.0},
    "vibevoice_asr": {
        f"{kind}_tokenizer_encoder_config": {"num_filters": 4, "downsampling_ratios": [2, 2], "depths": [1, 1, 1]}
        for kind in ("acoustic", "semantic")
    },
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "xmod": {"default_language": "en_XX"},
}
"""Values that the defaults of a type leave out, and without which it cannot be built or called."""

WHOLE: dict[str, dict[str, Any]] = {
    # Its attention is of two inputs side by side.
    "zamba": {"attention_hidden_size": 64, "attention_head_dim": 16},
}
"""Values that a twin takes too small."""

SQUARES = ("aya_vision", "cohere2_vision", "deepseek_vl", "gemma3", "got_ocr2", "internvl", "llava", "ovis2")
SQUARES += ("paligemma", "pp_chart2table", "qianfan_ocr", "shieldgemma2", "vipllava")
GRIDS = ("cosmos3_omni", "exaone4_5", "glm46v", "glm4v", "glm4v_moe", "glm_ocr", "glmga", "hyperclovax_vision_v2")
GRIDS += ("lfm3_vl", "minimax_m3_vl", "qwen2_5_omni_thinker", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe")
GRIDS += ("qwen3_omni_moe_thinker", "qwen3_vl", "qwen3_vl_moe")
"""Types whose images are [3, height, width], and patches of a grid."""

FEATURES: dict[str, dict[str, tuple[int, ...]]] = {
    "git": {"pixel_values": (3, IMAGE, IMAGE)},
    "voxtral_realtime": {"input_features": (128, 8 * TOKENS)},
}
"""Shapes of what a row of a type has beside its tokens, without which it cannot be called."""

DRAWING = ("phimoe",)
"""Types that draw experts at random while they train, and not while they are evaluated: they train so here."""
