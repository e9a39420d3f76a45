"""Request fields of other servers (OpenAI, vLLM, SGLang, llama-server, ollama) that are not
implemented here. A field that would change the answer is refused with the way out, unless its value
is neutral; HARMLESS fields change nothing and are ignored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

#: the way out -> field -> neutral values
REFUSED: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "prompt log-probabilities are not served; an engine built with --all-logits returns the logits "
    "of a prompt from session.prefill(tokens, all_logits=True)": {
        "echo": (False,),
        "prompt_logprobs": (False,),
        "logprob_start_len": (-1,),
    },
    "use response_format, structured_outputs, regex or grammar": {
        **dict.fromkeys(("structural_tag", "guided_whitespace_pattern", "guided_decoding"), ()),
        "format": ("",),
        "nvext": ({},),
        "guidance": ({},),
        "grammar_lazy": (False,),
        "grammar_triggers": ([],),
    },
    "use logit_bias, whose keys are token ids": {
        **dict.fromkeys(("bad_words", "banned_tokens", "banned_strings"), ([],)),
        **dict.fromkeys(("allowed_token_ids", "logits_processors", "suppress_tokens"), ([],)),
        **dict.fromkeys(("custom_logit_processor", "custom_params", "vllm_xargs"), ({},)),
    },
    "this sampler is not implemented; temperature, top_k, top_p, min_p and the frequency, presence "
    "and repetition penalties are": {
        **dict.fromkeys(("mirostat", "mirostat_mode", "dry_multiplier", "xtc_probability"), (0,)),
        **dict.fromkeys(("dynatemp_range", "smoothing_factor", "top_a", "epsilon_cutoff"), (0,)),
        **dict.fromkeys(("eta_cutoff", "no_repeat_ngram_size", "penalty_alpha", "nsigma"), (0,)),
        **dict.fromkeys(("typical_p", "typical", "tfs", "tfs_z", "length_penalty"), (1,)),
        "top_n_sigma": (-1, 0),
        "num_beams": (1,),
        "temperature_last": (False,),
        **dict.fromkeys(("use_beam_search", "early_stopping"), (False,)),
        "samplers": ([],),
        "adaptive_target": (-1,),
        "repetition_detection": (),
    },
    "use repetition_penalty": {"repeat_penalty": (1,), "encoder_repetition_penalty": (1,)},
    "use max_tokens": {
        **dict.fromkeys(("n_predict", "max_new_tokens", "max_output_tokens", "num_predict"), ()),
    },
    "use min_tokens": {"min_new_tokens": (0,)},
    "use stop": {**dict.fromkeys(("stop_regex", "stop_sequences", "stop_strings"), ([],))},
    "use seed": {"random_seed": (), "sampling_seed": ()},
    "use n": {"n_cmpl": (1,)},
    "use logprobs": {"n_probs": (0,), "post_sampling_probs": (False,)},
    'use chat_template_kwargs: {"enable_thinking": true}, or reasoning_effort': {
        **dict.fromkeys(("enable_thinking", "think"), (False,)),
        **dict.fromkeys(("reasoning", "thinking"), ({},)),
    },
    "use thinking_token_budget": {
        **dict.fromkeys(("thinking_budget", "thinking_budget_tokens", "reasoning_budget"), (-1,)),
    },
    "reasoning is always returned as reasoning_content": {
        **dict.fromkeys(("include_reasoning", "separate_reasoning"), (True,)),
        "reasoning_format": ("auto", "deepseek"),
        "thinking_forced_open": (False,),
    },
    "the checkpoint's own template is used; put what it must say into the messages": {
        "chat_template": (),
        "documents": ([],),
        "verbosity": ("medium",),
        **dict.fromkeys(("instructions", "system", "template"), ("",)),
        "safe_prompt": (False,),
        "raw": (False,),
    },
    "use image_budget, frames and audio_too_long": {
        **dict.fromkeys(("mm_processor_kwargs", "media_io_kwargs", "images_config"), ({},)),
        "max_dynamic_patch": (),
        "min_dynamic_patch": (),
        "use_audio_in_video": (False,),
    },
    "give media as parts of a message": {"image_data": ([],), "images": ([],)},
    "give messages or prompt": {
        **dict.fromkeys(("input_ids", "prompt_token_ids", "input", "inputs"), ([],)),
        "prompt_embeds": (),
    },
    "build an engine with the adapter": {
        **dict.fromkeys(("lora", "lora_path", "lora_request", "adapters"), ([], "")),
    },
    "tokens are returned as text; /tokenize returns ids": {
        **dict.fromkeys(("return_token_ids", "return_tokens", "return_prompt_token_ids"), (False,)),
        **dict.fromkeys(("return_tokens_as_token_ids", "return_hidden_states"), (False,)),
        "return_routed_experts": (False,),
        "return_meta_info": (False,),
        "response_fields": ([],),
        "detokenize": (True,),
        "parse_tool_calls": (True,),
        "skip_special_tokens": (True,),
        "include_stop_str_in_output": (False,),
        "no_stop_trim": (False,),
        "preserved_tokens": ([],),
    },
    "requests are answered in the order in which they came": {
        "priority": (0,),
        "t_max_predict_ms": (-1, 0),
    },
    "prompts are never truncated; send fewer tokens": {"truncate_prompt_tokens": (-1,)},
    "put options into the request itself": {"options": ({},), "num_ctx": (), "parameters": ({},)},
    "this server keeps no conversations; send all messages": {
        **dict.fromkeys(("previous_response_id", "conversation", "session_params"), ()),
    },
    "use tools": {"functions": (), "function_call": ("none",), "plugins": ([],)},
    "this server has no access to the web": {"web_search_options": ()},
    "answers are text": {"modalities": (["text"],), "audio": ()},
    "this server has one model": {"models": ([],), "provider": ({},), "transforms": ([],)},
    "give the whole text as prompt": {"suffix": ("",)},
}

#: fields that do not change what is answered: bookkeeping, scheduling, speed
HARMLESS = frozenset(
    (
        *("store", "metadata", "user", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "prediction", "request_id", "rid", "session_id", "usage"),
        *("custom_labels", "extra_key", "keep_alive", "ttl", "guided_decoding_backend"),
        *("spaces_between_special_tokens", "truncation_side", "stream_reasoning"),
        *("timings_per_token", "return_progress", "return_cached_tokens_details"),
        *("kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room"),
        *("routed_dp_rank", "disagg_prefill_dp_rank", "data_parallel_rank", "ngram_corpus_id"),
        *("routed_experts_start_len", "draft_model", "num_draft_tokens", "id_slot", "n_keep"),
        *("n_discard", "min_keep", "repeat_last_n", "repetition_context_size", "penalize_nl"),
        *("mirostat_tau", "mirostat_eta", "dry_base", "dry_allowed_length", "xtc_threshold"),
        *("dry_penalty_last_n", "dry_sequence_breakers", "dynatemp_exponent"),
    )
)


def refused_fields() -> Iterator[tuple[str, tuple[Any, ...], str]]:
    """Yield each refused field, its neutral values and the way out."""
    for way, fields in REFUSED.items():
        for name, neutral in fields.items():
            yield name, neutral, way
