"""Offline inference: requests from flags or JSON lines, through the scheduler.

JSON lines, and their files of media, are read one by one and answered in order, as many at a time
as the engine has slots. An invalid request yields an error and does not end the run. Each setting
comes from the first that names it: the request, the flags, the checkpoint's generation_config.json,
the default, which is greedy. Stop ids of the request or the flags are added to the checkpoint's.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Any, BinaryIO, ClassVar

from g4ir.backends.sampling import Logprobs, SamplingParams, random_seed
from g4ir.engine.engine import Engine
from g4ir.engine.prompts import checked_ids, checked_prompt
from g4ir.engine.requests import Counts, Event, Request, RequestHandle, check_minimums
from g4ir.engine.scheduler import Scheduler, SchedulerConfig
from g4ir.errors import G4Error
from g4ir.media import prompt as prompts
from g4ir.media.soft import Soft, counts
from g4ir.model.media import IMAGE, LISTS, check_budget, check_file, check_supported, encode_options
from g4ir.weights.checkpoint import TOKENIZER

from .jsonl import FIELDS, Line, ReadAhead, checked_fields, named, parse_line
from .tokenizer import Codec

MAX_NEW_TOKENS = 64

RAW = (
    "the checkpoint has a chat template; the prompt is encoded as it is, without turn tokens "
    "(`g4ir run --chat` adds them)"
)

#: names of the sampling settings of a request or a flag, except `stop`
SAMPLING = [f.name for f in fields(SamplingParams) if f.name in FIELDS and f.name != "stop"]
#: requests admitted beyond the batch size, so that a free slot need not wait for input
AHEAD = 2
#: maximum requests per slot that are read and not yet returned: finished ones wait for the answers
#: of earlier lines
MAX_UNSENT = 64


@dataclass(frozen=True)
class OfflineRequest(Request):
    """A validated request. `fields`: as in FIELDS, with flags and defaults; `media`: (kind, path,
    source for messages) of files, each with one placeholder in `tokens` until they are encoded;
    `where`: source of the request, for messages; `line`: its number in the input, None if it is
    from flags; `notes`: warnings for the log."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    where: str = ""
    line: int | None = None
    media: tuple[tuple[str, str, str], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def id(self) -> int | str | None:
        return self.fields.get("id")


@dataclass(frozen=True)
class Failure:
    """Error of a request; `line`: its number in the input."""

    id: int | str | None
    error: str
    line: int | None = None
    failed: ClassVar[bool] = True

    def output(self) -> dict[str, Any]:
        """Return the JSON object for stdout."""
        line = {"line": self.line} if self.line is not None else {}
        return {"id": self.id, **line, "error": self.error}

    def log(self) -> dict[str, Any]:
        """Return the values for the log."""
        return {"event": "error", **self.output()}


@dataclass(eq=False)
class Result:
    """A submitted request; its answer is complete once `end` is set. `encode_s`: seconds to read
    and encode its media before submission."""

    failed: ClassVar[bool] = False
    request: OfflineRequest
    handle: RequestHandle
    encode_s: float
    codec: Codec | None
    #: log-probabilities of the generated tokens, if requested
    logprobs: list[Logprobs] = field(default_factory=list)
    end: Event | None = None

    def take(self, event: Event) -> None:
        if event.logprobs:
            self.logprobs.append(event.logprobs)
        if event.finish:
            self.end = event

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(self.handle.answers[0].tokens)

    @property
    def finish_reason(self) -> str | None:
        return self.end.finish if self.end else None

    @property
    def counts(self) -> Counts:
        """Counts of the scheduler; `first_token_s` and `total_s` include `encode_s`."""
        c = self.handle.counts
        first, total = (self.encode_s + (s or 0.0) for s in (c.first_token_s, c.total_s))
        return replace(c, first_token_s=first, total_s=total)

    def output(self) -> dict[str, Any]:
        """Return the JSON object for stdout: text with a tokenizer, logprobs if requested."""
        read = [{"logprob": p.chosen, "top": p.top} for p in self.logprobs]
        out = {
            "id": self.request.id,
            "tokens": list(self.tokens),
            "text": self.codec and self.codec.vocabulary.decode([*self.tokens]),
            "finish_reason": self.finish_reason,
            "logprobs": read or None,
        }
        return {name: value for name, value in out.items() if value is not None}

    def log(self) -> dict[str, Any]:
        """Return the values for the log, without any text of the prompt or answer. soft_tokens and
        encode_s are present with media, queued_s if it left the queue, seed if tokens were sampled,
        drafts with speculative decoding, notes if there are any."""
        soft, c, tally = counts(self.request.soft), self.counts, self.handle.tally
        some = {
            "soft_tokens": soft or None,
            "encode_s": round(self.encode_s, 6) if soft else None,
            "queued_s": None if c.queued_s is None else round(c.queued_s, 6),
            "seed": self.request.sampling.seed,
            "drafts": tally.to_dict() if tally.rounds else None,
            "notes": list(self.request.notes) or None,
        }
        return {
            "event": "request",
            "id": self.request.id,
            **c.output(),
            "finish_reason": self.finish_reason,
            **{name: value for name, value in some.items() if value is not None},
        }


def check_flags(flags: Mapping[str, Any]) -> None:
    """Raise InputError for flags (sampling settings, max_new_tokens) with values that no engine
    accepts."""
    _sampling(flags)
    check_minimums(flags, max_new_tokens=1)


def _sampling(values: Mapping[str, Any]) -> SamplingParams:
    settings = {k: values[k] for k in SAMPLING if values.get(k) is not None}
    if "logit_bias" in settings:
        settings["logit_bias"] = tuple((int(k), v) for k, v in settings["logit_bias"].items())
    return SamplingParams(**settings)


class OfflineEngine:
    """Validates requests and answers them through a scheduler."""

    def __init__(
        self,
        engine: Engine,
        flags: Mapping[str, Any] | None = None,
        config: SchedulerConfig | None = None,
    ) -> None:
        """`flags`: default settings of requests, named as in FIELDS; None: not set. InputError for
        invalid ones."""
        self.engine = engine
        self.scheduler = Scheduler(engine, replace(config or SchedulerConfig(), prefill_first=True))
        self.flags = {k: v for k, v in (flags or {}).items() if v is not None}
        self.codec = Codec(engine, few=True) if (engine.path / TOKENIZER).is_file() else None
        self.defaults = engine.defaults()
        _sampling({**self.defaults.sampling, **self.flags})  # raises for wrong flags
        checked_ids(self.flags.get("stop", []), engine.spec.text.vocab_size, "stop")

    def request(
        self,
        fields: Mapping[str, Any],
        where: str,
        media: Sequence[tuple[str, str]] = (),
        line: int | None = None,
    ) -> OfflineRequest:
        """Return a checked request with these fields, as in FIELDS, and files of media (kind, path)
        in addition to those of the fields. The files are checked here and read by `answer`.
        InputErrors begin with `where`, or with the flag of one of `media`; EngineError for a text
        without a tokenizer. Requests of JSON lines (`line`) use the prefix cache, others only if
        there is one on disk."""
        lists = [(k, p, f"{where}: {n}") for n, k in LISTS.items() for p in fields.get(n, [])]
        files = (*((k, p, f"--{k}") for k, p in media), *lists)
        fields = {**self.defaults.sampling, **self.flags, **fields}
        for kind, path, name in files:
            with named(name):
                check_supported(kind, self.engine.media, self.engine.spec)
                if kind == IMAGE and fields.get("image_budget") is not None:
                    check_budget(fields["image_budget"], self.engine.media)
                check_file(kind, path)
        return self._filled(OfflineRequest((), fields=fields, where=where, line=line, media=files))

    def _filled(self, asked: OfflineRequest) -> OfflineRequest:
        vocab, max_seq = self.engine.spec.text.vocab_size, self.engine.limits.max_seq
        (tokens, notes), where = self._tokens(asked), asked.where
        count = asked.fields.get("max_new_tokens")
        if count is None:
            count = max(1, min(MAX_NEW_TOKENS, max_seq + 1 - len(tokens)))
        stop = checked_ids(asked.fields.get("stop", []), vocab, f"{where}: stop")
        checked_prompt(tokens, count, vocab, max_seq, f"{where}: prompt")
        with named(where):
            sampling = _sampling(asked.fields)
        # The seed is drawn here, so that the log can report it; greedy decoding has none.
        if sampling.temperature == 0 or sampling.seed is None:
            sampling = replace(sampling, seed=random_seed() if sampling.temperature else None)
        stops = frozenset([*stop, *self.engine.stop_ids()])
        sampling = replace(sampling, stop=stops, ignore_eos=True)
        disk = bool(self.scheduler.config.prefix_disk)
        prompt, reuse = tuple(tokens), disk or asked.line is not None
        return replace(
            asked, tokens=prompt, max_new_tokens=count, sampling=sampling, reuse=reuse, notes=notes
        )

    def _tokens(self, asked: OfflineRequest) -> tuple[list[int], tuple[str, ...]]:
        """Return the prompt's token ids and notes. It has a placeholder for each medium, or, once
        the media are encoded, for each soft token."""
        special, kinds = self.engine.spec.tokens, self.engine.media.kinds
        tokens, notes = asked.fields.get("tokens"), list[str | None]()
        if tokens is None:
            tokens, notes = self._encoded(asked)
        with named(asked.where):
            prompts.check_placeholders(tokens, [kind for kind, *_ in asked.media], special, kinds)
            if asked.soft:
                encode, before = self.codec.plain if self.codec else None, tokens
                (tokens,) = prompts.expand_placeholders(
                    [tokens], asked.soft, special, encode, kinds
                )
                if not encode and prompts.lacks_frame_times([before], [tokens], special):
                    notes.append(prompts.NO_TIMES)
        return tokens, tuple(n for n in notes if n)

    def _encoded(self, asked: OfflineRequest) -> tuple[list[int], list[str | None]]:
        if self.codec is None:
            self.engine.tokenizer()  # raises if something is missing
        assert self.codec
        codec, special, text = self.codec, self.engine.spec.tokens, asked.fields["prompt"]
        begin = None if special.bos is None else codec.tokenizer.id_to_token(special.bos)
        media_kinds, kinds = [kind for kind, *_ in asked.media], self.engine.media.kinds
        with named(asked.where):
            marked, note = prompts.mark(text, media_kinds, kinds, special, codec.spell, begin)
            # Expanded media contain special tokens, which do not count as turns.
            marked = prompts.expand_text(marked, asked.soft, special, codec.spell)
        raw = codec.instructed and not codec.has_turns(codec.encode(text, asked.where))
        ids = codec.encode(marked, asked.where, asked.fields.get("bos", True))
        return ids, [note, RAW if raw else None]

    def answer(
        self, request: OfflineRequest, on_token: Callable[[int], None] = lambda token: None
    ) -> Result:
        """Generate one answer and return it. on_token: callback for each token, the stop token too.
        InputError or MissingError for media that cannot be read; CheckError if logits are NaN or
        infinite. The engine stays usable after these errors."""
        one = self._submit(request)
        for event in self.scheduler.run(one.handle):
            one.take(event)
            if event.token is not None:
                on_token(event.token)
        if one.end and one.end.error:
            raise one.end.error
        return one

    def answer_lines(self, stream: BinaryIO, source: str) -> Iterator[Result | Failure]:
        """Yield the answer or error of each JSON line, in order. A request without an id gets the
        number of its line; errors of lines whose id is invalid or cannot be read have id None. It
        never waits for a pipe while there is something to compute or to return. `source`: name of
        the input in messages."""
        max_batch, pending = self.engine.limits.max_batch, deque[Result | Failure]()
        lines = ReadAhead(stream)
        try:
            while pending or not lines.ended:
                if pending and (answer := _ended(pending[0])):
                    pending.popleft()
                    yield answer
                    continue
                running = [b for b in pending if isinstance(b, Result) and not b.end]
                has_capacity = (
                    len(running) < max_batch + AHEAD and len(pending) < MAX_UNSENT * max_batch
                )
                line = lines.next(wait=not pending) if has_capacity else None
                if line is not None:
                    pending.append(self._begin(line, source))
                elif pending:
                    self._step(running)
        finally:
            for b in pending:
                if isinstance(b, Result):
                    b.handle.cancel()

    def _step(self, going: Sequence[Result]) -> None:
        by_handle = {b.handle: b for b in going}
        for event in self.scheduler.step():
            if b := by_handle.get(event.handle):  # None: a request whose consumer stopped early
                b.take(event)

    def _begin(self, line: Line, source: str) -> Result | Failure:
        number, text = line
        where, name = f"{source}:{number}", None
        try:
            fields = parse_line(text, where)
            fields |= {"id": number} if fields.get("id") is None else {}
            name = fields["id"] if FIELDS["id"][0](fields["id"]) else None
            return self._submit(self.request(checked_fields(fields, where), where, line=number))
        except G4Error as e:
            return Failure(name, str(e), number)

    def _submit(self, request: OfflineRequest) -> Result:
        start, soft = time.perf_counter(), list[Soft]()
        for kind, path, name in request.media:
            with named(name):
                options = encode_options(kind, request.fields)
                soft.append(self.engine.encode(kind, path, **options))
        if soft:
            request = self._filled(replace(request, soft=tuple(soft)))
        encode_s = time.perf_counter() - start
        with named(request.where) if request.line is not None else nullcontext():
            return Result(request, self.scheduler.submit(request), encode_s, self.codec)


def _ended(b: Result | Failure) -> Result | Failure | None:
    """Return a line's answer or error, or None while it is not ready; errors that are no G4Error
    are raised."""
    if isinstance(b, Failure):
        return b
    error = b.end and b.end.error
    if isinstance(error, G4Error):
        return Failure(b.request.id, str(error), b.request.line)
    if error:
        raise error
    return b if b.end else None
