"""Offline inference: requests from flags or JSON lines, through the scheduler.

JSON lines are read one by one and answered in order, as many at a time as the engine has slots, and
so are files of images, videos and audio; a long list of requests needs the memory of few. An
invalid request yields its own error, and the others are answered.

Each setting comes from the first that names it: the request, the flags, the checkpoint's
generation_config.json, the default (greedy). Stop ids add up: those of the request or the flags
and those of the checkpoint.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar

from g4ir.backends.sampling import Logprobs, SamplingParams, random_seed
from g4ir.errors import G4Error, InputError
from g4ir.media import prompt as prompts
from g4ir.media.soft import Soft, counts
from g4ir.model.media import (
    AUDIO,
    IMAGE,
    LISTS,
    VIDEO,
    check_budget,
    check_taken,
    check_there,
)

from .jsonl import FIELDS, Line, ReadAhead, checked_fields, named, parse_line
from .prompts import checked_ids, checked_prompt
from .requests import Event, Request, RequestHandle
from .scheduler import Scheduler, SchedulerConfig
from .speculative import AcceptanceStats
from .tokenizer import Codec

if TYPE_CHECKING:
    from .engine import Engine

MAX_NEW_TOKENS = 64

RAW = (
    "the checkpoint has a chat template; the prompt is taken raw, without the marks of turns "
    "(`g4ir run --chat` makes them)"
)

BOS_ADDED = (
    "the prompt begins with <bos>, which the tokenizer's files do not add; --no-bos leaves it out"
)

Told = Callable[[int], None]

#: kind -> (setting, what `Engine.encode` calls it)
MEDIA_SETTINGS = {
    IMAGE: ("image_budget", "budget"),
    VIDEO: ("frames", "frames"),
    AUDIO: ("audio_too_long", "too_long"),
}
#: sampling settings of a request or a flag
SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "seed",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "min_tokens",
    "logprobs",
)
#: requests admitted beyond the batch size, so that a free slot never waits for input
AHEAD = 2
#: answers that may wait for that of an earlier line, for each slot
HELD_BACK = 64


@dataclass(frozen=True)
class Medium:
    """A file of a request. `settings` are keywords of `Engine.encode`, `where` is for messages."""

    kind: str
    path: str
    settings: Mapping[str, Any]
    where: str


@dataclass(frozen=True)
class Unread:
    """A request whose media are yet to be read."""

    fields: Mapping[str, Any]
    where: str
    media: tuple[Medium, ...]


@dataclass(frozen=True)
class OfflineRequest:
    """A checked request. Its answer ends with one of `stop`, or after `max_new_tokens`. While media
    are `unread`, its tokens lack their soft tokens."""

    id: int | str | None
    tokens: tuple[int, ...]
    max_new_tokens: int
    sampling: SamplingParams
    stop: frozenset[int]
    soft: tuple[Soft, ...] = ()
    notes: tuple[str, ...] = ()
    unread: Unread | None = None


@dataclass(frozen=True)
class Failure:
    """A message in the place of an answer; `line` is the request's number in the input."""

    id: int | str | None
    error: str
    line: int | None = None
    failed: ClassVar[bool] = True

    def output(self) -> dict[str, Any]:
        """Return what stdout gets."""
        line = {"line": self.line} if self.line is not None else {}
        return {"id": self.id, **line, "error": self.error}

    def log(self) -> dict[str, Any]:
        """Return what the log gets."""
        return {"event": "error", **self.output()}


