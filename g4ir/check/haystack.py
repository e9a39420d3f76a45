"""Long documents with needles: facts at ten depths, of which a question at the end asks for one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, count, islice
from pathlib import Path

import torch

from g4ir.engine.engine import TOKENIZER, Engine
from g4ir.errors import InputError
from g4ir.generate.tokenizer import Codec
from g4ir.ui.files import read_table
from g4ir.ui.units import count_text

from .tokens import random_ids

#: depths of the needles, as fractions of the document
DEPTHS = tuple((2 * i + 1) / 20 for i in range(10))
#: words of the sentences between needles; cities: each needle is the pass code of one
WORDS, CITIES = read_table(Path(__file__).with_suffix(".yaml")).values()
#: tokens of a key, of a value and of a sentence, for engines without a tokenizer
RANDOM_KEY, RANDOM_VALUE, RANDOM_SENTENCE = 6, 3, 12
#: minimum length of a document, as a multiple of its needles' length
CAPACITY = 2


@dataclass(frozen=True)
class Needle:
    """A fact: tokens `key`, followed by tokens `value`. depth: its intended position, as a fraction
    of the document's length; in short documents it comes earlier."""

    depth: float
    key: tuple[int, ...]
    value: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.key) + len(self.value)


@dataclass(frozen=True, eq=False)
class Haystack:
    """Token ids i64[T] of a document that contains each needle; after them the context has capacity
    for one more, the question."""

    ids: torch.Tensor
    needles: tuple[Needle, ...]


def haystack(engine: Engine, length: int) -> Haystack:
    """Return a document for a context of `length` tokens: English sentences, or random tokens if
    the engine has no tokenizer. InputError for a context that is too short for ten needles."""
    needles, sentences = _parts(engine)
    facts, question = sum(map(len, needles)), max(map(len, needles))
    if length < (shortest := CAPACITY * facts + question):
        why = f"ten needles, as much other text and a question take {shortest} tokens"
        raise InputError(f"--ctx {count_text(length)}: {why}; give at least as many")
    bos, waiting, size = engine.spec.tokens.bos, [*needles], length - question
    ids, sentence = [] if bos is None else [bos], next(sentences)
    while len(ids) < size:
        # Before its depth if the needles would not fit after the sentence.
        end = len(ids) + len(sentence) + sum(map(len, waiting))
        if waiting and (len(ids) >= waiting[0].depth * size or end > size):
            needle = waiting.pop(0)
            ids += [*needle.key, *needle.value]
        else:
            ids += sentence
            sentence = next(sentences)
    return Haystack(torch.tensor(ids[:size]), needles)


def text_of(engine: Engine, size: int) -> list[int]:
    """Return the first `size` tokens of a document without needles."""
    start = [] if (bos := engine.spec.tokens.bos) is None else [bos]
    return [*islice(chain(start, chain.from_iterable(_parts(engine)[1])), size)]


def _parts(engine: Engine) -> tuple[tuple[Needle, ...], Iterator[list[int]]]:
    """Return ten needles, and an endless iterator of sentences to put between them."""
    if not (engine.path / TOKENIZER).is_file():
        ids = random_ids(engine, (len(DEPTHS), RANDOM_KEY + RANDOM_VALUE)).tolist()
        pairs = [(row[:RANDOM_KEY], row[RANDOM_KEY:]) for row in ids]
        sentences = (random_ids(engine, (RANDOM_SENTENCE,), seed).tolist() for seed in count(1))
    else:
        encode, codes = Codec(engine).plain, range(4817, 9999, 317)
        facts = ((f" The pass code of {city} is", f" {code}.") for city, code in zip(CITIES, codes))
        pairs = [(encode(key), encode(value)) for key, value in facts]
        texts = ("".join(f" {words[i % len(words)]}" for words in WORDS) for i in count())
        sentences = (encode(text) for text in texts)
    needles = (Needle(d, tuple(key), tuple(value)) for d, (key, value) in zip(DEPTHS, pairs))
    return tuple(needles), sentences
