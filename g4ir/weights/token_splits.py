"""Splits of a vocabulary's tokens into two tokens, by hashes of their texts: all at once, since a
vocabulary of 262,144 tokens has 1.5 million places to cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

#: odd and irregular: hashes are polynomials in it, modulo 2^64
BASE = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Splits:
    """Splits, i64[n] each: index of the token, number of its characters before the cut, indices of
    the tokens of both parts."""

    token: np.ndarray
    cut: np.ndarray
    head: np.ndarray
    tail: np.ndarray

    def take(self, rows: np.ndarray) -> Splits:
        """Return the splits with these indices."""
        return Splits(*(a[rows] for a in vars(self).values()))


def code_points(text: str) -> np.ndarray:
    """Return the code points of a text, u64[n], plus 1: none is 0, which hashes would ignore."""
    raw = text.encode("utf-32-le", "surrogatepass")
    return np.frombuffer(raw, "<u4").astype(np.uint64) + np.uint64(1)


class HashedTokens:
    """Texts of tokens, each once, with their hashes, u64[n], and numbers of characters, i64[n]."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts, count = texts, len(texts)
        self.characters = np.fromiter(map(len, texts), np.int64, count)
        self._codes = code_points("".join(texts))
        self._starts = np.cumsum(self.characters) - self.characters
        self._longest_first = np.argsort(-self.characters, kind="stable")
        self.hashes = np.zeros(count, np.uint64)
        for index, tokens in self._columns():
            self.hashes[tokens] = self._step(self.hashes[tokens], tokens, index)
        self._order = np.argsort(self.hashes)
        self._keys = np.append(self.hashes[self._order], np.uint64(2**64 - 1))

    @property
    def collide(self) -> bool:
        """Whether two tokens have the same hash."""
        return bool((self._keys[1:-1] == self._keys[:-2]).any())

    def splits(self) -> Splits:
        """Return every split of a token into two tokens, by token and then by cut."""
        if self.collide:
            return self._splits_by_text()
        powers = np.full(int(self.characters.max(initial=0)) + 1, BASE)
        powers[0] = 1
        powers = np.cumprod(powers, dtype=np.uint64)
        heads = np.zeros(len(self.texts), np.uint64)
        parts = [Splits(*np.zeros((4, 0), np.int64))]
        for index, tokens in self._columns():
            heads[tokens] = self._step(heads[tokens], tokens, index)
            cut = index + 1
            token = tokens[self.characters[tokens] > cut]
            head = self._find(heads[token], cut)
            token, head = token[head >= 0], head[head >= 0]
            remaining = self.characters[token] - cut
            tail = self._find(self.hashes[token] - heads[token] * powers[remaining], remaining)
            some = Splits(token, np.full(len(token), cut), head, tail)
            parts.append(some.take(np.flatnonzero(tail >= 0)))
        out = Splits(*(np.concatenate(a) for a in zip(*(vars(p).values() for p in parts))))
        return out.take(np.argsort(out.token, kind="stable"))

    def _columns(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield each character index, with the tokens that have a character there."""
        counts = np.bincount(self.characters, minlength=1)
        longer = len(self.texts) - np.cumsum(counts)
        for index, count in enumerate(longer[:-1].tolist()):
            yield index, self._longest_first[:count]

    def _step(self, hashes: np.ndarray, tokens: np.ndarray, index: int) -> np.ndarray:
        return hashes * BASE + self._codes[self._starts[tokens] + index]

    def _find(self, hashes: np.ndarray, characters: np.ndarray | int) -> np.ndarray:
        """Return the tokens with these hashes and numbers of characters, -1 for none."""
        at = np.searchsorted(self._keys, hashes)
        tokens = self._order[np.minimum(at, len(self._order) - 1)]
        match = (self._keys[at] == hashes) & (self.characters[tokens] == characters)
        return np.where(match, tokens, -1)

    def _splits_by_text(self) -> Splits:
        """`splits` by comparing texts, if hashes collide."""
        ids = {text: i for i, text in enumerate(self.texts)}
        rows = [
            (ids[t], cut, ids[t[:cut]], ids[t[cut:]])
            for t in self.texts
            for cut in range(1, len(t))
            if t[:cut] in ids and t[cut:] in ids
        ]
        return Splits(*np.array(rows, np.int64).reshape(-1, 4).T)
