"""OpenAI's /v1/responses, translated to chat completions: items in, items and typed events out.
Stateless: each request contains the full conversation."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from g4ir.chat import Event as ChatEvent
from g4ir.chat import call_id
from g4ir.chat.messages import PARTS, shown
from g4ir.engine.output import AnswerStream
from g4ir.engine.requests import Request

from .. import request_schema as schema
from ..http_errors import SERVER, Refused, bad, missing
from ..json_schema import LARK
from .parts import CALL, CONTENT, JsonText, PartsFormat
from .translation import TABLES, Body, Translation, kind_in, text_in, translated

#: name of the only argument of a custom tool
INPUT = "input"
#: types of tools, the type of a group of tools, and ignored types (Codex declares web search by
#: default)
TOOLS, NAMESPACE, IGNORED_TOOLS = ("function", "custom"), "namespace", ("web_search",)
#: path in a custom tool's schema -> the client's path
PATHS = {f".parameters.properties.{INPUT}.pattern": ".format.definition"}
PATHS |= {f".parameters.{LARK}": ".format.definition"}
#: types of text parts, from clients and from the model
TEXTS = ("input_text", "output_text", "text")


def read(original: Body) -> Translation:
    """Translate a body of /v1/responses to chat completions."""
    out = translated(Translation(original), "responses", CHANGES)
    out.names |= {"messages": "input", "tool_call_id": "call_id"}
    return out


def _instructions(out: Translation, value: Any, name: str) -> None:
    if text := schema.TEXT(value, name):  # empty instructions add no turn
        out.add(name, "system", text)


def _input(out: Translation, value: Any, name: str) -> None:
    if isinstance(value, str):
        out.add(name, "user", value)
        return
    for i, item in enumerate(schema.listed(schema.MAX_MESSAGES, 1)(value, name)):
        where = f"{name}[{i}]"
        if "type" not in schema.OBJECT(item, where) and "role" in item:
            item = {**item, "type": "message"}
        ITEMS[kind_in(item, ITEMS, where)](out, item, where)


def _message(out: Translation, item: Body, where: str) -> None:
    role, content = item.get("role"), _content(item.get("content"), f"{where}.content")
    if role != "assistant":
        out.add(where, text_in(item, "role", where), content)
        return
    message = out.assistant(where)
    before, new = (c if isinstance(c, list) else [c] for c in (message["content"] or [], content))
    message["content"] = [*before, *new] if before else content


def _content(content: Any, where: str) -> Any:
    """Return a content for chat completions: a text, or a list of parts."""
    if isinstance(content, str):
        return content
    return [_part(p, f"{where}[{i}]") for i, p in enumerate(schema.LIST(content, where))]


def _part(part: Any, where: str) -> Any:
    kind = kind_in(part, {*TEXTS, "refusal", "input_image", *PARTS}, where)
    if kind in TEXTS:
        return text_in(part, "text", where)
    if kind != "input_image":
        return part
    if part.get("image_url") is None:
        raise missing(where, "give the image as image_url; this server stores no files")
    image = {"url": part["image_url"], "detail": part.get("detail")}
    return {"type": "image_url", "image_url": image}


def _reasoning(out: Translation, item: Body, where: str) -> None:
    parts = schema.LIST(item.get("content") or [], f"{where}.content")
    text = "".join(text_in(schema.OBJECT(p, where), "text", where) for p in parts)
    if text:
        message = out.assistant(where)
        message["reasoning_content"] = message.get("reasoning_content", "") + text


def _call(out: Translation, item: Body, where: str) -> None:
    arguments = item.get("arguments")
    if item["type"] == "custom_tool_call":
        arguments = {INPUT: text_in(item, "input", where)}
    elif item.get("status") == "incomplete":  # truncated
        arguments = {"partial_json": text_in(item, "arguments", where)}
    function = {"name": _spaced(item, where), "arguments": arguments}
    call = {"id": text_in(item, "call_id", where), "type": "function", "function": function}
    out.assistant(where).setdefault("tool_calls", []).append(call)


def _output(out: Translation, item: Body, where: str) -> None:
    content = _content(item.get("output"), f"{where}.output")
    out.add(where, "tool", content, tool_call_id=text_in(item, "call_id", where))


ITEMS = {"message": _message, "reasoning": _reasoning}
ITEMS |= dict.fromkeys(("function_call", "custom_tool_call"), _call)
ITEMS |= dict.fromkeys(("function_call_output", "custom_tool_call_output"), _output)


def _tools(out: Translation, value: Any, name: str) -> None:
    functions, declared = [], dict[str, str]()
    for tool, where in _flat(value, name):
        functions.append(function := _tool(tool, where))
        out.tools.append((where, PATHS if tool["type"] == "custom" else {}))
        called = function["function"]["name"]
        if (first := declared.setdefault(called, where)) != where:
            raise bad(where, f"{shown(called)} is already the name of {first}; rename one of them")
    out.body["tools"] = functions


def _flat(value: Any, name: str) -> Iterator[tuple[Body, str]]:
    """Yield (tool, path) of the declared functions and custom tools; those within a namespace get
    its name (key `namespace`) and its description before their own."""
    for i, tool in enumerate(schema.listed(schema.MAX_TOOLS)(value, name)):
        where = f"{name}[{i}]"
        kind = kind_in(tool, (*TOOLS, NAMESPACE, *IGNORED_TOOLS), where)
        if kind in TOOLS:
            yield tool, where
        elif kind == NAMESPACE:
            inner = schema.listed(schema.MAX_TOOLS, 1)(tool.get("tools"), f"{where}.tools")
            for j, one in enumerate(inner):
                kind_in(one, TOOLS, at := f"{where}.tools[{j}]")
                parts = [(tool, where), (one, at)]
                texts = [text_in(d, "description", w) for d, w in parts if d.get("description")]
                space = {NAMESPACE: text_in(tool, "name", where), "description": "\n".join(texts)}
                yield {**one, **space}, at


def _spaced(tool: Body, where: str) -> str:
    """Return a tool's name, prefixed by its namespace if it has one."""
    space = tool.get(NAMESPACE)
    name = text_in(tool, "name", where)
    return name if space is None else f"{text_in(tool, NAMESPACE, where)}.{name}"


