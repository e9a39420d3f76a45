"""GGUF files as such: values of every type, files that are refused, changed bytes, tokenizers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, Keys
from hypothesis import given
from hypothesis import strategies as st

from g4ir.chat.prompt import Vocabulary
from g4ir.engine.prompts import read_defaults
from g4ir.errors import G4Error, WeightsError
from g4ir.spec.record import load_spec
from g4ir.weights.gguf.container import TABLES, TYPES, read_container
from g4ir.weights.gguf.metadata import side_files
from g4ir.weights.origin import GgufFile, find_origin
from tests.cases import read_table
from tests.configs import two_layers
from tests.gguf_files import CASES as TOKENS
from tests.gguf_files import bare_file, vocabulary

CASES = read_table("gguf_containers.yaml")


def test_types() -> None:
    known = {int(t): (t.name, *GGML_QUANT_SIZES[t]) for t in GGMLQuantizationType}
    assert {k: (t.name, t.block, t.nbytes) for k, t in TYPES.items()} == known


def raw(words: str) -> bytes:
    return b"".join(map(_word, words.split(" "))) if words else b""


def _word(word: str) -> bytes:
    kind, _, value = word.partition(":")
    match kind:
        case "u32":
            return int(value).to_bytes(4, "little")
        case "u64":
            return int(value).to_bytes(8, "little")
        case "s":
            return text(value)
        case "hex":
            return bytes.fromhex(value)
        case "zeros":
            return bytes(int(value))
    return word.strip("'").encode()


def text(s: str) -> bytes:
    return raw(f"u64:{len(s.encode())}") + s.encode()


def tensor(name: str, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    shape = b"".join(raw(f"u64:{d}") for d in dims)
    return text(name) + raw(f"u32:{len(dims)}") + shape + raw(f"u32:{kind} u64:{offset}")


def whole(keys: Any = (), tensors: Any = (), version: int = 3, **_: Any) -> bytes:
    head = raw(f"'GGUF' u32:{version} u64:{len(tensors)} u64:{len(keys)}")
    head += b"".join(text(name) + raw(f"u32:{kind} {value}") for name, kind, value in keys)
    head += b"".join(tensor(*row) for row in tensors)
    return head + bytes(-len(head) % 32 + 256)


@pytest.mark.parametrize("name", CASES["broken"])
def test_refused_containers(tmp_path: Path, name: str) -> None:
    case = CASES["broken"][name]
    data = raw(case["bytes"]) if "bytes" in case else whole(**case)
    (tmp_path / "a.gguf").write_bytes(data)
    with pytest.raises(WeightsError) as error:
        read_container(tmp_path / "a.gguf")
    message = str(error.value)
    assert case["says"] in message and "a.gguf" in message and "fix:" in message, message
    assert message.isascii() and message.isprintable()


def test_values(tmp_path: Path) -> None:
    keys = [(name, kind, data) for name, (kind, data, _) in CASES["values"].items()]
    placed = (("b", [8], 0, 64), ("a", [2, 3], 1))
    (tmp_path / "a.gguf").write_bytes(whole(keys, placed, version=2))
    found = read_container(tmp_path / "a.gguf")
    for name, (kind, _, value) in CASES["values"].items():
        assert (found.items(name) if kind == 9 else found.values[name]) == value
    assert found.tensors["a"].shape == (3, 2)
    assert found.tensors["b"].entry.start - found.tensors["a"].entry.start == 64


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fuzz") / "a.gguf"
    bare_file(path, two_layers(32, 300), kind="Q8_0")
    path.with_suffix(".original").write_bytes(path.read_bytes())
    return path


def survives(path: Path) -> None:
    """Read all of it; only a G4Error, in printable ASCII, may come out."""
    try:
        origin = find_origin(path)
        source = origin.open(origin.spec(), (), "bf16")
        origin.side_files()
        for name in source.weights:
            source.tensor(name)
    except G4Error as error:
        message = str(error)
        assert message.isascii() and len(message) < 3000
        assert message.replace("\n", "").isprintable()


def header_size(data: bytes) -> int:
    return data.index(b"rope_freqs.weight")


@given(share=st.floats(0, 1))
def test_truncated(fuzzed: Path, share: float) -> None:
    data = fuzzed.with_suffix(".original").read_bytes()
    fuzzed.write_bytes(data[: int(share * (len(data) - 1))])
    with pytest.raises(WeightsError):
        read_container(fuzzed)


PLACES = st.one_of(st.integers(0, 31), st.integers(0, 1500), st.integers(0, 1 << 20))
EDIT = st.tuples(st.sampled_from((1, 4, 8)), PLACES, st.integers(0, 2**64 - 1))
EDITS = st.lists(EDIT, min_size=1, max_size=3)


@given(edits=EDITS)
def test_changed_bytes(fuzzed: Path, edits: list[tuple[int, int, int]]) -> None:
    """Bytes, or numbers of 4 or 8, anywhere in the header: lengths, counts, types and offsets."""
    data = bytearray(fuzzed.with_suffix(".original").read_bytes())
    for size, at, value in edits:
        start = at % header_size(data)
        data[start : start + size] = (value % 256**size).to_bytes(size, "little")
    fuzzed.write_bytes(data)
    survives(fuzzed)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of tiny-ple; do not alter it."""
    return bare_file(tmp_path_factory.mktemp("gguf") / "tiny.gguf", load_spec("tiny-ple"))


