"""The text side of media: soft tokens in sessions, blocks that see both ways, chunks around them.

Soft tokens are random here. What is expected is a row alone in one chunk, which
tests/test_media_models.py compares with transformers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import pytest
import torch

from g4ir.engine.engine import Engine
from g4ir.errors import InputError
from g4ir.ir.interpret import interpret
from g4ir.media.soft import Soft
from g4ir.model.decoder import BLOCKS
from g4ir.model.media import KINDS, Media
from g4ir.model.text import build_graph
from g4ir.spec.record import check_spec, load_spec
from tests.engines import CASES, agrees
from tests.runner import with_chunk
from tests.spies import spy

WHOLE = 64
#: the longest block of ROWS
LONGEST = 13
#: decoded after the prompt: past a window
STEPS = 8 + 2
#: prompts, by token: I image, V video, A audio, . text
ROWS = (
    "IIIIIIIIIIIII.IIIII.........VVVVVVAAAA....IIIIII",  # at the start, one token between, the end
    ".......VVVVVVVVVV..IIIIIIIIIIIII....AA.IIIIVVV",  # at other places; an image beside a video
    "..",
    ".........................................",
)
LETTERS = {"I": "image", "V": "video", "A": "audio"}
HOLDERS = {"image": 500, "video": 501, "audio": 502}


#: the engine sees pictures both ways, and has K = V on its full layers
LIMITS = {"max_batch": len(ROWS), "max_seq": 128, "prefill_chunk": WHOLE, "all_logits": True}


@pytest.fixture(scope="module")
def engine(make_engine: Any) -> Engine:
    return make_engine("tiny-unified", audio_seconds=(1,), **LIMITS)


@dataclass(frozen=True)
class Row:
    """Tokens i64[T], and each token's soft token f32[T, hidden], of which placeholders' count."""

    tokens: torch.Tensor
    vectors: torch.Tensor
    layout: str

    def softs(self, kind: str) -> list[Soft]:
        """Those of the runs of a kind, in order."""
        out, at = list[Soft](), 0
        for letter, run in groupby(self.layout):
            end = at + len([*run])
            if LETTERS.get(letter) == kind:
                out.append(Soft(kind, tuple(self.vectors[at:end].split(5))))
            at = end
        return out


def make_row(layout: str, seed: int = 0) -> Row:
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(4, 500, (len(layout),), generator=g)
    for i, letter in enumerate(layout):
        tokens[i] = HOLDERS[LETTERS[letter]] if letter in LETTERS else tokens[i]
    return Row(tokens, torch.randn(len(layout), 64, generator=g), layout)


def softs_of(*rows: Row) -> list[Soft]:
    return [s for kind in KINDS for row in rows for s in row.softs(kind)]


@pytest.mark.parametrize("options", [{}, {"latent_kv": "value"}], ids=str)
def test_ragged_rows_with_media(make_engine: Any, options: dict[str, Any]) -> None:
    """Blocks at different places of the rows, in chunks that would cut them; then decoding."""
    made = make_engine("tiny-unified", audio_seconds=(1,), **LIMITS, **options)
    rows, lengths = [make_row(r + "." * STEPS, i) for i, r in enumerate(ROWS)], [*map(len, ROWS)]
    prompts = [Row(r.tokens[:n], r.vectors[:n], r.layout[:n]) for r, n in zip(rows, lengths)]
    tokens = torch.full((len(rows), max(lengths)), 500)  # a placeholder in the padding
    want = []
    for padded, row, n in zip(tokens, prompts, lengths, strict=True):
        padded[:n], alone = row.tokens, made.session(1)
        want.append([alone.prefill(row.tokens[None], all_logits=True, soft=softs_of(row))[0]])
        want[-1] += [alone.decode(rows[len(want) - 1].tokens[n + i, None])[0] for i in range(STEPS)]
    for chunk in (LONGEST, 17):
        session = with_chunk(made, chunk).session(len(rows))
        given = torch.tensor(lengths)
        got = session.prefill(tokens, given, all_logits=True, soft=softs_of(*prompts))
        for row, n in enumerate(lengths):
            agrees(got[row, :n], want[row][0])
            assert not got[row, n:].any()
        for i in range(STEPS):
            step = session.decode(torch.stack([r.tokens[n + i] for r, n in zip(rows, lengths)]))
            for row, logits in enumerate(step):
                agrees(logits, want[row][1 + i])


def test_text_alone_is_cut_as_ever(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks and phases of an engine without media, which a prompt without pictures shares."""
    session, seen = with_chunk(engine, 16).session(2), list[tuple[str, int]]()

    def watched(phase: str, feeds: Any, *rest: Any) -> None:
        seen.append((phase, feeds["embeds"].shape[1]))
        assert ("block_ids" in feeds) == (phase == BLOCKS)

    spy(monkeypatch, engine.runtime, "run", watched)
    session.prefill(torch.full((2, 33), 7), torch.tensor([33, 18]))
    assert seen == [("prefill", 16), ("prefill", 16), ("decode", 1)]
    seen.clear()
    row = make_row("....IIIIIIIIIIIIII.AAAAAAAAAAAAAAAAAI.I")
    session.prefill(row.tokens.repeat(2, 1), torch.tensor([39, 0]), soft=softs_of(row))
    assert seen == [("prefill", 4), (BLOCKS, 16), ("prefill", 16), (BLOCKS, 3)]
    seen.clear()
    session.prefill([[500], [501]], soft=[soft("image", 1, 64), soft("video", 1, 64)])
    assert seen == [("decode", 1)]


