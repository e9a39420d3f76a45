"""Ollama's /api/chat and /api/generate, translated to chat completions: messages in, lines of JSON
out; and its descriptions of models."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from g4ir.chat import Event as ChatEvent
from g4ir.chat import Template
from g4ir.engine.engine import Engine
from g4ir.engine.output import AnswerStream, is_call
from g4ir.engine.requests import Request, RequestHandle
from g4ir.ops.types import TORCH_NAMES
from g4ir.plan.count import counts
from g4ir.spec.parts import CHAT_FORMATS
from g4ir.spec.reader import did_you_mean

from .. import request_schema as schema
from ..http_errors import Refused, bad, missing
from .parts import AnswerFormat
from .translation import TABLES, Body, Change, Translation, text_in, translated

TABLE = TABLES["ollama"]
#: option -> chat field; options without effect on answers; neutral values of unsupported ones
OPTIONS, HARMLESS, NEUTRAL = (TABLE["options"][k] for k in ("becomes", "harmless", "neutral"))
#: the default tag: ollama's clients may append it to any model name
LATEST = ":latest"


class NothingAsked(Exception):
    """Raised for a request without a prompt, by which ollama's clients load a model; here the model
    is already loaded. `body`: the answer."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body


def chat(original: Body) -> Translation:
    """Translate an /api/chat body to chat completions; NothingAsked if it has no messages."""
    if not original.get("messages"):
        raise NothingAsked(_ended(original, {"message": {"role": "assistant", "content": ""}}))
    return translated(Translation(_streamed(original)), "ollama", CHANGES)


def generate(original: Body) -> Translation:
    """Translate an /api/generate body: to a chat of one turn, or, if `raw`, to a completion.
    NothingAsked if it has neither a prompt nor images."""
    prompt, images = original.get("prompt") or "", original.get("images")
    if not prompt and not images:
        raise NothingAsked(_ended(original, {"response": ""}))
    hidden = ("prompt", "images", "system", "raw")
    body = {k: v for k, v in original.items() if k not in hidden}
    out = translated(Translation(_streamed(body)), "ollama", CHANGES)
    if original.get("raw"):
        out.body["prompt"] = schema.TEXT(prompt, "prompt")
        return out
    if system := original.get("system"):
        out.add("system", "system", schema.TEXT(system, "system"))
    out.add("prompt", "user", _content({"content": prompt, "images": images}, "prompt"))
    return out


def _streamed(original: Body) -> Body:
    """Return a body in which `stream` is on by default, and the model has no tag `latest`."""
    out = {"stream": True, **original}
    if isinstance(model := out.get("model"), str):
        out["model"] = model.removesuffix(LATEST)
    return out


def model_of(body: Body) -> str | None:
    """Return the model that a body names, without the tag `latest`."""
    name = body["model"] if body.get("model") is not None else body.get("name")
    return schema.TEXT(name, "model").removesuffix(LATEST) if name is not None else None


def error_body(error: Refused) -> Body:
    return {"error": error.message}


def _messages(out: Translation, value: Any, name: str) -> None:
    unanswered = list[tuple[str, str]]()  # (id, name) of calls
    for i, message in enumerate(schema.listed(schema.MAX_MESSAGES, 1)(value, name)):
        where = f"{name}[{i}]"
        role = text_in(schema.OBJECT(message, where), "role", where)
        more = Body()
        if message.get("thinking"):
            more["reasoning_content"] = text_in(message, "thinking", where)
        if calls := message.get("tool_calls"):
            more["tool_calls"] = [
                _call(c, f"{where}.tool_calls[{j}]", f"call_{i}_{j}") for j, c in enumerate(calls)
            ]
            unanswered += [(c["id"], c["function"]["name"]) for c in more["tool_calls"]]
        if role == "tool":
            asked = message.get("tool_name") or message.get("name")
            found = next((c for c in unanswered if asked in (None, c[1])), None)
            if found is None:
                raise bad(where, "answers no tool call of the messages before it")
            unanswered.remove(found)
            more["tool_call_id"] = found[0]
        out.add(where, role, _content(message, where), **more)


def _call(call: Any, where: str, number: str) -> Body:
    function = schema.OBJECT(schema.OBJECT(call, where).get("function"), f"{where}.function")
    name = text_in(function, "name", f"{where}.function")
    arguments = schema.OBJECT(function.get("arguments") or {}, f"{where}.function.arguments")
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


def _content(message: Body, where: str) -> Any:
    """Return a message's content for chat completions: a text, or a list of its images as parts
    and the text."""
    text = schema.TEXT(message.get("content") or "", f"{where}.content")
    images = message.get("images")
    if not images:
        return text
    images = schema.LIST(images, f"{where}.images")
    urls = [schema.TEXT(data, f"{where}.images[{i}]") for i, data in enumerate(images)]
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{u}"}} for u in urls
    ]
    return [*parts, {"type": "text", "text": text}]


def _options(out: Translation, value: Any, name: str) -> None:
    for option, given in schema.OBJECT(value, name).items():
        where = f"{name}.{option}"
        if given is None or option in HARMLESS or given in NEUTRAL.get(option, ()):
            continue
        if option in NEUTRAL:
            raise missing(where, "is not supported; leave it out")
        field = OPTIONS.get(option)
        if field is None:
            raise bad(where, "is no option" + did_you_mean(option, [*OPTIONS, *HARMLESS]))
        if option != "num_predict" or given != -1:
            out.body[field], out.names[field] = given, where


def _format(out: Translation, value: Any, name: str) -> None:
    if value == "json":
        out.body["response_format"] = {"type": "json_object"}
    elif isinstance(value, dict):
        described = {"name": "answer", "schema": value}
        out.body["response_format"] = {"type": "json_schema", "json_schema": described}
    elif value != "":
        raise bad(name, 'must be "json" or a JSON schema')


