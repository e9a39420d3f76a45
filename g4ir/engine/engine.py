"""An engine: opens sessions, and makes tokens from prompts."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from g4ir.backends.sampling import Sampler, Sampling
from g4ir.chat.prompt import text_ids
from g4ir.chat.prompt_builder import PromptBuilder
from g4ir.errors import CheckError, EngineError, InputError, MissingError
from g4ir.media.prompt import NO_TIMES, check_given, place_rows, times_left_out
from g4ir.media.soft import Soft
from g4ir.model.media import listed
from g4ir.weights.checkpoint import GENERATION

from .multimodal import encode
from .parts import EngineParts
from .prompts import Defaults, checked_ids, checked_prompt, read_defaults
from .session import Session
from .speculative import NONE, AcceptanceStats, SpeculativeConfig, drafted_stream, find_draft

if TYPE_CHECKING:
    import torch

TOKENIZER = "tokenizer.json"

log = logging.getLogger(__name__)


@dataclass(repr=False)
class Engine(EngineParts):
    """A loaded engine directory; a context that closes it."""

    #: of the last `generate`: its caches, and what was recorded over them, serve the next one
    _idle: Session | None = field(default=None, init=False)
    #: held while that one is taken
    _lending: threading.Lock = field(default_factory=threading.Lock, init=False)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def session(self, batch: int = 1) -> Session:
        """Return empty caches for `batch` rows, at most max_batch."""
        self.check_process()
        return Session(self, batch)

    def encode(self, kind: str, item: Any, **options: Any) -> Soft:
        """Return the soft tokens of one image, video or sound (see multimodal.py)."""
        return encode(self, kind, item, **options)

    def defaults(self) -> Defaults:
        """Read the checkpoint's generation_config.json."""
        return read_defaults(self.path / GENERATION, self.spec.text.vocab_size)

    def stop_ids(self) -> tuple[int, ...]:
        """Return token ids that end a row: generation_config's, else the spec's."""
        stop = self.defaults().stop
        return self.spec.tokens.eos if stop is None else stop

    def suppressed(self) -> tuple[int, ...]:
        """Return ids never generated (matters for greedy decoding too): the checkpoint's, and those
        that a smaller per-layer table has no row for, which no step could read."""
        text = self.spec.text
        return (*self.defaults().suppress, *range(text.readable_ids, text.vocab_size))

    def tokenizer(self) -> Any:
        """Return the checkpoint's own tokenizer (library `tokenizers`)."""
        path = self.path / TOKENIZER
        if not path.is_file():
            raise EngineError(
                f"{self.path} has no tokenizer.json (the checkpoint had none): give token ids"
            )
        return _within(read_tokenizer(path, path.read_bytes()), self.spec.text.vocab_size, path)

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
        tally: AcceptanceStats | None = None,
    ) -> Any:
        """Return new token ids for one prompt (list of ints -> list of ints) or for several (list
        of lists -> list of lists, up to max_batch of different lengths). Tensors, arrays of
        integers and tuples do too.

        A row ends with its stop id, which is part of the result, or after max_new_tokens.
        `on_token(token)` sees each token of a single prompt, `on_token(row, token)` of several.

        images, videos, audio: lists of what `encode` takes. They belong to the placeholders of
        their kind in order, row by row: one placeholder for each medium, or one for each soft
        token (media/prompt.py).

        With `chat` a prompt is what a user says, or a list of messages (OpenAI's form), and several
        are a list of such: the checkpoint's template makes tokens of them, and the turn's ends are
        stop ids too. What comes back is all of the answer, which `chat.Reader` takes apart.

        `draft` says where drafts come from (speculative.py): none, ngram, the text itself, or mtp,
        the drafter that the engine was built with; at most `draft_tokens` at a time (default: what
        the engine was built for). The tokens are those of single steps: in float32 always, in 16
        bits unless two logits are as good as equal, since products of several rows may round
        otherwise.
        `tally` counts what was drafted.
        """
        drafts = find_draft(self, draft, draft_tokens)
        media = listed(self.media, self.spec, images=images, videos=videos, audio=audio)
        if chat:
            turns = PromptBuilder.open(self.path, self.tokenizer(), self.spec.chat)
            prompt = turns.prompts(prompt, [kind for kind, _ in media])
            stop_ids = {*self.stop_ids(), *turns.ends} if stop_ids is None else stop_ids
        prompts, single = _prompts(prompt)
        prompts, soft = _with_media(self, prompts, media)
        told = (lambda row, token: on_token(token)) if single and on_token else on_token
        sampling = Sampling(temperature, top_k, top_p, seed, self.suppressed())
        stop = set(self.stop_ids() if stop_ids is None else stop_ids)
        ask = _Ask(
            prompts,
            max_new_tokens,
            Sampler(sampling),
            stop,
            soft,
            drafts,
            tally or AcceptanceStats(),
        )
        out = _generate(self, ask, told)
        return out[0] if single else out

    @contextmanager
    def lent_session(self, batch: int) -> Iterator[Session]:
        """A context with an empty session, which the engine then keeps in place of its old one."""
        with self._lending:  # no two threads get the same one
            session, self._idle = self._idle, None
        if session is None or session.batch != batch:
            session = self.session(batch)
        session.reset()
        try:
            yield session
        except CheckError:  # NaN in a cache would be NaN in what is computed over it later
            session.clear()
            raise
        finally:
            self._idle = session

    def close(self) -> None:
        """Free what the runtime holds."""
        self._idle = None
        self.runtime.close()
        closed: Any = Refusing(f"{self.path}: this engine was closed; load it again")
        self.runtime = closed


