"""`g4ir score` and `g4ir verify --text` against transformers and by formula; files of any size."""

from __future__ import annotations

import json
import math
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import g4ir
from g4ir import Engine, Session
from g4ir.chat.text_files import cut_blocks, read_text
from g4ir.check import score as scoring
from g4ir.check.documents import Reader
from g4ir.check.hf import hf_model
from g4ir.errors import InputError
from g4ir.weights.origin import find_origin
from tests.cases import TABLES
from tests.cli_tools import BUILD, built, refused, text_checkpoint
from tests.cli_tools import g4ir as command

#: longer than a context of 64 tokens, with characters of several bytes
LONG = "ab w3 a€ w7 w12\nw9 ab a w3\n" * 12
TOKENS = {"tokens": [2, 5, 7, 300, 9, 41], "labels": [-100, -100, 7, -100, 9, 41]}
#: nats
AGREES = 1e-4


@dataclass(frozen=True)
class World:
    """An engine with --all-logits, its checkpoint, and a folder."""

    folder: Path
    checkpoint: Path
    path: Path
    engine: Engine

    def file(self, name: str, content: str | bytes) -> Path:
        path = self.folder / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("score")
    checkpoint = text_checkpoint(folder / "c")
    path = built(folder / "e", "--checkpoint", checkpoint, "--all-logits")
    with g4ir.load_engine(path) as engine:
        yield World(folder, checkpoint, path, engine)


@pytest.fixture(scope="module")
def model(world: World) -> Any:
    """The transformers model of the same weights, f32."""
    return hf_model(world.engine, find_origin(world.checkpoint))


def hf_loss(model: Any, ids: list[int], labels: list[int]) -> float:
    with torch.no_grad():
        found = model(input_ids=torch.tensor([ids]), labels=torch.tensor([labels]))
    return float(found.loss)


def scores(*words: str | Path) -> dict[str, Any]:
    outcome = command(*words, "--json")
    assert outcome.code == 0, outcome.err
    return json.loads(outcome.out)


