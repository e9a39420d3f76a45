"""The parts that verbs share: the parser, JSON on stdout, arguments that several of them take."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from functools import cache, partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from g4ir.errors import InputError
from g4ir.model.decoder import BLOCKS, VERIFY
from g4ir.model.draft import DRAFT
from g4ir.model.media import KINDS
from g4ir.model.text import TEXT_GRAPHS
from g4ir.model.towers import PARTS
from g4ir.parallel.group import TIMEOUT_S
from g4ir.plan.gpus import find_gpu, gpu_names, parse_bytes
from g4ir.plan.options import BuildOptions
from g4ir.plan.presets import PRESETS, find_preset
from g4ir.spec.reader import did_you_mean
from g4ir.spec.record import SUFFIXES, Spec, load_spec, spec_names
from g4ir.ui import console
from g4ir.ui.files import read_table
from g4ir.ui.units import parse_count

if TYPE_CHECKING:
    from g4ir.engine.engine import Engine

#: the text model's graphs, and the towers by their part
PHASES = (*TEXT_GRAPHS, VERIFY, DRAFT, "embed", BLOCKS, *PARTS)
#: what verbs.yaml leaves open
WORDS = {
    "gpus": gpu_names(),
    "timeout": TIMEOUT_S,
    "phases": PHASES,
    "presets": ", ".join(PRESETS),
    "described": "an engine directory, GGUF file, checkpoint directory, Hugging Face id or variant",
    "model": "an engine directory; or a GGUF file, checkpoint directory, Hugging Face id or\n"
    "variant, of which an engine is built on first use",
}
#: maximum draft tokens of such an engine, where --draft is given without a number
DRAFT_TOKENS = 4
#: threads that a command line may ask for
MOST_THREADS = 1024
#: a parser, or one of its groups of options
Group = argparse._ActionsContainer
#: how argparse words what it does not know
_NO_CHOICE = re.compile(r"invalid choice: '(.*?)' \(choose from (.*)\)")
_UNKNOWN = re.compile(r"unrecognized arguments: (--[^\s=]+)")
_EXTRA = re.compile(r"unrecognized arguments: ([^-].*)")


def emit(value: Any, indent: int | None = None) -> None:
    """Print JSON on stdout; what is not a finite number becomes null, which every reader knows."""
    print(json.dumps(strict(value), indent=indent), flush=True)


def output(args: argparse.Namespace, value: Any, text: str) -> int:
    """Print a result, with `--json` its values and else a text; returns the exit code 0."""
    emit(value) if args.json else print(text, end="")
    return 0


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
        self.add_argument(
            "--trace",
            action="store_true",
            default=argparse.SUPPRESS,
            help="print the traceback of an error",
        )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as the base class does, but leave nothing unknown to the parser above, which does
        not know the options of this one. `given`: which options were, those with the value that
        is the default too."""
        known = self._option_string_actions
        given = {
            known[flag].dest: joined or follows
            for word, follows in pairwise([*(args or ()), "-"])
            for flag, _, joined in [word.partition("=") if word[:2] == "--" else (word, "", "")]
            if flag in known
        }
        if given.get("preset", "-")[:1] != "-":
            self._take_preset(given)
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        if "given" not in found:  # that of the verb
            found.given = given.keys()
        return found, rest

    def _take_preset(self, given: Mapping[str, str]) -> None:
        """Make the options of the preset that is given the defaults: so flags win, in any order.
        Options that are flags of another meaning here, as `run --draft-tokens`, stay, and another
        backend has its own targets."""
        preset = find_preset(given["preset"]).options
        own: set[str] = self.get_default("of_build")
        others = {a.dest for a in self._actions} - own
        if given.get("backend", preset["backend"]) != preset["backend"]:
            others.add("target")
        options = {k: v for k, v in preset.items() if k not in others}
        self.set_defaults(**options, of_build=own | options.keys())
        for action in self._actions:
            action.required = action.required and action.dest not in options

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}{self._meant(message)} (see {self.prog} --help)")

    def _meant(self, message: str) -> str:
        """Return how to give a variant or a spec file that has no flag before it, or the verb or
        option that is like the unknown one."""
        verb, extra = _NO_CHOICE.search(message), _EXTRA.search(message)
        for word in [*(extra[1].split() if extra else ()), *([verb[1]] if verb else ())]:
            if how := self._flag_of(word):
                return how
        if verb:
            return did_you_mean(verb[1], re.findall(r"[\w-]+", verb[2]))
        if option := _UNKNOWN.search(message):
            alike = next((names for names in tables()["alike"] if option[1] in names), ())
            if known := [flag for flag in alike if flag in self._option_string_actions]:
                return f"; did you mean {known[0]}?"
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


