"""Bodies and answers of OpenAI's /v1/embeddings, of /v1/rerank (as Cohere, Jina and vLLM have
it), and of ollama's /api/embed."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from g4ir.chat.messages import read_part
from g4ir.errors import InputError
from g4ir.model.media import MEDIA_SETTINGS
from g4ir.ops.types import torch
from g4ir.serve import request_schema as schema
from g4ir.serve.http_errors import bad, named

Body = dict[str, Any]

#: maximum number of texts in a request: each has some kilobytes in the answer
MAX_TEXTS = 8192
#: scoring method that answers of /v1/rerank name, since it is no cross-encoder's score
METHOD = "cosine similarity of embeddings"
FLOAT, BASE64 = "float", "base64"
#: fields of a body: its texts or documents, and the requested size
TEXTS, DOCUMENTS, SIZE = "input", "documents", "dimensions"
SIZES = schema.integer(1)
INPUTS = "a text, token ids or an object with `content`, or a list of these or of lists of parts"


@dataclass(frozen=True)
class EmbeddingRequest:
    """Texts, token ids or lists of parts (texts and media) to embed. `field`: their field in the
    body, for errors; `tasks`: one for all inputs, or one for the first and one for the others;
    `dims`: size of the embeddings, None: the model's; `truncate`: whether texts beyond the context
    are cut, not refused; `top_n`, `returned`: number of documents in an answer of rerank (None:
    all), and whether it has their texts; `base64`: whether embeddings are returned as base64;
    `settings`: options of media."""

    texts: list[Any]
    field: str
    tasks: tuple[str | None, ...] = (None,)
    dims: int | None = None
    truncate: bool = False
    top_n: int | None = None
    base64: bool = False
    returned: bool = False
    settings: Mapping[str, Any] | None = None


def read_embeddings(body: Body) -> EmbeddingRequest:
    """Read a body of /v1/embeddings. Refused, with the field's name, if a field is wrong."""
    how = _optional(body, "encoding_format", schema.one_of(FLOAT, BASE64), FLOAT)
    names = [k for settings in MEDIA_SETTINGS.values() for k in settings if body.get(k) is not None]
    return EmbeddingRequest(
        _inputs(body.get(TEXTS), TEXTS),
        TEXTS,
        (_optional(body, "task", schema.TEXT),),
        _optional(body, SIZE, SIZES),
        _optional(body, "truncate", schema.FLAG, False),
        base64=how == BASE64,
        settings={k: schema.CHAT[k](body[k], k) for k in names},
    )


def read_ollama(body: Body) -> EmbeddingRequest:
    """Read a body of /api/embed; texts beyond the context are truncated by default."""
    texts = _inputs(body.get(TEXTS), TEXTS) if body.get(TEXTS) != [] else []
    cut = _optional(body, "truncate", schema.FLAG, True)
    return EmbeddingRequest(texts, TEXTS, dims=_optional(body, SIZE, SIZES), truncate=cut)


def read_rerank(body: Body) -> EmbeddingRequest:
    """Read a body of /v1/rerank: the query is the first text."""
    query, inputs = _optional(body, "query", schema.TEXT), body.get(DOCUMENTS)
    if query is None:
        raise bad("query", "is missing; give a text")
    documents = inputs if isinstance(inputs, list) else []
    texts = [d.get("text") if isinstance(d, dict) else d for d in documents]
    if not texts or not all(isinstance(t, str) for t in texts):
        raise bad(DOCUMENTS, "expected a list, not empty, of texts or of objects with `text`")
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
        else [v.tolist() for v in vectors]  # one by one, so that the GIL is released in between
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
    """Return the answer of /v1/rerank: the documents (vectors[1:]) by descending similarity to the
    query (vectors[0])."""
    scores = (vectors[1:] @ vectors[0]).tolist()
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    results: list[Body] = [
        {"index": i, "relevance_score": scores[i]}
        | ({"document": {"text": asked.texts[i + 1]}} if asked.returned else {})
        for i in order[: asked.top_n]
    ]
    return {"model": model, "method": METHOD, "results": results, "usage": {"total_tokens": tokens}}


def _inputs(value: Any, name: str) -> list[Any]:
    """Return a list of inputs, from one input or a list: each a text, token ids, or (for a list of
    parts or an object with `content`) a list of texts and media."""
    kinds = {type(x) for x in value} if isinstance(value, list) else set()
    if isinstance(value, str | dict) or kinds == {int}:
        value = [value]
    elif not kinds or not kinds <= {str, list, dict}:
        raise bad(name, "is an empty list" if value == [] else f"expected {INPUTS}")
    with named(name):
        return [_input(x, f"text {i}") for i, x in enumerate(_bounded(value, name))]


def _input(value: Any, where: str) -> Any:
    """Return a text or token ids, or the parts of a list or an object as texts and media."""
    if isinstance(value, dict):
        value = [value] if "type" in value else value.get("content", value.get("text"))
        if not isinstance(value, str | list):
            raise InputError(f"{where}: expected {INPUTS}")
    if isinstance(value, list) and value and isinstance(value[0], str | dict):
        return [read_part(part, f"{where}[{i}]") for i, part in enumerate(value)]
    return value


def _bounded(texts: list[Any], name: str) -> list[Any]:
    if len(texts) > MAX_TEXTS:
        query = " with the query" if name == DOCUMENTS else ""
        message = f"{len(texts)} texts{query}, and a request may have {MAX_TEXTS}; split it"
        raise bad(name, message)
    return texts


def _optional(body: Mapping[str, Any], name: str, read: schema.Read, default: Any = None) -> Any:
    return default if body.get(name) is None else read(body[name], name)
