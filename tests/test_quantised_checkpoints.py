"""Checkpoints that are in codes already: engines of them against transformers on the same files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import g4ir
from g4ir.check.logits import verify_engine
from g4ir.engine.engine import Engine
from g4ir.spec.record import load_spec
from tests.oracle import Oracle, find_oracle, relative
from tests.packing import (
    Pack,
    compressed,
    e4m3_weight,
    is_linear,
    mobile_weight,
    packed_weight,
    quantised_checkpoint,
    zeroed_weight,
)

F32 = torch.float32
LIMITS: dict[str, Any] = {"max_seq": 64, "prefill_chunk": 16, "all_logits": True, "dtype": "f32"}


def fp8_config(rows: int, columns: int) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "weight_block_size": [rows, columns],
        "modules_to_not_convert": ["lm_head"],
    }


MOBILE_BITS = {r"lm_head": 8, r"embed_tokens": 4, r"mlp\.down_proj": 8, r"self_attn\.o_proj": 2}


def mobile_bits(module: str) -> int:
    import re

    return next((b for p, b in MOBILE_BITS.items() if re.search(p, module)), 4)


MOBILE = {
    "quant_method": "gemma",
    "num_bits": 4,
    "quantize_embeddings": True,
    "module_quant_configs": {p: {"num_bits": b} for p, b in MOBILE_BITS.items()},
    "modules_to_not_convert": ["per_layer_model_projection"],
}


@dataclass(frozen=True)
class Case:
    """A way to store weights that transformers reads too."""

    config: dict[str, Any]
    pack: Pack
    which: Callable[[str, torch.Tensor], bool] = is_linear
    untied: bool = False

    def write(self, oracle: Oracle, folder: Path) -> Path:
        return quantised_checkpoint(oracle, folder, self.config, self.pack, self.which, self.untied)


def mobile_modules(module: str, w: torch.Tensor) -> bool:
    return w.dim() == 2 and not module.endswith("per_layer_model_projection")


def with_group(group: int, bits: int = 4, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "strategy": "group", "group_size": group, **more}


CASES = {
    "int4 in groups": Case(compressed("pack-quantized", **with_group(16)), packed_weight(4, 16)),
    "int4 in rows": Case(
        compressed("pack-quantized", num_bits=4, type="int", strategy="channel"),
        packed_weight(4, 0, torch.bfloat16),
    ),
    "int4 with zero points": Case(
        compressed("pack-quantized", **with_group(16, symmetric=False)), zeroed_weight(16)
    ),
    "int8 in words": Case(
        compressed("pack-quantized", num_bits=8, type="int", strategy="channel"),
        packed_weight(8, 0),
    ),
    "fp8 in rows": Case(
        compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
        e4m3_weight(1, 0),
    ),
    "fp8 in blocks": Case(
        compressed(
            "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[16, 16]
        ),
        e4m3_weight(16, 16),
    ),
    "HF fp8": Case(fp8_config(16, 16), e4m3_weight(16, 16, "weight_scale_inv")),
    "mobile": Case(MOBILE, mobile_weight(mobile_bits), mobile_modules, untied=True),
}


def theirs(folder: Path, oracle: Oracle) -> torch.Tensor:
    """The logits of transformers on a checkpoint."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model, told = AutoModelForCausalLM.from_pretrained(
        folder, dtype=F32, attn_implementation="eager", output_loading_info=True
    )
    assert not told["missing_keys"] and not told["mismatched_keys"], told
    with torch.no_grad():
        made: torch.Tensor = model(oracle.tokens[:1, :40], use_cache=False).logits
    return made


def built(folder: Path, out: Path, **options: Any) -> Engine:
    given = {"backend": "reference", **LIMITS, **options}
    return g4ir.build(None, out, checkpoint=folder, **given)


def logits(engine: Engine, oracle: Oracle) -> torch.Tensor:
    return engine.session().prefill(oracle.tokens[:1, :40], all_logits=True)


@pytest.mark.parametrize("name", ("tiny-ple", "tiny-dense"))
@pytest.mark.parametrize("case", CASES)
def test_transformers_on_the_same_files(case: str, name: str, tmp_path: Path) -> None:
    oracle, c = find_oracle(load_spec(name)), CASES[case]
    folder = c.write(oracle, tmp_path / "c")
    engine = built(folder, tmp_path / "e")
    want = theirs(folder, oracle)
    assert relative(logits(engine, oracle), want).max().item() < oracle.budget
    assert verify_engine(engine, against="hf", checkpoint=folder).ok
