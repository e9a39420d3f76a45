"""Chat templates: a checkpoint's own, or a built-in one (*.jinja) of the variant's chat format.

template = Template.open("checkpoint")        # its own, else the built-in one
text     = render(messages, tools, template, enable_thinking=True)
prompt   = make_prompt(messages, tools, template)     # checked, and safe to be tokenised
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from g4ir.errors import InputError
from g4ir.spec.parts import CHAT_FORMATS, CHAT_FORMS
from g4ir.weights.tensorfile import parse_json

from .messages import (
    ASSISTANT,
    LANGUAGES,
    TOOL,
    Message,
    check_pairs,
    decoded,
    joined,
    kind_of,
    media_of,
    read_messages,
    turns,
)
from .prompt import Prompt, Vocabulary, guard, with_media
from .special_tokens import (
    BOS,
    CHANNEL,
    CHANNEL_END,
    RESPONSE,
    THOUGHT,
    TURN,
    TURN_END,
    aliases,
    find_format,
)
from .tools import lower, read_tools

FILE, CONFIG, TOKENIZER = "chat_template.jinja", "tokenizer_config.json", "tokenizer.json"
BUILT_IN = "built-in"
#: `large`: the generation prompt has an empty reasoning channel if thinking is off; `small`: none
SMALL, LARGE = CHAT_FORMS[0], "large"
#: options of the built-in templates
OPTIONS = ("enable_thinking", "preserve_thinking", "add_generation_prompt")
#: maximum bytes of a template; published ones have 20 thousand
LARGEST = 1 << 20


@dataclass(frozen=True)
class Template:
    """A chat template (jinja). `form`: chat format, a key of CHAT_FORMATS; `origin`: its file or
    `built-in`; `source`: its text; `note`: a warning for users."""

    form: str
    origin: str
    source: str = field(repr=False)
    note: str | None = None
    #: variables in addition to the conversation and its options
    variables: tuple[tuple[str, Any], ...] = (("bos_token", BOS),)

    @staticmethod
    def built_in(chat_format: str, note: str | None = None) -> Template:
        """Return the built-in template of a chat format; InputError for an unknown format."""
        if chat_format not in CHAT_FORMATS:
            allowed = ", ".join(CHAT_FORMATS)
            problem = f"must be one of {allowed}, or a Template"
            raise InputError(f"chat format {chat_format!r}: {problem}")
        row = CHAT_FORMATS[chat_format]
        source = Path(__file__).with_name(row["template"]).read_text(encoding="utf-8")
        for full, text in zip(
            (TURN, TURN_END, *aliases(row)), (*row["turn"], *aliases(row).values())
        ):
            source = source.replace(full, text)
        variables = (("bos_token", BOS), *row["variables"].items())
        return Template(chat_format, BUILT_IN, source, note=note, variables=variables)

    @staticmethod
    def open(folder: str | Path, otherwise: str = SMALL) -> Template:
        """Read the template of a checkpoint or an engine directory; if it has none, return a
        built-in one: of the variant of chat format `otherwise` that the tokenizer reveals
        (`find_format`), else of `otherwise` itself, with a note. InputError for a missing folder
        or a template that cannot be read."""
        folder = Path(folder)
        if not folder.is_dir():
            raise InputError(f"{folder}: no such directory, so no chat template")
        path = folder / CONFIG
        config = parse_json(path, path.read_bytes()) if path.is_file() else {}
        if (folder / FILE).is_file():
            path = folder / FILE
            source = _read(path)
        elif (configured := config.get("chat_template")) is not None:
            source = _of_config(configured, path)
        else:
            note = (
                "the model has no chat template, so it is probably a base model, which was not "
                "trained for conversations: take an instruction-tuned one (-it), or continue "
                f"texts with `g4ir run`; the built-in template of format {otherwise!r} is used"
            )
            tokenizer = folder / TOKENIZER
            text = tokenizer.read_text("utf-8", "replace") if tokenizer.is_file() else ""
            form = find_format(otherwise, text)
            return Template.built_in(form, note if form == otherwise else None)
        otherwise = find_format(otherwise, source)
        named = {k: v for k, v in config.items() if k.endswith("_token")}
        texts = {k: v.get("content") if isinstance(v, dict) else v for k, v in named.items()}
        tokens = {"bos_token": BOS} | {k: v for k, v in texts.items() if v and isinstance(v, str)}
        template = Template(otherwise, str(path), source, None, (*tokens.items(),))
        return replace(template, form=_detect_form(template))

    @property
    def strings(self) -> dict[str, Any]:
        """The strings of its format (spec/chat_formats.yaml)."""
        return CHAT_FORMATS[self.form]

    @property
    def turn_end(self) -> str:
        """The end-of-turn token and the newline after it."""
        return f"{self.strings['turn'][1]}\n"

    @cached_property
    def folds(self) -> bool:
        """Whether tool results go into `tool_responses` of the calling message: templates older
        than the role `tool` support only that."""
        if self.origin == BUILT_IN:
            return "json_results" in self.strings
        call = {"type": "function", "function": {"name": "f", "arguments": {}}, "id": "1"}
        asked = {"role": ASSISTANT, "content": None, "tool_calls": [call]}
        answer = {"role": TOOL, "content": "answer", "tool_call_id": "1", "name": "f"}
        messages = ({"role": "user", "content": "?"}, asked, answer)
        return not self._answers(messages) and self._answers(_folded(messages))

    def _answers(self, messages: Sequence[Message]) -> bool:
        """Whether the template writes a tool's result after its call and a response token."""
        try:
            text = self._text(messages, {})
        except InputError:
            return False
        response, _ = self.strings["controls"].get("response", (RESPONSE, ""))
        return response in text.partition("call:f")[2].partition("answer")[0]

    def write(
        self, messages: Sequence[Message], tools: Sequence[Any], options: Mapping[str, Any]
    ) -> str:
        """Render the prompt of a conversation. InputError if the template refuses it or fails, has
        no place for tools, or has no such option (built-in ones)."""
        unknown = options.keys() - set(OPTIONS) if self.origin == BUILT_IN else ()
        if unknown:
            problem, allowed = f"no option {min(unknown)!r}", ", ".join(OPTIONS)
            raise InputError(f"the built-in template has {problem}; it has {allowed}")
        if tools and "tools" not in self.source:
            where = "the built-in template" if self.origin == "built-in" else self.origin
            raise InputError(f"tools: {where} has no place for them; leave them out")
        if self.folds:
            messages = _folded(messages, "json_results" in self.strings)
        elif "json_results" in self.strings:
            messages = _named(messages)
        text = self._text(messages, {"tools": [*tools] or None, **options})
        if not options.get("add_generation_prompt", True) or not text.endswith(self.turn_end):
            return text
        # After a tool result and a text, published templates leave the model's turn unopened.
        closes = self.form == LARGE and not options.get("enable_thinking")
        turn, model = self.strings["turn"][0], self.strings["model"]
        return text + turn + model + (CHANNEL + THOUGHT + CHANNEL_END if closes else "")

    def _text(self, messages: Sequence[Message], options: Mapping[str, Any]) -> str:
        variables = {
            **dict(self.variables),
            "messages": [m | {"content": _parts(m)} for m in messages],
            "tools": None,
            "add_generation_prompt": True,
            **options,
        }
        from .sandbox import RenderError, render  # importing jinja2 takes 0.1 s

        try:
            return render(self.source, self.origin, variables)
        except RenderError as e:
            at = f"{self.origin}, line {e.line}" if e.line else self.origin
            problem = "refuses this conversation" if e.refused else "cannot be rendered"
            raise InputError(f"{at}: the template {problem}: {e}") from e
        except (TypeError, ValueError) as e:
            raise InputError(f"{self.origin}: an option of the template is not JSON: {e}") from e


