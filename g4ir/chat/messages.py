"""Parses OpenAI messages into frozen records, the same for every template.

Arguments are decoded, parts and roles normalised, media collected, and earlier reasoning removed
from assistant texts. Every error begins with its location, `messages[2].content`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from g4ir.errors import InputError

from .special_tokens import CHANNEL, CHANNEL_END

SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"
ROLES = {
    "system": SYSTEM,
    "developer": SYSTEM,
    "user": USER,
    "assistant": ASSISTANT,
    "model": ASSISTANT,
    "tool": TOOL,
}
#: type of a part -> kind of its medium
MEDIA = {
    "image": "image",
    "image_url": "image",
    "audio": "audio",
    "input_audio": "audio",
    "audio_url": "audio",
    "video": "video",
    "video_url": "video",
}
#: type of a part -> key of its text
TEXTS = {"text": "text", "refusal": "refusal"}
#: how deep lists and objects may lie in each other
MOST_DEPTH = 64


@dataclass(frozen=True)
class Medium:
    """An image, audio or video part as received; the caller decodes it."""

    kind: str
    part: Any
    place: str


@dataclass(frozen=True)
class Call:
    """A function that the model called."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None


@dataclass(frozen=True)
class Response:
    """An answer in the native form: a text, or an object that is written with its keys."""

    name: str
    value: Any


Content = str | tuple[str | Medium, ...] | None


@dataclass(frozen=True)
class Message:
    """One message. `call_id` and `name` are a tool's, `reasoning`, `calls` and `responses` the
    model's."""

    role: str
    content: Content = None
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    responses: tuple[Response, ...] = ()
    call_id: str | None = None
    name: str | None = None

    @property
    def media(self) -> tuple[Medium, ...]:
        """The media of the content, in order."""
        parts = self.content if isinstance(self.content, tuple) else ()
        return tuple(p for p in parts if isinstance(p, Medium))

    @property
    def text(self) -> str:
        """The content without its media."""
        parts = self.content if isinstance(self.content, tuple) else (self.content or "",)
        return "".join(p for p in parts if isinstance(p, str))

    def answered_by(self, answer: Message) -> str:
        """Return the name of the function that a tool's message answers; without ids the last."""
        names = [call.name for call in self.calls if call.id == answer.call_id]
        return names[-1] if names else answer.name or "unknown"


@dataclass(frozen=True)
class Conversation:
    """Messages, and declared tools as checked by `tools`: all that a template takes."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()

    def answers(self, index: int) -> tuple[Message, ...]:
        """Return the tools' messages directly behind a message."""
        end = index + 1
        while end < len(self.messages) and self.messages[end].role == TOOL:
            end += 1
        return self.messages[index + 1 : end]

    @property
    def media(self) -> tuple[Medium, ...]:
        """The media in the order of their placeholders: answers are written behind the calls, which
        is before the text of the message that called."""
        out: list[Medium] = []
        for i, message in enumerate(self.messages):
            if message.role != TOOL:
                behind = self.answers(i) if message.calls and not message.responses else ()
                out += [medium for answer in behind for medium in answer.media]
                out += message.media
        return tuple(out)


# --- reading ----------------------------------------------------------------------------------


def read_messages(given: Any) -> tuple[Message, ...]:
    """Return messages in the normal form. InputError names the place and the fix."""
    if not isinstance(given, list | tuple):
        raise InputError(f"messages: must be a list of messages, found {kind_of(given)}")
    return tuple(_message(m, f"messages[{i}]") for i, m in enumerate(given))


def _message(given: Any, where: str) -> Message:
    given = an_object(given, where)
    role = ROLES.get(given["role"]) if isinstance(given.get("role"), str) else None
    if role is None:
        known = ", ".join(ROLES)
        raise InputError(f"{where}.role: must be one of {known}, found {shown(given.get('role'))}")
    content = _content(given.get("content"), f"{where}.content", role)
    if role == TOOL:
        return Message(
            role,
            content,
            call_id=_optional(given, "tool_call_id", where),
            name=_optional(given, "name", where),
        )
    if role != ASSISTANT:
        if content is None:
            raise InputError(f"{where}.content: is missing; give a text or a list of parts")
        return Message(role, content)
    if content is None:
        content = _optional(given, "refusal", where)
    reasoning = _optional(given, "reasoning", where)
    reasoning = reasoning or _optional(given, "reasoning_content", where)
    return Message(
        role,
        _each_text(content, without_reasoning),
        reasoning or "",
        tuple(_call(c, at) for c, at in _listed(given, "tool_calls", where)),
        tuple(_response(r, at) for r, at in _listed(given, "tool_responses", where)),
    )


