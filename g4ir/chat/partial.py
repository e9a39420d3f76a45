"""The arguments of a call while they are generated: where they end, and their JSON so far.

They end at the brace that closes the first one, strings left out. Strings are streamed while they
are open. Held back is what another reading of the call (`values.read_call`) could change: the end
of a string that may never be closed, and values whose type shows at their end. Syntax beside the
format ends the stream; the rest then comes with the whole call.
"""

from __future__ import annotations

import json
import re

from . import special_tokens as control
from . import values

_CALL, _CALL_END = control.MARKS[control.CALL], control.MARKS[control.CALL_END]
_QUOTE = control.MARKS[control.QUOTE]
#: what a call cannot have outside of strings
_BREAKS = frozenset({_CALL, _CALL_END, control.MARKS[control.CHANNEL], *control.END_MARKS})
_OUTSIDE = re.compile(rf"[{{}}()\[\],:=\"]|{control.MARK.pattern}")
_IN_STRING = re.compile(rf'["\\]|{control.MARK.pattern}')
#: what a string may end with that is not its own if it is never closed, and how much is held back
_TAIL, LONGEST_TAIL = re.compile(r"[\s)}]*\Z"), 256
_CLOSERS = {**values.CLOSERS, "[": "]"}
#: characters of final text from which arguments are streamed; a shorter call may still be none
FEWEST_STREAMED = 32

#: where the next token belongs: a key, a value, an open string, or after a value
KEY, VALUE, TEXT, AFTER, DEAF = range(5)


