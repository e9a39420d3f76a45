"""Makes requests to the engine of the fields of a request: prompts, sampling parameters, masks, and
how answers are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

from g4ir.backends.background_mask import BackgroundMask
from g4ir.backends.sampling import LogitsMask, SamplingParams
from g4ir.chat import Prompt, Reader, ReasoningBudget, Template, Vocabulary, make_prompt
from g4ir.chat.messages import Medium
from g4ir.chat.prompt import spelled
from g4ir.engine.engine import TOKENIZER, Engine
from g4ir.engine.multimodal import soft_of
from g4ir.engine.output import Answer
from g4ir.engine.prompts import checked_ids, sampling_params
from g4ir.engine.requests import Request
from g4ir.errors import EngineError, InputError
from g4ir.generate.conversation import Bounded
from g4ir.generate.tokenizer import Codec
from g4ir.media.audio import REFUSE
from g4ir.media.limits import Limit, limited
from g4ir.media.prompt import expansion
from g4ir.media.soft import Soft

from .grammar import Grammars, Mask
from .http_errors import Refused, bad, missing
from .media_fetch import Sources, read_bytes, setting
from .request_schema import NO_EFFORTS, as_input, chosen, constraint_of
from .tool_grammar import called

T = TypeVar("T")
U = TypeVar("U")
#: sampling settings that have the names of fields
SETTINGS = (
    *("temperature", "top_k", "top_p", "min_p", "seed", "logit_bias", "ignore_eos", "min_tokens"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
)


@dataclass(frozen=True)
class PreparedRequest:
    """A checked request: jobs that wait to be submitted, and what answers are read with."""

    fields: Mapping[str, Any]
    jobs: tuple[Request, ...]
    #: of a chat; None: the text is taken as it is
    prompt: Prompt | None = None
    thinking: bool | None = None
    #: texts of the prompts, where they are to be repeated
    echoes: tuple[str, ...] = ()

    @property
    def n(self) -> int:
        return int(self.fields.get("n", 1))

    def answer(self, vocabulary: Vocabulary, index: int) -> Answer:
        """Return what takes the events of one answer."""
        stop, reader = self.fields.get("stop", ()), None
        if self.prompt is not None:
            tools, calls = self.fields.get("tools") or None, chosen(self.fields).mode != "none"
            reader = Reader(tools, self.prompt.tail, stop, calls=calls, thinking=self.thinking)
        single, silent = self.fields.get("parallel_tool_calls") is False, self.count == 0
        return Answer(vocabulary, reader, index=index, stop=stop, single=single, silent=silent)

    @property
    def count(self) -> int | None:
        """How many new tokens were asked for at most; None: it was not said."""
        count: int | None = self.fields.get("max_completion_tokens", self.fields.get("max_tokens"))
        return count

    def echo(self, index: int) -> str:
        """Return the text of the prompt of an answer, if it is to be repeated."""
        return self.echoes[index // self.n] if self.echoes else ""


@dataclass(frozen=True)
class Unread(Generic[T]):
    """What becomes of a request once its media are read: `then`, of their soft tokens. `named` is
    the context in which errors are raised."""

    then: Callable[[tuple[Soft, ...]], T]
    media: tuple[Medium, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)
    named: Callable[[], AbstractContextManager[Any]] = nullcontext

    def map(self, change: Callable[[T], U]) -> Unread[U]:
        """Return it with a change of the result."""
        return Unread(lambda soft: change(self.then(soft)), self.media, self.fields, self.named)


def require_tokenizer(path: Path) -> None:
    """Raise EngineError for an engine without a tokenizer."""
    if not (path / TOKENIZER).is_file():
        cure = "build it from a checkpoint that has one, or put one into its folder"
        raise EngineError(f"{path} has no {TOKENIZER}: it cannot be served; {cure}")


def _characters(messages: Sequence[Any]) -> int:
    """Return how many characters the texts of messages have that were not checked yet."""
    contents = [m.get("content") for m in messages if isinstance(m, dict)]
    parts = [part for c in contents for part in (c if isinstance(c, list) else [c])]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return sum(len(text) for text in texts if isinstance(text, str))


@dataclass
class Prompts:
    """An engine as requests see it. Any thread may ask."""

    engine: Engine
    sources: Sources = field(default_factory=Sources)

    def __post_init__(self) -> None:
        self.template = Template.open(self.engine.path, self.engine.spec.chat)
        self.defaults = self.engine.defaults()

    @cached_property
    def codec(self) -> Codec:
        """The engine's tokenizer; EngineError where it has none."""
        require_tokenizer(self.engine.path)
        return Codec(self.engine)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The same, as conversations need it."""
        return self.codec.vocabulary

    @cached_property
    def grammars(self) -> Grammars:
        """Masks that hold answers to JSON."""
        ends = {*self.engine.stop_ids(), *self.vocabulary.ends} - {*self.engine.suppressed()}
        return Grammars(self.vocabulary, self.engine.spec.text.vocab_size, sorted(ends))

    def chat(self, fields: Mapping[str, Any], salt: str = "") -> Unread[PreparedRequest]:
        """Return the job of a conversation, once its media are read. Refused, or InputError, for
        what is wrong with it."""
        if not self.vocabulary.chats:
            raise missing("messages", "the tokenizer of this model has no turns of a chat")
        options = dict(fields.get("chat_template_kwargs", {}))
        if "reasoning_effort" in fields:
            options.setdefault("enable_thinking", fields["reasoning_effort"] not in NO_EFFORTS)
        if "add_generation_prompt" in fields:
            options["add_generation_prompt"] = fields["add_generation_prompt"]
        self._check_length(_characters(fields["messages"]), "messages")
        tools = (fields.get("tools") or None) if chosen(fields).mode != "none" else None
        options["continued"] = fields.get("continue_final_message", False)
        prompt = make_prompt(fields["messages"], tools, self.template, **options)
        self._check_length(len(prompt.text), "messages")
        thinking = options.get("enable_thinking")

        def then(soft: tuple[Soft, ...]) -> PreparedRequest:
            return self._conversation(prompt, fields, salt, soft, thinking)

        return Unread(then, prompt.media, fields)

    def _conversation(
        self,
        prompt: Prompt,
        fields: Mapping[str, Any],
        salt: str,
        soft: tuple[Soft, ...],
        thinking: bool | None,
    ) -> PreparedRequest:
        expanded = [[*expansion(s, self.engine.spec.tokens)] for s in soft]
        tokens = self.vocabulary.encode(prompt, expanded)
        top = fields.get("top_logprobs", 0) if fields.get("logprobs") else None
        made = self._job(tokens, fields, top, salt)
        system = fields["messages"][0].get("role") in ("system", "developer")
        marks = self.vocabulary.marks(tokens, system)
        sampling = self._held(made.sampling, fields, prompt, thinking is True)
        job = replace(made, soft=soft, marks=marks, sampling=sampling)
        return PreparedRequest(fields, (job,), prompt, thinking)

    def fetch(self, unread: Unread[Any]) -> list[tuple[Medium, bytes]]:
        """Return the media of a request with their bytes."""
        with unread.named():
            return read_bytes(self.engine, unread.media, self.sources)

    def encode(
        self, unread: Unread[Any], items: Sequence[tuple[Medium, bytes]], limit: Limit
    ) -> tuple[Soft, ...]:
        """Return the soft tokens of media. InputError where they take more than the limit."""
        engine, fields = self.engine, {"audio_too_long": REFUSE, **unread.fields}
        with unread.named(), limited(limit):
            each = [(m, raw, setting(engine, m, fields)) for m, raw in items]
            return tuple(_soft(engine, medium, raw, own, limit) for medium, raw, own in each)

    def _held(
        self, sampling: SamplingParams, fields: Mapping[str, Any], prompt: Prompt, thinking: bool
    ) -> SamplingParams:
        """Return settings that hold an answer to what a request says of its calls and its form."""
        choice, constraint = chosen(fields), constraint_of(fields)
        tools, forced = fields.get("tools") or (), choice.mode == "required"
        functions = called(tools, choice.names, strict=not forced) if choice.mode != "none" else []
        inside = Reader(prompt_tail=prompt.tail).thinking
        head = _head(fields, prompt) if fields.get("continue_final_message") else ""
        allowed: Mask | None = None
        if functions and (forced or constraint) and not (head and constraint):
            many, calls = choice.many, self.grammars.calls
            allowed = calls(functions, thinking, inside, many=many, content=constraint)
        elif constraint:
            allowed = self.grammars.text(constraint, thinking, inside, head)
        elif choice.names is not None or any(f.held for f in functions):
            allowed = self.grammars.some_calls(functions)
        if (limit := fields.get("thinking_token_budget")) is not None:
            budget = ReasoningBudget(self.vocabulary, limit, inside)
            bounded = Bounded(budget, self.engine.spec.text.vocab_size, allowed)
            return replace(sampling, allowed=_threaded(bounded, allowed))
        return replace(sampling, allowed=_threaded(allowed, allowed)) if allowed else sampling

    def completions(self, fields: Mapping[str, Any], salt: str = "") -> Unread[PreparedRequest]:
        """Return one job for each prompt."""
        top, constraint = fields.get("logprobs"), constraint_of(fields)
        ids = [self._ids(p, fields) for p in fields["prompt"]]
        jobs = [self._job(i, fields, top, salt) for i in ids]
        if constraint:
            allowed = self.grammars.text(constraint, thinking=False, inside=False)
            held = [replace(j.sampling, allowed=_threaded(allowed, allowed)) for j in jobs]
            jobs = [replace(j, sampling=s) for j, s in zip(jobs, held)]
        pairs = zip(fields["prompt"], ids) if fields.get("echo") else ()
        echoes = (*(p if isinstance(p, str) else self.text(i) for p, i in pairs),)
        made = PreparedRequest(fields, (*jobs,), echoes=echoes)
        return Unread(lambda soft: made)

    def tokens(self, fields: Mapping[str, Any]) -> Unread[list[int]]:
        """Return the ids of a prompt, or of a conversation as it would be answered."""
        if "messages" in fields:
            chat = self.chat({**fields, "max_completion_tokens": 1})
            return chat.map(lambda made: [*made.jobs[0].tokens])
        ids = self._ids(fields["prompt"], fields)
        return Unread(lambda soft: ids)

    def tokenizer_info(self) -> dict[str, Any]:
        """Return what a client needs to tokenise as this server does."""
        ids, strings = self.engine.spec.tokens, self.vocabulary.tokenizer.id_to_token
        ends = [strings(i) for i in ids.eos]
        return {
            "bos_token": None if ids.bos is None else strings(ids.bos),
            "eos_token": ends[0] if ends else None,
            "pad_token": None if ids.pad is None else strings(ids.pad),
            "eos_tokens": ends,
            "vocab_size": self.engine.spec.text.vocab_size,
            "model_max_length": self.engine.limits.max_seq,
            "add_bos_token": True,
            "chat_template": self.template.source,
        }

    def text(self, tokens: Any) -> str:
        """Return the text of ids, with control tokens."""
        ids = checked_ids(tokens, self.engine.spec.text.vocab_size, "tokens")
        return spelled(self.vocabulary, ids)

    def _check_length(self, characters: int, name: str) -> None:
        """Refuse a text that cannot fit before it is tokenised."""
        try:
            self.vocabulary.check_length(characters, self.engine.limits.max_seq, name)
        except InputError as e:
            raise Refused(400, str(e), param=name, code="context_length_exceeded") from None

    def _ids(self, prompt: Any, fields: Mapping[str, Any]) -> list[int]:
        try:
            if isinstance(prompt, str):
                self._check_length(len(prompt), "prompt")
                return self.codec.encode(prompt, "prompt", fields.get("add_special_tokens", True))
            return checked_ids(prompt, self.engine.spec.text.vocab_size, "prompt")
        except InputError as e:
            raise as_input(e, "prompt") from None

    def _job(
        self, tokens: Sequence[int], fields: Mapping[str, Any], top: int | None, salt: str
    ) -> Request:
        room, name = self.engine.limits.max_seq, "messages" if "messages" in fields else "prompt"
        asked = fields.get("max_completion_tokens", fields.get("max_tokens"))
        count = max(room + 1 - len(tokens), 1) if asked is None else asked
        if not tokens:
            raise bad(name, "is empty; give at least one token")
        if len(tokens) + count - 1 > room:  # the last token is never written
            what = f"the prompt has {len(tokens)} tokens, and {count} new ones are asked for"
            message = f"{name}: {what}; this engine holds {room} tokens"
            raise Refused(400, message, param=name, code="context_length_exceeded")
        sampling = self._sampling(fields, top)
        salt += f"\0{fields['cache_salt']}" if "cache_salt" in fields else ""
        reuse, n = fields.get("cache_prompt", True), fields.get("n", 1)
        read = fields.get("prompt_logprobs", top if fields.get("echo") else None)
        made = Request(tuple(tokens), max(count, 1), sampling, n=n, reuse=reuse, salt=salt)
        return replace(made, prompt_logprobs=read)

    def _sampling(self, fields: Mapping[str, Any], top: int | None) -> SamplingParams:
        """Return the sampling parameters: of the request, else of the checkpoint."""
        given = {k: fields[k] for k in SETTINGS if k in fields}
        stop = fields.get("stop_token_ids", frozenset())
        if constraint_of(fields) or ("messages" in fields and not fields.get("ignore_eos")):
            stop |= self.vocabulary.ends
        return sampling_params(self.defaults, {**given, "stop": stop, "logprobs": top})


def _soft(
    engine: Engine, medium: Medium, raw: bytes, options: Mapping[str, Any], limit: Limit
) -> Soft:
    limit.name = medium.place
    return soft_of(engine, medium, raw, **options)


def _threaded(mask: LogitsMask, grammar: Mask | None) -> LogitsMask:
    """Return a mask that is computed in threads, if it is that of a grammar."""
    return mask if grammar is None else BackgroundMask(mask, grammar.named)


def _head(fields: Mapping[str, Any], prompt: Prompt) -> str:
    """Return the text to continue, with the trailing blanks that templates drop."""
    message = fields["messages"][-1]
    content = message.get("content") or message["refusal"]
    last = content if isinstance(content, str) else content[-1]
    text = last if isinstance(last, str) else last.get("text", "")
    return prompt.head.rstrip() + text[len(text.rstrip()) :]