@dataclass(frozen=True)
class Result:
    """An answer and its timing, seconds."""

    failed: ClassVar[bool] = False
    id: int | str | None
    tokens: tuple[int, ...]
    text: str | None
    finish_reason: str  # stop or length
    prompt_tokens: int
    cached_tokens: int
    first_token_s: float
    total_s: float
    soft_tokens: Mapping[str, int] = field(default_factory=dict)  # by kind of media
    encode_s: float = 0.0  # part of first_token_s: reading media, and the towers
    notes: tuple[str, ...] = ()
    seed: int | None = None  # of the draws, where there were any
    logprobs: tuple[Logprobs, ...] | None = None  # where they were asked for
    queued_s: float | None = None  # part of first_token_s
    tally: AcceptanceStats = field(default_factory=AcceptanceStats)  # where tokens were drafted

    def output(self) -> dict[str, Any]:
        """Return what stdout gets: id if there is one, tokens, text if a tokenizer is there, and
        log-probabilities that were asked for."""
        named = {"id": self.id} if self.id is not None else {}
        text = {"text": self.text} if self.text is not None else {}
        read = [{"logprob": p.chosen, "top": p.top} for p in self.logprobs or ()]
        logprobs = {"logprobs": read} if self.logprobs is not None else {}
        reason = {"finish_reason": self.finish_reason}
        return {**named, "tokens": list(self.tokens), **text, **reason, **logprobs}

    def log(self) -> dict[str, Any]:
        """Return what the log gets; no text of the prompt or the answer.

        tokens_per_second counts the tokens after the first, over the time they took; soft_tokens
        and encode_s come with media, queued_s where rows were shared, seed where tokens were drawn,
        drafts where tokens were drafted, notes where there are any.
        """
        media = {"soft_tokens": dict(self.soft_tokens), "encode_s": round(self.encode_s, 6)}
        queued = {} if self.queued_s is None else {"queued_s": round(self.queued_s, 6)}
        return {
            "event": "request",
            "id": self.id,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "new_tokens": len(self.tokens),
            "time_to_first_token_s": round(self.first_token_s, 6),
            "tokens_per_second": self.tokens_per_second,
            "total_s": round(self.total_s, 6),
            "finish_reason": self.finish_reason,
            **(media if self.soft_tokens else {}),
            **queued,
            **({"seed": self.seed} if self.seed is not None else {}),
            **({"drafts": self.tally.to_dict()} if self.tally.rounds else {}),
            **({"notes": list(self.notes)} if self.notes else {}),
        }

    @property
    def tokens_per_second(self) -> float | None:
        """Rate of the tokens after the first; None where there was one token only."""
        rest, seconds = len(self.tokens) - 1, self.total_s - self.first_token_s
        return round(rest / seconds, 3) if rest and seconds > 0 else None


# --- reading ----------------------------------------------------------------------------------


def check_flags(flags: Mapping[str, Any]) -> None:
    """Raise InputError for settings that no engine takes."""
    _sampling(flags)
    count = flags.get("max_new_tokens")
    if count is not None and count < 1:
        raise InputError(f"max_new_tokens {count}: expected at least 1")


def _sampling(given: Mapping[str, Any], suppress: tuple[int, ...] = ()) -> SamplingParams:
    """Return the sampling settings of a request's fields."""
    found = {k: given[k] for k in SAMPLING if given.get(k) is not None}
    if found.get("top_k") == 0:  # no limit, as in generation_config.json
        found["top_k"] = None
    if "logit_bias" in found:
        found["logit_bias"] = tuple((int(k), v) for k, v in found["logit_bias"].items())
    return SamplingParams(**found, suppress=suppress)


# --- answering --------------------------------------------------------------------------------


