"""User folders: caches, trust decisions, downloads, by the variables of
https://specifications.freedesktop.org/basedir-spec; and access to environment variables for other
modules.

Files in g4ir's folders are trusted and their programs are run, so a folder that other users own or
may write to is refused.
"""

from __future__ import annotations

import os
import shlex
import stat
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from g4ir.errors import MissingError, TrustError

from .locks import AT_ONCE, EXCLUSIVE, flock

#: variables of the environment that name the folders of cache and state
CACHE, STATE = "XDG_CACHE_HOME", "XDG_STATE_HOME"
#: mode bits by which other users may write to a folder
GROUP_WORLD_WRITE = stat.S_IWGRP | stat.S_IWOTH


def cache_root() -> Path:
    """Return the cache folder, with engines built on first use, prefix caches and other files whose
    loss costs only time."""
    return _base(CACHE, ".cache") / "g4ir"


def state_root() -> Path:
    """Return the folder of state: trust decisions (engines that this user built or trusts), digests
    of checked files, and locks. If XDG_STATE_HOME and XDG_CACHE_HOME are the same folder, it is
    `state` in the cache folder: both have files of the same names."""
    root = _base(STATE, ".local/state") / "g4ir"
    return root / "state" if root == cache_root() else root


def hub_cache() -> Path:
    """Return the Hugging Face hub cache: HF_HUB_CACHE or HUGGINGFACE_HUB_CACHE, else HF_HOME/hub,
    else huggingface/hub in the user's cache folder.

    (https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables)
    """
    env = os.environ.get
    home = Path(env("HF_HOME") or _base(CACHE, ".cache") / "huggingface")
    return Path(env("HF_HUB_CACHE") or env("HUGGINGFACE_HUB_CACHE") or home / "hub").expanduser()


def keep_inductor_private(default: str) -> Path:
    """Set TORCHINDUCTOR_CACHE_DIR to a private folder, unless it is set to another one than
    `default`; return the folder. `default`: torch's own choice, a temporary folder with a guessable
    name, which another user could create first."""
    folder_name = os.environ.get("TORCHINDUCTOR_CACHE_DIR", default)
    if folder_name != default:
        return Path(folder_name)
    try:
        folder = private(cache_root() / "inductor")
    except (OSError, TrustError):  # not fatal: the cache only saves time
        temporary = tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True)
        _until_the_end.append(temporary)
        folder = Path(temporary.name)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    return folder


#: temporary folders that are removed when the process ends
_until_the_end: list[tempfile.TemporaryDirectory[str]] = []
#: prefix of temporary folders' names
PREFIX = "g4ir-"
#: lock: TMPDIR is process-wide, and `unpacking` replaces it for some time
_ELSEWHERE = threading.Lock()


@contextmanager
def unpacking() -> Iterator[tempfile.TemporaryDirectory[str]]:
    """Context in which TMPDIR is a new private folder, for libraries that unpack programs there.
    The caller removes the folder, except after an error in the context. MissingError if it cannot
    be created."""
    try:
        folder = tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True)
    except OSError as e:
        why = f"{e.filename or tempfile.gettempdir()}: {e.strerror}"
        fix = "make room, or set TMPDIR to a folder of your own"
        raise MissingError(f"no folder to unpack compiled programs in: {why}; {fix}") from None
    with _ELSEWHERE, variable("TMPDIR", folder.name):
        try:
            yield folder
        except BaseException:
            folder.cleanup()
            raise


def setting(name: str, default: str = "") -> str:
    """Return an environment variable, or the default if it is not set."""
    return os.environ.get(name, default)


@contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """Set an environment variable for the duration of a context."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        os.environ.update({} if before is None else {name: before})


@contextmanager
def locked(folder: Path, name: str, kind: int) -> Iterator[bool | None]:
    """Context that holds a lock between processes, of a `kind` of locks.py, on a file in a private
    folder. Yields whether it was taken; None if that is impossible, as in a folder that is not
    private or has no locks."""
    acquired: bool | None = None
    with ExitStack() as opened:
        with suppress(OSError, TrustError):
            file = os.open(private(folder) / name, os.O_RDWR | os.O_CREAT, 0o600)
            opened.callback(os.close, file)
            try:
                flock(file, kind)
                acquired = True
            except BlockingIOError:
                acquired = False
        yield acquired


@contextmanager
def claimed(name: str, wait: bool) -> Iterator[bool]:
    """Context that holds a named lock between processes. Yields whether it was taken; `wait`: block
    until it is. If there can be no lock (`locked` yields None), it yields True."""
    kind = EXCLUSIVE | (0 if wait else AT_ONCE)
    with locked(state_root() / "claims", name, kind) as acquired:
        yield acquired is not False


def private(folder: Path) -> Path:
    """Return the folder; create it and missing parents with mode 0700. TrustError if other users
    could change its files; OSError, which names the variable to set, if it cannot be created."""
    try:
        missing = [p for p in (folder, *folder.parents) if not p.exists()]
        for path in reversed(missing):
            path.mkdir(mode=0o700, exist_ok=True)
    except OSError as e:
        variable = CACHE if folder.is_relative_to(cache_root()) else STATE
        fix = f"set {variable} to a folder that you may write to"
        raise OSError(e.errno, f"{e.strerror}; {fix}", e.filename) from None
    check_private(folder)
    return folder


def check_private(folder: Path) -> None:
    """Raise TrustError, with the command that fixes it, if another user owns the folder, may write
    to it, or may replace one above it. On Windows nothing is checked: the access list of the user's
    profile makes folders in it private, and mode bits do not show that."""
    if sys.platform == "win32":
        return
    folder = folder.resolve()
    root = next((p for p in folder.parents if p.name == "g4ir"), folder)
    for path in (folder, *folder.parents):
        status, ours = path.stat(), path.is_relative_to(root)
        owners = {os.geteuid()} if ours else {os.geteuid(), 0}
        # Above our own folders a group may be the user's own, and in a sticky folder such as /tmp
        # others cannot rename it.
        writable = status.st_mode & (GROUP_WORLD_WRITE if ours else stat.S_IWOTH)
        if status.st_uid not in owners:
            raise _exposed(path, "belongs to another user", f"chown {os.geteuid()}")
        if writable and (ours or not status.st_mode & stat.S_ISVTX):
            raise _exposed(path, "can be written by other users", "chmod go-w")


def _exposed(path: Path, problem: str, mend: str) -> TrustError:
    return TrustError(
        f"{path} {problem}, so its files cannot be trusted: "
        f"`{mend} {shlex.quote(str(path))}`, and remove unknown files from it (or set "
        f"XDG_CACHE_HOME and XDG_STATE_HOME to folders of your own)"
    )


def _base(variable: str, default: str) -> Path:
    value = os.environ.get(variable)
    # The XDG specification says that relative paths are ignored.
    if value and Path(value).is_absolute():
        return Path(value)
    try:
        return Path.home() / default
    except RuntimeError:
        raise MissingError(
            f"this user has no home directory: set {variable} to the absolute path of a folder"
        ) from None
