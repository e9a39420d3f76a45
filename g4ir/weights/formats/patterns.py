"""Matches names of modules with patterns of strangers: regular expressions that cannot run for
ever."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from g4ir.errors import WeightsError
from g4ir.weights.tensorfile import quoted

#: characters of a pattern and of a tensor's name; patterns of a list
MOST_LENGTH, MOST_NAME, MOST_PATTERNS = 400, 200, 1000
#: repetitions, each of which may multiply the cost by the length of a name; ways to take
#: alternatives and optional parts, fewer by a factor for each repetition
MOST_REPEATS, MOST_WAYS, FEWER = 3, 4096, 8
#: an escaped character, or a class of characters
_ONE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^]\\])*\]", re.DOTALL)
#: what begins a group; comments and the flag x, in which others read another pattern, are not taken
_GROUP, _COMMENT = re.compile(r"\(\?"), re.compile(r"\(\?(#|[a-zA-Z-]*x)")
#: a repeated group, whose cost may double with each character
_NESTED, _REPEATS = re.compile(r"\)[*+{]"), re.compile(r"[*+{]")
_INNER = re.compile(r"\(([^()]*)\)")


def _ways(plain: str) -> int:
    """Return how many ways there are, at most, to take alternatives and optional parts."""
    plain = _GROUP.sub("(", plain)
    ways: int = 1 << plain.count("?")
    while inner := _INNER.search(plain):
        ways *= inner[1].count("|") + 1
        plain = plain[: inner.start()] + plain[inner.end() :]
    return ways * (plain.count("|") + 1)


def _is_slow(pattern: str) -> bool:
    if len(pattern) > MOST_LENGTH or _COMMENT.search(pattern):
        return True
    plain = _ONE.sub("x", pattern)
    repeats = len(_REPEATS.findall(plain))
    many = repeats > MOST_REPEATS or _ways(plain) * FEWER**repeats > MOST_WAYS
    return many or _NESTED.search(plain) is not None


@lru_cache(maxsize=4096)
def compiled(pattern: str, where: str) -> re.Pattern[str]:
    """Compile a pattern; WeightsError if it is no regular expression or a slow one."""
    if _is_slow(pattern):
        raise WeightsError(
            f"{where}: pattern {quoted(pattern)} may take for ever; write a simpler one"
        )
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as e:
        raise WeightsError(f"{where}: pattern {quoted(pattern)}: {e}; correct it") from None


@dataclass(frozen=True)
class Names:
    """Modules by name or class, and by patterns, which are marked `re:`."""

    exact: frozenset[str]
    patterns: tuple[re.Pattern[str], ...]

    @classmethod
    def of(cls, names: Iterable[str], where: str) -> Names:
        """Return a list of `where`; WeightsError for a pattern that is not taken."""
        names = tuple(names)
        found = [n.removeprefix("re:") for n in names if n.startswith("re:")]
        if len(found) > MOST_PATTERNS:
            raise WeightsError(
                f"{where}: {len(found)} patterns, at most {MOST_PATTERNS}; name modules"
            )
        return cls(frozenset(names), tuple(compiled(p, where) for p in found))

    def hold(self, module: str, kind: str) -> bool:
        known = module in self.exact or kind in self.exact
        return known or any(p.match(module) for p in self.patterns)


def excluded(module: str, names: Iterable[str], where: str) -> bool:
    """Whether a module is excluded: by a pattern of its beginning, or by its end."""
    return any(compiled(n, where).match(module) or module.endswith(n) for n in names)
