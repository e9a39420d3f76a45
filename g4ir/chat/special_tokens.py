"""The control tokens of the chat formats, as strings; only a tokenizer knows their ids.

In marked text, the reader's input, each is one character: a lone surrogate, which decoded text
never contains. Marked text is made from ids, where the id decides what is a control token, or from
text with spelled-out control tokens, where a partial one is held back until it is complete.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

from g4ir.spec.parts import CHAT_FORMATS, CHAT_FORMS


def _all(key: str) -> tuple[str, ...]:
    """Return the distinct strings under a key of all chat formats."""
    return tuple(dict.fromkeys(chain(*(row[key] for row in CHAT_FORMATS.values()))))


def _flat(groups: Iterable[Any]) -> Iterable[str]:
    return chain(*(g.values() for g in groups))


BOS, EOS = "<bos>", "<eos>"
#: replaces characters that a tokenizer does not have
UNKNOWN = "<unk>"
#: turn start -> turn end, of all formats
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
#: all control tokens of conversations
CONTROLS = (
    *("<pad>", EOS, BOS, UNKNOWN, "<mask>"),
    *_all("turn"),
    *dict.fromkeys(chain(*_flat(row["controls"] for row in CHAT_FORMATS.values()))),
    *PLACEHOLDERS.values(),
)
#: control tokens that end an answer
ENDS = _all("ends")
#: header of reasoning, after CHANNEL
THOUGHT = "thought\n"

#: control token -> its character in marked text
MARKS = {text: chr(0xD800 + i) for i, text in enumerate(CONTROLS)}
_SPELLED = str.maketrans({mark: text for text, mark in MARKS.items()})


def aliases(row: Mapping[str, Any]) -> dict[str, str]:
    """Return {control token of the full format: that of the format `row`} for the tokens that both
    have and that differ, such as those of tool calls. The syntax is otherwise the same, so one
    parser reads both."""
    shared = _FULL_FORMAT["controls"].keys() & row["controls"].keys() - {"media"}
    pairs = (zip(_FULL_FORMAT["controls"][name], row["controls"][name]) for name in shared)
    return {full: text for full, text in chain(*pairs) if text != full}


#: control token of a format -> its equivalent in the full format
ALIASES = {a: full for row in CHAT_FORMATS.values() for full, a in aliases(row).items()}
MARKS |= {a: MARKS[full] for a, full in ALIASES.items()}


def _pattern(texts: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))))


_CONTROL, _FULL_CONTROL = _pattern(CONTROLS), _pattern({*CONTROLS} - ALIASES.keys())
_HEADS = frozenset(text[:n] for text in CONTROLS for n in range(1, len(text)))
_LONGEST = max(map(len, CONTROLS)) - 1
_SURROGATE = re.compile("[\ud800-\udfff]")
#: matches one control token
MARK = re.compile(f"[{''.join(MARKS.values())}]")
END_MARKS = frozenset(MARKS[text] for text in ENDS)


def find_format(declared: str, text: str) -> str:
    """Return the name of a chat format that is a variant `of` the one that a spec declares, and
    whose marker occurs in `text` (a template, a tokenizer.json, or all control tokens of a
    tokenizer); `declared` if there is none."""
    rows = ((name, row) for name, row in CHAT_FORMATS.items() if row.get("of") == declared)
    return next((name for name, row in rows if row["marker"] in text), declared)


def spelled(marked: str) -> str:
    """Return a marked text with its control tokens written out."""
    return marked.translate(_SPELLED)


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates in a text, which would be read as marks, by U+FFFD."""
    return _SURROGATE.sub("\ufffd", text) if _SURROGATE.search(text) else text


class Lexer:
    """Pieces of text in, marked text out. `prompt_tail`: the end of the prompt; the aliases that
    other formats have for control tokens are recognised only if it has another format's turns."""

    def __init__(self, prompt_tail: str = TURN) -> None:
        has_other_turns = any(turn in prompt_tail for turn in TURNS if turn != TURN)
        self._pending, self._control = "", _CONTROL if has_other_turns else _FULL_CONTROL

    def feed(self, text: str) -> str:
        """Return text (with what was buffered) as marked text, but buffer an incomplete control
        token at its end."""
        text = self._pending + replace_surrogates(text)
        at = text.rfind("<", max(0, len(text) - _LONGEST))
        self._pending = text[at:] if at >= 0 and text[at:] in _HEADS else ""
        certain = text[: len(text) - len(self._pending)]
        return self._control.sub(lambda match: MARKS[match[0]], certain)

    def flush(self) -> str:
        """Return the buffered text, an incomplete control token."""
        pending, self._pending = self._pending, ""
        return pending
