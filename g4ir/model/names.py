"""Maps the graph's parameter names to the checkpoint's.

Checkpoint names here have no prefix for the text model, and the part's name (a field of Prefixes)
instead of its prefix for other parts.
"""

from __future__ import annotations

import re

from g4ir.errors import WeightsError
from g4ir.ir.names import split_name

#: checkpoint names that other modules use
TOKEN_TABLE, PLE_TABLE = "embed_tokens.weight", "embed_tokens_per_layer.weight"
HEAD, FINAL_NORM = "lm_head.weight", "norm.weight"
#: tensor with a draft model's token ids, sorted by cluster
ORDER = "drafter.masked_embedding.token_ordering"
#: prefix of a draft model's params and tensors
DRAFTER_PREFIX = "draft."
#: prefix of the params and tensors of an encoder's dense layers
DENSE = "dense."
#: suffixes of a quantised weight's params, in graphs and checkpoints
CODES, SCALES = ".codes", ".scales"
#: checkpoint names of the decoder's norms; group `query`: the norm of Q
NORM = re.compile(r"(layers\.\d+\.)?(\w+\.)?((?P<query>q_norm)|\w*norm(_\d)?)\.weight")
_TOP = {
    "embed.table": TOKEN_TABLE,
    "ple.table": PLE_TABLE,
    "ple.w": "per_layer_model_projection.weight",
    "ple.norm": "per_layer_projection_norm.weight",
    "ple.context.w": "ple.per_layer_model_projection.weight",
    "ple.context.norm": "ple.per_layer_projection_norm.weight",
    "head.projection": "embedding_projection.weight",
    "final.w": FINAL_NORM,
    "head.w": HEAD,
}
_PROJECTIONS = {
    **{f"attn.w{x}": f"self_attn.{x}_proj" for x in "qkvo"},
    **{f"mlp.w_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")},
}
#: norms in layers of the text model and of the vision tower
_NORMS = {
    "norm_in": "input_layernorm.weight",
    "attn.norm_q": "self_attn.q_norm.weight",
    "attn.norm_k": "self_attn.k_norm.weight",
    "norm_attn": "post_attention_layernorm.weight",
    "norm_mlp": "pre_feedforward_layernorm.weight",
    "norm_ffn": "post_feedforward_layernorm.weight",
}
_LAYER = {
    **{name: f"{theirs}.weight" for name, theirs in _PROJECTIONS.items()},
    **_NORMS,
    "norm_mlp_post": "post_feedforward_layernorm_1.weight",
    "norm_moe": "pre_feedforward_layernorm_2.weight",
    "norm_moe_post": "post_feedforward_layernorm_2.weight",
    "moe.router_scale": "router.scale",
    "moe.router": "router.proj.weight",
    "moe.expert_scale": "router.per_expert_scale",
    "moe.gate_up": "experts.gate_up_proj",
    "moe.down": "experts.down_proj",
    "ple.w_gate": "per_layer_input_gate.weight",
    "ple.w_proj": "per_layer_projection.weight",
    "norm_ple": "post_per_layer_input_norm.weight",
    "ple_block.w_gate": "ple_block.per_layer_input_gate.weight",
    "ple_block.w_proj": "ple_block.per_layer_projection.weight",
    "ple_block.norm": "ple_block.post_per_layer_input_norm.weight",
    "scalar": "layer_scalar",
}
#: params of towers and draft models outside their layers -> checkpoint names
_PARTS = {
    "vision.w_patch": "vision.patch_embedder.input_proj.weight",
    "vision.places": "vision.patch_embedder.position_embedding_table",
    "vision.std_bias": "vision.std_bias",
    "vision.std_scale": "vision.std_scale",
    "vision.embed": "embed_vision.embedding_projection.weight",
    "patches.norm_patch.weight": "vision_embedder.patch_ln1.weight",
    "patches.norm_patch.bias": "vision_embedder.patch_ln1.bias",
    "patches.w_patch": "vision_embedder.patch_dense.weight",
    "patches.b_patch": "vision_embedder.patch_dense.bias",
    "patches.norm_embed.weight": "vision_embedder.patch_ln2.weight",
    "patches.norm_embed.bias": "vision_embedder.patch_ln2.bias",
    "patches.places": "vision_embedder.pos_embedding",
    "patches.norm_place.weight": "vision_embedder.pos_norm.weight",
    "patches.norm_place.bias": "vision_embedder.pos_norm.bias",
    "patches.embed": "embed_vision.embedding_projection.weight",
    "audio.conv0.w": "audio.subsample_conv_projection.layer0.conv.weight",
    "audio.conv0.norm": "audio.subsample_conv_projection.layer0.norm.weight",
    "audio.conv1.w": "audio.subsample_conv_projection.layer1.conv.weight",
    "audio.conv1.norm": "audio.subsample_conv_projection.layer1.norm.weight",
    "audio.w_in": "audio.subsample_conv_projection.input_proj_linear.weight",
    "audio.w_out": "audio.output_proj.weight",
    "audio.b_out": "audio.output_proj.bias",
    "audio.embed": "embed_audio.embedding_projection.weight",
    "draft.w_in": "draft.drafter.pre_projection.weight",
    "draft.w_out": "draft.drafter.post_projection.weight",
    "draft.final.w": f"draft.{FINAL_NORM}",
    "draft.embed.table": f"draft.{TOKEN_TABLE}",
    "draft.head.w": f"draft.{HEAD}",
    "draft.centroids": "draft.drafter.masked_embedding.centroids.weight",
    "draft.order": f"draft.{ORDER}",
}
_LAYERS = {"vision": "vision.encoder.layers", "audio": "audio.layers", "draft": "draft.layers"}
_TOWER_LAYER = {
    **{f"vision.{name}": theirs for name, theirs in _NORMS.items()},
    **{f"audio.ff{i}.norm_in": f"feed_forward{i}.pre_layer_norm.weight" for i in (1, 2)},
    **{f"audio.ff{i}.norm_post": f"feed_forward{i}.post_layer_norm.weight" for i in (1, 2)},
    "audio.norm_attn_in": "norm_pre_attn.weight",
    "audio.norm_attn": "norm_post_attn.weight",
    "audio.norm_out": "norm_out.weight",
    "audio.attn.w_relative": "self_attn.relative_k_proj.weight",
    "audio.attn.dim_scale": "self_attn.per_dim_scale",
    "audio.conv.norm_in": "lconv1d.pre_layer_norm.weight",
    "audio.conv.w_time": "lconv1d.depthwise_conv1d.weight",
    "audio.conv.norm": "lconv1d.conv_norm.weight",
}
#: linears that may be clipped: param -> tensor without the suffix `.linear.weight` or a bound's
_CLIPPABLE = {
    **{f"vision.{name}": theirs for name, theirs in _PROJECTIONS.items()},
    **{f"audio.attn.w{x}": f"self_attn.{x}_proj" for x in "qkv"},
    **{f"audio.ff{i}.w_up": f"feed_forward{i}.ffw_layer_1" for i in (1, 2)},
    **{f"audio.ff{i}.w_down": f"feed_forward{i}.ffw_layer_2" for i in (1, 2)},
    "audio.attn.wo": "self_attn.post",
    "audio.conv.w_start": "lconv1d.linear_start",
    "audio.conv.w_end": "lconv1d.linear_end",
}
_BOUNDS = {f"{side}_{end}": f"{side}put_{end}" for side in ("in", "out") for end in ("min", "max")}


