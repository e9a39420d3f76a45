"""The format written by the program itself, for checkpoints without a template.

It makes what the published templates of 2026-07-09 make, in two forms: `large` opens and closes an
empty thought where thinking is off, as variants need that would else begin with one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from g4ir.errors import InputError

from .messages import ASSISTANT, SYSTEM, USER, Conversation, Message, without_thoughts
from .messages import TOOL as TOOL_ROLE
from .special_tokens import (
    BOS,
    CALL,
    CALL_END,
    CHANNEL,
    CHANNEL_END,
    MODEL,
    PLACEHOLDERS,
    QUOTE,
    RESPONSE,
    RESPONSE_END,
    THINK,
    THOUGHT,
    TOOL,
    TOOL_END,
    TURN,
    TURN_END,
)

SMALL, LARGE = "small", "large"
FORMS = (SMALL, LARGE)
#: option -> its default
OPTIONS = {"enable_thinking": False, "preserve_thinking": False, "add_generation_prompt": True}
#: keywords that are no property of an object which has no `properties`
OF_SCHEMA = ("description", "type", "properties", "required", "nullable")


def new_turn(form: str, thinking: bool) -> str:
    """Return how a model's turn begins."""
    empty = CHANNEL + THOUGHT + CHANNEL_END if form == LARGE and not thinking else ""
    return TURN + MODEL + empty


def written(conversation: Conversation, form: str, options: Mapping[str, Any]) -> str:
    """Return the prompt of a conversation; InputError for an option that the form does not know."""
    if unknown := options.keys() - OPTIONS.keys():
        known = ", ".join(OPTIONS)
        raise InputError(f"the built-in template has no option {min(unknown)!r}; it has {known}")
    chosen = {**OPTIONS, **options}
    thinking = bool(chosen["enable_thinking"])
    out = [BOS, *_system(conversation, thinking)]
    out += _turns(conversation, bool(chosen["preserve_thinking"]))
    if chosen["add_generation_prompt"]:
        out.append(_going_on(conversation, form, thinking))
    return "".join(out)


def _system(conversation: Conversation, thinking: bool) -> Iterator[str]:
    first = _first(conversation)
    if first is None and not thinking and not conversation.tools:
        return
    yield f"{TURN}system\n"
    if thinking:
        yield f"{THINK}\n"
    if first is not None:
        # Parts are followed by a space each, a text by nothing.
        end = "" if isinstance(first.content, str) else " "
        yield from (text.strip() + end for text in _texts(first))
    for tool in conversation.tools:
        yield f"{TOOL}{_declaration(tool['function'])}{TOOL_END}"
    yield f"{TURN_END}\n"


def _first(conversation: Conversation) -> Message | None:
    """Return the system message that begins the conversation."""
    head = conversation.messages[:1]
    return head[0] if head and head[0].role == SYSTEM else None


def _texts(message: Message) -> list[str]:
    parts = message.content if isinstance(message.content, tuple) else (message.content,)
    return [p for p in parts if isinstance(p, str)]


def _turns(conversation: Conversation, preserve: bool) -> Iterator[str]:
    messages = conversation.messages
    start = 0 if _first(conversation) is None else 1
    order = [i for i in range(start, len(messages)) if messages[i].role != TOOL_ROLE]
    asked = max((i for i in order if messages[i].role == USER), default=-1)
    for at, i in enumerate(order):
        message = messages[i]
        before = messages[order[at - 1]].role if at else None
        after = messages[order[at + 1]].role if at + 1 < len(order) else None
        model = message.role == ASSISTANT
        if not (model and before == ASSISTANT):
            yield f"{TURN}{'model' if model else message.role}\n"
        if message.thought and (i > asked or (preserve and message.calls)):
            yield f"{CHANNEL}{THOUGHT}{message.thought}\n{CHANNEL_END}"
        yield from map(_call, message.calls)
        answers = [*_answers(conversation, i)]
        yield from answers
        content = "".join(_content(message))
        yield content
        if message.calls and not answers:
            yield RESPONSE
        elif not (model and after == ASSISTANT) and (not answers or content.strip() or after):
            yield f"{TURN_END}\n"


def _content(message: Message) -> Iterator[str]:
    parts = message.content if isinstance(message.content, tuple) else (message.content or "",)
    for part in parts:
        if not isinstance(part, str):
            yield PLACEHOLDERS[part.kind]
        elif message.role == ASSISTANT:
            yield without_thoughts(part).strip()
        else:
            yield part.strip()


