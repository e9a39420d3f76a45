"""Decides whose native code is run.

Compiled programs of an engine are native code, which can do all that the user can; no check of a
file can tell what they will do. They are run

- if this user built the engine on this machine: `build` records the engine's digest;
- if the user decided so: `--trust` for one command, `g4ir trust ENGINE` once and for all;
- if manifest.json, whose digests cover every other byte, is signed with a key that the user
  trusts: `g4ir trust --key PUBLIC.pem`. That is the way to ship engines.

Decisions are files in the user's own state folder, one for each digest or key.
"""

from __future__ import annotations

import logging
import re
import shlex
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from g4ir.backends import find_backend
from g4ir.errors import InputError, MissingError, TrustError
from g4ir.ops.types import TORCH_NAMES
from g4ir.ui.files import write_file
from g4ir.ui.paths import check_private, private, state_root
from g4ir.ui.units import size_text
from g4ir.weights.tensorfile import open_regular

from .digests import find_kept, keep
from .directory import SIGNATURE, Artefact, LinkedWeights, Manifest, RandomWeights

log = logging.getLogger(__name__)

#: bytes of an Ed25519 signature (RFC 8032), and of a key file at most
SIGNATURE_BYTES, KEY_BYTES = 64, 4096
BUILT, TRUSTED = "built here", "trusted"
#: folders of the user's state
ENGINES, KEYS = "engines", "keys"
#: of an engine or a key, as the name of a file
DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Decision:
    """Why an engine's code is run: `built here` or `trusted`; when, UTC; the engine's path."""

    why: str
    when: str
    path: str


def require_trust(found: Artefact) -> None:
    """Raise TrustError unless this user decided to run the engine's native code, or built it."""
    if find_decision(found.manifest.digest) or find_signer(found):
        return
    signed = (found.path / SIGNATURE).is_file()
    said = "it is signed with a key that is not trusted here" if signed else "it is not signed"
    path = shlex.quote(str(found.path))
    raise TrustError(
        f"{found.path}: its compiled programs are native code, which can do all that you can, this "
        f"user did not build it on this machine, and {said}. `g4ir inspect {path}` says what it "
        f"is; if you know who made it, give --trust (Python: trust=True), or `g4ir trust {path}` "
        f"once"
    )


