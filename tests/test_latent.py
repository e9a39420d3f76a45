"""One cache instead of two on layers with K = V: the two forms against plain caches.

The interpreter runs every spec that has such a layer; compiled engines run one spec that has each
kind of it, in both forms.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

import g4ir
from g4ir.errors import InputError, SpecError
from g4ir.passes.latent_kv import FORMS, LatentOptions, latent_kv
from g4ir.plan.latent import TABLE, LatentMeasurement, choose_form, read_table, write_table
from g4ir.spec.parts import FULL, SLIDING, Rope
from g4ir.spec.record import Spec, check_spec, load_spec
from g4ir.spec.shrink import shrink
from tests.configs import NAMES, SMALL, few, fewest, spec_called
from tests.oracle import Oracle, close_calls, cosine, find_bf16_oracle, find_oracle, random_tokens
from tests.parity import prefill_then_decode
from tests.runner import DTYPES, Session, built_program, open_session
from tests.test_bf16 import COSINE

LATENT = ("value", "raw")


# --- specs ------------------------------------------------------------------------------------


def every_kind() -> Spec:
    """K = V on a ring that rotates half of its dims, on a full layer, and on one that reads it."""
    base = shrink(load_spec("31b"))
    text = replace(
        base.text,
        num_hidden_layers=3,
        num_kv_shared_layers=1,
        pattern=(SLIDING, FULL, FULL),
        sliding=replace(
            base.text.sliding, window=5, k_eq_v=True, rope=Rope("proportional", 1e4, 0.5, 2.0)
        ),
    )
    return check_spec(replace(base, name="every-kind", text=text))


def find(name: str) -> Spec:
    return every_kind() if name == "every-kind" else spec_called(name)


def has_latent(name: str, form: str) -> bool:
    """Whether a layer that owns keys takes this form: `value` needs dims that are not rotated."""
    own = (x.attention for x in find(name).layers() if x.donor is None)
    return any(a.k_eq_v and (form == "raw" or a.rope.rotary_fraction < 1) for a in own)


ALL = ("every-kind", *NAMES)
CASES = [(n, f) for n in ALL for f in LATENT if has_latent(n, f)]
SPARE = {p.values[0] for p in few(ALL) if p.marks} - {"31b-small"}
SHORT = [pytest.param(*c, marks=[pytest.mark.full] * (c[0] in SPARE)) for c in CASES]


def test_the_cases_have_every_kind() -> None:
    raw, value = ([find(n) for n, f in CASES if f == form] for form in ("raw", "value"))
    for specs in (raw, value):
        tied = [(s, x) for s in specs for x in s.layers() if x.attention.k_eq_v]
        assert {x.kind for _, x in tied} == {SLIDING, FULL}
        assert any(x.donor is not None for _, x in tied)
        assert any(x.attention.rope.factor for _, x in tied)
    assert any(s.text.attn_logit_softcapping for s in raw)
    assert any(s.text.num_attention_heads > 4 for s in value)
    rotated = {n for n, f in CASES if f == "raw"} - {n for n, f in CASES if f == "value"}
    assert rotated, "the form `value` leaves a layer whose dims are all rotated"


# --- the interpreter --------------------------------------------------------------------------


def session_of(oracle: Oracle, dtype: torch.dtype, form: str, chunk: int) -> Session:
    """All logits, on the oracle's weights in another dtype."""
    program = built_program(oracle.spec, True, (), DTYPES[dtype], form)
    tensors = {k: t.to(dtype) for k, t in oracle.tensors.items()}
    return Session(program, tensors, 2, chunk, 128, True)


@cache
def logits(name: str, dtype: torch.dtype, form: str, chunk: int) -> torch.Tensor:
    """Of a prompt in chunks and of each token decoded after it, past three windows."""
    oracle = find_oracle(find(name))
    return prefill_then_decode(session_of(oracle, dtype, form, chunk), oracle.tokens, oracle.prompt)


@pytest.mark.covering
@pytest.mark.parametrize("chunk", [pytest.param(1, marks=pytest.mark.full), 7, 64])
@pytest.mark.parametrize(("name", "form"), SHORT)
def test_equal_in_float64(name: str, form: str, chunk: int) -> None:
    want = logits(name, torch.float64, "off", chunk)
    error = (logits(name, torch.float64, form, chunk) - want).abs().max()
    assert error <= 1e-12 * want.pow(2).mean().sqrt()


@pytest.mark.covering
@pytest.mark.parametrize("chunk", [pytest.param(1, marks=pytest.mark.full), 7, 64])
@pytest.mark.parametrize("name", few(n for n, f in CASES if f == "raw"))
def test_raw_is_bit_equal_in_bf16(name: str, chunk: int) -> None:
    want = logits(name, torch.bfloat16, "off", chunk)
    assert want.dtype == torch.bfloat16
    assert torch.equal(logits(name, torch.bfloat16, "raw", chunk), want)


@pytest.mark.parametrize("name", fewest(n for n in (*SMALL, "combined") if (n, "value") in CASES))
def test_value_in_bf16(name: str) -> None:
    """As near to transformers in bf16 as the plain caches have to be."""
    oracle = find_bf16_oracle(find(name))
    session = open_session(oracle, 2, 7, True, latent_kv="value")
    got = prefill_then_decode(session, oracle.tokens, oracle.prompt)
    assert cosine(got, oracle.logits).min() > COSINE
    clear = ~close_calls(oracle.logits.float(), oracle.self_difference)
    assert torch.equal(got.argmax(-1)[clear], oracle.logits.argmax(-1)[clear])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_long_sequence_is_as_accurate(dtype: torch.dtype) -> None:
    """Against float64: no further away than the plain caches, up to the noise of rounding."""
    want = long_logits(torch.float64, "off")
    off, *forms = ((long_logits(dtype, f) - want).square().mean().sqrt() for f in ("off", *LATENT))
    assert max(forms) <= 1.2 * off


