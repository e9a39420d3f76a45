"""Reads bodies of requests: tables of fields, each with what it may be. `null` means not given,
what this server cannot do is refused by name, and unknown fields are ignored and logged once."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from g4ir.chat.messages import MOST_DEPTH, kind_of, shown
from g4ir.errors import InputError
from g4ir.media.audio import CUT, REFUSE

from .foreign_fields import HARMLESS, refused_fields
from .http_errors import Refused, bad, missing

log = logging.getLogger(__name__)
#: unknown fields that were logged
_LOGGED: set[str] = set()
MOST_LOGGED = 256

#: returns the value of a field, or refuses it; is given its name too
Read = Callable[[Any, str], Any]

MOST_MESSAGES, MOST_TOOLS, MOST_PROMPTS = 4096, 128, 32
MOST_STOPS, MOST_BIASES, MOST_STOP_IDS = 16, 1024, 64
MOST_TOP, MOST_TOKENS = 20, 1 << 20
LEAST_TOP_P = 1e-6
#: of a stop text in characters: each piece of an answer is compared with it
MOST_STOP_TEXT = 4096
#: of a whole body: objects and lists, strings, and values
MOST_HELD, MOST_STRINGS, MOST_VALUES = 1 << 16, 1 << 18, 1 << 21
#: efforts -> whether the model thinks
EFFORTS = {
    **dict.fromkeys(("none", "minimal"), False),
    **dict.fromkeys(("low", "medium", "high", "xhigh", "max"), True),
}


def parsed(raw: bytes) -> dict[str, Any]:
    """Return the object of a body. Refused if it is no JSON, too large or deep, or no object."""
    _check_counts(raw)
    try:
        body = json.loads(raw.decode(), parse_constant=_no_number)
    except RecursionError:
        raise _deep() from None
    except ValueError as e:
        raise Refused(400, f"the body is no JSON: {str(e)[:120]}") from None
    if not isinstance(body, dict):
        raise Refused(400, f"the body must be an object, found {kind_of(body)}")
    _check_depth(body)
    return body


def _check_counts(raw: bytes) -> None:
    """Refuse a body of more values than a request needs before they are made: `json.loads` holds
    the interpreter's lock, and takes a second for a million lists. Bytes inside strings do not
    count; they are only taken out if all bytes together are too many."""
    if all(n <= most for n, most in _counts(raw)):
        return
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    if plain.count(b'"') <= 2 * MOST_STRINGS:
        plain = b"".join(plain.split(b'"')[::2])
    if any(n > most for n, most in _counts(plain)):
        raise Refused(
            400,
            f"the body has more than {MOST_HELD} objects and lists, {MOST_STRINGS} strings or "
            f"{MOST_VALUES} values",
        )


def _counts(raw: bytes) -> Iterator[tuple[int, int]]:
    """Yield how many bytes stand for values of a kind, and how many there may be."""
    yield raw.count(b"[") + raw.count(b"{"), MOST_HELD
    yield raw.count(b'"'), 2 * MOST_STRINGS
    yield raw.count(b","), MOST_VALUES


def _deep() -> Refused:
    return Refused(400, f"the body lies deeper than {MOST_DEPTH} levels")


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number")


def _check_depth(body: Any) -> None:
    """Refuse values that are nested too deeply, and infinite numbers (1e999)."""
    level = [body]
    for _ in range(MOST_DEPTH):
        if any(isinstance(v, float) and not math.isfinite(v) for v in level):
            raise Refused(400, "the body has a number that is too large")
        held = [v.values() if isinstance(v, dict) else v for v in level if type(v) is not float]
        level = [x for v in held for x in v if type(x) in (dict, list, float)]
        if not level:
            return
    raise _deep()


# --- kinds of fields --------------------------------------------------------------------------


def number(low: float, high: float, whole: bool = False) -> Read:
    """Take numbers of a range; a boolean is none."""

    def read(value: Any, name: str) -> Any:
        kinds = int if whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds):
            what = "a whole number" if whole else "a number"
            raise bad(name, f"must be {what}, found {_found(value)}")
        if not low <= value <= high:
            raise bad(name, f"must be {low} to {high}, found {shown(value)}")
        return value

    return read


def whole(low: int, high: int) -> Read:
    """Take whole numbers of a range."""
    return number(low, high, True)


def _top_p(value: Any, name: str) -> float:
    """Take shares of probability; 0 leaves the likeliest token alone, as a tiny share does."""
    return max(float(number(0, 1)(value, name)), LEAST_TOP_P)


def kind(form: type) -> Read:
    """Take values of one kind."""
    words = {bool: "true or false", str: "a text", dict: "an object", list: "a list"}

    def read(value: Any, name: str) -> Any:
        if not isinstance(value, form):
            raise bad(name, f"must be {words[form]}, found {_found(value)}")
        return value

    return read


def _found(value: Any) -> str:
    return f"{kind_of(value)} ({shown(value)})"


def listed(most: int, least: int = 0) -> Read:
    """Take lists of bounded length."""

    def read(value: Any, name: str) -> Any:
        kind(list)(value, name)
        if not least <= len(value) <= most:
            raise bad(name, f"must have {least} to {most} entries, found {len(value)}")
        return value

    return read


def one_of(*words: str) -> Read:
    """Take one of some words."""

    def read(value: Any, name: str) -> Any:
        if value not in words:
            raise bad(name, f"must be one of {', '.join(words)}, found {shown(value)}")
        return value

    return read


def _stop(value: Any, name: str) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else listed(MOST_STOPS)(value, name)
    if not all(isinstance(s, str) and s for s in strings):
        raise bad(name, "must be a text that is not empty, or a list of such")
    if any(len(s) > MOST_STOP_TEXT for s in strings):
        raise bad(name, f"a text must have at most {MOST_STOP_TEXT} characters")
    return tuple(strings)


def _ids(value: Any, name: str) -> frozenset[int]:
    read = whole(0, (1 << 31) - 1)
    return frozenset(read(i, name) for i in listed(MOST_STOP_IDS)(value, name))


def _biases(value: Any, name: str) -> tuple[tuple[int, float], ...]:
    given = kind(dict)(value, name)
    if len(given) > MOST_BIASES:
        raise bad(name, f"must have at most {MOST_BIASES} entries, found {len(given)}")
    wrong = next((k for k in given if not (k.isascii() and k.isdigit() and len(k) < 10)), None)
    if wrong is not None:
        raise bad(name, f"keys must be token ids, found {shown(wrong)}")
    out = {int(k): number(-100, 100)(v, name) for k, v in given.items()}
    return tuple(out.items())


def _stream_options(value: Any, name: str) -> bool:
    """Return whether usage is asked for."""
    include = kind(dict)(value, name).get("include_usage")
    return bool(include is not None and kind(bool)(include, name))


@dataclass(frozen=True)
class ToolChoice:
    """Which calls an answer may have (auto), must have (required) or cannot have (none), of the
    functions `names`, or of all where that is None; at most one of them unless `many`."""

    mode: str
    names: frozenset[str] | None = None
    many: bool = True


def _choice(value: Any, name: str) -> ToolChoice:
    if value in ("auto", "none", "required"):
        return ToolChoice(str(value))
    form = value.get("type", "function") if isinstance(value, dict) else None
    if form == "function":
        return ToolChoice("required", frozenset([_name(value, name)]), many=False)
    if form != "allowed_tools":
        words = "auto, none, required, a named function or allowed_tools"
        raise bad(name, f"must be {words}, found {shown(value)}")
    held = kind(dict)(value.get("allowed_tools"), f"{name}.allowed_tools")
    mode = one_of("auto", "required")(held.get("mode"), f"{name}.allowed_tools.mode")
    where = f"{name}.allowed_tools.tools"
    tools = listed(MOST_TOOLS, 1)(held.get("tools"), where)
    return ToolChoice(mode, frozenset(_name(t, f"{where}[{i}]") for i, t in enumerate(tools)))


def _name(value: Any, where: str) -> str:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad(where, f"must be a function with a name, found {shown(value)}")
    return str(function["name"])


# --- constraints ------------------------------------------------------------------------------

JSON, REGEX, CHOICE, GRAMMAR = "json", "regex", "choice", "grammar"
MOST_CHOICES = 1024


@dataclass(frozen=True)
class Constraint:
    """A form that the text of an answer must have: JSON of a schema (a dict), a match of a regular
    expression, one of some texts (a list), or a text of a grammar in Lark or GBNF. `field` is the
    request's, for errors."""

    field: str
    kind: str
    value: Any


