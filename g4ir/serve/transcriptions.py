"""OpenAI's transcription of audio: a form with a file becomes a chat about an audio clip."""

from __future__ import annotations

import base64
import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from g4ir.chat import Event as Said
from g4ir.chat.messages import shown
from g4ir.engine.output import Answer
from g4ir.errors import InputError

from .http_errors import Refused, bad, missing
from .parts import AnswerFormat
from .prompts import PreparedRequest
from .request_schema import CHAT
from .translation import Body, Translation

FORM = "multipart/form-data"
#: parts of a form; the API has 12 fields
MOST_PARTS = 64
#: bytes of a part's headers
MOST_HEAD = 8 << 10
ASK = "Transcribe this audio: write down what is said, word for word, and nothing else."
FORMATS = ("json", "text")
#: field -> the values that ask for nothing, and what else there is
REFUSED: Mapping[str, tuple[tuple[str, ...], str]] = {
    "timestamp_granularities[]": ((), "transcripts have no timestamps"),
    "include[]": ((), "use /v1/chat/completions with logprobs"),
    "chunking_strategy": (("auto",), "a clip is read whole"),
    "known_speaker_names[]": ((), "speakers are not told apart"),
    "known_speaker_references[]": ((), "speakers are not told apart"),
}
#: sampling fields of a form, which are numbers
NUMBERS = {"temperature", "top_p", "top_k", "min_p", "seed", "max_completion_tokens", "max_tokens"}
NUMBERS |= {"frequency_penalty", "presence_penalty", "repetition_penalty"}
#: fields that `read` translates
OWN = frozenset(("file", "model", "language", "prompt", "response_format", "stream", *REFUSED))
_PARAMETER = re.compile(r';\s*([\w-]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s;"]+))')
_PLACE = re.compile(r"^messages\S*:? ?")


def parse_form(raw: bytes, content_type: str) -> Body:
    """Return the fields of a multipart form: a file as bytes, all others as text."""
    boundary = _parameter(content_type, "boundary")
    if not boundary:
        raise Refused(400, f"the Content-Type {FORM} has no boundary")
    mark = b"\r\n--" + boundary.encode()
    _, *parts = (b"\r\n" + raw).split(mark, MOST_PARTS + 1)
    if not parts or not parts[-1].startswith(b"--"):
        raise Refused(400, f"the form has no end, or more than {MOST_PARTS} parts")
    return dict(_field(part) for part in parts[:-1])


def _field(part: bytes) -> tuple[str, Any]:
    head, blank, value = part.partition(b"\r\n\r\n")
    if len(head) > MOST_HEAD:
        raise Refused(400, f"a part of the form has more than {MOST_HEAD} bytes of headers")
    lines = head.decode("latin-1").split("\r\n")
    found = [line.partition(":")[2] for line in lines if line.lower().startswith("content-disp")]
    name = _parameter(found[0].strip(), "name") if found else ""
    if not name or not blank:
        raise Refused(400, "a part of the form has no name")
    if name == "file":
        return name, value
    try:
        return name, value.decode()
    except UnicodeDecodeError:
        raise bad(name, "is no text in UTF-8") from None


def _parameter(header: str, name: str) -> str:
    """Return a parameter of a header, in linear time: `email` takes quadratic time."""
    found = (m for m in _PARAMETER.finditer(header) if m[1].lower() == name)
    return next((m[2] or m[3] or "" for m in found), "")


class Form(Translation):
    """A form as a body of a chat; errors of the chat are those of the file."""

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """A context whose errors name the file."""
        try:
            yield
        except Refused as e:
            if e.param and e.param.startswith("messages"):
                e.message, e.param = f"file: {_PLACE.sub('', e.message)}", "file"
            raise
        except InputError as e:
            raise bad("file", _PLACE.sub("", str(e))) from None


def read(given: Body) -> Translation:
    """Return a form as a body of /v1/chat/completions."""
    for name, (neutral, why) in REFUSED.items():
        if name in given and given[name] not in neutral:
            raise missing(name, f"is not supported: {why}")
    if not given.get("file"):
        raise bad("file", "is missing or empty; send an audio file")
    kind = given.get("response_format", FORMATS[0])
    if kind not in FORMATS:
        raise missing("response_format", f"{kind[:40]!r} is not supported; {' or '.join(FORMATS)}")
    stream = given.get("stream", "false").lower()
    if stream not in ("true", "false"):
        raise bad("stream", f"must be true or false, found {stream[:40]!r}")
    data = base64.b64encode(given["file"]).decode()
    ask = [ASK]
    if language := given.get("language"):
        ask.append(f"Its language is {language}.")
    if prompt := given.get("prompt"):
        ask.append(f"For the spelling of names, and as what came before it: {prompt}")
    part = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    content = [{"type": "text", "text": "\n".join(ask)}, part]
    body: Body = {"messages": [{"role": "user", "content": content}], "stream": stream == "true"}
    if "model" in given:
        body["model"] = given["model"]
    for name, text in given.items():
        if name in OWN or not text:
            continue
        if name not in NUMBERS and name in CHAT:
            raise missing(name, "is not supported with audio files; leave it out")
        body[name] = _number(text, name) if name in NUMBERS else text
    return Form(given, body)


def _number(text: str, name: str) -> float:
    try:
        return int(text) if text.lstrip("-").isdecimal() else float(text)
    except ValueError:
        raise bad(name, f"must be a number, found {shown(text)}") from None


class TranscriptFormat(AnswerFormat):
    """Writes a transcript: an object, a text, or events with pieces of it."""

    def __init__(self, asked: PreparedRequest, model: str, given: Body) -> None:
        self.plain = given.get("response_format") == "text"

    def chunks(self, a: Answer, new: Iterable[Said]) -> list[Body]:
        words = [said.text for said in new if said.kind == "content"]
        return [{"type": "transcript.text.delta", "delta": text} for text in words]

    def last(self, answers: list[Answer], usage: Mapping[str, Any]) -> list[Body]:
        return [{"type": "transcript.text.done", **self._whole(answers[0], usage)}]

    def whole(self, answers: Iterable[Answer], usage: Mapping[str, Any]) -> Body | str:
        (answer,) = answers
        made = self._whole(answer, usage)
        return f"{made['text']}\n" if self.plain else made

    def _whole(self, a: Answer, usage: Mapping[str, Any]) -> Body:
        heard = usage["prompt_tokens_details"].get("audio_tokens", 0)
        details = {"audio_tokens": heard, "text_tokens": usage["prompt_tokens"] - heard}
        counts = {"input_tokens": usage["prompt_tokens"], "input_token_details": details}
        counts |= {"output_tokens": usage["completion_tokens"]}
        counts |= {"total_tokens": usage["total_tokens"], "type": "tokens"}
        return {"text": a.text("content").strip(), "usage": counts}
