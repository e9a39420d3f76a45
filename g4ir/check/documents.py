"""Texts to score, as windows of token ids; files of any size are read in blocks."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from g4ir.chat.text_files import cut_blocks, read_text
from g4ir.engine.engine import Engine
from g4ir.engine.prompts import checked_ids
from g4ir.errors import InputError
from g4ir.generate.jsonl import FIELDS, IDS, TEXT, Field, ReadAhead, checked_fields, parse_line
from g4ir.generate.tokenizer import Codec

from .tokens import check_no_media

#: label of a token that is not scored, as in transformers
IGNORED = -100
#: fields of a JSON line, which has either `text` or `tokens`, and `labels` only with `tokens`
LINE: Mapping[str, Field] = {
    "id": FIELDS["id"],
    "text": TEXT,
    "tokens": IDS,
    "labels": IDS,
    "bos": FIELDS["bos"],
}
#: token ids, and the label of each
Labelled = tuple[list[int], list[int]]


@dataclass(frozen=True)
class Window:
    """Token ids that are scored in one context, and their labels: `labels[i]` is predicted from
    `ids[:i]`, so the first is never scored; labels IGNORED are not scored either. `part`: the
    window's index in its document."""

    document: str | int
    part: int
    ids: list[int]
    labels: list[int]


@dataclass
class Reader:
    """Splits documents into windows of at most `max_seq` tokens. Each begins with the document's
    <bos>; without one, each but the first begins with the last token of the window before.
    `max_tokens`: tokens of all documents together (<bos> not counted) after which reading stops."""

    engine: Engine
    max_seq: int
    max_tokens: int = sys.maxsize

    def __post_init__(self) -> None:
        if self.max_seq < 2:
            raise InputError("an engine has --max-seq 1: build it again with 2 or more for scores")

    @cached_property
    def _codec(self) -> Codec:
        return Codec(self.engine)

    def files(self, paths: Iterable[str]) -> Iterator[Window]:
        """Yield the windows of files, each a document in UTF-8. They are tokenised in blocks, cut
        after a newline if there is one. InputError for a file that is not text, or has fewer than
        2 tokens."""
        for path in paths:
            yield from self._windows(
                path, path, self._tokenised(cut_blocks(read_text(Path(path))), path)
            )

    def lines(self, path: str) -> Iterator[Window]:
        """Yield the windows of a file of JSON lines, each a document with the fields LINE.
        InputError for an invalid line, or one of fewer than 2 tokens."""
        with Path(path).open("rb") as stream:
            lines = ReadAhead(stream)
            while self.max_tokens and (line := lines.next(wait=True)):
                where = f"{path}:{line[0]}"
                fields = parse_line(line[1], where)
                fields |= {"id": line[0]} if fields.get("id") is None else {}
                yield from self.fields(fields, where)

    def values(self, texts: Any) -> Iterator[Window]:
        """Yield the windows of one text or several, each a string, a list of token ids, or a
        mapping of the fields LINE. Documents are named by their index."""
        if not isinstance(texts, Iterable):
            raise InputError(f"texts {texts!r:.80}: expected a text or a list of texts")
        many = [texts] if isinstance(texts, str | Mapping) else [*texts]
        for index, text in enumerate([many] if {*map(type, many)} == {int} else many):
            named = {"text": text} if isinstance(text, str) else {"tokens": text}
            fields = text if isinstance(text, Mapping) else named
            yield from self.fields({**fields, "id": index}, f"text {index}")

    def fields(self, values: Mapping[str, Any], where: str) -> Iterator[Window]:
        """Yield the windows of a document with the fields LINE; `where` names it in errors."""
        fields = checked_fields(values, where, LINE, ("text", "tokens"))
        name = fields["id"]
        if "text" in fields:
            if "labels" in fields:
                raise InputError(f"{where}: labels are for tokens: give tokens, not a text")
            pieces = self._tokenised(cut_blocks([fields["text"]]), where, fields.get("bos", True))
            return self._windows(name, where, pieces)
        text = self.engine.spec.text
        ids = checked_ids(fields["tokens"], text.readable_ids, where)
        check_no_media(self.engine, ids, where)
        labels = fields.get("labels", ids)
        if len(labels) != len(ids):
            expected = f"expected {len(ids)}, one for each token"
            raise InputError(f"{where}: {len(labels)} labels, {expected}")
        checked_ids([i for i in labels if i != IGNORED], text.vocab_size, f"{where}: labels")
        return self._windows(name, where, iter([(ids, [*labels])]))

    def _tokenised(self, blocks: Iterator[str], where: str, bos: bool = True) -> Iterator[Labelled]:
        for block in blocks:
            ids = self._codec.encode(block, where, bos)
            checked_ids(ids, self.engine.spec.text.readable_ids, where)
            check_no_media(self.engine, ids, where)
            yield ids, ids
            bos = False

    def _windows(self, name: str | int, where: str, pieces: Iterator[Labelled]) -> Iterator[Window]:
        if not self.max_tokens:
            return
        bos, part, head = self.engine.spec.tokens.bos, 0, list[int]()
        ids, labels = list[int](), list[int]()
        for more, more_labels in pieces:
            if not ids and more[:1] == [bos]:
                head, ids, labels = [*more[:1]], [*more[:1]], [IGNORED]
                more, more_labels = more[1:], more_labels[1:]
            ids += more[: self.max_tokens]
            labels += more_labels[: self.max_tokens]
            self.max_tokens -= len(more[: self.max_tokens])
            while len(ids) > self.max_seq:
                yield Window(name, part, ids[: self.max_seq], labels[: self.max_seq])
                before = head or ids[self.max_seq - 1 : self.max_seq]
                ids = before + ids[self.max_seq :]
                labels = [IGNORED] * len(before) + labels[self.max_seq :]
                part += 1
            if not self.max_tokens:
                break
        if len(ids) < 2 and not self.max_tokens:
            return  # max_tokens reached
        if len(ids) < 2:
            raise InputError(f"{where}: fewer than 2 tokens, <bos> included: nothing to score")
        yield Window(name, part, ids, labels)
