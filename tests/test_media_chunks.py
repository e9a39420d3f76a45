"""Prompts with media, cut by whatever cuts prompts, and beside others: the numbers are those of
the whole prompt alone.

Chunks, marks, cached prefixes and turns may end anywhere, but no image that is seen both ways is
split, and a cached prefix is of use only if its last block is the prompt's. What is expected is
`Session.prefill` of the whole prompt in one chunk, which tests/test_media_models.py compares with
transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from g4ir import Engine, Spec, build_graph, interpret, load_spec
from g4ir.backends.base import GraphRun
from g4ir.backends.sampling import SamplingParams
from g4ir.engine.inputs import row_prompt
from g4ir.engine.prefill import Prefiller, shared_length
from g4ir.engine.requests import FINISHED, Request, RequestHandle
from g4ir.engine.scheduler import Scheduler, SchedulerConfig
from g4ir.errors import InputError
from g4ir.media.soft import Soft
from g4ir.model.decoder import BLOCKS
from g4ir.model.media import KINDS, Media
from tests.configs import check_spec
from tests.engines import CASES, agrees
from tests.runner import with_chunk
from tests.spies import spy

WHOLE, LONGEST, STEPS = 96, 13, 4
LIMITS = {"max_batch": 2, "max_seq": 160, "prefill_chunk": WHOLE}
HOLDERS = {"image": 500, "video": 501, "audio": 502}
HIDDEN, VOCAB = 64, 512
#: of log-probabilities in f32
TOLERANCE = 1e-5
EXAMPLES = 6


def spec_called(name: str) -> Spec:
    """tiny-unified; or another tiny spec that takes its media and sees images both ways."""
    unified = load_spec("tiny-unified")
    if name == unified.name:
        return unified
    spec = load_spec(name)
    text = replace(spec.text, use_bidirectional_attention="vision")
    media = {k: getattr(unified, k) for k in ("tokens", "model_type", "vision", "audio")}
    return check_spec(replace(spec, name=f"{name}-both-ways", text=text, **media))


@pytest.fixture(
    scope="module",
    params=[("tiny-unified", "torch"), ("tiny-moe", "reference"), ("tiny-ple", "reference")],
    ids=lambda param: param[0],
)
def engine(request: Any, make_engine: Any) -> Engine:
    """K = V in step programs; experts; per-layer embeddings with shared K and V."""
    name, backend = request.param
    return make_engine(spec_called(name), backend=backend, audio_seconds=(1,), **LIMITS)


@dataclass(frozen=True)
class Segment:
    """A run of text, or a medium, of `sizes` tokens: of a video one for each frame, which are
    `apart` by so many tokens of text."""

    kind: str
    sizes: tuple[int, ...]
    seed: int = 0
    apart: int = 0

    def random(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        if self.kind == "text":
            ids = torch.randint(4, 499, self.sizes, generator=self.random())
            return tuple(ids.tolist())
        runs = [(HOLDERS[self.kind],) * n for n in self.sizes]
        return sum((run + (7,) * self.apart for run in runs), ())

    @cached_property
    def soft(self) -> tuple[Soft, ...]:
        if self.kind == "text":
            return ()
        r = self.random()
        return (Soft(self.kind, tuple(torch.randn(n, HIDDEN, generator=r) for n in self.sizes)),)


def request_of(segments: Sequence[Segment], **options: Any) -> Request:
    tokens = sum((s.tokens for s in segments), ())
    soft = sum((s.soft for s in segments), ())
    sampling = SamplingParams(ignore_eos=True, logprobs=VOCAB)
    return Request(tokens, STEPS, sampling, soft, **options)


def text(size: int, seed: int = 0) -> Segment:
    return Segment("text", (size,), seed)


def image(size: int, seed: int = 0) -> Segment:
    return Segment("image", (size,), seed)


SEGMENTS = st.one_of(
    st.builds(text, st.integers(1, 20), st.integers(0, 1)),
    st.builds(image, st.integers(1, LONGEST), st.integers(0, 2)),
    st.builds(lambda n, s: Segment("audio", (n,), s), st.integers(1, 12), st.integers(0, 1)),
    st.builds(
        lambda sizes, s, apart: Segment("video", sizes, s, apart),
        st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple),
        st.integers(0, 1),
        st.integers(0, 2),
    ),
)


def fits(segments: Sequence[Segment]) -> bool:
    """Whether the prompt fits the chunk of the whole."""
    return 0 < len(request_of(segments).tokens) <= WHOLE


PROMPTS = st.lists(SEGMENTS, min_size=1, max_size=7).filter(fits)


@st.composite
def related(draw: Callable[..., Any]) -> list[list[Segment]]:
    """Prompts that begin alike: turns of a conversation, and such as part within it."""
    base, out = draw(PROMPTS), list[list[Segment]]()
    for _ in range(draw(st.integers(1, 4))):
        stop = draw(st.integers(0, len(base)))
        prompt = base[:stop] + draw(st.lists(SEGMENTS, max_size=2))
        out.append(prompt if fits(prompt) else base)
    return out


def longest_block(engine: Engine, request: Request) -> int:
    prompt = row_prompt(engine, request.tokens, request.soft)
    return max((stop - start for start, stop in prompt.spans), default=1)


def expected(engine: Engine, request: Request, answer: Sequence[int]) -> list[torch.Tensor]:
    """Log-probabilities of each token of the answer, after the whole prompt in one chunk."""
    session = engine.session(1)
    logits = [session.prefill([request.tokens], soft=request.soft)]
    logits += [session.decode([token]) for token in answer[:-1]]
    return [x[0].log_softmax(-1) for x in logits]


#: sizes of chunks, or of one while others decode; marks
SIZES, MARKS = st.integers(1, 20), st.lists(st.integers(0, WHOLE), max_size=4)


#: bounds of a gap while others decode, in ms; None: alone
GAPS = (None, math.inf, 1e3, 1e-3)
#: prompts, of which something would cut a medium behind the first chunk; the chunk, that of prompts
#: while others decode, marks, and the gap
CUTS: list[tuple[list[list[Segment]], int, int | None, list[int], float | None]] = [
    ([[text(40), image(13), text(5)]], 16, None, [], None),
    ([[text(20), image(6), text(3), image(9, 1)]], 16, None, [], None),
    ([[text(25), image(5), image(6, 1), text(5)]], 16, None, [], None),
    ([[text(25), Segment("video", (4, 4, 4)), text(5)]], 16, None, [], None),
    ([[text(21), Segment("audio", (8,)), image(7), text(5)]], 16, None, [], None),
    ([[text(20), image(10), text(5)]], 16, None, [8], None),
    ([[text(30)], [text(20), image(13), text(5)]], 16, None, [], None),
    ([[text(24), image(13), text(5)]], 16, 10, [], math.inf),
]


def test_no_cut_changes_the_numbers(engine: Engine) -> None:
    """Turns and prompts that part, with marks, in any chunks, alone or while others decode."""

    @settings(max_examples=EXAMPLES, deadline=None)
    @given(related(), st.integers(LONGEST, 40), st.none() | SIZES, MARKS, st.sampled_from(GAPS))
    def check(
        prompts: list[list[Segment]],
        chunk: int,
        chunk_tokens: int | None,
        marks: list[int],
        gap: float | None,
    ) -> None:
        requests = [request_of(prompt) for prompt in prompts]
        size = max(chunk, *(longest_block(engine, r) for r in requests))
        config = SchedulerConfig(chunk_tokens=chunk_tokens, patience=0, max_gap_ms=gap or math.inf)
        scheduler = Scheduler(with_chunk(engine, size), config)
        if gap:
            scheduler.submit(Request((5, 6), 150, SamplingParams(ignore_eos=True)))
            scheduler.step()
        for request in requests:
            inner = tuple(m for m in marks if m <= len(request.tokens))
            answers(scheduler, engine, replace(request, marks=inner))

    for cut in CUTS:
        check = example(*cut)(check)
    check()


def answers(scheduler: Scheduler, engine: Engine, request: Request) -> RequestHandle:
    """Submit a request; the log-probabilities of its answer are those after the whole prompt."""
    handle = scheduler.submit(request)
    events = [*scheduler.run(handle)]
    assert handle.state == FINISHED, events[-1].error
    answer = [e.token for e in events if e.token is not None]
    assert len(answer) == STEPS
    for event, want in zip(events, expected(engine, request, answer), strict=True):
        assert event.logprobs is not None
        got = torch.zeros(VOCAB)
        got[[t for t, _ in event.logprobs.top]] = torch.tensor([p for _, p in event.logprobs.top])
        torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)
    return handle


def test_a_piece_ends_before_a_block_or_after_it(engine: Engine) -> None:
    """At a stop within a block: before it, or after it if the piece starts there."""
    request = request_of(
        [text(5), image(6), text(3, 1), Segment("audio", (4,)), image(2), image(3)]
    )
    prompt = row_prompt(engine, request.tokens, request.soft)
    assert prompt.spans == [(5, 11), (18, 23)]
    ends = {(0, 4): 4, (0, 5): 5, (0, 6): 5, (0, 11): 11, (5, 6): 11, (5, 13): 13, (11, 16): 16}
    ends |= {(16, 20): 18, (18, 20): 23, (0, 23): 23}
    for (start, stop), end in ends.items():
        piece = prompt.piece(start, stop)
        assert (piece.at, int(piece.start), int(piece.count)) == (start, start, end - start)
    assert [prompt.boundary(i) for i in (0, 5, 7, 11, 16, 20, 23)] == [0, 5, 5, 11, 16, 18, 23]
    plain = row_prompt(engine, request.tokens[:5])
    assert plain.spans == [] and plain.boundary(3) == 3 and int(plain.piece(1, 4).count) == 3


def test_a_cached_prefix_ends_with_the_whole_block(engine: Engine) -> None:
    """An image whose neighbour is another, or none, has seen other tokens; one without a block has
    not."""
    a, b, c = (image(5, seed) for seed in range(3))
    start, end = text(6), text(9, 1)
    scheduler = Scheduler(engine)
    prompts = ([start, a, end], [start, a, b, end], [start, a, c, end], [start, a, b], [start, a])
    cached = []
    for prompt in prompts:
        request = request_of(prompt, marks=(6, 11))
        cached.append(answers(scheduler, engine, request).counts.cached)
    assert cached == [0, 6, 6, 6, 6]
    heard = [request_of([start, Segment("audio", (5,), s), end]) for s in (0, 0, 1)]
    keys = [Prefiller(engine).keys(r) for r in heard]
    assert [shared_length(keys[0], k) for k in keys] == [20, 20, 6]
    assert [k < 0 for k in keys[0]] == [t == HOLDERS["audio"] for t in heard[0].tokens]


def test_an_image_longer_than_a_chunk_is_refused_at_once(engine: Engine) -> None:
    scheduler = Scheduler(with_chunk(engine, 16), SchedulerConfig(chunk_tokens=64))
    for prompt in ([text(3), image(17)], [text(3), image(9), image(8, 1)]):
        with pytest.raises(
            InputError, match=r"the 17 soft tokens of the image or frame at index 3 .* of at"
        ):
            scheduler.submit(request_of(prompt))
    assert not scheduler.busy and BLOCKS in engine.program.graphs


# --- sessions -----------------------------------------------------------------------------------

#: rows of a session: media at the start, one token between, at the end; at other places, an image
#: beside a video; text alone
ROWS = [
    [image(13), text(1), image(5, 1), text(9), Segment("video", (5, 1)), Segment("audio", (4,)),
     text(4), image(6, 2)],
    [text(7), Segment("video", (5, 5), 1), text(2), image(13, 3), text(4), Segment("audio", (2,)),
     text(1), image(4), Segment("video", (3,))],
    [text(2)],
    [text(41)],
]  # fmt: skip
#: it sees pictures both ways, and has K = V on its full layers
UNIFIED = {"max_batch": len(ROWS), "max_seq": 128, "prefill_chunk": 64, "all_logits": True}


@pytest.fixture(scope="module")
def unified(make_engine: Any) -> Engine:
    return make_engine("tiny-unified", audio_seconds=(1,), **UNIFIED)


@pytest.mark.parametrize("options", [{}, {"latent_kv": "value"}], ids=str)
def test_ragged_rows_with_media(make_engine: Any, options: dict[str, Any]) -> None:
    """Blocks at different places of the rows, in chunks that would cut them; then decoding past a
    window."""
    made = make_engine("tiny-unified", audio_seconds=(1,), **UNIFIED, **options)
    rows, after = [*map(request_of, ROWS)], torch.randint(4, 499, (8 + 2, len(ROWS)))
    lengths = [len(row.tokens) for row in rows]
    tokens = torch.full((len(rows), max(lengths)), 500)  # a placeholder in the padding
    want = []
    for i, row in enumerate(rows):
        tokens[i, : lengths[i]], alone = torch.tensor(row.tokens), made.session(1)
        want.append([alone.prefill([row.tokens], all_logits=True, soft=row.soft)[0]])
        want[i] += [alone.decode(step[i, None])[0] for step in after]
    soft = [s for row in rows for s in row.soft]
    for chunk in (LONGEST, 17):
        session = with_chunk(made, chunk).session(len(rows))
        got = session.prefill(tokens, torch.tensor(lengths), all_logits=True, soft=soft)
        for i, n in enumerate(lengths):
            agrees(got[i, :n], want[i][0])
            assert not got[i, n:].any()
        for at, step in enumerate(after):
            for logits, row in zip(session.decode(step), want, strict=True):
                agrees(logits, row[1 + at])


def test_text_alone_is_cut_as_ever(unified: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks and phases of an engine without media, which a prompt without pictures shares."""
    session, seen = with_chunk(unified, 16).session(2), list[tuple[str, int]]()

    def watched(step: GraphRun, state: Any) -> None:
        seen.append((step.phase, step.feeds["embeds"].shape[1]))
        assert ("block_ids" in step.feeds) == (step.phase == BLOCKS)

    spy(monkeypatch, unified.runtime, "run", watched)
    session.prefill(torch.full((2, 33), 7), torch.tensor([33, 18]))
    assert seen == [("prefill", 16), ("prefill", 16), ("decode", 1)]
    seen.clear()
    audio = Segment("audio", (17,))
    row = request_of([text(4), image(14), text(1), audio, image(1, 1), text(1), image(1, 2)])
    session.prefill(torch.tensor([row.tokens] * 2), torch.tensor([39, 0]), soft=row.soft)
    assert seen == [("prefill", 4), (BLOCKS, 16), ("prefill", 16), (BLOCKS, 3)]
    seen.clear()
    session.prefill([[500], [501]], soft=[soft_of("image", 1, 64), soft_of("video", 1, 64)])
    assert seen == [("decode", 1)]