def _content(given: Any, where: str, role: str) -> Content:
    if given is None or isinstance(given, str):
        return given
    if not isinstance(given, list | tuple):
        cure = "; write it as JSON text" if role == TOOL else ""
        raise InputError(f"{where}: must be text or a list of parts, found {kind_of(given)}{cure}")
    return tuple(_part(p, f"{where}[{i}]") for i, p in enumerate(given))


def _part(given: Any, where: str) -> str | Medium:
    if isinstance(given, str):
        return given
    kind = an_object(given, where).get("type")
    if isinstance(kind, str) and kind in MEDIA:
        return Medium(MEDIA[kind], given, where)
    if not isinstance(kind, str) or kind not in TEXTS:
        known = ", ".join((*TEXTS, *MEDIA))
        raise InputError(f"{where}.type: must be one of {known}, found {shown(kind)}")
    text = given.get(TEXTS[kind])
    if not isinstance(text, str):
        raise InputError(f"{where}.{TEXTS[kind]}: must be text, found {kind_of(text)}")
    return text


def _call(given: Any, where: str) -> Call:
    given = an_object(given, where)
    if given.get("type", "function") != "function":
        raise InputError(f"{where}.type: must be function, found {shown(given['type'])}")
    function = an_object(given.get("function"), f"{where}.function")
    name = call_name(function.get("name"), f"{where}.function.name")
    place = f"{where}.function.arguments"
    return Call(name, arguments_of(function.get("arguments"), place), _optional(given, "id", where))


def _response(given: Any, where: str) -> Response:
    given = an_object(given, where)
    value = json_value(given.get("response"), f"{where}.response")
    return Response(_optional(given, "name", where) or "unknown", value)


def call_name(given: Any, where: str) -> str:
    """Return the name of a function; InputError where it cannot stand before a brace."""
    if not isinstance(given, str) or not given.strip() or set(given) & {"{", "\n"}:
        raise InputError(f"{where}: must be the name of a function, found {shown(given)}")
    return given


def arguments_of(given: Any, where: str) -> dict[str, Any]:
    """Return the arguments of a call, which come as JSON text, or decoded by kind clients."""
    if given is None or given == "":
        return {}
    value = decoded(given, where) if isinstance(given, str) else json_value(given, where)
    if not isinstance(value, dict):
        raise InputError(f"{where}: must be a JSON object, found {kind_of(value)}")
    return value


def _listed(given: dict[str, Any], key: str, where: str) -> Iterable[tuple[Any, str]]:
    items = given.get(key)
    if items is None:
        return []
    if not isinstance(items, list | tuple):
        raise InputError(f"{where}.{key}: must be a list, found {kind_of(items)}")
    return [(item, f"{where}.{key}[{i}]") for i, item in enumerate(items)]


def _optional(given: dict[str, Any], key: str, where: str) -> str | None:
    value = given.get(key)
    if value is not None and not isinstance(value, str):
        raise InputError(f"{where}.{key}: must be text, found {kind_of(value)}")
    return value


# --- JSON -------------------------------------------------------------------------------------


def decoded(text: str, where: str) -> Any:
    """Return the value of a JSON text; InputError for double keys, NaN and what is too deep."""
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refused)
    except RecursionError:
        raise InputError(f"{where}: lies deeper than {MOST_DEPTH} levels") from None
    except ValueError as e:
        raise InputError(f"{where}: is no JSON: {str(e)[:120]}") from None
    return json_value(value, where)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        raise ValueError("a key is given twice")
    return out


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is no number of JSON")


def json_value(value: Any, where: str, depth: int = 0) -> Any:
    """Return a value of which JSON text can be made; InputError names the place."""
    if depth > MOST_DEPTH:
        raise InputError(f"{where[:80]}: lies deeper than {MOST_DEPTH} levels")
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float) and abs(value) < float("inf"):
        return value
    if isinstance(value, list | tuple):
        return [json_value(v, f"{where}[{i}]", depth + 1) for i, v in enumerate(value)]
    if isinstance(value, dict) and all(isinstance(k, str) for k in value):
        return {k: json_value(v, f"{where}.{k}", depth + 1) for k, v in value.items()}
    raise InputError(f"{where[:200]}: is no value of JSON: {shown(value)}")


