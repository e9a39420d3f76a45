"""Media of messages: what a part holds, decoded strictly, and its soft tokens. Nothing is fetched
here."""

from __future__ import annotations

import base64
import binascii
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from g4ir.chat.messages import Medium, an_object
from g4ir.errors import InputError
from g4ir.media.soft import Soft
from g4ir.model.media import check_taken, check_there

from .engine import Engine

_DATA = re.compile(r"data:[\w.+-]+/[\w.+-]+(?:;[\w.+-]+=[\w.+-]+)*;base64,", re.ASCII)
#: type of a part -> where its data lie
_KEYS = {"image": ("image", "url"), "audio": ("audio", "url"), "video": ("video", "url")}
_KEYS |= {f"{kind}_url": (f"{kind}_url", "url") for kind in ("image", "audio", "video")}
_KEYS["input_audio"] = ("input_audio", "data")
#: how URLs of files begin
_FILE = "file://"


@dataclass(frozen=True)
class Held:
    """The `text` that a part has for its data, and `where` it is, for errors; `plain`: base64
    without the head of a data URL will do."""

    text: str
    where: str
    plain: bool

    def data(self) -> bytes | None:
        """Return the bytes of a data URL; None: it is something else. InputError where what it has
        is no base64."""
        head = _DATA.match(self.text)
        if head is None and not self.plain:
            return None
        try:
            return base64.b64decode(self.text[head.end() if head else 0 :], validate=True)
        except (binascii.Error, ValueError):
            raise InputError(f"{self.where}: is no base64") from None


def held(medium: Medium) -> Held:
    """Return what a part has for its data; InputError where it has nothing."""
    outer, inner = _KEYS[medium.part["type"]]
    where = f"{medium.place}.{outer}"
    found: Any = medium.part.get(outer)
    text = found if isinstance(found, str) else an_object(found, where).get(inner)
    where = f"{where}.{inner}"
    if not isinstance(text, str):
        raise InputError(f"{where}: is missing; give a data URL")
    return Held(text, where, inner == "data")


def read_own(engine: Engine, medium: Medium) -> Soft:
    """Return the soft tokens of a medium of somebody who may read files here: a data URL, a file's
    URL or its path. Refused are kinds that the engine does not take, and what the readers of files
    refuse."""
    part = held(medium)
    check_taken(medium.kind, engine.media, engine.spec)
    if part.plain or part.text.startswith("data:"):
        raw = part.data()
        if raw is None:
            raise InputError(f"{part.where}: is no data URL in base64")
        return soft_of(engine, medium, raw)
    if "://" in part.text and not part.text.startswith(_FILE):
        raise InputError(f"{part.where}: is neither a path nor a data URL; nothing is fetched")
    path = part.text
    path = unquote(path.removeprefix(_FILE)) if path.startswith(_FILE) else path
    check_there(medium.kind, path)
    return engine.encode(medium.kind, path)


def soft_of(engine: Engine, medium: Medium, raw: bytes, **settings: Any) -> Soft:
    """Return the soft tokens of a file's bytes, with settings of `Engine.encode`; readers take a
    path, which errors then name."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "medium"
        path.write_bytes(raw)
        try:
            return engine.encode(medium.kind, path, **settings)
        except InputError as e:
            raise InputError(str(e).replace(str(path), medium.place)) from None