def constrained(form: str) -> Read:
    """Take a constraint of one kind; an empty text is none."""

    def read(value: Any, name: str) -> Constraint | None:
        if value == "":
            return None
        if form == JSON:
            return Constraint(name, form, _schema(value, name))
        if form == CHOICE:
            if not all(isinstance(c, str) and c for c in listed(MOST_CHOICES, 1)(value, name)):
                raise bad(name, "must be a list of texts that are not empty")
            return Constraint(name, form, value)
        return Constraint(name, form, kind(str)(value, name))

    return read


def _schema(value: Any, name: str) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = parsed(value.encode())
        except (Refused, UnicodeError) as e:
            why = (
                e.message.replace("the body", "the text") if isinstance(e, Refused) else "no UTF-8"
            )
            raise bad(name, why) from None
    found: dict[str, Any] = kind(dict)(value, name)
    return found


def _format(value: Any, name: str) -> Constraint | None:
    form = one_of("text", "json_object", "json_schema")(kind(dict)(value, name).get("type"), name)
    schema = value.get("schema")  # llama-server and others have it here
    if form == "text":
        return None
    if form == "json_schema":
        held = value.get("json_schema")
        schema = held.get("schema", schema) if isinstance(held, dict) else schema
        if not isinstance(schema, dict):
            raise bad(name, "json_schema must be an object with a name and a schema")
    return Constraint(name, JSON, {"type": "object"} if schema is None else _schema(schema, name))


