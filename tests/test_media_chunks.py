"""Prompts with media, cut by whatever cuts prompts: the numbers are those of the whole prompt.

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
from hypothesis import given, settings
from hypothesis import strategies as st

from g4ir.backends.sampling import SamplingParams
from g4ir.engine.engine import Engine
from g4ir.engine.inputs import row_prompt
from g4ir.engine.prefill import Prefiller, shared_length
from g4ir.engine.requests import FINISHED, Event, Request, RequestHandle
from g4ir.engine.scheduler import Scheduler, SchedulerConfig
from g4ir.errors import InputError
from g4ir.media.soft import Soft
from g4ir.model.decoder import BLOCKS
from g4ir.spec.record import Spec, check_spec, load_spec
from tests.runner import with_chunk

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
    made: Engine = make_engine(spec_called(name), backend=backend, audio_seconds=(1,), **LIMITS)
    return made


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


def agrees(engine: Engine, request: Request, events: Sequence[Event]) -> None:
    """Log-probabilities of the answer are those after the whole prompt, within the tolerance."""
    answer = [e.token for e in events if e.token is not None]
    assert len(answer) == STEPS
    for event, want in zip(events, expected(engine, request, answer), strict=True):
        assert event.logprobs is not None
        got = torch.zeros(VOCAB)
        got[[t for t, _ in event.logprobs.top]] = torch.tensor([p for _, p in event.logprobs.top])
        torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)


#: sizes of chunks, or of one while others decode; marks
SIZES, MARKS = st.integers(1, 20), st.lists(st.integers(0, WHOLE), max_size=4)


#: bounds of a gap while others decode, in ms; None: alone
GAPS = (None, math.inf, 1e3, 1e-3)


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

    check()


def answers(scheduler: Scheduler, engine: Engine, request: Request) -> RequestHandle:
    """Submit a request, and check its answer."""
    handle = scheduler.submit(request)
    events = [*scheduler.run(handle)]
    assert handle.state == FINISHED, events[-1].error
    agrees(engine, request, events)
    return handle


#: prompts, of which something would cut a medium behind the first chunk; the chunk, that of prompts
#: while others decode, and marks
CUTS: dict[str, tuple[list[list[Segment]], int, int | None, tuple[int, ...]]] = {
    "a chunk": ([[text(40), image(13), text(5)]], 16, None, ()),
    "one of two images": ([[text(20), image(6), text(3), image(9, 1)]], 16, None, ()),
    "neighbours": ([[text(25), image(5), image(6, 1), text(5)]], 16, None, ()),
    "frames": ([[text(25), Segment("video", (4, 4, 4)), text(5)]], 16, None, ()),
    "behind audio": ([[text(21), Segment("audio", (8,)), image(7), text(5)]], 16, None, ()),
    "behind a mark": ([[text(20), image(10), text(5)]], 16, None, (8,)),
    "behind a prefix": ([[text(30)], [text(20), image(13), text(5)]], 16, None, ()),
    "beside others": ([[text(24), image(13), text(5)]], 16, 10, ()),
}


@pytest.mark.parametrize("cut", CUTS)
def test_media_that_would_be_cut(engine: Engine, cut: str) -> None:
    prompts, chunk, chunk_tokens, marks = CUTS[cut]
    config = SchedulerConfig(chunk_tokens=chunk_tokens, patience=0)
    scheduler = Scheduler(with_chunk(engine, chunk), config)
    if chunk_tokens:
        scheduler.submit(Request((5, 6), 150, SamplingParams(ignore_eos=True)))
        scheduler.step()
    for prompt in prompts:
        answers(scheduler, engine, request_of(prompt, marks=marks))


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


def test_an_image_longer_than_a_chunk_is_refused_at_once(engine: Engine) -> None:
    scheduler = Scheduler(with_chunk(engine, 16), SchedulerConfig(chunk_tokens=64))
    for prompt in ([text(3), image(17)], [text(3), image(9), image(8, 1)]):
        with pytest.raises(
            InputError, match=r"the 17 soft tokens of the image at index 3 .* of at"
        ):
            scheduler.submit(request_of(prompt))
    assert not scheduler.busy and BLOCKS in engine.program.graphs
