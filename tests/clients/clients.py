"""`make test-clients`: real clients, in their own environment (packages.txt, package.json), over a
served tiny engine whose words are dictated. Not part of `make test`: their packages come from the
indexes.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import yaml

import g4ir
from tests.serve.running import Running, chat_engine, ready
from tests.talking import Dictated
from tests.test_embeddings import folder_of

HERE = Path(__file__).parent
BUILD = HERE.parents[1] / "build"
PYTHON, EVALUATOR = (BUILD / f"{name}-env" / "bin" / "python" for name in ("clients", "evaluators"))
MODEL = BUILD / "real" / "gemma-3-270m-q4_k_m.gguf"
#: an answer is under way for long enough to be left
SLOW = {"backend": "reference"}
WORDS = yaml.safe_load((HERE / "words.yaml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with ready(chat_engine(tmp_path_factory.mktemp("clients") / "engine", 1024, **SLOW)) as r:
        yield r


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("clients")
    g4ir.build(None, out=folder / "e", checkpoint=folder_of(folder / "c")).close()
    with ready(folder / "e") as r:
        yield r


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("clients") / "long"
    with ready(chat_engine(folder, 1 << 16, HERE / "long.yaml", prefill_chunk=1024, **SLOW)) as r:
        yield r


def dictate(r: Running, patch: Any, answers: Sequence[Sequence[str]]) -> None:
    """Let the model say an answer after the other, whatever it is asked and held to."""
    prompts = r.server.prompts
    assert prompts
    controls, left = prompts.vocabulary.controls, [*answers]

    def dictated(*given: Any) -> Dictated:
        words = left.pop(0) if len(left) > 1 else left[0]
        ids = [i for w in words for i in ([controls[w]] if w in controls else r.ids(w))]
        return Dictated(ids, 512, 0.0, None)

    patch.setattr(prompts, "_mask", dictated)


def evaluated(r: Running, folder: Path, tokenizer: Path, *checkpoint: Path) -> Any:
    """What lm-eval finds."""
    words = [str(EVALUATOR), str(HERE / "evaluators.py"), r.server.name, r.url]
    words += map(str, (folder, tokenizer, *checkpoint))
    env = {**os.environ, "NO_PROXY": "*", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_lm_eval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-likelihoods are those of `score`, of ids without <bos>, which the tiny tokenizer does not
    add; and it generates."""
    folder = chat_engine(tmp_path / "engine", 1024, all_logits=True, **SLOW)
    with ready(folder) as r:
        r.dictate(monkeypatch, "hello", "<turn|>")
        found = evaluated(r, tmp_path, folder)
        assert found["says"] == ["hello", "hello"]
        documents = json.loads((tmp_path / "follows.json").read_text())
        for document, values in zip(documents, found["served"], strict=True):
            head = len(r.ids(document["context"]))
            for choice, value in zip(document["choices"], values, strict=True):
                ids = r.ids(f"{document['context']} {choice}")
                (score,) = g4ir.score(r.service.engine, [ids])
                assert value == pytest.approx(sum(score.logprobs[head:]) / len(choice), abs=1e-4)


def test_lm_eval_of_a_real_model(tmp_path: Path) -> None:
    """Log-likelihoods for each character are those of its `hf` backend in float32, on the weights
    that the engine was built from, dequantised."""
    limits: dict[str, Any] = {"max_seq": 1024, "prefill_chunk": 64, "all_logits": True}
    g4ir.build(None, tmp_path / "engine", checkpoint=MODEL, backend="torch", **limits).close()
    g4ir.export(MODEL, tmp_path / "hf", dtype="float32")
    with ready(tmp_path / "engine") as r:
        found = evaluated(r, tmp_path, tmp_path / "hf", tmp_path / "hf")
    pairs = [pair for both in zip(found["served"], found["hf"]) for pair in zip(*both, strict=True)]
    apart = [abs(ours - theirs) for ours, theirs in pairs]
    print(f"nats a character apart: mean {mean(apart):.5f}, most {max(apart):.5f}")
    assert len(pairs) == 200 and mean(apart) < 0.005


@pytest.mark.parametrize("name", WORDS["cases"])
def test_client(request: pytest.FixtureRequest, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = "encoder" if name.endswith("embeddings") else "served"
    served = request.getfixturevalue("long" if name.startswith("codex") else kind)
    if answers := [WORDS["answers"][a] for a in WORDS["cases"][name]]:
        dictate(served, monkeypatch, answers)
    env = {**os.environ, "NO_PROXY": "*", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    words = [str(PYTHON), str(HERE / "cases.py"), name, served.url]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
