"""Translates request bodies of other protocols to chat completions, and field names in errors
back."""

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
#: (translation, value, field name) -> None: translates one field
Change = Callable[["Translation", Any, str], None]

TABLES: Mapping[str, Any] = read_table(Path(__file__).with_name("protocols.yaml"))
_FIELD = re.compile(r"(messages|tools)\[(\d+)\]([^:]*)|([a-z_]+)\b")


@dataclass
class Translation:
    """A request body, `original`, and its translation to chat completions, `body`."""

    original: Body
    body: Body = field(default_factory=dict)
    #: path of each message in the original
    positions: list[str] = field(default_factory=list)
    #: chat field -> its name in the original
    names: dict[str, str] = field(default_factory=dict)
    #: of each tool: its path in the original, and path within a chat's tool -> within the original
    tools: list[tuple[str, Mapping[str, str]]] = field(default_factory=list)

    @property
    def messages(self) -> list[Body]:
        return self.body.setdefault("messages", [])

    def add(self, where: str, role: str, content: Any, **more: Any) -> Body:
        """Append a message; `where` is its path in the original."""
        message = {"role": role, "content": content, **more}
        self.messages.append(message)
        self.positions.append(where)
        return message

    def assistant(self, where: str) -> Body:
        """Return the last message if it is the assistant's, or a new one."""
        if self.messages and self.messages[-1]["role"] == "assistant":
            return self.messages[-1]
        return self.add(where, "assistant", None)

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Context manager that renames fields in errors to the original's; an InputError becomes
        Refused (400)."""
        try:
            yield
        except Refused as e:
            e.message, e.param = self.renamed(e.message), self.renamed(e.param or "") or None
            raise
        except InputError as e:
            text = self.renamed(str(e))
            match = re.match(r"\w+", text)
            raise Refused(400, text, param=match[0] if match else None) from None

    def renamed(self, text: str) -> str:
        """Return an error message in which the field at its start has the original's name."""

        def original(match: re.Match[str]) -> str:
            field, index, inner, name = match.groups()
            if field == "tools" and int(index) < len(self.tools):
                where, paths = self.tools[int(index)]
                inner = inner.removeprefix(".function")
                for chat, name_there in paths.items():
                    inner = name_there + inner[len(chat) :] if inner.startswith(chat) else inner
                return where + inner
            if field == "messages" and int(index) < len(self.positions):
                inner = re.sub(r"\.tool_calls\[\d+\]\.function", "", inner)
                for chat, name_there in self.names.items():
                    inner = inner.replace(f".{chat}", f".{name_there}")
                return self.positions[int(index)] + inner
            return self.names.get(name or field, match[0])

        return _FIELD.sub(original, text, count=1) if _FIELD.match(text) else text


def translated(out: Translation, protocol: str, changes: Mapping[str, Change]) -> Translation:
    """Fill `out.body` from `out.original` by the protocol's table and the readers `changes`; return
    `out`. Refused for unsupported fields."""
    table, original = TABLES[protocol], out.original
    for name, instead in table["not_of_it"].items():
        if original.get(name) is not None and name not in table["becomes"]:
            fix = f"; use {instead}" if instead else ""
            raise bad(name, f"is not a field of this path{fix}")
    groups = table["refused"]
    refused = {n: (v, group["way"]) for group in groups for n, v in group["neutral"].items()}
    for name, (neutral, fix) in refused.items():
        if (value := original.get(name)) is not None:
            schema.unsupported(*neutral, fix=fix)(value, name)
    for name, becomes in table["becomes"].items():
        if (value := original.get(name)) is None:
            continue
        if name in changes:
            changes[name](out, value, name)
        else:
            out.body[becomes] = value
        if becomes not in (None, "messages", name):
            out.names[becomes] = name
    handled = {*table["becomes"], *table["harmless"], *refused}
    unhandled = {name: value for name, value in original.items() if name not in handled}
    if twice := next((name for name in unhandled if name in out.body), None):
        raise bad(twice, f"cannot be combined with {out.names.get(twice, twice)}; give one of them")
    out.body |= unhandled
    return out


def kind_in(value: Any, kinds: Collection[str], where: str, key: str = "type") -> str:
    """Return the `key` (by default the type) of an object; Refused unless it is one of `kinds`."""
    kind = schema.OBJECT(value, where).get(key)
    if not isinstance(kind, str) or kind not in kinds:
        why = f"{shown(kind)} is not supported; expected one of {', '.join(sorted(kinds))}"
        raise missing(f"{where}.{key}", why)
    return kind


def text_in(value: Body, key: str, where: str) -> str:
    """Return the string under a key of an object; Refused if it is absent or no string."""
    return schema.TEXT(value.get(key), f"{where}.{key}")
