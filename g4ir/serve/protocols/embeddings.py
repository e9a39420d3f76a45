"""Bodies and answers of OpenAI's /v1/embeddings, of /v1/rerank (as Cohere, Jina and vLLM have
it), and of ollama's /api/embed."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from g4ir.serve import request_schema as schema
from g4ir.serve.http_errors import bad

if TYPE_CHECKING:
    import torch

Body = dict[str, Any]

#: maximum number of texts of a request: an answer has some kilobytes for each
MAX_TEXTS = 8192
#: how /v1/rerank scores documents: no cross-encoder reads both texts
METHOD = "cosine similarity of embeddings"
FLOAT, BASE64 = "float", "base64"
#: names of a body's texts and of the sizes asked for
TEXTS, DOCUMENTS, SIZE = "input", "documents", "dimensions"
SIZES = schema.integer(1)


@dataclass(frozen=True)
class EmbeddingRequest:
    """Texts (or token ids) to embed; `tasks`: that of all, or of the first and of the others."""

    texts: list[Any]
    field: str
    tasks: tuple[str | None, ...] = (None,)
    dims: int | None = None
    truncate: bool = False
    top_n: int | None = None
    base64: bool = False
    returned: bool = False


def read_embeddings(body: Body) -> EmbeddingRequest:
    """Read a body of /v1/embeddings. Refused for a wrong field, by name."""
    how = _optional(body, "encoding_format", schema.one_of(FLOAT, BASE64), FLOAT)
    return EmbeddingRequest(
        _inputs(body.get(TEXTS), TEXTS),
        TEXTS,
        (_optional(body, "task", schema.TEXT),),
        _optional(body, SIZE, SIZES),
        _optional(body, "truncate", schema.FLAG, False),
        base64=how == BASE64,
    )


def read_ollama(body: Body) -> EmbeddingRequest:
    """Read a body of /api/embed, which cuts long texts by default."""
    texts = _inputs(body.get(TEXTS), TEXTS) if body.get(TEXTS) != [] else []
    cut = _optional(body, "truncate", schema.FLAG, True)
    return EmbeddingRequest(texts, TEXTS, dims=_optional(body, SIZE, SIZES), truncate=cut)


def read_rerank(body: Body) -> EmbeddingRequest:
    """Read a body of /v1/rerank: the query is the first text."""
    query, given = _optional(body, "query", schema.TEXT), body.get(DOCUMENTS)
    if query is None:
        raise bad("query", "is missing; give a text")
    documents = given if isinstance(given, list) else []
    texts = [d.get("text") if isinstance(d, dict) else d for d in documents]
    if not texts or not all(isinstance(t, str) for t in texts):
        raise bad(DOCUMENTS, "expected a list of texts, or of objects with `text`")
    return EmbeddingRequest(
        _bounded([query, *texts], DOCUMENTS),
        DOCUMENTS,
        ("query", "document"),
        top_n=_optional(body, "top_n", SIZES),
        returned=_optional(body, "return_documents", schema.FLAG, False),
    )


def embeddings_body(
    asked: EmbeddingRequest, vectors: torch.Tensor, tokens: int, model: str
) -> Body:
    """Return the answer of /v1/embeddings: vectors float32 [N, D] as lists or as base64."""
    rows: Sequence[Any] = (
        [base64.b64encode(v.numpy().tobytes()).decode() for v in vectors]
        if asked.base64
        else [v.tolist() for v in vectors]  # releases the interpreter lock in between
    )
    data = [{"object": "embedding", "index": i, "embedding": row} for i, row in enumerate(rows)]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": model, "usage": usage}


def ollama_body(asked: EmbeddingRequest, vectors: torch.Tensor, tokens: int, model: str) -> Body:
    return {
        "model": model,
        "embeddings": [v.tolist() for v in vectors],
        "prompt_eval_count": tokens,
    }


def rerank_body(asked: EmbeddingRequest, vectors: torch.Tensor, tokens: int, model: str) -> Body:
    """Return the answer of /v1/rerank: documents by falling similarity to the query, row 0."""
    scores = (vectors[1:] @ vectors[0]).tolist()
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    results: list[Body] = [
        {"index": i, "relevance_score": scores[i]}
        | ({"document": {"text": asked.texts[i + 1]}} if asked.returned else {})
        for i in order[: asked.top_n]
    ]
    return {"model": model, "method": METHOD, "results": results, "usage": {"total_tokens": tokens}}


def _inputs(value: Any, name: str) -> list[Any]:
    """Return texts: one, a list of them, the token ids of one, or a list of such lists."""
    if isinstance(value, str):
        return [value]
    kinds = {type(x) for x in value} if isinstance(value, list) else set()
    if kinds == {int}:
        return [value]
    if kinds in ({str}, {list}):
        return _bounded(value, name)
    raise bad(name, "expected a text, a list of texts, token ids, or a list of lists of them")


def _bounded(texts: list[Any], name: str) -> list[Any]:
    if len(texts) > MAX_TEXTS:
        message = f"{len(texts)} texts, and a request may have {MAX_TEXTS}; send several"
        raise bad(name, message)
    return texts


def _optional(body: Mapping[str, Any], name: str, read: schema.Read, default: Any = None) -> Any:
    return default if body.get(name) is None else read(body[name], name)
