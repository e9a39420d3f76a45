"""The settings of a build and what each choice stands for; the only place that knows of
experimental/."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from g4ir.ir.graph import Graph, Node
from g4ir.plan.engine_limits import Limits

from ..base import Setting
from ..primitives import attention, moe, vision
from ..primitives.emitter import Operand
from ..primitives.lowerings import LOWERINGS as SHARED
from ..primitives.network import Lowering, Network, written_nodes
from .experimental import plugins
from .experimental.reference import meaning
from .experimental.trial import shared_memory, takes_norms
from .lowerings import all_gather, all_reduce, attend, attend_patches, in_blocks, plain_softmax

#: form of attention -> op -> lowering, in the place of the shared one
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
    "plugin": {op: partial(lowering, form=in_blocks) for op, lowering in plugins.ATTENTION.items()},
}
#: form of experts -> lowering. One serves single tokens and chunks: what would choose between two
#: is a conditional
EXPERTS: Mapping[str, Lowering] = {
    "gather": moe.experts,
    "all": moe.experts,
    "plugin": plugins.experts,
}
#: form of the norms between two blocks -> op -> lowering, in the place of its expansion
NORMS: Mapping[str, Mapping[str, Lowering]] = {"layers": {}, "plugin": plugins.BLOCK_ENDS}
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
        "products and a softmax; these with the softmax in plain layers; TensorRT's own attention "
        "layer, in towers too; or, over full-length caches, kernels of this project that are made "
        "for decode steps",
    ),
    "experts": Setting(
        ("auto", *EXPERTS),
        "auto",
        "kernels of this project, which sort tokens by expert, where triton can compile them "
        "(auto, plugin), weights of the chosen experts gathered, or all experts multiplied",
    ),
    "norms": Setting(
        ("auto", *NORMS),
        "auto",
        "between two blocks: one kernel of this project for norm, sum and the next norm, where "
        "triton can compile it (auto, plugin), or layers of their own",
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
    if form not in ATTENTION:
        raise ValueError(f"attention {form!r}: one of {', '.join(ATTENTION)}")
    return {**SHARED, "experts": experts, **AMONG_RANKS, **ATTENTION[form], **NORMS[norms]}


def experts(net: Network, n: Node, *operands: Operand) -> Operand:
    """Lower experts in the form that the network was asked for."""
    made: Operand = EXPERTS[net.experts](net, n, *operands)
    return made


def chosen_lowerings(settings: Mapping[str, str]) -> Mapping[str, Lowering]:
    """Return the lowering of each op by settings without `auto`."""
    return lowerings(settings["attention"], settings["norms"])


#: setting -> form in layers, and what the kernels of nodes would make
AUTO: Mapping[str, tuple[str, Callable[[Sequence[Node], Limits], list[plugins.Made]]]] = {
    "experts": ("all", plugins.expert_plans),
    "norms": ("layers", plugins.norm_plans),
}


def resolved(
    settings: Mapping[str, str], graphs: Iterable[Graph], limits: Limits, shared: int
) -> tuple[dict[str, str], list[str]]:
    """Replace `auto`: kernels if all those of the graphs can be compiled and fit `shared` bytes,
    else layers. Return the settings and a note on each kind of kernels that is not used."""
    made, notes = dict(settings), list[str]()
    lowered = lowerings(settings["attention"])
    nodes = [n for g in graphs for n in written_nodes(g.nodes, lowered)]
    for name in (n for n in AUTO if settings[n] == "auto"):
        layers, plans_of = AUTO[name]
        plans = plans_of(nodes, limits)
        reasons = (plugins.missing(own, value, shared) for value, own in plans)
        reason = next(filter(None, reasons), "")
        made[name] = layers if reason or not plans else "plugin"
        notes += [f"{name}: {layers}, since {reason}"] if reason else []
    return made, notes


__all__ = [
    "ATTENTION",
    "EXPERTS",
    "HARDWARE",
    "NORMS",
    "SETTINGS",
    "WEIGHTS",
    "chosen_lowerings",
    "lowerings",
    "meaning",
    "resolved",
    "shared_memory",
    "takes_norms",
]