def _tool(tool: Body, where: str) -> Body:
    names = ("description", "parameters", "strict")
    function = {key: tool[key] for key in names if tool.get(key) is not None}
    function["name"] = _spaced(tool, where)
    if tool["type"] == "custom":
        text = _format_of(tool.get("format") or {"type": "text"}, f"{where}.format")
        parameters = {"type": "object", "properties": {INPUT: text}, "required": [INPUT]}
        function |= {"parameters": parameters, "strict": len(text) > 1}
    return {"type": "function", "function": function}


def _format_of(value: Any, where: str) -> Body:
    if kind_in(value, ("text", "grammar"), where) == "text":
        return {"type": "string"}
    syntax = kind_in(value, ("lark", "regex"), where, "syntax")
    definition = text_in(value, "definition", where)
    fields = {LARK: definition} if syntax == "lark" else {"pattern": f"^(?:{definition})$"}
    return {"type": "string", **fields}


def _tool_choice(out: Translation, value: Any, name: str) -> None:
    if isinstance(value, dict):
        kind_in(value, ("function", "custom"), name)
        called = _spaced(value, name) if NAMESPACE in value else value.get("name")
        value = {"type": "function", "function": {"name": called}}
    out.body["tool_choice"] = value


def _text(out: Translation, value: Any, name: str) -> None:
    format = schema.OBJECT(schema.OBJECT(value, name).get("format") or {"type": "text"}, name)
    fields = {key: format[key] for key in ("name", "schema", "strict") if key in format}
    out.body["response_format"] = {"type": format.get("type"), "json_schema": fields}
    if value.get("verbosity") is not None:
        out.body["verbosity"] = value["verbosity"]
        out.names["verbosity"] = f"{name}.verbosity"


def _effort(out: Translation, value: Any, name: str) -> None:
    """Translate the reasoning effort; `summary` is ignored, as reasoning is returned in full."""
    if (effort := schema.OBJECT(value, name).get("effort")) is not None:
        out.body["reasoning_effort"] = effort


def _include(out: Translation, value: Any, name: str) -> None:
    options = TABLES["responses"]["include"]
    if wrong := next((v for v in schema.LIST(value, name) if v not in options), None):
        expected = ", ".join(options)
        raise missing(name, f"{shown(wrong)} is not supported; expected one of {expected}")
    out.body["logprobs"] = "message.output_text.logprobs" in value


CHANGES = {"instructions": _instructions, "input": _input, "tools": _tools, "text": _text}
CHANGES |= {"tool_choice": _tool_choice, "reasoning": _effort, "include": _include}


TABLE = TABLES["responses"]
#: item type -> prefix of ids, stem of the names of its text events, field of the text
TYPES: Mapping[str, list[str]] = TABLE["types"]
#: kind of part -> its item (ITEM_OF), and the content part of that item (CONTENT_OF)
ITEM_OF: Mapping[str, Body] = TABLE["items"]
CONTENT_OF: Mapping[str, Body] = TABLE["contents"]
#: defaults of the request's fields that a response repeats
UNSAID: Mapping[str, Any] = TABLE["unsaid"]