class Refusing:
    """A runtime that does nothing but to say why."""

    def __init__(self, why: str) -> None:
        self._why = why

    def __getattr__(self, name: str) -> Any:
        raise InputError(self._why)

    def close(self) -> None:
        """Do nothing: nothing is left to free."""


def read_tokenizer(path: Path, raw: bytes) -> Any:
    """Return the tokenizer of a tokenizer.json; EngineError where it is none."""
    try:
        from tokenizers import Tokenizer
    except ImportError as e:
        raise MissingError("text prompts need `pip install tokenizers`") from e
    try:
        found = Tokenizer.from_str(raw.decode())
        # What a file says of these is for batches of training; prompts are never cut.
        found.no_truncation()
        found.no_padding()
        return found
    except Exception as e:  # the library raises nothing narrower
        raise EngineError(f"{path} is no tokenizer file: {e}; download or save it again") from e


def _within(tokenizer: Any, size: int, path: Path) -> Any:
    """Return the tokenizer without tokens for which the model has no embedding: fine-tunes add
    tokens and do not resize."""
    beyond = sorted((i, text) for text, i in tokenizer.get_vocab().items() if i >= size)
    if not beyond:
        return tokenizer
    (first, text), names = beyond[0], {text for _, text in beyond}
    log.warning(
        "%s: %d tokens at or above the vocabulary of %d are left out, the first %r (%d)",
        *(path, len(beyond), size, text, first),
    )
    held = json.loads(tokenizer.to_str())
    held["added_tokens"] = [t for t in held["added_tokens"] if t["id"] < size]
    model = held["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {t: i for t, i in model["vocab"].items() if i < size}
        pairs = (m.split(" ", 1) if isinstance(m, str) else m for m in model.get("merges", ()))
        kept = [p for p in pairs if not names & {*p, "".join(p)}]
        model |= {"merges": kept} if "merges" in model else {}
    else:
        model["vocab"] = model["vocab"][:size]
    return read_tokenizer(path, json.dumps(held).encode())


def _prompts(given: Any) -> tuple[list[list[int]], bool]:
    """Return (prompts, whether it was a single one)."""
    import torch

    def plain(x: Any) -> Any:
        if isinstance(x, torch.Tensor | np.ndarray | np.integer):
            return x.tolist()
        return list(map(plain, x)) if isinstance(x, list | tuple) else x

    rows = plain(given)
    if isinstance(rows, str) or (isinstance(rows, list) and str in map(type, rows)):
        raise InputError(
            "prompt tokens: found text; give chat=True for what a user says, or encode it with the "
            "engine's tokenizer first: engine.tokenizer().encode(text).ids"
        )
    if not isinstance(rows, list):
        raise InputError(f"prompt tokens: found {type(given).__name__}; expected a list of ids")
    many = {isinstance(x, list) for x in rows}
    if many == {True, False}:
        raise InputError("prompt tokens: expected a list of ids, or a list of such lists")
    return ([list(x) for x in rows], False) if many == {True} else ([rows], True)


def _with_media(
    engine: Engine, prompts: list[list[int]], media: Sequence[tuple[str, Any]]
) -> tuple[list[list[int]], list[Soft]]:
    """Return prompts with a placeholder for each soft token, and soft tokens of (kind, item)."""
    tokens, kinds = engine.spec.tokens, engine.media.kinds
    for i, p in enumerate(prompts):
        checked_ids(p, engine.spec.text.vocab_size, f"prompt {i}")
    check_given([t for p in prompts for t in p], [kind for kind, _ in media], tokens, kinds)
    soft = [engine.encode(kind, item) for kind, item in media]
    encode = _plain_encoder(engine)
    placed = place_rows(prompts, soft, tokens, encode, kinds)
    if not encode and times_left_out(prompts, placed, tokens):
        log.warning(NO_TIMES)
    return placed, soft


def _plain_encoder(engine: Engine) -> Callable[[str], list[int]] | None:
    """Return text -> ids with nothing added, where a tokenizer is; it is read when first needed."""
    if not (engine.path / "tokenizer.json").is_file():
        return None
    tokenizer = cache(engine.tokenizer)
    return lambda text: text_ids(tokenizer(), [text])[0]


@dataclass(frozen=True)
class _Ask:
    """Prompts and settings of `generate`, read."""

    prompts: list[list[int]]
    count: int
    sampler: Sampler
    stop: set[int]
    soft: Sequence[Soft]
    draft: SpeculativeConfig
    tally: AcceptanceStats

    def rounds(self, session: Session, logits: torch.Tensor) -> Iterator[dict[int, list[int]]]:
        """Yield the new tokens of each row that has any, step by step."""
        if self.draft:
            yield from drafted_stream(
                session,
                logits,
                self.prompts,
                self.count,
                self.sampler,
                self.stop,
                self.draft,
                self.tally,
            )
            return
        running = [True] * len(self.prompts)
        for tokens, going in session.stream(logits, self.count, self.sampler, self.stop):
            yield {row: [token] for row, token in enumerate(tokens) if running[row]}
            running = going


def _generate(
    engine: Engine, ask: _Ask, on_token: Callable[[int, int], None] | None
) -> list[list[int]]:
    import torch

    vocab, room, prompts = engine.spec.text.vocab_size, engine.limits.max_seq, ask.prompts
    for i, p in enumerate(prompts):
        checked_prompt(p, ask.count, vocab, room, f"prompt {i}")
    lengths = torch.tensor([len(p) for p in prompts])
    padded = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int64)
    for row, p in zip(padded, prompts, strict=True):
        row[: len(p)] = torch.tensor(p)
    out: list[list[int]] = [[] for _ in prompts]
    with engine.lent_session(len(prompts)) as session:
        for made in ask.rounds(session, session.append(padded, lengths, ask.soft)):
            for row, token in ((row, t) for row, tokens in made.items() for t in tokens):
                out[row].append(token)
                if on_token:
                    on_token(row, token)
    return out