def provenance(found: Artefact) -> dict[str, str]:
    """Return the engine's name, its builder as far as known, how 4-bit codes fit its weights and on
    what text they were calibrated, and whether its native code is run here; plain text by name.
    Nothing of the engine is run."""
    m, decision, signer = found.manifest, find_decision(found.manifest.digest), find_signer(found)
    signed = (found.path / SIGNATURE).is_file()
    why = f"signed with {signer}" if signer else decision and decision.why
    signature, built = "of a key that is not trusted here" if signed else "none", "unknown"
    if decision and decision.why == BUILT:
        built = f"this user, here, {decision.when}, as {decision.path}"
    runs = f"is run: {why}" if why else "is not run without --trust"
    return {
        "engine": str(found.path),
        "digest": m.digest,
        "variant": f"{m.variant} ({found.spec.hub or 'no hub id'})",
        "backend": f"{m.backend} {TORCH_NAMES[m.dtype]} for {m.device}: {m.machine}",
        "made_with": f"g4ir {m.g4ir}, torch {m.versions.torch}, Python {m.versions.python}",
        "weights": _weights_text(found),
        **{k: str(v) for k in ("grid", "calibration") if (v := getattr(m.notes, k))},
        "signature": f"key {signer}, trusted" if signer else signature,
        "built_by": built,
        "native_code": runs if find_backend(m.backend).native else "none",
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
    keep(state_root() / ENGINES / digest, asdict(Decision(why, now, str(path.resolve()))))


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
    kept = find_kept(state_root() / ENGINES / digest)
    with suppress(KeyError, TypeError):
        return Decision(**{k: str(kept[k]) for k in ("why", "when", "path")})
    return None


def revoke(digest: str) -> bool:
    """Forget the decision for an engine or a key, by its digest; returns whether there was one."""
    known = [folder for folder in (ENGINES, KEYS) if digest in _names(folder)]
    for folder in known:
        (state_root() / folder / digest).unlink()
    return bool(known)


def decisions() -> Iterator[tuple[str, Decision]]:
    """Yield (digest, decision) of every engine that is trusted here, in order of digest."""
    for name in _names(ENGINES):
        if found := find_decision(name):
            yield name, found


def trusted_keys() -> list[str]:
    """Return fingerprints of keys trusted here."""
    return _names(KEYS)


def _names(folder: str) -> list[str]:
    path = state_root() / folder
    return sorted(f.name for f in path.glob("*") if DIGEST.fullmatch(f.name))


# --- signatures -------------------------------------------------------------------------------


def make_key(private_file: Path, public_file: Path) -> None:
    """Write a new pair of Ed25519 keys as PEM; the private one for this user alone."""
    ed25519, serialization, _ = _library()
    key, pem = ed25519.Ed25519PrivateKey.generate(), serialization.Encoding.PEM
    for file in (private_file, public_file):
        if file.exists() or file.is_symlink():
            raise InputError(f"{file} exists; choose another name")
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    write_file(private_file, [secret], mode=0o600)
    write_file(public_file, [_public_pem(key.public_key())])


def sign(found: Artefact, key_file: Path) -> str:
    """Sign an engine's manifest with a private key; returns the key's fingerprint."""
    key = _read_key(key_file, public=False)
    write_file(found.path / SIGNATURE, [key.sign(found.manifest.text().encode())])
    return fingerprint(key.public_key())


def trust_key(key_file: Path) -> str:
    """Trust engines signed with a public key; returns its fingerprint."""
    key = _read_key(key_file, public=True)
    write_file(private(state_root() / KEYS) / fingerprint(key), [_public_pem(key)])
    return fingerprint(key)


def find_signer(found: Artefact) -> str | None:
    """Return the fingerprint of the trusted key that signed an engine; None without a signature of
    a trusted key. TrustError if others could have put a key there."""
    file, names = found.path / SIGNATURE, trusted_keys()
    if not names or not file.is_file():
        return None
    check_private(state_root() / KEYS)
    with open_regular(file) as stream:
        signature = stream.read(SIGNATURE_BYTES + 1)
    text = found.manifest.text().encode()
    for name in names:
        with suppress(InputError, _library()[-1]):  # a key that is not as trusted, or not the one
            key = _read_key(state_root() / KEYS / name, public=True)
            key.verify(signature, text)
            if fingerprint(key) == name:
                return name
    return None


def fingerprint(key: Any) -> str:
    """Return the SHA-256 of a public key's 32 bytes, in hexadecimal."""
    return sha256(key.public_bytes_raw()).hexdigest()


def _read_key(file: Path, public: bool) -> Any:
    ed25519, pem, _ = _library()
    wanted = "a public key" if public else "a private key without password"
    try:
        with open_regular(file) as stream:
            raw = stream.read(KEY_BYTES)
        load = (
            pem.load_pem_public_key if public else partial(pem.load_pem_private_key, password=None)
        )
        key = load(raw)
    except OSError as e:
        raise InputError(f"{file}: cannot be read ({e.strerror}); give a key as PEM") from None
    except (ValueError, TypeError) as e:
        raise InputError(f"{file}: expected {wanted} as PEM: {e}") from None
    if not isinstance(key, ed25519.Ed25519PublicKey if public else ed25519.Ed25519PrivateKey):
        raise InputError(f"{file}: expected an Ed25519 key; make one with `g4ir sign --new-key`")
    return key


def _public_pem(key: Any) -> bytes:
    _, serialization, _ = _library()
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    made: bytes = key.public_bytes(serialization.Encoding.PEM, form)
    return made


def _library() -> tuple[Any, Any, Any]:
    """Return the modules of keys and of their files, and the error of a wrong signature."""
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as e:
        raise MissingError("signatures need `pip install 'g4ir[sign]'`") from e
    return ed25519, serialization, InvalidSignature
