"""`g4ir engines`: engines that were built on first use."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict

from g4ir.errors import InputError
from g4ir.ui.units import size_text

from .common import output


def engines(args: argparse.Namespace) -> int:
    """List the engines of the cache, print its folder, or remove some."""
    from g4ir.engine.library import cached_engines, engines_root

    if args.action == "path":
        return output(args, {"path": str(engines_root())}, f"{engines_root()}\n")
    if args.action == "rm":
        return _remove(args)
    if args.names or args.all:
        raise InputError(f"engines {args.action}: names and --all are for `g4ir engines rm`")
    found = cached_engines()
    rows = [asdict(e) | {"path": str(e.path), "name": e.path.name} for e in found]
    lines = [
        f"{e.path.name}  {size_text(e.bytes)}  used {_when(e.used)}"
        f"{', in use' if e.in_use else ''}  {e.model}\n"
        for e in found
    ]
    return output(args, {"engines": rows, "bytes": sum(e.bytes for e in found)}, "".join(lines))


def _remove(args: argparse.Namespace) -> int:
    from g4ir.engine.library import cached_engines, remove

    known = {e.path.name: e for e in cached_engines()}
    if bool(args.names) == args.all:
        raise InputError("engines rm: give either names, as `g4ir engines` lists them, or --all")
    if unknown := [name for name in args.names if name not in known]:
        raise InputError(f"engines rm {unknown[0]}: no such engine; `g4ir engines` lists them")
    names = args.names or list(known)
    removed = [name for name in names if remove(known[name].path)]
    kept = [name for name in names if name not in removed]
    if kept and not args.all:
        raise InputError(f"engines rm {kept[0]}: a process uses it; end that first")
    freed = sum(known[name].bytes for name in removed)
    text = f"removed {len(removed)}, {size_text(freed)}\n" if removed else "nothing to remove\n"
    return output(args, {"removed": removed, "in_use": kept, "bytes": freed}, text)


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