def _going_on(conversation: Conversation, form: str, thinking: bool) -> str:
    """Return the generation prompt: nothing in an open turn, or the thought that goes on there."""
    messages = conversation.messages
    last = max((i for i, m in enumerate(messages) if m.role != TOOL_ROLE), default=None)
    if last is not None and (last or _first(conversation) is None):
        if any(_answers(conversation, last)):
            return CHANNEL + THOUGHT if thinking else ""
        if messages[last].calls:
            return ""
    return new_turn(form, thinking)


# --- calls and answers ------------------------------------------------------------------------


def _call(call: Any) -> str:
    return f"{CALL}call:{call.name}{_value(call.arguments)}{CALL_END}"


def _answers(conversation: Conversation, index: int) -> Iterator[str]:
    """Yield what is written behind the calls of a message."""
    message = conversation.messages[index]
    for response in message.responses:
        yield _response(response.name, response.value)
    if message.responses or not message.calls:
        return
    for answer in conversation.answers(index):
        value = answer.content if answer.content is None else "".join(_texts(answer))
        holders = "".join(PLACEHOLDERS[m.kind] for m in answer.media)
        yield _response(message.answered_by(answer), value) + holders


def _response(name: str, value: Any) -> str:
    body = _value(value if isinstance(value, dict) else {"value": value})
    return f"{RESPONSE}response:{name}{body}{RESPONSE_END}"


def sorted_items(given: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the entries of an object by name, without regard to case."""
    return sorted(given.items(), key=lambda item: item[0].lower())


def _value(value: Any, key: Callable[[str], str] = str) -> str:
    """Return a value as calls, answers and declarations hold it; `key` writes the keys."""
    if value is None:
        return "null"
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return _braces(f"{key(k)}:{_value(v, key)}" for k, v in sorted_items(value))
    if isinstance(value, list | tuple):
        return f"[{','.join(_value(v, key) for v in value)}]"
    return str(value)


def _quoted(text: str) -> str:
    return f"{QUOTE}{text}{QUOTE}"


def _braces(parts: Iterable[str]) -> str:
    return "{" + ",".join(parts) + "}"


# --- declarations -----------------------------------------------------------------------------


def _declaration(function: Mapping[str, Any]) -> str:
    parts = [f"description:{_quoted(function.get('description', ''))}"]
    if parameters := function.get("parameters"):
        parts.append(f"parameters:{_braces(_parameters(parameters))}")
    if "response" in function:
        parts.append(f"response:{_braces(_answer_of(function['response']))}")
    return f"declaration:{function['name']}{_braces(parts)}"


def _parameters(schema: Mapping[str, Any]) -> Iterator[str]:
    if properties := schema.get("properties"):
        yield f"properties:{_properties(properties)}"
    if required := schema.get("required"):
        yield _required(required)
    if kind := schema.get("type"):
        yield f"type:{_type(kind)}"


def _answer_of(schema: Mapping[str, Any]) -> Iterator[str]:
    if description := schema.get("description"):
        yield f"description:{_quoted(description)}"
    yield f"type:{_type(schema.get('type', 'object'))}"


def _required(names: Iterable[str]) -> str:
    return f"required:[{','.join(map(_quoted, names))}]"


def _type(kind: Any) -> str:
    # The published templates write a list of types as Python does.
    return _quoted(("" if kind is None else str(kind)).upper())


def _properties(properties: Mapping[str, Any]) -> str:
    return _braces(f"{name}:{_braces(_property(s))}" for name, s in sorted_items(properties))


def _property(schema: Any) -> Iterator[str]:
    schema = schema if isinstance(schema, Mapping) else {}
    kind = schema.get("type")
    name = kind.upper() if isinstance(kind, str) else ""
    items, properties = schema.get("items"), schema.get("properties")
    if description := schema.get("description"):
        yield f"description:{_quoted(description)}"
    if name == "STRING" and schema.get("enum"):
        yield f"enum:{_value(schema['enum'], _quoted)}"
    if name == "ARRAY" and isinstance(items, Mapping) and items:
        yield f"items:{_braces(_items(items))}"
    if schema.get("nullable"):
        yield "nullable:true"
    if name == "OBJECT":
        if not isinstance(properties, Mapping):
            properties = {k: v for k, v in schema.items() if k not in OF_SCHEMA}
        yield f"properties:{_properties(properties)}"
        if required := schema.get("required"):
            yield _required(required)
    yield f"type:{_type(kind)}"


def _items(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys of the schema of an array's items, each as it is but for these three."""
    for key, value in sorted_items(schema):
        if value is None:
            continue
        if key == "properties":
            yield f"properties:{_properties(value)}"
        elif key == "required":
            yield _required(value)
        elif key == "type":
            kinds = value.upper() if isinstance(value, str) else [k.upper() for k in value]
            yield f"type:{_value(kinds)}"
        else:
            yield f"{key}:{_value(value, _quoted)}"
