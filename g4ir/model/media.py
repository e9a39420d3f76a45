"""Media that an engine supports, and the static shapes of its towers.

media = find_media(spec, kinds="all", budgets=None, seconds=None)
media.budgets    # soft tokens of an image, one graph each
media.frame      # soft tokens of a frame, or None without video
media.lengths    # soft tokens of an audio clip, one graph each
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from g4ir.errors import InputError
from g4ir.spec.parts import Tokens
from g4ir.spec.record import Spec

from .audio import AudioSettings, audio_settings
from .images import BUDGETS, frame_budget, image_settings

IMAGE, VIDEO, AUDIO = KINDS = ("image", "video", "audio")
#: kinds encoded by the vision tower; in some models their soft tokens form bidirectional blocks
#: (rule 19)
PICTURES = (IMAGE, VIDEO)
#: keyword of a list of media in Python and in JSON lines -> kind
LISTS = {"images": IMAGE, "videos": VIDEO, "audio": AUDIO}
#: kind -> setting in requests -> keyword of `Engine.encode`
MEDIA_SETTINGS = {
    IMAGE: {"image_budget": "budget"},
    VIDEO: {"frames": "frames", "fps": "fps"},
    AUDIO: {"audio_too_long": "too_long"},
}
#: default lengths of the audio towers, in seconds
SECONDS = (5.0, 10.0, 20.0, 30.0)
#: no clip has more samples
MAX_SAMPLES = 1 << 40
#: default seconds for towers whose frames are independent: longer clips are split
PART_SECONDS = (10.0,)


@dataclass(frozen=True)
class Media:
    """The media of an engine's towers; empty for text-only engines."""

    kinds: tuple[str, ...] = ()
    budgets: tuple[int, ...] = ()  # soft tokens of images, ascending; one is `default`
    default: int | None = None
    frame: int | None = None  # soft tokens of a video frame; None without video
    lengths: tuple[int, ...] = ()  # soft tokens of audio clips, ascending

    @property
    def grids(self) -> tuple[int, ...]:
        """Soft tokens of each vision graph, for images and video frames, ascending."""
        frames = () if self.frame is None else (self.frame,)
        return tuple(sorted({*self.budgets, *frames}))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def placeholders(tokens: Tokens, kinds: Collection[str] = KINDS) -> dict[str, int]:
    """Return kind -> its placeholder token id, for kinds that have one."""
    ids = {IMAGE: tokens.image, VIDEO: tokens.video, AUDIO: tokens.audio}
    return {kind: i for kind, i in ids.items() if kind in kinds and i is not None}


def supported_media(spec: Spec) -> tuple[str, ...]:
    """Return the kinds of media that a variant supports."""
    towers = {kind: spec.vision if kind in PICTURES else spec.audio for kind in KINDS}
    return tuple(kind for kind in placeholders(spec.tokens) if towers[kind] is not None)


def check_media(media: Media, spec: Spec, max_lengths: int) -> None:
    """Raise InputError for media that do not fit the spec; `max_lengths`: maximum number of audio
    lengths."""
    images = IMAGE in media.kinds
    allowed = {*BUDGETS, *([image_settings(spec).budget] if images else [])}
    rules = {
        "kinds": media.kinds == tuple(k for k in supported_media(spec) if k in media.kinds),
        "budgets": _rising(media.budgets)
        and allowed >= {*media.budgets}
        and bool(media.budgets) == images,
        "default": media.default in (media.budgets if images else (None,)),
        "frame": media.frame == (frame_budget(spec) if VIDEO in media.kinds else None),
        "lengths": _rising(media.lengths)
        and len(media.lengths) <= max_lengths
        and bool(media.lengths) == (AUDIO in media.kinds),
    }
    for name, holds in rules.items():
        if not holds:
            raise InputError(f"media.{name} {getattr(media, name)!r} is not what {spec.name} takes")


def _rising(values: tuple[int, ...]) -> bool:
    """Return whether values are positive, strictly ascending and below 2^20."""
    return max(values, default=0) < 1 << 20 and all(a < b for a, b in zip((0, *values), values))