def long_logits(dtype: torch.dtype, form: str) -> torch.Tensor:
    """Of every 16th of 700 tokens, in chunks, on weights of 16 bits."""
    spec = load_spec("tiny-dense")
    tensors = {k: t.bfloat16().to(dtype) for k, t in find_oracle(spec).tensors.items()}
    program = built_program(spec, True, (), DTYPES[dtype], form)
    session = Session(program, tensors, 1, 128, 768, True)
    return session.prefill(random_tokens(spec, 1, 700), all_logits=True)[:, ::16].double()


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(InputError, match="form 'half': expected one of off, value, raw"):
        latent_kv(built_program(every_kind()).graphs["decode"], LatentOptions("half"))


# --- bytes ------------------------------------------------------------------------------------


def wide_heads() -> Spec:
    """A head dim of 512 with 128 rotated, as the large variants have it."""
    base = shrink(load_spec("31b"))
    text = replace(base.text, num_hidden_layers=6, full=replace(base.text.full, head_dim=512))
    return check_spec(replace(base, name="wide-heads", text=text))


@pytest.mark.parametrize(("dtype", "rows"), [("f32", 3), ("bf16", 1)])
def test_bytes(tmp_path: Path, dtype: str, rows: int) -> None:
    """5/8 of the plain caches on layers with K = V, or at most 0.502; elsewhere the same."""
    held: dict[str, dict[bool, int]] = {}
    for form in FORMS:
        engine = g4ir.build(
            wide_heads(),
            tmp_path / form,
            random_weights=0,
            backend="reference",
            dtype=dtype,
            max_batch=3,
            max_seq=300,
            latent_kv=form,
        )
        tensors = engine.session(rows).state.tensors
        tied = {f"L{x.index}" for x in engine.spec.layers() if x.attention.k_eq_v}
        held[form] = {
            is_tied: sum(
                t.untyped_storage().nbytes()
                for name, t in tensors.items()
                if (name.partition(".")[0] in tied) == is_tied
            )
            for is_tied in (True, False)
        }
    plain = held["off"]
    assert held["value"][True] * 8 == plain[True] * 5
    assert plain[True] / 2 < held["raw"][True] <= 0.502 * plain[True]
    assert all(held[form][False] == plain[False] for form in LATENT)


# --- the table of measurements ----------------------------------------------------------------

ROW = LatentMeasurement("cpu", "bf16", 512, 128, 8, 8192, "raw")


def test_the_shipped_table_is_one() -> None:
    rows = read_table(TABLE)
    keys = [replace(r, form="off") for r in rows]
    assert len(set(keys)) == len(keys) and not any(r.device == "cuda" for r in rows)


@pytest.mark.parametrize(
    ("spec", "device", "dtype", "max_seq", "form"),
    [
        ("31b", "cpu", "bf16", 8192, "raw"),
        ("31b", "cpu", "bf16", 4096, "raw"),
        ("31b", "cpu", "bf16", 16384, "value"),
        ("31b", "cpu", "bf16", 12000, "value"),
        ("31b", "cpu", "bf16", 4095, "off"),
        ("31b", "cpu", "bf16", 131072, "off"),
        ("31b", "cpu", "f32", 8192, "off"),
        ("31b", "cuda", "bf16", 8192, "off"),
        ("e2b", "cpu", "bf16", 8192, "off"),
        ("tiny-dense", "cpu", "bf16", 8192, "off"),
        ("26b-a4b", "cpu", "bf16", 8192, "raw"),
    ],
)
def test_the_nearest_measurement_counts(
    spec: str,
    device: str,
    dtype: str,
    max_seq: int,
    form: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At most a factor of two away; plain where nothing of the kind was measured."""
    table = tmp_path / "forms.yaml"
    write_table([replace(ROW, context=16384, form="value"), ROW], table)
    assert read_table(table) == (replace(ROW, context=16384, form="value"), ROW)[::-1]
    rows = read_table(table)
    monkeypatch.setattr("g4ir.plan.latent.read_table", lambda: rows)
    assert choose_form(load_spec(spec), device, dtype, max_seq) == form


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("measured: [", "no table"),
        ("rows: []", "rows: unknown key"),
        ("measured: [{device: cpu}]", r"measured\[0\].dtype: is missing"),
        (
            "measured: [{device: cpu, dtype: bf16, head_dim: 512, rotated: 128, group: 8, "
            "context: 8192, form: half}]",
            r"form: must be off or value or raw.*found 'half'",
        ),
        (
            "measured: [{device: cpu, dtype: bf16, head_dim: 512, rotated: 128, group: 8, "
            "context: 0, form: raw}]",
            r"context: must be at least 1, found '0'",
        ),
    ],
)
def test_a_damaged_table_is_named(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "forms.yaml"
    file.write_text(text)
    with pytest.raises(SpecError, match=message) as e:
        read_table(file)
    assert str(file) in str(e.value)


def test_an_engine_keeps_its_form(tmp_path: Path) -> None:
    """`auto` where nothing was measured is plain; the manifest's graphs say what was built."""
    for form in (None, "raw"):
        options = {"latent_kv": form} if form else {}
        engine = g4ir.build(
            "tiny-dense",
            tmp_path / str(form),
            random_weights=0,
            backend="reference",
            max_seq=64,
            **options,
        )
        read = any(engine.program.graphs["decode"].find("attention_latent"))
        assert read == (form is not None)
