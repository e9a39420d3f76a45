"""fp32 logits against transformers, at every position: variants, random specs, chunks, rows.

The budget of each comparison is measured on the reference itself in the same run, see
`tests/oracle.py`.
Any legal spec, with any options of a build: the backends compute what the reference computes, or
say by name what they do not offer.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from g4ir import Spec, build, load_spec
from g4ir.engine.inputs import padded
from g4ir.errors import InputError
from g4ir.spec.rules import canonical
from tests.configs import (
    ALL_SEEDS,
    FEATURES,
    GEMMA3_SEEDS,
    NAMES,
    RANDOM_SEEDS,
    check_spec,
    few,
    random_spec,
    short,
    spec_called,
)
from tests.oracle import Oracle, find_oracle, random_tokens, relative
from tests.runner import open_session, prefill_then_decode
from tests.trt.emulated import emulated, use

MORE_SEEDS = (
    *range(len(RANDOM_SEEDS), 10 * len(RANDOM_SEEDS)),
    *range(GEMMA3_SEEDS.stop, GEMMA3_SEEDS.stop + 40),
)
#: chunk sizes by window and prompt length
CHUNKS: dict[str, Callable[[int, int], int]] = {
    "1": lambda w, n: 1,
    "W-1": lambda w, n: w - 1,
    "W": lambda w, n: w,
    "W+1": lambda w, n: w + 1,
    "2W": lambda w, n: 2 * w,
    "prime": lambda w, n: 11,
    "all": lambda w, n: n,
}


def oracle_of(name: str) -> Oracle:
    return find_oracle(spec_called(name))


def agrees(got: torch.Tensor, want: torch.Tensor, oracle: Oracle) -> None:
    """Every row of logits within the tolerance."""
    error = relative(got, want).max().item()
    assert error <= oracle.budget, f"{error:.2e} of rms, budget {oracle.budget:.2e}"


def test_every_kind_of_tensor_is_used() -> None:
    """Each tensor of a layer, disturbed in all layers, changes the logits: none is inert."""
    oracle = oracle_of("combined")
    session = open_session(oracle, 2, 128, True)
    kinds = {re.sub(r"layers\.\d+\.", "", k) for k in oracle.tensors} - {"lm_head.weight"}
    for kind in sorted(kinds):
        own = kind.removeprefix("model.")
        changed = {k: v * 1.5 + 0.1 if k.endswith(own) else v for k, v in oracle.tensors.items()}
        got = replace(session, tensors=changed).prefill(oracle.tokens, all_logits=True)
        assert relative(got, oracle.logits).max().item() > 30 * oracle.budget, kind


@pytest.mark.covering
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("name", few(NAMES))
def test_prefill_in_chunks(name: str, chunk: str) -> None:
    """Every position of a prompt, and two decode steps after it."""
    oracle = oracle_of(name)
    tokens = oracle.tokens[:, : oracle.prompt + 2]
    session = open_session(oracle, 2, CHUNKS[chunk](oracle.window, oracle.prompt), True)
    got = prefill_then_decode(session, tokens, oracle.prompt)
    agrees(got, oracle.logits[:, : tokens.shape[1]], oracle)


@pytest.mark.parametrize("name", few(NAMES))
def test_decode_past_three_windows(name: str) -> None:
    oracle = oracle_of(name)
    assert oracle.tokens.shape[1] > 3 * oracle.window
    got = prefill_then_decode(open_session(oracle, 2, 8, True), oracle.tokens, 3)
    agrees(got, oracle.logits, oracle)


@pytest.mark.full
@pytest.mark.parametrize("seed", MORE_SEEDS)
def test_more_random_specs(seed: int) -> None:
    oracle = find_oracle.__wrapped__(random_spec(seed))  # not kept
    for size in (CHUNKS[c](oracle.window, oracle.prompt) for c in CHUNKS):
        session = open_session(oracle, 2, size, True)
        agrees(prefill_then_decode(session, oracle.tokens, oracle.prompt), oracle.logits, oracle)


def test_random_specs_have_every_feature() -> None:
    texts = [random_spec(seed).text for seed in ALL_SEEDS]
    for feature, has in FEATURES.items():
        found = {bool(has(text)) for text in texts}
        assert found == {True, False}, f"no random spec differs in {feature!r}"


@pytest.mark.parametrize("name", few(NAMES))
def test_ragged_rows_equal_single_rows(name: str) -> None:
    """Sequences that end in different chunks, an empty one, a second turn, then decoding: graphs
    of the last token alone."""
    oracle = oracle_of(name)
    w, session = oracle.window, open_session(oracle, 5, oracle.window + 1)
    tokens = random_tokens(oracle.spec, 5, 5 * w, seed=9)
    held = [row[:0] for row in tokens]

    def alone(rows: list[int]) -> torch.Tensor:
        """The reference's last logits of each sequence, run alone."""
        return torch.stack([oracle.run(held[i][None])[0, -1] for i in rows])

    first, second = (3 * w + 1, 0, w + 3, 1, 2 * w + 2), (3, 2 * w, 0, 1, w + 4)
    for rows, lengths in ((tokens, first), (tokens.flip(1), second)):
        turn = [row[:n] for row, n in zip(rows, lengths, strict=True)]
        got = session.prefill(*padded(dict(enumerate(t.tolist() for t in turn)), 5))
        held = [torch.cat(pair) for pair in zip(held, turn, strict=True)]
        live = [i for i, n in enumerate(lengths) if n]
        agrees(got[live], alone(live), oracle)
        assert session.length.tolist() == [len(row) for row in held]
    held = [torch.cat((row, t[None])) for row, t in zip(held, tokens[:, -1], strict=True)]
    agrees(session.decode(tokens[:, -1]), alone([*range(5)]), oracle)


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
