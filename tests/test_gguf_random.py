"""Random GGUF files tell a wrong engine from a right one: what speed is measured with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

import g4ir
from g4ir.spec.record import Spec
from tests.configs import widened
from tests.gguf_files import DRAWN, all_of, offsets, write_random

LIMITS: dict[str, Any] = {"backend": "reference", "max_seq": 64, "prefill_chunk": 64}
Edit = Callable[[str, Any], Any]


def negated(kind: str, data: Any) -> Any:
    """Blocks or values whose numbers have the other sign."""
    if kind not in DRAWN:
        return -data
    raw = data.reshape(-1, GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]).copy()
    for at in offsets(kind):
        raw[:, at + 1] ^= 0x80  # of a float16
    return raw.reshape(data.shape)


def one_output(kind: str) -> Edit:
    name = "layers.1.self_attn.o_proj.weight"
    return lambda bare, data: negated(kind, data) if bare == name else data


def uniform(kind: str) -> Edit:
    """Attention whose scores are all zero."""
    return lambda bare, data: np.zeros_like(data) if "q_norm" in bare else data


def other_base(values: dict[str, Any]) -> None:
    values["gemma4.rope.freq_base_swa"] = 50.0


def logits(folder: Path, spec: Spec, kind: str, dtype: str = "float32", **how: Any) -> torch.Tensor:
    folder = Path(mkdtemp(dir=folder))
    file = folder / "a.gguf"
    write_random(file, spec, all_of(kind), **how)
    with g4ir.build(None, folder / "e", checkpoint=file, dtype=dtype, **LIMITS) as engine:
        session = engine.session()
        return session.prefill(torch.arange(3, 51)[None])[0].float().flatten()


@pytest.mark.parametrize("kind", ["F32", "Q4_0", "Q8_0", "Q4_K"])
@pytest.mark.parametrize("name", ["tiny-dense", "tiny-ple"])
def test_a_wrong_engine_is_seen(name: str, kind: str, tmp_path: Path) -> None:
    """Rounding leaves the logits as they are; another rotation, layer or attention does not."""
    spec = widened(name)

    def close(**how: Any) -> float:
        other = logits(tmp_path, spec, kind, **how)
        return float(torch.nn.functional.cosine_similarity(other, right, dim=0))

    right = logits(tmp_path, spec, kind)
    assert close(dtype="bfloat16") > 0.99
    wrong = {
        "base": close(change=other_base),
        "output": close(edit=one_output(kind)),
        "attention": close(edit=uniform(kind)),
    }
    assert max(wrong.values()) < 0.98, wrong
