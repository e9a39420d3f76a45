"""Translates the names of tensors: llama.cpp's for the architecture `gemma4`, and the graph's."""

from __future__ import annotations

from g4ir.model.names import checkpoint_name

#: divides the frequencies of full layers: the spec's reader looks at it, no graph does
ROPE = "rope_freqs.weight"
#: what the names of towers' tensors begin with
TOWERS = ("v.", "a.", "mm.")
_TOP = {
    "token_embd.weight": "embed.table",
    "per_layer_token_embd.weight": "ple.table",
    "per_layer_model_proj.weight": "ple.w",
    "per_layer_proj_norm.weight": "ple.norm",
    "output_norm.weight": "final.w",
    "output.weight": "head.w",
}
_LAYER = {
    "attn_norm.weight": "norm_in",
    "attn_q.weight": "attn.wq",
    "attn_k.weight": "attn.wk",
    "attn_v.weight": "attn.wv",
    "attn_output.weight": "attn.wo",
    "attn_q_norm.weight": "attn.norm_q",
    "attn_k_norm.weight": "attn.norm_k",
    "post_attention_norm.weight": "norm_attn",
    "ffn_norm.weight": "norm_mlp",
    "ffn_gate.weight": "mlp.w_gate",
    "ffn_up.weight": "mlp.w_up",
    "ffn_down.weight": "mlp.w_down",
    "post_ffw_norm_1.weight": "norm_mlp_post",
    "pre_ffw_norm_2.weight": "norm_moe",
    "post_ffw_norm_2.weight": "norm_moe_post",
    "ffn_gate_inp.scale": "moe.router_scale",
    "ffn_gate_inp.weight": "moe.router",
    "ffn_down_exps.scale": "moe.expert_scale",
    "ffn_gate_up_exps.weight": "moe.gate_up",
    "ffn_down_exps.weight": "moe.down",
    "post_ffw_norm.weight": "norm_ffn",
    "inp_gate.weight": "ple.w_gate",
    "proj.weight": "ple.w_proj",
    "post_norm.weight": "norm_ple",
    "layer_output_scale.weight": "scalar",
}
#: other converters' names
_ALIASES = {
    "attn_post_norm.weight": "norm_attn",
    "ffn_post_norm.weight": "norm_ffn",
}
#: matrices in one: rows of the first, then those of the others
_FUSED = {
    "attn_qkv.weight": ("attn_q.weight", "attn_k.weight", "attn_v.weight"),
    "ffn_gate_up.weight": ("ffn_gate.weight", "ffn_up.weight"),
}
#: stored apart in some files: rows of the first, then those of the second
_APART = {"ffn_gate_exps.weight": "moe.gate_up", "ffn_up_exps.weight": "moe.gate_up"}


def known_names(layers: int) -> dict[str, str]:
    """Return name in a GGUF file -> name in a checkpoint, for a model of so many layers; two names
    lead to the weight whose halves may lie apart."""
    names = {name: checkpoint_name(param) for name, param in _TOP.items()}
    for i in range(layers):
        for name, param in (*_LAYER.items(), *_ALIASES.items(), *_APART.items()):
            names[f"blk.{i}.{name}"] = checkpoint_name(f"L{i}.{param}")
    return names


def fused_parts(name: str) -> tuple[str, ...]:
    """Return the names of the matrices whose rows a fused tensor holds; none for another tensor."""
    *layer, own = name.split(".", 2)
    return tuple(".".join((*layer, part)) for part in _FUSED.get(own, ()))


def half_of(name: str) -> int:
    """Return where the rows of a tensor lie in its weight: 0, or 1 behind the others."""
    return int(name.endswith(tuple(_APART)[1]))
