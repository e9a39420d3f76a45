"""Decides whether an engine's native code may run.

Compiled programs of an engine are native code, which can do all that the user can; no check of a
file can tell what they will do. They run

- if this user built the engine on this machine: `build` records the engine's digest;
- if the user decided so: `--trust` for one command, `g4ir trust ENGINE` once and for all.

Decisions are files in the user's own state folder, one for each engine's digest; deleting one
revokes it.
"""

from __future__ import annotations

import json
import logging
import shlex
import time
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


@dataclass(frozen=True)
class Decision:
    """Why an engine's code is run: `built here` or `trusted`; when, UTC; the engine's path."""

    why: str
    when: str
    path: str


def require_trust(artefact: Artefact) -> None:
    """Raise TrustError unless the engine has no native code, or this user decided to run it, or
    built it."""
    if not _has_native_code(artefact) or find_decision(artefact.manifest.digest):
        return
    path = shlex.quote(str(artefact.path))
    raise TrustError(
        f"{artefact.path}: its compiled programs are native code, which can do all that you can, "
        f"and no record shows that you built it here. `g4ir inspect {path}` prints what it is; "
        f"if you know who made it, give --trust (Python: trust=True), or `g4ir trust {path}` once"
    )


def _has_native_code(artefact: Artefact) -> bool:
    backend = find_backend(artefact.config.backend)
    return backend.has_native_code(artefact.manifest.to_dict()["compiled"])


def provenance(artefact: Artefact) -> dict[str, str]:
    """Return facts about an engine as text by name: its variant, builder (if known), weights,
    calibration text, and whether its native code runs here. Runs nothing of the engine."""
    m, c, built = artefact.manifest, artefact.config, "unknown"
    decision = find_decision(m.digest)
    if decision and decision.why == BUILT:
        built = f"this user, here, {decision.when}, as {decision.path}"
    runs = f"is run: {decision.why}" if decision else "is not run without --trust"
    return {
        "engine": str(artefact.path),
        "digest": m.digest,
        "variant": f"{c.spec.name} ({c.spec.hub or 'no hub id'})",
        "backend": f"{c.backend} {TORCH_NAMES[c.dtype]} for {c.device}: {m.machine}",
        "made_with": f"g4ir {m.g4ir}, torch {m.versions.torch}, Python {m.versions.python}",
        "weights": _weights_text(artefact),
        **({"calibration": ", ".join(map(str, texts))} if (texts := m.notes.calibration) else {}),
        "built_by": built,
        "native_code": runs if _has_native_code(artefact) else "none",
    }


def _weights_text(artefact: Artefact) -> str:
    weights = artefact.manifest.weights
    if isinstance(weights, RandomWeights):
        return f"made from seed {weights.seed}"
    if isinstance(weights, LinkedWeights):
        return f"{len(weights.files)} files in {weights.directory}, by digest"
    assert artefact.stored
    files = [artefact.manifest.files[h.path.name] for h in artefact.stored.headers]
    seed = "" if weights.seed is None else f", made from seed {weights.seed}"
    merged = "".join(f", with {a.scale:g} x {a.path}" for a in artefact.manifest.adapters)
    return f"packed, {len(files)} files, {size_text(sum(f.bytes for f in files))}{seed}{merged}"


# --- decisions --------------------------------------------------------------------------------


def record(digest: str, why: str, path: Path) -> Path:
    """Store a decision and return its file. OSError if the state folder cannot be written;
    TrustError if other users could write to it."""
    now = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    decision = asdict(Decision(why, now, str(path.resolve())))
    file = private(state_root() / ENGINES) / digest
    write_file(file, [json.dumps(decision).encode()])
    return file


def record_built(manifest: Manifest, path: Path) -> bool:
    """Record that this user built an engine here; False, with a warning, if that fails."""
    try:
        record(manifest.digest, BUILT, path)
    except (OSError, TrustError) as e:
        where = getattr(e, "filename", None) or state_root() / ENGINES
        why = f"{where}: {e.strerror}" if isinstance(e, OSError) else str(e)
        asks = "native code of this engine will need --trust, since the record that you built it"
        log.warning(f"{asks} cannot be kept: %s", why)
        return False
    return True


def find_decision(digest: str) -> Decision | None:
    """Return the decision for an engine; None if there is none or it is invalid, TrustError if
    other users could have written it."""
    file = state_root() / ENGINES / digest
    if not file.is_file():
        return None
    check_private(file.parent)
    with suppress(OSError, ValueError, KeyError, TypeError):
        stored = json.loads(file.read_text())
        return Decision(**{k: str(stored[k]) for k in ("why", "when", "path")})
    return None
