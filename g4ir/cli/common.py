"""The parts that verbs share: the parser, JSON on stdout, arguments that several of them take."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from g4ir.errors import InputError
from g4ir.parallel.group import TIMEOUT_S
from g4ir.plan.gpus import find_gpu, gpu_names
from g4ir.plan.options import BuildOptions
from g4ir.spec.reader import did_you_mean
from g4ir.spec.record import SUFFIXES, Spec, load_spec, spec_names
from g4ir.ui import console
from g4ir.ui.units import parse_count

if TYPE_CHECKING:
    from g4ir.engine.engine import Engine

#: options of verbs that run the passes on a spec
PASS_OPTIONS = ("skip", "all_logits")
#: threads that a command line may ask for
MOST_THREADS = 1024
#: help of ENGINE and --gpu
ENGINE_HELP = "an engine directory written by `g4ir build`"
GPU_HELP = f"a GPU:\n{gpu_names()}"
#: a parser, or one of its groups of options
Group = argparse._ActionsContainer
Command = Callable[[argparse.Namespace], int]
#: how argparse words what it does not know
_NO_CHOICE = re.compile(r"invalid choice: '(.*?)' \(choose from (.*)\)")
_UNKNOWN = re.compile(r"unrecognized arguments: (--[^\s=]+)")
_EXTRA = re.compile(r"unrecognized arguments: ([^-].*)")


def emit(value: Any, indent: int | None = None) -> None:
    """Print JSON on stdout; what is not a finite number becomes null, which every reader knows."""
    print(json.dumps(strict(value), indent=indent), flush=True)


def strict(value: Any) -> Any:
    """Return JSON values only: null for what is not a finite number."""
    if isinstance(value, dict):
        return {k: strict(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [strict(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Parser(argparse.ArgumentParser):
    """A parser that reports wrong usage like any other error; options are never abbreviated."""

    def __init__(self, **kwargs: Any) -> None:
        form = {"allow_abbrev": False, "formatter_class": argparse.RawTextHelpFormatter}
        super().__init__(**{**form, **kwargs})
        self.first: list[str] = []
        self.add_argument(
            "--trace",
            action="store_true",
            default=argparse.SUPPRESS,
            help="print the traceback of an error",
        )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as the base class does, but leave nothing unknown to the parser above, which does
        not know the options of this one."""
        self.first = [] if args is None else list(args[:1])
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        engine = vars(found).get("engine")  # optional in a verb that takes --variant too
        if isinstance(engine, str) and "--variant" in self._option_string_actions:
            how = "" if Path(engine).exists() else self._flag_of(engine)
            if how:
                raise InputError(f"no engine directory {engine}{how}")
        return found, rest

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}{self._meant(message)} (see {self.prog} --help)")

    def _meant(self, message: str) -> str:
        """Return how to give a variant or a spec file that has no flag before it, or the verb or
        option that is like the unknown one."""
        verb, extra = _NO_CHOICE.search(message), _EXTRA.search(message)
        words = [*(extra[1].split() if extra else ()), *([verb[1]] if verb else ())]
        if "--variant" in self._option_string_actions:
            words += self.first  # argparse names a required flag first
        for word in words:
            if how := self._flag_of(word):
                return how
        if verb:
            return did_you_mean(verb[1], re.findall(r"[\w-]+", verb[2]))
        if option := _UNKNOWN.search(message):
            return did_you_mean(option[1], re.findall(r"--[\w-]+", self.format_help()))
        return ""

    def _flag_of(self, word: str) -> str:
        """Return how this verb takes a variant or a spec file; nothing for another word."""
        kind, flag = ("variant", "--variant") if word in spec_names() else ("spec file", "--spec")
        if kind == "spec file" and not word.endswith(SUFFIXES):
            return ""
        known = flag in self._option_string_actions
        how = f"give {flag} {word}" if known else f"`g4ir specs show {word}` prints it"
        return f"; {word} is a {kind}: {how}"


def add_verb(verbs: Any, name: str, command: Command, help: str, json: bool = True) -> Parser:
    parser: Parser = verbs.add_parser(name, help=help, description=help)
    parser.set_defaults(command=command)
    if json:
        parser.add_argument(
            "--json",
            action="store_true",
            default=argparse.SUPPRESS,
            help="print the result as JSON",
        )
    return parser


def add_source(parser: Group) -> None:
    """Add the flags that name a variant."""
    parser.add_argument(
        "--variant", metavar="N", help="name of a shipped variant (see `g4ir specs`)"
    )
    parser.add_argument("--spec", metavar="F", help="spec file (YAML)")


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def add_options(parser: Group, names: Iterable[str], required: Iterable[str] = ()) -> None:
    """Add the flags of these fields of BuildOptions, in this order."""
    known = {f.name: f for f in fields(BuildOptions)}
    for name in names:
        f = known[name]
        how = {"dest": name, "default": f.default, "help": f.metadata["help"], **f.metadata["flag"]}
        if name in required:
            how["required"] = True
        if how.get("action") == "append":
            how |= {"default": [], "help": f"{how['help']} (repeat)"}
        parser.add_argument(how.pop("name", flag_of(name)), **how)