@cache
def tables() -> dict[str, Any]:
    """Return what verbs.yaml says."""
    return read_table(Path(__file__).with_name("verbs.yaml"))


def add_verb(verbs: Any, name: str) -> Parser:
    """Add a verb with the help and the flags of verbs.yaml; its module is imported when it runs."""
    table = tables()["verbs"][name]
    described = table.get("description", table["help"])
    word = name.rpartition(" ")[2]
    parser: Parser = verbs.add_parser(word, help=table["help"], description=described)
    add_flags(parser, table["flags"], {**WORDS, **table.get("words", {})})
    parser.set_defaults(command=partial(_do, parser, table), **table.get("defaults", {}))
    return parser


def _do(parser: Parser, table: Mapping[str, Any], args: argparse.Namespace) -> int:
    _check_rules(parser, table.get("rules", ()), args)
    module, _, name = table["does"].partition(".")
    try:
        code: int = getattr(import_module(f".{module}", __package__), name)(args)
        return code
    except InputError as e:
        e = _of_flag(e, args, parser)
        raise (_of_preset(e, args, parser) if vars(args).get("preset") else e) from None


def _of_flag(e: InputError, args: argparse.Namespace, parser: Parser) -> InputError:
    """Return an error about a field, such as `top_p 2.0: ...`, under the name of its flag."""
    for name, value in vars(args).items():
        known = flag_of(name) in parser._option_string_actions
        if known and str(e).startswith((f"{name} {value}: ", f"{name} {value!r}: ")):
            return InputError(flag_of(name) + str(e).removeprefix(name))
    return e


def _of_preset(e: InputError, args: argparse.Namespace, parser: Parser) -> InputError:
    """Return an error that says which of the options it is about are the preset's."""
    preset, words = find_preset(args.preset), re.findall(r"[\w-]+", str(e))
    own = {k: v for k, v in preset.options.items() if vars(args).get(k) == v}
    named = [k for k in own if flag_of(k) in words] or [k for k in own if own[k] in words]
    if not named:
        return e
    flags = ", ".join(f"{flag_of(k)} {own[k]}" for k in named)
    known = all(flag_of(k) in parser._option_string_actions for k in named)
    fix = "give another, or no preset" if known else "give no preset"
    return InputError(f"{e}; --preset {preset.name} sets {flags}: {fix}")


def _check_rules(
    parser: Parser, rules: Iterable[Mapping[str, Any]], args: argparse.Namespace
) -> None:
    """Raise InputError for flags that do not go together, by the rules of a verb."""
    values = vars(args)

    def given(names: Iterable[str]) -> list[str]:
        return [n for n in names if values.get(n) not in (None, parser.get_default(n))]

    for rule in rules:
        needed, some, two = rule.get("given", ()), rule.get("any"), rule.get("two")
        found = given(some or two or ())
        broken = given(needed) == list(needed) and not given(rule.get("without", ()))
        if broken and len(found) >= (1 if some else 2 if two else 0):
            raise InputError(rule["says"].format(*map(flag_of, found), **values))


def add_flags(parser: Group, entries: Iterable[Any], words: Mapping[str, Any]) -> None:
    """Add the flags of a list of verbs.yaml, which says what its entries are."""
    for entry in entries:
        match entry:
            case str():
                add_flags(parser, tables()["shared"][entry], words)
            case {"options": names}:
                add_options(parser, names, entry.get("required", False), entry.get("told", {}))
            case {"media": help}:
                for kind in KINDS:
                    parser.add_argument(
                        f"--{kind}",
                        metavar="FILE",
                        dest="media",
                        action="append",
                        default=[],
                        type=partial(_medium, kind),
                        help=help.format(kind=kind),
                    )
            case {"group": title, "flags": flags}:
                add_flags(parser.add_argument_group(title), flags, words)
            case {"one of": flags}:
                add_flags(parser.add_mutually_exclusive_group(required=True), flags, words)
            case _:
                ((names, told),) = entry.items()
                how: dict[str, Any] = {"help": told} if isinstance(told, str) else dict(told)
                how["help"] = how["help"].format_map(words)
                if "type" in how:
                    how["type"] = {"int": int, "float": float, "text": utf8}[how["type"]]
                if how.get("default") == argparse.SUPPRESS:
                    how["default"] = argparse.SUPPRESS  # argparse looks at identity
                if isinstance(how.get("choices"), str):
                    how["choices"] = words[how["choices"]]
                parser.add_argument(names, **how)


