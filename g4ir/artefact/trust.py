"""Decides whose native code is run.

Compiled programs of an engine are native code, which can do all that the user can; no check of a
file can tell what they will do. They are run

- if this user built the engine on this machine: `build` records the engine's digest;
- if the user decided so: `--trust` for one command, `g4ir trust ENGINE` once and for all.

Decisions are files in the user's own state folder, one for each engine's digest.
"""

from __future__ import annotations

import json
import logging
import re
import shlex
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from g4ir.backends import find_backend
from g4ir.errors import TrustError
from g4ir.ops.types import TORCH_NAMES
from g4ir.ui.files import write_file
from g4ir.ui.paths import check_private, private, state_root
from g4ir.ui.units import size_text

from .directory import Artefact, LinkedWeights, Manifest, RandomWeights

log = logging.getLogger(__name__)

BUILT, TRUSTED = "built here", "trusted"
#: folder of the decisions in the user's state
ENGINES = "engines"
#: of an engine, as the name of a file
DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Decision:
    """Why an engine's code is run: `built here` or `trusted`; when, UTC; the engine's path."""

    why: str
    when: str
    path: str


def require_trust(found: Artefact) -> None:
    """Raise TrustError unless the engine has no native code, or this user decided to run it, or
    built it."""
    if not _has_native_code(found) or find_decision(found.manifest.digest):
        return
    path = shlex.quote(str(found.path))
    raise TrustError(
        f"{found.path}: its compiled programs are native code, which can do all that you can, and "
        f"this user did not build it on this machine. `g4ir inspect {path}` says what it is; if "
        f"you know who made it, give --trust (Python: trust=True), or `g4ir trust {path}` once"
    )


def _has_native_code(found: Artefact) -> bool:
    backend = find_backend(found.config.backend)
    return backend.has_native_code(found.manifest.to_dict()["compiled"])


def provenance(found: Artefact) -> dict[str, str]:
    """Return the engine's name, its builder as far as known, how 4-bit codes fit its weights and on
    what text they were calibrated, and whether its native code is run here; plain text by name.
    Nothing of the engine is run."""
    m, c, built = found.manifest, found.config, "unknown"
    decision = find_decision(m.digest)
    if decision and decision.why == BUILT:
        built = f"this user, here, {decision.when}, as {decision.path}"
    runs = f"is run: {decision.why}" if decision else "is not run without --trust"
    return {
        "engine": str(found.path),
        "digest": m.digest,
        "variant": f"{c.spec.name} ({c.spec.hub or 'no hub id'})",
        "backend": f"{c.backend} {TORCH_NAMES[c.dtype]} for {c.device}: {m.machine}",
        "made_with": f"g4ir {m.g4ir}, torch {m.versions.torch}, Python {m.versions.python}",
        "weights": _weights_text(found),
        **({"calibration": str(m.notes.calibration)} if m.notes.calibration else {}),
        "built_by": built,
        "native_code": runs if _has_native_code(found) else "none",
    }


def _weights_text(found: Artefact) -> str:
    kept = found.manifest.weights
    if isinstance(kept, RandomWeights):
        return f"made from seed {kept.seed}"
    if isinstance(kept, LinkedWeights):
        return f"{len(kept.files)} files in {kept.directory}, by digest"
    assert found.stored
    files = [found.manifest.files[h.path.name] for h in found.stored.headers]
    made = "" if kept.seed is None else f", made from seed {kept.seed}"
    merged = "".join(f", with {a.scale:g} x {a.path}" for a in found.manifest.adapters)
    return f"packed, {len(files)} files, {size_text(sum(f.bytes for f in files))}{made}{merged}"


# --- decisions --------------------------------------------------------------------------------


def record(digest: str, why: str, path: Path) -> None:
    """Keep a decision. OSError if the state folder cannot be written; TrustError if others could
    write to it."""
    now = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    decision = asdict(Decision(why, now, str(path.resolve())))
    write_file(private(state_root() / ENGINES) / digest, [json.dumps(decision).encode()])


def record_built(manifest: Manifest, path: Path) -> bool:
    """Keep that this user built an engine here; False, with a warning, if that cannot be kept."""
    try:
        record(manifest.digest, BUILT, path)
    except (OSError, TrustError) as e:
        where = getattr(e, "filename", None) or state_root() / ENGINES
        why = f"{where}: {e.strerror}" if isinstance(e, OSError) else str(e)
        what = "loading this engine will ask for --trust, since that this user built it cannot be"
        log.warning(f"{what} kept: %s", why)
        return False
    return True


def find_decision(digest: str) -> Decision | None:
    """Return the decision for an engine; TrustError if others could have written it."""
    file = state_root() / ENGINES / digest
    if not file.is_file():
        return None
    check_private(file.parent)
    with suppress(OSError, ValueError, KeyError, TypeError):
        stored = json.loads(file.read_text())
        return Decision(**{k: str(stored[k]) for k in ("why", "when", "path")})
    return None


def revoke(digest: str) -> bool:
    """Forget the decision for an engine, by its digest; returns whether there was one."""
    known = digest in _digests()
    if known:
        (state_root() / ENGINES / digest).unlink()
    return known


def decisions() -> Iterator[tuple[str, Decision]]:
    """Yield (digest, decision) of every engine that is trusted here, in order of digest."""
    for name in _digests():
        if found := find_decision(name):
            yield name, found


def _digests() -> list[str]:
    path = state_root() / ENGINES
    return sorted(f.name for f in path.glob("*") if DIGEST.fullmatch(f.name))
