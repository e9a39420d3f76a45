"""Parses and checks bodies of requests by tables of fields. `null` means absent, unsupported fields
are refused by name unless their value is neutral, unknown ones are ignored and logged at most once.

`prompts` accepts only the fields of these tables, as `read_fields` returns them; other protocols'
bodies are translated to the fields of CHAT or COMPLETIONS.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from g4ir.chat.messages import MAX_DEPTH, kind_of, no_number, shown
from g4ir.ui.files import read_table

from .http_errors import Refused, bad, missing

log = logging.getLogger(__name__)
#: unknown fields that were logged
_LOGGED: set[str] = set()
MAX_LOGGED = 256

#: the fields of a request, as `read_fields` returns them
Fields = Mapping[str, Any]
#: (value, name of the field) -> checked value; Refused if it is wrong
Read = Callable[[Any, str], Any]

MAX_MESSAGES, MAX_TOOLS, MAX_PROMPTS, MAX_INT = 4096, 128, 32, (1 << 31) - 1
MAX_STOPS, MAX_BIASES, MAX_STOP_IDS, MAX_CHOICES, MAX_OPTIONS = 16, 1024, 64, 1024, 32
MIN_TOP_P = 1e-6
MAX_LOGPROBS = 20
#: maximum characters of a stop string: each piece of an answer is compared with it
MAX_STOP_TEXT = 4096
#: limits of a body: objects and lists, strings, and values
MAX_CONTAINERS, MAX_STRINGS, MAX_VALUES = 1 << 16, 1 << 18, 1 << 21
DEEP = f"the body is nested deeper than {MAX_DEPTH} levels"
#: reasoning efforts that turn reasoning off
NO_EFFORTS = ("none", "minimal")


def parsed(raw: bytes) -> dict[str, Any]:
    """Parse a body to a JSON object. Refused if it is invalid, too large or too deep."""
    _check_counts(raw)
    try:
        body = json.loads(raw.decode(), parse_constant=no_number)
    except RecursionError:
        raise Refused(400, DEEP) from None
    except ValueError as e:
        raise Refused(400, f"the body is no JSON: {str(e)[:120]}") from None
    if not isinstance(body, dict):
        raise Refused(400, f"the body must be an object, found {kind_of(body)}")
    _check_depth(body)
    return body


def _check_counts(raw: bytes) -> None:
    """Refuse a body with too many values before parsing: `json.loads` holds the GIL, for a second
    per million lists. Bytes within strings do not count, but are only stripped if the total exceeds
    the limit."""
    if not _exceeded(raw):
        return
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    if plain.count(b'"') <= 2 * MAX_STRINGS:
        plain = b"".join(plain.split(b'"')[::2])
    if limit := _exceeded(plain):
        raise Refused(400, f"the body has more than {limit}")


def _exceeded(raw: bytes) -> str:
    """Return the limit that a body exceeds, as a text; "" if none."""
    containers, strings = raw.count(b"[") + raw.count(b"{"), -(-raw.count(b'"') // 2)
    counts = [(strings, MAX_STRINGS, "strings"), (raw.count(b","), MAX_VALUES, "values")]
    counts.append((containers, MAX_CONTAINERS, "objects and lists"))
    return next((f"{limit} {words}" for count, limit, words in counts if count > limit), "")


def _check_depth(body: Any) -> None:
    """Refuse too deep nesting, and infinite numbers (1e999)."""
    level = [body]
    for _ in range(MAX_DEPTH):
        if any(isinstance(v, float) and not math.isfinite(v) for v in level):
            raise Refused(400, "the body has a number that is too large")
        children = [v.values() if isinstance(v, dict) else v for v in level if type(v) is not float]
        level = [x for v in children for x in v if type(x) in (dict, list, float)]
        if not level:
            return
    raise Refused(400, DEEP)


def kind(type_: type | tuple[type, ...], words: str) -> Read:
    """Return a reader of values of one type; booleans are not numbers."""

    def read(value: Any, name: str) -> Any:
        if not isinstance(value, type_) or (isinstance(value, bool) and type_ is not bool):
            raise bad(name, f"must be {words}, found {kind_of(value)} ({shown(value)})")
        return value

    return read


FLAG = kind(bool, "true or false")
OBJECT, LIST = kind(dict, "an object"), kind(list, "a list")
INTEGER, NUMBER = kind(int, "a whole number"), kind((int, float), "a number")


def _text(value: Any, name: str) -> str:
    """Read a text that can be encoded as UTF-8."""
    text: str = kind(str, "a text")(value, name)
    try:
        text.encode()
    except UnicodeEncodeError as e:
        reason = f"has a lone surrogate (U+{ord(text[e.start]):04X})"
        raise bad(name, f"{reason} at character {e.start}; it is not valid UTF-8") from None
    return text


TEXT: Read = _text


def that(
    reader: Read, holds: Callable[[Any], bool], words: str, describe: Callable[[Any], Any] = shown
) -> Read:
    """Return a reader that also checks `holds(value)`. An error says "must {words}, found
    {describe(value)}"."""

    def read(value: Any, name: str) -> Any:
        if not holds(reader(value, name)):
            raise bad(name, f"must {words}, found {describe(value)}")
        return value

    return read