class ResponsesFormat(PartsFormat):
    """Formats one answer as items, complete or as events with sequence numbers."""

    def __init__(self, fields: schema.Fields, requests: Sequence[Request], original: Body) -> None:
        declared = original.get("tools") or []
        self.model = fields["model"]
        tools = [t for t in declared if t["type"] not in IGNORED_TOOLS]
        self.original = {**original, "tools": tools}
        self.id, self.created = f"resp_{secrets.token_hex(24)}", int(time.time())
        self.output: list[Body] = []
        #: tool name in the prompt -> declared tool
        self._tools = {_spaced(tool, where): tool for tool, where in _flat(declared, "tools")}
        self._count = 0
        self._input: JsonText | None = None

    def _response(self, status: str, **more: Any) -> Body:
        echoed = {k: self.original[k] for k in UNSAID if self.original.get(k) is not None}
        head = {"id": self.id, "object": "response", "created_at": self.created, "status": status}
        head |= {"model": self.model, "output": [*self.output], "store": False, "usage": None}
        head |= dict.fromkeys(("error", "incomplete_details", "previous_response_id"))
        return {**head, "background": False, "truncation": "disabled", **UNSAID, **echoed, **more}

    def _event(self, kind: str, **more: Any) -> Body:
        self._count += 1
        return {"type": f"response.{kind}", "sequence_number": self._count - 1, **more}

    def first(self, count: int) -> list[Body]:
        kinds = ("created", "in_progress")
        return [self._event(k, response=self._response("in_progress")) for k in kinds]

    def opened(self, part: ChatEvent) -> list[Body]:
        """Return the events that open an item and its content."""
        item = {"id": "", **ITEM_OF[self.kind], "status": "in_progress"}
        if self.kind == CALL:
            tool = self._tools.get(part.name or "", {"type": "function", "name": part.name})
            custom = tool["type"] == "custom"
            item["type"] = "custom_tool_call" if custom else "function_call"
            item["call_id"] = call_id()
            item |= {key: tool[key] for key in ("name", NAMESPACE) if key in tool}
            item[TYPES[item["type"]][2]] = ""
            self._input = JsonText(INPUT) if custom else None
        else:
            item["content"] = []
        item["id"] = f"{TYPES[item['type']][0]}_{secrets.token_hex(24)}"
        self.output.append(item)
        at = {"output_index": len(self.output) - 1}
        out = [self._event("output_item.added", item=copied(item), **at)]
        if self.kind != CALL:
            item["content"] = [dict(CONTENT_OF[self.kind])]
            item["content"][0] |= {"logprobs": []} if self.kind == CONTENT else {}
            out.append(self._event("content_part.added", **self._at(), part=dict(self._open_text)))
        return out

    @property
    def _open_text(self) -> Body:
        """The object with the open item's text: its content part, or the item of a call."""
        item = self.output[-1]
        return item["content"][0] if "content" in item else item

    def _at(self) -> Body:
        item, index = self.output[-1], len(self.output) - 1
        part = {"content_index": 0} if "content" in item else {}
        return {"item_id": item["id"], "output_index": index, **part}

    def more(self, text: str, a: AnswerStream) -> list[Body]:
        text = self._input.feed(text) if self._input else text
        if not text:
            return []
        _, event, key = TYPES[self.output[-1]["type"]]
        holder, more = self._open_text, Body()
        holder[key] += text
        if "logprobs" in holder:
            more["logprobs"] = a.take_logprobs(content=True)
            holder["logprobs"] += more["logprobs"]
        return [self._event(f"{event}.delta", **self._at(), delta=text, **more)]

    def ended(self, cut: bool) -> list[Body]:
        item, holder = self.output[-1], self._open_text
        _, event, key = TYPES[item["type"]]
        if self._input:  # the raw arguments, if they are not an object with one string
            holder[key] += self._input.remainder()
            self._input = None
        item["status"] = "incomplete" if cut else "completed"
        done = {k: holder[k] for k in (key, "logprobs", "name") if k in holder}
        out = [self._event(f"{event}.done", **self._at(), **done)]
        if "content" in item:
            out.append(self._event("content_part.done", **self._at(), part=dict(holder)))
        end = {"output_index": len(self.output) - 1, "item": copied(item)}
        return [*out, self._event("output_item.done", **end)]

    def message(self, a: AnswerStream, usage: Mapping[str, Any]) -> Body:
        if a.finish == "length":
            why = {"reason": "max_output_tokens"}
            return self._response("incomplete", usage=_usage(usage), incomplete_details=why)
        return self._response("completed", usage=_usage(usage), completed_at=int(time.time()))

    def last(self, answers: list[AnswerStream], usage: Mapping[str, Any]) -> list[Body]:
        response = self.message(answers[0], usage)
        return [self._event(response["status"], response=response)]

    def failed(self, error: Refused) -> list[Body]:
        code = error.type if error.type == SERVER else error.code or error.type
        values = {"error": {"code": code, "message": error.message}}
        return [self._event("failed", response=self._response("failed", **values))]


def copied(item: Body) -> Body:
    """Return a copy of an item and its content parts, since the original changes later."""
    return {k: [dict(p) for p in v] if k == "content" else v for k, v in item.items()}


def _usage(usage: Mapping[str, Any]) -> Body:
    details = usage["completion_tokens_details"]
    cached = {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"]}
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {**cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": details["reasoning_tokens"]},
        "total_tokens": usage["total_tokens"],
    }