@pytest.fixture(scope="module")
def tokenizers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    from tokenizers import Tokenizer
    from transformers.models.gemma.tokenization_gemma import GemmaTokenizer

    made = vocabulary(512)
    ids = {t: i for i, t in enumerate(made["tokenizer.ggml.tokens"])}
    merges = [tuple(m.split(" ")) for m in made["tokenizer.ggml.merges"]]
    peer = GemmaTokenizer(
        vocab=ids, merges=merges, additional_special_tokens=["<turn|>", "<|channel>"]
    )
    folder = tmp_path_factory.mktemp("tokenizer")
    peer.save_pretrained(folder)
    raw = side_files(read_container(model))["tokenizer.json"].decode()
    return Tokenizer.from_str(raw), Tokenizer.from_file(str(folder / "tokenizer.json"))


@given(
    text=st.lists(st.one_of(st.sampled_from(TOKENS["pieces"]), st.text(max_size=4))).map("".join)
)
def test_tokens(tokenizers: tuple[Any, Any], text: str) -> None:
    own, peer = tokenizers
    ids = own.encode(text, add_special_tokens=False).ids
    assert ids == peer.encode(text, add_special_tokens=False).ids
    for skip in (True, False):
        texts = [t.decode(ids, skip_special_tokens=skip) for t in (own, peer)]
        assert texts[0] == texts[1]


TYPED: dict[int, list[str]] = TOKENS["typed"]
ALL_TYPED = [text for texts in TYPED.values() for text in texts]
#: how files say what is merged: pairs, or SentencePiece's scores
MERGED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "merges": lambda v: None,
    "merges of llama": lambda v: v.update({"tokenizer.ggml.model": "llama"}),
    "scores": lambda v: (
        v.update({"tokenizer.ggml.model": "llama"}),
        v.pop("tokenizer.ggml.merges"),
    ),
}


def rank_merges(values: dict[str, Any]) -> None:
    at = {text: i for i, text in enumerate(values["tokenizer.ggml.tokens"])}
    for i, merge in enumerate(values["tokenizer.ggml.merges"]):
        values["tokenizer.ggml.scores"][at["".join(merge.split(" "))]] = float(-i)


