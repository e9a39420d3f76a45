"""Requests of vLLM's scheduler over the rows of an engine: tokens in, logits out.

A step decodes all rows that the scheduler names, then computes one prompt as far as the scheduler
says; with its last token the prompt gets a row. The scheduler counts tokens and the engine computes
chunks of one size, so a prompt that is not through yet may lag by less than a chunk.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

import torch

from g4ir.chat import Vocabulary
from g4ir.engine.batch import Batch, checked_buckets
from g4ir.engine.engine import TOKENIZER, Engine
from g4ir.engine.inputs import padded
from g4ir.engine.prefill import Prefiller
from g4ir.engine.requests import Request as Prompt

from .config import Options

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Request:
    """A request that has a slot, or a prompt that is not through: `slot` is -1."""

    name: str
    tokens: tuple[int, ...]
    reuse: bool = True
    slot: int = -1


class Runner:
    """The rows of an engine, and whose prompt is being computed."""

    def __init__(self, engine: Engine, rows: int, options: Options) -> None:
        self.engine = engine
        self.batch: Batch[Request] = Batch(engine, checked_buckets(None, rows), options.patience)
        self.prefiller = Prefiller(engine, options.prefix_bytes)
        self.requests: dict[str, Request] = {}
        has = (engine.path / TOKENIZER).is_file()
        words = Vocabulary(engine.tokenizer(), engine.spec.chat) if has else None
        self._vocabulary = words if words and words.chats else None
        #: the request in prefill, and its chunks
        self._prompt: tuple[Request, Generator[torch.Tensor | None, None, None]] | None = None
        #: requests whose logits were NaN or infinite; their rows are written over with zeros
        self.spoiled: set[str] = set()

    def add(self, name: str, tokens: Sequence[int], reuse: bool = True) -> None:
        """Take a request whose prompt is to be computed."""
        self.requests[name] = Request(name, tuple(tokens), reuse)

    def drop(self, name: str) -> None:
        """Free what a request has, if it is known."""
        if request := self.requests.pop(name, None):
            if self._prompt and self._prompt[0] is request:
                self._leave()
            self.batch.drop(request, zero=name in self.spoiled)
            self.spoiled.discard(name)

    def decode(self, tokens: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """Append a token to the row of each; return logits [vocab] of each."""
        if not tokens:
            return {}
        if self.batch.should_shrink():
            self.batch.shrink()
        rows = {name: self.requests[name].slot for name in tokens}
        newest = {rows[name]: [token] for name, token in tokens.items()}
        logits = self.batch.session.verify(*padded(newest, self.batch.session.batch))[:, 0]
        found = {name: logits[row] for name, row in rows.items()}
        for name, row in found.items():
            self._looked_at(name, row)
        return found

    def compute(self, name: str, until: int) -> torch.Tensor | None:
        """Compute a prompt up to so many tokens, or up to a whole number of chunks before; return
        logits [vocab] where that is its end, and give it a row."""
        request, size = self.requests[name], self.engine.limits.prefill_chunk
        chunks, through = self._chunks(request), until >= len(request.tokens)
        # What is known of the prompt counts as computed: the scheduler knows nothing of it.
        while through or self.prefiller.num_computed + size <= until:
            logits = next(chunks)
            if logits is not None:
                self._leave()
                found = logits.clone()
                self.batch.put(self.prefiller.session, [request])
                if not self._looked_at(name, found):
                    self.prefiller.session.reset(zero=True)
                return found[0]
        return None

    def _chunks(self, request: Request) -> Generator[torch.Tensor | None, None, None]:
        """Return the chunks of a prompt, which is begun where it is not."""
        if self._prompt and self._prompt[0] is request:
            return self._prompt[1]
        self._leave()
        size = self.engine.limits.prefill_chunk
        marks = self._vocabulary.marks(request.tokens, True) if self._vocabulary else ()
        prompt = Prompt(request.tokens, marks=marks, reuse=request.reuse)
        chunks = self.prefiller.chunks(prompt, lambda start: start + size)
        self._prompt = request, chunks
        return chunks

    def _looked_at(self, name: str, logits: torch.Tensor) -> bool:
        """Whether logits are finite; where they are not, say so once."""
        finite = bool(logits.isfinite().all())
        if not finite and name not in self.spoiled:
            self.spoiled.add(name)
            log.error("request %s: its logits are NaN or infinite; its text means nothing", name)
        return finite

    def _leave(self) -> None:
        """Leave the prompt in prefill; the prefiller keeps what it has computed."""
        if self._prompt:
            self._prompt[1].close()
            self._prompt = None

    def close(self) -> None:
        """Let go of all caches."""
        self._leave()
        self.batch.clear()
        self.prefiller.close()
