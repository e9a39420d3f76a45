"""Texts by the index of a tokenizer, beside the whole tokenizer."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from g4ir.chat.prompt import Vocabulary
from g4ir.engine import engine, tokenizer_index
from g4ir.engine.tokenizer_index import INDEX, IndexedTokenizer, as_file, index_file, index_of
from g4ir.errors import EngineError
from g4ir.weights import token_splits
from g4ir.weights.token_splits import HashedTokens
from tests.cli_tools import built, ok, text_checkpoint, tokenizer
from tests.engines import resigned
from tests.spies import spy

GREEDY = ("--max-new-tokens", "4", "--temperature", "0", "--json")
BYTES = [f"<0x{i:02X}>" for i in range(256)]
LETTERS = "abcdeé日 "
SIZE = 900


def trained() -> Any:
    """As Gemma's: spaces rewritten, bytes to fall back to, long merges of every split, added tokens
    of any kind."""
    rng, special = random.Random(0), ["<pad>", "<eos>", "<bos>", "<unk>"]
    words = ["".join(rng.choices("abcdeé日▁", k=12)) for _ in range(50)]
    pieces = sorted({"ab", "▁▁", *"abcdeé日▁", *(w[:n] for w in words for n in range(1, 13))})
    vocab = {t: i for i, t in enumerate([*special, *BYTES, "<i>", *sorted(pieces, key=len)])}
    splits = [(t[:i], t[i:]) for t in vocab for i in range(1, len(t)) if t in pieces]
    merges = [(a, b) for a, b in splits if a in vocab and b in vocab]
    made = Tokenizer(
        models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    made.normalizer = normalizers.Replace(" ", "▁")
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence(parts)
    made.add_special_tokens(special)
    made.add_tokens([AddedToken("<i>", normalized=False), AddedToken("▁▁", normalized=True)])
    made.add_tokens([AddedToken("ab", single_word=True, normalized=False)])
    return made


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    whole = trained()
    path = tmp_path_factory.mktemp("index") / INDEX
    path.write_bytes(index_file(whole.to_str().encode(), SIZE) or b"")

    def never() -> Any:
        raise AssertionError("the whole tokenizer was opened")

    return IndexedTokenizer(path, never), whole


def some_text(rng: random.Random, whole: Any) -> str:
    pieces: list[Callable[[], str]] = [
        lambda: "".join(rng.choices(LETTERS, k=rng.randint(1, 30))),
        lambda: whole.id_to_token(rng.randrange(whole.get_vocab_size())),
        lambda: rng.choice(["▁▁", "<i>", "<bos>", " ab ", "<0x0A>", "\n", "\t", "€", "\U0001f600"]),
        lambda: rng.choice(" a▁") * rng.randint(1, 30),
    ]
    return "".join(rng.choice(pieces)() for _ in range(rng.randint(0, 9)))


def test_texts_round_trip(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    found, whole = pair
    monkeypatch.setattr(found, "_budget", 1 << 30)
    rng, longest = random.Random(1), 0
    for _ in range(300):
        texts = [some_text(rng, whole) for _ in range(2)]
        for special in (True, False):
            got, want = (t.encode_batch_fast(texts, add_special_tokens=special) for t in pair)
            assert [e.ids for e in got] == [e.ids for e in want], texts
            merged = {whole.id_to_token(i) for e in got for i in e.ids} - {*BYTES}
            longest = max(longest, *map(len, merged), 0)
        ids = [rng.randrange(whole.get_vocab_size() + 3) for _ in range(8)]
        for skip in (True, False):
            assert found.decode(ids, skip) == whole.decode(ids, skip)
        assert found.decode_batch([ids, []]) == whole.decode_batch([ids, []])
    assert longest > 8


def test_tokens_are_those_of_the_whole(pair: tuple[Any, Any]) -> None:
    found, whole = pair
    vocab = whole.get_vocab()
    assert {t: found.token_to_id(t) for t in vocab} == vocab
    assert {t: found.id_to_token(i) for t, i in vocab.items()} == {t: t for t in vocab}
    for token in ("", "abx", "no such token", "\ud800"):
        assert found.token_to_id(token) is None
    assert found.id_to_token(len(vocab)) is None
    one, two = map(Vocabulary, pair)
    assert (one.bytes, one.controls, one.strings) == (two.bytes, two.controls, two.strings)
    added = [t.get_added_tokens_decoder() for t in pair]
    assert list(map(str, added[0].items())) == list(map(str, added[1].items()))


REFUSED: dict[str, Callable[[Any], Any]] = {
    "characters composed": lambda t: setattr(t, "normalizer", normalizers.NFKC()),
    "a pattern of two": lambda t: setattr(t, "normalizer", normalizers.Replace("ab", "c")),
    "bytes as letters": lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.ByteLevel()),
    "dropout": lambda t: setattr(t.model, "dropout", 0.5),
    "prefixes": lambda t: setattr(t.model, "continuing_subword_prefix", "##"),
    "tokens beyond": lambda t: t.add_tokens(["new"]),
    "rewritten added": lambda t: t.add_tokens([AddedToken("a b", normalized=True)]),
}


@pytest.mark.parametrize("edit", REFUSED.values(), ids=REFUSED)
def test_no_index_where_tokens_need_not_lie_in_the_text(edit: Callable[[Any], Any]) -> None:
    made = trained()
    assert index_of(json.loads(made.to_str()), SIZE)
    edit(made)
    assert index_of(json.loads(made.to_str()), SIZE) is None


def test_no_index_of_other_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor of a merge of a byte, of more tokens than the model has, of tokens of one hash."""
    merged, words = json.loads(tokenizer().to_str()), Tokenizer(models.WordLevel({"a": 0}, "a"))
    merged["model"]["merges"].append(["<0x0A>", "a"])
    merged["model"]["vocab"]["<0x0A>a"] = len(merged["model"]["vocab"])
    whole = trained().to_str()
    for text, size in ((json.dumps(merged), SIZE), (words.to_str(), SIZE), (whole, 10)):
        assert index_of(json.loads(text), size) is None
    monkeypatch.setattr(token_splits, "BASE", np.uint64(1))
    assert index_of(json.loads(whole), SIZE) is None


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("ids", lambda a: a + 1),
        ("ends", lambda a: a[::-1].copy()),
        ("ends", lambda a: a + 1),
        ("hashes", lambda a: a[1:]),
        ("cuts", lambda a: a[1:]),
        ("merges", lambda a: a[::-1].copy()),
        ("lengths", lambda a: a * 2),
        ("frame", lambda a: a[1:]),
        ("text", None),
    ],
)
def test_an_index_that_does_not_fit_is_refused(name: str, edit: Any, tmp_path: Path) -> None:
    arrays = index_of(json.loads(trained().to_str()), SIZE) or {}
    changed = {k: edit(a) if edit and k == name else a for k, a in arrays.items()}
    changed = {k: a for k, a in changed.items() if edit or k != name}
    (tmp_path / INDEX).write_bytes(as_file(changed))
    with pytest.raises(EngineError, match=r"is no index of a tokenizer"):
        IndexedTokenizer(tmp_path / INDEX, trained)


