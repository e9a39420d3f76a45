"""The parser of the command line: wrong usage is an error that says what was meant."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn

from g4ir.errors import InputError
from g4ir.plan.presets import find_preset
from g4ir.spec.reader import did_you_mean

if TYPE_CHECKING:
    from .verb import Flags

#: flags of one meaning that verbs call differently
ALIKE = (("--ctx", "--context", "--max-seq"), ("--batch", "--max-batch"))
#: how argparse words what it does not know
_NO_CHOICE = re.compile(r"invalid choice: '(.*?)' \(choose from (.*)\)")
_UNKNOWN = re.compile(r"unrecognized arguments: (--[^\s=]+)")


class Parser(argparse.ArgumentParser):
    """A parser that reports wrong usage like any other error; options are never abbreviated.

    That of a verb, `module.Class` of this folder, imports it and adds its flags when it parses."""

    def __init__(self, verb: str | None = None, **kwargs: Any) -> None:
        form = {"allow_abbrev": False, "formatter_class": argparse.RawTextHelpFormatter}
        super().__init__(**{**form, **kwargs})
        self._verb = verb
        self.add_argument(
            "--trace",
            action="store_true",
            default=argparse.SUPPRESS,
            help="print the traceback of an error",
        )

    @cached_property
    def flags(self) -> Flags:
        """The flags of the verb, added to this parser."""
        module, _, name = (self._verb or "").partition(".")
        flags: Flags = getattr(import_module(f".{module}", __package__), name).flags(self)
        return flags

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as the base class does, but leave nothing unknown to the parser above, which does
        not know the options of this one. The namespace has what was given, and `parser`, that of
        the verb."""
        if self._verb:
            _ = self.flags
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        if "parser" not in found:
            found.parser = self
        return found, rest

    def run(self, values: Mapping[str, Any]) -> int:
        """Run the verb with the values that were given."""
        try:
            return self.flags.made(values)()
        except InputError as e:
            raise self._reworded(e, values) from None

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}{self._meant(message)} (see {self.prog} --help)")

    def _meant(self, message: str) -> str:
        """Return the verb or option that is like the unknown one."""
        if verb := _NO_CHOICE.search(message):
            return did_you_mean(verb[1], re.findall(r"[\w-]+", verb[2]))
        if option := _UNKNOWN.search(message):
            alike = next((names for names in ALIKE if option[1] in names), ())
            if known := [flag for flag in alike if flag in self._option_string_actions]:
                return f"; did you mean {known[0]}?"
            return did_you_mean(option[1], re.findall(r"--[\w-]+", self.format_help()))
        return ""

    def _reworded(self, e: InputError, values: Mapping[str, Any]) -> InputError:
        """Return an error about a field, such as `top_p 2.0: ...`, under the name of its flag, and
        with those of the options it is about that are the preset's."""
        for name, flag in self.flags.names.items():
            value = values.get(name)
            if str(e).startswith((f"{name} {value}: ", f"{name} {value!r}: ")):
                e = InputError(flag + str(e).removeprefix(name))
        return self._of_preset(e, values) if values.get("preset") else e

    def _of_preset(self, e: InputError, values: Mapping[str, Any]) -> InputError:
        preset, words = find_preset(values["preset"]), re.findall(r"[\w-]+", str(e))
        own = {self.flags.name(k): v for k, v in preset.options.items() if k not in values}
        named = [f for f in own if f in words] or [f for f, v in own.items() if v in words]
        sets = f"--preset {preset.name} sets {', '.join(f'{f} {own[f]}' for f in named)}"
        return InputError(f"{e}; {sets}: give another, or no preset") if named else e