def _think(out: Translation, value: Any, name: str) -> None:
    if isinstance(value, bool):
        out.body["chat_template_kwargs"] = {"enable_thinking": value}
    else:
        out.body["reasoning_effort"], out.names["reasoning_effort"] = value, name


CHANGES: Mapping[str, Change] = {
    "messages": _messages,
    "options": _options,
    "format": _format,
    "think": _think,
}


class OllamaFormat(AnswerFormat):
    """Formats one answer as lines of JSON. `chat`: as messages, else as texts."""

    alive, end = " ", ""  # keepalive: a blank before a line of JSON
    content_type = "application/x-ndjson"

    def __init__(self, fields: schema.Fields, requests: Sequence[Request], original: Body) -> None:
        self.original, self.chat = original, "messages" in original
        self._started, self._handles = time.perf_counter(), list[RequestHandle]()

    def submitted(self, handles: list[RequestHandle]) -> None:
        self._handles = handles[:]

    def _fields(self, new: Iterable[ChatEvent]) -> Body:
        """Return the fields of events: content, reasoning and tool calls."""
        text = dict.fromkeys(("content", "thought"), "")
        calls = list[Body]()
        for event in new:
            if is_call(event):
                value = event.arguments
                value = {"partial_json": event.text} if value is None else value
                calls.append({"function": {"name": event.name, "arguments": value}})
            elif event.kind in text:
                text[event.kind] += event.text
        out: Body = {"thinking": text["thought"]} if text["thought"] else {}
        out |= {"tool_calls": calls} if calls else {}
        if self.chat:
            return {"message": {"role": "assistant", "content": text["content"], **out}}
        return {"response": text["content"], **out}

    def chunks(self, a: AnswerStream, new: Iterable[ChatEvent]) -> list[Body]:
        lines = ([event] for event in new if event.text or is_call(event))
        values = [
            self._fields(line) for line in lines if is_call(line[0]) or line[0].kind != "arguments"
        ]
        return [{**_head(self.original), **value, "done": False} for value in values]

    def last(self, answers: list[AnswerStream], usage: Mapping[str, Any]) -> list[Body]:
        return [self._done(answers[0], usage, self._fields(()))]

    def complete(self, answers: Iterable[AnswerStream], usage: Mapping[str, Any]) -> Body:
        (a,) = answers
        return self._done(a, usage, self._fields(a.said))

    def _done(self, a: AnswerStream, usage: Mapping[str, Any], fields: Body) -> Body:
        """Return the last object, with counts and durations in nanoseconds."""
        total, counts = time.perf_counter() - self._started, self._handles[0].counts
        first, queued = counts.first_token_s or total, counts.queued_s or 0.0
        seconds = {
            "total": total,
            "load": 0.0,
            "prompt_eval": first - queued,
            "eval": total - first,
        }
        durations = {f"{k}_duration": max(int(v * 1e9), 0) for k, v in seconds.items()}
        tokens = {
            "prompt_eval_count": usage["prompt_tokens"],
            "eval_count": usage["completion_tokens"],
        }
        reason = "length" if a.finish == "length" else "stop"
        return _ended(self.original, fields, reason) | durations | tokens

    def failed(self, error: Refused) -> list[Body]:
        return [error_body(error)]

    def frame(self, value: Body, text: str) -> str:
        return f"{text}\n"


def _head(original: Body) -> Body:
    now = datetime.now(timezone.utc).isoformat()
    return {"model": original.get("model", ""), "created_at": now}


def _ended(original: Body, fields: Body, reason: str = "load") -> Body:
    return {**_head(original), **fields, "done": True, "done_reason": reason}


# --- models -----------------------------------------------------------------------------------


def tag(name: str, engine: Engine) -> Body:
    """Return an engine's entry of /api/tags."""
    files = [f.stat() for f in engine.path.iterdir() if f.is_file()]
    c, spec = engine.config, engine.spec
    quant = c.quant.name if c.quant else TORCH_NAMES[engine.dtype]
    modified = datetime.fromtimestamp(max(f.st_mtime for f in files), timezone.utc)
    details = {
        "parent_model": "",
        "format": c.backend,
        "family": spec.name,
        "families": [spec.name],
    }
    details |= {"parameter_size": f"{counts(spec).loaded / 1e9:.2f}B", "quantization_level": quant}
    head = {"name": name, "model": name, "modified_at": modified.isoformat()}
    size = {"size": sum(f.st_size for f in files), "digest": engine.facts.digest}
    return {**head, **size, "details": details}


def show(engine: Engine, template: Template | None = None) -> Body:
    """Return the body of /api/show for an engine; `template`: None for an encoder."""
    spec, facts = engine.spec, tag("", engine)
    info = {"context_length": engine.limits.max_seq, "embedding_length": spec.text.hidden_size}
    info |= {"block_count": spec.text.num_hidden_layers, "vocab_size": spec.text.vocab_size}
    kinds = {"image": "vision", "audio": "audio"}
    controls = CHAT_FORMATS[template.form]["controls"] if template else ()
    can = [
        "completion" if template else "embedding",
        *(n for n, c in (("tools", "call"), ("thinking", "think")) if c in controls),
    ]
    sampling = engine.defaults().sampling
    return {
        "modelfile": "",
        "parameters": "\n".join(f"{k} {v}" for k, v in sampling.items()),
        "template": template.source if template else "",
        "details": facts["details"],
        "model_info": {
            "general.architecture": spec.name,
            **{f"{spec.name}.{k}": v for k, v in info.items()},
        },
        "capabilities": [*can, *(kinds[k] for k in sorted(engine.media.kinds) if k in kinds)],
        "modified_at": facts["modified_at"],
    }
