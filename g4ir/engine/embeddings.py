"""Embeddings of texts, and of texts with media, by an encoder's engine.

Texts are sorted by length and packed into chunks without padding between them: an encoder attends
within each text (ops/encoder.py), so that matmuls run at the rate of a full chunk, and an embedding
does not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from g4ir.backends.base import GraphRun
from g4ir.chat.messages import Medium, read_part
from g4ir.chat.prompt import text_ids
from g4ir.errors import EngineError, InputError
from g4ir.media.merge import merged
from g4ir.media.prompt import expand_placeholders
from g4ir.media.soft import Soft
from g4ir.model.encoder import EMBEDDING, ENCODE
from g4ir.model.media import check_supported, encode_options, placeholders
from g4ir.ops.finite import not_finite
from g4ir.spec.parts import FAMILIES, Variant
from g4ir.spec.reader import did_you_mean, json_object
from g4ir.spec.sentence_transformers import PROMPTS

from .multimodal import read_local
from .prompts import checked_ids

Tensor = torch.Tensor
#: an input: a text, its token ids, or its parts in order (texts, and media as in a message's
#: content or as Soft); a mapping is a single part
EncoderInput = str | Sequence[Any] | Mapping[str, Any]

#: max tokens of a chunk, unless one text has more; more were not faster (docs/embeddings.md)
PACKED_TOKENS = 1024
#: min tokens of a chunk, since a chunk of one token would run the kernels of a decode step
MIN_TOKENS = 2
#: number of inputs that are tokenised and sorted together, which bounds the memory: WINDOW if all
#: are texts or token ids, MEDIA_WINDOW if one is a list of parts, which may have media
WINDOW, MEDIA_WINDOW = 4096, 64
#: fixes of an input that is too long: without media, and with media, which are not truncated
TRUNCATE, SHORTEN = "cut it, give --truncate", "shorten its text, or give fewer media"
#: max characters of a text per token of the context: longer ones are cut or refused before they are
#: tokenised
MAX_CHARACTERS = 64


def need_decoder(spec: Variant, label: str) -> None:
    """Raise InputError, which begins with the engine's `label`, if the model is an encoder."""
    if spec.embedding:
        why = f"{spec.name} is an encoder: it embeds texts and generates none"
        raise InputError(f"{label}: {why}; use `g4ir embed`, or give a model that generates")


def need_encoder(spec: Variant, label: str) -> None:
    """Raise InputError, which begins with the engine's `label`, if the model is no encoder."""
    if not spec.embedding:
        why = f"{spec.name} generates text and is no embedding model"
        raise InputError(f"{label}: {why}; give an encoder, such as embeddinggemma-300m")


def read_prompts(folder: Path, spec: Variant) -> tuple[Mapping[str, str], str | None]:
    """Return the prompts, task -> text that is put before each input, and the default task or None:
    the model_type's prompts, overridden by the checkpoint's. EngineError for an invalid file."""
    path = folder / PROMPTS
    if not path.is_file():
        return FAMILIES[spec.model_type]["prompts"], None
    try:
        values = json_object(path.read_bytes())
    except ValueError as e:
        raise EngineError(f"{path}: {e}; restore the file") from None
    prompts = values.get("prompts")
    if not isinstance(prompts, dict) or not all(isinstance(p, str) for p in prompts.values()):
        raise EngineError(f"{path}: prompts must map names to texts; restore the file")
    default = values.get("default_prompt_name")
    if default is not None and default not in [*prompts]:  # it may be unhashable
        raise EngineError(
            f"{path}: default_prompt_name {str(default)[:80]!r} is none of its prompts; "
            f"restore the file"
        )
    return {**FAMILIES[spec.model_type]["prompts"], **prompts}, default


@dataclass(frozen=True)
class EncoderTokens:
    """Token ids of one input, with a placeholder for each soft token of its media."""

    ids: list[int]
    soft: tuple[Soft, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)


