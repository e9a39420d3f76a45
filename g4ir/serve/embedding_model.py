"""The embedding model of a server: requests take turns in a thread, a chunk of texts each, so that
one of thousands of texts does not hold up the others. On Linux the thread has a lower priority than
the answers' threads."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from starlette.requests import Request

from g4ir.chat.messages import Medium
from g4ir.engine.embeddings import EncoderTokens
from g4ir.engine.engine import Engine
from g4ir.media.limits import Limit

from .http_errors import named
from .media_queue import lower_thread, until_disconnect
from .media_sources import MediaFolder, encode_media
from .protocols.embeddings import SIZE, EmbeddingRequest

#: maximum texts that are tokenised in one turn
TOKENISED = 128


class EmbeddingModel:
    """An encoder's engine, and the thread that it runs in; `name`: of the model in requests."""

    def __init__(self, name: str, engine: Engine) -> None:
        self.name, self.engine, self.embedder = name, engine, engine.embedder
        _ = self.embedder.tokenizer  # raises for an engine without a tokenizer
        self._thread = ThreadPoolExecutor(1, "g4ir-embed", lower_thread)

    @property
    def facts(self) -> dict[str, Any]:
        """The model's own keys in /v1/models: context length, and sizes of embeddings."""
        sizes = [*getattr(self.engine.spec.embedding, "dims", ())]
        return {"max_model_len": self.engine.limits.max_seq, "embedding_sizes": sizes}

    def with_soft(
        self, asked: EmbeddingRequest, media: Sequence[Medium], folder: MediaFolder, limit: Limit
    ) -> EmbeddingRequest:
        """Return a request with its media replaced by their soft tokens; Refused for media that
        cannot be read."""
        with named(asked.field):
            how = self.engine, media, folder, asked.settings or {}, limit, asked.field
            soft = iter(encode_media(*how))
        filled = [
            [next(soft) if isinstance(part, Medium) else part for part in text]
            if isinstance(text, list)
            else text
            for text in asked.texts
        ]
        return replace(asked, texts=filled)

    async def embed(self, request: Request, asked: EmbeddingRequest) -> tuple[torch.Tensor, int]:
        """Return the embeddings float32 [N, D] of a request's N texts, and their tokens in total.
        Refused for an invalid text, task or size, and if the client disconnects."""
        return await until_disconnect(request, self._embed(asked))

    async def _embed(self, asked: EmbeddingRequest) -> tuple[torch.Tensor, int]:
        embedder, run = self.embedder, asyncio.get_running_loop().run_in_executor
        with named(SIZE):
            size = embedder.size(asked.dims)
        with named("task"):
            prompts = [embedder.prompt(task) for task in asked.tasks]
        ids = list[EncoderTokens]()
        # With two tasks, the first text has the first one and all others the second.
        cuts = {0, *range(len(prompts) - 1, len(asked.texts), TOKENISED), len(asked.texts)}
        with named(asked.field):
            for start, end in pairwise(sorted(cuts)):
                piece, prompt = asked.texts[start:end], prompts[min(start, len(prompts) - 1)]
                how = piece, prompt, asked.truncate, start
                ids += await run(self._thread, embedder.tokenize, *how)
        out, chunks = torch.empty(len(ids), size), embedder.encode(ids)
        while chunk := await run(self._thread, next, chunks, None):
            rows, vectors = chunk
            out[rows] = embedder.cut(vectors, size)
        return out, sum(map(len, ids))

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        self.engine.close()


def media_of(asked: EmbeddingRequest) -> list[Medium]:
    """Return the media of a request's inputs, in order."""
    parts = (part for text in asked.texts if isinstance(text, list) for part in text)
    return [part for part in parts if isinstance(part, Medium)]
