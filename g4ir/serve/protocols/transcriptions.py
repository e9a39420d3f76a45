"""OpenAI's /v1/audio/transcriptions: a form with a file becomes a chat about an audio clip."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from g4ir.chat.messages import shown
from g4ir.engine.output import AnswerStream
from g4ir.engine.requests import Request

from ..http_errors import Refused, bad, missing
from ..request_schema import CHAT, Fields
from .parts import AnswerFormat
from .translation import TABLES, Body, Change, Translation, translated

MULTIPART = "multipart/form-data"
#: maximum parts of a form; the API has 12 fields
MAX_PARTS = 64
#: maximum bytes of a part's headers
MAX_HEAD = 8 << 10
ASK = "Transcribe this audio: write down what is said, word for word, and nothing else."
FORMATS = ("json", "text")
_PARAMETER = re.compile(r';\s*([\w-]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s;"]+))')


def parse_multipart(raw: bytes, content_type: str) -> Body:
    """Return the fields of a multipart form: `file` as bytes, all others as text. Refused if the
    form is malformed or has too many parts."""
    boundary = _parameter(content_type, "boundary")
    if not boundary:
        raise Refused(400, f"the Content-Type {MULTIPART} has no boundary")
    mark = b"\r\n--" + boundary.encode()
    _, *parts = (b"\r\n" + raw).split(mark, MAX_PARTS + 1)
    if not parts or not parts[-1].startswith(b"--"):
        raise Refused(400, f"the form has no final boundary, or more than {MAX_PARTS} parts")
    return dict(_field(part) for part in parts[:-1])


def _field(part: bytes) -> tuple[str, Any]:
    head, blank, value = part.partition(b"\r\n\r\n")
    if len(head) > MAX_HEAD:
        raise Refused(400, f"a part of the form has more than {MAX_HEAD} bytes of headers")
    lines = head.decode("latin-1").split("\r\n")
    headers = [line.partition(":")[2] for line in lines if line.lower().startswith("content-disp")]
    name = _parameter(headers[0].strip(), "name") if headers else ""
    if not name or not blank:
        raise Refused(400, "a part of the form has no name, or no blank line after its headers")
    if name == "file":
        return name, value
    try:
        return name, value.decode()
    except UnicodeDecodeError:
        raise bad(name, "is no text in UTF-8") from None


def _parameter(header: str, name: str) -> str:
    """Return a parameter of a header, in linear time (the `email` package is quadratic)."""
    matches = (m for m in _PARAMETER.finditer(header) if m[1].lower() == name)
    return next((m[2] or m[3] or "" for m in matches), "")


class Transcription(Translation):
    """A form translated to chat completions; errors in the chat name the file."""

    def renamed(self, text: str) -> str:
        return re.sub(r"^messages[^:\s]*", "file", text)


def read(original: Body) -> Translation:
    """Translate a form to chat completions; empty fields other than file and model count as
    absent."""
    if not original.get("file"):
        raise bad("file", "is missing or empty; send an audio file")
    if original.get("model") == "":
        raise bad("model", "is empty; name the model, or leave it out")
    if str(original.get("stream")).lower() == "false":
        original = {k: value for k, value in original.items() if k != "stream"}
    original = {k: value for k, value in original.items() if value}
    table = TABLES["transcriptions"]
    if other := next((n for n in original if n in CHAT and n not in table["becomes"]), None):
        raise missing(other, "is not supported with audio files; leave it out")
    return translated(Transcription(original), "transcriptions", CHANGES)


def _file(out: Translation, value: Any, name: str) -> None:
    data = base64.b64encode(value).decode()
    part = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    out.add(name, "user", [{"type": "text", "text": ASK}, part])


def _instruct(words: str) -> Change:
    def change(out: Translation, value: Any, name: str) -> None:
        out.messages[0]["content"][0]["text"] += f"\n{words.format(value)}"

    return change


def _response_format(out: Translation, value: Any, name: str) -> None:
    if value not in FORMATS:
        raise missing(name, f"{value[:40]!r} is not supported; expected {' or '.join(FORMATS)}")


def _number(out: Translation, value: Any, name: str) -> None:
    try:
        out.body[name] = int(value) if value.lstrip("-").isdecimal() else float(value)
    except ValueError:
        raise bad(name, f"must be a number, found {shown(value)}") from None


CHANGES: dict[str, Change] = {
    **dict.fromkeys(TABLES["transcriptions"]["becomes"], _number),
    "model": lambda out, value, name: out.body.update(model=value),
    "file": _file,
    "language": _instruct("Its language is {}."),
    "prompt": _instruct("For the spelling of names, and as what came before it: {}"),
    "response_format": _response_format,
}


class TranscriptFormat(AnswerFormat):
    """Formats a transcript as a JSON object or as plain text."""

    def __init__(self, fields: Fields, requests: Sequence[Request], original: Body) -> None:
        self.plain = original.get("response_format") == "text"

    def complete(self, answers: Iterable[AnswerStream], usage: Mapping[str, Any]) -> Body | str:
        (answer,) = answers
        text = answer.text("content").strip()
        if self.plain:
            return f"{text}\n"
        heard = usage["prompt_tokens_details"].get("audio_tokens", 0)
        details = {"audio_tokens": heard, "text_tokens": usage["prompt_tokens"] - heard}
        counts = {"input_tokens": usage["prompt_tokens"], "input_token_details": details}
        counts |= {"output_tokens": usage["completion_tokens"]}
        counts |= {"total_tokens": usage["total_tokens"], "type": "tokens"}
        return {"text": text, "usage": counts}
