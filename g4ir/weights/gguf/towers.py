"""Reads towers from a GGUF file of their own (`mmproj`), as llama.cpp's converter writes them.

Such a file holds the tensors, and not all that says how a tower computes: a variant says that. Some
tensors lie otherwise there than in a checkpoint; they are put back when they are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import isqrt
from typing import TYPE_CHECKING, Any

from g4ir.errors import WeightsError
from g4ir.model.media import AUDIO, PICTURES
from g4ir.model.names import checkpoint_name
from g4ir.model.tensors import CLIP_BOUNDS, Shape, media_tensors
from g4ir.spec.record import Spec
from g4ir.weights.checkpoint import Checkpoint, Problem, absent_value, report
from g4ir.weights.coded import MadeWeight
from g4ir.weights.formats.base import Files
from g4ir.weights.tensorfile import FLOATS, quoted

from .checkpoint import READ, Blocks
from .container import Array, Container, Tensor

if TYPE_CHECKING:
    import torch

#: model type -> projectors of pictures and of sound
PROJECTORS = {"gemma4": ("gemma4v", "gemma4a"), "gemma4_unified": ("gemma4uv", "gemma4ua")}
_TOP = {
    "v.patch_embd.weight": ("vision.w_patch", "patches.w_patch"),
    "v.patch_embd.bias": ("patches.b_patch",),
    "v.position_embd.weight": ("vision.places", "patches.places"),
    "v.std_bias": ("vision.std_bias",),
    "v.std_scale": ("vision.std_scale",),
    "mm.input_projection.weight": ("vision.embed",),
    "a.conv1d.0.weight": ("audio.conv0.w",),
    "a.conv1d.0.norm.weight": ("audio.conv0.norm",),
    "a.conv1d.1.weight": ("audio.conv1.w",),
    "a.conv1d.1.norm.weight": ("audio.conv1.norm",),
    "a.input_projection.weight": ("audio.w_in",),
    "a.pre_encode.out.weight": ("audio.w_out",),
    "a.pre_encode.out.bias": ("audio.b_out",),
    "mm.a.input_projection.weight": ("audio.embed",),
    **{
        f"v.patch_norm.{i}.{part}": (f"patches.norm_{name}.{part}",)
        for i, name in ((1, "patch"), (2, "embed"), (3, "place"))
        for part in ("weight", "bias")
    },
}
#: bound of a clipped linear -> its param's
_BOUNDS = {bound: bound.replace("put_", "_") for bound in CLIP_BOUNDS}
#: tower -> prefix of its layers, names without weights, and linears, whose inputs and outputs may
#: be clipped
_LAYERS: dict[str, tuple[str, dict[str, str], dict[str, str]]] = {
    "vision": (
        "v.blk",
        {
            "ln1.weight": "norm_in",
            "attn_post_norm.weight": "norm_attn",
            "ln2.weight": "norm_mlp",
            "ffn_post_norm.weight": "norm_ffn",
            "attn_q_norm.weight": "attn.norm_q",
            "attn_k_norm.weight": "attn.norm_k",
        },
        {
            "attn_q": "attn.wq",
            "attn_k": "attn.wk",
            "attn_v": "attn.wv",
            "attn_out": "attn.wo",
            "ffn_gate": "mlp.w_gate",
            "ffn_up": "mlp.w_up",
            "ffn_down": "mlp.w_down",
        },
    ),
    "audio": (
        "a.blk",
        {
            "ffn_norm.weight": "ff1.norm_in",
            "ffn_post_norm.weight": "ff1.norm_post",
            "ffn_norm_1.weight": "ff2.norm_in",
            "ffn_post_norm_1.weight": "ff2.norm_post",
            "attn_pre_norm.weight": "norm_attn_in",
            "attn_post_norm.weight": "norm_attn",
            "ln2.weight": "norm_out",
            "attn_k_rel.weight": "attn.w_relative",
            "per_dim_scale.weight": "attn.dim_scale",
            "conv_norm.weight": "conv.norm_in",
            "conv_dw.weight": "conv.w_time",
            "norm_conv.weight": "conv.norm",
        },
        {
            "ffn_up": "ff1.w_up",
            "ffn_down": "ff1.w_down",
            "ffn_up_1": "ff2.w_up",
            "ffn_down_1": "ff2.w_down",
            "attn_q": "attn.wq",
            "attn_k": "attn.wk",
            "attn_v": "attn.wv",
            "attn_out": "attn.wo",
            "conv_pw1": "conv.w_start",
            "conv_pw2": "conv.w_end",
        },
    ),
}


def with_towers(
    text: Checkpoint, file: Container, spec: Spec, kinds: Iterable[str], dtype: str
) -> Checkpoint:
    """Return a checkpoint that holds the towers of these kinds of media too; reads no tensor data.

    Raises WeightsError naming file, key or tensor, expected, found and the fix.
    """
    kinds = set(kinds)
    _check_metadata(file, spec, kinds)
    shapes, known = media_tensors(spec, kinds), _known(spec)
    places = {bare: name for name in file.tensors for bare in known.get(name, ()) if bare in shapes}
    absent = [bare for bare in shapes if bare not in places]
    defaults = {bare: value for bare in absent if (value := absent_value(bare)) is not None}
    problems = [
        Problem(file.path.name, name, "not in the spec", "mmproj")
        for name in file.tensors
        if name not in known
    ]
    problems += [
        Problem(file.path.name, bare, f"missing: expected shape {list(shapes[bare])}", "mmproj")
        for bare in absent
        if bare not in defaults
    ]
    problems += [
        problem
        for bare, name in places.items()
        for problem in _mismatch(file, file.tensors[name], bare, shapes[bare])
    ]
    if problems:
        raise WeightsError(report(file.path, spec, problems))
    files = Files(file.path.parent, {})
    made = {
        bare: _weight(files, file.tensors[name], bare, shapes[bare], dtype)
        for bare, name in places.items()
    }
    return replace(
        text,
        coded={**text.coded, **made},
        defaults={**text.defaults, **defaults},
        headers=(*text.headers, *file.headers),
    )


def _known(spec: Spec) -> dict[str, tuple[str, ...]]:
    """Return name in a file -> names in a checkpoint, of which a spec has one."""
    known = {name: tuple(map(checkpoint_name, params)) for name, params in _TOP.items()}
    for tower, (prefix, plain, linears) in _LAYERS.items():
        ends = dict(plain)
        for name, param in linears.items():
            ends[f"{name}.weight"] = param
            ends |= {f"{name}.{bound}": f"{param}.{own}" for bound, own in _BOUNDS.items()}
        count = getattr(getattr(spec, tower), "num_hidden_layers", 0)
        for i in range(count):
            for end, param in ends.items():
                known[f"{prefix}.{i}.{end}"] = (checkpoint_name(f"{tower}.L{i}.{param}"),)
    return known


def _check_metadata(file: Container, spec: Spec, kinds: set[str]) -> None:
    """Raise WeightsError where keys contradict the spec or what towers compute with."""
    architecture = file.values.get("general.architecture")
    if architecture != "clip":
        raise _contradiction(file, "general.architecture", "clip", architecture)
    projectors = PROJECTORS[spec.model_type]
    asked = (("vision", PICTURES, spec.vision), ("audio", (AUDIO,), spec.audio))
    for (part, served, tower), projector in zip(asked, projectors, strict=True):
        if not kinds.intersection(served):
            continue
        expected: dict[str, Any] = {"projector_type": projector}
        if heads := getattr(tower, "num_attention_heads", None):
            expected |= {"attention.head_count": heads}
        for name, value in expected.items():
            key = f"clip.{part}.{name}"
            if file.values.get(key) != value:
                raise _contradiction(file, key, value, file.values.get(key))
    if kinds.intersection(PICTURES):
        for name, value in (("image_mean", 0), ("image_std", 1)):
            key = f"clip.vision.{name}"
            found = file.values.get(key)
            given = file.items(key) if isinstance(found, Array) and found.count == 3 else found
            if given not in (None, [value] * 3):
                raise _contradiction(file, key, [value] * 3, given)


def _contradiction(file: Container, key: str, expected: object, found: object) -> WeightsError:
    shown = "none" if found is None else quoted(found)
    return WeightsError(
        f"{file.path}: {key}: expected {quoted(expected)}, found {shown}; give the mmproj file of "
        f"this variant"
    )


# ---- how tensors lie --------------------------------------------------------------------------

#: rows of pixels: colours lie apart in the file, and side by side in a checkpoint
_PIXELS = (
    "patch_embedder.input_proj.weight",
    "patch_dense.weight",
    "patch_ln1.weight",
    "patch_ln1.bias",
)


def _stored_shape(bare: str, shape: Shape) -> Shape:
    """Return the shape that a tensor of a checkpoint has in the file."""
    if bare.endswith(CLIP_BOUNDS):
        return (1,)
    if bare.endswith("patch_embedder.input_proj.weight"):
        side = isqrt(shape[1] // 3)
        return (shape[0], 3, side, side)
    if bare.endswith("pos_embedding"):
        return (shape[1], shape[0], shape[2])
    return tuple(d for d in shape if d != 1) if bare.endswith("depthwise_conv1d.weight") else shape


def _as_published(t: torch.Tensor, bare: str, shape: Shape) -> torch.Tensor:
    """Return a tensor of the file as a checkpoint has it."""
    import torch

    if bare.endswith(_PIXELS):
        side = isqrt(shape[-1] // 3)
        return t.reshape(*shape[:-1], 3, side, side).movedim(-3, -1).reshape(shape)
    if bare.endswith("pos_embedding"):
        return t.movedim(0, 1)
    if bare.endswith("per_dim_scale"):  # y = softplus(x) there
        wide = t.double()
        return (wide + torch.log(-torch.expm1(-wide))).to(t.dtype)
    return t.reshape(shape)


def _mismatch(file: Container, t: Tensor, bare: str, shape: Shape) -> Iterator[Problem]:
    """Yield what is wrong with a tensor."""
    name, wanted = t.entry.name, _stored_shape(bare, shape)
    if t.stored.name not in READ or (len(wanted) == 1 and t.stored.dtype not in FLOATS):
        yield Problem(file.path.name, name, f"type {t.stored} is not read here", "type")
    elif t.shape != wanted:
        text = f"expected shape {list(wanted)}, found {quoted(list(t.shape))}"
        yield Problem(file.path.name, name, text, "mmproj")


def _weight(files: Files, t: Tensor, bare: str, shape: Shape, dtype: str) -> MadeWeight:
    stored = Blocks(files, (t,)).as_numbers(dtype)

    def numbers(rows: torch.Tensor | None) -> torch.Tensor:
        return _as_published(stored.numbers(rows), bare, shape)

    return MadeWeight(shape, numbers, stored.release)
