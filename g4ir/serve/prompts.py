"""Converts request fields to engine requests: prompts, sampling parameters and logits masks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from g4ir.backends.background_mask import BackgroundMask
from g4ir.backends.sampling import LogitsMask, SamplingParams
from g4ir.chat import Prompt, Reader, ReasoningBudget, Template, Vocabulary, make_prompt
from g4ir.chat.prompt import spelled
from g4ir.engine.engine import Engine
from g4ir.engine.prompts import checked_ids, sampling_params
from g4ir.engine.requests import Request
from g4ir.errors import EngineError, InputError
from g4ir.generate.conversation import Bounded
from g4ir.generate.tokenizer import Codec
from g4ir.media.prompt import expansion
from g4ir.media.soft import Soft
from g4ir.weights.checkpoint import TOKENIZER

from .grammar import Grammars, Mask
from .http_errors import Refused, bad, missing, named
from .request_schema import NO_EFFORTS, Fields, chosen, constraint_of, max_new_tokens
from .tool_grammar import called

Requests = tuple[Request, ...]
#: sampling settings whose field has the same name
SETTINGS = (
    *("temperature", "top_k", "top_p", "min_p", "seed", "logit_bias", "ignore_eos", "min_tokens"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
)


def _template_options(fields: Fields) -> dict[str, Any]:
    """Return a request's chat template options; `reasoning_effort` sets `enable_thinking` unless
    `chat_template_kwargs` does."""
    options = dict(fields.get("chat_template_kwargs", {}))
    if "reasoning_effort" in fields:
        options.setdefault("enable_thinking", fields["reasoning_effort"] not in NO_EFFORTS)
    return options


def reasoning_on(fields: Fields) -> bool | None:
    """Whether reasoning is on; None: the template's default."""
    return _template_options(fields).get("enable_thinking")


def require_tokenizer(path: Path, label: str) -> None:
    """Raise EngineError for an engine without a tokenizer."""
    if not (path / TOKENIZER).is_file():
        cure = "build it from a checkpoint that has one, or put one into its folder"
        raise EngineError(f"{label} has no {TOKENIZER}: it cannot be served; {cure}")


