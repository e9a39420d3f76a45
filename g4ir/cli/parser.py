"""Command-line parser; errors suggest the nearest valid usage."""

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

from .verb import flag_of

if TYPE_CHECKING:
    from .verb import Flags

#: flags of one meaning that verbs call differently
ALIKE = (("--ctx", "--context", "--max-seq"), ("--batch", "--max-batch"))
#: how argparse words what it does not know
_NO_CHOICE = re.compile(r"invalid choice: '(.*?)' \(choose from (.*)\)")
#: columns of --help
WIDTH = 100
_UNKNOWN = re.compile(r"unrecognized arguments: (--[^\s=]+)")


def help_formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=26, width=WIDTH)


class Parser(argparse.ArgumentParser):
    """A parser that reports wrong usage like any other error; options are never abbreviated.

    That of a verb, `module.Class` of this folder, imports it and adds its flags when it parses."""

    def __init__(self, verb: str | None = None, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=help_formatter, **kwargs)
        self._verb = verb
        # of every verb, so that only `g4ir --help` describes it
        self.add_argument(
            "--trace", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )

    @cached_property
    def flags(self) -> Flags:
        """The flags of the verb, added to this parser."""
        module, _, name = (self._verb or "").partition(".")
        flags: Flags = getattr(import_module(f".{module}", __package__), name).flags(self)
        return flags

    def format_help(self) -> str:
        self.usage = self._usage_line()
        return super().format_help()

    def _usage_line(self) -> str:
        """Return the positional arguments alone: the flags are listed below."""
        words = ["g4ir VERB ..."] if self._verb is None else [self.prog, "[OPTIONS]"]
        for a in self._actions if self._verb else ():
            if not a.option_strings:
                name = a.metavar or a.dest.upper()
                words.append({"?": f"[{name}]", "*": f"[{name} ...]"}.get(str(a.nargs), f"{name}"))
        return " ".join(words)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as the base class does, but leave nothing unknown to the parser above, which does
        not know the options of this one. The namespace has what was given, and `parser`, that of
        the verb."""
        if self._verb:
            _ = self.flags
        values, extra = super().parse_known_args(args, namespace)
        if self._verb:
            extra = self._take_late(values, extra)
        if extra:
            self.error(f"unrecognized arguments: {' '.join(extra)}")
        if "parser" not in values:
            values.parser = self
        return values, extra

    def _take_late(self, values: argparse.Namespace, words: list[str]) -> list[str]:
        """Return the words that are no positional arguments: argparse reads those of a list, and
        optional ones after a required one, only up to the next flag."""
        for action in self._actions:
            if action.option_strings or any(word.startswith("-") for word in words):
                continue
            if action.nargs == "?" and words and getattr(values, action.dest) == action.default:
                setattr(values, action.dest, self._get_value(action, words[0]))
                words = words[1:]
            elif action.nargs in ("*", "+") and words:
                setattr(values, action.dest, [*getattr(values, action.dest), *words])
                words = []
        return words

    def run(self, values: Mapping[str, Any]) -> int:
        """Run the verb with the values that were given."""
        try:
            return self.flags.make(values)()
        except InputError as e:
            raise self._reworded(e, values) from None

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}{self._suggest(message)} (see {self.prog} --help)")

    def _suggest(self, message: str) -> str:
        """Return the verb or option that is like the unknown one."""
        if verb := _NO_CHOICE.search(message):
            return did_you_mean(verb[1], re.findall(r"[\w-]+", verb[2]))
        if option := _UNKNOWN.search(message):
            alike = next((names for names in ALIKE if option[1] in names), ())
            if matches := [flag for flag in alike if flag in self._option_string_actions]:
                return f"; did you mean {matches[0]}?"
            if (name := option[1].strip("-").replace("-", "_")) in self.flags.settings:
                return f"; give --set {name}=VALUE"
            return did_you_mean(option[1], re.findall(r"--[\w-]+", self.format_help()))
        return ""

    def _reworded(self, e: InputError, values: Mapping[str, Any]) -> InputError:
        """Return an error about a field, such as `top_p 2.0: ...`, under the name of its flag, and
        with those of the options it is about that are the preset's."""
        for name, flag in self.flags.names.items():
            value, text = values.get(name), str(e)
            if text.startswith((f"{name} {value}: ", f"{name} {value!r}: ")):
                e = InputError(flag + text.removeprefix(name))
            elif name in self.flags.settings and (name in values or name not in self.flags.options):
                text = re.sub(rf"(?<![\w`-]){flag_of(name)}(?![\w-])", flag, text)
                with_value = rf"{flag} {re.escape(str(value))}(?![\w.'-])"
                e = InputError(re.sub(with_value, f"{flag}={value}", text))
        return self._of_preset(e, values) if values.get("preset") else e

    def _of_preset(self, e: InputError, values: Mapping[str, Any]) -> InputError:
        preset, words = find_preset(values["preset"]), re.findall(r"[\w-]+", str(e))
        flags = {flag_of(k): v for k, v in preset.options.items() if k not in values}
        named = [f for f in flags if f in words] or [f for f, v in flags.items() if v in words]
        sets = f"--preset {preset.name} sets {', '.join(f'{f} {flags[f]}' for f in named)}"
        return InputError(f"{e}; {sets}: give another, or no preset") if named else e