def _structured(value: Any, name: str) -> Constraint | None:
    """Return the constraint of vLLM's structured_outputs, which names one kind."""
    given = {k: v for k, v in kind(dict)(value, name).items() if v is not None and v is not False}
    given.pop("disable_fallback", None)  # there is no other library to fall back to
    if given.get("json_object") is True:
        given["json_object"] = {"type": "object"}
    known = {JSON: JSON, "json_object": JSON, REGEX: REGEX, CHOICE: CHOICE, GRAMMAR: GRAMMAR}
    if wrong := next((k for k in given if k not in known), None):
        raise missing(name, f"{shown(wrong)} is not supported; one of {', '.join(known)} is")
    if len(given) != 1:
        raise bad(name, f"must have one of {', '.join(known)}, found {len(given)}")
    ((form, inner),) = given.items()
    return constrained(known[form])(inner, f"{name}.{form}")


#: field -> its constraint; names of vLLM, SGLang and llama-server, each read the same way
CONSTRAINTS: Mapping[str, Read] = {
    "response_format": _format,
    "structured_outputs": _structured,
    **{f"guided_{form}": constrained(form) for form in (JSON, REGEX, CHOICE, GRAMMAR)},
    "json_schema": constrained(JSON),
    "regex": constrained(REGEX),
    "grammar": constrained(GRAMMAR),
    "ebnf": constrained(GRAMMAR),
}


def constraint_of(fields: Mapping[str, Any]) -> Constraint | None:
    """Return the constraint of a request's answers; refused where it has two."""
    found = [c for name in CONSTRAINTS if (c := fields.get(name)) is not None]
    if len(found) > 1:
        raise bad(found[1].field, f"cannot be combined with {found[0].field}; give one of them")
    return found[0] if found else None


def _options(value: Any, name: str) -> dict[str, Any]:
    """Return the chat template options; those that the server sets itself are refused."""
    own = {"messages", "tools", "add_generation_prompt"}
    given = kind(dict)(value, name)
    if wrong := next((k for k in given if k in own or not k.isidentifier()), None):
        raise bad(name, f"{shown(wrong)} is no option of a template")
    if len(given) > 32:
        raise bad(name, f"must have at most 32 entries, found {len(given)}")
    if "enable_thinking" in given:
        kind(bool)(given["enable_thinking"], name)
    return dict(given)


