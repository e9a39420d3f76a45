"""The command line: `g4ir VERB ...`.

stdout carries the result (`--json` for machines), stderr progress and logs. Exit codes: 0 ok;
1 a check failed, or some of many requests; 2 wrong usage or bad input; 3 the environment lacks
something; 4 another rank ended or does not answer; 70 a bug in g4ir and 74 stdout cannot be
written (as in sysexits.h); 128 + N ended by signal N, so 130 interrupted; 141 the reader of stdout
went away. Nothing here imports torch before a verb needs it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from g4ir import __version__
from g4ir.parallel.group import launched
from g4ir.ui import console

from .bench import add_bench, add_bench_compare
from .build import add_build
from .chat import add_chat
from .common import Parser
from .cost import add_cost
from .inspect import add_inspect
from .kernels import add_kernels
from .plan import add_plan
from .ranks import run_command
from .run import add_run, add_verify
from .serve import add_serve
from .show import add_show
from .specs import add_specs
from .trust import add_sign, add_trust
from .tune import add_tune

#: flags of `show` that are verbs now, and stay as aliases for one release
FORMER_FLAGS = {"--cost": "cost", "--kernels": "kernels", "--provenance": "inspect"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. `--help` and `--version` raise SystemExit(0)."""
    words = list(sys.argv[1:] if argv is None else argv)
    console.tolerant_output()
    try:
        with console.logs(), console.endings(), console.output():
            args = _parser().parse_args(_renamed(words), argparse.Namespace(json=False))
            code: int = run_command(args)
            sys.stdout.flush()
            return code
    except (Exception, KeyboardInterrupt, console.Ended) as e:
        code = console.report(e, "--trace" in words)
        if launched():
            console.leave(code)
        return code


def _renamed(words: list[str]) -> list[str]:
    """Return `show --cost ...` as `cost ...`, and the other former flags likewise."""
    flag = next((w for w in words if w in FORMER_FLAGS), None)
    at = next((i for i, w in enumerate(words) if not w.startswith("-")), None)
    if flag is None or at is None or words[at] != "show":
        return words
    rest = [w for w in words[at + 1 :] if w != flag]
    return [*words[:at], FORMER_FLAGS[flag], *rest]


def _parser() -> Parser:
    parser = Parser(
        prog="g4ir",
        description="Compiler and inference engine for Gemma 4 models.",
        epilog="first steps:\n"
        "  g4ir build --variant tiny-moe --backend torch --random-weights 0 --max-seq 512\n"
        "  g4ir run engines/tiny-moe-torch --tokens 2,5,7,9\n"
        "`g4ir VERB --help` describes a verb; README.md and docs/guide.md are the manual.\n\n"
        "exit codes: 0 ok, 1 a check failed, 2 wrong usage or bad input, 3 the environment\n"
        "lacks something, 4 another rank ended or does not answer, 70 a bug in g4ir,\n"
        "74 stdout cannot be written, 128 + N ended by signal N (130 interrupted),\n"
        "141 the reader of stdout went away",
    )
    parser.add_argument("--version", action="version", version=f"g4ir {__version__}")
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    add_specs(verbs)
    add_show(verbs)
    add_cost(verbs)
    add_kernels(verbs)
    add_inspect(verbs)
    add_plan(verbs)
    add_build(verbs)
    add_run(verbs)
    add_chat(verbs)
    add_verify(verbs)
    add_serve(verbs)
    add_bench(verbs)
    add_bench_compare(verbs)
    add_tune(verbs)
    add_trust(verbs)
    add_sign(verbs)
    return parser
