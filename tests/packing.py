"""Quantised checkpoints, packed by hand beside the library that reads them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from g4ir.ops.codecs import packed
from tests.oracle import Oracle, save_checkpoint

Tensors = dict[str, torch.Tensor]
#: a module's name and weight -> the tensors in its place
Pack = Callable[[str, torch.Tensor], Tensors]
E4M3 = torch.float8_e4m3fn
TABLES = ("embed_tokens", "embed_tokens_per_layer")


def is_linear(module: str, w: torch.Tensor) -> bool:
    return w.dim() == 2 and not module.endswith(TABLES)


def rewrite(folder: Path, change: Callable[[Tensors], Any], **config: Any) -> Path:
    """Change the tensors of a checkpoint in place, and keys of its config.json."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, file, {"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | config))
    return folder


def quantised_checkpoint(
    oracle: Oracle,
    folder: Path,
    config: Mapping[str, Any],
    pack: Pack,
    which: Callable[[str, torch.Tensor], bool] = is_linear,
    untied: bool = False,
) -> Path:
    """The oracle's checkpoint with modules packed; a tied head is left out, unless it is to be a
    tensor of its own."""
    save_checkpoint(oracle, folder)

    def change(tensors: Tensors) -> None:
        if untied:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        for name in [n for n in tensors if n.endswith(".weight")]:
            module = name.removesuffix(".weight")
            if which(module, tensors[name]):
                tensors.update(pack(module, tensors.pop(name)))

    edited = {"tie_word_embeddings": False} if untied else {}
    return rewrite(folder, change, quantization_config=dict(config), **edited)


# ---- compressed-tensors -----------------------------------------------------------------------


def words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [N, K] as i32 [N, K * bits / 32], low bits first, each + 2^(bits - 1)."""
    each = 32 // bits
    stored = (codes.to(torch.int64) + (1 << bits - 1)).unflatten(-1, (-1, each))
    made = (stored << torch.arange(each) * bits).sum(-1)
    return torch.where(made >= 1 << 31, made - (1 << 32), made).to(torch.int32)


def grouped(w: torch.Tensor, group: int) -> torch.Tensor:
    return w.unflatten(-1, (-1, group or w.shape[-1]))


def packed_weight(bits: int, group: int, dtype: torch.dtype = torch.float32) -> Pack:
    """pack-quantized, symmetric: scale = absmax / (2^b - 1) * 2."""

    def pack(module: str, w: torch.Tensor) -> Tensors:
        x, top = grouped(w, group), (1 << bits) / 2
        scale = (x.abs().amax(-1) / (top - 0.5)).to(dtype)
        codes = (x / scale.float()[..., None]).round().clamp(-top, top - 1).flatten(-2)
        return {
            f"{module}.weight_packed": words(codes, bits),
            f"{module}.weight_scale": scale,
            f"{module}.weight_shape": torch.tensor(w.shape),
        }

    return pack


def zeroed_weight(group: int) -> Pack:
    """pack-quantized, 4 bits, with zero points, which are packed along the output axis."""

    def pack(module: str, w: torch.Tensor) -> Tensors:
        x = grouped(w, group)
        low, high = x.amin(-1).clamp(max=0), x.amax(-1).clamp(min=0)
        scale = (high - low) / 15
        zero = (-8 - low / scale).round().clamp(-8, 7)
        codes = (x / scale[..., None] + zero[..., None]).round().clamp(-8, 7).flatten(-2)
        return {
            f"{module}.weight_packed": words(codes, 4),
            f"{module}.weight_scale": scale,
            f"{module}.weight_zero_point": words(zero.t(), 4).t(),
            f"{module}.weight_shape": torch.tensor(w.shape),
        }

    return pack


def e4m3_weight(rows: int, columns: int, name: str = "weight_scale") -> Pack:
    """e4m3 in blocks of rows x columns; 0: all of them. A row's scales are [N, 1]."""

    def pack(module: str, w: torch.Tensor) -> Tensors:
        n, k = w.shape
        r, c = rows or n, columns or k
        full = torch.zeros(-(-n // r) * r, -(-k // c) * c)
        full[:n, :k] = w
        blocks = full.unflatten(0, (-1, r)).unflatten(-1, (-1, c))
        scale = blocks.abs().amax((1, 3)) / 448
        spread = scale.repeat_interleave(r, 0)[:n].repeat_interleave(c, 1)[:, :k]
        codes = (w / spread).clamp(-448, 448).to(E4M3)
        return {f"{module}.weight": codes, f"{module}.{name}": scale}

    return pack


def int8_weight(module: str, w: torch.Tensor) -> Tensors:
    """int-quantized: a scale for each row."""
    scale = w.abs().amax(-1, keepdim=True) / 127.5
    codes = (w / scale).round().clamp(-128, 127).to(torch.int8)
    return {f"{module}.weight": codes, f"{module}.weight_scale": scale}


def compressed(form: str, ignore: tuple[str, ...] = ("lm_head",), **weights: Any) -> dict[str, Any]:
    """The quantization_config of weights alone."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": list(ignore),
        "config_groups": {"group_0": group},
    }


# ---- mobile -----------------------------------------------------------------------------------


def mobile_weight(bits: Callable[[str], int]) -> Pack:
    """2, 4 or 8 bits, a scale for each row; activations are not calibrated."""

    def pack(module: str, w: torch.Tensor) -> Tensors:
        b = bits(module)
        top = 1 << b - 1
        scale = w.abs().amax(-1, keepdim=True) / top
        codes = (w / scale).round().clamp(-top, top - 1)
        stored = {2: four_in_a_byte, 4: packed, 8: lambda t: t.to(torch.int8)}[b](codes)
        if module.endswith(TABLES):
            return {f"{module}.embedding_quantized": stored, f"{module}.embedding_scale": scale}
        ranges = ("input_activation_scale", "output_activation_scale")
        return {
            f"{module}.weight": stored,
            f"{module}.weight_scale": scale,
            **{f"{module}.{r}": torch.tensor(0.0) for r in ranges},
        }

    return pack


def four_in_a_byte(codes: torch.Tensor) -> torch.Tensor:
    parts = (codes + 2).to(torch.uint8).unflatten(-1, (-1, 4)).unbind(-1)
    return parts[0] | parts[1] << 2 | parts[2] << 4 | parts[3] << 6


# ---- what they mean ---------------------------------------------------------------------------


def meaning(parts: Tensors, shape: tuple[int, ...], rows: int, columns: int) -> torch.Tensor:
    """The numbers [N, K] of a module packed as above, whose scales serve blocks of rows x columns;
    0: all of them."""
    named = {name.rpartition(".")[2]: t for name, t in parts.items()}
    (scale,) = (t.float() for name, t in named.items() if "scale" in name)
    codes = named.get("weight_packed")
    if codes is None:
        codes = named["weight"].float()
    else:
        bits = 32 * codes.shape[1] // shape[1]
        at = torch.arange(32 // bits) * bits
        codes = ((codes[..., None] >> at & (1 << bits) - 1) - (1 << bits - 1)).flatten(1).float()
    scale = scale.view(-1, 1) if scale.dim() < 2 else scale
    spread = scale.repeat_interleave(rows or shape[0], 0)[: shape[0]]
    return codes * spread.repeat_interleave(columns or shape[1], 1)[:, : shape[1]]
