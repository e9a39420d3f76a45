"""The page at `/`: a chat in a browser, of files that the wheel has."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

#: path -> its file and its type
ASSETS = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/style.css": ("style.css", "text/css; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
#: the page runs its own files alone, and asks this server alone
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True)
class Asset:
    """A file of the page, read once."""

    content: bytes
    media_type: str

    async def __call__(self, request: Request) -> Response:
        """Answer the file, or that it has not changed."""
        tag = f'"{hashlib.sha256(self.content).hexdigest()[:16]}"'
        headers = {**HEADERS, "ETag": tag}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers=headers, media_type=self.media_type)


def read_assets() -> dict[str, Asset]:
    """Return path -> file."""
    folder, named = files("g4ir.serve") / "assets", ASSETS.items()
    return {path: Asset((folder / name).read_bytes(), kind) for path, (name, kind) in named}