def _detect_form(template: Template) -> str:
    """Detect a template's chat format among those with reasoning: whether it writes an empty
    channel if thinking is off. A template that refuses the probe counts as `small`. Formats without
    reasoning stay as they are: the variant sets them."""
    if "channel" not in template.strings["controls"]:
        return template.form
    question = [{"role": "user", "content": "?"}]
    try:
        text = template.write(question, (), {"enable_thinking": False})
    except InputError as e:
        if "line " in str(e).partition(": ")[0]:  # an error in the template itself
            raise
        return SMALL
    return LARGE if text.rstrip().endswith(CHANNEL_END) else SMALL


def _read(path: Path) -> str:
    with path.open("rb") as file:
        raw = file.read(LARGEST + 1)
    if len(raw) > LARGEST:
        raise InputError(f"{path}: a chat template has at most {LARGEST} bytes")
    try:
        return raw.decode()
    except UnicodeDecodeError as e:
        raise InputError(f"{path}: not UTF-8 at byte {e.start}") from None


def _of_config(value: Any, path: Path) -> str:
    """Return the template of a tokenizer's config: a text, or the one called default in a list."""
    if isinstance(value, list):
        named = {t.get("name"): t.get("template") for t in value if isinstance(t, dict)}
        value = named.get("default")
    if not isinstance(value, str) or len(value) > LARGEST:
        expected = f"a text of at most {LARGEST} characters, or a list with one named default"
        raise InputError(f"{path}: chat_template must be {expected}")
    return value


def _folded(messages: Sequence[Message], decode: bool = False) -> list[Message]:
    """Move tool results into the calling messages; `decode` those that are JSON objects."""
    out = list[Message]()
    for message, answers in turns(messages):
        if message.get("tool_calls") and not message.get("tool_responses"):
            responses = [_response(message["tool_calls"], a, decode) for a in answers]
            message = message | {"tool_responses": responses}
        out.append(message)
    return out


