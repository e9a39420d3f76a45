"""Tables of Hugging Face config.json: model types, keys and defaults.

Defaults of missing keys are those of transformers 5.17
(`models/gemma4/configuration_gemma4.py` and
`models/gemma4_unified/configuration_gemma4_unified.py`).
"""

from __future__ import annotations

from typing import Any

from .parts import FULL, SLIDING, Audio, UnifiedAudio, UnifiedVision, Vision

# config model_type -> (model_type of the spec, whether the file is a composite with towers)
MODEL_TYPES = {
    "gemma4": ("gemma4", True),
    "gemma4_text": ("gemma4", False),
    "gemma4_unified": ("gemma4_unified", True),
    "gemma4_unified_text": ("gemma4_unified", False),
    "gemma4_assistant": ("gemma4_assistant", True),
    "gemma4_unified_assistant": ("gemma4_unified_assistant", True),
}
ARCHITECTURES = {
    ("gemma4", True): "Gemma4ForConditionalGeneration",
    ("gemma4", False): "Gemma4ForCausalLM",
    ("gemma4_unified", True): "Gemma4UnifiedForConditionalGeneration",
    ("gemma4_unified", False): "Gemma4UnifiedForCausalLM",
    ("gemma4_assistant", True): "Gemma4AssistantForCausalLM",
    ("gemma4_unified_assistant", True): "Gemma4UnifiedAssistantForCausalLM",
}
KINDS = {"sliding_attention": SLIDING, "full_attention": FULL}
HF_KINDS = {kind: name for name, kind in KINDS.items()}

# Keys that change no value of the forward pass: bookkeeping, training, and generation settings
# that transformers itself drops when it loads a config.
_HOUSEKEEPING = """
    _name_or_path name_or_path _commit_hash architectures transformers_version auto_map
    initializer_range use_cache attention_dropout id2label label2id num_labels problem_type
    output_attentions output_hidden_states return_dict return_dict_in_generate output_scores
    _attn_implementation _attn_implementation_autoset attn_implementation cache_implementation
    _experts_implementation experts_implementation finetuning_task task_specific_params
    tokenizer_class torchscript use_bfloat16 tf_legacy_loss prefix sep_token_id
    decoder_start_token_id forced_bos_token_id forced_eos_token_id suppress_tokens
    begin_suppress_tokens bad_words_ids max_length min_length max_new_tokens do_sample
    early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p
    repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
    num_return_sequences exponential_decay_length_penalty remove_invalid_values
    unsloth_fixed unsloth_version
"""
HOUSEKEEPING = frozenset(_HOUSEKEEPING.split())
# Keys that are known, and legal only with a value that means "nothing".
NEUTRAL = (
    "is_encoder_decoder",
    "is_decoder",
    "add_cross_attention",
    "cross_attention_hidden_size",
    "chunk_size_feed_forward",
    "pruned_heads",
    "tie_encoder_decoder",
    "quantization_config",  # of a part; that of the whole is read with the weights
    "attention_bias",
    "attn_logit_softcapping",
)
NOTHING: tuple[Any, ...] = (None, False, 0, 0.0, {}, [], "")

TEXT_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_attention_heads": 8,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "final_logit_softcapping": None,
}
BY_MODEL: dict[str, dict[str, Any]] = {
    "gemma4": {
        "max_position_embeddings": 131072,
        "sliding_window": 512,
        "use_bidirectional_attention": None,
    },
    "gemma4_unified": {
        "max_position_embeddings": 262144,
        "sliding_window": 1024,
        "use_bidirectional_attention": "vision",
    },
}
ROPE_DEFAULTS: dict[str, dict[str, Any]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
# HF defaults of the fields that the dataclass itself leaves without one
PART_DEFAULTS: dict[type, dict[str, Any]] = {
    Vision: {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 16,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "head_dim": 64,
        "patch_size": 16,
        "pooling_kernel_size": 3,
        "position_embedding_size": 10240,
    },
    Audio: {
        "hidden_size": 1024,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "output_proj_dims": 1536,
    },
    UnifiedVision: {"mm_embed_dim": 3840, "mm_posemb_size": 1120},
    UnifiedAudio: {"audio_embed_dim": 640},
}
PART_TYPES: dict[type, str] = {
    Vision: "gemma4_vision",
    Audio: "gemma4_audio",
    UnifiedVision: "gemma4_unified_vision",
    UnifiedAudio: "gemma4_unified_audio",
}
# field of Tokens -> its key in a composite config, older spellings after it, and the default
MEDIA: dict[str, tuple[tuple[str, ...], int]] = {
    "image": (("image_token_id",), 258880),
    "video": (("video_token_id",), 258884),
    "audio": (("audio_token_id",), 258881),
    "boi": (("boi_token_id",), 255999),
    "eoi": (("eoi_token_id",), 258882),
    "boa": (("boa_token_id",), 256000),
    "eoa": (("eoa_token_index", "eoa_token_id"), 258883),
}
AUDIO_MEDIA = ("audio", "boa", "eoa")

# field of Centroids -> its key and default
CENTROIDS = {"count": ("num_centroids", 2048), "top_k": ("centroid_intermediate_top_k", 32)}

# key path of the spec -> key of the text config, for messages about rules that join fields
HF_NAMES = {
    "text.sliding.head_dim": "head_dim",
    "text.sliding.num_key_value_heads": "num_key_value_heads",
    "text.sliding.window": "sliding_window",
    "text.full.head_dim": "global_head_dim",
    "text.full.num_key_value_heads": "num_global_key_value_heads",
    "text.moe.top_k_experts": "top_k_experts",
    "text.sliding.rope.rotary_fraction": "rope_parameters.sliding_attention",
    "text.full.rope.rotary_fraction": "rope_parameters.full_attention",
    "drafter.centroids.count": "num_centroids",
    "drafter.centroids.top_k": "centroid_intermediate_top_k",
}

# keys of the geometry that kinds of layers share, and defaults
BASE_GEOMETRY = {"head_dim": 256, "num_key_value_heads": 4}
