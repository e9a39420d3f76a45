"""Long documents with needles: facts at ten depths, of which a question at the end asks for one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from g4ir.engine.engine import TOKENIZER, Engine
from g4ir.errors import InputError
from g4ir.generate.tokenizer import Codec
from g4ir.ui.units import count_text

from .tokens import random_ids

#: depths of the needles, as shares of the document
DEPTHS = tuple((2 * i + 1) / 20 for i in range(10))
#: words of the sentences between them. The numbers of words have no common divisor, so that
#: sentence i takes word i of each list and none repeats within 5040 of them
WORDS = [
    [f" {word.strip()}" for word in line.split("|")]
    for line in (
        "The baker|A sailor|Her uncle|The teacher|My neighbour|A doctor|The painter",
        "counted|painted|sold|found|repaired|carried|described|forgot|cleaned",
        "red lamps|small boats|chairs|letters|apples|maps|silver coins|blue doors",
        "near the river.|in the market.|before the storm.|after lunch.|on the hill.|in May."
        "|at the station.|by the wall.|with a friend.|for nothing.|in the rain.",
    )
]
CITIES = ["Oslo", "Lima", "Cairo", "Quito", "Turin", "Delhi", "Perth", "Kyoto", "Accra", "Porto"]
#: tokens of a key, of a value and of a sentence, where there is no tokenizer
RANDOM_KEY, RANDOM_VALUE, RANDOM_SENTENCE = 6, 3, 12
#: a context is at least so many times as long as its needles
CAPACITY = 2


@dataclass(frozen=True)
class Needle:
    """A fact: `value` follows after `key`. depth: its position in the document, 0 to 1."""

    depth: float
    key: tuple[int, ...]
    value: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.key) + len(self.value)


@dataclass(frozen=True, eq=False)
class Haystack:
    """Token ids i64[T], which contain each needle; there is space for one more after them."""

    ids: torch.Tensor
    needles: tuple[Needle, ...]


def haystack(engine: Engine, length: int) -> Haystack:
    """Return a document for a context of `length` tokens: English sentences, or random tokens if
    the engine has no tokenizer. InputError for a context that is too short for ten needles."""
    needles, sentences = _parts(engine)
    facts, question = sum(map(len, needles)), max(map(len, needles))
    if length < (shortest := CAPACITY * facts + question):
        why = f"ten needles and a question take {facts + question} tokens"
        raise InputError(f"--ctx {count_text(length)}: {why}; give at least {shortest}")
    bos, waiting, size = engine.spec.tokens.bos, [*needles], length - question
    ids = [] if bos is None else [bos]
    while len(ids) < size:
        if waiting and len(ids) >= waiting[0].depth * size:
            needle = waiting.pop(0)
            ids += [*needle.key, *needle.value]
        else:
            ids += next(sentences)
    return Haystack(torch.tensor(ids[:size]), needles)


def text_of(engine: Engine, count: int) -> list[int]:
    """Return the first `count` tokens of a document."""
    (_, sentences), bos = _parts(engine), engine.spec.tokens.bos
    ids = [] if bos is None else [bos]
    while len(ids) < count:
        ids += next(sentences)
    return ids[:count]


def _parts(engine: Engine) -> tuple[tuple[Needle, ...], Iterator[list[int]]]:
    """Return ten needles, and the sentences between them."""
    if not (engine.path / TOKENIZER).is_file():
        ids = random_ids(engine, (len(DEPTHS), RANDOM_KEY + RANDOM_VALUE)).tolist()
        needles = (
            Needle(d, tuple(row[:RANDOM_KEY]), tuple(row[RANDOM_KEY:]))
            for d, row in zip(DEPTHS, ids)
        )
        return tuple(needles), _random_sentences(engine)
    encode = Codec(engine).plain
    needles = (
        Needle(d, tuple(encode(f" The pass code of {city} is")), tuple(encode(f" {code}.")))
        for d, city, code in zip(DEPTHS, CITIES, range(4817, 9999, 317))
    )
    return tuple(needles), _sentences(encode)


def _sentences(encode: Callable[[str], list[int]]) -> Iterator[list[int]]:
    i = 0
    while True:
        yield encode("".join(words[i % len(words)] for words in WORDS))
        i += 1


def _random_sentences(engine: Engine) -> Iterator[list[int]]:
    seed = 1
    while True:
        yield random_ids(engine, (RANDOM_SENTENCE,), seed).tolist()
        seed += 1