def _named(messages: Sequence[Message]) -> list[Message]:
    """Give tool messages without a name that of their call, found by its id; else `unknown`."""
    calls = {c.get("id"): c["function"] for m in messages for c in m.get("tool_calls") or ()}
    names = {id: function["name"] for id, function in calls.items()}
    return [
        m if m["role"] != TOOL else {"name": names.get(m.get("tool_call_id"), "unknown"), **m}
        for m in messages
    ]


def _response(calls: Sequence[Message], answer: Message, decode: bool) -> dict[str, Any]:
    """Return an entry of `tool_responses`: a tool result with the name of the call that has its id,
    else the message's own name, else `unknown`. `decode`: a JSON object is decoded."""
    matching = [c for c in calls if c.get("id") == answer.get("tool_call_id")]
    name = matching[-1]["function"]["name"] if matching else answer.get("name") or "unknown"
    content = answer["content"] or ""
    response: Any = "".join(part for part in content if isinstance(part, str))
    if decode and response.lstrip().startswith("{"):
        with suppress(InputError):
            response = decoded(response, "content")
    return {"name": name, "response": response}


def _parts(message: Message) -> Any:
    content, languages = message["content"], {k: message[k] for k in LANGUAGES if k in message}
    if languages and isinstance(content, str):
        content = [content]
    if not isinstance(content, list):
        return content
    text = {"type": "text", **languages}
    return [{**text, "text": p} if isinstance(p, str) else {"type": p.kind} for p in content]


def render(messages: Any, tools: Any = None, form: str | Template = "small", **options: Any) -> str:
    """Return messages rendered with a template; tool calls and results need not be paired. `form`:
    a Template, or the chat format of a built-in one.

    `options`: enable_thinking, preserve_thinking, add_generation_prompt, and other variables of a
    checkpoint's own template. InputError names the message or tool and the fix.
    """
    return _prompt(read_messages(messages), read_tools(tools), _template(form), options).text


def make_prompt(
    messages: Any,
    tools: Any = None,
    form: str | Template = "small",
    *,
    continued: bool = False,
    **options: Any,
) -> Prompt:
    """Return the prompt of a conversation that a model can answer. Arguments as for `render`.

    Unlike there, tool calls and results must be paired, adjacent text parts of a message are
    joined, schemas are lowered, and there must be one placeholder per medium. `continued`: the last
    message is the beginning of the answer.
    """
    checked, declared = joined(read_messages(messages)), read_tools(tools)
    check_pairs(checked)
    last = checked[-1]
    if continued:
        if last["role"] != ASSISTANT or last.get("tool_calls") or not last["content"]:
            problem = "only an assistant message with text and without calls can be continued"
            raise InputError(f"messages[-1]: {problem}")
        options["add_generation_prompt"] = False
    template = _template(form)
    prompt = _prompt(checked, lower(declared)[0], template, options)
    prompt.check_media()
    head = prompt.marked.removesuffix(template.turn_end)
    return replace(prompt, marked=head) if continued else prompt


def _template(template: str | Template) -> Template:
    return template if isinstance(template, Template) else Template.built_in(template)


def _prompt(
    messages: Sequence[Message],
    tools: Sequence[Any],
    template: Template,
    options: Mapping[str, Any],
) -> Prompt:
    marked, mark = guard((messages, tools, options), template.source)
    return Prompt(template.write(*marked), mark, media_of(messages))


def open_chat(
    folder: Path, tokenizer: Any, chat_format: str, label: str
) -> tuple[Template, Vocabulary]:
    """Return a folder's chat template, or the built-in one of `chat_format`, and the tokenizer's
    vocabulary. InputError, with the model's `label`, if the tokenizer has no turn tokens."""
    vocabulary = Vocabulary(tokenizer, chat_format)
    if not vocabulary.chats:
        why = "its tokenizer has no turn tokens: this model was not trained for chat"
        raise InputError(f"{label}: {why}")
    return Template.open(folder, chat_format), vocabulary


def prompt_ids(
    prompt: Any, template: Template, vocabulary: Vocabulary, kinds: Sequence[str] = ()
) -> list[Any]:
    """Return the token ids of a prompt, or of each prompt of a list. A prompt is a text, which
    becomes a user message, or a list of messages. `kinds`: media whose placeholders are added, only
    to a single text."""

    def user_message(content: Any) -> list[Message]:
        return [{"role": "user", "content": content}]

    def encoded(messages: Any) -> list[int]:
        return vocabulary.encode(make_prompt(messages, None, template))

    if isinstance(prompt, str):
        return encoded(user_message(with_media(prompt, [{"type": kind} for kind in kinds])))
    if not isinstance(prompt, list | tuple) or not prompt:
        actual = "an empty list" if isinstance(prompt, list | tuple) else kind_of(prompt)
        raise InputError(f"prompt: expected a text, messages, or a list of these, found {actual}")
    if isinstance(prompt[0], dict):
        return encoded(prompt)
    return [encoded(user_message(one) if isinstance(one, str) else one) for one in prompt]
