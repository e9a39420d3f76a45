"""One cache instead of two on layers with K = V, against plain caches.

The tiny specs and `combined` are compared in float64 by test_passes.py; here are the kinds of layer
that they have not, and bf16.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from g4ir.plan.resolve import check_latent
from g4ir.spec.parts import FULL, SLIDING, Rope
from g4ir.spec.record import Spec, check_spec, load_spec
from tests.configs import spec_called
from tests.oracle import Oracle, close_calls, cosine, find_bf16_oracle, find_oracle
from tests.parity import prefill_then_decode
from tests.runner import DTYPES, Session, built_program, open_session
from tests.shrink import shrink
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
@pytest.mark.parametrize("name", ["every-kind", "combined"])
def test_equal_in_float64(name: str, chunk: int) -> None:
    want = logits(name, torch.float64, "off", chunk)
    error = (logits(name, torch.float64, "value", chunk) - want).abs().max()
    assert error <= 1e-12 * want.pow(2).mean().sqrt()


@pytest.mark.parametrize("name", ["combined", pytest.param("31b-small", marks=pytest.mark.full)])
def test_value_in_bf16(name: str) -> None:
    """As near to transformers in bf16 as the plain caches have to be."""
    oracle = find_bf16_oracle(find(name))
    session = open_session(oracle, 2, 7, True, latent_kv="value")
    got = prefill_then_decode(session, oracle.tokens, oracle.prompt)
    assert cosine(got, oracle.logits).min() > COSINE
    clear = ~close_calls(oracle.logits.float(), oracle.self_difference)
    assert torch.equal(got.argmax(-1)[clear], oracle.logits.argmax(-1)[clear])


# --- the option -------------------------------------------------------------------------------


def test_a_form_that_no_layer_takes_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    for name in ("tiny-dense", "tiny-ple"):
        assert check_latent("value", load_spec(name)) == "value"
    (warned,) = caplog.messages
    assert warned.startswith("--latent-kv value changes nothing: no layer of tiny-ple ")
