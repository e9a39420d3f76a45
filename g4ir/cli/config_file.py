"""Flags from the environment and from a YAML file, for verbs that run unattended.

The first of these that has a value wins: the command line, G4IR_FLAG_NAME in the environment, the
file of --config, the default. Lists are whole: those of a file are not extended by a flag.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from g4ir.errors import G4Error, InputError
from g4ir.spec.reader import FALSES, TRUES, Map, Node, Scalar, Seq, is_null, read_tree, unknown_key

if TYPE_CHECKING:
    from .parser import Parser

log = logging.getLogger(__name__)
PREFIX = "G4IR_"
#: variables that are read elsewhere, and those that Kubernetes sets for a service named g4ir
RESERVED = re.compile(r"G4IR_(ISA|SERVICE_.*|PORT_.*)")
SWITCHES = dict.fromkeys((*TRUES, "1"), True) | dict.fromkeys((*FALSES, "0"), False)
#: what --set takes in place of these words
WORDS = dict.fromkeys(TRUES, "on") | dict.fromkeys(FALSES, "off")
#: key of a backend's own settings, a mapping
SETTINGS = "set"


def with_defaults(parser: Parser, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the flags, completed from the environment and the file of --config.
    InputError names the variable, or file and line."""
    reader = _Reader(parser)
    environment = dict(reader.environment())
    path = values.get("config", environment.get("config"))
    layers = [dict(reader.file(Path(path))) if path else {}, environment, values]
    settings = {k: v for layer in layers for k, v in layer.get("settings", {}).items()}
    merged = {k: v for layer in layers for k, v in layer.items()}
    return merged | ({"settings": settings} if settings else {})


class _Reader:
    """Converts texts to the values of a verb's flags."""

    def __init__(self, parser: Parser) -> None:
        self.parser, flags = parser, parser.flags
        self.settings = flags.settings
        positional = {a.dest: a for a in parser._actions if not a.option_strings}
        named = {f: parser._option_string_actions.get(n) for f, n in flags.names.items()}
        #: field -> its action; None for a setting
        self.actions = {**named, **positional}
        self.fields = {self._key(f): f for f in self.actions}

    def _key(self, field: str) -> str:
        """Return a field's name in a file: that of its flag."""
        action = self.actions[field]
        flag = max(action.option_strings, key=len) if action and action.option_strings else ""
        name = flag.strip("-") or (action and str(action.metavar)) or field
        return name.lower().replace("_", "-")

    def environment(self) -> Iterator[tuple[str, Any]]:
        """Yield the fields that G4IR_... variables set; an empty variable sets nothing."""
        names = {PREFIX + key.replace("-", "_").upper(): f for key, f in self.fields.items()}
        for variable, text in sorted(os.environ.items()):
            if not variable.startswith(PREFIX) or RESERVED.fullmatch(variable) or not text:
                continue
            if variable not in names:
                log.warning(f"{variable}: {unknown_key(variable, names).partition('; valid')[0]}")
                continue
            field = names[variable]
            words = text.split(",") if self._repeats(field) else [text]
            try:
                yield field, self._value(field, words)
            except InputError as e:
                if text.startswith("tcp://"):
                    fix = "Kubernetes sets it for a service named g4ir: enableServiceLinks: false"
                    raise InputError(f"{variable}={text}: {fix}, or another name") from None
                raise InputError(f"{variable}={text[:80]}: {e}") from None

    def file(self, path: Path) -> Iterator[tuple[str, Any]]:
        """Yield the fields that a file sets."""
        try:
            tree = read_tree(path)
        except G4Error as e:
            raise InputError(f"--config {e}") from None
        for key, node in tree.entries.items():
            where, field = f"{tree.keys[key]}: {key}", self.fields.get(key.replace("_", "-"))
            if key == SETTINGS and isinstance(node, Map):
                yield "settings", {k: self._texts(v, where)[0] for k, v in node.entries.items()}
                continue
            if not field or field == "config":
                raise InputError(
                    f"{where}: {unknown_key(key, sorted({*self.fields} - {'config'}))}"
                )
            texts = self._texts(node, where)
            try:
                yield field, self._value(field, texts)
            except InputError as e:
                raise InputError(f"{where}: {e}") from None

    def _texts(self, node: Node, where: str) -> list[str]:
        items = node.items if isinstance(node, Seq) else (node,)
        if not all(isinstance(i, Scalar) and not is_null(i) for i in items):
            raise InputError(f"{where}: expected a value, or a list of them")
        return [i.text for i in items if isinstance(i, Scalar)]

    def _repeats(self, field: str) -> bool:
        action = self.actions[field]
        return isinstance(action, argparse._AppendAction) or bool(action and action.nargs == "*")

    def _value(self, field: str, texts: list[str]) -> Any:
        action = self.actions[field]
        if self._repeats(field):
            assert action
            return [self._converted(action, text.strip()) for text in texts]
        if len(texts) != 1:
            raise InputError("expected one value")
        (text,) = texts
        if action is None:
            return self.settings[field](WORDS.get(text.lower(), text))
        if action.nargs == 0:
            if (switch := SWITCHES.get(text.lower())) is None:
                raise InputError("expected true or false")
            return switch
        return self._converted(action, text)

    def _converted(self, action: argparse.Action, text: str) -> Any:
        try:
            value = self.parser._get_value(action, text)
            self.parser._check_value(action, value)
        except argparse.ArgumentError as e:
            raise InputError(e.message) from None
        return value
