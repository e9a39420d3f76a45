"""`--bits`: formats by measured sensitivity, under a budget."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import g4ir
from g4ir.builder import bits as bits_module
from g4ir.builder.bits import Measured, choose
from g4ir.errors import InputError
from g4ir.ir.names import layer_of
from g4ir.quant.recipe import SCHEMES, find_quant_config
from g4ir.quant.rewrite import weights_of
from tests.cases import TABLES
from tests.cli_tools import g4ir as command
from tests.cli_tools import tokenizer
from tests.configs import widened
from tests.engines import random_checkpoint
from tests.spies import spy

TEXT = "ab w3 a€ w7 w12\nw9 ab a w3\n" * 40
OPTIONS: dict[str, Any] = {"backend": "reference", "dtype": "float32", "max_seq": 64}
OPTIONS |= {"prefill_chunk": 16, "all_logits": True}
FORMS = ("nl2", "nl3", "nl4", "int5", "int8")


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 50), st.floats(1e-6, 1e3)), min_size=1, max_size=12),
    st.floats(0, 1),
)
def test_choice(weights: list[tuple[int, float]], share: float) -> None:
    """The budget is kept, no other format of a weight would gain for free, and no format that all
    weights could have diverges less."""
    costs = {
        f"w{i}": [
            Measured(SCHEMES[form], size * (i + 2), sensitivity * 4.0**-i)
            for i, form in enumerate(FORMS)
        ]
        for i, (size, sensitivity) in enumerate(weights)
    }
    uniform = [[each[i] for each in costs.values()] for i in range(len(FORMS))]
    sums = [sum(m.nbytes for m in u) for u in uniform]
    budget = sums[0] + share * (sums[-1] - sums[0])
    chosen = choose(costs, budget, 4)
    made = [next(m for m in costs[n] if m.scheme == s) for n, s in chosen.items()]
    left = budget - sum(m.nbytes for m in made)
    assert left >= 0 and len(made) == len(costs)
    for m, each in zip(made, costs.values(), strict=True):
        assert not any(0 < b.nbytes - m.nbytes <= left for b in each if b.divergence < m.divergence)
    best = min(sum(m.divergence for m in u) for u, n in zip(uniform, sums) if n <= budget)
    largest = max(m.divergence for each in costs.values() for m in each)
    assert sum(m.divergence for m in made) <= best + largest
    with pytest.raises(InputError, match="--bits 4: the smallest formats of these weights have"):
        choose(costs, sums[0] * 0.99, 4)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with rows of 256 and a tokenizer, and a text."""
    folder = tmp_path_factory.mktemp("bits")
    random_checkpoint(folder / "dense", widened("tiny-dense"))
    tokenizer().save(str(folder / "dense" / "tokenizer.json"))
    (folder / "text.txt").write_text(TEXT)
    return folder


def test_an_engine_of_some_bits(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its config has at most so many, is in the engine as a file that builds the same one, and its
    divergence is near what was measured, once for all budgets."""
    given = {"checkpoint": files / "dense", "calibrate": files / "text.txt", **OPTIONS}
    costs: dict[str, Any] = {}
    spy(monkeypatch, bits_module, "choose", lambda measured, *_: costs.update(measured))
    tokens = torch.tensor([tokenizer().encode(TEXT, add_special_tokens=False).ids[:48]])
    plain = {**given, "calibrate": ()}
    with g4ir.build(None, tmp_path / "plain", **plain) as engine:
        want = engine.session(1).prefill(tokens, all_logits=True).log_softmax(-1)
    divergences = []
    for bits in (3.5, 6.0):
        out = tmp_path / f"e{bits}"
        with g4ir.build(None, out, bits=bits, **given) as engine:
            got = engine.session(1).prefill(tokens, all_logits=True).log_softmax(-1)
            config, param = engine.facts.config.quant, engine.param("L1.mlp.w_up")
        matrices = {n: t for n, t in weights_of(engine.spec).items() if layer_of(n) is not None}
        schemes = config.schemes(weights_of(engine.spec))
        used = sum(schemes[n].nbytes(t, "f32") for n, t in matrices.items())
        assert used * 8 <= bits * sum(t.numel() for t in matrices.values())
        assert len({schemes[n].form for n in matrices}) > 1
        monkeypatch.setattr(bits_module, "_squared_gradients", None)
        divergences.append(float((want.exp() * (want - got)).sum(-1).mean()))
        expected = sum(
            next(m.divergence for m in costs[n] if m.scheme == schemes[n]) for n in matrices
        )
        assert abs(math.log(expected / divergences[-1])) < math.log(4)
        read = find_quant_config(out / "quant.yaml")
        assert read and read.schemes(weights_of(engine.spec)) == schemes
    assert divergences[1] < divergences[0] / 4
    again = {**given, "quant": out / "quant.yaml"}
    with g4ir.build(None, tmp_path / "again", **again) as engine:
        assert torch.equal(engine.param("L1.mlp.w_up"), param)


#: a build in a process of its own, which is killed at a measurement
KILLED = """
import os, signal, sys
import g4ir
from g4ir.builder import bits
left, measure = int(sys.argv[4]), bits._divergences
def killed(*args):
    global left
    left -= 1
    return measure(*args) if left else os.kill(os.getpid(), signal.SIGKILL)
bits._divergences = killed
options = {"backend": "reference", "dtype": "float32", "max_seq": 64}
given = {"checkpoint": sys.argv[1], "calibrate": sys.argv[2], "bits": 4.0}
g4ir.build(None, sys.argv[3], **given, **options)
"""


def test_a_build_that_was_killed_goes_on(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers that were measured are not measured again, and the config is that of one run."""
    text, out = tmp_path / "text.txt", tmp_path / "killed"
    text.write_text(f"{TEXT}w9 w3")  # of no other test
    given = {"checkpoint": files / "dense", "calibrate": text, "bits": 4.0, "max_seq": 64}
    given |= {"backend": "reference", "dtype": "float32"}
    calls, written = list[str](), set[Path]()
    spy(monkeypatch, bits_module, "_divergences", lambda *_: calls.append("one"))
    spy(monkeypatch, bits_module, "write_file", lambda file, *_: written.add(file))
    g4ir.build(None, tmp_path / "whole", **given).close()
    whole, (measured,) = len(calls), written
    measured.unlink()
    words = [sys.executable, "-c", KILLED, files / "dense", text, out, str(3 * whole // 4)]
    assert subprocess.run(words).returncode == -signal.SIGKILL and not out.exists()
    done = len(json.loads(measured.read_bytes()))
    calls.clear()
    g4ir.build(None, out, **given).close()
    assert len(calls) == whole - done and 0 < done < whole
    assert (out / "quant.yaml").read_text() == (tmp_path / "whole/quant.yaml").read_text()


@pytest.mark.parametrize(("words", "says"), TABLES["bits refused"])
def test_refused(files: Path, tmp_path: Path, words: list[str], says: str) -> None:
    base = ["--checkpoint", files / "dense", "--backend", "reference", "--out", tmp_path / "e"]
    outcome = command("build", *base, *words)
    assert outcome.code == 2 and says in outcome.err and not (tmp_path / "e").exists()