def number(low: float, high: float, reader: Read = NUMBER) -> Read:
    """Return a reader of numbers from `low` to `high`, both included."""
    return that(reader, lambda value: low <= value <= high, f"be {low} to {high}")


def integer(low: int, high: int = MAX_INT) -> Read:
    """Return a reader of integers from `low` to `high`, both included."""
    return number(low, high, INTEGER)


def listed(max_items: int, min_items: int = 0, reader: Read = LIST) -> Read:
    """Return a reader of lists, or objects, of bounded length."""
    words = f"have {min_items} to {max_items} entries"
    return that(reader, lambda value: min_items <= len(value) <= max_items, words, len)


def one_of(*words: str) -> Read:
    """Return a reader that accepts one of these strings."""
    expected = f"be one of {', '.join(words)}"
    return that(lambda value, _: value, lambda value: value in words, expected)


def unsupported(*neutral: Any, fix: str = "leave it out") -> Read:
    """Return a reader of an unsupported field: it returns None for neutral values, which change no
    answer, and refuses all others with the remedy `fix`."""

    def read(value: Any, name: str) -> None:
        if not any(value == n and isinstance(value, bool) == isinstance(n, bool) for n in neutral):
            reason = f"{kind_of(value)} ({shown(value)}) is not supported"
            raise missing(name, f"{reason}: {fix}")

    return read


def _top_p(value: Any, name: str) -> float:
    """Read top_p; 0 becomes a tiny value, which keeps only the most likely token."""
    return max(float(number(0, 1)(value, name)), MIN_TOP_P)


def _stop(value: Any, name: str) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else listed(MAX_STOPS)(value, name)
    if not all(isinstance(s, str) and s for s in strings):
        raise bad(name, "must be a text that is not empty, or a list of such texts")
    if any(len(s) > MAX_STOP_TEXT for s in strings):
        raise bad(name, f"a text must have at most {MAX_STOP_TEXT} characters")
    return tuple(strings)


def _ids(value: Any, name: str) -> frozenset[int]:
    return frozenset(integer(0)(i, name) for i in listed(MAX_STOP_IDS)(value, name))


def _biases(value: Any, name: str) -> tuple[tuple[int, float], ...]:
    biases = listed(MAX_BIASES, reader=OBJECT)(value, name)
    wrong = next((k for k in biases if not (k.isascii() and k.isdigit() and len(k) < 10)), None)
    if wrong is not None:
        raise bad(name, f"keys must be token ids, found {shown(wrong)}")
    return (*{int(k): number(-100, 100)(v, name) for k, v in biases.items()}.items(),)


def _prompt_logprobs(value: Any, name: str) -> int | None:
    """Read the number of most likely tokens to report; false means off, like null."""
    return None if value is False else int(integer(0, MAX_LOGPROBS)(value, name))


def _stream_options(value: Any, name: str) -> bool:
    """Read stream_options: return whether `include_usage` is true."""
    include = OBJECT(value, name).get("include_usage")
    return bool(include is not None and FLAG(include, name))


