"""The text side of media: soft tokens in sessions, blocks that see both ways, chunks around them.

Soft tokens are random here. What is expected comes from transformers: its text model with the
masks that it makes for pictures (`create_masks_for_vision_model`), each row alone, in one call
without a cache.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from g4ir.check.hf import cache_argument
from g4ir.engine.artefact import Artefact, PackedWeights, read_manifest
from g4ir.engine.build import prepare, write_engine
from g4ir.engine.engine import Engine
from g4ir.engine.load import load_artefact
from g4ir.errors import InputError
from g4ir.ir.graph import Program
from g4ir.ir.interpret import interpret
from g4ir.media.merge import block_ids, cut, merged
from g4ir.media.soft import Soft
from g4ir.model.decoder import BLOCKS
from g4ir.model.media import KINDS, Media
from g4ir.model.text import PHASES, build_graph, has_blocks
from g4ir.passes import run_program
from g4ir.plan.options import BuildOptions
from g4ir.spec.record import Spec, check_spec
from g4ir.weights.checkpoint import Checkpoint
from g4ir.weights.pack import StoredParams, split_program
from tests.configs import spec_called
from tests.oracle import SELF_DIFFERENCE, Oracle, find_oracle, relative, save_checkpoint
from tests.runner import with_chunk

W = 8
MAX_SEQ = 128
#: the longest block of ROWS
LONGEST = 13
#: chunks that would cut blocks, and one that holds every row whole
SIZES = (LONGEST, 17, 64)
#: decoded after the prompt: past three windows
STEPS = 3 * W + 2
#: prompts, by token: I image, V video, A audio, . text
ROWS = (
    "IIIIIIIIIIIII.IIIII.........VVVVVVAAAA....IIIIII",  # at the start, one token between, the end
    ".......VVVVVVVVVV..IIIIIIIIIIIII....AA.IIIIVVV",  # at other places; an image beside a video
    "..",
    ".........................................",
)


# --- variants ---------------------------------------------------------------------------------


def with_media(name: str, **text: Any) -> Spec:
    """A small spec with placeholders, and a padding token that is not the first."""
    spec = spec_called(name)
    tokens = replace(spec.tokens, pad=3, image=250, video=251, audio=252)
    return replace(spec, tokens=tokens, text=replace(spec.text, **text))


def tied() -> Spec:
    """K = V on both kinds of layers, KV sharing and per-layer embeddings, all with blocks."""
    base = with_media("combined", use_bidirectional_attention="vision")
    text = replace(base.text, sliding=replace(base.text.sliding, k_eq_v=True))
    return replace(base, text=text)


def tiny() -> Spec:
    """Sharing, per-layer embeddings and blocks. All but three of its compiled programs are those of
    tiny-ple, which other tests need too."""
    return with_media("tiny-ple", use_bidirectional_attention="vision")


SPECS = {
    "12b": lambda: with_media("12b-small"),
    "26b-a4b": lambda: with_media("26b-a4b-small"),
    "31b": lambda: with_media("31b-small"),
    "e2b": lambda: with_media("e2b-small"),
    "tied": tied,
    "tiny": tiny,
}


@cache
def spec_of(name: str) -> Spec:
    return check_spec(replace(SPECS[name](), name=name))


# --- engines ----------------------------------------------------------------------------------


def text_engine(
    oracle: Oracle, folder: Path, backend: str, all_logits: bool, latent_kv: str = "off"
) -> Engine:
    """An engine that takes media and has no towers: its soft tokens come from elsewhere."""
    spec, media = oracle.spec, Media(KINDS)
    limits = {"max_batch": len(ROWS), "max_seq": MAX_SEQ, "prefill_chunk": max(SIZES)}
    options = {"backend": backend, "all_logits": all_logits, "latent_kv": latent_kv, **limits}
    prepared = prepare(spec, BuildOptions(random_weights=0, **options))
    names = (*PHASES, BLOCKS) if has_blocks(spec) else PHASES
    plain = Program({p: build_graph(spec, p, all_logits, "f32", media) for p in names})
    program = run_program(plain, options=prepared.options)
    source = Checkpoint.open(save_checkpoint(oracle, folder / "checkpoint"), spec)
    packed = {"weights": PackedWeights("packed"), "packing": split_program(program)}
    made = replace(prepared, media=media, source=source, **packed)
    out = folder / "engine"
    write_engine(made, out, print)
    # Nobody can build it: its graphs are not those of its spec.
    stored = StoredParams.open(sorted(out.glob("*.safetensors")))
    return load_artefact(Artefact(out, read_manifest(out), spec, made.packing, stored))


@dataclass(frozen=True)
class Case:
    """One engine."""

    name: str
    backend: str = "reference"
    all_logits: bool = True
    latent_kv: str = "off"

    def __str__(self) -> str:
        logits = "all" if self.all_logits else "last"
        return "-".join((self.name, self.backend, logits, self.latent_kv))


CASES = (
    *(Case(n) for n in ("12b", "26b-a4b", "e2b")),
    Case("31b", all_logits=False),
    Case("tied", latent_kv="raw"),
    Case("tiny", "torch"),
)


#: compiled programs with media are run by tests/test_media_models.py too
@pytest.fixture(
    scope="module",
    params=[
        pytest.param(c, marks=[pytest.mark.full] * (c.backend == "torch"), id=str(c)) for c in CASES
    ],
)
def any_engine(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Engine]:
    yield from opened(request.param, tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: Any) -> Iterator[Engine]:
    """One for whatever every backend does alike."""
    yield from opened(Case("tiny"), tmp_path_factory.mktemp("engine"))


def opened(case: Case, folder: Path) -> Iterator[Engine]:
    oracle = find_oracle(spec_of(case.name))
    engine = text_engine(oracle, folder, case.backend, case.all_logits, case.latent_kv)
    yield engine
    engine.close()
    shutil.rmtree(folder)


# --- prompts ----------------------------------------------------------------------------------


LETTERS = {"I": "image", "V": "video", "A": "audio"}


@dataclass(frozen=True)
class Row:
    """Tokens i64[T], and each token's soft token f32[T, hidden], of which placeholders' count."""

    tokens: torch.Tensor
    vectors: torch.Tensor
    layout: str

    def softs(self, kind: str) -> list[Soft]:
        """Those of the runs of a kind, in order."""
        return [
            Soft(kind, tuple(self.vectors[i:j].split(5)))
            for letter, i, j in runs(self.layout)
            if LETTERS.get(letter) == kind
        ]


def runs(layout: str) -> Iterator[tuple[str, int, int]]:
    """(letter, start, end) of equal letters."""
    at = 0
    for letter, run in groupby(layout):
        count = len(list(run))
        yield letter, at, at + count
        at += count


def make_row(spec: Spec, layout: str, seed: int = 0) -> Row:
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(4, 250, (len(layout),), generator=g)
    ids = {"image": spec.tokens.image, "video": spec.tokens.video, "audio": spec.tokens.audio}
    for i, letter in enumerate(layout):
        if letter in LETTERS:
            tokens[i] = ids[LETTERS[letter]]
    vectors = torch.randn(len(layout), spec.text.hidden_size, generator=g)
    return Row(tokens, vectors, layout)


@cache
def rows_of(spec: Spec) -> tuple[Row, ...]:
    """ROWS, and behind each what is decoded."""
    return tuple(make_row(spec, r + "." * STEPS, i) for i, r in enumerate(ROWS))


def batch(rows: Sequence[Row], lengths: Sequence[int]) -> tuple[torch.Tensor, list[Soft]]:
    """Right-padded tokens, with a placeholder in the padding; the soft tokens, row by row."""
    padded = torch.full((len(rows), max(lengths)), 250)
    for out, row, n in zip(padded, rows, lengths, strict=True):
        out[:n] = row.tokens[:n]
    softs = [s for kind in KINDS for row in rows for s in row.softs(kind)]
    return padded, softs


@cache
def expected(name: str, index: int) -> torch.Tensor:
    """f32[T, vocab] of a row of `rows_of`, by transformers."""
    spec = spec_of(name)
    return reference_logits(find_oracle(spec), rows_of(spec)[index])


def reference_logits(oracle: Oracle, row: Row) -> torch.Tensor:
    from transformers.models.gemma4 import modeling_gemma4 as hf

    oracle.run(row.tokens[None, :1])  # selects eager attention
    model, text = oracle.model, oracle.spec.text
    kinds = torch.tensor([[".IVA".index(letter) for letter in row.layout]])
    ids = row.tokens[None].masked_fill(kinds > 0, oracle.spec.tokens.pad or 0)
    with torch.no_grad():
        embeds = model.model.embed_tokens(ids)
        extra = {}
        if text.ple:
            extra["per_layer_inputs"] = model.model.get_per_layer_inputs(ids, embeds)
        embeds[kinds > 0] = row.vectors[kinds[0] > 0]
        blocks = hf.get_block_sequence_ids_for_mask(kinds, device=embeds.device)
        if text.use_bidirectional_attention is None:
            blocks = torch.full_like(blocks, -1)
        masks = hf.create_masks_for_vision_model(
            config=model.config,
            inputs_embeds=embeds,
            attention_mask=None,
            **{cache_argument(hf.create_masks_for_vision_model): None},
            position_ids=torch.arange(len(row.tokens))[None],
            block_sequence_ids=blocks,
        )
        out = model(inputs_embeds=embeds, attention_mask=masks, use_cache=False, **extra)
    logits: torch.Tensor = out.logits[0]
    return logits


def budget(name: str) -> float:
    return max(4 * SELF_DIFFERENCE, find_oracle(spec_of(name)).budget)


def agrees(got: torch.Tensor, want: torch.Tensor, allowed: float) -> None:
    assert got.shape == want.shape
    error = relative(got, want).max().item()
    assert error <= allowed, f"{error:.2e} of rms, budget {allowed:.2e}"


# --- against transformers ---------------------------------------------------------------------


@pytest.mark.covering
@pytest.mark.parametrize("chunk", SIZES)
def test_ragged_rows_with_media(any_engine: Engine, chunk: int) -> None:
    """Blocks at different places of the rows, in chunks that would cut them; then decoding."""
    name, lengths = any_engine.spec.name, [len(r) for r in ROWS]
    rows = rows_of(any_engine.spec)
    want = [expected(name, i) for i in range(len(rows))]
    tokens, softs = batch(rows, lengths)
    session = with_chunk(any_engine, chunk).session(len(rows))
    every = any_engine.all_logits
    got = session.prefill(tokens, torch.tensor(lengths), all_logits=every, soft=softs)
    for row, n in enumerate(lengths):
        if every:
            agrees(got[row, :n], want[row][:n], budget(name))
            assert not got[row, n:].any()
        else:
            agrees(got[row], want[row][n - 1], budget(name))
    assert session.length.tolist() == lengths
    for i in range(STEPS if chunk == SIZES[0] else 2):
        step = session.decode(torch.stack([r.tokens[n + i] for r, n in zip(rows, lengths)]))
        for row, n in enumerate(lengths):
            agrees(step[row], want[row][n + i], budget(name))


@pytest.mark.parametrize("kind", KINDS)
def test_media_after_text(engine: Engine, kind: str) -> None:
    """A second turn with media of one kind, on rows that hold different numbers of tokens."""
    letter = next(k for k, v in LETTERS.items() if v == kind)
    lengths, row = [11, 3], ".." + letter * LONGEST + "." + letter * 3 + "..."
    rows = [make_row(engine.spec, "." * n + row, seed=n) for n in lengths]
    session = with_chunk(engine, LONGEST).session(2)
    session.prefill(batch(rows, [11, 3])[0], torch.tensor([11, 3]))
    tokens = torch.stack([r.tokens[n:] for r, n in zip(rows, lengths)])
    got = session.prefill(tokens, soft=[s for r in rows for s in r.softs(kind)])
    for r, logits in zip(rows, got):
        want = reference_logits(find_oracle(engine.spec), r)[-1]
        agrees(logits, want, budget(engine.spec.name))


def test_blocks_are_needed(engine: Engine) -> None:
    """The comparisons above would see it if pictures were causal."""
    row = rows_of(engine.spec)[0]
    softs = [s for kind in KINDS for s in row.softs(kind)]
    graphs = {name: g for name, g in engine.program.graphs.items() if name != BLOCKS}
    session = replace(engine, program=Program(graphs)).session(1)
    got = session.prefill(row.tokens[None], all_logits=True, soft=softs)[0]
    assert relative(got, expected(engine.spec.name, 0)).min() > 0.1


def test_text_alone_is_cut_as_ever(engine: Engine) -> None:
    """In chunks and phases of an engine without media, which a prompt without pictures shares."""
    session, seen = with_chunk(engine, 16).session(2), list[tuple[str, int]]()
    run = engine.runtime.run

    def watched(phase: str, feeds: Any, *rest: Any) -> Any:
        seen.append((phase, feeds["embeds"].shape[1]))
        assert ("block_ids" in feeds) == (phase == BLOCKS)
        return run(phase, feeds, *rest)

    session.engine = replace(session.engine, runtime=Watched(engine.runtime, watched))
    session.prefill(torch.full((2, 33), 7), torch.tensor([33, 18]))
    assert seen == [("prefill", 16), ("prefill", 16), ("decode", 1)]
    seen.clear()
    row = make_row(engine.spec, "....IIIIIIIIIIIIII.AAAAAAAAAAAAAAAAAI.I")
    softs = [s for kind in KINDS for s in row.softs(kind)]
    session.prefill(row.tokens.repeat(2, 1), torch.tensor([39, 0]), soft=softs)
    assert seen == [("prefill", 4), (BLOCKS, 16), ("prefill", 16), (BLOCKS, 3)]
    seen.clear()
    session.prefill([[250], [251]], soft=[made("image", 1, engine), made("video", 1, engine)])
    assert seen == [("decode", 1)]


@dataclass
class Watched:
    """A runtime whose steps go through `run`."""

    inner: Any
    run: Any


def made(kind: str, count: int, engine: Engine, value: float = 0.5) -> Soft:
    return Soft(kind, (torch.full((count, engine.spec.text.hidden_size), value),))


def test_decoded_placeholders_are_padding(engine: Engine) -> None:
    """As in the reference, which has no soft tokens for what the model itself makes."""
    tokens = torch.tensor([[7, 8, 9]])
    logits = []
    for token in (engine.spec.tokens.pad, 250, 252):
        session = engine.session(1)
        session.prefill(tokens)
        logits.append(session.decode([token]))
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])


def test_media_are_encoded_in_order(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind soft tokens of the same kind; each kind fills its own placeholders."""
    row = make_row(engine.spec, ".II.AA.III.V.A")
    images, videos, audio = (row.softs(kind) for kind in KINDS)
    asked: list[Any] = []

    def encode(engine: Engine, kind: str, item: Any) -> Soft:
        asked.append((kind, item))
        return {"b": images[1], "v": videos[0], "x": audio[0], "y": audio[1]}[item]

    monkeypatch.setattr("g4ir.engine.session.encode", encode)
    got = engine.session(1).prefill(
        row.tokens[None], soft=images[:1], images=["b"], videos=["v"], audio=["x", "y"]
    )
    assert asked == [("image", "b"), ("video", "v"), ("audio", "x"), ("audio", "y")]
    want = engine.session(1).prefill(row.tokens[None], soft=[*audio, *videos, *images])
    assert torch.equal(got, want)