def _unsupported(*neutral: Any, way: str = "leave it out") -> Read:
    """Accept neutral values alone, which are ignored."""

    def read(value: Any, name: str) -> None:
        if not any(value == n and isinstance(value, bool) == isinstance(n, bool) for n in neutral):
            raise missing(name, f"{_found(value)} is not supported: {way}")

    return read


def _messages(value: Any, name: str) -> list[Any]:
    """Return the messages; another server's way to continue one is refused."""
    found: list[Any] = listed(MOST_MESSAGES, 1)(value, name)
    for i, message in enumerate(found):
        for key in ("prefix", "partial"):  # of DeepSeek and Mistral, of Kimi and Qwen
            if isinstance(message, dict) and message.get(key):
                place = f"messages[{i}].{key} is not supported: use continue_final_message"
                raise Refused(400, place, param=name, code="not_supported")
    return found


_COUNT = whole(1, (1 << 31) - 1)
COMMON: Mapping[str, Read] = {
    "model": kind(str),
    "max_tokens": _COUNT,
    "temperature": number(0, 100),
    "top_p": _top_p,
    "top_k": whole(-1, (1 << 31) - 1),
    "min_p": number(0, 1),
    "n": whole(1, 128),
    "stream": kind(bool),
    "stream_options": _stream_options,
    "stop": _stop,
    "stop_token_ids": _ids,
    "seed": whole(-(1 << 63), (1 << 63) - 1),
    "frequency_penalty": number(-2, 2),
    "presence_penalty": number(-2, 2),
    "repetition_penalty": number(0.01, 100),
    "logit_bias": _biases,
    "ignore_eos": kind(bool),
    "min_tokens": whole(0, (1 << 31) - 1),
    "max_completion_tokens": _COUNT,
    "cache_salt": kind(str),
    "cache_prompt": kind(bool),
    **CONSTRAINTS,
    **{name: _unsupported(*neutral, way=way) for name, neutral, way in refused_fields()},
}
CHAT: Mapping[str, Read] = {
    **COMMON,
    "messages": _messages,
    "logprobs": kind(bool),
    "top_logprobs": whole(0, MOST_TOP),
    "tools": listed(MOST_TOOLS),
    "tool_choice": _choice,
    "parallel_tool_calls": kind(bool),
    "reasoning_effort": one_of(*EFFORTS),
    "chat_template_kwargs": _options,
    "add_generation_prompt": kind(bool),
    "continue_final_message": kind(bool),
    "thinking_token_budget": whole(0, (1 << 31) - 1),
    "image_budget": _COUNT,
    "frames": _COUNT,
    "audio_too_long": one_of(CUT, REFUSE),
    "add_special_tokens": _unsupported(False),
    "best_of": _COUNT,
}


def _prompts(value: Any, name: str) -> tuple[Any, ...]:
    if isinstance(value, str):
        return (value,)
    kind(list)(value, name)
    kinds = {*map(type, value)}
    if value and kinds <= {int, bool}:
        return (value,)
    if not (kinds <= {str} or kinds <= {list}):
        raise bad(name, "must be a text, a list of texts, of ids, or of lists of ids")
    return tuple(listed(MOST_PROMPTS, 1)(value, name))


COMPLETIONS: Mapping[str, Read] = {
    **COMMON,
    "prompt": _prompts,
    "add_special_tokens": kind(bool),
    "logprobs": whole(0, MOST_TOP),
    "best_of": _COUNT,
}
_OF_CHATS = _unsupported([], False, "none", {}, way="it is a field of /v1/chat/completions")
COMPLETIONS = {**dict.fromkeys(CHAT.keys() - {"messages"}, _OF_CHATS), **COMPLETIONS}

