"""Media of requests: data URLs, and files below one folder. Nothing is downloaded."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from g4ir.chat.messages import Medium, source_of
from g4ir.engine.engine import Engine
from g4ir.engine.multimodal import soft_of
from g4ir.errors import InputError
from g4ir.media.limits import Limit, limited
from g4ir.media.soft import Soft
from g4ir.model.audio import REFUSE
from g4ir.model.media import MEDIA_SETTINGS, encode_options

from .http_errors import bad, missing
from .request_schema import CHAT

#: maximum media per request
MAX_MEDIA = 32
#: `detail` of an image_url -> index in the engine's numbers of soft tokens per image (ascending);
#: "auto": the default number
DETAILS = {"low": 0, "high": -1, "original": -1}


@dataclass(frozen=True)
class MediaFolder:
    """The folder (--media-dir) whose files `file:` URLs may name; None: they are refused.
    `max_bytes`: maximum size of a request's files together."""

    path: Path | None = None
    max_bytes: int = 32 << 20

    @classmethod
    def named(cls, path: str | None, max_bytes: int) -> MediaFolder:
        """Return the folder of --media-dir; InputError if `path` is not a directory."""
        if path is not None and not Path(path).is_dir():
            raise InputError(f"--media-dir {path}: is no folder")
        return cls(None if path is None else Path(path).resolve(), max_bytes)

    def read(self, url: str, where: str) -> bytes:
        """Return the bytes of a `file:` URL's file, at most `max_bytes` + 1 (so that the caller
        sees that there are more); InputError for anything but a file below the folder."""
        try:
            parts = urlsplit(url) if url.isprintable() else urlsplit("")
        except ValueError:
            parts = urlsplit("")
        if parts.scheme != "file":
            raise InputError(
                f"{where}: must be a base64 data URL, such as data:image/png;base64,..., or a "
                f"file:// URL below --media-dir; http(s) URLs are not fetched"
            )
        if self.path is None:
            raise InputError(
                f"{where}: this server has no --media-dir, so it reads no files; give a data URL"
            )
        # One message for all errors, so that it does not reveal whether other files exist.
        refused = InputError(f"{where}: is no file that lies below --media-dir")
        try:
            path = Path(url2pathname(parts.path))
            if parts.netloc not in ("", "localhost") or ".." in path.parts or "\0" in str(path):
                raise refused
            real = path.resolve(strict=True)
            if not real.is_relative_to(self.path):
                raise refused
            with open(real, "rb", opener=_opened) as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise refused
                return file.read(self.max_bytes + 1)
        except (OSError, RuntimeError):
            raise refused from None


def _opened(path: str, flags: int) -> int:
    # Windows lacks both flags.
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))


def encode_media(
    engine: Engine,
    media: Sequence[Medium],
    folder: MediaFolder,
    settings: Mapping[str, Any],
    limit: Limit,
    field: str = "messages",
) -> tuple[Soft, ...]:
    """Return the soft tokens of a request's media, in order, within the CPU time of `limit`.
    `field`: the request's field with the media, for errors. Refused or InputError for media that
    cannot be read, or too many."""
    items = _read_bytes(engine, media, folder, field)
    settings = {"audio_too_long": REFUSE, **settings}
    with limited(limit):
        out = []
        for m, raw, options in [(m, raw, setting(engine, m, settings)) for m, raw in items]:
            limit.name = m.where
            out.append(soft_of(engine, m, raw, **options))
        return tuple(out)


def _read_bytes(
    engine: Engine, media: Sequence[Medium], folder: MediaFolder, field: str
) -> list[tuple[Medium, bytes]]:
    """Return media with their bytes, in order. Refused for kinds that the engine does not support,
    InputError for anything but a data URL or a file of the folder, and for too many media or
    bytes."""
    if len(media) > MAX_MEDIA:
        raise InputError(f"{field}: {len(media)} media, and a request may have {MAX_MEDIA}")
    for medium in media:
        if medium.kind not in engine.media.kinds:
            raise missing(field, f"this engine takes no {medium.kind} ({medium.where})")
    out, total = [], 0
    for medium in media:
        source = source_of(medium)
        raw = folder.read(source.text, source.where) if source.raw is None else source.raw
        total += len(raw) if source.raw is None else 0
        if total > folder.max_bytes:
            size = f"more than {folder.max_bytes} bytes together"
            raise InputError(f"{source.where}: the files have {size}")
        out.append((medium, raw))
    return out


def setting(engine: Engine, medium: Medium, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `Engine.encode` for a medium, each from its part, else from the
    request's fields; for an image without a budget in either, that of its `detail`."""
    outer = medium.part.get("image_url")
    detail = outer.get("detail") if isinstance(outer, dict) else None
    if detail not in (None, "auto", *DETAILS):
        raise bad(f"{medium.where}.image_url.detail", f"must be one of auto, {', '.join(DETAILS)}")
    names = (k for k in MEDIA_SETTINGS[medium.kind] if medium.part.get(k) is not None)
    of_part = {k: CHAT[k](medium.part[k], f"{medium.where}.{k}") for k in names}
    options = encode_options(medium.kind, {**fields, **of_part})
    if detail in DETAILS:
        options.setdefault("budget", engine.media.budgets[DETAILS[detail]])
    return options
