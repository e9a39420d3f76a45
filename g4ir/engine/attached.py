"""Media of messages: data URLs, decoded strictly and measured, and files of who may name some.
Nothing is fetched."""

from __future__ import annotations

import base64
import binascii
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from g4ir.chat.messages import Medium, an_object
from g4ir.errors import InputError
from g4ir.media.soft import Soft
from g4ir.model.media import check_taken, check_there

from .engine import Engine

#: media of one request
MOST_MEDIA = 32
_DATA = re.compile(r"data:[\w.+-]+/[\w.+-]+(?:;[\w.+-]+=[\w.+-]+)*;base64,", re.ASCII)
#: type of a part -> where its data lie
_KEYS = {"image": ("image", "url"), "audio": ("audio", "url"), "video": ("video", "url")}
_KEYS |= {f"{kind}_url": (f"{kind}_url", "url") for kind in ("image", "audio", "video")}
_KEYS["input_audio"] = ("input_audio", "data")
#: how URLs of files begin
_FILE = "file://"


def read_media(engine: Engine, media: Sequence[Medium], most: int = MOST_MEDIA) -> list[Soft]:
    """Return the soft tokens of media, all data URLs, in their order. Refused are kinds that the
    engine does not take, and what the readers of files refuse."""
    if len(media) > most:
        raise InputError(f"messages: have {len(media)} media, at most {most} are read")
    items = [(m, _bytes(*_held(m))) for m in media]
    return [_soft(engine, medium, raw) for medium, raw in items]


def read_own(engine: Engine, medium: Medium) -> Soft:
    """Return the soft tokens of a medium of somebody who may read files here: a data URL, a file's
    URL or its path. Refused as by `read_media`."""
    text, where, inner = _held(medium)
    check_taken(medium.kind, engine.media, engine.spec)
    if text.startswith("data:") or inner == "data":
        return _soft(engine, medium, _bytes(text, where, inner))
    if "://" in text and not text.startswith(_FILE):
        raise InputError(f"{where}: is neither a path nor a data URL; nothing is fetched")
    path = unquote(text.removeprefix(_FILE)) if text.startswith(_FILE) else text
    check_there(medium.kind, path)
    return engine.encode(medium.kind, path)


def _held(medium: Medium) -> tuple[str, str, str]:
    """Return what a part has for its data, its place and its key."""
    outer, inner = _KEYS[medium.part["type"]]
    where = f"{medium.place}.{outer}"
    held: Any = medium.part.get(outer)
    text = held if isinstance(held, str) else an_object(held, where).get(inner)
    where = f"{where}.{inner}"
    if not isinstance(text, str):
        raise InputError(f"{where}: is missing; give a data URL")
    return text, where, inner


def _bytes(text: str, where: str, inner: str) -> bytes:
    """Return the bytes of a part."""
    head = _DATA.match(text)
    if head is None and inner != "data":
        raise InputError(
            f"{where}: must be a data URL in base64, such as data:image/png;base64,...; nothing is "
            f"fetched"
        )
    try:
        return base64.b64decode(text[head.end() if head else 0 :], validate=True)
    except (binascii.Error, ValueError):
        raise InputError(f"{where}: is no base64") from None


def _soft(engine: Engine, medium: Medium, raw: bytes) -> Soft:
    """Return the soft tokens of a file's bytes; readers take a path, which errors then name."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "medium"
        path.write_bytes(raw)
        try:
            return engine.encode(medium.kind, path)
        except InputError as e:
            raise InputError(str(e).replace(str(path), medium.place)) from None
