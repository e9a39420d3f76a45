"""Answers requests one after another: what to generate comes from flags or JSON lines.

One row of the engine is in use at a time. Tokens of a prompt that the row still holds from before
are not computed again (`cached_tokens`): a conversation sent whole each turn costs its new part
only, as far as the rings of sliding layers allow, and up to its first soft token: equal
placeholders do not mean equal media, so those are always computed.

JSON lines are read one by one and answered as they come, and so are files of images, videos and
sounds, so that a long list of requests needs the memory of one: what is wrong in a request is its
own error, and others are answered.

Each setting comes from the first that names it: the request, the flags, the checkpoint's
generation_config.json, the default (greedy). Stop ids add up: those of the request or the flags
and those of the checkpoint.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar

from g4ir.backends.sampling import Sampler, Sampling
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
    placeholders,
)

from .codec import Codec
from .jsonl import FIELDS, checked_fields, named, parse_line, read_lines
from .prompts import checked_ids, checked_prompt

if TYPE_CHECKING:
    import torch

    from .engine import Engine

MAX_NEW_TOKENS = 64

RAW = "the checkpoint has a chat template; the prompt is taken raw, without the marks of turns"

Told = Callable[[int], None]

#: kind -> (setting, what `Engine.encode` calls it)
MEDIA_SETTINGS = {
    IMAGE: ("image_budget", "budget"),
    VIDEO: ("frames", "frames"),
    AUDIO: ("audio_too_long", "too_long"),
}
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
class Request:
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

    def output(self) -> dict[str, Any]:
        """Return what stdout gets: id if there is one, tokens, text if a tokenizer is there."""
        named = {"id": self.id} if self.id is not None else {}
        text = {"text": self.text} if self.text is not None else {}
        return {**named, "tokens": list(self.tokens), **text, "finish_reason": self.finish_reason}

    def log(self) -> dict[str, Any]:
        """Return what the log gets; no text of the prompt or the answer.

        tokens_per_second counts the tokens after the first, over the time they took; soft_tokens
        and encode_s come with media, seed where tokens were drawn, notes where there are any.
        """
        media = {"soft_tokens": dict(self.soft_tokens), "encode_s": round(self.encode_s, 6)}
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
            **({"seed": self.seed} if self.seed is not None else {}),
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


# --- text -------------------------------------------------------------------------------------


# --- answering --------------------------------------------------------------------------------


class Responder:
    """Checks requests against an engine, and answers them in one row of it."""

    def __init__(self, engine: Engine, flags: Mapping[str, Any] | None = None) -> None:
        """Take settings `flags`, named as in FIELDS, for requests that do not give their own."""
        self.engine = engine
        self.flags = {k: v for k, v in (flags or {}).items() if v is not None}
        self.codec = Codec(engine) if (engine.path / "tokenizer.json").is_file() else None
        self.defaults, self.never = engine.defaults(), engine.suppressed()
        self.session = engine.session(1)
        self._held: list[int] = []
        self._sampling({})  # a wrong flag is no request's fault
        checked_ids(self.flags.get("stop", []), engine.spec.text.vocab_size, "stop")

    def request(
        self, fields: Mapping[str, Any], where: str, media: Sequence[tuple[str, str]] = ()
    ) -> Request:
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

    def _request(self, fields: Mapping[str, Any], where: str, tokens: list[int]) -> Request:
        vocab, room = self.engine.spec.text.vocab_size, self.engine.limits.max_seq
        count = self._setting(fields, "max_new_tokens")
        if count is None:
            count = max(1, min(MAX_NEW_TOKENS, room + 1 - len(tokens)))
        stop = checked_ids(self._setting(fields, "stop") or [], vocab, f"{where}: stop")
        checked_prompt(tokens, count, vocab, room, f"{where}: prompt")
        with named(where):
            sampling = self._sampling(fields)
        return Request(
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
            raw = codec.instructed and not codec.has_turns(codec.encode(fields["prompt"], where))
            notes += [note, RAW if raw else None]
            with named(where):
                text = prompts.expand_text(text, soft, special, codec.spell)
            tokens = codec.encode(text, where)
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

    def _read(self, unread: Unread) -> Request:
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
        file = self.defaults
        base = Sampling(file.temperature or 0.0, file.top_k, file.top_p, None, self.never)
        return _sampling_of(base, {**self.flags, **fields})

    def answer(self, request: Request, told: Told = lambda token: None) -> Result:
        """Generate; `told(token)` sees each token as it is drawn. InputError, or MissingError, for
        media that cannot be read; CheckError where logits are NaN or infinite. It answers others
        then."""
        begun = time.perf_counter()
        if request.unread:
            request = self._read(request.unread)
        encode_s = time.perf_counter() - begun
        cached, logits = self._prefill(request)
        sampling = _seeded(request.sampling)
        sampler, out, first = Sampler(sampling), list[int](), 0.0
        for (token,), _ in self.session.stream(
            logits, request.max_new_tokens, sampler, request.stop
        ):
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
        )

    def answer_lines(self, stream: BinaryIO, source: str) -> Iterator[Result | Failure]:
        """Yield an answer to every JSON line, or what is wrong with it alone. A request without an
        id has the number of its line, and None where that cannot be read."""
        for number, line in read_lines(stream):
            where, name = f"{source}:{number}", None
            try:
                given = {"id": number, **parse_line(line, where)}
                name = given["id"] if FIELDS["id"][0](given["id"]) else None
                yield self.answer(self.request(checked_fields(given, where), where))
            except G4Error as e:
                yield Failure(name, str(e), number)

    def _prefill(self, request: Request) -> tuple[int, torch.Tensor]:
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


def _seeded(s: Sampling) -> Sampling:
    """Return the settings with a seed where tokens are drawn, so that it can be told."""
    if s.temperature == 0:
        return replace(s, seed=None)
    return s if s.seed is not None else replace(s, seed=secrets.randbits(32))