def test_decoded_placeholders_are_padding(engine: Engine) -> None:
    """As in the reference, which has no soft tokens for what the model itself makes."""
    tokens = torch.tensor([[7, 8, 9]])
    logits = []
    for token in (engine.spec.tokens.pad, 500, 502):
        session = engine.session(1)
        session.prefill(tokens)
        logits.append(session.decode([token]))
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])


def test_media_are_encoded_in_order(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind soft tokens of the same kind; each kind fills its own placeholders."""
    row = make_row(".II.AA.III.V.A")
    images, videos, audio = (row.softs(kind) for kind in KINDS)
    asked: list[Any] = []

    def encode(engine: Engine, kind: str, item: Any) -> Soft:
        asked.append((kind, item))
        return {"b": images[1], "v": videos[0], "x": audio[0], "y": audio[1]}[item]

    monkeypatch.setattr("g4ir.engine.inputs.encode", encode)
    got = engine.session(1).prefill(
        row.tokens[None], soft=images[:1], images=["b"], videos=["v"], audio=["x", "y"]
    )
    assert asked == [("image", "b"), ("video", "v"), ("audio", "x"), ("audio", "y")]
    want = engine.session(1).prefill(row.tokens[None], soft=[*audio, *videos, *images])
    assert torch.equal(got, want)


ONE = torch.ones(1, 64)


def soft(kind: str, *shape: int, value: float = 1.0) -> Soft:
    return Soft(kind, (torch.full(shape, float(value)),))


NONE = "^soft 0: expected what Engine.encode returns"
WRONG: list[tuple[list[int], Any, str]] = [
    *(([500], [x], NONE) for x in (ONE, Soft("image", (ONE.long(),)), Soft("audio", ONE[0]))),
    ([500], Soft("image", (ONE,)), r"^soft: expected a list, found Soft"),
]
WRONG += [
    (tokens, [soft(kind, *shape, value=value) for kind, shape, value in softs], says)
    for tokens, softs, says in CASES["soft"]
]


@pytest.mark.parametrize("tokens, softs, message", WRONG, ids=[m for _, _, m in WRONG])
def test_wrong_media(engine: Engine, tokens: list[int], softs: Any, message: str) -> None:
    session = with_chunk(engine, 16).session(1)
    with pytest.raises(InputError, match=message):
        session.prefill([tokens], soft=softs)
    assert session.length.tolist() == [0]


def test_kinds_that_an_engine_does_not_take(engine: Engine) -> None:
    """Their ids are tokens like any other."""
    images = engine.configured(media=Media(("image",)))
    with pytest.raises(InputError, match="takes text, image, no audio"):
        images.session(1).prefill([[502]], soft=[soft("audio", 1, 64)])
    text = engine.configured(media=Media())
    with pytest.raises(InputError, match="this engine takes text, no image"):
        text.session(1).prefill([[500]], soft=[soft("image", 1, 64)])
    assert text.session(1).prefill([[500, 502]]).any()
    with_one = images.session(1).prefill([[502, 500]], soft=[soft("image", 1, 64)])
    assert with_one.any()


def test_placeholders_may_lie_outside_of_the_tables() -> None:
    """Ids that the per-layer table has no row for are masked before they are looked up."""
    spec = load_spec("tiny-media")
    assert spec.text.ple and spec.text.ple.vocab_size == spec.text.vocab_size
    fewer = replace(spec, text=replace(spec.text, ple=replace(spec.text.ple, vocab_size=200)))
    g = build_graph(check_spec(fewer), "embed", media=Media(KINDS))
    tables = {v.name: torch.randn([int(d) for d in v.type.shape]) for v in g.params}
    out, _ = interpret(g, {"tokens": torch.tensor([[500, 7, 501, 502, 3]])}, tables, {})
    text, _ = interpret(g, {"tokens": torch.tensor([[0, 7, 0, 0, 3]])}, tables, {})
    assert all(torch.equal(out[k], text[k]) for k in ("embeds", "ple_rows"))
