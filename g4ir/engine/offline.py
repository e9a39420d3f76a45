"""Answers requests: what to generate comes from flags or JSON lines.

`answer` has one row of the engine in use. Tokens of a prompt that the row still holds from before
are not computed again (`cached_tokens`): a conversation sent whole each turn costs its new part
only, as far as the rings of sliding layers allow, and up to its first soft token: equal
placeholders do not mean equal media, so those are always computed.

JSON lines are read one by one and answered in order, as they come, and so are files of images,
videos and sounds, so that a long list of requests needs the memory of few: what is wrong in a
request is its own error, and others are answered. Where the engine has several rows, as many lines
are answered at a time, by slots (scheduler.py).

Each setting comes from the first that names it: the request, the flags, the checkpoint's
generation_config.json, the default (greedy). Stop ids add up: those of the request or the flags
and those of the checkpoint.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar

from g4ir.backends.row_sampling import Logprobs, RowSampling
from g4ir.backends.sampling import Sampler, Sampling
from g4ir.errors import CheckError, G4Error, InputError, RankError
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
    placeholders,
)

from .jsonl import FIELDS, checked_fields, named, parse_line, read_lines
from .prompts import checked_ids, checked_prompt
from .read_ahead import Line, ReadAhead
from .scheduler import Event, Request, RequestHandle, Scheduler, SchedulerConfig, found_settings
from .session import Session
from .speculative import AcceptanceStats, drafted_stream
from .tokenizer import Codec

if TYPE_CHECKING:
    import torch

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
#: settings that a row of slots has, beside those of all
ROW_FIELDS = (
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "min_tokens",
    "logprobs",
)
#: lines that are begun beyond those that rows are there for, so that none waits for a line
AHEAD = 2
#: answers that may wait for that of an earlier line, for each row
HELD_BACK = 64
#: stands in what a row holds for a soft token: no prompt shares it
_SOFT = -1


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
    """A checked request. A row ends with one of `stop`, or after `max_new_tokens`. While there
    are media `unread`, its tokens lack what those add."""

    id: int | str | None
    tokens: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling
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
    queued_s: float | None = None  # part of first_token_s, where rows were shared
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
    _sampling_of(Sampling(), flags)
    count = flags.get("max_new_tokens")
    if count is not None and count < 1:
        raise InputError(f"max_new_tokens {count}: expected at least 1")


def _sampling_of(base: Sampling, given: Mapping[str, Any]) -> Sampling:
    """Return `base` with what is given of temperature, top_k, top_p and seed."""
    names = ("temperature", "top_k", "top_p", "seed")
    found = {k: given[k] for k in names if given.get(k) is not None}
    if found.get("top_k") == 0:  # no limit, as in generation_config.json
        found["top_k"] = None
    return replace(base, **found)


def _row_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is given of the settings that RowSampling adds, as it has them."""
    found = {k: given[k] for k in ROW_FIELDS if given.get(k) is not None}
    if "logit_bias" in found:
        found["logit_bias"] = tuple((int(k), v) for k, v in found["logit_bias"].items())
    return found


# --- answering --------------------------------------------------------------------------------


