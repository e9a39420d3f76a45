"""A loaded engine: opens sessions, and generates from prompts."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import numpy as np

from g4ir.backends.sampling import SEEDS, SamplingParams, random_seed
from g4ir.chat.prompt import text_ids
from g4ir.chat.template import open_chat, prompt_ids
from g4ir.chat.tokenizer_file import read_tokenizer, within_vocabulary
from g4ir.errors import EngineError, InputError
from g4ir.media.prompt import NO_TIMES, check_placeholders, expand_placeholders, lacks_frame_times
from g4ir.media.soft import Soft
from g4ir.model.media import list_media, placeholders
from g4ir.ops.types import torch
from g4ir.weights.checkpoint import TOKENIZER
from g4ir.weights.pack import ParamSource

from .embeddings import Embedder, EncoderInput, need_decoder
from .multimodal import encode
from .parts import EngineParts
from .prompts import checked_ids, checked_prompt
from .requests import Request
from .scheduler import Scheduler, SchedulerConfig
from .session import Session
from .speculative import NONE, AcceptanceStats, SpeculativeConfig, resolve_draft
from .tokenizer_index import INDEX, IndexedTokenizer
from .values import Inspection, TowerValues, compute_values, inspect_values

log = logging.getLogger(__name__)


@dataclass(repr=False)
class Engine(EngineParts):
    """A loaded engine directory; a context manager that closes it."""

    #: scheduler of the last `generate`, for a next one with the same settings (`lent_scheduler`)
    _idle: Scheduler | None = field(default=None, init=False)
    _lending: threading.Lock = field(default_factory=threading.Lock, init=False)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def session(self, batch: int = 1, adapter: str = "") -> Session:
        """Return a session with empty KV caches for `batch` sequences, at most max_batch;
        `adapter`: name of the LoRA adapter that all use."""
        self.check_process()
        need_decoder(self.spec, self.label)
        return Session(self, batch, adapter)

    def encode(self, kind: str, item: Any, **options: Any) -> Soft:
        """Return the soft tokens of one image, video or audio (see multimodal.py)."""
        return encode(self, kind, item, **options)

    def tokenizer(self) -> Any:
        """Return the checkpoint's tokenizer (library `tokenizers`). EngineError if it has none or
        an invalid one, MissingError without the library."""
        path = self.path / TOKENIZER
        if not path.is_file():
            raise EngineError(f"{self.label} has no {TOKENIZER}: give token ids")
        return within_vocabulary(
            read_tokenizer(path, path.read_bytes()), self.spec.text.vocab_size, path
        )

    def text_tokenizer(self) -> Any:
        """Return a tokenizer for a few short texts: backed by the engine's tokenizer index if it
        has one, else `tokenizer()`."""
        index = self.path / INDEX
        return IndexedTokenizer(index, self.tokenizer) if index.is_file() else self.tokenizer()

    def generate(
        self,
        prompt: Any,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop_ids: Iterable[int] | None = None,
        on_token: Callable[..., None] | None = None,
        *,
        images: Sequence[Any] = (),
        videos: Sequence[Any] = (),
        audio: Sequence[Any] = (),
        chat: bool = False,
        draft: str = NONE,
        draft_tokens: int | None = None,
        adapter: str = "",
        tally: AcceptanceStats | None = None,
    ) -> Any:
        """Return new token ids for one prompt (list of ints -> list of ints) or for any number of
        prompts of different lengths (list of lists -> list of lists, in their order), up to
        max_batch of them together. Tensors, arrays of integers and tuples are accepted too.

        An answer ends with a stop id, which is part of the result, or after max_new_tokens.
        `stop_ids`: instead of the engine's. `on_token(token)` is called with each token of a
        single prompt, `on_token(i, token)` with those of several, i being the prompt's index.
        Prompt i is sampled with seed + i. temperature 0: greedy. InputError for invalid arguments;
        CheckError if logits are NaN or infinite.

        images, videos, audio: lists of what `encode` takes. They belong to the placeholders of
        their kind in order, prompt by prompt: one placeholder for each medium, or one for each
        soft token (media/prompt.py).

        With `chat` a prompt is the text of a user message, or a list of messages (OpenAI's format);
        several prompts are a list of these. The chat template renders them, and the tokens
        that end a turn are stop ids too, unless `stop_ids` are passed. The result is token ids of
        the answer with its reasoning and tool calls, whose text `chat.Reader` parses.

        `draft`: source of draft tokens (speculative.py): none, ngram (the text itself), or mtp (the
        engine's draft model); at most `draft_tokens` at a time (default: what the engine was built
        for). The result is that of decoding one token per step, unless rounding decides a close
        choice: matmuls of several tokens may round differently (in tests, only bfloat16 results
        differed). `tally`: stats to which this call's drafts are added. `adapter`: name of a loaded
        adapter (adapters.py).
        """
        need_decoder(self.spec, self.label)
        drafts = resolve_draft(self.config, self.label, draft, draft_tokens)
        media = list_media(self.media, self.spec, images=images, videos=videos, audio=audio)
        if chat:
            template, words = open_chat(self.path, self.tokenizer(), self.spec.chat, self.label)
            prompt = prompt_ids(prompt, template, words, [kind for kind, _ in media])
            stop_ids = {*self.stop_ids(), *words.ends} if stop_ids is None else stop_ids
        prompts, single = _prompts(prompt)
        prompts, soft = _with_media(self, prompts, media)
        stop = frozenset(self.stop_ids() if stop_ids is None else stop_ids)
        params = SamplingParams(temperature, top_k, top_p, seed, stop=stop, ignore_eos=True)
        requests = _requests(self, prompts, soft, max_new_tokens, params)
        requests = [replace(r, adapter=adapter) for r in requests]
        callback = (lambda row, token: on_token(token)) if single and on_token else on_token
        with self.lent_scheduler(min(len(requests), self.limits.max_batch), drafts) as scheduler:
            handles = [scheduler.submit(request) for request in requests]
            for event in scheduler.run(*handles):
                if event.error:
                    raise event.error
                if event.token is not None and callback:
                    callback(handles.index(event.handle), event.token)
        for handle in handles:
            if tally is not None:
                tally.join(handle.tally)
        out = [handle.answers[0].tokens for handle in handles]
        return out[0] if single else out

    def inspect(
        self, tokens: Any, names: Sequence[str], phase: str = "prefill", **media: Sequence[Any]
    ) -> Inspection:
        """Return the plan of `values`; its towers have run."""
        towers: Any = TowerValues(self, names)
        prompts, _ = _prompts(tokens, "encode it")
        if len(prompts) != 1 or not prompts[0]:
            raise InputError("values: expected one sequence of token ids that is not empty")
        items = list_media(self.media, self.spec, **media)
        prompts, soft = _with_media(replace(self, runtime=towers), prompts, items)
        return inspect_values(towers, prompts[0], phase, soft)

    def values(
        self, tokens: Any, names: Sequence[str], phase: str = "prefill", **media: Sequence[Any]
    ) -> dict[str, Any]:
        """Return values of the plain graphs (values.py) for a text, name -> tensor [1, S, ...] on
        the host, computed in the engine's dtype with its weights, dequantised.

        tokens: ids [S] or [1, S]. names: `L3.attn.out` and others that `g4ir show --after none`
        prints, patterns such as `L*.out` (`*`: any characters but dots), and `L3.attn.probs`, the
        attention's probabilities [1, S, heads, S]. phase: prefill, decode (token by token), or
        verify. media: `images`, `videos`, `audio`, as in `generate`; names of towers' values begin
        with `vision.` and `audio.`, and end with `[1]` for a second image, frame or clip; their
        shapes are those in the tower. Names of the draft model's values begin with `draft.`; their
        shape is [1, steps, ...], with one step per draft token after the text. Raises InputError
        for a name that matches nothing, and for values that do not fit in memory.
        """
        return compute_values(self.inspect(tokens, names, phase, **media))

    @cached_property
    def embedder(self) -> Embedder:
        """The engine's Embedder; InputError if the model is no encoder."""
        return Embedder(self)

    def embed(
        self,
        texts: EncoderInput | Sequence[EncoderInput],
        task: str | None = None,
        dims: int | None = None,
        *,
        truncate: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> Any:
        """Return the embeddings of a text or several, float32 [N, D], L2-normalised: the inner
        product of two is their cosine similarity. A text may be a list of token ids, or have
        media: an image alone is {"type": "image", "image": PATH or pixels}, a text with it is
        ["a red car", {...}], passed in a list of texts even if it is the only one. `image_budget`,
        `frames`, `fps` and `audio_too_long` are further keys of the object.

        `task`: whose prompt goes before each text (query, document, ...; default: the checkpoint's
        default, else none); `dims`: a smaller size that the model was trained for. `truncate` cuts
        texts without media beyond max_seq, which are an InputError otherwise. `progress` is called
        with the number of texts done.
        """
        if not isinstance(texts, Sequence | Mapping):
            raise InputError(f"texts {texts!r:.80}: expected a text or a list of texts")
        single = isinstance(texts, str | Mapping) or (bool(texts) and isinstance(texts[0], int))
        several: Any = [texts] if single else list(texts)
        out, done = torch.empty(len(several), self.embedder.size(dims)), 0
        for part in self.embedder.embed(several, task, dims, truncate, progress):
            out[done : done + len(part)] = part
            done += len(part)
        return out

    @contextmanager
    def lent_scheduler(self, slots: int, draft: SpeculativeConfig) -> Iterator[Scheduler]:
        """Context manager that lends the idle scheduler of the last `generate` if it fits these
        arguments, else a new one; after an error-free use it is kept for the next call. `slots`:
        maximum number of the call's sequences that run at once."""
        with self._lending:
            scheduler, self._idle = self._idle, None
        config = SchedulerConfig(
            buckets=tuple(sorted({slots, self.limits.max_batch})),
            prefill_first=True,
            prefix_bytes=0,
            draft=draft,
            draft_rows=slots,
        )
        cached = scheduler and (scheduler.config, scheduler.suppress)
        if scheduler is None or cached != (config, self.suppressed()):
            scheduler = Scheduler(self, config)
        yield scheduler  # not returned after an exception: it is not idle then
        self._idle = scheduler

    def close(self) -> None:
        """Free the runtime's memory; the engine refuses to run afterwards (InputError)."""
        self._idle = None
        vars(self).pop("embedder", None)
        self.runtime.close()
        closed: Any = Refusing(f"{self.label}: this engine was closed; load it again")
        self.runtime = closed


class Refusing:
    """Placeholder runtime of an engine that cannot run: using it raises InputError with the reason
    `why`. `source`: the engine's params, if its weights are to be read."""

    def __init__(self, why: str, source: ParamSource | None = None) -> None:
        self._why = why
        if source:
            self.source = source

    def __getattr__(self, name: str) -> Any:
        raise InputError(self._why)

    def close(self) -> None:
        """Close the params, if there are any."""
        if "source" in vars(self):
            self.source.close()


def _prompts(
    prompt: Any, fix: str = "give chat=True for what a user says, or encode it"
) -> tuple[list[list[int]], bool]:
    """Return prompts as lists of ids, and whether `prompt` is a single one, not a list of them.
    `fix`: of the error for a text."""

    def plain(x: Any) -> Any:
        if isinstance(x, torch.Tensor | np.ndarray | np.integer):
            return x.tolist()
        return list(map(plain, x)) if isinstance(x, list | tuple) else x

    rows = plain(prompt)
    if isinstance(rows, str) or (isinstance(rows, list) and str in map(type, rows)):
        fix += " with the engine's tokenizer first: engine.tokenizer().encode(text).ids"
        raise InputError(f"prompt tokens: found text; {fix}")
    if not isinstance(rows, list):
        raise InputError(f"prompt tokens: found {type(prompt).__name__}; expected a list of ids")
    many = {isinstance(x, list) for x in rows}
    if many == {True, False}:
        raise InputError("prompt tokens: expected a list of ids, or a list of such lists")
    return ([list(x) for x in rows], False) if many == {True} else ([rows], True)


def _with_media(
    engine: Engine, prompts: list[list[int]], media: Sequence[tuple[str, Any]]
) -> tuple[list[list[int]], list[Soft]]:
    """Return prompts with a placeholder for each soft token, and the soft tokens of the media."""
    tokens, kinds = engine.spec.tokens, engine.media.kinds
    for i, p in enumerate(prompts):
        checked_ids(p, engine.spec.text.vocab_size, f"prompt {i}")
    check_placeholders([t for p in prompts for t in p], [kind for kind, _ in media], tokens, kinds)
    soft = [engine.encode(kind, item) for kind, item in media]
    encode: Callable[[str], list[int]] | None = None
    if (engine.path / TOKENIZER).is_file():
        tokenizer = cache(engine.tokenizer)  # read when first needed

        def encode(text: str) -> list[int]:
            return text_ids(tokenizer(), [text])[0]

    placed = expand_placeholders(prompts, soft, tokens, encode, kinds)
    if not encode and lacks_frame_times(prompts, placed, tokens):
        log.warning(NO_TIMES)
    return placed, soft


def _requests(
    engine: Engine,
    prompts: Sequence[list[int]],
    soft: Sequence[Soft],
    count: int,
    params: SamplingParams,
) -> list[Request]:
    limits, vocab = engine.limits, engine.spec.text.vocab_size
    seed = random_seed() if params.seed is None else params.seed
    placeholder_ids = placeholders(engine.spec.tokens, engine.media.kinds)
    remaining, out = [*soft], list[Request]()
    for i, prompt in enumerate(prompts):
        checked_prompt(prompt, count, vocab, limits.max_seq, f"prompt {i}")
        unfilled = {kind: prompt.count(holder) for kind, holder in placeholder_ids.items()}
        prompt_soft = []
        for one in [*remaining]:  # fills the prompt's placeholders in order
            if unfilled.get(one.kind, 0) > 0 or i + 1 == len(prompts):
                unfilled[one.kind] = unfilled.get(one.kind, 0) - one.count
                remaining.remove(one)
                prompt_soft.append(one)
        sampling = replace(params, seed=(seed + i) % SEEDS)
        out.append(Request(tuple(prompt), count, sampling, tuple(prompt_soft), reuse=False))
    return out
