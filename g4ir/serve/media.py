"""Media of messages: data URLs, decoded strictly and measured, and what may be fetched."""

from __future__ import annotations

import base64
import binascii
import re
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from g4ir.chat.messages import Medium, an_object
from g4ir.engine.engine import Engine
from g4ir.errors import InputError
from g4ir.media.soft import Soft

from .fetch import Fetching, Sources
from .refusals import missing

#: media of one request
MOST_MEDIA = 32
_DATA = re.compile(r"data:[\w.+-]+/[\w.+-]+(?:;[\w.+-]+=[\w.+-]+)*;base64,", re.ASCII)
#: type of a part -> where its data lie
_KEYS = {"image": ("image", "url"), "audio": ("audio", "url"), "video": ("video", "url")}
_KEYS |= {f"{kind}_url": (f"{kind}_url", "url") for kind in ("image", "audio", "video")}
_KEYS["input_audio"] = ("input_audio", "data")


def read_bytes(
    engine: Engine, media: Sequence[Medium], sources: Sources
) -> list[tuple[Medium, bytes]]:
    """Return media with their bytes, in their order. Refused are kinds that the engine does not
    take, and what is neither a data URL nor one of the sources'."""
    if len(media) > MOST_MEDIA:
        raise InputError(f"messages: have {len(media)} media, at most {MOST_MEDIA} are read")
    for medium in media:
        if medium.kind not in engine.media.kinds:
            raise missing("messages", f"this engine takes no {medium.kind} ({medium.place})")
    fetching = Fetching(sources)
    return [(m, _bytes(m, fetching)) for m in media]


def encoded(engine: Engine, items: Iterable[tuple[Medium, bytes]]) -> list[Soft]:
    """Return the soft tokens of media. Refused is what the readers of files refuse."""
    return [_soft(engine, medium, raw) for medium, raw in items]


def _bytes(medium: Medium, fetching: Fetching) -> bytes:
    """Return the bytes of a part."""
    outer, inner = _KEYS[medium.part["type"]]
    where = f"{medium.place}.{outer}"
    held: Any = medium.part.get(outer)
    text = held if isinstance(held, str) else an_object(held, where).get(inner)
    where = f"{where}.{inner}"
    if not isinstance(text, str):
        raise InputError(f"{where}: is missing; give a data URL")
    head = _DATA.match(text)
    if head is None and inner != "data":
        return fetching.read(text, where)
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
