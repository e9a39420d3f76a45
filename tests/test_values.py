"""Values inside the plain graph: those of transformers, of a quantised engine's dense form, in all
phases; and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import g4ir
from g4ir.engine import values as values_module
from g4ir.errors import G4Error
from g4ir.spec.record import load_spec
from tests.cases import TABLES
from tests.cli_tools import ok, refused
from tests.oracle import random_tokens

NAMES = ["L*.out", "L*.attn.probs", "final.norm", "logits", "L*.k.next"]
LIMITS: dict[str, Any] = {"max_seq": 64, "prefill_chunk": 16, "draft_tokens": 3}


@pytest.mark.parametrize("phase", ["prefill", "decode", "verify"])
@pytest.mark.parametrize("name", ["tiny-dense", "tiny-moe", "tiny-ple", "tiny-gemma3"])
def test_values_are_those_of_transformers(name: str, phase: str, make_engine: Any) -> None:
    spec, engine = load_spec(name), make_engine(name, **LIMITS)
    ids = random_tokens(spec, 1, 37)
    module = g4ir.module(spec, random_weights=0)
    with torch.no_grad():
        out = module(ids, output_hidden_states=True, output_attentions=True)
    got = engine.values(ids, NAMES, phase)
    want = {f"L{i}.out": t for i, t in enumerate(out.hidden_states[1:-1])}
    want |= {"final.norm": out.hidden_states[-1], "logits": out.logits}
    want |= {f"L{i}.attn.probs": t.transpose(1, 2) for i, t in enumerate(out.attentions)}
    assert all((got[k] - t).abs().max() < 1e-4 for k, t in want.items())
    assert {t.shape[:2] for t in got.values()} == {(1, 37)}


@pytest.mark.parametrize(
    "options", [{"quant": "int4"}, {"quant": "int8", "kv_dtype": "int8", "backend": "torch"}]
)
def test_quantised_engines_have_the_values_of_their_dense_forms(
    options: dict[str, Any], make_engine: Any
) -> None:
    engine = make_engine("tiny-ple", **LIMITS, **options)
    ids = random_tokens(engine.spec, 1, 29)
    with torch.no_grad():
        want = g4ir.module(engine.path)(ids, output_hidden_states=True).hidden_states
    names = [*(f"L{i}.out" for i in range(7)), "final.norm"]
    got = engine.values(ids[0], names)
    assert all((got[k] - t).abs().max() < 1e-4 for k, t in zip(names, want[1:], strict=True))


def test_all_values_into_a_file(tmp_path: Path, make_engine: Any) -> None:
    engine, file = make_engine("tiny-ple", **LIMITS), tmp_path / "v.safetensors"
    ids = [2, 5, 7, *range(20, 40)]
    words = ("run", engine.path, "--tokens", ",".join(map(str, ids)), "--dump-to", file)
    shown = json.loads(ok(*words, "--dump", "**", "--json"))
    want = engine.values(ids, ["**"])
    with safe_open(file, "pt") as opened:
        assert json.loads(opened.metadata()["tokens"]) == ids
        assert {*opened.keys()} == {*want} == {*shown} and len(want) > 200
        assert all(torch.equal(opened.get_tensor(k), t) for k, t in want.items())
    for name in ("embeds", "L0.ple", "L7.v.next", "L5.attn.q.rope", "ple.stacked"):
        assert want[name].shape[:2] == (1, 23) and shown[name]["shape"] == [*want[name].shape]
    assert [*tmp_path.iterdir()] == [file]


@pytest.mark.parametrize(("tokens", "names", "phase", "message"), TABLES["values"])
def test_refused(tokens: Any, names: Any, phase: str, message: str, make_engine: Any) -> None:
    with pytest.raises(G4Error, match=message):
        make_engine("tiny-ple", **LIMITS).values(tokens, names, phase)


def test_more_than_memory_is_refused(make_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values_module, "free_memory", lambda: 100)
    with pytest.raises(G4Error, match="name fewer, or write them to a file"):
        make_engine("tiny-ple", **LIMITS).values([2, 3], ["L*.out"])


def test_flags_that_do_not_go_together(tmp_path: Path, make_engine: Any) -> None:
    path = make_engine("tiny-ple", **LIMITS).path
    run, dump = ("run", path, "--tokens", "2"), ("--dump", "L0.out")
    assert "go together" in refused(*run, *dump)
    to = ("--dump-to", tmp_path / "no" / "f.safetensors")
    assert "no such directory" in refused(*run, *dump, *to)
    to = ("--dump-to", tmp_path / "f.safetensors")
    assert "leave out --chat" in refused("run", path, "x", "--chat", *dump, *to)
    assert "did you mean L0.out?" in refused(*run, "--dump", "L0.oot", *to)
    assert not [*tmp_path.iterdir()]
