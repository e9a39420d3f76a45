"""Where things of the user lie beside engines: caches, decisions, downloads. The environment is
read here alone (https://specifications.freedesktop.org/basedir-spec).

What lies there is believed, and programs from there are run: a folder that others own or may write
to is refused.
"""

from __future__ import annotations

import os
import shlex
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import MissingError, TrustError

#: mode bits by which others than the owner may change what lies in a folder
OTHERS = stat.S_IWGRP | stat.S_IWOTH


def cache_root() -> Path:
    """Where compiled programs are kept between builds: losing it costs time alone."""
    return _base("XDG_CACHE_HOME", ".cache") / "g4ir"


def state_root() -> Path:
    """Where decisions are kept: which engines this user built or trusts, and digests of what lies
    in the cache."""
    return _base("XDG_STATE_HOME", ".local/state") / "g4ir"


def hub_cache() -> Path:
    """Where the Hugging Face tools keep downloads: HF_HUB_CACHE, HF_HOME/hub, XDG or ~/.cache.

    (https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables)
    """
    env = os.environ.get
    home = Path(env("HF_HOME") or _base("XDG_CACHE_HOME", ".cache") / "huggingface")
    return Path(env("HF_HUB_CACHE") or env("HUGGINGFACE_HUB_CACHE") or home / "hub").expanduser()


def keep_inductor_private(default: str) -> None:
    """Have torch's compiler keep its files in a folder of the user's own, unless one was given. Its
    default is a folder for temporary files whose name anybody can guess and make first."""
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR", default) == default:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(private(cache_root() / "inductor"))


@contextmanager
def unpacking(keep: bool) -> Iterator[None]:
    """Meanwhile, libraries that ask for a folder for temporary files are given one that is this
    user's alone. It goes at the end, or with `keep` when the process ends. MissingError where there
    is no room for one."""
    root = cache_root() / "unpacked"
    new = [p for p in (root, *root.parents) if not p.exists()]
    folder = _private_temporary(root)
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = folder.name
    try:
        yield
    finally:
        os.environ.pop("TMPDIR")
        os.environ.update({} if before is None else {"TMPDIR": before})
        if keep:
            _kept.append(folder)
        else:
            folder.cleanup()
            for made in new:  # a run alone leaves nothing behind
                with suppress(OSError):
                    made.rmdir()


#: folders that go when the process ends
_kept: list[tempfile.TemporaryDirectory[str]] = []


def _private_temporary(root: Path) -> tempfile.TemporaryDirectory[str]:
    """A new folder in the user's cache, or among temporary files where there is no cache."""
    reasons = []
    for place in (root, None):
        try:
            if place:
                private(place)
            return tempfile.TemporaryDirectory(
                prefix="g4ir-", dir=place, ignore_cleanup_errors=True
            )
        except OSError as e:
            reasons.append(f"{e.filename or place}: {e.strerror}")
    raise MissingError(
        f"no folder to unpack compiled programs in: {'; '.join(reasons)}; make room, or give "
        f"XDG_CACHE_HOME a folder of your own"
    )


def private(folder: Path) -> Path:
    """The folder, made where it is missing; TrustError where others could change what lies in it.
    OSError where it cannot be made."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    check_private(folder)
    return folder


def check_private(folder: Path) -> None:
    """TrustError, with the command that mends it, where others could change what lies in a folder:
    another user owns it or may write to it, or may exchange one above it."""
    folder = folder.resolve()
    root = next((p for p in folder.parents if p.name == "g4ir"), folder)
    for place in (folder, *folder.parents):
        status, ours = place.stat(), place.is_relative_to(root)
        owners = {os.geteuid()} if ours else {os.geteuid(), 0}
        # Above our own folders a group may be the user's own, and in a sticky folder such as /tmp
        # nobody renames what is not theirs.
        writable = status.st_mode & (OTHERS if ours else stat.S_IWOTH)
        if status.st_uid not in owners:
            raise _exposed(place, "belongs to another user", f"chown {os.geteuid()}")
        if writable and (ours or not status.st_mode & stat.S_ISVTX):
            raise _exposed(place, "can be written by other users", "chmod go-w")


def _exposed(place: Path, what: str, mend: str) -> TrustError:
    return TrustError(
        f"{place} {what}, so what lies in it cannot be believed: "
        f"`{mend} {shlex.quote(str(place))}`, and remove what you do not know in it (or give "
        f"XDG_CACHE_HOME and XDG_STATE_HOME folders of your own)"
    )


def _base(variable: str, default: str) -> Path:
    given = os.environ.get(variable)
    # As the specification has it: a path that is not absolute is none.
    return Path(given) if given and Path(given).is_absolute() else Path.home() / default