class OfflineEngine:
    """Checks requests against an engine, and answers them in one row of it."""

    def __init__(
        self,
        engine: Engine,
        flags: Mapping[str, Any] | None = None,
        slots: SchedulerConfig | None = None,
    ) -> None:
        """Take settings `flags`, named as in FIELDS, for requests that do not give their own;
        tokens are drafted as `slots` says, where one row is in use too."""
        self.engine, self.settings = engine, found_settings(engine, slots)
        self.flags = {k: v for k, v in (flags or {}).items() if v is not None}
        self.codec = Codec(engine) if (engine.path / "tokenizer.json").is_file() else None
        self.defaults, self.never = engine.defaults(), engine.suppressed()
        self._held: list[int] = []
        self._sampling({})  # a wrong flag is no request's fault
        checked_ids(self.flags.get("stop", []), engine.spec.text.vocab_size, "stop")

    @cached_property
    def session(self) -> Session:
        """The row of `answer`."""
        return self.engine.session(1)

    @cached_property
    def slots(self) -> Scheduler:
        """The rows of lines that are answered beside others."""
        return Scheduler(self.engine, self.settings)

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

    def _sampling(self, fields: Mapping[str, Any]) -> Sampling:
        given = {**self.defaults.sampling, **self.flags, **fields}
        found, more = _sampling_of(Sampling(suppress=self.never), given), _row_fields(given)
        if not more:
            return found
        vocab = self.engine.spec.text.vocab_size
        checked_ids([token for token, _ in more.get("logit_bias", ())], vocab, "logit_bias")
        return RowSampling(**{**vars(found), **more})

    def answer(self, request: OfflineRequest, told: Told = lambda token: None) -> Result:
        """Generate; `told(token)` sees each token as it is drawn. InputError, or MissingError, for
        media that cannot be read; CheckError where logits are NaN or infinite. It answers others
        then."""
        if isinstance(request.sampling, RowSampling):
            return self._answer_in_slots(request, told)
        try:
            return self._answer(request, told)
        except CheckError:  # NaN in a cache would be NaN in what is computed over it later
            self.session.clear()
            raise

    def _answer(self, request: OfflineRequest, told: Told) -> Result:
        begun = time.perf_counter()
        if request.unread:
            request = self._read(request.unread)
        encode_s = time.perf_counter() - begun
        cached, logits = self._prefill(request)
        sampling = _seeded(request.sampling)
        tally, out, first = AcceptanceStats(), list[int](), 0.0
        for token in self._drawn(logits, request, Sampler(sampling), tally):
            first = first or time.perf_counter() - begun
            out.append(token)
            told(token)
        self._held += self._remembered(out[:-1])
        total = time.perf_counter() - begun
        return Result(
            request.id,
            tuple(out),
            self.codec.decode(out) if self.codec else None,
            "stop" if out[-1] in request.stop else "length",
            len(request.tokens),
            cached,
            first,
            total,
            counts(request.soft),
            encode_s,
            request.notes,
            sampling.seed,
            tally=tally,
        )

    def _drawn(
        self,
        logits: torch.Tensor,
        request: OfflineRequest,
        sampler: Sampler,
        tally: AcceptanceStats,
    ) -> Iterator[int]:
        """Yield the tokens of an answer, from logits after its prompt."""
        ask = request.max_new_tokens, sampler, request.stop
        if draft := self.settings.draft:
            for made in drafted_stream(self.session, logits, [request.tokens], *ask, draft, tally):
                yield from made[0]
            return
        for (token,), _ in self.session.stream(logits, *ask):
            yield token

    def answer_lines(self, stream: BinaryIO, source: str) -> Iterator[Result | Failure]:
        """Yield an answer to every JSON line, or what is wrong with it alone, in order. A request
        without an id has the number of its line, and None where that cannot be read."""
        if self.engine.limits.max_batch > 1:
            yield from self._answer_in_rows(stream, source)
            return
        for line in read_lines(stream):
            asked = self._asked(line, source)
            try:
                yield asked if isinstance(asked, Failure) else self.answer(asked)
            except RankError:
                raise
            except G4Error as e:
                assert isinstance(asked, OfflineRequest)
                yield Failure(asked.id, str(e), line[0])

    def _asked(self, line: Line, source: str) -> OfflineRequest | Failure:
        """Return the request of a line, or what is wrong with it."""
        number, text = line
        where, name = f"{source}:{number}", None
        try:
            given = {"id": number, **parse_line(text, where)}
            name = given["id"] if FIELDS["id"][0](given["id"]) else None
            return self.request(checked_fields(given, where), where)
        except G4Error as e:
            return Failure(name, str(e), number)

    # --- in rows --------------------------------------------------------------------------------

    def _answer_in_rows(self, stream: BinaryIO, source: str) -> Iterator[Result | Failure]:
        """Answer as many lines at a time as there are rows. No line is waited for while there is
        something to compute, or to tell."""
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
                        _note(self.slots.step(), begun)
            finally:
                for b in begun:
                    if isinstance(b, _Begun):
                        b.ticket.cancel()

    def _begin(self, line: Line, source: str) -> _Begun | Failure:
        """Put the request of a line in the queue."""
        asked = self._asked(line, source)
        try:
            return asked if isinstance(asked, Failure) else self._submit(asked, line[0], source)
        except G4Error as e:
            assert isinstance(asked, OfflineRequest)
            return Failure(asked.id, str(e), line[0])

    def _submit(self, request: OfflineRequest, line: int | None = None, source: str = "") -> _Begun:
        """Read the media of a request, and put it in the queue. What slots refuse is told with the
        line."""
        begun = time.perf_counter()
        if request.unread:
            request = self._read(request.unread)
        request = replace(request, sampling=_seeded(request.sampling))
        encode_s = time.perf_counter() - begun
        sampling = _in_row(request.sampling, request.stop)
        job = Request(request.tokens, request.max_new_tokens, sampling, request.soft)
        # What was encoded is the job's now, and not kept beside the answer.
        kept = replace(request, tokens=(), soft=())
        with nullcontext() if line is None else named(f"{source}:{line}"):
            ticket = self.slots.submit(job)
        return _Begun(kept, ticket, encode_s, counts(request.soft), line)

    def _answer_in_slots(self, request: OfflineRequest, told: Told) -> Result:
        """Answer one request alone."""
        one = self._submit(request)
        while not one.done:
            events = self.slots.step()
            _note(events, [one])
            for event in events:
                if event.token is not None:
                    told(event.token)
        if one.error:
            raise one.error
        return self._told(one)

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
        c, request = b.ticket.counts, b.request
        out = b.ticket.answers[0].tokens
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
            b.ticket.tally,
        )

    # --- in one row -----------------------------------------------------------------------------

    def _prefill(self, request: OfflineRequest) -> tuple[int, torch.Tensor]:
        """Return (tokens that the row held already, logits after the prompt)."""
        import torch

        tokens = request.tokens
        kept = self._keep(tokens)
        self._held = []  # unknown until the prefill is through
        logits = self.session.append(torch.tensor([tokens[kept:]]), soft=request.soft)
        self._held = self._remembered(tokens)
        return kept, logits

    def _remembered(self, tokens: Sequence[int]) -> list[int]:
        """Return tokens that a later prompt may share: placeholders are none."""
        holders = {*placeholders(self.engine.spec.tokens, self.engine.media.kinds).values()}
        return [_SOFT if t in holders else t for t in tokens]

    def _keep(self, tokens: tuple[int, ...]) -> int:
        """Cut the row to what it shares with a prompt, the last token left to compute.

        That ends before the first soft token that the row holds (`_remembered`), so that none is
        reused and no block is cut.
        """
        pairs = zip(self._held, tokens[:-1])
        shared = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if shared is None:
            shared = min(len(self._held), len(tokens) - 1)
        try:
            self.session.truncate(shared)
        except InputError:  # a ring has overwritten what the next token would see
            shared = 0
            self.session.reset()
        return shared


@dataclass
class _Begun:
    """A request in slots, and what has come of it."""

    request: OfflineRequest
    ticket: RequestHandle
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
    """Take what a step brought to the requests that it is of."""
    if not any(e.finish or e.logprobs for e in events):
        return
    by_ticket = {b.ticket: b for b in begun if isinstance(b, _Begun)}
    for event in events:
        b = by_ticket.get(event.ticket)
        if b is None:  # of lines that nobody wanted to the end
            continue
        b.logprobs += [event.logprobs] if event.logprobs else []
        b.finish, b.error = event.finish or b.finish, event.error or b.error


def _in_row(s: Sampling, stop: frozenset[int]) -> RowSampling:
    """Return the settings of a row; `stop` has the checkpoint's own ids."""
    row = s if isinstance(s, RowSampling) else RowSampling(**vars(s))
    return replace(row, stop=stop, ignore_eos=True)


def _seeded(s: Sampling) -> Sampling:
    """Return the settings with a seed where tokens are drawn, so that it can be told."""
    if s.temperature == 0:
        return replace(s, seed=None)
    return s if s.seed is not None else replace(s, seed=secrets.randbits(32))