def encode_options(kind: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of `Engine.encode` for one medium of a request with these settings."""
    named = MEDIA_SETTINGS[kind].items()
    return {keyword: settings[k] for k, keyword in named if settings.get(k) is not None}


def check_supported(kind: str, media: Media, spec: Spec) -> None:
    """Raise InputError for an unknown kind of media, and for one that an engine does not support,
    with the way to build one that does, if the variant supports it."""
    if kind not in KINDS:
        raise InputError(f"kind of media {kind!r}: expected one of {', '.join(KINDS)}")
    if kind in media.kinds:
        return
    takes = f"this engine takes {', '.join(('text', *media.kinds))}, no {kind}"
    can = supported_media(spec)
    if kind not in can:
        raise InputError(f"{takes}, and {spec.name} takes {', '.join(can) or 'text alone'}")
    more = ",".join(k for k in can if k in (*media.kinds, kind))
    raise InputError(f"{takes}; build one with `g4ir build --media {more}`")


def check_file(kind: str, path: str | Path) -> None:
    """Raise InputError unless the path is a regular file: a device or a pipe may be endless."""
    problem = f"no such {kind} file"
    try:
        if Path(path).is_file():
            return
        problem = "is not a regular file" if Path(path).exists() else problem
    except PermissionError:
        problem = "no permission to look it up"
    except (OSError, ValueError):  # invalid file name
        pass
    raise InputError(f"{path}: {problem}")


def check_budget(budget: int | None, media: Media) -> None:
    """Raise InputError unless the engine was built for this image budget."""
    if budget in media.budgets:
        return
    has = ", ".join(map(str, media.budgets))
    more = ",".join(map(str, dict.fromkeys((media.default, *media.budgets, budget))))
    advice = f"; or build one with `--image-budget {more}`" if budget in BUDGETS else ""
    raise InputError(
        f"image budget {budget}: this engine was built for {has}: choose from them{advice}"
    )


def list_media(media: Media, spec: Spec, **lists: Any) -> list[tuple[str, Any]]:
    """Return (kind, item) of every item of the lists, which are named as in LISTS.

    InputError for a kind that the engine does not support, and for anything but a list: a path
    would be iterated by characters, an array by rows."""
    out = []
    for name, items in lists.items():
        check_list(name, items)
        if items:
            check_supported(LISTS[name], media, spec)
        out += [(LISTS[name], item) for item in items]
    return out


def check_list(name: str, items: Any) -> None:
    """Raise InputError unless `items` is a list or tuple."""
    if not isinstance(items, list | tuple):
        raise InputError(f"{name}: expected a list, found {type(items).__name__}")


def find_media(
    spec: Spec,
    kinds: str | Sequence[str] = "all",
    budgets: Sequence[int] | None = None,
    seconds: Sequence[float] | None = None,
    extractor: Mapping[str, Any] | None = None,
) -> Media:
    """Return the media of a build. `kinds`: `all` of the variant, `none`, or some of KINDS;
    `budgets`: maximum soft tokens of images, first that of requests that choose none (None: the
    variant's); `seconds`: audio lengths to compile, of which a clip uses the shortest that is long
    enough (only the longest is compiled if frames are independent); `extractor`: the feature
    extractor config of a checkpoint.

    InputError names what the variant does not support.
    """
    chosen = _kinds(spec, kinds)
    if budgets is not None and IMAGE not in chosen:
        raise InputError("--image-budget: this engine takes no images; leave it out")
    if seconds is not None and AUDIO not in chosen:
        raise InputError("--audio-seconds: this engine takes no audio; leave it out")
    asked = _budgets(spec, budgets) if IMAGE in chosen else ()
    return Media(
        kinds=chosen,
        budgets=tuple(sorted(set(asked))),
        default=asked[0] if asked else None,
        frame=frame_budget(spec) if VIDEO in chosen else None,
        lengths=_lengths(audio_settings(spec, extractor), seconds) if AUDIO in chosen else (),
    )


def media_options(media: Media, spec: Spec) -> dict[str, Any]:
    """Return the build options that result in these media, with default audio settings."""
    budgets, seconds = [b for b in media.budgets if b != media.default], []
    if media.lengths:
        audio = audio_settings(spec)
        clips = [bisect_left(range(MAX_SAMPLES), n, key=audio.soft_tokens) for n in media.lengths]
        seconds = [f"{samples / audio.sampling_rate:.6f}" for samples in clips]
    return {
        "media": ",".join(media.kinds) or "none",
        "image_budgets": [media.default, *budgets] if media.default else None,
        "audio_seconds": seconds,
    }


def _kinds(spec: Spec, kinds: str | Sequence[str]) -> tuple[str, ...]:
    can = supported_media(spec)
    if kinds == "all":
        return can
    words = kinds.split(",") if isinstance(kinds, str) else list(kinds)
    requested = {w.strip() for w in words if w.strip() and w.strip() != "none"}
    for word in sorted(requested):
        if word not in KINDS:
            some = f"some of {', '.join(KINDS)}, or all or none alone"
            raise InputError(f"--media {word[:40]!r}: expected {some}")
        if word not in can:
            raise InputError(f"--media {word}: {spec.name} takes {', '.join(can) or 'text alone'}")
    return tuple(k for k in can if k in requested)


def _budgets(spec: Spec, budgets: Sequence[int] | None) -> tuple[int, ...]:
    if budgets is not None and not budgets:
        raise InputError(f"--image-budget: give one of {', '.join(map(str, BUDGETS))}")
    requested = [None] if budgets is None else budgets
    return tuple(image_settings(spec, b).budget for b in requested)


def _lengths(settings: AudioSettings, seconds: Sequence[float] | None) -> tuple[int, ...]:
    """Return soft tokens of the requested lengths, limited to the longest clip; a single length if
    there is no limit, since frames are independent then."""
    longest = settings.max_samples
    out = set()
    for s in seconds if seconds is not None else SECONDS if longest else PART_SECONDS:
        if not (math.isfinite(s) and s > 0):
            raise InputError(f"--audio-seconds {s}: expected a finite number above 0")
        samples = round(s * settings.sampling_rate)
        samples = samples if longest is None else min(samples, longest)
        out.add(max(1, settings.soft_tokens(samples)))
    if not out:
        raise InputError("--audio-seconds: give at least one length")
    return tuple(sorted(out)) if longest is not None else (max(out),)
