"""The control tokens of the format, as strings; only a tokenizer knows their ids.

In the marked text that the reader reads each is one character, a half of a surrogate pair, which no
decoded text has. Marks come from ids, where the id decides what is a control token, or from text in
which control tokens are spelled out; there the head of one is held back until it is certain.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import chain
from typing import Any

from g4ir.spec.parts import CHAT_FORMATS, CHAT_FORMS


def _all(key: str) -> tuple[str, ...]:
    """Return the strings that the formats have under a key."""
    return tuple(dict.fromkeys(chain(*(row[key] for row in CHAT_FORMATS.values()))))


def _flat(groups: Iterable[Any]) -> Iterable[str]:
    return chain(*(g.values() for g in groups))


BOS, EOS = "<bos>", "<eos>"
#: stands for characters that a tokenizer does not have
UNKNOWN = "<unk>"
#: turn -> what ends it, in each format
TURNS = dict(row["turn"] for row in CHAT_FORMATS.values())
#: the format with reasoning, tools and media
_FULL_FORMAT = CHAT_FORMATS[CHAT_FORMS[0]]
TURN, TURN_END = _FULL_FORMAT["turn"]
MODEL: str = _FULL_FORMAT["model"]
CHANNEL, CHANNEL_END = _FULL_FORMAT["controls"]["channel"]
CALL, CALL_END = _FULL_FORMAT["controls"]["call"]
RESPONSE, RESPONSE_END = _FULL_FORMAT["controls"]["response"]
(QUOTE,) = _FULL_FORMAT["controls"]["quote"]
#: kind of a medium -> its placeholder
PLACEHOLDERS: dict[str, str] = _FULL_FORMAT["placeholders"]
#: every control token that means something in a conversation
CONTROLS = (
    *("<pad>", EOS, BOS, UNKNOWN, "<mask>"),
    *_all("turn"),
    *dict.fromkeys(chain(*_flat(row["controls"] for row in CHAT_FORMATS.values()))),
    *PLACEHOLDERS.values(),
)
#: those behind which a model's turn is over
ENDS = _all("ends")
#: how reasoning begins, behind CHANNEL
THOUGHT = "thought\n"

#: control string -> its character
MARKS = {text: chr(0xD800 + i) for i, text in enumerate(CONTROLS)}
_SPELLED = str.maketrans({mark: text for text, mark in MARKS.items()})
_CONTROL = re.compile("|".join(map(re.escape, sorted(CONTROLS, key=len, reverse=True))))
_HEADS = frozenset(text[:n] for text in CONTROLS for n in range(1, len(text)))
_LONGEST = max(map(len, CONTROLS)) - 1
_SURROGATE = re.compile("[\ud800-\udfff]")
#: one control token
MARK = re.compile(f"[{''.join(MARKS.values())}]")
END_MARKS = frozenset(MARKS[text] for text in ENDS)


def spelled(marked: str) -> str:
    """Return a marked text with its control tokens written out."""
    return marked.translate(_SPELLED)


def replace_surrogates(text: str) -> str:
    """Return a text without halves of characters, which are no marks."""
    return _SURROGATE.sub("\ufffd", text) if _SURROGATE.search(text) else text


class Lexer:
    """Pieces of text in, marked text out."""

    def __init__(self) -> None:
        self._pending = ""

    def feed(self, text: str) -> str:
        """Return the marked text that is certain now."""
        text = self._pending + replace_surrogates(text)
        at = text.rfind("<", max(0, len(text) - _LONGEST))
        self._pending = text[at:] if at >= 0 and text[at:] in _HEADS else ""
        certain = text[: len(text) - len(self._pending)]
        return _CONTROL.sub(lambda match: MARKS[match[0]], certain)

    def flush(self) -> str:
        """Return the head that became no control token."""
        pending, self._pending = self._pending, ""
        return pending