@dataclass
class Prompts:
    """Creates engine requests for one engine, with its chat template, tokenizer and sampling
    defaults; thread-safe."""

    engine: Engine

    def __post_init__(self) -> None:
        self.template = Template.open(self.engine.path, self.engine.spec.chat)
        self.defaults = self.engine.defaults()

    @cached_property
    def codec(self) -> Codec:
        """The engine's tokenizer; EngineError if it has none."""
        require_tokenizer(self.engine.path, self.engine.label)
        return Codec(self.engine)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokenizer's vocabulary, for conversations."""
        return self.codec.vocabulary

    @cached_property
    def grammars(self) -> Grammars:
        """Compiler of logits masks for structured output."""
        ends = {*self.engine.stop_ids(), *self.vocabulary.ends} - {*self.engine.suppressed()}
        return Grammars(self.vocabulary, self.engine.spec.text.vocab_size, sorted(ends))

    def render(self, fields: Fields) -> Prompt | None:
        """Render a conversation; None for fields without one. Refused or InputError if it is
        invalid."""
        if "messages" not in fields:
            return None
        if not self.vocabulary.chats:
            why = "this model's tokenizer has no turn tokens; give a prompt (/v1/completions)"
            raise missing("messages", why)
        options = _template_options(fields)
        if "add_generation_prompt" in fields:
            options["add_generation_prompt"] = fields["add_generation_prompt"]
        tools = (fields.get("tools") or None) if chosen(fields).mode != "none" else None
        options["continued"] = fields.get("continue_final_message", False)
        prompt = make_prompt(fields["messages"], tools, self.template, **options)
        self._check_length(len(prompt.text), "messages")
        return prompt

    def warm_up(self) -> None:
        """Render and tokenise a conversation, so that the first request does not wait for imports
        and the compilation of the chat template."""
        fields = {"messages": [{"role": "user", "content": "Hi"}]}
        with suppress(Refused, InputError):
            self.requests(fields, self.render(fields))

    def requests(
        self,
        fields: Fields,
        prompt: Prompt | None,
        soft: tuple[Soft, ...] = (),
        salt: str = "",
        adapter: str = "",
    ) -> Requests:
        """Return the engine request of a conversation (`prompt`, with the soft tokens of its
        media), or without one a request for each text or list of ids in the field `prompt`. `salt`:
        of the prefix cache; `adapter`: name of a LoRA adapter."""
        salt += f"\0{fields['cache_salt']}" if "cache_salt" in fields else ""
        top, marks = fields.get("logprobs"), tuple[int, ...]()
        if prompt:
            top = fields.get("top_logprobs", 0) if top else None
            expanded = [[*expansion(s, self.engine.spec.tokens)] for s in soft]
            ids = [self.vocabulary.encode(prompt, expanded)]
            system = fields["messages"][0].get("role") in ("system", "developer")
            marks = self.vocabulary.marks(ids[0], system)
        else:
            ids = [self._ids(one, fields) for one in fields["prompt"]]
        counts = [self._max_new(tokens, fields) for tokens in ids]
        sampling = self._sampling(fields, top)
        if mask := self._mask(fields, prompt):
            sampling = replace(sampling, allowed=mask)
        shared: dict[str, Any] = {"soft": soft, "marks": marks, "salt": salt, "adapter": adapter}
        shared |= {"n": fields.get("n", 1), "reuse": fields.get("cache_prompt", True)}
        echoed = top if fields.get("echo") else None
        shared["prompt_logprobs"] = fields.get("prompt_logprobs", echoed)
        return tuple(Request((*t,), n, sampling, **shared) for t, n in zip(ids, counts))

    def _mask(self, fields: Fields, prompt: Prompt | None) -> LogitsMask | None:
        """Return the logits mask for a request's tool choice, response format and reasoning budget;
        None if nothing is constrained."""
        choice, constraint = chosen(fields), constraint_of(fields)
        tools, forced = fields.get("tools") or (), choice.mode == "required"
        functions = called(tools, choice.name, strict=not forced) if choice.mode != "none" else []
        thinking = reasoning_on(fields) is True
        inside = prompt is not None and Reader(prompt_tail=prompt.tail).thinking
        allowed: Mask | None = None
        if functions and (forced or constraint):
            many, calls = choice.many, self.grammars.calls
            allowed = calls(functions, thinking, inside, many=many, content=constraint)
        elif constraint:
            allowed = self.grammars.text(constraint, thinking, inside)
        elif any(f.constrained for f in functions):
            allowed = self.grammars.some_calls(functions)
        if (limit := fields.get("thinking_token_budget")) is not None:
            budget = ReasoningBudget(self.vocabulary, limit, inside)
            bounded = Bounded(budget, self.engine.spec.text.vocab_size, allowed)
            return BackgroundMask(bounded, allowed.named) if allowed else bounded
        return allowed and BackgroundMask(allowed, allowed.named)

    def tokens(self, fields: Fields, prompt: Prompt | None, **more: Any) -> Requests:
        """Return one request, of which only the token ids are used: those of a conversation's
        prompt, of the field `prompt`, or in the field `tokens`."""
        if prompt:
            return self.requests({**fields, "max_completion_tokens": 1}, prompt, **more)
        ids = fields["tokens"] if "tokens" in fields else self._ids(fields["prompt"], fields)
        return (Request(tuple(ids)),)

    def tokenizer_info(self) -> dict[str, Any]:
        """Return the tokenizer's settings, for clients that tokenise themselves."""
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
        """Return the text of token ids, with control tokens spelled out."""
        ids = checked_ids(tokens, self.engine.spec.text.vocab_size, "tokens")
        return spelled(self.vocabulary, ids)

    def _check_length(self, characters: int, name: str) -> None:
        """Refuse a text that must exceed the context, before it is tokenised."""
        try:
            self.vocabulary.check_length(characters, self.engine.limits.max_seq, name)
        except InputError as e:
            raise Refused(400, str(e), param=name, code="context_length_exceeded") from None

    def _ids(self, prompt: Any, fields: Fields) -> list[int]:
        with named("prompt"):
            if isinstance(prompt, str):
                self._check_length(len(prompt), "prompt")
                return self.codec.encode(prompt, "prompt", fields.get("add_special_tokens", True))
            return checked_ids(prompt, self.engine.spec.text.vocab_size, "prompt")

    def _max_new(self, tokens: Sequence[int], fields: Fields) -> int:
        """Return the maximum number of new tokens (at least 1); Refused if the prompt is empty, or
        if prompt and new tokens do not fit the context."""
        name, max_seq = "messages" if "messages" in fields else "prompt", self.engine.limits.max_seq
        count = max_new_tokens(fields)
        count = max(max_seq + 1 - len(tokens) if count is None else count, 1)
        if not tokens:
            raise bad(name, "is empty; give at least one token")
        if len(tokens) + count - 1 > max_seq:  # the last token is never written to the KV cache
            new = f", and {count} new tokens are requested" if count > 1 else ""
            sizes = f"the prompt has {len(tokens)} tokens{new}"
            message = f"{name}: {sizes}; the context has {max_seq} tokens"
            raise Refused(400, message, param=name, code="context_length_exceeded")
        return count

    def _sampling(self, fields: Fields, top: int | None) -> SamplingParams:
        """Return the sampling parameters: of the request, else the checkpoint's defaults. `top`:
        number of most likely tokens to report, None: no log-probabilities."""
        sampling = {k: fields[k] for k in SETTINGS if k in fields}
        stop = fields.get("stop_token_ids", frozenset())
        if constraint_of(fields) or ("messages" in fields and not fields.get("ignore_eos")):
            stop |= self.vocabulary.ends
        return sampling_params(self.defaults, {**sampling, "stop": stop, "logprobs": top})
