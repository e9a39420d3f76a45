"""Engine directories: what a build refuses, that builds repeat, what loading finds."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import g4ir
from g4ir import Engine, load_engine
from g4ir.builder.build import prepare
from g4ir.errors import InputError, MissingError
from g4ir.plan.options import BuildOptions
from tests.contract.flows import Flow
from tests.engines import agrees, some_tokens
from tests.test_team import disturbed


def test_what_is_not_offered(flow: Flow, engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One clear error before anything is built, never another engine than the one asked for."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    checkpoint = engines.checkpoint("tiny-moe")
    for why, given in flow.refuses.items():
        options = {k: v for k, v in given.items() if k != "says"}
        with pytest.raises((InputError, MissingError)) as caught:
            prepare(None, BuildOptions(checkpoint=checkpoint, backend=flow.backend, **options))
        assert str(caught.value) == given["says"], why


def test_another_dtype(flow: Flow, engines: Any, half: tuple[str, float]) -> None:
    """Logits are made in the engine's dtype, and handed out in float32; they are the reference's up
    to rounding."""
    dtype, budget = half
    ours = engines(flow.backend, "tiny-ple", dtype=dtype)
    tokens, want = some_tokens(2, 30), engines("reference", "tiny-ple", dtype=dtype)
    session = ours.session(2)
    got = session.prefill(tokens)
    assert got.dtype == torch.float32
    assert session.verify(tokens[:, :1]).dtype == getattr(torch, dtype)
    agrees(got, want.session(2).prefill(tokens), budget)


def test_building_twice_gives_the_same_files(flow: Flow, engines: Any, single: Engine) -> None:
    """Same graphs, weights and programs; nothing in a manifest depends on the day."""
    again = engines.build(flow.backend, "tiny-moe", "again")
    a, b = single.manifest, again.manifest
    assert list(a["files"]) == list(b["files"]) and a["compiled"] == b["compiled"]
    assert (a["backend"], a["g4ir"], a["dtype"]) == (flow.backend, g4ir.__version__, "f32")
    for name, kept in a["files"].items():
        assert kept == b["files"][name], name
    assert a == b


def test_an_engine_that_was_closed_says_so(flow: Flow, single: Engine, tmp_path: Path) -> None:
    with flow.using(tmp_path), load_engine(single.path) as engine:
        session = engine.session()
        logits = session.prefill([[2, 5]])
        agrees(logits, single.session().prefill([[2, 5]]), 0.0)
    for use in (
        lambda: engine.generate([2, 5], 2),
        lambda: engine.session(),
        lambda: session.decode(logits.argmax(-1)),
    ):
        with pytest.raises(InputError, match=f"^{engine.path}: this engine was closed; load it"):
            use()
    engine.close()  # once more does nothing


def test_a_forked_child_gets_an_error(engine: Engine) -> None:
    """It has none of its parent's threads, and would wait for them."""
    session = engine.session()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if not child:
        said = 0
        for use in (lambda: engine.generate([2, 5], 2), lambda: session.prefill([[2, 5]])):
            try:
                use()
            except InputError as e:
                said += "of which this is a fork" in str(e)
        os._exit(said)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2


def test_each_thread_gets_its_own_results(flow: Flow, single: Engine) -> None:
    """What sessions shared ended the process, or gave one thread the tensors of another."""
    if flow.emulated:
        assert not disturbed(single, steps=3, rounds=1)
        return
    command = [sys.executable, "-m", "tests.test_team", str(single.path)]
    how: dict[str, Any] = {"text": True, "capture_output": True, "timeout": 300}
    done = subprocess.run(command, cwd=Path(__file__).parents[2], **how)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
