"""Normalises OpenAI messages for every template.

A message becomes a dict for templates: arguments of calls decoded, roles normalised, reasoning
channels removed from an assistant's text (the field `reasoning` stays). Its content is None, a
string, or a list of strings and media.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from g4ir.errors import InputError
from g4ir.spec.reader import unique

from .special_tokens import CHANNEL, CHANNEL_END

SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"
ROLES = {
    **dict.fromkeys(("system", "developer"), SYSTEM),
    "user": USER,
    **dict.fromkeys(("assistant", "model"), ASSISTANT),
    "tool": TOOL,
}
#: part type -> kind of medium; None: text, under a key of the same name
PARTS: dict[str, str | None] = dict.fromkeys(("text", "refusal"))
PARTS |= {f"{kind}{end}": kind for kind in ("image", "audio", "video") for end in ("", "_url")}
PARTS["input_audio"] = "audio"
#: keys of a text part that name its languages (TranslateGemma)
LANGUAGES = ("source_lang_code", "target_lang_code")
#: maximum nesting of lists and objects
MAX_DEPTH = 64
KINDS = {dict: "an object", list: "a list", str: "a text", bool: "a boolean"}
KINDS |= {type(None): "nothing", int: "a number", float: "a number"}

Message = dict[str, Any]


@dataclass(frozen=True)
class Medium:
    """An image, audio or video part as received; the caller decodes it. `where`: its field in the
    request, for errors."""

    kind: str
    part: Any
    where: str


Messages = Sequence[Message]


def turns(messages: Messages) -> list[tuple[Message, list[Message]]]:
    """Return the messages except tool messages, each with the tool messages that answer its calls
    (none if it has `tool_responses`)."""
    out = list[tuple[Message, list[Message]]]()
    for message in messages:
        if message["role"] != TOOL:
            out.append((message, []))
        elif out and out[-1][0].get("tool_calls") and not out[-1][0].get("tool_responses"):
            out[-1][1].append(message)
    return out


def media_of(messages: Messages) -> tuple[Medium, ...]:
    """Return the media in the order of their placeholders: templates write tool results right after
    the calls, before the text of the calling message."""
    written = [m for message, answers in turns(messages) for m in (*answers, message)]
    contents = [m["content"] for m in written if isinstance(m["content"], list)]
    return tuple(part for parts in contents for part in parts if isinstance(part, Medium))


def read_messages(messages: Any) -> tuple[Message, ...]:
    """Normalise OpenAI messages. InputError names the field and the fix."""
    expect(messages, (list, tuple), "messages", "a list of messages")
    return tuple(_message(m, f"messages[{i}]") for i, m in enumerate(messages))


def _message(message: Any, where: str) -> Message:
    role = _lookup(an_object(message, where), "role", ROLES, where)
    content, at = message.get("content"), f"{where}.content"
    if content is not None and not isinstance(content, str):
        cure = "; write it as JSON text" if role == TOOL else ""
        expect(content, (list, tuple), at, "text or a list of parts", cure)
        content = [read_part(p, f"{at}[{i}]") for i, p in enumerate(content)]
    out = {"role": role, "content": content, **_languages(message.get("content"), at)}
    if role == TOOL:
        return out | _texts(message, where, "tool_call_id", "name")
    if role == ASSISTANT:
        return out | _of_assistant(message, content, where)
    if content is None:
        raise InputError(f"{at}: is missing; give a text or a list of parts")
    return out


def _of_assistant(message: Message, content: Any, where: str) -> Message:
    if content is None:
        content = _texts(message, where, "refusal").get("refusal")
    parts = content if isinstance(content, list) else [content]
    parts = [without_reasoning(p) if isinstance(p, str) else p for p in parts]
    out: Message = {"content": parts if isinstance(content, list) else parts[0]}
    fields = _texts(message, where, "reasoning", "reasoning_content")
    if reasoning := fields.get("reasoning") or fields.get("reasoning_content"):
        out |= {"reasoning": reasoning, "reasoning_content": reasoning}
    for key, read in (("tool_calls", _call), ("tool_responses", _response)):
        items, at = message.get(key), f"{where}.{key}"
        if items is not None and expect(items, (list, tuple), at, "a list"):
            out[key] = [read(item, f"{at}[{i}]") for i, item in enumerate(items)]
    return out


def read_part(part: Any, where: str) -> str | Medium:
    """Return a part of a content: its text, or a medium. InputError names the field."""
    if isinstance(part, str):
        return part
    if kind := _lookup(an_object(part, where), "type", PARTS, where):
        return Medium(kind, part, where)
    name = part["type"]
    return expect(part.get(name), str, f"{where}.{name}", "text")


def _languages(content: Any, where: str) -> dict[str, str]:
    """Return the keys LANGUAGES of a content's text parts, with their values (TranslateGemma)."""
    parts = [p for p in content if isinstance(p, dict)] if isinstance(content, list | tuple) else []
    languages = [
        (key, part[key]) for key in LANGUAGES for part in parts if part.get(key) is not None
    ]
    return {key: expect(value, str, f"{where}: {key}", "text") for key, value in languages}


