"""Write a checkpoint (compressed-tensors, pack-quantized) of random codes, to measure speed with.

    python bench/few_bits.py bench/e2b-ple8k.yaml mobile ckpt-mobile
    python bench/few_bits.py bench/e2b-ple8k.yaml int4 ckpt-int4

`mobile`: the bits of Google's mobile files of E2B, a scale per row; `int4`: those of --quant int4.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from g4ir.model.tensors import text_tensors
from g4ir.spec.record import load_spec

#: pattern of module names -> bits and group (0: the row), the first that matches counts
SCHEMES: dict[str, dict[str, tuple[int, int]]] = {
    "mobile": {
        r"lm_head|embed_tokens$": (2, 0),
        r"embed_tokens_per_layer|self_attn": (4, 0),
        r"per_layer_(input_gate|projection)": (8, 0),
        r"layers\.(\d|1[0-4])\.mlp": (4, 0),
        r"mlp": (2, 0),
    },
    "int4": {r"embed_tokens": (8, 0), r"layers": (4, 32)},
}


def main(spec_name: str, scheme: str, out: str) -> None:
    """Write `out`/config.json and model.safetensors."""
    spec, folder = load_spec(spec_name), Path(out)
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    shapes = dict(text_tensors(spec))
    if scheme == "mobile":
        shapes["lm_head.weight"] = shapes["embed_tokens.weight"]
    tensors: dict[str, torch.Tensor] = {}
    groups: dict[str, Any] = {}
    ignore = []
    for name, shape in shapes.items():
        head = name.startswith("lm_head")
        module = (name if head else f"model.language_model.{name}").removesuffix(".weight")
        by = next((v for p, v in SCHEMES[scheme].items() if re.search(p, module)), None)
        if len(shape) != 2 or by is None or "model_projection" in module:
            random = torch.randn(shape) / shape[-1] ** 0.5
            tensors[name if head else f"model.language_model.{name}"] = (
                random if len(shape) == 2 else torch.ones(shape)
            ).bfloat16()
            ignore += [module] if len(shape) == 2 else []
            continue
        (bits, group), (n, k) = by, shape
        words = torch.randint(-(2**31), 2**31, (n, k * bits // 32), dtype=torch.int32)
        scale = 2 / (2**bits * k**0.5)
        count, dtype = (k // group, torch.bfloat16) if group else (1, torch.float32)
        tensors[f"{module}.weight_packed"] = words
        tensors[f"{module}.weight_scale"] = torch.full((n, count), scale, dtype=dtype)
        tensors[f"{module}.weight_shape"] = torch.tensor(shape)
        strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
        weights = {"num_bits": bits, "type": "int", "symmetric": True, **strategy}
        groups.setdefault(f"{bits}", {"targets": [], "weights": weights})["targets"].append(module)
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": groups,
        "ignore": ignore,
    }
    values = {**spec.to_hf(), "quantization_config": config}
    if scheme == "mobile":
        values["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(values))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main(*sys.argv[1:])
