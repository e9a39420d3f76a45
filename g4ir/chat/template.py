"""Chat templates: a checkpoint's own, or `default.jinja` in the form of the variant.

template = Template.open("checkpoint")        # its chat_template.jinja, else the built-in one
text     = render(messages, tools, template, enable_thinking=True)
prompt   = make_prompt(messages, tools, template)     # checked, and safe to be tokenised
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from g4ir.errors import InputError
from g4ir.weights.tensorfile import parse_json

from .messages import (
    ASSISTANT,
    TOOL,
    Call,
    Conversation,
    Message,
    Response,
    check_pairs,
    joined,
    read_messages,
)
from .prompt import Prompt, guard
from .sandbox import TemplateError
from .sandbox import render as render_source
from .special_tokens import (
    BOS,
    CHANNEL,
    CHANNEL_END,
    MODEL,
    RESPONSE,
    THOUGHT,
    TURN,
    TURN_END,
)
from .tools import lower, read_tools

FILE, CONFIG = "chat_template.jinja", "tokenizer_config.json"
BUILT_IN = "built-in"
#: `large` closes an empty reasoning channel in the generation prompt if thinking is off
SMALL, LARGE = "small", "large"
FORMS = (SMALL, LARGE)
#: options of the built-in template
OPTIONS = ("enable_thinking", "preserve_thinking", "add_generation_prompt")
#: bytes of a template; published ones have 20 thousand
LARGEST = 1 << 20


@dataclass(frozen=True)
class Template:
    """A chat template. `form` small or large, `origin` its file or `built-in`, `sha256` of a file's
    template, `note` a message for the user."""

    form: str
    origin: str
    source: str = field(repr=False)
    sha256: str | None = None
    note: str | None = None
    #: variables beside the conversation and its options
    variables: tuple[tuple[str, Any], ...] = (("bos_token", BOS),)

    @staticmethod
    def built_in(form: str, note: str | None = None) -> Template:
        """Return the built-in template; InputError for another form than small and large."""
        if form not in FORMS:
            known = ", ".join(FORMS)
            raise InputError(f"chat form {form!r}: must be one of {known}, or a Template")
        variables = (("bos_token", BOS), ("empty_thought", form == LARGE))
        return Template(form, BUILT_IN, _default(), note=note, variables=variables)

    @staticmethod
    def open(folder: str | Path, otherwise: str = SMALL) -> Template:
        """Read the template of a checkpoint or an engine; the built-in form `otherwise`, with a
        note, if it has none. InputError for one that is no template."""
        folder = Path(folder)
        if not folder.is_dir():
            raise InputError(f"{folder}: no such directory, so no chat template")
        config = _config(folder / CONFIG)
        path, source = folder / FILE, None
        if path.is_file():
            source = _read(path)
        elif (given := config.get("chat_template")) is not None:
            path = folder / CONFIG
            source = _of_config(given, path)
        if source is None:
            note = f"{folder} has no chat template: the built-in form {otherwise!r} is used"
            return Template.built_in(otherwise, note)
        digest = hashlib.sha256(source.encode()).hexdigest()
        tokens = {"bos_token": BOS} | {k: v for k, v in _token_strings(config).items() if v}
        made = Template(otherwise, str(path), source, digest, None, (*tokens.items(),))
        return replace(made, form=_form_of(made))

    @cached_property
    def folds(self) -> bool:
        """Whether answers of tools are written as `tool_responses` of the message that called: a
        template older than the role `tool` knows them there alone."""
        if self.origin == BUILT_IN:
            return False
        call, answer = Call("f", {}, "1"), Message(TOOL, "answer", call_id="1", name="f")
        asked = Conversation((Message("user", "?"), Message(ASSISTANT, calls=(call,)), answer))
        return not self._answers(asked) and self._answers(_folded(asked))

    def _answers(self, asked: Conversation) -> bool:
        """Whether the template writes the answer of a tool behind its call, in the native form."""
        try:
            text = self._text(asked.messages, {})
        except InputError:
            return False
        return RESPONSE in text.partition("call:f")[2].partition("answer")[0]

    def describe(self) -> dict[str, Any]:
        """Return which template it is, as values of JSON."""
        return {"template": self.origin, "sha256": self.sha256, "form": self.form}

    def write(self, conversation: Conversation, options: Mapping[str, Any]) -> str:
        """Return the prompt of a conversation. InputError if the template refuses it."""
        unknown = options.keys() - set(OPTIONS) if self.origin == BUILT_IN else ()
        if unknown:
            known = ", ".join(OPTIONS)
            raise InputError(
                f"the built-in template has no option {min(unknown)!r}; it has {known}"
            )
        written = _folded(conversation) if self.folds else conversation
        text = self._text(written.messages, {"tools": [*written.tools] or None, **options})
        if not options.get("add_generation_prompt", True) or not text.endswith(f"{TURN_END}\n"):
            return text
        # After a tool's answer and a text, published templates open no turn.
        closes = self.form == LARGE and not options.get("enable_thinking")
        return text + TURN + MODEL + (CHANNEL + THOUGHT + CHANNEL_END if closes else "")

    def _text(self, messages: tuple[Message, ...], options: Mapping[str, Any]) -> str:
        variables = {
            **dict(self.variables),
            "messages": [_as_given(m) for m in messages],
            "tools": None,
            "add_generation_prompt": True,
            **options,
        }
        try:
            return render_source(self.source, self.origin, variables)
        except TemplateError as e:
            at = f"{self.origin}, line {e.line}" if e.line else self.origin
            raise InputError(f"{at}: the template refuses this conversation: {e}") from e
        except (TypeError, ValueError) as e:
            raise InputError(f"{self.origin}: an option of the template is not JSON: {e}") from e


@cache
def _default() -> str:
    return Path(__file__).with_name("default.jinja").read_text(encoding="utf-8")


def _form_of(template: Template) -> str:
    """Return which of the two forms a template has: whether it closes the reasoning channel that
    thinking off leaves empty. One that refuses the question is taken for small."""
    question = Conversation((Message("user", "?"),))
    try:
        text = template.write(question, {"enable_thinking": False})
    except InputError as e:
        if "line " in str(e).partition(": ")[0]:  # a mistake of the file, in each conversation
            raise
        return SMALL
    return LARGE if text.rstrip().endswith(CHANNEL_END) else SMALL


def _read(path: Path) -> str:
    with path.open("rb") as file:
        raw = file.read(LARGEST + 1)
    if len(raw) > LARGEST:
        raise InputError(f"{path}: more than {LARGEST} bytes are no chat template")
    try:
        return raw.decode()
    except UnicodeDecodeError as e:
        raise InputError(f"{path}: not UTF-8 at byte {e.start}") from None


def _config(path: Path) -> dict[str, Any]:
    return parse_json(path, path.read_bytes()) if path.is_file() else {}


def _of_config(given: Any, path: Path) -> str:
    """Return the template of a tokenizer's config: a text, or the one called default in a list."""
    if isinstance(given, list):
        named = {t.get("name"): t.get("template") for t in given if isinstance(t, dict)}
        given = named.get("default")
    if not isinstance(given, str) or len(given) > LARGEST:
        raise InputError(f"{path}: chat_template must be a text, or a list with one named default")
    return given