def _call(call: Any, where: str) -> Message:
    function, path = function_of(call, where), f"{where}.function.arguments"
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not name.strip() or set(name) & {"{", "\n"}:
        problem = f"must be a function's name, without {{ and newlines, found {shown(name)}"
        raise InputError(f"{where}.function.name: {problem}")
    if isinstance(arguments, str):
        value = decoded(arguments or "{}", path)
    else:  # already decoded by the client
        value = {} if arguments is None else json_value(arguments, path)
    parsed = {"name": name, "arguments": expect(value, dict, path, "a JSON object")}
    return {"type": "function", "function": parsed, **_texts(call, where, "id")}


def _response(response: Any, where: str) -> Message:
    value = json_value(an_object(response, where).get("response"), f"{where}.response")
    return {"name": _texts(response, where, "name").get("name") or "unknown", "response": value}


def function_of(tool: Any, where: str) -> Message:
    """Return the `function` object of a tool or of a tool call; InputError for another type."""
    if an_object(tool, where).get("type", "function") != "function":
        raise InputError(f"{where}.type: must be function, found {shown(tool['type'])}")
    return an_object(tool.get("function"), f"{where}.function")


def _lookup(message: Message, key: str, allowed: Mapping[str, Any], where: str) -> Any:
    word = message.get(key)
    if not isinstance(word, str) or word not in allowed:
        problem = f"must be one of {', '.join(allowed)}, found {shown(word)}"
        raise InputError(f"{where}.{key}: {problem}")
    return allowed[word]


def _texts(message: Message, where: str, *keys: str) -> dict[str, str]:
    out = {key: message[key] for key in keys if message.get(key) is not None}
    return {key: expect(value, str, f"{where}.{key}", "text") for key, value in out.items()}


def expect(value: Any, kinds: type | tuple[type, ...], where: str, what: str, fix: str = "") -> Any:
    """Return the value; InputError ("WHERE: must be WHAT, found ...", then `fix`) unless its type
    is one of `kinds`."""
    if not isinstance(value, kinds):
        raise InputError(f"{where}: must be {what}, found {kind_of(value)}{fix}")
    return value


def an_object(value: Any, where: str) -> dict[str, Any]:
    """Return a value that is a dict; InputError if it is none."""
    return expect(value, dict, where, "an object")


def kind_of(value: Any) -> str:
    """Return the JSON type of a value for error messages, such as `an object`."""
    return KINDS.get(type(value), "a value that is not JSON")


def shown(value: Any) -> str:
    """Return a value's repr, cut to 60 characters, for error messages; `nothing` for None."""
    return "nothing" if value is None else repr(value)[:60]


def decoded(text: str, where: str) -> Any:
    """Parse JSON strictly; InputError if it is invalid, or has duplicate keys, NaN, infinity, or
    more than MAX_DEPTH levels."""
    try:
        value = json.loads(text, object_pairs_hook=unique, parse_constant=no_number)
    except RecursionError:
        raise InputError(f"{where}: is nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as e:
        raise InputError(f"{where}: is no JSON: {str(e)[:120]}") from None
    return json_value(value, where)


def no_number(constant: str) -> Any:
    """Raise ValueError for a constant that JSON does not have, such as NaN."""
    raise ValueError(f"{constant} is no number")


def json_value(value: Any, where: str, depth: int = 0) -> Any:
    """Return the value with tuples as lists; InputError, naming the field, if it is not JSON."""
    if depth > MAX_DEPTH:
        raise InputError(f"{where[:80]}: is nested deeper than {MAX_DEPTH} levels")
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float) and abs(value) < float("inf"):
        return value
    if isinstance(value, list | tuple):
        return [json_value(v, f"{where}[{i}]", depth + 1) for i, v in enumerate(value)]
    if isinstance(value, dict) and all(isinstance(k, str) for k in value):
        return {k: json_value(v, f"{where}.{k}", depth + 1) for k, v in value.items()}
    raise InputError(f"{where[:200]}: is no value of JSON: {shown(value)}")


