"""Quantised checkpoints, packed by hand beside the library that reads them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Case:
    """A way to store weights, a row of quantised_checkpoints.yaml."""

    config: dict[str, Any]
    pack: Pack
    blocks: tuple[int, int] = (0, 0)
    stacked: str = ""

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Case:
        name, *given = row["pack"]
        pack = globals()[name]
        config = row.get("config") or compressed(row["format"], row["weights"])
        blocks, stacked = row.get("blocks", (0, 0)), row.get("stacked", "")
        return cls(config, pack(*given) if given else pack, blocks, stacked)

    def write(self, oracle: Oracle, folder: Path) -> Path:
        """The oracle's checkpoint with modules packed: its linears, and a tied head is left out; in
        the mobile form tables too, and a head of its own."""
        save_checkpoint(oracle, folder)
        mobile = self.config["quant_method"] == "gemma"
        kept = self.config.get("modules_to_not_convert", ()) if mobile else TABLES

        def change(tensors: Tensors) -> None:
            if mobile:
                tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
            for name in [n for n in tensors if n.endswith(".weight")]:
                module = name.removesuffix(".weight")
                if tensors[name].dim() == 2 and not module.endswith(tuple(kept)):
                    tensors.update(self.pack(module, tensors.pop(name)))

        edited = {"tie_word_embeddings": False} if mobile else {}
        return rewrite(folder, change, quantization_config=self.config, **edited)


def compressed(form: str, weights: dict[str, Any]) -> dict[str, Any]:
    """The quantization_config of weights alone."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [N, K] as i32 [N, K * bits / 32], low bits first, each + 2^(bits - 1)."""
    each = 32 // bits
    stored = (codes.to(torch.int64) + (1 << bits - 1)).unflatten(-1, (-1, each))
    made = (stored << torch.arange(each) * bits).sum(-1)
    return torch.where(made >= 1 << 31, made - (1 << 32), made).to(torch.int32)


def grouped(w: torch.Tensor, group: int) -> torch.Tensor:
    return w.unflatten(-1, (-1, group or w.shape[-1]))


def packed_weight(bits: int, group: int, dtype: str = "float32") -> Pack:
    """pack-quantized, symmetric: scale = absmax / (2^b - 1) * 2."""

    def pack(module: str, w: torch.Tensor) -> Tensors:
        x, top = grouped(w, group), (1 << bits) / 2
        scale = (x.abs().amax(-1) / (top - 0.5)).to(getattr(torch, dtype))
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


def e4m3_weight(
    rows: int, columns: int, name: str = "weight_scale", shape: Sequence[int] | None = None
) -> Pack:
    """e4m3 in blocks of rows x columns; 0: all of them. Scales are of `shape` if given."""

    def pack(module: str, w: torch.Tensor) -> Tensors:
        n, k = w.shape
        r, c = rows or n, columns or k
        full = torch.zeros(-(-n // r) * r, -(-k // c) * c)
        full[:n, :k] = w
        blocks = full.unflatten(0, (-1, r)).unflatten(-1, (-1, c))
        scale = blocks.abs().amax((1, 3)) / 448
        spread = scale.repeat_interleave(r, 0)[:n].repeat_interleave(c, 1)[:, :k]
        codes = (w / spread).clamp(-448, 448).to(E4M3)
        scale = scale if shape is None else scale.view(tuple(shape))
        return {f"{module}.weight": codes, f"{module}.{name}": scale}

    return pack


def e8m0_weight(module: str, w: torch.Tensor) -> Tensors:
    """e4m3 with one power of two for each 32 x 32 numbers."""
    made = e4m3_weight(32, 32)(module, w)
    scale = made.pop(f"{module}.weight_scale").log2().ceil().exp2()
    spread = scale.repeat_interleave(32, 0).repeat_interleave(32, 1)[: w.shape[0], : w.shape[1]]
    codes = (w / spread).to(E4M3)
    return {f"{module}.weight": codes, f"{module}.weight_scale_inv": scale.to(torch.float8_e8m0fnu)}


def int8_weight(module: str, w: torch.Tensor) -> Tensors:
    """int-quantized: a scale for each row."""
    scale = w.abs().amax(-1, keepdim=True) / 127.5
    codes = (w / scale).round().clamp(-128, 127).to(torch.int8)
    return {f"{module}.weight": codes, f"{module}.weight_scale": scale}


def mobile_weight(configs: Mapping[str, Any]) -> Pack:
    """2, 4 or 8 bits, a scale for each row; activations are not calibrated."""

    def pack(module: str, w: torch.Tensor) -> Tensors:
        own = (c["num_bits"] for pattern, c in configs.items() if re.search(pattern, module))
        b = next(own, 4)
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
