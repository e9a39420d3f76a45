"""`g4ir trust` and `g4ir sign`: whose native code is run, and how to ship engines."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from g4ir.errors import InputError

from .common import ENGINE_HELP, add_verb, emit


def add_trust(verbs: Any) -> None:
    p = add_verb(verbs, "trust", _trust, "trusted engines and signing keys")
    p.add_argument(
        "engine",
        metavar="ENGINE",
        nargs="?",
        help="engine directory to trust: its compiled code runs as long as it is unchanged",
    )
    p.add_argument("--key", metavar="FILE", help="trust engines signed with this public key")
    p.add_argument("--revoke", metavar="DIGEST", help="revoke trust in an engine or key, as listed")


def add_sign(verbs: Any) -> None:
    p = add_verb(verbs, "sign", _sign, "signature of an engine")
    p.add_argument("engine", metavar="ENGINE", nargs="?", help=ENGINE_HELP)
    p.add_argument("--key", metavar="FILE", help="Ed25519 private key to sign with (PEM)")
    p.add_argument(
        "--new-key", metavar="NAME", help="create a key pair: NAME.pem (private) and NAME.pub.pem"
    )


def _trust(args: argparse.Namespace) -> int:
    from g4ir.engine import trust
    from g4ir.engine.artefact import open_artefact

    given = [x for x in (args.engine, args.key, args.revoke) if x is not None]
    if len(given) > 1:
        raise InputError("give one of ENGINE, --key, --revoke")
    if args.engine is not None:
        found = open_artefact(Path(args.engine), check_weights=True)
        trust.record(found.manifest.digest, trust.TRUSTED, found.path)
        return _said(args, {"engine": found.manifest.digest})
    if args.key is not None:
        return _said(args, {"key": trust.trust_key(Path(args.key))})
    if args.revoke is not None:
        if not trust.revoke(args.revoke):
            raise InputError(
                f"--revoke {args.revoke}: no such engine or key; `g4ir trust` lists them"
            )
        return _said(args, {"revoked": args.revoke})
    return _list(args)


def _list(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from g4ir.engine import trust

    engines, keys = list(trust.decisions()), trust.trusted_keys()
    if args.json:
        emit({"engines": [{"digest": d, **asdict(x)} for d, x in engines], "keys": keys})
        return 0
    for digest, x in engines:
        print(f"engine {digest}  {x.why}, {x.when}, {x.path}")
    for key in keys:
        print(f"key    {key}")
    return 0


def _sign(args: argparse.Namespace) -> int:
    from g4ir.engine import trust
    from g4ir.engine.artefact import open_artefact

    if args.new_key is not None:
        if args.engine is not None or args.key is not None:
            raise InputError("--new-key makes keys and nothing else: leave out ENGINE and --key")
        files = Path(f"{args.new_key}.pem"), Path(f"{args.new_key}.pub.pem")
        trust.make_key(*files)
        return _said(args, {"private_key": str(files[0]), "public_key": str(files[1])})
    if args.engine is None or args.key is None:
        raise InputError("give ENGINE and --key FILE, or --new-key NAME")
    found = open_artefact(Path(args.engine), check_weights=True)
    return _said(args, {"signed_with": trust.sign(found, Path(args.key))})


def _said(args: argparse.Namespace, values: dict[str, str]) -> int:
    if args.json:
        emit(values)
    else:
        for key, value in values.items():
            print(f"{key.replace('_', ' ')} {value}")
    return 0
