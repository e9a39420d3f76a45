"""Parses OpenAI messages into one form, the same for every template.

A message becomes a dict as templates take it: arguments decoded, roles normalised, earlier
reasoning removed. Its content is None, a text, or a list of texts and media.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from g4ir.errors import InputError

from .special_tokens import CHANNEL, CHANNEL_END

SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"
ROLES = {
    **dict.fromkeys(("system", "developer"), SYSTEM),
    "user": USER,
    **dict.fromkeys(("assistant", "model"), ASSISTANT),
    "tool": TOOL,
}
#: type of a part -> kind of its medium; None: a text, under a key of the same name
PARTS: dict[str, str | None] = dict.fromkeys(("text", "refusal"))
PARTS |= {f"{kind}{end}": kind for kind in ("image", "audio", "video") for end in ("", "_url")}
PARTS["input_audio"] = "audio"
#: how deep lists and objects may lie in each other
MOST_DEPTH = 64
KINDS = {dict: "an object", list: "a list", str: "a text", bool: "a boolean"}
KINDS |= {type(None): "nothing", int: "a number", float: "a number"}

Message = dict[str, Any]


@dataclass(frozen=True)
class Medium:
    """An image, audio or video part as received; the caller decodes it."""

    kind: str
    part: Any
    place: str


Messages = Sequence[Message]


def turns(messages: Messages) -> list[tuple[Message, list[Message]]]:
    """Return the messages but those of tools, each with the answers to its calls."""
    out = list[tuple[Message, list[Message]]]()
    for message in messages:
        if message["role"] != TOOL:
            out.append((message, []))
        elif out and out[-1][0].get("tool_calls") and not out[-1][0].get("tool_responses"):
            out[-1][1].append(message)
    return out


def media_of(messages: Messages) -> tuple[Medium, ...]:
    """Return the media in the order of their placeholders: answers are written behind the calls,
    which is before the text of the message that called."""
    written = [m for message, answers in turns(messages) for m in (*answers, message)]
    contents = [m["content"] for m in written if isinstance(m["content"], list)]
    return tuple(part for parts in contents for part in parts if isinstance(part, Medium))


def read_messages(given: Any) -> tuple[Message, ...]:
    """Return messages in the normal form. InputError names the place and the fix."""
    expect(given, (list, tuple), "messages", "a list of messages")
    return tuple(_message(m, f"messages[{i}]") for i, m in enumerate(given))


def _message(given: Any, where: str) -> Message:
    role = _known(an_object(given, where), "role", ROLES, where)
    content, at = given.get("content"), f"{where}.content"
    if content is not None and not isinstance(content, str):
        cure = "; write it as JSON text" if role == TOOL else ""
        expect(content, (list, tuple), at, "text or a list of parts", cure)
        content = [_part(p, f"{at}[{i}]") for i, p in enumerate(content)]
    out = {"role": role, "content": content}
    if role == TOOL:
        return out | _texts(given, where, "tool_call_id", "name")
    if role == ASSISTANT:
        return out | _of_assistant(given, content, where)
    if content is None:
        raise InputError(f"{at}: is missing; give a text or a list of parts")
    return out


def _of_assistant(given: Message, content: Any, where: str) -> Message:
    if content is None:
        content = _texts(given, where, "refusal").get("refusal")
    parts = content if isinstance(content, list) else [content]
    parts = [without_reasoning(p) if isinstance(p, str) else p for p in parts]
    out: Message = {"content": parts if isinstance(content, list) else parts[0]}
    said = _texts(given, where, "reasoning", "reasoning_content")
    if reasoning := said.get("reasoning") or said.get("reasoning_content"):
        out |= {"reasoning": reasoning, "reasoning_content": reasoning}
    for key, read in (("tool_calls", _call), ("tool_responses", _response)):
        items, at = given.get(key), f"{where}.{key}"
        if items is not None and expect(items, (list, tuple), at, "a list"):
            out[key] = [read(item, f"{at}[{i}]") for i, item in enumerate(items)]
    return out


def _part(given: Any, where: str) -> str | Medium:
    if isinstance(given, str):
        return given
    if kind := _known(an_object(given, where), "type", PARTS, where):
        return Medium(kind, given, where)
    name = given["type"]
    text: str = expect(given.get(name), str, f"{where}.{name}", "text")
    return text


def _call(given: Any, where: str) -> Message:
    function, place = function_of(given, where), f"{where}.function.arguments"
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not name.strip() or set(name) & {"{", "\n"}:
        what = f"must be the name of a function, found {shown(name)}"
        raise InputError(f"{where}.function.name: {what}")
    if isinstance(arguments, str):
        value = decoded(arguments or "{}", place)
    else:  # decoded by a kind client
        value = {} if arguments is None else json_value(arguments, place)
    held = {"name": name, "arguments": expect(value, dict, place, "a JSON object")}
    return {"type": "function", "function": held, **_texts(given, where, "id")}


def _response(given: Any, where: str) -> Message:
    value = json_value(an_object(given, where).get("response"), f"{where}.response")
    return {"name": _texts(given, where, "name").get("name") or "unknown", "response": value}


def function_of(given: Any, where: str) -> Message:
    """Return the function of a tool, or of a call of one."""
    if an_object(given, where).get("type", "function") != "function":
        raise InputError(f"{where}.type: must be function, found {shown(given['type'])}")
    return an_object(given.get("function"), f"{where}.function")


def _known(given: Message, key: str, known: Mapping[str, Any], where: str) -> Any:
    word = given.get(key)
    if not isinstance(word, str) or word not in known:
        what = f"must be one of {', '.join(known)}, found {shown(word)}"
        raise InputError(f"{where}.{key}: {what}")
    return known[word]


def _texts(given: Message, where: str, *keys: str) -> dict[str, str]:
    out = {key: given[key] for key in keys if given.get(key) is not None}
    return {key: expect(value, str, f"{where}.{key}", "text") for key, value in out.items()}


def expect(
    given: Any, form: type | tuple[type, ...], where: str, words: str, cure: str = ""
) -> Any:
    """Return a value of some type; InputError says what it must be where it is not."""
    if not isinstance(given, form):
        raise InputError(f"{where}: must be {words}, found {kind_of(given)}{cure}")
    return given


def an_object(given: Any, where: str) -> dict[str, Any]:
    """Return the object itself; InputError where it is none."""
    found: dict[str, Any] = expect(given, dict, where, "an object")
    return found


def kind_of(value: Any) -> str:
    """Return what a value of JSON is called."""
    return KINDS.get(type(value), "no JSON")


def shown(value: Any) -> str:
    """Return the head of a value, for a message."""
    return "nothing" if value is None else repr(value)[:60]


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


def without_reasoning(text: str) -> str:
    """Return an assistant text without its reasoning channels; an unclosed one runs to the end."""
    return "".join(part.partition(CHANNEL)[0] for part in text.split(CHANNEL_END))


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return the same with every text changed, keys of objects too; media stay as they are."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(k): map_texts(v, change) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map_texts(v, change) for v in value)
    return value


def joined(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Return messages in which texts that follow each other are one: a template trims each part by
    itself, which would take the space between two words."""
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
    """Raise InputError where calls and answers do not belong to each other, or nothing is asked:
    no model was trained to go on from a call without an answer, nor the other way round. Return the
    calls that wait for an answer, as those of the last message may where it `may_wait`."""
    if not messages:
        raise InputError("messages: are empty; give at least one")
    waiting, end = list[Message](), {"role": "end"}
    for i, message in enumerate((*messages, end)):
        if message["role"] == TOOL:
            waiting.remove(_called(message, waiting, f"messages[{i}]"))
            continue
        if message is end and may_wait:
            break
        if waiting:
            name, own = waiting[0]["function"]["name"], waiting[0].get("id")
            named = f"{name!r} ({own})" if own else repr(name)
            raise InputError(
                f"messages[{i - 1}]: the call of {named} has no answer; add a tool message for it, "
                f"which may say that it was not run"
            )
        calls = message.get("tool_calls") or []
        ids = [call["id"] for call in calls if call.get("id") is not None]
        if len(set(ids)) < len(ids):
            raise InputError(f"messages[{i}].tool_calls: two calls have the same id")
        waiting = [] if message.get("tool_responses") else [*calls]
    return waiting


def _called(answer: Message, waiting: list[Message], where: str) -> Message:
    if not waiting:
        what = "a tool's message must follow the assistant's message whose call it answers"
        cure = "add that message with its tool_calls, or remove this one"
        raise InputError(f"{where}: {what}; {cure}")
    given, name = answer.get("tool_call_id"), answer.get("name")
    if given is not None:
        found = [c for c in waiting if c.get("id") == given]
    else:
        # A template knows such an answer by its name, or by the one call that has no id either.
        same = [c for c in waiting if c["function"]["name"] == name]
        found = same if name is not None else [c for c in waiting if not c.get("id")]
        if len(waiting) > 1 and any(c.get("id") is None for c in found):
            found = []
    if len(found) == 1:
        return found[0]
    ids = ", ".join(shown(c.get("id")) for c in waiting)
    what = f"{shown(given)} is no call that waits for an answer ({ids}); give the id of the call"
    raise InputError(f"{where}.tool_call_id: {what}")
