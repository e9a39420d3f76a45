"""Any legal spec, with any options of a build: the backends compute what the reference computes, or
say by name what they do not offer."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from g4ir import Spec, build, load_spec
from g4ir.errors import InputError
from g4ir.spec.rules import canonical
from tests.configs import GEMMA3_SEEDS, check_spec, random_spec, short
from tests.oracle import relative
from tests.trt.emulated import emulated, use

#: K=V, experts and fp8; Gemma 3 and rounds; towers, per-layer embeddings, shared caches and int4
SEEDS = short(1, 5, 6, of=range(100))
PROMPT, STEPS = 20, 4
#: of a row's rms, in fp32
BUDGET = 2e-4


def drawn_spec(rng: random.Random, seed: int) -> Spec:
    """A random spec of tests/configs.py: as it is, of odd sizes, or with towers."""
    spec = random_spec(seed + GEMMA3_SEEDS.start if seed % 6 == 5 else seed)
    kinds = (_odd,) if spec.model_type == "gemma3" else (lambda spec, _: spec, _odd, _towers)
    return check_spec(canonical(rng.choice(kinds)(spec, rng)))


def _odd(spec: Spec, rng: random.Random) -> Spec:
    text, heads = spec.text, rng.choice((1, 3, 5, 7))
    divisors = [n for n in range(1, heads + 1) if heads % n == 0]
    vocab = rng.choice((131, 257, 300))
    kinds = {
        kind: replace(
            getattr(text, kind),
            head_dim=rng.choice((8, 12, 20, 24, 36)),
            num_key_value_heads=rng.choice(divisors),
        )
        for kind in ("sliding", "full")
    }
    if spec.model_type == "gemma3":
        kinds["full"] = replace(kinds["sliding"], rope=text.full.rope, window=None)
    sizes = {"intermediate_size": rng.choice((9, 20, 33)), "num_experts": rng.choice((3, 5, 9))}
    text = replace(
        text,
        vocab_size=vocab,
        hidden_size=rng.choice((20, 33, 50, 65)),
        intermediate_size=rng.choice((17, 37, 100)),
        num_attention_heads=heads,
        moe=text.moe and replace(text.moe, **sizes),
        ple=text.ple and replace(text.ple, dim=rng.choice((5, 9, 16)), vocab_size=vocab),
        **kinds,
    )
    return replace(spec, text=text)


def _towers(spec: Spec, rng: random.Random) -> Spec:
    media = load_spec(rng.choice(("tiny-media", "tiny-unified")))
    vocab = media.text.vocab_size
    ple = spec.text.ple and replace(spec.text.ple, vocab_size=vocab)
    text = replace(spec.text, vocab_size=vocab, ple=ple)
    names = ("model_type", "tokens", "vision", "audio")
    own: dict[str, Any] = {name: getattr(media, name) for name in names}
    return replace(spec, text=text, **own)


def drawn_options(rng: random.Random) -> dict[str, Any]:
    """Options of a build, in fp32: in 16 bits the near ties of routers fall to either side."""
    return {
        "dtype": "float32",
        "quant": rng.choice((None, None, "int8", "int4", "fp8", "int4-mixed")),
        "max_batch": rng.choice((1, 2, 3)),
        "max_seq": rng.choice((40, 64, 97)),
        "prefill_chunk": rng.choice((1, 7, 16, 64)),
        "all_logits": rng.choice((True, False)),
        "draft_tokens": rng.choice((0, 0, 3)),
    }


def logits_of(spec: Spec, out: Path, options: dict[str, Any]) -> torch.Tensor:
    """Those of a prompt's last token and of single steps: [1 + STEPS, vocab]."""
    drawn = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 120, (1, PROMPT + STEPS), generator=drawn)
    with build(spec, out, random_weights=0, device="cpu", **options) as engine:
        session = engine.session()
        rows = [session.prefill(tokens[:, :PROMPT])]
        rows += [session.decode(tokens[:, at]) for at in range(PROMPT, PROMPT + STEPS)]
        return torch.cat(rows)


@pytest.mark.parametrize("seed", SEEDS)
def test_backends_agree(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, emulated(tmp_path))
    rng = random.Random(seed)
    spec, options = drawn_spec(rng, seed), drawn_options(rng)
    want = logits_of(spec, tmp_path / "reference", {**options, "backend": "reference"})
    assert torch.isfinite(want).all()
    refused = dict[str, str]()
    for backend in ("torch", "onnx", "trt"):
        try:
            got = logits_of(spec, tmp_path / backend, {**options, "backend": backend})
        except InputError as e:
            refused[backend] = str(e)
        else:
            assert relative(got, want).max() < BUDGET, backend
    few = options["prefill_chunk"] <= options["draft_tokens"]
    assert set(refused) == ({"onnx", "trt"} if few else set())
    assert all("--draft-tokens 3: backend" in said for said in refused.values())