def utf8(word: str) -> str:
    """Return an argument as UTF-8, whatever the locale: in that of C, Python escapes its bytes
    (PEP 383). Bytes that are no UTF-8 stay escaped."""
    try:
        return word.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # half a character that is no escaped byte
        return word


def _medium(kind: str, path: str) -> tuple[str, str]:
    return kind, path


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def add_options(
    parser: Group, names: Iterable[str], required: bool, told: Mapping[str, Mapping[str, Any]]
) -> None:
    """Add the flags of these fields of BuildOptions, in this order; argparse is `told` something
    else of some."""
    known = {f.name: f for f in fields(BuildOptions)}
    parser.set_defaults(of_build={*(parser.get_default("of_build") or ()), *names})
    for name in names:
        f = known[name]
        how = {"dest": name, "default": f.default, "help": f.metadata["help"], **f.metadata["flag"]}
        how |= told.get(name, {})
        if required:
            how["required"] = True
        if how.get("action") == "append":
            how |= {"default": [], "help": f"{how['help']} (repeat)"}
        parser.add_argument(how.pop("name", flag_of(name)), **how)


def given_options(args: argparse.Namespace) -> BuildOptions:
    """Return the options of a build that a command line gives."""
    given = {name: vars(args)[name] for name in args.of_build}
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


def load(
    path: str, progress: Callable[[str], None], threads: int | None = None, **how: Any
) -> Engine:
    """Load the engine of a command line; `how`: arguments of load_engine."""
    import torch

    from g4ir.builder.load import load_engine

    if threads:
        torch.set_num_threads(threads)
    progress(f"loading {path}")
    return load_engine(path, progress=progress, **how)


def find_engines(args: argparse.Namespace, all_logits: bool = False) -> None:
    """Put engines in the place of the models of a command line, built on first use, which may take
    minutes: flags are checked before. `models` are the words that were given."""
    from g4ir.artefact.directory import is_engine
    from g4ir.builder.library import find_engine, refuse_options

    threads = vars(args).get("threads")
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise InputError(f"--threads {threads}: expected 1 to {MOST_THREADS}")
    limit = args.engines_limit and parse_bytes(args.engines_limit, "--engines-limit")
    given = given_options(args)
    drafts = vars(args).get("draft_tokens")
    if drafts is None and vars(args).get("draft") == "ngram":
        drafts = DRAFT_TOKENS
    if drafts is None and args.preset:
        drafts = find_preset(args.preset).options.get("draft_tokens")
    needed = replace(given, all_logits=all_logits, draft_tokens=drafts)
    args.models = args.engines if "engines" in args else [args.engine]
    for engine in filter(is_engine, map(Path, args.models)):
        refuse_options(engine, args.given & {*args.of_build, "preset", "revision"})
    with console.Progress() as progress:
        options = (given if is_engine(Path(m)) else needed for m in args.models)
        how = {
            "revision": args.revision,
            "download": _consent(args.download),
            "settled": partial(of_file, args=args),
        }
        found = [
            str(find_engine(m, o, limit, progress, **how)) for m, o in zip(args.models, options)
        ]
    if "engines" in args:
        args.engines = found
    else:
        (args.engine,) = found


def of_file(options: BuildOptions, args: argparse.Namespace) -> BuildOptions:
    """Return options without the quantisation of `--preset` where a file has one of its own."""
    if not args.preset or options.checkpoint is None or options.quant is None:
        return options
    from .models import checkpoint_model, without_quant

    model = checkpoint_model(options.checkpoint)
    found = without_quant(options, find_preset(args.preset), model)
    if found != options:
        path = options.checkpoint
        console.say(f"note: {path} is quantised already: --quant {options.quant} is left out")
    return found


def _consent(download: bool) -> Callable[[Any], bool] | bool:
    """Return the function that decides on a download, after it has shown what comes: yes with
    --download, else what is answered at a terminal; False if there is none to ask."""

    def agreed(found: Any) -> bool:
        console.say(str(found))
        return download or console.confirmed("download it?")

    return agreed if download or console.interactive() else False


def how_to_load(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `load` that a verb's options say."""
    names = ("threads", "trust", "cuda_graph", "huge_pages")
    return {name: vars(args)[name] for name in names}


def load_to_generate(args: argparse.Namespace, progress: Callable[[str], None]) -> Engine:
    """Load the engine of a verb that generates; log what of its checkpoint's settings is not
    supported."""
    engine = load(args.engine, progress, **how_to_load(args))
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
