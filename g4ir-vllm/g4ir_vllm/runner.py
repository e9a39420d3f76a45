"""Computes the requests of vLLM's scheduler in the slots of an engine: tokens in, logits out.

A step decodes the scheduled sequences, then prefills the scheduled prompts one after another, each
up to its scheduled token; a complete prompt gets a slot. The scheduler counts tokens, but the
engine computes whole chunks, so an incomplete prompt may lag behind the scheduler by less than a
chunk.
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
    """A request of vLLM. `slot`: its index in the engine's batch, -1 until its prompt is computed;
    `reuse`: whether its prompt may be taken from the prefix cache."""

    name: str
    tokens: tuple[int, ...]
    reuse: bool = True
    slot: int = -1


class Runner:
    """Runs requests on an engine: its batch of sequences in decode, at most one request in prefill,
    and the prefix cache. `rows`: maximum batch size."""

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
        #: requests whose logits were NaN or infinite; their slots are zeroed when they end
        self.spoiled: set[str] = set()

    def add(self, name: str, tokens: Sequence[int], reuse: bool = True) -> None:
        """Add a request whose prompt is not computed yet."""
        self.requests[name] = Request(name, tuple(tokens), reuse)

    def drop(self, name: str) -> None:
        """Forget a request: free its slot, or end its prefill. Unknown names are ignored."""
        if request := self.requests.pop(name, None):
            if self._prompt and self._prompt[0] is request:
                self._leave()
            self.batch.drop(request, zero=name in self.spoiled)
            self.spoiled.discard(name)

    def decode(self, tokens: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """Append a token to each sequence (request name -> token) in one step; return request name
        -> logits [vocab]."""
        if not tokens:
            return {}
        if self.batch.should_shrink():
            self.batch.shrink()
        rows = {name: self.requests[name].slot for name in tokens}
        newest = {rows[name]: [token] for name, token in tokens.items()}
        logits = self.batch.session.verify(*padded(newest, self.batch.session.batch))[:, 0]
        found = {name: logits[row] for name, row in rows.items()}
        for name, row in found.items():
            self._check_finite(name, row)
        return found

    def compute(self, name: str, until: int) -> torch.Tensor | None:
        """Prefill the first `until` tokens of a prompt, rounded down to whole chunks. At the end of
        the prompt move it to a slot and return its last token's logits [vocab]; None before."""
        request, size = self.requests[name], self.engine.limits.prefill_chunk
        chunks, through = self._chunks(request), until >= len(request.tokens)
        # Tokens from the prefix cache count as computed; the scheduler does not know of them.
        while through or self.prefiller.num_computed + size <= until:
            logits = next(chunks)
            if logits is not None:
                self._leave()
                found = logits.clone()
                self.batch.put(self.prefiller.session, [request])
                if not self._check_finite(name, found):
                    self.prefiller.session.reset(zero=True)
                return found[0]
        return None

    def _chunks(self, request: Request) -> Generator[torch.Tensor | None, None, None]:
        """Return the iterator of a prompt's chunks: the running one if this prompt is in prefill,
        else a new one, for which the prefill of another prompt is interrupted."""
        if self._prompt and self._prompt[0] is request:
            return self._prompt[1]
        self._leave()
        size = self.engine.limits.prefill_chunk
        marks = self._vocabulary.marks(request.tokens, True) if self._vocabulary else ()
        prompt = Prompt(request.tokens, marks=marks, reuse=request.reuse)
        chunks = self.prefiller.chunks(prompt, lambda start: start + size)
        self._prompt = request, chunks
        return chunks

    def _check_finite(self, name: str, logits: torch.Tensor) -> bool:
        """Return whether logits are finite; log a request's first that are not, and add the request
        to `spoiled`."""
        finite = bool(logits.isfinite().all())
        if not finite and name not in self.spoiled:
            self.spoiled.add(name)
            log.error("request %s: logits are NaN or infinite; its text is meaningless", name)
        return finite

    def _leave(self) -> None:
        """End the running prefill, complete or not; the prefix cache may keep its computed
        tokens."""
        if self._prompt:
            self._prompt[1].close()
            self._prompt = None

    def close(self) -> None:
        """End the prefill and free the KV caches of the batch and of the prefix cache."""
        self._leave()
        self.batch.clear()
        self.prefiller.close()