@pytest.fixture(scope="module", params=MERGED)
def typed(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A file's tokenizer whose last tokens have the types above, and its ids by text."""
    from tokenizers import Tokenizer

    def change(values: dict[str, Any]) -> None:
        words, kinds = (values[f"tokenizer.ggml.{k}"] for k in ("tokens", "token_type"))
        new = [text for texts in TYPED.values() for text in texts if text not in words]
        words[-len(new) :] = new
        for kind, texts in TYPED.items():
            for text in texts:
                kinds[words.index(text)] = kind
        rank_merges(values)
        MERGED[request.param](values)

    path = tmp_path_factory.mktemp("typed") / "a.gguf"
    bare_file(path, load_spec("tiny-ple"), change)
    return Tokenizer.from_str(side_files(read_container(path))["tokenizer.json"].decode())


@given(text=st.lists(st.one_of(st.sampled_from(ALL_TYPED), st.text(max_size=4))))
def test_a_text_comes_back_whole(typed: Any, text: list[str]) -> None:
    """`decode(encode(t)) == t` for every token type; decoding skips control tokens alone."""
    whole = "".join(text).replace("▁", " ")  # Gemma's own mark of a space
    ids = typed.encode(whole, add_special_tokens=False).ids
    assert typed.decode(ids, skip_special_tokens=False) == whole
    if not any(mark in whole for mark in TOKENS["skipped"]):
        assert typed.decode(ids) == whole
        assert Vocabulary(typed).plain(whole) == ids
    alone = {t: typed.encode(t, add_special_tokens=False).ids for t in text if t}
    for token in ALL_TYPED:
        if token in alone:
            assert len(alone[token]) == 1
            assert (typed.decode(alone[token]) == "") == (token in TOKENS["skipped"])


def test_merges_by_score(tmp_path: Path) -> None:
    files = []
    for name in ("merges", "scores"):

        def change(values: dict[str, Any], name: str = name) -> None:
            halves = ["<bo", "s>", "<0x4", "1>"]  # of a control token and of a byte
            values["tokenizer.ggml.tokens"][-4:] = halves
            rank_merges(values)
            MERGED[name](values)

        path = bare_file(tmp_path / f"{name}.gguf", load_spec("tiny-ple"), change)
        files.append(json.loads(side_files(read_container(path))["tokenizer.json"]))
    merges, by_score = ([m.split(" ") for m in f["model"]["merges"]] for f in files)
    assert by_score[: len(merges)] == merges
    words = {"".join(pair) for pair in by_score}
    assert words and not words & {"<bos>", "<0x41>"}


def test_a_merge_is_no_comment(tmp_path: Path) -> None:
    """The library leaves a text out that begins with #version, where it takes pairs."""

    def change(values: dict[str, Any]) -> None:
        values["tokenizer.ggml.tokens"][-1] = "#version"

    path = bare_file(tmp_path / "a.gguf", load_spec("tiny-ple"), change)
    merges = json.loads(side_files(read_container(path))["tokenizer.json"])["model"]["merges"]
    assert merges and all(isinstance(pair, list) for pair in merges)


def test_side_files(model: Path, tmp_path: Path) -> None:
    files = {k: v.decode() for k, v in side_files(read_container(model)).items()}
    assert json.loads(files["tokenizer_config.json"]) == {
        "add_bos_token": True,
        "add_eos_token": False,
    }
    kept = {"bos_token_id": 2, "pad_token_id": 0, "eos_token_id": [1, 5]}
    assert json.loads(files["generation_config.json"]) == kept

    def change(values: dict[str, Any]) -> None:
        values |= {"general.sampling.temp": 0.7, "general.sampling.top_k": 64}
        values |= {"tokenizer.ggml.suppress_tokens": [7, 9], "tokenizer.ggml.model": "none"}
        del values["tokenizer.chat_template"]

    path = bare_file(tmp_path / "a.gguf", load_spec("tiny-ple"), change)
    files = {k: v.decode() for k, v in side_files(read_container(path)).items()}
    drawn = {"do_sample": True, "temperature": 0.7, "top_k": 64, "suppress_tokens": [7, 9]}
    assert json.loads(files.pop("generation_config.json")) == kept | drawn
    assert not files


def opened(path: Path, values: Mapping[str, Any]) -> GgufFile:
    return GgufFile(bare_file(path / "a.gguf", two_layers(32, 300), lambda v: v.update(values)))


@pytest.mark.parametrize("case", CASES["sampling"])
def test_sampling(tmp_path: Path, case: str) -> None:
    """All of general.sampling is a default, or is named where it would change what is drawn."""
    row = CASES["sampling"][case]
    file = opened(tmp_path, {f"general.sampling.{k}": v for k, v in row["keys"].items()})
    found = read_defaults(file.path, 300, file.side_files()["generation_config.json"])
    assert found.sampling == row.get("defaults", {})
    assert found.unused == tuple(f"general.sampling.{k}" for k in row.get("unused", ()))
    assert all(key in str(found.note) for key in row.get("unused", ()))


def test_keys_of_sampling_are_those_of_the_library() -> None:
    theirs = {v for k, v in vars(Keys.General).items() if k.startswith("SAMPLING_")}
    known = {*TABLES["sampling"], *TABLES["sampling_others"]}
    assert theirs - known == {"general.sampling.sequence"}  # an order that never says nothing


@pytest.mark.parametrize("key", TABLES["stops"])
def test_stop_ids(tmp_path: Path, key: str) -> None:
    """llama.cpp ends a text with each of these, and so do we."""
    file = opened(tmp_path, {f"tokenizer.ggml.{key}": 299})
    found = read_defaults(file.path, 300, file.side_files()["generation_config.json"])
    assert 299 in (found.stop or ()) and 299 in file.spec().tokens.eos


@pytest.mark.parametrize("key", CASES["not applied"])
def test_keys_not_applied(tmp_path: Path, key: str, caplog: pytest.LogCaptureFixture) -> None:
    opened(tmp_path, {}).side_files()
    assert not caplog.messages
    opened(tmp_path, {key: CASES["not applied"][key]}).side_files()
    (message,) = caplog.messages
    assert "a.gguf: these keys are not applied: " in message and key in message


def test_an_empty_template_is_none(tmp_path: Path) -> None:
    assert "chat_template.jinja" in opened(tmp_path, {}).side_files()
    file = opened(tmp_path, {"tokenizer.chat_template": ""})
    assert "chat_template.jinja" not in file.side_files()