def an_object(given: Any, where: str) -> dict[str, Any]:
    """Return the object itself; InputError where it is none."""
    if not isinstance(given, dict):
        raise InputError(f"{where}: must be an object, found {kind_of(given)}")
    return given


def kind_of(value: Any) -> str:
    """Return what a value of JSON is called."""
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "a boolean"}
    if value is None:
        return "nothing"
    return kinds.get(type(value), "a number" if isinstance(value, int | float) else "no JSON")


def shown(value: Any) -> str:
    """Return the head of a value, for a message."""
    return "nothing" if value is None else repr(value)[:60]


# --- texts ------------------------------------------------------------------------------------


def without_reasoning(text: str) -> str:
    """Return an assistant text without its reasoning channels; an unclosed one runs to the end."""
    return "".join(part.partition(CHANNEL)[0] for part in text.split(CHANNEL_END))


def _each_text(content: Content, change: Callable[[str], str]) -> Content:
    if isinstance(content, tuple):
        return tuple(change(p) if isinstance(p, str) else p for p in content)
    return None if content is None else change(content)


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return the same with every text changed, keys of objects too; media stay as they are."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Medium):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{f.name: map_texts(getattr(value, f.name), change) for f in fields(value)}
        )
    if isinstance(value, dict):
        return {change(k): map_texts(v, change) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map_texts(v, change) for v in value)
    return value


def joined(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return messages in which texts that follow each other are one: a template trims each part by
    itself, which would take the space between two words."""
    return tuple(replace(m, content=_joined(m.content)) for m in messages)


def _joined(content: Content) -> Content:
    if not isinstance(content, tuple):
        return content
    out: list[str | Medium] = []
    for part in content:
        if isinstance(part, str) and out and isinstance(out[-1], str):
            out[-1] += part
        else:
            out.append(part)
    texts = [p for p in out if isinstance(p, str)]
    return "".join(texts) if len(texts) == len(out) else tuple(out)


# --- calls and their answers ------------------------------------------------------------------


def check_pairs(conversation: Conversation) -> None:
    """Raise InputError where calls and answers do not belong to each other, or nothing is asked.

    A model was never trained to go on from a call without an answer, and templates leave out an
    answer without a call.
    """
    messages = conversation.messages
    if not messages:
        raise InputError("messages: are empty; give at least one")
    open_calls: list[Call] = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if message.role == TOOL:
            open_calls.remove(_called(message, open_calls, where))
            continue
        _check_answered(open_calls, i - 1)
        ids = [c.id for c in message.calls if c.id is not None]
        if len(set(ids)) < len(ids):
            raise InputError(f"{where}.tool_calls: two calls have the same id")
        open_calls = [] if message.responses else list(message.calls)
    _check_answered(open_calls, len(messages) - 1)


def _called(answer: Message, open_calls: list[Call], where: str) -> Call:
    if not open_calls:
        raise InputError(
            f"{where}: a tool's message must follow the assistant's message whose call it answers; "
            f"add that message with its tool_calls, or remove this one"
        )
    if answer.call_id is not None:
        found = [c for c in open_calls if c.id == answer.call_id]
    else:
        # A template knows such an answer by its name, or by the one call that has no id either.
        found = [c for c in open_calls if answer.name in ((c.name,) if c.id else (None, c.name))]
        if len(open_calls) > 1 and any(c.id is None for c in found):
            found = []
    if len(found) == 1:
        return found[0]
    ids = ", ".join(shown(c.id) for c in open_calls)
    raise InputError(
        f"{where}.tool_call_id: {shown(answer.call_id)} is no call that waits for an answer "
        f"({ids}); give the id of the call"
    )


def _check_answered(open_calls: list[Call], last: int) -> None:
    if open_calls:
        call = open_calls[0]
        named = f"{call.name!r} ({call.id})" if call.id else repr(call.name)
        raise InputError(
            f"messages[{last}]: the call of {named} has no answer; add a tool message for it, "
            f"which may say that it was not run"
        )
