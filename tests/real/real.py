"""`make test-real`: an engine of trained weights, Gemma 3 270M in Q4_K_M (see packages.txt).

Not part of `make test`: it needs 253 MB from the package index and minutes.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

import g4ir
from g4ir.chat import Template, Vocabulary, make_prompt
from g4ir.chat.prompt import text_ids
from g4ir.chat.tokenizer_file import read_tokenizer
from g4ir.check.documents import Reader
from g4ir.check.hf import hf_model
from g4ir.check.logits import verify_engine
from g4ir.check.peers import HfPeer
from g4ir.check.score import Score, Sums, score_windows
from g4ir.check.tokens import plain_ids
from g4ir.cli import main
from g4ir.engine.engine import Engine
from g4ir.weights.checkpoint import read_side_files
from g4ir.weights.origin import find_origin
from tests.real.corpus import texts

HERE = Path(__file__).parent
REAL = HERE.parents[1] / "build" / "real"
MODEL = REAL / "gemma-3-270m-q4_k_m.gguf"
#: tokenizer and chat template of the instructed models
INSTRUCTED = REAL / "package" / "models"
EXPECTED = yaml.safe_load((HERE / "expected.yaml").read_text(encoding="utf-8"))
PROMPTS, TEXTS = EXPECTED["prompts"], EXPECTED["texts"]
#: new tokens of a prompt
COUNT = 24
#: the logits of two tokens are nearly equal: one unit of bf16 between 16 and 32 is 0.125
CLOSE = 0.3


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    out = tmp_path_factory.mktemp("real") / "engine"
    limits: dict[str, Any] = {"max_seq": 1024, "prefill_chunk": 256, "all_logits": True}
    with g4ir.build(None, out, checkpoint=MODEL, backend="torch", **limits) as made:
        yield made


@pytest.fixture(scope="module")
def peer(engine: Engine) -> HfPeer:
    """Transformers on the dequantised weights."""
    return HfPeer(hf_model(engine, find_origin(MODEL)))


@pytest.mark.parametrize("prompt", PROMPTS)
def test_prompts(engine: Engine, peer: HfPeer, prompt: str) -> None:
    """Their token ids; greedy tokens are those of transformers up to a close call."""
    expected = PROMPTS[prompt]
    ids = engine.tokenizer().encode(prompt, add_special_tokens=False).ids
    assert ids == expected["ids"]
    given = torch.tensor([2, *ids])
    want, logits = peer.greedy(given, COUNT, plain_ids(engine))
    got = engine.generate(given, max_new_tokens=COUNT, stop_ids=())
    differs = next((i for i in range(COUNT) if got[i] != want[i]), None)
    if differs is not None:
        best = logits[differs].topk(2).values
        assert best[0] - best[1] < CLOSE, f"token {differs}: {got} and {want}"
    assert engine.tokenizer().decode(got).startswith(expected.get("says", ""))


def test_likelihood_of_texts(engine: Engine, peer: HfPeer) -> None:
    """Within 0.01 nats of what is known, and of the loss of transformers."""
    files = {str(HERE / f"{name}.txt"): known for name, known in TEXTS.items()}
    scores: list[Score] = [*score_windows([engine], Reader(engine, 1024).files(files))]
    for one, (file, known) in zip(scores, files.items(), strict=True):
        assert (one.document, one.tokens) == (file, known["tokens"])
        assert one.nll == pytest.approx(known["nll"], abs=0.01)
        ids = torch.tensor([one.ids])
        with torch.no_grad():
            loss = float(peer.model(input_ids=ids, labels=ids).loss)
        assert one.nll == pytest.approx(loss, abs=0.01)
    total = sum((s.sums for s in scores), Sums()).means()
    mean = sum(t["tokens"] * t["nll"] for t in TEXTS.values()) / total["tokens"]
    assert total["nll"] == pytest.approx(mean, abs=0.01)


def test_scores_in_float32(tmp_path: Path) -> None:
    """`score` and `verify --text` are the loss of transformers to 1e-4 nats."""
    limits: dict[str, Any] = {"max_seq": 1024, "prefill_chunk": 512, "all_logits": True}
    with g4ir.build(
        None, tmp_path / "e", checkpoint=MODEL, backend="reference", dtype="float32", **limits
    ) as made:
        peer = HfPeer(hf_model(made, find_origin(MODEL)))
        files = {str(HERE / f"{name}.txt"): name for name in TEXTS}
        for one in score_windows([made], Reader(made, 1024).files(files)):
            ids = torch.tensor([one.ids])
            with torch.no_grad():
                loss = float(peer.model(input_ids=ids, labels=ids).loss)
            print(f"{files[one.document]}: {one.nll:.6f}, transformers {loss:.6f}")
            assert one.nll == pytest.approx(loss, abs=1e-4)


def test_logits_are_those_of_transformers(engine: Engine) -> None:
    """On the beginning of a text, in chunks and single steps."""
    text = (HERE / "english.txt").read_text()
    ids = [2, *engine.tokenizer().encode(text, add_special_tokens=False).ids]
    report = verify_engine(engine, "hf", tokens=ids[:64], checkpoint=MODEL)
    assert report.ok, report.text()


@pytest.mark.usefixtures("own_home")
def test_prove(tmp_path: Path) -> None:
    """Every part passes, at 4K in 300 s of processor time; the file's values are the engine's."""
    words, start = ("--ctx", "4K", "--kv-dtype", "bfloat16"), time.process_time()
    limit = ("--time-limit", "3600", "--json", str(tmp_path / "p.json"))
    assert main(["prove", str(MODEL), *words, *limit]) == 0
    assert time.process_time() - start < 300
    parts = {p["name"]: p for p in json.loads((tmp_path / "p.json").read_text())["parts"]}
    assert [n for n, p in parts.items() if not p["ok"]] == ["quantisation"]
    assert parts["quantisation"]["data"]["kl"] < 0.01
    assert sum(n["found"] for n in parts["context 4K"]["data"]["needles"]) >= 5


def test_token_ids_of_a_corpus() -> None:
    """Those of the library on the tokenizer.json of the instructed models, whether the tokenizer
    comes from there or from GGUF; the exceptions are of two kinds of generated texts."""
    kinds, given = zip(*texts(), strict=True)
    file = INSTRUCTED / "tokenizer.json"
    want = Tokenizer.from_file(str(file)).encode_batch(given, add_special_tokens=False)
    for files in (read_side_files(INSTRUCTED), find_origin(MODEL).side_files()):
        own = read_tokenizer(file, files["tokenizer.json"])
        found = zip(kinds, text_ids(own, given), want, strict=True)
        other = Counter(kind for kind, ids, theirs in found if ids != theirs.ids)
        same = files["tokenizer.json"] == file.read_bytes()
        assert dict(other) == ({} if same else EXPECTED["other_ids"]) and len(given) == 20_000


SYSTEM, ASKED = (
    {"role": "system", "content": "Be brief. "},
    {"role": "user", "content": " Hi <b>\n"},
)
ANSWER = {"role": "assistant", "content": " Hello\n\n"}
PARTS = {"role": "user", "content": [{"type": "text", "text": " a b "}]}


@pytest.mark.parametrize(
    "messages", [[ASKED], [SYSTEM, ASKED], [SYSTEM, ASKED, ANSWER, PARTS], [PARTS, ANSWER, ASKED]]
)
def test_chat_of_the_instructed_models(messages: list[dict[str, Any]]) -> None:
    """The built-in template and the published one write what transformers renders, in as many
    tokens."""
    config = json.loads((INSTRUCTED / "tokenizer_config.json").read_text())
    given = {"add_generation_prompt": True, "bos_token": "<bos>"}
    (text,), _ = render_jinja_template([messages], chat_template=config["chat_template"], **given)
    library = Tokenizer.from_file(str(INSTRUCTED / "tokenizer.json"))
    for form in ("gemma3", Template.open(INSTRUCTED, "gemma3")):
        prompt = make_prompt(messages, None, form)
        ids = Vocabulary(library, "gemma3").encode(prompt)
        assert prompt.text == text and ids == library.encode(text, add_special_tokens=False).ids
