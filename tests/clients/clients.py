"""`make test-clients`: real clients, in their own environment (packages.txt, package.json), over a
served tiny engine whose words are dictated. Not part of `make test`: their packages come from the
indexes.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from g4ir.backends.sampling import SamplingParams
from tests.serve.running import Running, Script, chat_engine, ready

HERE = Path(__file__).parent
PYTHON = HERE.parents[1] / "build" / "clients-env" / "bin" / "python"
WORDS = yaml.safe_load((HERE / "words.yaml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with ready(chat_engine(tmp_path_factory.mktemp("clients") / "engine", 1024)) as r:
        yield r


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("clients") / "long"
    with ready(chat_engine(folder, 1 << 16, HERE / "long.yaml", prefill_chunk=1024)) as r:
        yield r


def dictate(r: Running, patch: Any, answers: Sequence[Sequence[str]]) -> None:
    """Let the model say an answer after the other, whatever it is asked and held to."""
    prompts = r.server.prompts
    assert prompts
    controls, made, left = prompts.vocabulary.controls, prompts._held, [*answers]

    def dictated(*given: Any) -> SamplingParams:
        words = left.pop(0) if len(left) > 1 else left[0]
        ids = [i for w in words for i in ([controls[w]] if w in controls else r.ids(w))]
        return replace(made(*given), allowed=Script(ids))

    patch.setattr(prompts, "_held", dictated)


@pytest.mark.parametrize("name", WORDS["cases"])
def test_clients(
    request: pytest.FixtureRequest, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = request.getfixturevalue("long" if name.startswith("codex") else "served")
    dictate(served, monkeypatch, [WORDS["answers"][a] for a in WORDS["cases"][name]])
    env = {**os.environ, "NO_PROXY": "*", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    words = [str(PYTHON), str(HERE / "cases.py"), name, served.url]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
