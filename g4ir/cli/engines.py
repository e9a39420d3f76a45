"""`g4ir engines`: engines that were built on first use."""

from __future__ import annotations

import time
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal

from g4ir.errors import InputError
from g4ir.plan.options import flags_of
from g4ir.ui.units import size_text

from .common import output
from .verb import Verb, argument, flag, json_flag

if TYPE_CHECKING:
    from g4ir.builder.library import CachedEngine


class Engines(Verb):
    """List the engines of the cache, print its folder, or remove some."""

    action: Literal["list", "rm", "path"] = argument(
        "list (default), rm: remove, path: print the folder", None, "?", "list"
    )
    names: list[str] = argument("engines to remove, as listed", "NAME", "*")
    all: bool = flag("remove every engine that no process uses", False)
    json: bool = json_flag()

    def __call__(self) -> int:
        from g4ir.builder.library import cached_engines, disk_bytes, engines_root

        if self.action == "path":
            return output(self.json, {"path": str(engines_root())}, f"{engines_root()}\n")
        if self.action == "rm":
            return self._remove()
        if self.names or self.all:
            raise InputError(f"engines {self.action}: names and --all are for `g4ir engines rm`")
        entries = cached_engines()
        rows = [_row(e) for e in entries]
        lines = [_line(e) for e in entries]
        if len(entries) > 1:
            lines.append(f"in all  {size_text(disk_bytes(entries))}, shared files counted once\n")
        facts = {"engines": rows, "bytes": disk_bytes(entries)}
        return output(self.json, facts, "".join(lines))

    def _remove(self) -> int:
        from g4ir.builder.library import cached_engines, disk_bytes, remove

        by_name = {e.path.name: e for e in cached_engines()}
        names = list(by_name) if self.all else self.names
        if (self.names and self.all) or not (names or self.all):
            raise InputError("engines rm: give names, as `g4ir engines` lists them, or --all")
        if unknown := [name for name in names if name not in by_name]:
            raise InputError(f"engines rm {unknown[0]}: no such engine; `g4ir engines` lists them")
        busy = [name for name in self.names if by_name[name].in_use]
        before = disk_bytes(by_name.values())
        removed = [name for name in names if not busy and remove(by_name[name].path)]
        in_use = busy or [name for name in names if name not in removed]
        if in_use and self.names:
            raise InputError(f"engines rm {in_use[0]}: a process uses it; end that first")
        freed = before - disk_bytes(cached_engines())
        facts = {"removed": removed, "in_use": in_use, "bytes": freed}
        return output(self.json, facts, f"freed {size_text(freed)}\n")


def _row(e: CachedEngine) -> dict[str, Any]:
    row = {f.name: getattr(e, f.name) for f in fields(e) if f.name != "files"}
    return row | {"path": str(e.path), "name": e.path.name}


def _line(e: CachedEngine) -> str:
    """Return a line: name, size, last use, model, and the build options that differ from the
    defaults."""
    options = " ".join(flags_of({**e.options, "checkpoint": None}))
    used = time.strftime("%Y-%m-%d %H:%M", time.localtime(e.used)) + ", in use" * e.in_use
    named = f"{e.path.name}  {size_text(e.bytes)}  used {used}"
    return f"{named}  {e.model}{options and f'  {options}'}\n"
