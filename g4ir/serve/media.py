"""Media of requests: data URLs, and what may be fetched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from g4ir.chat.messages import Medium
from g4ir.engine.engine import Engine
from g4ir.engine.multimodal import held
from g4ir.engine.offline import MEDIA_SETTINGS
from g4ir.errors import InputError

from .http_errors import bad, missing
from .media_fetch import Fetching, Sources

#: media of one request
MOST_MEDIA = 32
#: detail of an image_url -> which of the engine's image budgets; "auto": the default one
DETAILS = {"low": 0, "high": -1, "original": -1}


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


def setting(engine: Engine, medium: Medium, given: Any) -> dict[str, Any]:
    """Return how `Engine.encode` reads a medium: as the request says (`given`), or an image as its
    own `detail` does."""
    outer = medium.part.get("image_url")
    detail = outer.get("detail") if isinstance(outer, dict) else None
    if detail not in (None, "auto", *DETAILS):
        raise bad(f"{medium.place}.image_url.detail", f"must be auto, {', '.join(DETAILS)}")
    if given is None and detail in DETAILS:
        given = engine.media.budgets[DETAILS[detail]]
    return {} if given is None else {MEDIA_SETTINGS[medium.kind][1]: given}


def _bytes(medium: Medium, fetching: Fetching) -> bytes:
    part = held(medium)
    raw = part.data()
    return fetching.read(part.text, part.where) if raw is None else raw