def checkpoint_name(param: str) -> str:
    """Return a param's name in the checkpoint: `L3.attn.wq` -> `layers.3.self_attn.q_proj.weight`;
    `.codes` and `.scales` are kept. WeightsError for a param that has none."""
    for part in (CODES, SCALES):
        if param.endswith(part):
            return f"{checkpoint_name(param.removesuffix(part))}{part}"
    if name := _TOP.get(param) or _PARTS.get(param):
        return name
    if param.startswith(DENSE):  # a module of modules.json (sentence-transformers)
        return f"{param.removesuffix('.w')}.linear.weight"
    tower, layer, suffix = split_name(param)
    if tower and (name := _of_tower(f"{tower}.{suffix}")):
        return f"{_LAYERS[tower]}.{layer}.{name}"
    if layer is not None and not tower and suffix in _LAYER:
        return f"layers.{layer}.{_LAYER[suffix]}"
    raise WeightsError(f"param %{param} has no checkpoint tensor; add it to g4ir/model/names.py")


def _of_tower(name: str) -> str | None:
    """Return the checkpoint's name of a param in a layer of a tower or draft model, without prefix
    and layer index; None for an unknown one."""
    if name in _CLIPPABLE:
        return f"{_CLIPPABLE[name]}.linear.weight"
    if name.startswith(DRAFTER_PREFIX):
        return _LAYER.get(name.removeprefix(DRAFTER_PREFIX))
    linear, _, bound = name.rpartition(".")
    if linear in _CLIPPABLE and bound in _BOUNDS:
        return f"{_CLIPPABLE[linear]}.{_BOUNDS[bound]}"
    return _TOWER_LAYER.get(name)


#: (kind of cost, pattern of the names of its nodes' first results)
_KINDS = (
    ("attention", re.compile(r"(\w+\.)?L\d+\.attn\.")),
    ("mlp", re.compile(r"(\w+\.)?L\d+\.(mlp|ff\d|conv)\.")),
    ("experts", re.compile(r"L\d+\.moe\.")),
    ("ple", re.compile(r"(L\d+\.)?ple\b")),
    ("head", re.compile(r"(draft\.)?(head\.|final\.|logits\b)")),
)


def kind_of_name(name: str) -> str | None:
    """Return the kind of cost of a node by the name of its first result, which passes keep; None
    for other nodes."""
    return next((kind for kind, pattern in _KINDS if pattern.match(name)), None)
