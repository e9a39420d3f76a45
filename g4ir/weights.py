"""Parameter names: the graph's on one side, the checkpoint's on the other.

This is the only place that knows both. Checkpoint names are given without the text prefix.
"""

from __future__ import annotations

from .errors import WeightsError

_TOP = {
    "embed.table": "embed_tokens.weight",
    "ple.table": "embed_tokens_per_layer.weight",
    "ple.w": "per_layer_model_projection.weight",
    "ple.norm": "per_layer_projection_norm.weight",
    "final.w": "norm.weight",
    "head.w": "lm_head.weight",
}
_LAYER = {
    "norm_in": "input_layernorm.weight",
    "attn.wq": "self_attn.q_proj.weight",
    "attn.wk": "self_attn.k_proj.weight",
    "attn.wv": "self_attn.v_proj.weight",
    "attn.wo": "self_attn.o_proj.weight",
    "attn.norm_q": "self_attn.q_norm.weight",
    "attn.norm_k": "self_attn.k_norm.weight",
    "norm_attn": "post_attention_layernorm.weight",
    "norm_mlp": "pre_feedforward_layernorm.weight",
    "mlp.w_gate": "mlp.gate_proj.weight",
    "mlp.w_up": "mlp.up_proj.weight",
    "mlp.w_down": "mlp.down_proj.weight",
    "norm_mlp_post": "post_feedforward_layernorm_1.weight",
    "norm_moe": "pre_feedforward_layernorm_2.weight",
    "norm_moe_post": "post_feedforward_layernorm_2.weight",
    "moe.router_scale": "router.scale",
    "moe.router": "router.proj.weight",
    "moe.expert_scale": "router.per_expert_scale",
    "moe.gate_up": "experts.gate_up_proj",
    "moe.down": "experts.down_proj",
    "norm_ffn": "post_feedforward_layernorm.weight",
    "ple.w_gate": "per_layer_input_gate.weight",
    "ple.w_proj": "per_layer_projection.weight",
    "norm_ple": "post_per_layer_input_norm.weight",
    "scalar": "layer_scalar",
}


def checkpoint_name(param: str) -> str:
    """`L3.attn.wq` -> `layers.3.self_attn.q_proj.weight`."""
    if param in _TOP:
        return _TOP[param]
    layer, _, rest = param.partition(".")
    if layer[:1] == "L" and layer[1:].isdigit() and rest in _LAYER:
        return f"layers.{layer[1:]}.{_LAYER[rest]}"
    raise WeightsError(f"param %{param} has no checkpoint tensor; add it to g4ir/weights.py")