def _options(value: Any, name: str) -> dict[str, Any]:
    """Return the chat template options; those that the server sets itself are refused, and names
    that are no identifiers."""
    reserved = {"messages", "tools", "form", "continued", "add_generation_prompt"}
    options = listed(MAX_OPTIONS, reader=OBJECT)(value, name)
    if wrong := next((k for k in options if k in reserved or not k.isidentifier()), None):
        raise bad(name, f"{shown(wrong)} cannot be set as an option of the template")
    FLAG(options.get("enable_thinking", False), name)
    return dict(options)


def _messages(value: Any, name: str) -> list[Any]:
    """Return the list of messages, whose length is checked but not their contents. Refuses other
    servers' fields for continuing a message."""
    messages: list[Any] = listed(MAX_MESSAGES, 1)(value, name)
    for i, message in enumerate(messages):
        for key in ("prefix", "partial"):  # DeepSeek's and Mistral's field, Kimi's and Qwen's
            if isinstance(message, dict) and message.get(key):
                text = f"messages[{i}].{key} is not supported: use continue_final_message"
                raise Refused(400, text, param=name, code="not_supported")
    return messages


def _prompts(value: Any, name: str) -> tuple[Any, ...]:
    if isinstance(value, str):
        return (value,)
    kinds = {*map(type, LIST(value, name))}
    if value and kinds <= {int, bool}:
        return (value,)
    if not (kinds <= {str} or kinds <= {list}):
        raise bad(name, "must be a text, a list of texts, of ids, or of lists of ids")
    return tuple(listed(MAX_PROMPTS, 1)(value, name))


@dataclass(frozen=True)
class ToolChoice:
    """Tool choice: calls are allowed (auto), required or disallowed (none); of the function `name`
    alone (None: all); at most one call unless `many`."""

    mode: str
    name: str | None = None
    many: bool = True


def _choice(value: Any, name: str) -> ToolChoice:
    if value in ("auto", "none", "required"):
        return ToolChoice(str(value))
    if isinstance(value, dict) and value.get("type", "function") == "function":
        return ToolChoice("required", _name(value, name), many=False)
    raise bad(name, f"must be auto, none, required or a named function, found {shown(value)}")


def _name(value: Any, where: str) -> str:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad(where, f"must be a function with a name, found {shown(value)}")
    return str(function["name"])


JSON, REGEX, CHOICE, GRAMMAR = "json", "regex", "choice", "grammar"


@dataclass(frozen=True)
class Constraint:
    """Structured output constraint: a JSON schema (dict), a regular expression, a choice (list), or
    a grammar in Lark or GBNF. `field`: the request's field, for errors. A `strict` schema is
    refused if one of its constraints is not supported."""

    field: str
    kind: str
    value: Any
    strict: bool = False


def constrained(kind_name: str) -> Read:
    """Return a reader of constraints of one kind; an empty string means no constraint."""

    def read(value: Any, name: str) -> Constraint | None:
        if value == "":
            return None
        if kind_name == CHOICE:
            if not all(isinstance(c, str) and c for c in listed(MAX_CHOICES, 1)(value, name)):
                raise bad(name, "must be a list of texts that are not empty")
            for choice in value:
                TEXT(choice, name)
            return Constraint(name, kind_name, value)
        return Constraint(name, kind_name, (_schema if kind_name == JSON else TEXT)(value, name))

    return read


def _schema(value: Any, name: str) -> dict[str, Any]:
    try:
        decoded = parsed(value.encode()) if isinstance(value, str) else value
    except UnicodeError:
        raise bad(name, "is not valid UTF-8") from None
    except Refused as e:
        raise bad(name, e.message.replace("the body", "the text")) from None
    return OBJECT(decoded, name)