#: of /tokenize, which takes a prompt or a conversation, and of /detokenize
TOKENIZE: Mapping[str, Read] = {
    "model": kind(str),
    "chat_template": COMMON["chat_template"],
    "prompt": kind(str),
    "add_special_tokens": kind(bool),
    "return_token_strs": _unsupported(False),
}
TOKENIZE_CHAT: Mapping[str, Read] = {
    "model": kind(str),
    "chat_template": COMMON["chat_template"],
    **{k: CHAT[k] for k in ("messages", "tools", "tool_choice", "chat_template_kwargs")},
    **{k: CHAT[k] for k in ("image_budget", "frames", "audio_too_long", "reasoning_effort")},
    **{k: CHAT[k] for k in ("add_generation_prompt", "continue_final_message")},
    "add_special_tokens": _unsupported(False),
    "return_token_strs": _unsupported(False),
}
DETOKENIZE: Mapping[str, Read] = {"model": kind(str), "tokens": listed(MOST_TOKENS)}


#: fields of which a path takes one
CONTENTS = ("messages", "prompt", "tokens")


def read_fields(body: Mapping[str, Any], table: Mapping[str, Read]) -> dict[str, Any]:
    """Return the known fields that are given, each as its reader returns it; what needs another
    field is refused without it."""
    _log_unknown(body.keys() - table.keys() - HARMLESS)
    own = next(name for name in CONTENTS if name in table)
    if other := next((n for n in CONTENTS if n != own and body.get(n) is not None), None):
        raise bad(other, f"is not a field of this path, which takes {own}")
    given = {k: v for k, v in body.items() if v is not None and not _unsaid(k, v)}
    read_in = {k: read(given[k], k) for k, read in table.items() if k in given}
    found = {k: v for k, v in read_in.items() if v is not None}
    if own not in found:
        raise bad(own, "is missing")
    if "stream_options" in found and not found.get("stream"):
        raise bad("stream_options", "is for streams: give stream true, or leave it out")
    if found.get("top_logprobs") and not found.get("logprobs"):
        raise bad("top_logprobs", "needs logprobs true")
    _check_choice(found)
    if found.get("best_of", 1) > found.get("n", 1):
        raise missing("best_of", "must not be more than n")
    return found


def _log_unknown(names: Iterable[str]) -> None:
    for name in sorted({shown(name) for name in names} - _LOGGED):
        if len(_LOGGED) < MOST_LOGGED:
            _LOGGED.add(name)
            log.warning("ignored a request field that is not known: %s", name)


def _unsaid(name: str, value: Any) -> bool:
    """Whether a client means by this value that the field is absent."""
    words = {"max_tokens": -1, "max_completion_tokens": -1, "stop": ""}
    return name in words and type(value) is type(words[name]) and value == words[name]


def _check_choice(fields: Mapping[str, Any]) -> None:
    """Refuse undeclared functions, and tool choices that exclude a grammar."""
    choice, tools = chosen(fields), fields.get("tools") or ()
    declared = {_name(t, "tools") for t in tools} if choice.names else set()
    if wrong := sorted((choice.names or frozenset()) - declared):
        raise bad("tool_choice", f"names {shown(wrong[0])}, which is not one of the tools")
    forced, formed = choice.mode == "required", constraint_of(fields)
    if forced and not tools:
        raise bad("tool_choice", "needs tools, of which one can be called")
    if forced and formed:
        raise bad(formed.field, "cannot be combined with a forced call")
    if formed and formed.kind != JSON and tools and choice.mode != "none":
        raise bad(formed.field, 'cannot be combined with tools; give tool_choice "none"')
    for name in ("ignore_eos", "min_tokens"):
        if (forced or formed) and fields.get(name):
            what = formed.field if formed else "a forced call"
            raise bad(name, f"cannot be together with {what}, which has its own end")


def chosen(fields: Mapping[str, Any]) -> ToolChoice:
    """Return which calls a request allows."""
    given: ToolChoice | None = fields.get("tool_choice")
    choice = given or ToolChoice("auto" if fields.get("tools") else "none")
    many = choice.many and fields.get("parallel_tool_calls") is not False
    return replace(choice, many=many)


def as_input(error: InputError, name: str) -> InputError:
    """Return an error that names the field."""
    text = str(error)
    return error if text.startswith(name) else InputError(f"{name}: {text}")