class Embedder:
    """Embeds texts on an encoder's engine; several threads take turns, a chunk each."""

    def __init__(self, engine: Any) -> None:
        need_encoder(engine.spec, engine.label)
        self.engine = engine
        self.prompts, self.default_task = read_prompts(engine.path, engine.spec)
        self._state = engine.runtime.new_state(engine.limits.max_batch)
        self._lock = Lock()

    @cached_property
    def tokenizer(self) -> Any:
        return self.engine.tokenizer()

    def prompt(self, task: str | None) -> str:
        """Return the text that a task puts before each input; task None: the default task. The text
        is "" for the task `none`, and for None without a default. InputError for an unknown
        task."""
        name = self.default_task if task is None else task
        if name is None or name == "none":
            return ""
        if name not in self.prompts:
            near = did_you_mean(name, self.prompts)
            tasks = ", ".join(("none", *self.prompts))
            model = self.engine.spec.name
            raise InputError(f"unknown task {name[:80]!r}{near}; the tasks of {model} are {tasks}")
        return self.prompts[name]

    def size(self, dims: int | None) -> int:
        """Return `dims`, or the full size of embeddings if it is None; InputError for a size that
        the model was not trained for."""
        spec = self.engine.spec
        if dims is not None and (type(dims) is not int or dims not in spec.embedding.dims):
            trained = ", ".join(map(str, spec.embedding.dims))
            expected = f"expected a size that {spec.name} was trained for: {trained}"
            raise InputError(f"dims {dims}: {expected}")
        return dims or int(spec.embedding.dims[0])

    def embed(
        self,
        texts: Sequence[EncoderInput],
        task: str | None = None,
        dims: int | None = None,
        truncate: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> Iterator[Tensor]:
        """Yield the embeddings float32 [n, dims] of up to WINDOW inputs at a time (MEDIA_WINDOW if
        one of them is given as parts), in order, arguments as in `Engine.embed`; `progress` is
        called with the number of inputs done."""
        prompt, size = self.prompt(task), self.size(dims)
        done = 0
        while done < len(texts):
            start, some = done, texts[done : done + WINDOW]
            some = some if all(map(_is_text, some)) else some[:MEDIA_WINDOW]
            out = torch.empty(len(some), size)
            for rows, vectors in self.encode(self.tokenize(some, prompt, truncate, start), start):
                out[rows] = self.cut(vectors, size)
                done += len(rows)
                if progress:
                    progress(done)
            yield out

    def tokenize(
        self,
        texts: Sequence[EncoderInput],
        prompt: str = "",
        truncate: bool = False,
        first: int = 0,
    ) -> list[EncoderTokens]:
        """Return each input's token ids, with `prompt` before the text and the tokenizer's start
        and end tokens around it, and its media's soft tokens. An input of token ids is used
        as it is. InputError for an empty, invalid or too long input (`truncate` cuts it, a text
        before its end token, unless it has media); `first`: the first input's number in errors."""
        spec, limit, kinds = self.engine.spec, self.engine.limits.max_seq, self.engine.media.kinds
        inputs = [self._read(t, first + i, truncate) for i, t in enumerate(texts)]
        strings = [prompt + s for s, _ in inputs if s is not None]
        label = f"texts {first} to {first + len(texts) - 1}"
        encoded = iter(text_ids(self.tokenizer, strings, True, label) if strings else ())
        out = []
        for i, (text, (string, soft)) in enumerate(zip(texts, inputs, strict=True)):
            name = f"text {first + i}"
            vocab = spec.text.vocab_size
            ids = checked_ids([*text], vocab, name) if string is None else next(encoded)
            try:
                (ids,) = expand_placeholders([ids], soft, spec.tokens, kinds=kinds)
            except InputError as e:
                raise InputError(f"{name}: {e}") from None
            if len(ids) > limit:
                if soft or not truncate:
                    fix = SHORTEN if soft else TRUNCATE
                    raise _too_long(name, f"{len(ids)} tokens", limit, fix)
                ends = string is not None and ids[-1] in spec.tokens.eos
                ids = [*ids[: limit - 1], ids[-1]] if ends else ids[:limit]
            out.append(EncoderTokens(ids, soft))
        return out

    def _read(
        self, text: EncoderInput, number: int, truncate: bool
    ) -> tuple[str | None, tuple[Soft, ...]]:
        """Return an input's text with a placeholder for each of its media (None for token ids), and
        the soft tokens of these. A text of more than MAX_CHARACTERS * max_seq characters is cut
        with `truncate` if it has no media, else an InputError."""
        name, limit, soft = f"text {number}", self.engine.limits.max_seq, tuple[Soft, ...]()
        if not isinstance(text, str):
            if not isinstance(text, Sequence | Mapping) or not text:
                why = "expected a text, or a list of token ids or of parts that is not empty"
                raise InputError(f"{name}: {why}")
            if not isinstance(text, Mapping) and not isinstance(text[0], str | Mapping | Soft):
                return None, ()
            text, soft = self._content([text] if isinstance(text, Mapping) else text, name)
        if not text.strip():
            raise InputError(f"{name} is empty or white space; leave it out")
        if len(text) > MAX_CHARACTERS * limit:
            if soft or not truncate:
                fix = SHORTEN if soft else TRUNCATE
                raise _too_long(name, f"{len(text)} characters", limit, fix)
            text = text[: MAX_CHARACTERS * limit]
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise InputError(f"{name}: not UTF-8 at character {e.start}") from None
        return text, soft

    def _content(self, parts: Sequence[Any], name: str) -> tuple[str, tuple[Soft, ...]]:
        """Return the parts of an input as a text with a placeholder for each medium, and the soft
        tokens of the media; InputError names the part."""
        holders, text = placeholders(self.engine.spec.tokens), ""
        soft = list[Soft]()
        for i, value in enumerate(parts):
            where = f"{name}[{i}]"
            part = value if isinstance(value, Soft) else read_part(value, where)
            if isinstance(part, Medium):
                try:
                    part = self._encode_medium(part)
                except InputError as e:
                    begins = str(e).startswith(where)
                    raise InputError(str(e) if begins else f"{where}: {e}") from None
            if isinstance(part, Soft):
                soft.append(part)
                part = self.tokenizer.id_to_token(holders[part.kind]) or ""
            text += part
        return text, tuple(soft)

    def _encode_medium(self, part: Medium) -> Soft:
        check_supported(part.kind, self.engine.media, self.engine.spec)
        item, settings = part.part.get(part.part["type"]), encode_options(part.kind, part.part)
        if item is None or isinstance(item, str | dict):
            return read_local(self.engine, part, **settings)
        return self.engine.encode(part.kind, item, **settings)

    def encode(
        self, ids: Sequence[EncoderTokens], first: int = 0
    ) -> Iterator[tuple[list[int], Tensor]]:
        """Yield for each chunk the indices of its n texts, and their embeddings float32 [n, size].
        CheckError for an embedding that is not finite, which numbers the texts from `first`."""
        engine = self.engine
        engine.check_process()
        for rows in pack(
            [len(x) for x in ids], engine.limits.prefill_chunk, engine.limits.max_batch
        ):
            vectors = self._run([ids[row] for row in rows])
            if not bool(vectors.isfinite().all()):
                row = rows[int((~vectors.isfinite().all(-1)).nonzero()[0, 0])]
                name = f"text {first + row} ({len(ids[row])} tokens): its embedding"
                raise not_finite(name, engine.dtype)
            yield rows, vectors

    @staticmethod
    def cut(vectors: Tensor, size: int) -> Tensor:
        """Return the first `size` elements of each embedding, normalised again."""
        if size == vectors.shape[1]:
            return vectors
        return torch.nn.functional.normalize(vectors[:, :size], dim=-1)

    def _run(self, texts: Sequence[EncoderTokens]) -> Tensor:
        """Run one chunk of at most max_batch texts; embeddings float32 [n, size] on the host."""
        engine = self.engine
        inputs = packed_inputs([t.ids for t in texts], self.engine.limits.max_batch)
        tokens, soft = inputs.pop("tokens"), [s for t in texts for s in t.soft]
        count = tokens.shape[1]
        with self._lock:
            feeds = engine.embed_tokens(tokens) | inputs
            if soft:
                ids = placeholders(engine.spec.tokens, engine.media.kinds)
                prompt = merged(tokens, torch.tensor([count]), soft, ids, blocks=False)
                prompt.put_soft(feeds["embeds"], prompt.piece(0, count))
            feeds = {name: t.to(engine.device) for name, t in feeds.items()}
            outputs = engine.runtime.run(GraphRun(ENCODE, feeds, count), self._state)
            vectors: Tensor = outputs[EMBEDDING][0, : len(texts)].to("cpu", torch.float32)
        return vectors


def packed_inputs(texts: Sequence[Sequence[int]], batch: int) -> dict[str, Tensor]:
    """Return the inputs of a chunk of texts, one after another: `tokens` and `positions` i64 [1,
    S], padded to MIN_TOKENS, and `ends` i64 [batch], the offset of each text's end; if there are
    fewer texts than `batch`, the last offset is repeated."""
    lengths = [len(x) for x in texts]
    padding = [0] * (MIN_TOKENS - sum(lengths))
    positions = [i for n in lengths for i in range(n)] + padding
    ends = torch.tensor([*lengths, *[0] * (batch - len(texts))]).cumsum(0)
    tokens = torch.tensor([[*(t for x in texts for t in x), *padding]])
    return {"tokens": tokens, "positions": torch.tensor([positions]), "ends": ends}


def _is_text(text: EncoderInput) -> bool:
    """Whether an input is a text or token ids. (A list of parts may have media.)"""
    return isinstance(text, str) or (isinstance(text, Sequence) and {*map(type, text)} <= {int})


def _too_long(name: str, length: str, limit: int, fix: str) -> InputError:
    problem = f"{length}, and this engine takes {limit} tokens"
    return InputError(f"{name}: {problem}; {fix}, or build with a larger --max-seq")


def pack(lengths: Sequence[int], limit: int, count: int) -> Iterator[list[int]]:
    """Yield the indices of the texts of each chunk, the longest first: at most `count` texts, with
    at most min(limit, PACKED_TOKENS) tokens in total, or a single longer text. lengths: tokens of
    each text."""
    budget, chunk, size = min(limit, PACKED_TOKENS), list[int](), 0
    for row in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if chunk and (size + lengths[row] > budget or len(chunk) == count):
            yield chunk
            chunk, size = [], 0
        chunk.append(row)
        size += lengths[row]
    if chunk:
        yield chunk
