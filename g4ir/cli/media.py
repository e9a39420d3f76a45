"""Flags of media files and their settings, of `run` and `embed`."""

from __future__ import annotations

from typing import Any, Literal

from g4ir.errors import InputError
from g4ir.model.media import KINDS, MEDIA_SETTINGS, check_file

from .verb import Part, flag, flag_of, setting

#: setting -> kind of media that it applies to
SETTING_KINDS = {setting: kind for kind, names in MEDIA_SETTINGS.items() for setting in names}


class MediaFlags(Part, title="media"):
    """Files of media, and their settings."""

    files: list[tuple[str, str]] = flag("KIND file", (), "FILE", each=KINDS)
    image_budget: int | None = setting("maximum soft tokens per image")
    frames: int | None = setting("number of video frames to sample")
    fps: float | None = setting("video frames to sample per second")
    audio_too_long: Literal["cut", "refuse"] | None = setting("what becomes of longer audio")

    def settings(self) -> dict[str, Any]:
        """Return the settings by name; None: the default."""
        return {name: vars(self)[name] for name in SETTING_KINDS}

    def check(self, lines: str | None, example: str) -> None:
        """Raise InputError for a missing file, or a setting without its kind. `lines`: the flag of
        JSON lines, if given, which have their own files, as in the example."""
        kinds = {kind for kind, _ in self.files}
        if lines and kinds:
            why = f"with {lines} each request names its own files, such as {example}"
            raise InputError(f"--{min(kinds)}: {why}")
        for name, kind in SETTING_KINDS.items():
            if vars(self)[name] is not None and not lines and kind not in kinds:
                raise InputError(f"{flag_of(name)} is for --{kind}, which is not given")
        for kind, path in self.files:
            try:
                check_file(kind, path)
            except InputError as e:
                raise InputError(f"--{kind}: {e}") from None
