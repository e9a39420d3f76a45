"""Answers in OpenAI's formats, complete or as chunks of a stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from g4ir.backends.sampling import Logprobs
from g4ir.chat import Event as ChatEvent
from g4ir.chat import TokenStream
from g4ir.chat.prompt import spelled
from g4ir.chat.reader import ARGUMENTS
from g4ir.engine.output import AnswerStream, as_call, is_call
from g4ir.engine.requests import Request, RequestHandle
from g4ir.media.soft import Soft, counts

from .protocols.parts import AnswerFormat


@dataclass
class ResponseFormat(AnswerFormat):
    """Format of the answers to a request to /v1/chat/completions or /v1/completions."""

    fields: Mapping[str, Any]
    requests: Sequence[Request]
    original: Mapping[str, Any]
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def chat(self) -> bool:
        return "messages" in self.fields

    def _echo(self, a: AnswerStream) -> str:
        """Return the text of an answer's prompt if the request has `echo`, else ""."""
        if not self.fields.get("echo"):
            return ""
        index = a.index // self.requests[0].n
        prompt = self.fields["prompt"][index]
        text = prompt if isinstance(prompt, str) else ""
        return text or spelled(a.vocabulary, [*self.requests[index].tokens])

    @cached_property
    def _chunk_head(self) -> dict[str, Any]:
        return self._head(True)

    def _head(self, chunk: bool) -> dict[str, Any]:
        prefix, name = "cmpl-", "text_completion"
        if self.chat:
            prefix, name = "chatcmpl-", "chat.completion.chunk" if chunk else "chat.completion"
        head = {"id": f"{prefix}{self.id}", "object": name}
        return head | {"created": self.created, "model": self.fields["model"]}

    def complete(self, answers: Iterable[AnswerStream], usage: Mapping[str, Any]) -> dict[str, Any]:
        """Return the body of the response to a request without `stream`."""
        answers = [*answers]
        choices = [self._choice(a) for a in answers]
        out = self._head(False) | {"choices": choices, "usage": usage}
        if self.chat and "prompt_logprobs" in self.fields:
            out["prompt_logprobs"] = _of_prompt(answers[0])
        return out

    def _choice(self, a: AnswerStream) -> dict[str, Any]:
        content: dict[str, Any] = {"message": a.message()}
        if not self.chat:
            content = {"text": self._echo(a) + a.text("content")}
            if "prompt_logprobs" in self.fields:
                content["prompt_logprobs"] = _of_prompt(a)
        choice = {"index": a.index, "finish_reason": a.finish, "logprobs": self._logprobs(a)}
        return choice | content

    def _logprobs(self, a: AnswerStream) -> dict[str, Any] | None:
        requested = self.fields.get("logprobs")
        if requested is None or requested is False:
            return None
        starts, entries = a.take_offsets()
        if self.fields.get("echo"):
            echo = self._echo(a)
            starts = [*self._starts(a, echo), *(len(echo) + start for start in starts)]
            entries = [*(a.entry(*pair) for pair in a.prompt), *entries]
        if self.chat:
            return {"content": entries}
        tokens = [e["token"] for e in entries]
        tops = [e["top_logprobs"] for e in entries]
        top = [t if t is None else {x["token"]: x["logprob"] for x in t} for t in tops]
        logprobs = [e["logprob"] for e in entries]
        out = {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top}
        return out | {"text_offset": starts}

    def _starts(self, a: AnswerStream, echo: str) -> list[int]:
        """Return the character offset of each prompt token in the echoed text, which may lack the
        <bos> that the tokens have."""
        stream, starts = TokenStream(a.vocabulary, spelled=True), list[int]()
        for token, _ in a.prompt:
            stream.push(token)
            starts.append(stream.start)
        first = a.vocabulary.strings.get(a.prompt[0][0], "") if a.prompt else ""
        absent = 0 if echo.startswith(first) else len(first)
        return [min(max(start - absent, 0), len(echo)) for start in starts]

    def first(self, count: int) -> list[dict[str, Any]]:
        """Return the chunks before the first token: of chat completions, one with the role for each
        of `count` answers."""
        if not self.chat:
            return []
        delta = {"role": "assistant", "content": ""}
        return [self._chunk(i, {"delta": delta}, None) for i in range(count)]

    def chunks(self, a: AnswerStream, new: Iterable[ChatEvent]) -> list[dict[str, Any]]:
        """Return the chunks of new events, and the one with the finish reason if the answer is
        over."""
        parts = [part for event in new for part in self._parts(event)]
        out = [self._chunk(a.index, part, self._logprobs(a)) for part in parts]
        if a.over:
            part: dict[str, Any] = {"delta": {}} if self.chat else {"text": ""}
            logprobs = self._logprobs(a) if a.logprobs else None
            out.append(self._chunk(a.index, part, logprobs, a.finish))
        return out

    def _parts(self, event: ChatEvent) -> list[dict[str, Any]]:
        """Return the deltas of an event: text, reasoning, a complete tool call, or of a streamed
        call its id and name, then pieces of its arguments."""
        if not self.chat:
            return [{"text": event.text}]
        calls: list[dict[str, Any]] = []
        if is_call(event):
            calls = [] if event.streamed else [as_call(event, event.text)]
        elif event.kind == ARGUMENTS:
            calls = [as_call(event, "")] if event.name is not None else []
            calls.append({"function": {"arguments": event.text}})
        else:
            key = "reasoning_content" if event.kind == "thought" else "content"
            return [{"delta": {key: event.text}}]
        return [{"delta": {"tool_calls": [{"index": event.index, **call}]}} for call in calls]

    def _chunk(
        self, index: int, part: Mapping[str, Any], logprobs: Any, finish: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, **part, "logprobs": logprobs, "finish_reason": finish}
        usage = {"usage": None} if self.fields.get("stream_options") else {}
        return {**self._chunk_head, "choices": [choice], **usage}

    def last(
        self, answers: Iterable[AnswerStream], usage: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """Return the final chunk with the usage, if `stream_options` requests it."""
        served = self.fields.get("stream_options")
        return [self._head(True) | {"choices": [], "usage": usage}] if served else []


def _of_prompt(a: AnswerStream) -> list[dict[str, Any] | None]:
    """Return, for each token of a prompt, the log-probabilities of that token and of the most
    likely ones, by token id, in vLLM's format; None for the first token. `rank` is None for a token
    that is not among the most likely."""

    def entry_of(token: int, value: float, rank: int | None) -> dict[str, Any]:
        entry = a.entry(token, Logprobs(value, ()))
        return {"logprob": entry["logprob"], "rank": rank, "decoded_token": entry["token"]}

    out = list[dict[str, Any] | None]()
    for token, read in a.prompt:
        values = None
        if read is not None:
            values = {str(t): entry_of(t, v, rank) for rank, (t, v) in enumerate(read.top, 1)}
            values.setdefault(str(token), entry_of(token, read.chosen, None))
        out.append(values)
    return out


def usage_of(
    handles: Sequence[RequestHandle],
    answers: Sequence[AnswerStream],
    drafts: bool,
    media: Sequence[Soft],
) -> dict[str, Any]:
    """Return OpenAI's `usage` of a request: token counts, soft tokens of its `media` by kind, and
    with `drafts` the accepted and rejected draft tokens."""
    counted = [handle.counts for handle in handles]
    prompt, cached = sum(c.prompt for c in counted), sum(c.cached for c in counted)
    new = sum(a.tokens for a in answers)
    details = {"reasoning_tokens": sum(a.reasoning for a in answers)}
    if drafts and handles:
        right = sum(h.tally.accepted.total() for h in handles)
        wrong = sum(h.tally.drafted.total() for h in handles) - right
        details |= {"accepted_prediction_tokens": right, "rejected_prediction_tokens": wrong}
    seen = {f"{kind}_tokens": count for kind, count in counts(media).items()}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": cached, **seen},
        "completion_tokens_details": details,
    }
