"""The chat page at `/`, from the package's asset files."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from g4ir.ui.files import read_table

TABLE = read_table(Path(__file__).with_suffix(".yaml"))
ASSETS: Mapping[str, tuple[str, str]] = TABLE["assets"]
HEADERS: Mapping[str, str] = TABLE["headers"]


@dataclass(frozen=True)
class Asset:
    """A file of the chat page in memory, and its Content-Type; called as a request handler."""

    content: bytes
    media_type: str

    async def __call__(self, request: Request) -> Response:
        """Respond with the file, or 304 Not Modified."""
        tag = f'"{hashlib.sha256(self.content).hexdigest()[:16]}"'
        headers = {**HEADERS, "ETag": tag}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers=headers, media_type=self.media_type)


def read_assets() -> dict[str, Asset]:
    """Return URL path -> file of the page."""
    folder, named = Path(__file__).with_name("assets"), ASSETS.items()
    return {path: Asset((folder / name).read_bytes(), kind) for path, (name, kind) in named}
