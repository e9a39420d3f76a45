"""The command line: `g4ir VERB ...`.

stdout carries the result (`--json` for machines), stderr progress and logs. Exit codes: 0 ok;
1 a check failed, or some of many requests; 2 wrong usage or bad input; 3 the environment lacks
something; 4 another rank ended or does not answer; 70 a bug in g4ir and 74 stdout cannot be
written (as in sysexits.h); 128 + N ended by signal N, so 130 interrupted; 141 the reader of stdout
went away. Nothing here imports torch before a verb needs it.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import sys
from collections.abc import Sequence

from g4ir import __version__
from g4ir.errors import G4Error, InputError
from g4ir.parallel.group import TIMEOUT_S, join, launched
from g4ir.ui import console

from .common import Parser, add_verb, tables

#: objects that are made before Python looks for garbage among them; its own number, 700, costs a
#: tenth of the time in which torch and an engine are loaded
GARBAGE = 200_000
#: thresholds that a server takes again: it runs for long, and requests in cycles may hold media
USUAL = gc.get_threshold()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. `--help` and `--version` raise SystemExit(0)."""
    words = list(sys.argv[1:] if argv is None else argv)
    console.tolerant_output()
    gc.set_threshold(GARBAGE)
    atexit.register(gc.freeze)  # else the process looks for garbage once more, 0.3 s with torch
    try:
        with console.logs(), console.endings(), console.output():
            args = _parser().parse_args(words, argparse.Namespace(json=False))
            code: int = run_command(args)
            sys.stdout.flush()
            return code
    except (Exception, KeyboardInterrupt, console.Ended) as e:
        code = console.report(e, "--trace" in words)
        if launched():
            console.leave(code)
        return code


def _parser() -> Parser:
    parser = Parser(
        prog="g4ir",
        description="Compiler and inference engine for Gemma 4 models.",
        epilog=tables()["epilog"],
    )
    parser.add_argument("--version", action="version", version=f"g4ir {__version__}")
    inner = {"": parser.add_subparsers(metavar="VERB", required=True)}
    for name, table in tables()["verbs"].items():
        p = add_verb(inner[name.rpartition(" ")[0]], name)
        if "verbs" in table:
            inner[name] = p.add_subparsers(metavar=table["verbs"])
    return parser


def run_command(args: argparse.Namespace) -> int:
    """Run a command. Of the processes that torchrun starts the first does it, and the others
    follow; the exit code of one that followed to the end is 0."""
    if launched() is None:
        return int(args.command(args))
    if "rank_timeout" not in args:
        raise InputError("torchrun started several processes, and this verb is for one: call g4ir")
    timeout_s = args.rank_timeout
    with join(TIMEOUT_S if timeout_s is None else timeout_s) as group:
        if group.rank:
            from g4ir.builder.rank_worker import follow

            follow(group)
            return 0
        try:
            code = int(args.command(args))
            group.check()
            return code
        except (G4Error, console.Ended):
            group.check()  # the reason of the others, and torchrun ends all where one has died
            raise