def test_media_come_behind_soft_tokens_of_their_kind(unified: Engine, monkeypatch: Any) -> None:
    a, b = image(2), image(3, 1)
    row = request_of([a, text(1), b])
    monkeypatch.setattr("g4ir.engine.inputs.encode", lambda *_: b.soft[0])
    got = unified.session(1).prefill([row.tokens], soft=a.soft, images=["b"])
    assert torch.equal(got, unified.session(1).prefill([row.tokens], soft=row.soft))


def test_decoded_placeholders_are_padding(unified: Engine) -> None:
    """As in the reference, which has no soft tokens for what the model itself makes."""
    tokens = torch.tensor([[7, 8, 9]])
    logits = []
    for token in (unified.spec.tokens.pad, 500, 502):
        session = unified.session(1)
        session.prefill(tokens)
        logits.append(session.decode([token]))
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])


ONE = torch.ones(1, 64)


def soft_of(kind: str, *shape: int, value: float = 1.0) -> Soft:
    return Soft(kind, (torch.full(shape, float(value)),))


NONE = "^soft 0: expected what Engine.encode returns"
WRONG: list[tuple[list[int], Any, str]] = [
    *(([500], [x], NONE) for x in (ONE, Soft("image", (ONE.long(),)), Soft("audio", ONE[0]))),
    ([500], Soft("image", (ONE,)), r"^soft: expected a list, found Soft"),
]
WRONG += [
    (tokens, [soft_of(kind, *shape, value=value) for kind, shape, value in softs], says)
    for tokens, softs, says in CASES["soft"]
]


@pytest.mark.parametrize("tokens, softs, message", WRONG, ids=[m for _, _, m in WRONG])
def test_wrong_media(unified: Engine, tokens: list[int], softs: Any, message: str) -> None:
    session = with_chunk(unified, 16).session(1)
    with pytest.raises(InputError, match=message):
        session.prefill([tokens], soft=softs)
    assert session.length.tolist() == [0]


def test_kinds_that_an_engine_does_not_take(unified: Engine) -> None:
    """Their ids are tokens like any other."""
    images = unified.configured(media=Media(("image",)))
    with pytest.raises(InputError, match="takes text, image, no audio"):
        images.session(1).prefill([[502]], soft=[soft_of("audio", 1, 64)])
    text = unified.configured(media=Media())
    with pytest.raises(InputError, match="this engine takes text, no image"):
        text.session(1).prefill([[500]], soft=[soft_of("image", 1, 64)])
    assert text.session(1).prefill([[500, 502]]).any()
    with_one = images.session(1).prefill([[502, 500]], soft=[soft_of("image", 1, 64)])
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