def test_media_in_a_forked_process(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a session of the parent too: towers would wait for threads that only it has."""
    session = engine.session(1)
    monkeypatch.setattr(engine, "_process", -1)
    with pytest.raises(InputError, match="of which this is a fork"):
        session.prefill([[250]], images=["photo.png"])


# --- errors -----------------------------------------------------------------------------------

IMAGE, AUDIO, ONE = [[7, 250, 250, 8]], [[7, 252, 252, 8]], torch.ones(1, 64)


def soft(kind: str, *shape: int, value: float = 1.0) -> Soft:
    return Soft(kind, (torch.full(shape, value),))


WRONG: list[tuple[Any, Any, str]] = [
    (IMAGE, (), r"2 placeholders \(id 250\) for 0 media with 0 soft tokens; prefill takes"),
    (IMAGE, [soft("image", 3, 64)], r"image: .* 2 placeholders \(id 250\) for 1 media with 3 soft"),
    (AUDIO, [soft("image", 2, 64)], r"image: .* 0 placeholders \(id 250\) for 1 media with 2 soft"),
    (AUDIO, [soft("audio", 2, 40)], r"audio 0 .* of floats \[n, 64\], found float32 \[2, 40\]"),
    (AUDIO, [soft("audio", 64)], r"audio 0 .* found float32 \[64\]"),
    (
        [[250] * 20],
        [soft("image", 20, 64)],
        r"row 0: the 20 soft tokens of the picture at index 0 .* "
        r"one chunk, of at most 16; build with --prefill-chunk 20 or more",
    ),
    ([[7, 250, 900]], [soft("image", 1, 64)], r"token 900 \(row 0, index 2\) is outside"),
    (
        [[251, 251]],
        [soft("video", 1, 64), soft("video", 1, 64, value=float("nan"))],
        "video 1 of the soft tokens are not finite",
    ),
    (IMAGE, [soft("image", 2, 64, value=float("inf"))], "image 0 of the soft tokens are not fin"),
    (IMAGE, [Soft("image", (ONE.long(),))], r"image 0 .* a tensor of floats .* found int64"),
    (IMAGE, [Soft("image", (ONE.numpy(),))], r"image 0 .* of floats \[n, 64\], found ndarray"),
    (IMAGE, [Soft("audio", ONE)], r"audio 0 .* a tuple of tensors, found float32"),
    (IMAGE, [ONE], r"^soft 0: expected what Engine.encode returns, found float32 \[1, 64\]"),
    (IMAGE, Soft("image", (ONE,)), r"^soft: expected a list, found Soft"),
    (IMAGE, [Soft("smell", (ONE,))], r"^media 'smell': one of image, video, audio"),
]


@pytest.mark.parametrize("tokens, softs, message", WRONG, ids=[m for _, _, m in WRONG])
def test_wrong_media(engine: Engine, tokens: Any, softs: Any, message: str) -> None:
    session = with_chunk(engine, 16).session(1)
    with pytest.raises(InputError, match=message):
        session.prefill(tokens, soft=softs)
    assert session.length.tolist() == [0]


@pytest.mark.parametrize("name", ["images", "videos", "audio"])
def test_media_are_lists(engine: Engine, name: str) -> None:
    """A path is not taken letter by letter, nor an array row by row."""
    for items in ("a.png", Path("a.png"), torch.zeros(2, 4, 4, 3).numpy()):
        found = type(items).__name__
        with pytest.raises(InputError, match=f"^{name}: expected a list, found {found}"):
            engine.session(1).prefill([[250]], **{name: items})


def test_kinds_that_an_engine_does_not_take(engine: Engine) -> None:
    """Their ids are tokens like any other."""
    images = replace(engine, media=Media(("image",)))
    with pytest.raises(InputError, match="takes text, image, no audio, and tiny takes text alone"):
        images.session(1).prefill([[252]], soft=[made("audio", 1, engine)])
    text = replace(engine, media=Media())
    with pytest.raises(InputError, match="this engine takes text, no image, and tiny takes"):
        text.session(1).prefill([[250]], soft=[made("image", 1, engine)])
    assert text.session(1).prefill([[250, 252]]).any()
    with_one = images.session(1).prefill([[252, 250]], soft=[made("image", 1, engine)])
    assert with_one.any()


def test_placeholders_may_lie_outside_of_the_tables() -> None:
    """Ids that the per-layer table has no row for are masked before they are looked up."""
    spec = spec_of("tiny")
    assert spec.text.ple and spec.text.ple.vocab_size == spec.text.vocab_size
    fewer = replace(spec, text=replace(spec.text, ple=replace(spec.text.ple, vocab_size=200)))
    g = build_graph(check_spec(fewer), "embed", media=Media(KINDS))
    ids = torch.tensor([[250, 7, 251, 252, 3]])
    tables = {v.name: torch.randn([int(d) for d in v.type.shape]) for v in g.params}
    out, _ = interpret(g, {"tokens": ids}, tables, {})
    text, _ = interpret(g, {"tokens": torch.tensor([[3, 7, 3, 3, 3]])}, tables, {})
    assert all(torch.equal(out[k], text[k]) for k in ("embeds", "ple_rows"))


# --- cutting ----------------------------------------------------------------------------------

#: a row by runs: (tokens, whether they are a block)
RUNS = st.lists(st.tuples(st.integers(1, 12), st.booleans()), max_size=8)


def blocks_of(rows: Sequence[Sequence[tuple[int, bool]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """(lengths, block ids)"""
    flags = [[seen for count, seen in row for _ in range(count)] for row in rows]
    pictures = torch.zeros(len(rows), max(map(len, flags)), dtype=torch.bool)
    for out, row in zip(pictures, flags, strict=True):
        out[: len(row)] = torch.tensor(row, dtype=torch.bool)
    return torch.tensor([len(row) for row in flags]), block_ids(pictures)


@settings(max_examples=200)
@given(rows=st.lists(RUNS, min_size=1, max_size=3), chunk=st.integers(1, 40))
def test_cutting(rows: list[list[tuple[int, bool]]], chunk: int) -> None:
    """Pieces cover a row in order, none is longer than a chunk, no block lies in two of them, and
    a row is cut early only before a block."""
    lengths, ids = blocks_of(rows)
    longest = max((int((row == i).sum()) for row in ids for i in row[row >= 0]), default=0)
    if longest > chunk:
        with pytest.raises(InputError, match=f"the {longest} soft tokens .* of at most {chunk};"):
            cut(lengths, chunk, ids)
        return
    pieces = cut(lengths, chunk, ids)
    for row, length in enumerate(lengths.tolist()):
        at = 0
        for piece in pieces:
            start, count = int(piece.start[row]), int(piece.count[row])
            end = start + count
            assert start == at and count <= chunk
            assert count == min(chunk, length - start) or int(ids[row, end]) == end
            assert end in (0, length) or not ids[row, end - 1] == ids[row, end] >= 0
            at = end
        assert at == length
    assert all(piece.width > 0 for piece in pieces)


def test_padding_is_in_no_block() -> None:
    """Also where it looks like a placeholder."""
    tokens, softs = torch.full((2, 5), 250), [Soft("image", (torch.ones(7, 4),))]
    ids = {"image": 250, "video": 251}
    prompt = merged(tokens, torch.tensor([5, 2]), softs, ids, blocks=True)
    assert prompt.block_ids is not None and prompt.soft_rows is not None
    assert prompt.block_ids.tolist() == [[0] * 5, [0, 0, -1, -1, -1]]
    assert prompt.soft_rows.tolist() == [[0, 1, 2, 3, 4], [5, 6, -1, -1, -1]]
