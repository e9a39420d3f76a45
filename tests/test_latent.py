"""One cache instead of two on layers with K = V, against plain caches.

Every kind of layer is compared in float64 by test_passes.py; here is bf16.
"""

from __future__ import annotations

import pytest
import torch

from g4ir.plan.resolve import check_latent
from g4ir.spec.record import load_spec
from tests.configs import spec_called
from tests.oracle import close_calls, cosine, find_bf16_oracle
from tests.parity import prefill_then_decode
from tests.runner import open_session
from tests.test_bf16 import COSINE


@pytest.mark.parametrize("name", ["combined", pytest.param("31b-small", marks=pytest.mark.full)])
def test_value_in_bf16(name: str) -> None:
    """As near to transformers in bf16 as the plain caches have to be."""
    oracle = find_bf16_oracle(spec_called(name))
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
