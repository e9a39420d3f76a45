"""Anthropic's /v1/messages, translated to chat completions: content blocks in, blocks and events
out."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from g4ir.chat import Event as ChatEvent
from g4ir.engine.output import AnswerStream
from g4ir.engine.requests import Request

from .. import request_schema as schema
from ..http_errors import Refused, bad, missing
from .parts import CALL, THOUGHT, PartsFormat
from .translation import TABLES, Body, Translation, kind_in, text_in, translated

TABLE = TABLES["messages"]
#: HTTP status -> error type; finish reason -> stop_reason; kind of part -> new content block
ERRORS: Mapping[int, str] = TABLE["errors"]
REASONS: Mapping[str, str] = TABLE["reasons"]
BLOCK_OF: Mapping[str, Body] = TABLE["blocks"]
THINKING = ("enabled", "adaptive", "disabled")


def read(original: Body) -> Translation:
    """Translate a body of /v1/messages to chat completions; `max_tokens` is required."""
    if original.get("max_tokens") is None:
        raise bad("max_tokens", "is missing")
    return count(original)


def count(original: Body) -> Translation:
    """Translate a body of /v1/messages, or of count_tokens (without `max_tokens`), to chat
    completions."""
    out = translated(Translation(original), "messages", CHANGES)
    out.names["tool_call_id"] = "tool_use_id"
    if out.messages and out.messages[-1]["role"] == "assistant":
        out.body["continue_final_message"] = True
    return out


def error_body(error: Refused) -> Body:
    """Return an error in Anthropic's format."""
    kind = ERRORS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def _system(out: Translation, value: Any, name: str) -> None:
    content = value if isinstance(value, str) else [*filter(None, _texts(value, name))]
    if content:  # an empty system prompt adds no turn
        out.add(name, "system", content)


def _texts(value: Any, where: str) -> list[str]:
    blocks = schema.LIST(value, where)
    for i, block in enumerate(blocks):
        kind_in(block, ("text",), f"{where}[{i}]")
    return [text_in(block, "text", f"{where}[{i}]") for i, block in enumerate(blocks)]


def _messages(out: Translation, value: Any, name: str) -> None:
    for i, message in enumerate(schema.listed(schema.MAX_MESSAGES, 1)(value, name)):
        where = f"{name}[{i}]"
        role = text_in(schema.OBJECT(message, where), "role", where)
        content = message.get("content")
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        table = BLOCKS["assistant" if role == "assistant" else "user"]
        parts, fields = list[Any](), Body()
        for j, block in enumerate(schema.LIST(content, f"{where}.content")):
            at = f"{where}.content[{j}]"
            part = table[kind_in(block, table, at)](block, at)
            if isinstance(part, str) or "url" in str(part.get("type")):
                parts.append(part)
            elif "tool_call_id" in part:
                out.add(at, "tool", **part)
            else:
                fields |= {k: fields[k] + v if k in fields else v for k, v in part.items()}
        if parts or fields or role == "assistant":
            out.add(where, role, parts or None, **fields)


def _text(block: Body, where: str) -> str:
    return text_in(block, "text", where)


def _image(block: Body, where: str) -> Body:
    source = schema.OBJECT(block.get("source"), f"{where}.source")
    if kind_in(source, ("base64", "url"), f"{where}.source") == "url":
        url = text_in(source, "url", f"{where}.source")
    else:
        kind, data = (text_in(source, key, f"{where}.source") for key in ("media_type", "data"))
        url = f"data:{kind};base64,{data}"
    return {"type": "image_url", "image_url": {"url": url}}


def _result(block: Body, where: str) -> Body:
    """Return a tool_result block as the fields of a tool message: `content`, a text or a list of
    texts and images, and `tool_call_id`."""
    content = block.get("content") or ""
    if not isinstance(content, str):
        table = {"text": _text, "image": _image}
        at = [f"{where}.content[{i}]" for i in range(len(schema.LIST(content, f"{where}.content")))]
        content = [table[kind_in(b, table, w)](b, w) for b, w in zip(content, at)]
    if block.get("is_error"):
        texts = [content] if isinstance(content, str) else content
        error = json.dumps({"error": "".join(t for t in texts if isinstance(t, str))})
        content = [error, *(p for p in texts if not isinstance(p, str))]
    return {"content": content, "tool_call_id": text_in(block, "tool_use_id", where)}


def _tool_use(block: Body, where: str) -> Body:
    function = {"name": text_in(block, "name", where), "arguments": block.get("input")}
    call = {"id": text_in(block, "id", where), "type": "function", "function": function}
    return {"tool_calls": [call]}


def _thinking(block: Body, where: str) -> Body:
    return {"reasoning_content": text_in(block, "thinking", where)}


BLOCKS: Mapping[str, Mapping[str, Any]] = {
    "user": {"text": _text, "image": _image, "tool_result": _result},
    "assistant": {"text": _text, "thinking": _thinking, "tool_use": _tool_use},
}


def _tools(out: Translation, value: Any, name: str) -> None:
    tools = schema.listed(schema.MAX_TOOLS)(value, name)
    out.body["tools"] = [_tool(tool, f"{name}[{i}]") for i, tool in enumerate(tools)]
    paths = {".parameters": ".input_schema"}
    out.tools = [(f"{name}[{i}]", paths) for i in range(len(tools))]


def _tool(tool: Any, where: str) -> Body:
    kind = schema.OBJECT(tool, where).get("type")
    kind_in({"type": "custom" if kind is None else kind}, ("custom",), where)
    function = {key: tool[key] for key in ("name", "description", "strict") if tool.get(key)}
    parameters = schema.OBJECT(tool.get("input_schema"), f"{where}.input_schema")
    return {"type": "function", "function": {**function, "parameters": parameters}}


