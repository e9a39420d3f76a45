"""Text in which control tokens stand as one character each: what the reader reads.

The characters are halves of surrogate pairs, which no decoded text has. They come from ids, where
the id decides what is a control token, or from text in which control tokens are spelled out; there
the head of one is held back until it is certain.
"""

from __future__ import annotations

import re

from .special_tokens import CONTROLS, ENDS

#: control string -> its character
MARKS = {text: chr(0xD800 + i) for i, text in enumerate(CONTROLS)}
_SPELLED = str.maketrans({mark: text for text, mark in MARKS.items()})
_FOUND = re.compile("|".join(map(re.escape, sorted(CONTROLS, key=len, reverse=True))))
_HEADS = frozenset(text[:n] for text in CONTROLS for n in range(1, len(text)))
_LONGEST = max(map(len, CONTROLS)) - 1
_SURROGATE = re.compile("[\ud800-\udfff]")
#: one control token
MARK = re.compile(f"[{''.join(MARKS.values())}]")
END_MARKS = frozenset(MARKS[text] for text in ENDS)


def spelled(marked: str) -> str:
    """Return a marked text with its control tokens written out."""
    return marked.translate(_SPELLED)


def whole(text: str) -> str:
    """Return a text without halves of characters, which are no marks."""
    return _SURROGATE.sub("\ufffd", text) if _SURROGATE.search(text) else text


class Lexer:
    """Pieces of text in, marked text out."""

    def __init__(self) -> None:
        self._held = ""

    def feed(self, text: str) -> str:
        """Return the marked text that is certain now."""
        text = self._held + whole(text)
        at = text.rfind("<", max(0, len(text) - _LONGEST))
        self._held = text[at:] if at >= 0 and text[at:] in _HEADS else ""
        certain = text[: len(text) - len(self._held)]
        return _FOUND.sub(lambda found: MARKS[found[0]], certain)

    def rest(self) -> str:
        """Return the head that became no control token."""
        held, self._held = self._held, ""
        return held
