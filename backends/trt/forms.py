"""The settings of a build and the lowerings that each choice selects."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from ..base import Setting
from ..primitives import attention, vision
from ..primitives.lowerings import LOWERINGS as SHARED
from ..primitives.network import EXPERTS, Lowering
from .lowerings import all_gather, all_reduce, attend, in_blocks, plain_softmax

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
        "encoder_attention": partial(vision.encoder_attention, form=attend),
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

SETTINGS: Mapping[str, Setting] = {
    "attention": Setting(
        tuple(ATTENTION),
        "explicit",
        "products and a softmax; these with the softmax in plain layers; or TensorRT's own "
        "attention layer, in towers too",
    ),
    "experts": Setting(
        EXPERTS,
        "auto",
        "all experts multiplied (auto, all), or weights of the chosen experts gathered",
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


def lowerings(form: str = "explicit") -> Mapping[str, Lowering]:
    """Return the lowering of each op, with attention in one of its forms."""
    if form not in ATTENTION:
        raise ValueError(f"attention {form!r}: one of {', '.join(ATTENTION)}")
    return {**SHARED, **AMONG_RANKS, **ATTENTION[form]}
