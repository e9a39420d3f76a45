"""One cache instead of two on layers with K = V: the two forms against plain caches.

The tiny specs and `combined` are compared in float64 by test_passes.py; here are the kinds of layer
that they have not, bf16, and the choice of a form.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from g4ir.errors import InputError
from g4ir.passes.latent_kv import LatentOptions, latent_kv
from g4ir.plan.latent import TABLE, LatentMeasurement, choose_form, read_table, write_table
from g4ir.plan.resolve import find_latent
from g4ir.spec.parts import FULL, SLIDING, Rope
from g4ir.spec.record import Spec, check_spec, load_spec
from g4ir.spec.shrink import shrink
from tests.cases import TABLES
from tests.configs import spec_called
from tests.oracle import Oracle, close_calls, cosine, find_bf16_oracle, find_oracle
from tests.parity import prefill_then_decode
from tests.runner import DTYPES, Session, built_program, open_session
from tests.test_bf16 import COSINE

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


CASES = [("every-kind", "value"), ("every-kind", "raw"), ("combined", "value"), ("combined", "raw")]


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


@pytest.mark.parametrize("chunk", [7, 64])
@pytest.mark.parametrize(("name", "form"), CASES)
def test_equal_in_float64_and_raw_in_bf16_too(name: str, form: str, chunk: int) -> None:
    want = logits(name, torch.float64, "off", chunk)
    error = (logits(name, torch.float64, form, chunk) - want).abs().max()
    assert error <= 1e-12 * want.pow(2).mean().sqrt()
    if form == "raw":
        plain = logits(name, torch.bfloat16, "off", chunk)
        assert plain.dtype == torch.bfloat16
        assert torch.equal(logits(name, torch.bfloat16, "raw", chunk), plain)


@pytest.mark.parametrize("name", ["combined", pytest.param("31b-small", marks=pytest.mark.full)])
def test_value_in_bf16(name: str) -> None:
    """As near to transformers in bf16 as the plain caches have to be."""
    oracle = find_bf16_oracle(find(name))
    session = open_session(oracle, 2, 7, True, latent_kv="value")
    got = prefill_then_decode(session, oracle.tokens, oracle.prompt)
    assert cosine(got, oracle.logits).min() > COSINE
    clear = ~close_calls(oracle.logits.float(), oracle.self_difference)
    assert torch.equal(got.argmax(-1)[clear], oracle.logits.argmax(-1)[clear])


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(InputError, match="form 'half': expected one of off, value, raw"):
        latent_kv(built_program(every_kind()).graphs["decode"], LatentOptions("half"))


# --- the table of measurements ----------------------------------------------------------------

ROW = LatentMeasurement("cpu", "bf16", 512, 128, 8, 8192, "raw")


def test_the_shipped_table_is_one() -> None:
    rows = read_table(TABLE)
    keys = [replace(r, form="off") for r in rows]
    assert len(set(keys)) == len(keys) and not any(r.device == "cuda" for r in rows)


@pytest.mark.parametrize(("spec", "device", "dtype", "max_seq", "form"), TABLES["latent"]["forms"])
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


def test_a_form_that_no_layer_takes_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    for name in ("tiny-dense", "tiny-ple"):
        assert find_latent("value", load_spec(name), "cpu", "f32", 64) == "value"
    (warned,) = caplog.messages
    assert warned.startswith("--latent-kv value changes nothing: no layer of tiny-ple ")
