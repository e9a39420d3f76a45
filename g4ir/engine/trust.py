"""Decides whose native code is run: engines that this user built here or decided for, or that a
known key signed.

Compiled programs of an engine are native code. They can do all that the user can, and no check of a
file can tell what they will do. So they are run

- where this user built the engine on this machine: `build` records the engine's digest;
- where the user decided so: `--trust` for one command, `g4ir trust ENGINE` once and for all;
- where manifest.json, whose digests cover every other byte, is signed with a key that the user
  trusts: `g4ir trust --key PUBLIC.pem`. That is the way to ship engines.

Decisions are files in the user's own state folder, one for each digest or key.
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
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from g4ir.backends import find_backend
from g4ir.errors import InputError, MissingError, TrustError
from g4ir.ops.types import TORCH_NAMES
from g4ir.ui.files import write_file
from g4ir.ui.paths import check_private, private, state_root
from g4ir.ui.units import size_text
from g4ir.weights.tensorfile import open_regular

from .artefact import SIGNATURE, Artefact, LinkedWeights, Manifest, RandomWeights

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

log = logging.getLogger(__name__)

#: bytes of an Ed25519 signature (RFC 8032)
SIGNATURE_BYTES = 64
#: bytes of a key file
KEY_BYTES = 4096
BUILT, TRUSTED = "built here", "trusted"
#: of an engine or a key, as the name of a file
DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Decision:
    """Why an engine's code is run: `built here` or `trusted`; when, UTC; where the engine lay."""

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
        f"user did not build it on this machine, and {said}. `g4ir inspect {path}` "
        f"says what it is; if you know who made it, give --trust (Python: trust=True), or "
        f"`g4ir trust {path}` once"
    )


