"""The command line: `g4ir VERB ...`.

stdout carries the result (`--json` for machines), stderr progress and logs. Exit codes: 0 ok;
1 a check failed, or some requests of a file; 2 wrong usage or bad input; 3 the environment
lacks something; 4 another rank ended or does not answer; 70 a bug in g4ir (as in sysexits.h);
128 + N ended by signal N, so 130 interrupted; 141 the reader of stdout went away. Nothing in this
package imports torch before a verb needs it.
"""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from g4ir import __version__
from g4ir.errors import G4Error, InputError
from g4ir.parallel.group import TIMEOUT_S, join, launched
from g4ir.spec.reader import did_you_mean
from g4ir.ui import console

from .config_file import with_defaults
from .parser import Parser

#: threshold of the garbage collector's first generation: with 700, the default of Python 3.11,
#: collections take a tenth of the time to load torch and an engine
GARBAGE = 200_000
#: Python's own thresholds, which a server restores: it must free media in reference cycles soon
USUAL = gc.get_threshold()
#: verb -> its dataclass, `module.Class`, and its help
VERBS: Mapping[str, tuple[str, str]] = {
    "run": ("run.Run", "text generation from a prompt or a JSONL file"),
    "chat": ("chat.Chat", "interactive chat"),
    "serve": ("serve.Serve", "HTTP server of the OpenAI, Anthropic and Ollama APIs"),
    "build": ("build.Build", "compile a model into an engine directory"),
    "plan": ("plan.PlanModels", "memory and speed estimate of a model, or of several"),
    "presets": ("presets.Presets", "named sets of build options"),
    "engines": ("engines.Engines", "engines built on first use"),
    "bench": ("bench.Bench", "latency and throughput benchmark"),
    "bench-compare": ("bench_compare.Compare", "comparison of two benchmark reports"),
    "compare": ("compare.CompareFormats", "weight formats of a model: size, quality and speed"),
    "verify": ("verify.Verify", "comparison of an engine's logits with a reference, or on a text"),
    "prove": ("prove.Prove", "report: exactness, modes, perplexity and needle in a haystack"),
    "embed": ("embed.Embed", "embeddings of texts, images, audio and video"),
    "score": ("score.ScoreTexts", "log-probabilities of texts"),
    "export": ("export.Export", "a model as a Hugging Face checkpoint or a GGUF file"),
    "specs": ("specs.Specs", "shipped variants and spec files"),
    "show": ("show.Show", "printed IR at any point of the pipeline"),
    "cost": ("cost.CostOf", "FLOPs, bytes and roofline time of a step"),
    "kernels": ("kernels.Kernels", "GPU kernels of a step, their settings and bytes"),
    "inspect": ("inspect.Inspect", "origin of an engine and its trust; metadata of a model"),
    "trust": ("trust.Trust", "allow an engine's native code"),
}
ABOUT = "Compiler and inference engine for Gemma 4 and Gemma 3 models."
EPILOG = """\
first steps, with a Gemma model as a GGUF file:
  g4ir run gemma.gguf "Why is the sky blue?"
  g4ir chat gemma.gguf
`g4ir VERB --help` describes a verb; README.md and docs/guide.md are the manual.
Every verb takes --trace, which prints the traceback of an error.

exit codes: 0 ok, 1 a check failed, or some requests of a file, 2 wrong usage or bad
input, 3 the environment lacks something, 4 another rank ended or does not answer, 70 a bug
in g4ir, 128 + N ended by signal N (130 interrupted), 141 the reader of stdout went away"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. `--help`, also the default, and `--version` raise
    SystemExit(0)."""
    words = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    console.tolerant_output()
    gc.set_threshold(GARBAGE)
    atexit.register(gc.freeze)  # avoids a last collection at exit, 0.3 s with torch
    try:
        with console.logs(), console.endings():
            code = run_command(*parse(words))
            sys.stdout.flush()
            return code
    except (Exception, KeyboardInterrupt, console.Ended) as e:
        code = console.report(e, "--trace" in words)
        if launched():
            console.leave(code)
        return code


def parse(words: Sequence[str]) -> tuple[Parser, dict[str, Any]]:
    """Return the parser of a command's verb, and the values of the flags on the command line,
    completed from environment and --config file for a verb that reads these."""
    name, *arguments = [w for w in words if w != "--trace"] or ["--help"]
    if name in ("-h", "--help", "--version"):
        print(f"g4ir {__version__}" if name == "--version" else help_text())
        raise SystemExit(0)
    parser = verb_parser(name)
    explicit = parser.parse(arguments)
    if parser.flags.verb.from_environment:
        explicit = with_defaults(parser, explicit)
    return parser, explicit


def verb_parser(name: str) -> Parser:
    """Return the parser of a verb; InputError suggests a verb for an unknown one."""
    if name not in VERBS:
        hint = did_you_mean(name, VERBS)
        raise InputError(f"{name!r} is no verb{hint} (see g4ir --help)")
    return Parser(name, *VERBS[name])


def help_text() -> str:
    """Return the help of all verbs."""
    verbs = "".join(f"  {name:<15} {help}\n" for name, (_, help) in VERBS.items())
    return f"usage: g4ir VERB [OPTIONS] ...\n\n{ABOUT}\n\nverbs:\n{verbs}\n{EPILOG}"


def run_command(parser: Parser, values: Mapping[str, Any]) -> int:
    """Run a command. Under torchrun, rank 0 runs it and the other ranks execute its calls; their
    exit code is 0 unless a rank fails."""
    if launched() is None:
        return parser.run(values)
    if "rank_timeout" not in parser.flags.names:
        fix = "call g4ir without torchrun"
        raise InputError(f"torchrun started several processes, but this verb runs in one: {fix}")
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
            group.check()  # report the failure of another rank, if that is the cause
            raise