@pytest.mark.parametrize("case", ["hashes", "collisions"])
def test_splits_of_tokens(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hashes, they are those of a search for each part."""
    if case == "collisions":
        monkeypatch.setattr(token_splits, "BASE", np.uint64(1))
    assert not any(len(HashedTokens(texts).splits().token) for texts in ([], ["a"], ["", "ab"]))
    rng = random.Random(1)
    texts = {"".join(rng.choices("ab\ud800日", k=rng.randint(0, 9))) for _ in range(3000)}
    tokens = HashedTokens([*texts])
    splits = tokens.splits()
    columns = (splits.token, splits.cut, splits.head, splits.tail)
    found = {(tokens.texts[w], c, tokens.texts[a], tokens.texts[b]) for w, c, a, b in zip(*columns)}
    cuts = {(t, cut, t[:cut], t[cut:]) for t in texts for cut in range(1, len(t))}
    assert found == {c for c in cuts if {*c[2:]} <= texts}
    assert len(found) == len(splits.token) > 1000 and tokens.collide == (case == "collisions")


@pytest.mark.parametrize(
    "edit",
    [
        lambda frame, model: model["merges"].append(["ab", "none"]),
        lambda frame, model: model["merges"].append("a b a"),
        lambda frame, model: model["merges"].append(7),
        lambda frame, model: model["merges"].append("ab"),
        lambda frame, model: model.update(vocab={t: float(i) for t, i in model["vocab"].items()}),
        lambda frame, model: model.update(byte_fallback="yes"),
        lambda frame, model: model["vocab"].update({"\ud800": len(model["vocab"])}),
        lambda frame, model: frame["added_tokens"][0].pop("lstrip"),
        lambda frame, model: frame.update(decoder={"type": "None such"}),
        lambda frame, model: frame.pop("model"),
    ],
)
def test_what_the_library_refuses_has_no_index(edit: Any) -> None:
    """So that a build reads what has one no second time."""
    frame = json.loads(trained().to_str())
    assert index_file(json.dumps(frame).encode(), SIZE)
    edit(frame, frame["model"])
    raw = json.dumps(frame).encode()
    with pytest.raises(EngineError, match="is no tokenizer file"):
        engine.read_tokenizer(Path("tokenizer.json"), raw)
    assert index_file(raw, SIZE) is None


def test_short_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of more than FEW characters in sum parse it once; other engines always do."""
    checkpoint = text_checkpoint(tmp_path / "checkpoint")
    path = built(tmp_path / "engine", "--checkpoint", checkpoint)
    parsed: list[Any] = []
    spy(monkeypatch, engine, "read_tokenizer", lambda *args: parsed.append(args))

    def answer(text: str) -> Any:
        done = ok("run", path, "--prompt", text, *GREEDY)
        return json.loads(done) | {"id": None}

    short, long = "ab w3 a", "ab w5 " * 4
    first = answer(short)
    assert not parsed and first["text"]
    monkeypatch.setattr(tokenizer_index, "FEW", 9)
    second = answer(long)
    assert len(parsed) == 1
    (path / INDEX).unlink()
    resigned(path, lambda values: values["files"].pop(INDEX))
    assert [answer(short), answer(long)] == [first, second]
    assert len(parsed) == 3
