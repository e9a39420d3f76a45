"""`g4ir completion`: scripts by which bash, zsh and fish complete verbs, options and values."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from g4ir import __version__
from g4ir.passes import PASSES
from g4ir.plan.gpus import GPUS
from g4ir.plan.presets import PRESETS
from g4ir.spec.record import spec_names

from .common import Parser, tables

FILE, FOLDER = "file", "folder"


@dataclass(frozen=True)
class Values:
    """Completions of an argument or an option's value: words, and files, folders or no paths."""

    words: tuple[str, ...] = ()
    paths: str = ""


@dataclass(frozen=True)
class Option:
    """One spelling of an option; `values` is None if it takes no value."""

    name: str
    help: str
    values: Values | None


@dataclass(frozen=True)
class Command:
    """A verb: words after `g4ir`, verbs below it with their help, options, arguments."""

    path: str
    verbs: dict[str, str]
    options: tuple[Option, ...]
    arguments: Values


def completion(args: argparse.Namespace) -> int:
    """Print the completion script of a shell."""
    from . import _parser

    print(SCRIPTS[args.shell](list(_commands(_parser(), ""))), end="")
    return 0


def _commands(parser: Parser, path: str) -> Iterator[Command]:
    """Yield the command of a parser, then those of the verbs below it."""
    known = Command(path, {}, (), Values())
    below: dict[str, Parser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            below |= action.choices
            helps = {a.dest: _first_line(a.help) for a in action._choices_actions}
            known = replace(known, verbs=helps)
        elif action.option_strings:
            values = None if action.nargs == 0 else _values(action)
            more = (Option(o, _first_line(action.help), values) for o in action.option_strings)
            known = replace(known, options=(*known.options, *more))
        else:
            known = replace(known, arguments=_joined(known.arguments, _values(action)))
    yield known
    for name, inner in below.items():
        yield from _commands(inner, f"{path} {name}".strip())


def _first_line(help: str | None) -> str:
    return (help or "").partition("\n")[0].partition(";")[0].strip(" :,")


def _joined(a: Values, b: Values) -> Values:
    return Values((*a.words, *(w for w in b.words if w not in a.words)), a.paths or b.paths)


def _values(action: argparse.Action) -> Values:
    """Return the completions of a value: its choices, or what verbs.yaml says of the option's name
    or else of its metavar."""
    if action.choices is not None:
        return Values(tuple(map(str, action.choices)))
    table: dict[str, list[str]] = tables()["completions"]
    names = [*action.option_strings, str(action.metavar)]
    found = next((table[name] for name in names if name in table), [])
    named = {"variants": spec_names(), "gpus": GPUS, "passes": PASSES, "presets": PRESETS}
    words = tuple(w for entry in found for w in named.get(entry, (entry,)))
    return Values(
        tuple(w for w in words if w not in (FILE, FOLDER)),
        next((w for w in words if w in (FILE, FOLDER)), ""),
    )


# --- bash -------------------------------------------------------------------------------------

_BASH = """\
# bash completion of g4ir {version}; `source <(g4ir completion bash)` loads it
_g4ir() {{
    local word command="" words="" paths=""
    local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}}
    if [[ $cur == "=" ]]; then cur=""  # --option=VALUE is three words
    elif [[ $prev == "=" ]]; then prev=${{COMP_WORDS[COMP_CWORD-2]}}; fi
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        case "${{command:+$command }}$word" in
            {commands}) command=${{command:+$command }}$word ;;
        esac
    done
    case "$command:$prev" in
{after}
        *) case "$command:$cur" in
{arguments}
        esac ;;
    esac
    mapfile -t COMPREPLY < <(compgen -W "$words" -- "$cur"
        [[ $words && $paths ]] && compgen -A "$paths" -- "$cur")
    case $paths in
        file) compopt -o filenames -o default ;;
        directory) compopt -o filenames -o dirnames ;;
    esac
}}
complete -F _g4ir g4ir
"""
_BASH_PATHS = {FILE: "file", FOLDER: "directory", "": ""}


def _bash(commands: list[Command]) -> str:
    after: dict[Values, list[str]] = {}
    for c in commands:
        for o in c.options:
            if o.values is not None:
                after.setdefault(o.values, []).append(f'"{c.path}:{o.name}"')
    arguments = []
    for c in commands:
        options = Values(tuple(o.name for o in c.options))
        words = _joined(Values(tuple(c.verbs)), c.arguments)
        arguments += [f'"{c.path}:"-*) {_bash_values(options)}']
        arguments += [f'"{c.path}:"*) {_bash_values(words)}']
    return _BASH.format(
        version=__version__,
        commands="|".join(f'"{c.path}"' for c in commands if c.path),
        after="\n".join(f"        {'|'.join(at)}) {_bash_values(v)}" for v, at in after.items()),
        arguments="\n".join(f"            {line}" for line in arguments),
    )


def _bash_values(values: Values) -> str:
    return f'words="{" ".join(values.words)}" paths="{_BASH_PATHS[values.paths]}" ;;'


# --- zsh --------------------------------------------------------------------------------------

_ZSH = """\
# zsh completion of g4ir {version}; `source <(g4ir completion zsh)` after compinit loads it
_g4ir_file() {{ compadd -- "$@"; _files; }}
_g4ir_folder() {{ compadd -- "$@"; _files -/; }}
{functions}
compdef _g4ir g4ir
"""
_ZSH_VERBS = """\
    local curcontext=$curcontext state line; typeset -A opt_args
    local -a verbs=({verbs})
    _arguments -C {options} '1:verb:{{_describe verb verbs}}' '*:: :->rest'
    [[ $state == rest ]] && (( $+functions[{name}_$line[1]] )) && {name}_$line[1]\
"""


def _zsh(commands: list[Command]) -> str:
    functions = []
    for c in commands:
        name = "_".join(["_g4ir", *c.path.split()])
        options = " ".join(_quoted(_zsh_option(o)) for o in c.options)
        if c.verbs:
            verbs = " ".join(_quoted(f"{v}:{h}") for v, h in c.verbs.items())
            body = _ZSH_VERBS.format(verbs=verbs, options=options, name=name)
        else:
            body = f"    _arguments {options} {_quoted('*:argument:' + _zsh_values(c.arguments))}"
        functions.append(f"{name}() {{\n{body}\n}}")
    return _ZSH.format(version=__version__, functions="\n".join(functions))


def _zsh_option(option: Option) -> str:
    help = option.help.translate(str.maketrans("[]", "()"))
    if option.values is None:
        return f"*{option.name}[{help}]"
    return f"*{option.name}=[{help}]:value:{_zsh_values(option.values)}"


def _zsh_values(values: Values) -> str:
    words = " ".join(values.words)
    return f" _g4ir_{values.paths} {words}" if values.paths else f"({words})"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


# --- fish -------------------------------------------------------------------------------------

_FISH = """\
# fish completion of g4ir {version}; `g4ir completion fish | source` loads it
function __g4ir_at
    set -l words (string match -v -- '-*' (commandline -opc))[2..-1]
    for i in (seq (count $argv))
        test "$words[$i]" = "$argv[$i]"; or return 1
    end
    test (count $argv) -gt 0; or test (count $words) -eq 0
end
complete -c g4ir -f
"""


def _fish(commands: list[Command]) -> str:
    lines = [_FISH.format(version=__version__)]
    for c in commands:
        at = f"complete -c g4ir -n {_quoted(f'__g4ir_at {c.path}'.strip())}"
        lines += [f"{at} -a {v} -d {_quoted(h)}\n" for v, h in c.verbs.items()]
        for o in c.options:
            flag = "-l" if o.name.startswith("--") else "-s"
            value = "" if o.values is None else f" -r {_fish_values(o.values)}"
            lines.append(f"{at} {flag} {o.name.lstrip('-')}{value} -d {_quoted(o.help)}\n")
        if c.arguments != Values():
            lines.append(f"{at} {_fish_values(c.arguments)}\n")
    return "".join(lines)


def _fish_values(values: Values) -> str:
    folders = ("(__fish_complete_directories)",) if values.paths == FOLDER else ()
    words = " ".join((*values.words, *folders))
    return f"-{'F' if values.paths == FILE else 'f'}" + (f" -a {_quoted(words)}" if words else "")


SCRIPTS: dict[str, Callable[[list[Command]], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