class CallBody:
    """The arguments of one call, which has begun with `head`. `plain`: a control token of calls
    ends it even inside of a string."""

    def __init__(self, head: str, name: str, schema: values.Schema, plain: bool) -> None:
        self.name, self._parts, self._plain = name, [head], plain
        self._opener, self._last = head[-1], values.CLOSERS[head[-1]]
        self._depth, self._fresh = 1, True
        self._quote = ""  # what closes the string that is open
        self._skip = self._closed = False
        self._said = 0  # characters of strings that are final
        self._taken = self._seen = len(head)  # characters that the JSON stands for, and all
        self._made, self._given = list[str](), 0
        self._open = list[tuple[str, values.Schema]]()  # objects and lists
        self._raw = list[str]()  # of a key or value that has not ended
        self._held, self._frozen = "", False  # of an open string, and whether all of it is held
        self._keys = {*values.properties(schema)}  # that have not come
        self._next: re.Pattern[str] | None = None  # one of them behind a comma
        self._schema, self._place = schema, VALUE  # of what comes next
        self._push(self._opener)

    @property
    def streams(self) -> bool:
        """Whether enough text is final for the JSON to be given out."""
        return self._said >= FEWEST_STREAMED

    @property
    def streamed(self) -> int:
        """How many characters of the call can only be read as they were streamed."""
        return self._taken if self.streams else 0

    @property
    def raw(self) -> str:
        """The call as it was written."""
        return "".join(self._parts)

    @property
    def json(self) -> str:
        """All of the JSON that is final."""
        return "".join(self._made)

    def as_written(self, body: str) -> str:
        """Return the final JSON, and what follows it in a body as it was written."""
        return self.json + control.spelled(body[self._taken :])

    def new_json(self) -> str:
        """Return the JSON that became final since the last time."""
        new, self._given = self._made[self._given :], len(self._made)
        return "".join(new)

    def cut_off(self) -> str | None:
        """End where the call was cut, within a string that may be a bare word or JSON. Return the
        JSON if it has all of the text so far, but the head of a key, word or number."""
        raw = "".join(self._raw).lstrip()
        if self._place == TEXT:
            self._say(self._unheld())
        elif self._place == VALUE and raw.startswith('"'):
            self._emit(self._comma() + control.spelled(raw))
        elif self._place == VALUE and raw and _QUOTE not in raw and values.is_text(self._schema):
            self._emit(f'{self._comma()}"')
            self._say(raw)
        return None if self._place == DEAF else self.json

    def scan(self, text: str, at: int) -> tuple[int, bool, str]:
        """Take a text. Return how far, whether the arguments end there, and where they were broken
        off by a control token: "outside" of strings or in a "string"."""
        end, done, broken = self._scan(text, at)
        self._parts.append(text[at:end])
        return end, done, broken

    def _scan(self, text: str, at: int) -> tuple[int, bool, str]:
        while at < len(text):
            if self._skip:  # behind a backslash
                self._text(text[at])
                self._skip, at = False, at + 1
                continue
            found = (_IN_STRING if self._quote else _OUTSIDE).search(text, at)
            between = text[at : found.start() if found else len(text)]
            self._text(between)
            if between and not between.isspace():
                self._fresh = self._closed = False
            if found is None:
                break
            at = found.end()
            if self._quote:
                if self._in_string(found[0]):
                    return found.start(), False, "string"
            elif found[0] in _BREAKS:
                return found.start(), False, "outside"
            elif self._outside(found[0]):
                return at, True, ""
        return len(text), False, ""

    def _in_string(self, found: str) -> bool:
        """Take a token in a string; return whether it shows that the string was never closed."""
        if (self._plain and found in (_CALL, _CALL_END)) or (self._closed and found == _CALL):
            return True
        if closes := found == self._quote:
            self._quote = ""
        elif found == "\\" and self._quote == '"':
            self._skip = True
        elif found not in '"\\':
            self._closed = found == _CALL_END
        if closes and self._place == TEXT:
            self._say(self._unheld())
            self._seen += len(found)
            self._emit('"')
            self._place = AFTER
        else:
            self._text(found)
            if closes and self._place == VALUE:
                self._structure("")
        return False

    def _outside(self, found: str) -> bool:
        """Take a token outside of strings; return whether the first brace is closed."""
        if found == _QUOTE or (found == '"' and self._fresh):
            self._quote, self._closed = found, False
        self._depth += (found == self._opener) - (found == self._last)
        self._fresh = found in "{[(,:="
        self._seen += len(found)
        if self._place != DEAF and self._open:
            self._structure(found)
        return self._depth == 0

    def _text(self, text: str) -> None:
        """Take text without structure."""
        self._seen += len(text)
        if self._place == TEXT:
            self._string(text)
        elif self._place != DEAF and text:
            self._raw.append(text)

    def _structure(self, found: str) -> None:
        """Take a token outside of strings, none where a string has ended; syntax beside the format
        ends the stream."""
        try:
            if not found:
                self._value("")
            elif self._quote:
                self._begin_string(found)
            elif self._place == KEY and found == ":":
                self._key()
            elif self._place == VALUE and found in "{[" and not self._pending:
                self._push(found)
            elif found in (",", _CLOSERS[self._open[-1][0]]):
                self._end(found)
            elif found in '=:"()':
                self._raw.append(found)
            else:
                raise values.Unreadable
        except values.Unreadable:
            self._place = DEAF

    @property
    def _pending(self) -> bool:
        return any(not part.isspace() for part in self._raw)

    def _begin_string(self, quote: str) -> None:
        if self._pending or self._place not in (KEY, VALUE):
            raise values.Unreadable
        if self._place == VALUE and quote == _QUOTE and values.takes_text(self._schema):
            self._emit(self._comma() + '"')
            self._place, self._raw = TEXT, []
            named = values.either(self._keys)
            self._next = re.compile(rf",\s*(?:{named})\s*:") if named else None
        else:
            self._raw.append(quote)

    def _key(self) -> None:
        key, (_, schema) = values.read_key("".join(self._raw)), self._open[-1]
        self._emit(f"{self._comma()}{json.dumps(key, ensure_ascii=False)}: ")
        self._raw, self._place = [], VALUE
        self._schema = values.properties(schema).get(key, {})
        if len(self._open) == 1:
            self._keys.discard(key)

    def _comma(self) -> str:
        """Return what separates the next element; that of a key, and a first one, have none."""
        return "" if not self._made or self._made[-1][-1] in "[{ " else ", "

    def _value(self, terminator: str) -> None:
        value = values.read_value("".join(self._raw), self._schema, self._last)
        self._emit(self._comma() + json.dumps(value, ensure_ascii=False), len(terminator))
        self._raw, self._place = [], AFTER

    def _end(self, found: str) -> None:
        """Take a comma, or what closes the innermost object or list."""
        if self._place == VALUE and self._pending:
            self._value(found)
        opener, schema = self._open[-1]
        empty = self._place == (VALUE if opener == "[" else KEY) and found != ","
        if self._pending or not (self._place == AFTER or empty):
            raise values.Unreadable
        self._raw = []
        if found != ",":
            self._open.pop()
            self._emit("]" if opener == "[" else "}")
            self._place = AFTER
        elif opener == "[":
            self._place, self._schema = VALUE, values.items(schema)
        else:
            self._place = KEY

    def _push(self, opener: str) -> None:
        if len(self._open) >= values.MOST_DEPTH:
            raise values.Unreadable
        self._emit(self._comma() + ("[" if opener == "[" else "{"))
        self._open.append((opener, self._schema))
        self._raw, self._place = [], KEY
        if opener == "[":
            self._place, self._schema = VALUE, values.items(self._schema)

    def _unheld(self) -> str:
        """Return what was held of an open string, all of which is its own."""
        text, self._held, self._frozen = self._held, "", False
        return text

    def _string(self, text: str) -> None:
        """Take text of an open string, and make final what no other reading of it could change:
        if it is never closed, it ends before a control token or the next declared key."""
        text = self._held = self._held + text
        if self._frozen:
            return
        mark, key = control.MARK.search(text), self._next.search(text) if self._next else None
        if key:
            cut = len(text[: key.start()].rstrip())
        elif mark:
            cut = _tail(text[: mark.start()])
        else:
            cut = min(_tail(text), self._begun_key(text))
        self._held, self._frozen = text[cut:], bool(key or mark)
        self._say(text[:cut])

    def _begun_key(self, text: str) -> int:
        """Return where a comma and the beginning of a declared key would begin."""
        at = text.rfind(",", max(0, len(text) - LONGEST_TAIL))
        head = text[at + 1 :].strip()
        if at < 0 or not any(key.startswith(head) for key in self._keys):
            return len(text)
        return len(text[:at].rstrip())

    def _say(self, text: str) -> None:
        """Make text of a string final; what is held is not part of it."""
        if text:
            self._said += len(text)
            made = json.dumps(control.spelled(text), ensure_ascii=False)[1:-1]
            self._emit(made, len(self._held))

    def _emit(self, text: str, behind: int = 0) -> None:
        """Make JSON final; the last `behind` characters of the call are not part of it."""
        self._made.append(text)
        self._taken = self._seen - behind


def _tail(text: str) -> int:
    """Return where the tail of a text begins that is held back."""
    found = _TAIL.search(text, max(0, len(text) - LONGEST_TAIL))
    return found.start() if found else len(text)
