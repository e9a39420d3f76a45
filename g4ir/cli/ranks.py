"""Runs a command in the processes that torchrun starts: the first does it, the others follow."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from g4ir.errors import G4Error, InputError
from g4ir.parallel.group import join, launched
from g4ir.ui import console

if TYPE_CHECKING:
    from g4ir.parallel.group import Group


def run_command(args: argparse.Namespace) -> int:
    """Run a command; returns its exit code, which is 0 of a rank that followed to the end."""
    if launched() is None:
        return _own(args)
    timeout_s = vars(args).get("rank_timeout")
    if timeout_s is None:
        raise InputError("torchrun started several processes, and this verb is for one: call g4ir")
    with join(timeout_s) as group:
        return _followed(group) if group.rank else _led(args, group)


def _own(args: argparse.Namespace) -> int:
    code: int = args.command(args)
    return code


def _followed(group: Group) -> int:
    from g4ir.engine.worker import follow

    follow(group)
    return 0


def _led(args: argparse.Namespace, group: Group) -> int:
    try:
        code = _own(args)
        group.check()
        return code
    except (G4Error, console.Ended):
        group.check()  # the reason of the others, and torchrun ends all where one has died
        raise