def _token_strings(config: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the tokens that a config names: `bos_token` and others."""
    found = {k: v for k, v in config.items() if k.endswith("_token")}
    texts = {k: v.get("content") if isinstance(v, dict) else v for k, v in found.items()}
    return {k: v for k, v in texts.items() if isinstance(v, str)}


def _folded(conversation: Conversation) -> Conversation:
    """Return a conversation with the answers of tools in the message that called."""
    out = list[Message]()
    for i, message in enumerate(conversation.messages):
        if message.calls and not message.responses:
            answers = conversation.answers(i)
            responses = tuple(Response(message.answered_by(a), a.text) for a in answers)
            message = replace(message, responses=responses)
        if message.role != TOOL:
            out.append(message)
    return Conversation(tuple(out), conversation.tools)


def _as_given(message: Message) -> dict[str, Any]:
    """Return a message as templates take it: the OpenAI form with decoded arguments."""
    out: dict[str, Any] = {"role": message.role, "content": _content(message)}
    if message.reasoning:
        out["reasoning"] = out["reasoning_content"] = message.reasoning
    if message.calls:
        out["tool_calls"] = [
            {"type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            | ({} if c.id is None else {"id": c.id})
            for c in message.calls
        ]
    if message.responses:
        out["tool_responses"] = [{"name": r.name, "response": r.value} for r in message.responses]
    named = {"tool_call_id": message.call_id, "name": message.name}
    return out | {k: v for k, v in named.items() if v is not None}


def _content(message: Message) -> Any:
    if not isinstance(message.content, tuple):
        return message.content
    return [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": part.kind}
        for part in message.content
    ]


# --- the two ways to a prompt -----------------------------------------------------------------


def as_template(form: str | Template) -> Template:
    """Return the template that a form names."""
    return form if isinstance(form, Template) else Template.built_in(form)


def render(messages: Any, tools: Any = None, form: str | Template = "small", **options: Any) -> str:
    """Return the text that a template makes of messages, which are read but not paired.

    `options`: enable_thinking, preserve_thinking, add_generation_prompt, and what a checkpoint's
    own template knows beside them. InputError names the message or tool and the fix.
    """
    conversation = Conversation(read_messages(messages), read_tools(tools))
    return _prompt(conversation, as_template(form), options).text


def make_prompt(
    messages: Any,
    tools: Any = None,
    form: str | Template = "small",
    *,
    continued: bool = False,
    **options: Any,
) -> Prompt:
    """Return the prompt of a conversation that a model can answer.

    As `render`, and: calls and answers are paired, neighbouring texts of a message are one, schemas
    are lowered, and contents are marked, so that they never become control tokens. `continued`: the
    last message is the head of the answer.
    """
    checked = Conversation(joined(read_messages(messages)), read_tools(tools))
    check_pairs(checked)
    lowered, said = lower(checked.tools)
    if continued:
        _check_head(checked.messages[-1])
        options["add_generation_prompt"] = False
    prompt = _prompt(Conversation(checked.messages, lowered), as_template(form), options, said)
    prompt.check_media()
    return prompt.cut(f"{TURN_END}\n") if continued else prompt


def _check_head(last: Message) -> None:
    if last.role != ASSISTANT or last.calls or not last.content:
        raise InputError("messages[-1]: to be continued it must be the assistant's, with text only")


def _prompt(
    conversation: Conversation,
    template: Template,
    options: Mapping[str, Any],
    said: tuple[str, ...] = (),
) -> Prompt:
    marked, options, mark = guard(conversation, options, template.source)
    text = template.write(marked, options)
    return Prompt(text, mark, conversation.media, said)
