"""The command line: `g4ir VERB ...`.

stdout carries the result (`--json` for machines), stderr progress and logs. Exit codes: 0 ok;
1 a check failed, or some of many requests; 2 wrong usage or bad input; 3 the environment lacks
something; 4 another rank ended or does not answer; 70 a bug in g4ir and 74 stdout cannot be
written (as in sysexits.h); 128 + N ended by signal N, so 130 interrupted; 141 the reader of stdout
went away. Nothing here imports torch before a verb needs it.
"""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from g4ir import __version__
from g4ir.errors import G4Error, InputError
from g4ir.parallel.group import TIMEOUT_S, join, launched
from g4ir.ui import console
from g4ir.ui.files import read_table

from .parser import Parser

#: objects that are made before Python looks for garbage among them; its own number, 700, costs a
#: tenth of the time in which torch and an engine are loaded
GARBAGE = 200_000
#: thresholds that a server takes again: it runs for long, and requests in cycles may hold media
USUAL = gc.get_threshold()
TABLE = read_table(Path(__file__).with_name("verbs.yaml"))
#: verb -> its dataclass, `module.Class`, and help, of which `g4ir --help` prints the first line
VERBS: Mapping[str, tuple[str, str]] = TABLE["verbs"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. `--help` and `--version` raise SystemExit(0)."""
    words = list(sys.argv[1:] if argv is None else argv)
    console.tolerant_output()
    gc.set_threshold(GARBAGE)
    atexit.register(gc.freeze)  # else the process looks for garbage once more, 0.3 s with torch
    try:
        with console.logs(), console.endings(), console.output():
            code = run_command(*parse(words))
            sys.stdout.flush()
            return code
    except (Exception, KeyboardInterrupt, console.Ended) as e:
        code = console.report(e, "--trace" in words)
        if launched():
            console.leave(code)
        return code


def parse(words: Sequence[str]) -> tuple[Parser, dict[str, Any]]:
    """Return the parser of a command's verb, and the values of the flags that were given."""
    values = vars(all_verbs().parse_args(words))
    parser = values.pop("parser")
    values.pop("trace", None)
    return parser, {k: v for k, v in values.items() if v is not None and v != []}


def all_verbs() -> Parser:
    """Return the parser of all verbs."""
    described = "Compiler and inference engine for Gemma 4 models."
    parser = Parser(prog="g4ir", description=described, epilog=TABLE["epilog"])
    parser.add_argument("--version", action="version", version=f"g4ir {__version__}")
    parsers: dict[str, Parser] = {}
    inner = {"": parser.add_subparsers(metavar="VERB", required=True)}
    for name, (verb, text) in VERBS.items():
        above, _, word = name.rpartition(" ")
        if above not in inner:
            below = [v.removeprefix(f"{above} ") for v in VERBS if v.startswith(f"{above} ")]
            inner[above] = parsers[above].add_subparsers(metavar="|".join(below))
        first = text.partition("\n")[0]
        parsers[name] = inner[above].add_parser(word, verb=verb, help=first, description=text)
    return parser


def run_command(parser: Parser, values: Mapping[str, Any]) -> int:
    """Run a command. Of the processes that torchrun starts the first does it, and the others
    follow; the exit code of one that followed to the end is 0."""
    if launched() is None:
        return parser.run(values)
    if "rank_timeout" not in parser.flags.names:
        raise InputError("torchrun started several processes, and this verb is for one: call g4ir")
    with join(values.get("rank_timeout", TIMEOUT_S)) as group:
        if group.rank:
            from g4ir.builder.rank_worker import follow

            follow(group)
            return 0
        try:
            code = parser.run(values)
            group.check()
            return code
        except (G4Error, console.Ended):
            group.check()  # the reason of the others, and torchrun ends all where one has died
            raise