def provenance(found: Artefact) -> dict[str, str]:
    """Return the engine's name, its builder as far as known, how 4-bit codes fit its weights, and
    whether its native code is run here; plain text by name. Nothing of the engine is run."""
    m = found.manifest
    native = find_backend(m.backend).native
    decision, signer = find_decision(m.digest), find_signer(found)
    signed = (found.path / SIGNATURE).is_file()
    return {
        "engine": str(found.path),
        "digest": m.digest,
        "variant": f"{m.variant} ({found.spec.hub or 'no hub id'})",
        "backend": f"{m.backend} {TORCH_NAMES[m.dtype]} for {m.device}: {m.machine}",
        "made_with": f"g4ir {m.g4ir}, torch {m.versions.torch}, Python {m.versions.python}",
        "weights": _weights_text(found),
        **({"grid": str(m.notes.grid)} if m.notes.grid else {}),
        "signature": f"key {signer}, trusted"
        if signer
        else "of a key that is not trusted here"
        if signed
        else "none",
        "built_by": f"this user, here, {decision.when}, as {decision.path}"
        if decision and decision.why == BUILT
        else "unknown",
        "native_code": _native_text(decision, signer) if native else "none",
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
    merged = "".join(f", with {a.scale:g} x {a.path}" for a in getattr(kept, "adapters", ()))
    return f"packed, {len(files)} files, {size_text(sum(f.bytes for f in files))}{made}{merged}"


def _native_text(decision: Decision | None, signer: str | None) -> str:
    if signer or decision:
        why = f"signed with {signer}" if signer else decision.why if decision else ""
        return f"is run: {why}"
    return "is not run without --trust"


# --- decisions --------------------------------------------------------------------------------


def record(digest: str, why: str, path: Path) -> None:
    """Keep a decision. OSError where the state folder cannot be written; TrustError where others
    could write to it."""
    now = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    text = json.dumps(asdict(Decision(why, now, str(path.resolve()))))
    write_file(private(_engines()) / digest, [text.encode()])


def record_built(manifest: Manifest, path: Path) -> bool:
    """Keep that this user built an engine here; False, with a warning, where that cannot be
    kept."""
    try:
        record(manifest.digest, BUILT, path)
    except (OSError, TrustError) as e:
        why = f"{e.filename or _engines()}: {e.strerror}" if isinstance(e, OSError) else str(e)
        log.warning(
            "loading this engine will ask for --trust, since that this user built it "
            "cannot be kept: %s",
            why,
        )
        return False
    return True


def find_decision(digest: str) -> Decision | None:
    """Return the decision for an engine; TrustError where others could have written it."""
    file = _engines() / digest
    if not file.is_file():
        return None
    check_private(file.parent)
    try:
        kept = json.loads(file.read_text())
        return Decision(**{k: str(kept[k]) for k in ("why", "when", "path")})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def revoke(digest: str) -> bool:
    """Forget a decision; returns whether there was one."""
    return _forget(_engines(), digest)


def decisions() -> Iterator[tuple[str, Decision]]:
    """Yield (digest, decision) of every engine that is trusted here, in order of digest."""
    if _engines().is_dir():
        for file in sorted(f for f in _engines().iterdir() if DIGEST.fullmatch(f.name)):
            if found := find_decision(file.name):
                yield file.name, found


def _engines() -> Path:
    return state_root() / "engines"


# --- signatures -------------------------------------------------------------------------------


def make_key(private_file: Path, public_file: Path) -> None:
    """Write a new pair of Ed25519 keys as PEM; the private one for this user alone."""
    ed25519, serialization = _library()
    key = ed25519.Ed25519PrivateKey.generate()
    for file in (private_file, public_file):
        if file.exists() or file.is_symlink():
            raise InputError(f"{file} exists; choose another name")
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    write_file(private_file, [secret], mode=0o600)
    write_file(public_file, [_public_pem(key.public_key())])


def sign(found: Artefact, key_file: Path) -> str:
    """Sign an engine's manifest with a private key; returns the key's fingerprint."""
    key = _read_private(key_file)
    write_file(found.path / SIGNATURE, [key.sign(found.manifest.text().encode())])
    return fingerprint(key.public_key())


def trust_key(key_file: Path) -> str:
    """Trust engines signed with a public key; returns its fingerprint."""
    key = _read_public(key_file)
    name = fingerprint(key)
    write_file(private(_keys()) / name, [_public_pem(key)])
    return name


def revoke_key(name: str) -> bool:
    """Stop trusting a key, by its fingerprint; returns whether it was trusted."""
    return _forget(_keys(), name)


def trusted_keys() -> list[str]:
    """Return fingerprints of keys trusted here. Other files in their folder are no keys."""
    found = _keys().iterdir() if _keys().is_dir() else ()
    return sorted(f.name for f in found if DIGEST.fullmatch(f.name))


def find_signer(found: Artefact) -> str | None:
    """Return the fingerprint of the trusted key that signed an engine; None where there is no
    signature or none of a trusted key. TrustError where others could have put a key there."""
    file, names = found.path / SIGNATURE, trusted_keys()
    if not names or not file.is_file():
        return None
    check_private(_keys())
    text = found.manifest.text().encode()
    with open_regular(file) as stream:
        signature = stream.read(SIGNATURE_BYTES + 1)
    keys = {n: key for n in names if (key := _trusted_key(n))}
    return next((n for n, key in keys.items() if _signed(key, text, signature)), None)


def _trusted_key(name: str) -> Ed25519PublicKey | None:
    """Return a trusted key; None where the file is no longer what was trusted."""
    with suppress(InputError):
        key = _read_public(_keys() / name)
        return key if fingerprint(key) == name else None
    return None


def fingerprint(key: Ed25519PublicKey) -> str:
    """Return SHA-256 of a public key's 32 bytes, in hexadecimal."""
    return sha256(key.public_bytes_raw()).hexdigest()


def _signed(key: Ed25519PublicKey, text: bytes, signature: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature

    if len(signature) != SIGNATURE_BYTES:
        return False
    with suppress(InvalidSignature):
        key.verify(signature, text)
        return True
    return False


def _read_private(file: Path) -> Ed25519PrivateKey:
    ed25519, serialization = _library()
    try:
        key = serialization.load_pem_private_key(_key_bytes(file), password=None)
    except (ValueError, TypeError) as e:
        raise InputError(f"{file}: expected a private key without password as PEM: {e}") from None
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise InputError(f"{file}: expected an Ed25519 key; make one with `g4ir sign --new-key`")
    return key


def _read_public(file: Path) -> Ed25519PublicKey:
    ed25519, serialization = _library()
    try:
        key = serialization.load_pem_public_key(_key_bytes(file))
    except (ValueError, TypeError) as e:
        raise InputError(f"{file}: expected a public key as PEM: {e}") from None
    if not isinstance(key, ed25519.Ed25519PublicKey):
        raise InputError(f"{file}: expected an Ed25519 key; make one with `g4ir sign --new-key`")
    return key


def _key_bytes(file: Path) -> bytes:
    try:
        with open_regular(file) as stream:
            return stream.read(KEY_BYTES)
    except OSError as e:
        raise InputError(f"{file}: cannot be read ({e.strerror}); give a key as PEM") from None


def _public_pem(key: Ed25519PublicKey) -> bytes:
    _, serialization = _library()
    pem: bytes = key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return pem


def _forget(folder: Path, name: str) -> bool:
    known = DIGEST.fullmatch(name) is not None and (folder / name).is_file()
    if known:
        (folder / name).unlink()
    return known


def _keys() -> Path:
    return state_root() / "keys"


def _library() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as e:
        raise MissingError("signatures need `pip install 'g4ir[sign]'`") from e
    return ed25519, serialization