def _tool_choice(out: Translation, value: Any, name: str) -> None:
    kind = kind_in(value, ("auto", "any", "tool", "none"), name)
    choice: Any = {"any": "required"}.get(kind, kind)
    if kind == "tool":
        choice = {"type": "function", "function": {"name": text_in(value, "name", name)}}
    out.body["tool_choice"] = choice
    if value.get("disable_parallel_tool_use") is not None:
        out.body["parallel_tool_calls"] = value["disable_parallel_tool_use"] is not True
        out.names["parallel_tool_calls"] = name


def _budget(out: Translation, value: Any, name: str) -> None:
    kind = kind_in(value, THINKING, name)
    out.body["chat_template_kwargs"] = {"enable_thinking": kind != "disabled"}
    out.names["chat_template_kwargs"] = name
    if kind == "enabled":
        budget = schema.integer(0)(value.get("budget_tokens"), f"{name}.budget_tokens")
        out.body["thinking_token_budget"] = budget


def _format(out: Translation, value: Any, name: str) -> None:
    """Translate the output schema; `effort` is ignored, since reasoning is only on or off."""
    format = value if name == "output_format" else schema.OBJECT(value, name).get("format")
    if format is not None:
        kind_in(format, ("json_schema",), name)
        fields = {"schema": schema.OBJECT(format.get("schema"), f"{name}.schema")}
        out.body["response_format"] = {"type": "json_schema", "json_schema": fields}


def _edits(out: Translation, value: Any, name: str) -> None:
    edits = schema.LIST(schema.OBJECT(value, name).get("edits") or [], f"{name}.edits")
    for i, edit in enumerate(edits):
        kind = str(schema.OBJECT(edit, f"{name}.edits[{i}]").get("type"))
        if not kind.startswith("clear_thinking"):
            raise missing(name, f"{kind[:60]} is not supported: prompts are never edited")


CHANGES = {"system": _system, "messages": _messages, "tools": _tools, "tool_choice": _tool_choice}
CHANGES |= {"thinking": _budget, "context_management": _edits}
CHANGES |= dict.fromkeys(("output_config", "output_format"), _format)


class MessageFormat(PartsFormat):
    """Formats one answer as content blocks, complete or as events."""

    alive = 'event: ping\ndata: {"type": "ping"}\n\n'

    def __init__(self, fields: schema.Fields, requests: Sequence[Request], original: Body) -> None:
        self.tokens, self.model = len(requests[0].tokens), fields["model"]
        self.id = f"msg_{secrets.token_hex(12)}"
        self.content: list[Body] = []
        self._json = ""

    def _message(self, usage: Body, stop: str | None = None, by: str | None = None) -> Body:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self.model}
        ended = {"stop_reason": stop, "stop_sequence": by}
        return {**head, "content": self.content, **ended, "usage": usage}

    def first(self, count: int) -> list[Body]:
        message = self._message(_usage({"prompt_tokens": self.tokens, "completion_tokens": 0}))
        return [{"type": "message_start", "message": message}]

    def _at(self) -> Body:
        return {"index": len(self.content) - 1}

    def opened(self, part: ChatEvent) -> list[Body]:
        self._json, block = "", dict(BLOCK_OF[self.kind])
        if self.kind == CALL:
            block |= {"id": f"toolu_{secrets.token_hex(12)}", "name": part.name, "input": {}}
        self.content.append(block)
        return [{"type": "content_block_start", **self._at(), "content_block": dict(block)}]

    def more(self, text: str, a: AnswerStream) -> list[Body]:
        if not text:
            return []
        if self.kind == CALL:
            self._json += text
            delta = {"type": "input_json_delta", "partial_json": text}
        else:
            name = "thinking" if self.kind == THOUGHT else "text"
            self.content[-1][name] += text
            delta = {"type": f"{name}_delta", name: text}
        return [{"type": "content_block_delta", **self._at(), "delta": delta}]

    def ended(self, cut: bool) -> list[Body]:
        if self.kind == CALL:
            self.content[-1]["input"] = _value(self._json)
        return [{"type": "content_block_stop", **self._at()}]

    def _stop(self, a: AnswerStream) -> Body:
        reason = "stop_sequence" if a.stopped_by else REASONS[str(a.finish)]
        return {"stop_reason": reason, "stop_sequence": a.stopped_by}

    def last(self, answers: list[AnswerStream], usage: Mapping[str, Any]) -> list[Body]:
        delta = {"type": "message_delta", "delta": self._stop(answers[0]), "usage": _usage(usage)}
        return [delta, {"type": "message_stop"}]

    def message(self, a: AnswerStream, usage: Mapping[str, Any]) -> Body:
        return self._message(_usage(usage)) | self._stop(a)

    def failed(self, error: Refused) -> list[Body]:
        return [error_body(error)]


def _value(text: str) -> Any:
    """Return a call's arguments; for a truncated or unparsable call {"partial_json": its text}."""
    try:
        return json.loads(text or "{}")
    except ValueError:
        return {"partial_json": text}


def _usage(usage: Mapping[str, Any]) -> Body:
    """Return Anthropic's `usage`, in which `input_tokens` excludes tokens from the prefix cache."""
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    counts = {"input_tokens": usage["prompt_tokens"] - cached, "cache_read_input_tokens": cached}
    return counts | {"cache_creation_input_tokens": 0, "output_tokens": usage["completion_tokens"]}
