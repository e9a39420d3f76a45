"""`g4ir completion`: scripts by which bash, zsh and fish complete verbs, options and values.

The scripts (completion.SHELL) are programs over the same rows: a command, an option of it or
nothing, a word that is offered there, and its help. `<file>` and `<folder>` stand for paths.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from g4ir import __version__
from g4ir.passes import PASSES
from g4ir.plan.gpus import GPUS
from g4ir.plan.presets import PRESETS
from g4ir.spec.record import spec_names

from .common import Parser, tables

Row = tuple[str, str, str, str]


def completion(args: argparse.Namespace) -> int:
    """Print the completion script of a shell."""
    from . import _parser

    script = Path(__file__).with_name(f"completion.{args.shell}").read_text()
    made = dict.fromkeys(map("\t".join, rows(_parser(), "")))
    words = " \\\n".join("'" + row.replace("'", "'\\''") + "'" for row in made)
    print(script.replace("@version@", __version__).replace("@rows@", words), end="")
    return 0


def rows(parser: Parser, path: str) -> Iterator[Row]:
    """Yield the rows of a command, then those of the verbs below it. An option that takes a value
    of which nothing is known has an empty word."""
    below: dict[str, Parser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            below |= action.choices
            for verb in action._choices_actions:
                yield path, "", verb.dest, _first_line(verb.help)
        elif not action.option_strings:
            yield from ((path, "", word, "") for word in _values(action))
        for option in action.option_strings:
            yield path, "", option, _first_line(action.help)
            words = [] if action.nargs == 0 else _values(action) or [""]
            yield from ((path, option, word, "") for word in words)
    for name, inner in below.items():
        yield from rows(inner, f"{path} {name}".strip())


def _first_line(help: str | None) -> str:
    return (help or "").partition("\n")[0].partition(";")[0].strip(" :,")


def _values(action: argparse.Action) -> list[str]:
    """Return an argument's choices, or what verbs.yaml says of the option's name or else of its
    metavar."""
    if action.choices is not None:
        return [*map(str, action.choices)]
    table: dict[str, list[str]] = tables()["completions"]
    names = [*action.option_strings, str(action.metavar)]
    found = next((table[name] for name in names if name in table), [])
    named = {"variants": spec_names(), "gpus": GPUS, "passes": PASSES, "presets": PRESETS}
    named |= {"file": ["<file>"], "folder": ["<folder>"]}
    return [word for entry in found for word in named.get(entry, [entry])]