def given_options(args: argparse.Namespace) -> BuildOptions:
    """Return the options of a command line."""
    names = {f.name for f in fields(BuildOptions)}
    given = {name: value for name, value in vars(args).items() if name in names}
    return BuildOptions(**given | {k: read(given[k]) for k, read in _READ.items() if k in given})


def _count(given: int | str | None, flag: str) -> int | None:
    """`32K` -> 32768; a default stays as it is."""
    return parse_count(given, flag) if isinstance(given, str) else given


def _settings(given: list[str]) -> dict[str, str]:
    """`["name=value", ...]` -> {name: value}"""
    table: dict[str, str] = {}
    for text in given:
        name, sign, value = text.partition("=")
        if not (name and sign and value) or name in table:
            raise InputError(f"--set {text}: expected NAME=VALUE, each name once")
        table[name] = value
    return table


def _numbers(text: str | None, flag: str, kind: Callable[[str], Any]) -> list[Any] | None:
    """`70,280` -> [70, 280]"""
    if text is None:
        return None
    words = text.split(",")
    for word in words:
        if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,6})?", word.strip()) or (
            kind is int and "." in word
        ):
            raise InputError(f"{flag} {word[:40]!r}: expected numbers above 0, such as 70,280")
    return [kind(word) for word in words]


#: fields whose flag is text -> their value
_READ: dict[str, Callable[[Any], Any]] = {
    "max_seq": partial(_count, flag="--max-seq"),
    "prefill_chunk": partial(_count, flag="--prefill-chunk"),
    "image_budgets": partial(_numbers, flag="--image-budget", kind=int),
    "audio_seconds": partial(_numbers, flag="--audio-seconds", kind=float),
    "settings": _settings,
    "memory": lambda text: find_gpu(text).memory_bytes if text else None,
}


def add_load(parser: Parser) -> None:
    """Add the flags that say how an engine is loaded."""
    parser.add_argument(
        "--no-cuda-graph",
        dest="cuda_graph",
        action="store_false",
        help="disable CUDA graphs",
    )
    add_trust_once(parser)


def add_trust_once(parser: Parser) -> None:
    """Add the flags of verbs that run an engine's compiled programs."""
    parser.add_argument(
        "--threads",
        metavar="N",
        type=int,
        help="number of CPU threads (default: OMP_NUM_THREADS, else the cores of the process's\n"
        "affinity and container CPU quota)",
    )
    parser.add_argument(
        "--trust",
        action="store_true",
        help="run native code of an engine built elsewhere or by another user (see `g4ir\n"
        "inspect ENGINE`; `g4ir trust ENGINE` makes it permanent)",
    )
    add_rank_timeout(parser)


def add_rank_timeout(parser: Parser) -> None:
    """Add the flag of verbs that several ranks may run together."""
    parser.add_argument(
        "--rank-timeout",
        metavar="S",
        type=float,
        default=TIMEOUT_S,
        help="under torchrun: timeout of a rank that does not respond, in seconds\n"
        f"(default {TIMEOUT_S:g})",
    )


def load(
    path: str,
    progress: Callable[[str], None],
    cuda_graph: bool = True,
    trust: bool = False,
    threads: int | None = None,
) -> Engine:
    """Load the engine of a command line."""
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise InputError(f"--threads {threads}: expected 1 to {MOST_THREADS}")
    import torch

    from g4ir.engine.load import load_engine

    if threads:
        torch.set_num_threads(threads)
    progress(f"loading {path}")
    return load_engine(path, cuda_graph=cuda_graph, trust=trust, progress=progress)


def load_to_generate(args: argparse.Namespace, progress: Callable[[str], None]) -> Engine:
    """Load the engine of a verb that generates; log what of its checkpoint's settings is not
    supported."""
    engine = load(args.engine, progress, args.cuda_graph, args.trust, args.threads)
    if note := engine.defaults().note:
        console.say(f"note: {note}")
    return engine


def given_spec(args: argparse.Namespace) -> Spec | None:
    """Return the spec of --variant or --spec."""
    if args.variant is not None and args.spec is not None:
        raise InputError("give either --variant or --spec, not both")
    if args.spec is not None:
        return load_spec(Path(args.spec))
    return None if args.variant is None else load_spec(args.variant)


def token_ids(text: str | None, flag: str) -> list[int] | None:
    """`2,5,7` -> [2, 5, 7]"""
    if text is None:
        return None
    words = text.replace(",", " ").split()
    for word in words or [text]:
        if not re.fullmatch(r"-?[0-9]{1,18}", word):
            raise InputError(f"{flag}: expected token ids such as 2,5,7, found {word[:40]!r}")
    return [int(word) for word in words]