def _format(value: Any, name: str) -> Constraint | None:
    kind_name = one_of("text", "json_object", "json_schema")(OBJECT(value, name).get("type"), name)
    schema, strict = value.get("schema"), False  # llama-server and others put the schema here
    if kind_name == "text":
        return None
    if kind_name == "json_schema":
        wrapper = value.get("json_schema")
        strict = isinstance(wrapper, dict) and wrapper.get("strict") is True
        schema = wrapper.get("schema", schema) if isinstance(wrapper, dict) else schema
        if not isinstance(schema, dict):
            raise bad(name, "the type json_schema needs a schema, which must be an object")
    schema = {"type": "object"} if schema is None else _schema(schema, name)
    return Constraint(name, JSON, schema, strict)


def _structured(value: Any, name: str) -> Constraint | None:
    """Return the constraint of vLLM's structured_outputs, which names one kind."""
    constraints = {k: v for k, v in OBJECT(value, name).items() if v is not None and v is not False}
    constraints.pop("disable_fallback", None)  # no fallback library exists
    if constraints.get("json_object") is True:
        constraints["json_object"] = {"type": "object"}
    kinds = {JSON: JSON, "json_object": JSON, REGEX: REGEX, CHOICE: CHOICE, GRAMMAR: GRAMMAR}
    if wrong := next((k for k in constraints if k not in kinds), None):
        raise missing(name, f"{shown(wrong)} is not supported; expected one of {', '.join(kinds)}")
    if len(constraints) != 1:
        raise bad(name, f"must have exactly one of {', '.join(kinds)}; it has {len(constraints)}")
    ((name_of_kind, inner),) = constraints.items()
    return constrained(kinds[name_of_kind])(inner, f"{name}.{name_of_kind}")


#: name in fields.yaml -> reader of a field (READERS), or (MAKERS) function that returns a reader
#: and takes the arguments after the name
READERS: dict[str, Read] = {"text": TEXT, "flag": FLAG, "top_p": _top_p, "stop": _stop, "ids": _ids}
READERS |= {"biases": _biases, "stream_options": _stream_options, "options": _options}
READERS |= {"messages": _messages, "prompts": _prompts, "choice": _choice}
READERS |= {"prompt_logprobs": _prompt_logprobs}
READERS |= {"format": _format, "structured": _structured}
MAKERS: dict[str, Callable[..., Read]] = {"whole": integer, "number": number, "listed": listed}
MAKERS |= {"one_of": one_of, "unsupported": unsupported, "constrained": constrained}


def constraint_of(fields: Fields) -> Constraint | None:
    """Return a request's structured output constraint, or None; Refused if it has two."""
    constraints = [value for value in fields.values() if isinstance(value, Constraint)]
    for second in constraints[1:]:
        raise bad(second.field, f"cannot be combined with {constraints[0].field}; give one of them")
    return constraints[0] if constraints else None


_FIELDS = read_table(Path(__file__).with_name("fields.yaml"))


def _table(part: str) -> dict[str, Read]:
    """Return a part of fields.yaml: field -> its reader."""
    out = {}
    for name, row in _FIELDS[part].items():
        out[name] = READERS[row] if isinstance(row, str) else MAKERS[row[0]](*row[1:])
    return out


#: unsupported field -> its neutral values, and the remedy
REFUSED: Mapping[str, tuple[list[Any], str]] = {
    name: (neutral, group["way"])
    for group in _FIELDS["refused"]
    for name, neutral in group["neutral"].items()
}
HARMLESS = frozenset(_FIELDS["harmless"])
_FOREIGN = {name: unsupported(*neutral, fix=fix) for name, (neutral, fix) in REFUSED.items()}
CONSTRAINTS = _table("constraints")
COMMON = {**_table("common"), **CONSTRAINTS, **_FOREIGN}
CHAT = {**COMMON, **_table("chat")}
_OF_CHATS = unsupported([], False, "none", {}, fix="it is a field of /v1/chat/completions")
COMPLETIONS = {name: _OF_CHATS for name in CHAT if name != "messages"}
COMPLETIONS |= {**COMMON, **_table("completions")}
TOKENIZE = {name: COMMON[name] for name in ("model", "chat_template")} | _table("tokenize")
TOKENIZE_CHAT = {name: read for name, read in TOKENIZE.items() if name != "prompt"}
TOKENIZE_CHAT |= {name: CHAT[name] for name in _FIELDS["tokenize_chat"]}
DETOKENIZE = _table("detokenize")
#: mutually exclusive fields
CONTENTS = ("messages", "prompt", "tokens")
#: values that clients send for an absent field
UNSAID = {"max_tokens": -1, "max_completion_tokens": -1, "stop": ""}


