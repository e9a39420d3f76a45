"""The settings of a build and the lowerings that each choice selects."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from g4ir.ir.graph import Node

from ..base import Setting
from ..experimental import experiment
from ..primitives import attention, moe, vision
from ..primitives.emitter import Operand
from ..primitives.lowerings import LOWERINGS as SHARED
from ..primitives.network import Lowering, Network
from .lowerings import all_gather, all_reduce, attend, attend_patches, in_blocks, plain_softmax

#: the choice of a setting that asks for the experiment's kernels
PLUGIN = "plugin"
#: form of attention in layers -> op -> lowering, replacing the shared one
ATTENTION: Mapping[str, Mapping[str, Lowering]] = {
    "explicit": {
        "attention": partial(attention.attention, form=in_blocks),
        "attention_latent": partial(attention.attention_latent, form=in_blocks),
    },
    "plain": {
        "attention": partial(attention.attention, form=partial(in_blocks, softmax=plain_softmax)),
        "attention_latent": partial(
            attention.attention_latent, form=partial(in_blocks, softmax=plain_softmax)
        ),
        "encoder_attention": partial(
            vision.encoder_attention, form=partial(vision.in_parts, softmax=plain_softmax)
        ),
    },
    "fused": {
        "attention": partial(attention.attention, form=attend),
        "attention_latent": partial(attention.attention_latent, form=attend),
        "encoder_attention": partial(vision.encoder_attention, form=attend_patches),
    },
}
#: op that ranks do together -> lowering
AMONG_RANKS: Mapping[str, Lowering] = {"all_reduce": all_reduce, "all_gather": all_gather}
#: how weights lie in an engine -> builder flags. Equal weights are what an engine is given again:
#: only then are its kernels those of one that has them. It takes all weights, constants too.
WEIGHTS: Mapping[str, tuple[str, ...]] = {
    "baked": (),
    "streamed": ("WEIGHT_STREAMING",),
    "refit": ("STRIP_PLAN", "REFIT_IDENTICAL"),
}
#: where an engine runs -> level
HARDWARE: Mapping[str, str] = {"exact": "NONE", "same-capability": "SAME_COMPUTE_CAPABILITY"}
#: setting -> the layers that `auto` means
AUTO, LAYERS = "auto", {"experts": "all", "norms": "layers"}

SETTINGS: Mapping[str, Setting] = {
    "attention": Setting(
        (*ATTENTION, PLUGIN),
        "explicit",
        "products and a softmax; these with the softmax in plain layers; TensorRT's own attention "
        "layer, in towers too; or, an experiment, Triton kernels for decode steps over full-length "
        "caches",
    ),
    "experts": Setting(
        (AUTO, "gather", "all", PLUGIN),
        AUTO,
        "all experts multiplied (auto, all), weights of the chosen experts gathered, or, an "
        "experiment, Triton kernels that sort tokens by expert",
    ),
    "norms": Setting(
        (AUTO, "layers", PLUGIN),
        AUTO,
        "between two blocks: layers (auto, layers), or, an experiment, one Triton kernel for norm, "
        "sum and the next norm",
    ),
    "weights": Setting(
        tuple(WEIGHTS),
        "baked",
        "in the plan; in the plan, and on the device as far as they fit; or out of the plan, which "
        "takes them from the engine's safetensors when it is loaded",
    ),
    "hardware": Setting(
        tuple(HARDWARE),
        "exact",
        "the plan runs on the GPU that it was built on; or on every GPU of its compute capability",
    ),
}


def lowerings(form: str = "explicit", norms: str = "layers") -> Mapping[str, Lowering]:
    """Return the lowering of each op, with attention and norms in one of these forms."""
    if form not in SETTINGS["attention"].choices:
        raise ValueError(f"attention {form!r}: one of {', '.join(SETTINGS['attention'].choices)}")
    ends = plugins().BLOCK_ENDS if norms == PLUGIN else {}
    return {**SHARED, "experts": experts, **AMONG_RANKS, **_attention(form), **ends}


def _attention(form: str) -> Mapping[str, Lowering]:
    if form != PLUGIN:
        return ATTENTION[form]
    made = plugins().ATTENTION
    return {op: partial(lowering, form=in_blocks) for op, lowering in made.items()}


def experts(net: Network, n: Node, *operands: Operand) -> Operand:
    """Lower experts in the form that the network was asked for."""
    lowering = plugins().experts if net.experts == PLUGIN else moe.experts
    made: Operand = lowering(net, n, *operands)
    return made


def chosen_lowerings(settings: Mapping[str, str]) -> Mapping[str, Lowering]:
    """Return the lowering of each op by settings without `auto`."""
    return lowerings(settings["attention"], settings["norms"])


def resolved(settings: Mapping[str, str]) -> dict[str, str]:
    """Replace `auto` by the layers that it means."""
    return {k: LAYERS[k] if v == AUTO else v for k, v in settings.items()}


def plugins() -> Any:
    """Import the plugins, which need torch and, when a kernel is compiled, triton."""
    return experiment("trt_plugins")


def meaning(plugin: str, attributes: Mapping[str, Any], *tensors: Any) -> Any:
    """Compute a plugin in torch, for the recorder."""
    return plugins().meaning(plugin, attributes, *tensors)
