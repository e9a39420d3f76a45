"""Flags from the environment and from a YAML file, for verbs that run unattended.

The first of these that has a value wins: the command line, G4IR_FLAG_NAME in the environment, the
file of --config, the default. A flag replaces a list of the file, it does not extend it.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from g4ir.errors import G4Error, InputError
from g4ir.generate.jsonl import named
from g4ir.spec.reader import FALSES, TRUES, Map, Node, Scalar, Seq, is_null, read_tree, unknown_key

if TYPE_CHECKING:
    from .parser import Parser

log = logging.getLogger(__name__)
PREFIX = "G4IR_"
#: variables read by other modules, and those that Kubernetes sets for a service named g4ir, except
#: G4IR_PORT, which is the variable of --port too
RESERVED = re.compile(r"G4IR_(ISA|SERVICE_.*|PORT_.*)")
#: text of a switch in a file or variable -> whether it is on
SWITCHES = dict.fromkeys((*TRUES, "1"), True) | dict.fromkeys((*FALSES, "0"), False)
#: values that mean on or off in a file or variable -> value for --set
WORDS = dict.fromkeys(TRUES, "on") | dict.fromkeys(FALSES, "off")
#: key of a mapping of NAME: VALUE of --set
SETTINGS = "set"


def with_defaults(parser: Parser, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the flags, completed from the environment and the file of --config.
    InputError names the variable, or file and line."""
    environment = _environment(parser)
    path = values.get("config", environment.get("config"))
    layers = [_file(parser, Path(path)) if path else {}, environment, values]
    return _merged(layers)


def _merged(layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the values of all layers; a later layer wins."""
    settings = {k: v for layer in layers for k, v in layer.get("settings", {}).items()}
    merged = {k: v for layer in layers for k, v in layer.items() if k != "settings"}
    return merged | ({"settings": settings} if settings else {})


def _actions(parser: Parser) -> dict[str, argparse.Action | str]:
    """Return key of a file (`max-gap`) -> the argparse argument that it sets, or, for one of --set,
    the setting's name."""
    keys: dict[str, argparse.Action | str] = {n.replace("_", "-"): n for n in parser.flags.settings}
    for a in parser._actions:
        if a.dest not in ("help", "settings"):
            name = max(a.option_strings, key=len) if a.option_strings else str(a.metavar)
            keys[name.strip("-").lower()] = a
    return keys


def _environment(parser: Parser) -> dict[str, Any]:
    """Return the values that G4IR_... variables set; an empty variable sets nothing."""
    names = {PREFIX + k.replace("-", "_").upper(): a for k, a in _actions(parser).items()}
    values: dict[str, Any] = {}
    for variable, text in sorted(os.environ.items()):
        if not variable.startswith(PREFIX) or RESERVED.fullmatch(variable) or not text:
            continue
        if (action := names.get(variable)) is None:
            log.warning(f"{variable}: {unknown_key(variable, names).partition('; valid')[0]}")
            continue
        try:
            values |= _parsed(parser, action, text.split(",") if _repeats(action) else [text])
        except InputError as e:
            if text.startswith("tcp://"):
                fix = "Kubernetes sets it for a service named g4ir: set enableServiceLinks: false"
                raise InputError(f"{variable}={text}: {fix}, or rename the service") from None
            raise InputError(f"{variable}={text[:80]}: {e}") from None
    return values


def _file(parser: Parser, path: Path) -> dict[str, Any]:
    """Return {field: value} of the flags that a YAML file sets. InputError names file, line and
    key."""
    try:
        tree = read_tree(path)
    except G4Error as e:
        raise InputError(f"--config {e}") from None
    actions, values = _actions(parser), dict[str, Any]()
    del actions["config"]
    for where, action, texts in _entries(tree, actions):
        with named(where):
            parsed = _parsed(parser, action, texts)
            names = {*values, *values.get("settings", ())} - {"settings"}
            if names & {*parsed, *parsed.get("settings", ())}:  # max-gap and max_gap
                raise InputError("is given twice; keep one")
            values = _merged((values, parsed))
    return values


def _entries(
    tree: Map, actions: Mapping[str, argparse.Action | str]
) -> Iterator[tuple[str, argparse.Action | str, list[str]]]:
    """Yield (`file:line: key`, argument, texts of its values) for each entry of a file and for each
    one under SETTINGS, whose lists are joined by commas."""
    for key, node in tree.entries.items():
        where, action = f"{tree.keys[key]}: {key}", actions.get(key.replace("_", "-"))
        if action:
            yield where, action, _texts(node, where)
        elif key != SETTINGS:
            raise InputError(f"{where}: {unknown_key(key, sorted(actions))}")
        elif isinstance(node, Map):
            for name, value in node.entries.items():
                where = f"{node.keys[name]}: {key}.{name}"
                yield where, name, [",".join(_texts(value, where))]
        elif not is_null(node):
            raise InputError(f"{where}: expected a mapping of NAME: VALUE")


def _texts(node: Node, where: str) -> list[str]:
    items = node.items if isinstance(node, Seq) else (node,)
    if not all(isinstance(i, Scalar) and not is_null(i) for i in items):
        raise InputError(f"{where}: expected a value, or a list of them")
    return [i.text for i in items if isinstance(i, Scalar)]


def _repeats(action: argparse.Action | str) -> bool:
    return isinstance(action, argparse._AppendAction) or getattr(action, "nargs", None) == "*"


def _parsed(parser: Parser, action: argparse.Action | str, texts: list[str]) -> dict[str, Any]:
    """Return {field: value} of an argument, parsed from texts as on the command line."""
    if len(texts) != 1 and not _repeats(action):
        raise InputError("expected one value")
    if isinstance(action, str):
        return parser.parse(["--set", f"{action}={WORDS.get(texts[0].lower(), texts[0])}"])
    if action.nargs == 0:
        if (switch := SWITCHES.get(texts[0].lower())) is None:
            raise InputError("expected true or false")
        return {action.dest: switch}
    head = f"{action.option_strings[-1]}=" if action.option_strings else ""
    return parser.parse([f"{head}{text.strip()}" for text in texts])