def read_fields(body: Mapping[str, Any], table: Mapping[str, Read]) -> dict[str, Any]:
    """Return the known fields of a body, checked, and without absent ones. Refused for invalid
    fields, for fields that exclude each other, and for one without another that it needs."""
    _log_unknown(body.keys() - table.keys() - HARMLESS)
    content = next(name for name in CONTENTS if name in table)
    if other := next((n for n in CONTENTS if n != content and body.get(n) is not None), None):
        both = f"cannot be combined with {content}; leave it out"
        alone = f"is not a field of this path, which takes {content}"
        either = table in (TOKENIZE, TOKENIZE_CHAT) and body.get(content) is not None
        raise bad(other, both if either else alone)
    absent = {k for k, v in UNSAID.items() if body.get(k) == v and type(body[k]) is type(v)}
    present = {k: v for k, v in body.items() if v is not None and k not in absent}
    read_in = {k: read(present[k], k) for k, read in table.items() if k in present}
    fields = {k: v for k, v in read_in.items() if v is not None}
    if content not in fields:
        raise bad(content, "is missing")
    for name in ("echo", "prompt_logprobs"):
        if fields.get(name) not in (None, False) and fields.get("stream"):
            raise missing(name, "is not streamed; leave stream out")
    if "stream_options" in fields and not fields.get("stream"):
        raise bad("stream_options", "is for streams: give stream true, or leave it out")
    if fields.get("top_logprobs") and not fields.get("logprobs"):
        raise bad("top_logprobs", "needs logprobs true")
    _check_choice(fields)
    if fields.get("best_of", 1) > fields.get("n", 1):
        raise missing("best_of", "must not be more than n")
    return fields


def _log_unknown(names: Iterable[str]) -> None:
    for name in sorted({shown(name) for name in names} - _LOGGED)[: MAX_LOGGED - len(_LOGGED)]:
        _LOGGED.add(name)
        log.warning("ignored a request field that is not known: %s", name)


def _check_choice(fields: Fields) -> None:
    """Refuse a tool choice that names an undeclared function or forces a call without tools, and
    fields that cannot be combined with a forced call or a structured output constraint."""
    choice, tools = chosen(fields), fields.get("tools") or ()
    if choice.name is not None and choice.name not in {_name(t, "tools") for t in tools}:
        raise bad("tool_choice", f"names {shown(choice.name)}, which is not one of the tools")
    forced, formed = choice.mode == "required", constraint_of(fields)
    if forced and not tools:
        raise bad("tool_choice", "requires a call, and the request has no tools")
    if forced and formed:
        raise bad(formed.field, "cannot be combined with a tool_choice that forces a call")
    if formed and fields.get("continue_final_message"):
        why = "cannot be combined with continuing the last message (continue_final_message)"
        raise bad(formed.field, why)
    if formed and formed.kind != JSON and tools and choice.mode != "none":
        raise bad(formed.field, 'cannot be combined with tools; give tool_choice "none"')
    for name in ("ignore_eos", "min_tokens"):
        if (forced or formed) and fields.get(name):
            other = formed.field if formed else "a forced call"
            raise bad(name, f"cannot be combined with {other}, which ends the answer itself")


def chosen(fields: Fields) -> ToolChoice:
    """Return the tool choice of a request; without one, `auto` if it has tools, else `none`. It is
    not `many` if `parallel_tool_calls` is false."""
    requested: ToolChoice | None = fields.get("tool_choice")
    choice = requested or ToolChoice("auto" if fields.get("tools") else "none")
    many = choice.many and fields.get("parallel_tool_calls") is not False
    return replace(choice, many=many)


def max_new_tokens(fields: Fields) -> int | None:
    """Return a request's maximum number of new tokens; None if it sets none."""
    return fields.get("max_completion_tokens", fields.get("max_tokens"))