@pytest.mark.parametrize("chunk_logits", [1 << 25, 5 * 512])
def test_losses_are_those_of_transformers(
    world: World, model: Any, chunk_logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a text, of tokens with labels, and of each window of a text longer than the context; no
    call returns more logits than are allowed."""
    monkeypatch.setattr(scoring, "CHUNK_LOGITS", chunk_logits)
    sizes, prefill = [], Session.prefill

    def counted(self: Session, tokens: Any, **options: Any) -> torch.Tensor:
        made = prefill(self, tokens, **options)
        sizes.append(made.numel())
        return made

    monkeypatch.setattr(Session, "prefill", counted)
    lines = [
        {"text": "ab w3 a€ w7", "id": None},
        {"id": "x", **TOKENS},
        {"text": LONG, "bos": True},
    ]
    file = world.file("d.jsonl", "\n".join(map(json.dumps, lines)))
    found = scores("score", world.path, "--jsonl", file)
    assert max(sizes) <= max(chunk_logits, 512)
    windows = [*Reader(world.engine, 64).lines(str(file))]
    parts = [(d["id"], d["part"]) for d in found["documents"]]
    assert parts == [(w.document, w.part) for w in windows]
    assert len(windows) > 4
    for w, d in zip(windows, found["documents"], strict=True):
        assert d["token_ids"] == w.ids and len(w.ids) <= 64
        assert d["nll"] == pytest.approx(hf_loss(model, w.ids, w.labels), abs=AGREES)
        known = [x for x in d["logprobs"] if x is not None]
        assert len(known) == d["tokens"] and -sum(known) / len(known) == pytest.approx(d["nll"])
    counts = [d["tokens"] for d in found["documents"]]
    mean = sum(n * d["nll"] for n, d in zip(counts, found["documents"])) / sum(counts)
    assert found["tokens"] == sum(counts)
    assert found["nll"] == pytest.approx(mean) and found["ppl"] == pytest.approx(math.exp(mean))


def test_windows_hold_every_token_once(world: World) -> None:
    """Each after <bos>, or after the last token before it."""
    ids = world.engine.tokenizer().encode(LONG, add_special_tokens=False).ids
    file = str(world.file("long.txt", LONG))
    for most in (10**6, 100):
        windows = [*Reader(world.engine, 64, most).files([file])]
        assert {w.ids[0] for w in windows} == {2} and {w.labels[0] for w in windows} == {-100}
        assert [i for w in windows for i in w.ids[1:]] == ids[:most]
    given = [{"tokens": ids}]
    bare = [*Reader(world.engine, 64).values(iter(given))]
    assert [w.ids[0] for w in bare[1:]] == [w.ids[-1] for w in bare[:-1]]
    assert [i for w in bare for i in w.ids[1:]] == ids[1:]


def test_json_lines_of_any_length(world: World) -> None:
    """A long text is scored as from a file; what is beyond --tokens is not read, and a token that
    is left over scores nothing."""
    text = LONG * 300
    file, lines = world.file("far.txt", text), world.file("far.jsonl", json.dumps({"text": text}))
    of_file = Reader(world.engine, 64).files([str(file)])
    of_lines = Reader(world.engine, 64).lines(str(lines))
    read = [[*of_file], [*of_lines]]
    assert len(text) > 1 << 16 and [w.ids for w in read[0]] == [w.ids for w in read[1]]
    few = world.file("few.jsonl", '{"tokens": [5, 6, 7]}\n{"tokens": [5, 6, 7]}\n{"unknown": 1}\n')
    for most, rows in (("3", 1), ("4", 1), ("5", 2)):
        found = scores("score", world.path, "--jsonl", few, "--tokens", most)
        assert len(found["documents"]) == rows


def test_scores_in_python(world: World, model: Any) -> None:
    """One for each text, whatever its windows, and one text or several."""
    texts = ["ab w3", [2, 5, 7], TOKENS, LONG]
    found = g4ir.score(world.engine, texts)
    assert [s.document for s in found] == [0, 1, 2, 3]
    assert found[1].nll == pytest.approx(hf_loss(model, [2, 5, 7], [2, 5, 7]), abs=AGREES)
    assert found[2].tokens == 3 and found[2].logprobs[:2] == (None, None)
    assert found[3].tokens == len(world.engine.tokenizer().encode(LONG).ids)
    for text, want in zip(texts, found, strict=True):
        assert g4ir.score(world.engine, text)[0].nll == want.nll
    ignored = g4ir.score(world.engine, {"tokens": [2, 5], "labels": [-100, -100]})[0]
    assert ignored.tokens == 0 and ignored.nll is ignored.ppl is None


@pytest.mark.usefixtures("own_home")
def test_distance_to_the_unquantised_weights(world: World) -> None:
    """By its formula, document by document."""
    int4 = built(world.folder / "int4", "--checkpoint", world.checkpoint, "--all-logits",
                 "--quant", "int4")  # fmt: skip
    texts = {"a.txt": "ab w3 a€ w7", "b.txt": "w12 a ab a€ w9 w3 w4"}
    files = [w for n, text in texts.items() for w in ("--text", world.file(n, text))]
    found = scores("verify", int4, *files, "--checkpoint", world.checkpoint)
    with g4ir.load_engine(int4) as engine:
        for text, d in zip(texts.values(), found["documents"], strict=True):
            ids = torch.tensor([2, *engine.tokenizer().encode(text).ids])
            pair = (engine, world.engine)
            rows = [e.session().prefill(ids[None, :-1], all_logits=True)[0].double() for e in pair]
            q, p = (t.log_softmax(-1) for t in rows)
            assert d["kl"] == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-4)
            for key, log in (("nll", q), ("baseline_nll", p)):
                want = torch.nn.functional.nll_loss(log, ids[1:]).item()
                assert d[key] == pytest.approx(want, abs=AGREES)
            same = (q.argmax(-1) == p.argmax(-1)).double().mean()
            assert d["same_top"] == pytest.approx(float(same))
    assert found["against"] == "the unquantised weights"
    first_use = (world.checkpoint, *BUILD[1:5], "--quant", "int4")  # its own weights
    assert scores("verify", *first_use, *files)["kl"] == pytest.approx(found["kl"], rel=1e-4)
    shown = command("verify", int4, *files, "--checkpoint", world.checkpoint).out
    assert shown.splitlines()[0].endswith("against the unquantised weights")
    assert shown.splitlines()[-1].split()[:2] == ["all", str(found["tokens"])]


@pytest.mark.parametrize(("words", "note"), [((), "nothing is quantised"),
    (("--quant", "int8"), "give --checkpoint DIR")])  # fmt: skip
def test_without_a_baseline(world: World, words: tuple[str, ...], note: str) -> None:
    """There is the likelihood alone, and a note."""
    name = f"e{len(words)}"
    path = built(world.folder / name, "--checkpoint", world.checkpoint, "--all-logits", *words)
    outcome = command("verify", path, "--text", world.file("t.txt", "ab w3"))
    assert outcome.code == 0 and "KL" not in outcome.out
    assert f"note: no KL divergence: {note}" in outcome.err


def test_quantised_caches_have_a_baseline(world: World) -> None:
    words = ("--kv-dtype", "int8", "--quant-activations", "int8", "--quant", "int8")
    path = built(world.folder / "kv", "--checkpoint", world.checkpoint, "--all-logits", *words)
    text = ("--text", world.file("k.txt", LONG), "--checkpoint", world.checkpoint)
    found = scores("verify", path, *text)
    plain = scores("score", world.path, *text[:2])
    assert found["baseline_nll"] == pytest.approx(plain["nll"], abs=1e-6)
    assert 1e-5 < found["kl"] < 0.1


def test_a_file_of_a_gibibyte_is_streamed(world: World) -> None:
    """What is beyond --tokens is never read: here NUL, which is refused where it is met."""
    file = world.file("huge.txt", LONG * 1000)
    with file.open("r+b") as f:
        f.truncate(1 << 30)
    found = scores("score", world.path, "--text", file, "--tokens", "40")
    assert found["tokens"] == 40
    big = world.file("big.txt", LONG * (1 << 16))
    tracemalloc.start()
    count = sum(map(len, cut_blocks(read_text(big))))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == len(LONG) << 16 and peak < 2 << 20 < big.stat().st_size // 8


BAD = TABLES["bad texts"]


@pytest.mark.parametrize("name", BAD)
def test_texts_that_are_refused(world: World, name: str) -> None:
    case = BAD[name]
    content = case.get("text") or bytes.fromhex(case.get("hex", ""))
    file = world.file("bad", content)
    flag, words = case.get("flag", "--text"), case.get("words", ())
    message = refused("score", world.path, flag, file, *words)
    assert case["says"].replace("FILE", str(file)) in message


def test_engines_that_are_refused(world: World, tmp_path: Path) -> None:
    """Without --all-logits, with the command that builds it again; of another vocabulary."""
    text = ("--text", world.file("u.txt", "ab"))
    short = built(tmp_path / "e", "--checkpoint", world.checkpoint)
    for verb in ("score", "verify"):
        message = refused(verb, short, *text)
        assert f"{short} was built without --all-logits" in message
        assert "g4ir build --spec" in message and " --all-logits " in message
    spec = tmp_path / "s.yaml"
    spec.write_text("schema: 1\nextends: tiny-ple\ntext: {vocab_size: 600}\n")
    words = ("--spec", spec, "--random-weights", "0", "--all-logits", "--out", tmp_path / "o")
    assert command(*BUILD, *words).code == 0
    message = refused("compare", world.path, tmp_path / "o", *text)
    assert "vocabularies of 512 and 600" in message
    with pytest.raises(InputError, match="text 0: fewer than 2 tokens"):
        g4ir.score(world.engine, [[5]])
    with pytest.raises(InputError, match="texts None: expected a text or a list"):
        g4ir.score(world.engine, None)