class OfflineEngine:
    """Checks requests against an engine, and answers them through a scheduler."""

    def __init__(
        self,
        engine: Engine,
        flags: Mapping[str, Any] | None = None,
        config: SchedulerConfig | None = None,
    ) -> None:
        """Take settings `flags`, named as in FIELDS, for requests that do not give their own."""
        self.engine = engine
        self.scheduler = Scheduler(engine, replace(config or SchedulerConfig(), chunks=None))
        self.flags = {k: v for k, v in (flags or {}).items() if v is not None}
        self.codec = Codec(engine) if (engine.path / "tokenizer.json").is_file() else None
        self.defaults, self.never = engine.defaults(), engine.suppressed()
        self._sampling({})  # a wrong flag is no request's fault
        checked_ids(self.flags.get("stop", []), engine.spec.text.vocab_size, "stop")

    def request(
        self, fields: Mapping[str, Any], where: str, media: Sequence[tuple[str, str]] = ()
    ) -> OfflineRequest:
        """Return a checked request out of fields as in FIELDS, with (kind, path) of more media;
        InputError begins with `where`. The media are read by `answer`."""
        flagged = [(k, p, f"--{k}") for k, p in media]
        named = [
            (k, p, f"{where}: {name}") for name, k in LISTS.items() for p in fields.get(name, [])
        ]
        files = tuple(self._medium(fields, *m) for m in (*flagged, *named))
        tokens, notes = self._tokens(fields, where, [m.kind for m in files])
        unread = Unread(fields, where, files) if files else None
        return replace(self._request(fields, where, tokens), notes=notes, unread=unread)

    def _medium(self, fields: Mapping[str, Any], kind: str, path: str, where: str) -> Medium:
        media = self.engine.media
        setting, keyword = MEDIA_SETTINGS[kind]
        value = self._setting(fields, setting)
        with named(where):
            check_taken(kind, media, self.engine.spec)
            if kind == IMAGE and value is not None:
                check_budget(value, media)
            check_there(kind, path)
        return Medium(kind, path, {} if value is None else {keyword: value}, where)

    def _request(self, fields: Mapping[str, Any], where: str, tokens: list[int]) -> OfflineRequest:
        vocab, room = self.engine.spec.text.vocab_size, self.engine.limits.max_seq
        count = self._setting(fields, "max_new_tokens")
        if count is None:
            count = max(1, min(MAX_NEW_TOKENS, room + 1 - len(tokens)))
        stop = checked_ids(self._setting(fields, "stop") or [], vocab, f"{where}: stop")
        checked_prompt(tokens, count, vocab, room, f"{where}: prompt")
        with named(where):
            sampling = self._sampling(fields)
        return OfflineRequest(
            fields.get("id"),
            tuple(tokens),
            count,
            sampling,
            frozenset([*stop, *self.engine.stop_ids()]),
        )

    def _tokens(
        self,
        fields: Mapping[str, Any],
        where: str,
        given: Sequence[str],
        soft: Sequence[Soft] = (),
    ) -> tuple[list[int], tuple[str, ...]]:
        """Return the ids of the prompt and notes; in text, media of the kinds `given` have a
        placeholder each, or the expansion of those that are read. InputError where the numbers
        cannot fit."""
        special, kinds = self.engine.spec.tokens, self.engine.media.kinds
        tokens, notes = fields.get("tokens"), list[str | None]()
        if tokens is None:
            codec = self._codec()
            text, note = self._text(fields, where, given)
            # What media are expanded to has special tokens, which are no turns.
            bos = self._setting(fields, "bos") is not False
            head = codec.encode(fields["prompt"], where, bos=False)[:1]
            raw = codec.instructed and not codec.has_turns(codec.encode(fields["prompt"], where))
            added = bos and codec.bos not in (None, *head) and not codec.adds_bos
            said = "; ".join([*[RAW] * raw, *[BOS_ADDED] * added])
            notes += [note, said or None]
            with named(where):
                text = prompts.expand_text(text, soft, special, codec.spell)
            tokens = codec.encode(text, where, bos)
        with named(where):
            prompts.check_given(tokens, given, special, kinds)
        return tokens, tuple(n for n in notes if n)

    def _text(
        self, fields: Mapping[str, Any], where: str, given: Sequence[str]
    ) -> tuple[str, str | None]:
        """Return the text of the prompt with a placeholder for each medium, and a note."""
        codec, special = self._codec(), self.engine.spec.tokens
        bos = None if special.bos is None else codec.tokenizer.id_to_token(special.bos)
        with named(where):
            return prompts.mark(
                fields["prompt"], given, self.engine.media.kinds, special, codec.spell, bos
            )

    def _read(self, unread: Unread) -> OfflineRequest:
        """Return the request with its media encoded, and a placeholder for each soft token."""
        fields, where, soft = unread.fields, unread.where, list[Soft]()
        for m in unread.media:
            with named(m.where):
                soft.append(self.engine.encode(m.kind, m.path, **m.settings))
        special, kinds = self.engine.spec.tokens, self.engine.media.kinds
        encode = self.codec.plain if self.codec else None
        tokens, notes = self._tokens(fields, where, [s.kind for s in soft], soft)
        with named(where):
            placed = prompts.place(tokens, soft, special, encode, kinds)
        untimed = not encode and prompts.times_left_out([tokens], [placed], special)
        notes += (prompts.NO_TIMES,) if untimed else ()
        return replace(self._request(fields, where, placed), soft=tuple(soft), notes=notes)

    def _codec(self) -> Codec:
        if self.codec is None:
            self.engine.tokenizer()  # says what is missing
        assert self.codec
        return self.codec

    def _setting(self, fields: Mapping[str, Any], name: str) -> Any:
        return fields.get(name, self.flags.get(name))

    def _sampling(self, fields: Mapping[str, Any]) -> SamplingParams:
        found = _sampling({**self.defaults.sampling, **self.flags, **fields}, self.never)
        biased = [token for token, _ in found.logit_bias]
        checked_ids(biased, self.engine.spec.text.vocab_size, "logit_bias")
        return found

    def answer(self, request: OfflineRequest, told: Told = lambda token: None) -> Result:
        """Generate one answer, which shares no prefix with others; `told(token)` is called with
        each token. InputError, or MissingError, for media that cannot be read; CheckError if logits
        are NaN or infinite. Others can be answered then."""
        one = self._submit(request, reuse=False)
        for event in self.scheduler.run(one.handle):
            _note([event], [one])
            if event.token is not None:
                told(event.token)
        if one.error:
            raise one.error
        return self._told(one)

    def answer_lines(self, stream: BinaryIO, source: str) -> Iterator[Result | Failure]:
        """Yield an answer to every JSON line, or its error, in order. A request without an id has
        the number of its line, and None if that cannot be read. No line is waited for while there
        is something to compute, or to return."""
        most, begun = self.engine.limits.max_batch, deque[_Begun | Failure]()
        with closing(ReadAhead(stream)) as lines:
            try:
                while begun or not lines.ended:
                    if begun and (answer := self._result(begun[0])) is not None:
                        begun.popleft()
                        yield answer
                        continue
                    going = sum(isinstance(b, _Begun) and not b.done for b in begun)
                    room = going < most + AHEAD and len(begun) < HELD_BACK * most
                    line = lines.next(wait=not begun) if room else None
                    if line is not None:
                        begun.append(self._begin(line, source))
                    elif begun:
                        _note(self.scheduler.step(), begun)
            finally:
                for b in begun:
                    if isinstance(b, _Begun):
                        b.handle.cancel()

    def _asked(self, line: Line, source: str) -> OfflineRequest | Failure:
        """Return the request of a line, or its error."""
        number, text = line
        where, name = f"{source}:{number}", None
        try:
            given = {"id": number, **parse_line(text, where)}
            name = given["id"] if FIELDS["id"][0](given["id"]) else None
            return self.request(checked_fields(given, where), where)
        except G4Error as e:
            return Failure(name, str(e), number)

    def _begin(self, line: Line, source: str) -> _Begun | Failure:
        """Put the request of a line in the queue."""
        asked = self._asked(line, source)
        try:
            return asked if isinstance(asked, Failure) else self._submit(asked, line[0], source)
        except G4Error as e:
            assert isinstance(asked, OfflineRequest)
            return Failure(asked.id, str(e), line[0])

    def _submit(
        self,
        request: OfflineRequest,
        line: int | None = None,
        source: str = "",
        reuse: bool = True,
    ) -> _Begun:
        """Read the media of a request, and put it in the queue. Errors name the line."""
        begun = time.perf_counter()
        if request.unread:
            request = self._read(request.unread)
        request = replace(request, sampling=_seeded(request.sampling))
        encode_s = time.perf_counter() - begun
        sampling = replace(request.sampling, stop=request.stop, ignore_eos=True)
        asked = Request(request.tokens, request.max_new_tokens, sampling, request.soft, reuse=reuse)
        # The soft tokens belong to the scheduler's request now.
        kept = replace(request, tokens=(), soft=())
        with nullcontext() if line is None else named(f"{source}:{line}"):
            handle = self.scheduler.submit(asked)
        return _Begun(kept, handle, encode_s, counts(request.soft), line)

    def _result(self, begun: _Begun | Failure) -> Result | Failure | None:
        """Return the answer to a line, None while it is not ready. What is no error of a request
        ends all."""
        if isinstance(begun, Failure):
            return begun
        if not begun.done:
            return None
        if begun.error is None:
            return self._told(begun)
        if not isinstance(begun.error, G4Error):
            raise begun.error
        return Failure(begun.request.id, str(begun.error), begun.line)

    def _told(self, b: _Begun) -> Result:
        """Return the answer to a request that has ended."""
        c, request = b.handle.counts, b.request
        out = b.handle.answers[0].tokens
        return Result(
            request.id,
            tuple(out),
            self.codec.decode(out) if self.codec else None,
            b.finish,
            c.prompt,
            c.cached,
            b.encode_s + (c.first_token_s or 0.0),
            b.encode_s + (c.total_s or 0.0),
            b.soft_tokens,
            b.encode_s,
            request.notes,
            request.sampling.seed,
            tuple(b.logprobs) if b.logprobs else None,
            c.queued_s,
            b.handle.tally,
        )


@dataclass
class _Begun:
    """A submitted request, and what has come of it."""

    request: OfflineRequest
    handle: RequestHandle
    encode_s: float
    soft_tokens: Mapping[str, int]
    line: int | None
    logprobs: list[Logprobs] = field(default_factory=list)
    finish: str = ""
    error: Exception | None = None

    @property
    def done(self) -> bool:
        return bool(self.finish)


def _note(events: Sequence[Event], begun: Iterable[_Begun | Failure]) -> None:
    """Add the events of a step to their requests."""
    if not any(e.finish or e.logprobs for e in events):
        return
    by_handle = {b.handle: b for b in begun if isinstance(b, _Begun)}
    for event in events:
        b = by_handle.get(event.handle)
        if b is None:  # of lines that nobody wanted to the end
            continue
        b.logprobs += [event.logprobs] if event.logprobs else []
        b.finish, b.error = event.finish or b.finish, event.error or b.error


def _seeded(s: SamplingParams) -> SamplingParams:
    """Return the settings with a seed if tokens are drawn, so that it can be reported."""
    if s.temperature == 0:
        return replace(s, seed=None)
    return s if s.seed is not None else replace(s, seed=random_seed())