def without_reasoning(text: str) -> str:
    """Return an assistant text without its reasoning channels; an unclosed one runs to the end."""
    return "".join(part.partition(CHANNEL)[0] for part in text.split(CHANNEL_END))


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Apply `change` to every string of a JSON value, keys included; media stay as they are."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(k): map_texts(v, change) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map_texts(v, change) for v in value)
    return value


def joined(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Merge adjacent text parts of each message, and make a content of texts alone a string:
    templates trim each part, which would drop spaces between them."""
    return tuple(m | {"content": _joined(m["content"])} for m in messages)


def _joined(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    out = list[Any]()
    for is_text, run in groupby(content, lambda part: isinstance(part, str)):
        parts = [*run]
        out += ["".join(parts)] if is_text else parts
    return out if any(isinstance(part, Medium) for part in out) else "".join(out)


def check_pairs(messages: Messages, may_wait: bool = False) -> list[Message]:
    """Raise InputError for tool calls without results and results without calls, on which no model
    was trained, for two calls of a message with the same id, and for an empty conversation. Return
    the calls that wait for a result; only those of the last message with calls may, if
    `may_wait`."""
    if not messages:
        raise InputError("messages: are empty; give at least one")
    waiting, caller, end = list[Message](), 0, {"role": "end"}
    for i, message in enumerate((*messages, end)):
        if message["role"] == TOOL:
            waiting.remove(_called(message, waiting, f"messages[{i}]"))
            continue
        if message is end and may_wait:
            break
        if waiting:
            name, call_id = waiting[0]["function"]["name"], waiting[0].get("id")
            named = f"{name!r} ({call_id})" if call_id else repr(name)
            fix = "add a tool message for it, which may say that it was not run"
            raise InputError(f"messages[{caller}]: the call of {named} has no answer; {fix}")
        calls = message.get("tool_calls") or []
        ids = [call["id"] for call in calls if call.get("id") is not None]
        if len(set(ids)) < len(ids):
            twice = next(id for id in ids if ids.count(id) > 1)
            problem = f"two calls have the id {shown(twice)}; give each its own"
            raise InputError(f"messages[{i}].tool_calls: {problem}")
        waiting, caller = [] if message.get("tool_responses") else [*calls], i
    return waiting


def _called(answer: Message, waiting: list[Message], where: str) -> Message:
    if not waiting:
        problem = "a tool message needs a call without a result before it"
        cure = "add the assistant's message with that call, or remove this one"
        raise InputError(f"{where}: {problem}; {cure}")
    call_id, name = answer.get("tool_call_id"), answer.get("name")
    if call_id is not None:
        candidates = [c for c in waiting if c.get("id") == call_id]
    else:
        # Without an id, templates match a result by its name, or with the only call without id.
        same = [c for c in waiting if c["function"]["name"] == name]
        candidates = same if name is not None else [c for c in waiting if not c.get("id")]
        if len(waiting) > 1 and any(c.get("id") is None for c in candidates):
            candidates = []
    if len(candidates) == 1:
        return candidates[0]
    ids = ", ".join(shown(c.get("id")) for c in waiting)
    problem = f"must be the id of one call without a result ({ids}), found {shown(call_id)}"
    fix = "give each call an id, and each result that of its call"
    raise InputError(f"{where}.tool_call_id: {problem}; {fix}")


#: the media type is optional in RFC 2397; some clients write image/*
_DATA = re.compile(
    r"data:(?:[\w.+-]+/(?:[\w.+-]+|\*))?(?:;[\w.+-]+=(?:[\w.+-]+|\"[^\"]*\"))*;base64,",
    re.ASCII | re.IGNORECASE,
)


@dataclass(frozen=True)
class Source:
    """Data of a message part: `raw`, the bytes decoded from base64; if None, `text` is a URL or a
    path. `where`: its field in the request, for errors."""

    text: str
    where: str
    raw: bytes | None


def source_of(medium: Medium) -> Source:
    """Return the source of a part's data; InputError if that is not a text, or is invalid
    base64."""
    outer = medium.part["type"]
    inner = "data" if outer == "input_audio" else "url"
    where, value = f"{medium.where}.{outer}", medium.part.get(outer)
    text = value if isinstance(value, str) else an_object(value, where).get(inner)
    where = f"{where}.{inner}"
    text = expect(text, str, where, "base64" if inner == "data" else "a URL or a path")
    head = _DATA.match(text)
    if head is None and inner == "url":
        return Source(text, where, None)
    try:
        raw = base64.b64decode(text[head.end() if head else 0 :], validate=True)
    except ValueError:
        raise InputError(f"{where}: is no base64") from None
    return Source(text, where, raw)
