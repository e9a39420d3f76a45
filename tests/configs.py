"""Small specs for numeric tests: the released variants shrunk, and random legal ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from g4ir.spec.parts import FULL, SLIDING, AttentionKind, Moe, Ple, Rope, Text
from g4ir.spec.record import Spec, load_spec
from g4ir.spec.rules import canonical
from tests.covering import covering
from tests.shrink import TOKENS, check_spec, shrink

VARIANTS = ("e2b", "e4b", "12b", "26b-a4b", "31b")
TINY = ("tiny-dense", "tiny-moe", "tiny-ple")
RANDOM_SEEDS = range(20)
#: of Gemma 3
GEMMA3_SEEDS = range(1000, 1004)
ALL_SEEDS = (*RANDOM_SEEDS, *GEMMA3_SEEDS)


# --- drawing ----------------------------------------------------------------------------------


@cache
def random_spec(seed: int) -> Spec:
    """A legal spec with every structural choice drawn; the same for a seed on every machine."""
    rng = random.Random(seed)
    if seed >= GEMMA3_SEEDS.start:
        return _random_gemma3(rng, f"random-{seed}")
    while True:
        text = _random_text(rng)
        spec = Spec(
            name=f"random-{seed}", model_type="gemma4", dtype="f32", text=text, tokens=TOKENS
        )
        if _shares_legally(text):
            return check_spec(canonical(spec))


def _random_gemma3(rng: random.Random, name: str) -> Spec:
    """One geometry for all layers, any last layer, scores divided by any root."""
    layers, heads, dim = rng.randint(4, 7), rng.choice((2, 4, 6)), rng.choice((16, 32))
    kv = rng.choice([n for n in range(1, heads + 1) if heads % n == 0])
    base = load_spec("tiny-gemma3")
    rope = rng.choice((Rope("default", 1e6), Rope("proportional", 1e6, factor=8.0)))
    text = replace(
        base.text,
        vocab_size=rng.choice((128, 250)),
        hidden_size=heads * rng.choice((8, 12)),
        intermediate_size=rng.choice((48, 72)),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        pattern=(*(SLIDING,) * rng.randint(1, layers - 2), FULL),
        sliding=AttentionKind(dim, kv, Rope("default", 1e4), rng.choice((4, 9, 13))),
        full=AttentionKind(dim, kv, rope),
        query_pre_attn_scalar=rng.choice((dim, 7, 24)),
        rms_norm_eps=rng.choice((1e-6, 1e-5)),
        tie_word_embeddings=rng.random() < 0.7,
    )
    return check_spec(canonical(replace(base, name=name, text=text)))


def _random_text(rng: random.Random) -> Text:
    layers = rng.randint(3, 8)
    heads = rng.choice((2, 3, 4, 6))
    vocab = rng.choice((128, 250))
    hidden = rng.choice((32, 40, 56))
    return Text(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=rng.choice((48, 72)),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        pattern=_random_pattern(rng, layers),
        sliding=_random_kind(rng, heads, rng.choice((16, 32)), rng.choice((4, 8, 13))),
        full=_random_kind(rng, heads, rng.choice((32, 64)), None),
        max_position_embeddings=512,
        num_kv_shared_layers=rng.choice((0, rng.randint(1, layers - 1))),
        use_double_wide_mlp=rng.random() < 0.5,
        moe=_random_moe(rng, layers) if rng.random() < 0.5 else None,
        ple=Ple(rng.choice((8, 12)), vocab + rng.choice((0, 6))) if rng.random() < 0.5 else None,
        rms_norm_eps=rng.choice((1e-6, 1e-5)),
        final_logit_softcapping=rng.choice((None, 30.0)),
        attn_logit_softcapping=rng.choice((None, None, 20.0)),
        tie_word_embeddings=rng.random() < 0.7,
    )


def _random_pattern(rng: random.Random, layers: int) -> tuple[str, ...]:
    """n:1 as in the released models, or anything; the last layer is always a full one."""
    ratio = rng.choice((1, 2, 3, 5, None))
    if ratio is None:
        return (*(rng.choice((SLIDING, FULL)) for _ in range(layers - 1)), FULL)
    return (*((SLIDING,) * ratio + (FULL,)) * layers,)[: layers - 1] + (FULL,)


def _random_kind(
    rng: random.Random, heads: int, head_dim: int, window: int | None
) -> AttentionKind:
    divisors = [n for n in range(1, heads + 1) if heads % n == 0]
    scaled = Rope("proportional", 1e6, rng.choice((0.25, 0.5, 1.0)), rng.choice((None, 4.0)))
    rope = rng.choice((Rope("default", 1e4), scaled))
    tied = rng.random() < (0.5 if window is None else 0.2)
    return AttentionKind(head_dim, rng.choice(divisors), rope, window, tied)


def _random_moe(rng: random.Random, layers: int) -> Moe:
    experts = rng.choice((4, 6, 8))
    some = tuple(sorted(rng.sample(range(layers), rng.randint(1, layers - 1))))
    return Moe(experts, rng.randint(1, 3), rng.choice((16, 24)), rng.choice((None, some)))


def _shares_legally(text: Text) -> bool:
    first = text.first_kv_shared_layer
    return set(text.layer_types[first:]) <= set(text.layer_types[:first])


#: feature -> whether a spec has it; the random specs have each, and each is absent somewhere
FEATURES: dict[str, Callable[[Text], Any]] = {
    "sliding": lambda t: SLIDING in t.layer_types,
    "window 4": lambda t: t.sliding.window == 4,
    "window 13": lambda t: t.sliding.window == 13,
    "K=V on full": lambda t: t.full.k_eq_v,
    "K=V on sliding": lambda t: t.sliding.k_eq_v and SLIDING in t.layer_types,
    "sharing": lambda t: t.num_kv_shared_layers,
    "wide MLP": lambda t: t.num_kv_shared_layers and t.use_double_wide_mlp,
    "per-layer embeddings": lambda t: t.ple,
    "experts": lambda t: t.moe,
    "experts on some layers": lambda t: t.moe and t.moe.layers,
    "one expert a token": lambda t: t.moe and t.moe.top_k_experts == 1,
    "final softcap": lambda t: t.final_logit_softcapping,
    "attention softcap": lambda t: t.attn_logit_softcapping,
    "tied head": lambda t: t.tie_word_embeddings,
    "kv heads differ by kind": lambda t: (
        t.full.num_key_value_heads != t.sliding.num_key_value_heads
    ),
    "grouped queries": lambda t: t.full.num_key_value_heads < t.num_attention_heads,
    "rope factor": lambda t: t.full.rope.factor,
    "partial rope": lambda t: t.full.rope.rotary_fraction < 1,
    "divided scores": lambda t: t.query_pre_attn_scalar,
    "sliding last layer": lambda t: t.layer_types[-1] == SLIDING,
}


# --- by name ----------------------------------------------------------------------------------


def combined() -> Spec:
    """Experts, per-layer embeddings, KV sharing and K=V at 3:1: legal, though not released."""
    base = shrink(load_spec("e2b"))
    text = replace(
        base.text,
        num_hidden_layers=12,
        num_kv_shared_layers=4,
        num_attention_heads=4,
        pattern=(SLIDING, SLIDING, SLIDING, FULL),
        sliding=replace(base.text.sliding, num_key_value_heads=2),
        full=replace(base.text.full, k_eq_v=True),
        moe=Moe(num_experts=6, top_k_experts=2, intermediate_size=24),
    )
    return check_spec(replace(base, name="combined", text=text))


SMALL = tuple(f"{v}-small" for v in VARIANTS)
RANDOM = tuple(f"random-{i}" for i in ALL_SEEDS)
NAMES = (*SMALL, "combined", *RANDOM)


def _features(text: Text) -> set[tuple[str, bool]]:
    return {(feature, bool(has(text))) for feature, has in FEATURES.items()}


def fewest_of(seeds: Sequence[int]) -> tuple[str, ...]:
    """Return random specs that have, and are without, every feature that differs among them."""
    kept = covering([_features(random_spec(seed).text) for seed in seeds])
    return tuple(f"random-{seeds[i]}" for i in kept)


FEW = fewest_of(ALL_SEEDS)


def short(*kept: Any, of: Iterable[Any]) -> list[Any]:
    """All cases, tuples of several values or one, of which the short run has these alone."""
    return [
        pytest.param(
            *(c if isinstance(c, tuple) else (c,)), marks=[pytest.mark.full] * (c not in kept)
        )
        for c in of
    ]


def few(names: Iterable[str]) -> list[Any]:
    """Cases of a test that runs many models: the other random specs are left to `--full`, and so
    are variants with the structure of another."""
    spare = {*RANDOM, "e4b-small", "31b-small"} - {*FEW}
    return short(*({*(names := [*names])} - spare), of=names)


def fewest(names: Iterable[str]) -> list[Any]:
    """Cases of a test to which each model is dear: specs that have every feature between them, and
    the others with `--full`."""
    spare = {*NAMES} - {"combined", *FEW}
    return short(*({*(names := [*names])} - spare), of=names)


@cache
def widened(name: str) -> Spec:
    """A tiny spec whose rows are multiples of 256, as blocks of GGUF's K types are; its projections
    of per-layer embeddings are not."""
    spec = spec_called(name)
    text = replace(spec.text, vocab_size=512, hidden_size=256, intermediate_size=256)
    if not text.norms_about_zero:  # of which a GGUF file says no other pattern
        text = replace(text, num_hidden_layers=2, pattern=("sliding", "full"))
    if text.moe:
        text = replace(text, moe=replace(text.moe, intermediate_size=256))
    if text.ple:
        ple = replace(text.ple, dim=64)
        text = replace(text, num_hidden_layers=4, num_kv_shared_layers=2, ple=ple)
    return check_spec(replace(spec, text=text))


@cache
def spec_called(name: str) -> Spec:
    """`e2b-small`, `random-7`, `combined`, or a shipped spec."""
    if name == "combined":
        return combined()
    if name.startswith("random-"):
        return random_spec(int(name.removeprefix("random-")))
    if name.endswith("-small"):
        return shrink(load_spec(name.removesuffix("-small")))
    return load_spec(name)


def two_layers(width: int, vocab: int) -> Spec:
    """Two layers, one of them without K and V of its own: files of few KiB."""
    base = load_spec("tiny-ple")
    text = replace(
        base.text,
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=width,
        num_hidden_layers=2,
        num_attention_heads=1,
        pattern=("full",),
        full=replace(base.text.full, head_dim=width, num_key_value_heads=1),
        num_kv_shared_layers=1,
        ple=replace(base.text.ple, dim=width // 2, vocab_size=vocab),  # type: ignore[type-var]
    )
    return check_spec(replace(base, name="small", text=text))


def cut(spec: Spec, layers: int) -> Spec:
    """The first layers alone; where the last of them share keys, so does the same part of these."""
    text = spec.text
    shared = text.num_kv_shared_layers * layers // text.num_hidden_layers
    shared = min(shared, layers - len(text.pattern)) if shared else 0
    changed = {"num_hidden_layers": layers, "num_kv_shared_layers": shared}
    return replace(spec, name=f"{spec.name}-{layers}", text=replace(text, **changed))
