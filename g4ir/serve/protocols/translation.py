"""Translates bodies of other protocols onto the fields of /v1/chat/completions, and errors back."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from g4ir.chat.messages import shown
from g4ir.errors import InputError
from g4ir.ui.files import read_table

from .. import request_schema as schema
from ..http_errors import Refused, bad, missing

Body = dict[str, Any]
#: takes the value of a field, and writes what it becomes into the translation
Change = Callable[["Translation", Any, str], None]

TABLES: Mapping[str, Any] = read_table(Path(__file__).with_name("protocols.yaml"))
_PLACE = re.compile(r"(messages|tools)\[(\d+)\]([^:]*)|([a-z_]+)\b")


@dataclass
class Translation:
    """A body of another protocol, `given`, as one of /v1/chat/completions, `body`."""

    given: Body
    body: Body = field(default_factory=dict)
    #: where each message stands in the original
    places: list[str] = field(default_factory=list)
    #: names of fields that are called otherwise
    names: dict[str, str] = field(default_factory=dict)
    #: where each tool stands in the original, and paths inside that are called otherwise
    tools: list[tuple[str, Mapping[str, str]]] = field(default_factory=list)

    @property
    def messages(self) -> list[Body]:
        found: list[Body] = self.body.setdefault("messages", [])
        return found

    def add(self, where: str, role: str, content: Any, **more: Any) -> Body:
        """Append a message, which stands at a place of the original."""
        message = {"role": role, "content": content, **more}
        self.messages.append(message)
        self.places.append(where)
        return message

    def assistant(self, where: str) -> Body:
        """Return the assistant's message that is open at the end, or a new one."""
        if self.messages and self.messages[-1]["role"] == "assistant":
            return self.messages[-1]
        return self.add(where, "assistant", None)

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """A context whose errors name the fields of the original."""
        try:
            yield
        except Refused as e:
            e.message, e.param = self.renamed(e.message), self.renamed(e.param or "") or None
            raise
        except InputError as e:
            text = self.renamed(str(e))
            found = re.match(r"\w+", text)
            raise Refused(400, text, param=found[0] if found else None) from None

    def renamed(self, text: str) -> str:
        """Return an error's text with the names of the original."""

        def place(found: re.Match[str]) -> str:
            field, index, inner, name = found.groups()
            if field == "tools" and int(index) < len(self.tools):
                where, paths = self.tools[int(index)]
                inner = inner.removeprefix(".function")
                for chat, own in paths.items():
                    inner = own + inner[len(chat) :] if inner.startswith(chat) else inner
                return where + inner
            if field == "messages" and int(index) < len(self.places):
                inner = re.sub(r"\.tool_calls\[\d+\]\.function", "", inner)
                for chat, own in self.names.items():
                    inner = inner.replace(f".{chat}", f".{own}")
                return self.places[int(index)] + inner
            return self.names.get(name or field, found[0])

        return _PLACE.sub(place, text, count=1) if _PLACE.match(text) else text


def translated(out: Translation, protocol: str, changes: Mapping[str, Change]) -> Translation:
    """Fill in what a body of a protocol becomes, and return it. Refused for fields that it cannot
    have."""
    table, given = TABLES[protocol], out.given
    for name in table["not_of_it"]:
        if given.get(name) is not None and name not in table["becomes"]:
            *_, own = (k for k, v in table["becomes"].items() if v == "messages")
            raise bad(name, f"is not a field of this path, whose conversation is in {own!r}")
    groups = table["refused"]
    refused = {n: (v, group["way"]) for group in groups for n, v in group["neutral"].items()}
    for name, (neutral, way) in refused.items():
        if (value := given.get(name)) is not None:
            schema.unsupported(*neutral, way=way)(value, name)
    for name, becomes in table["becomes"].items():
        if (value := given.get(name)) is None:
            continue
        if name in changes:
            changes[name](out, value, name)
        else:
            out.body[becomes] = value
        if becomes not in (None, "messages", name):
            out.names[becomes] = name
    known = {*table["becomes"], *table["harmless"], *refused}
    rest = {name: value for name, value in given.items() if name not in known}
    if twice := next((name for name in rest if name in out.body), None):
        raise bad(twice, f"cannot be given beside {out.names.get(twice, twice)}; give one of them")
    out.body |= rest
    return out


def kind_in(given: Any, kinds: Collection[str], where: str, what: str = "type") -> str:
    """Return the type of an object, one of some; Refused names it where it is another."""
    found = schema.OBJECT(given, where).get(what)
    if not isinstance(found, str) or found not in kinds:
        why = f"{shown(found)} is not supported; one of {', '.join(sorted(kinds))} is"
        raise missing(f"{where}.{what}", why)
    return found


def text_in(given: Body, key: str, where: str) -> str:
    """Return a text of an object."""
    value: str = schema.TEXT(given.get(key), f"{where}.{key}")
    return value
