"""Command-line parser of a verb; errors suggest the nearest valid flag."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any, NoReturn

from g4ir.errors import InputError
from g4ir.spec.reader import did_you_mean

from .verb import Flags, flag_of

#: flags that have the same meaning in different verbs
ALIKE = (("--ctx", "--context", "--max-seq"), ("--batch", "--max-batch"))
#: columns of --help
WIDTH = 100
_UNKNOWN = re.compile(r"unrecognized arguments: (--[^\s=]+)")


class Parser(argparse.ArgumentParser):
    """A parser that reports wrong usage like any other error; options are never abbreviated, and
    positional arguments may follow flags. `verb`: `module.Class` of this package."""

    flags: Flags

    def __init__(self, name: str, verb: str, help: str) -> None:
        plain: Any = argparse.RawDescriptionHelpFormatter
        formatter: Any = partial(plain, max_help_position=26, width=WIDTH)
        prog = f"g4ir {name}"
        super().__init__(prog, description=help, allow_abbrev=False, formatter_class=formatter)
        module, _, class_name = verb.partition(".")
        self.flags = Flags(self, getattr(import_module(f".{module}", __package__), class_name))

    def format_help(self) -> str:
        """Return the help; its usage line names the positional arguments, not the flags."""
        words = [self.prog, "[OPTIONS]"]
        for a in self._get_positional_actions():
            name = a.metavar or a.dest.upper()
            words.append({"?": f"[{name}]", "*": f"[{name} ...]"}.get(str(a.nargs), f"{name}"))
        self.usage = " ".join(words)
        return super().format_help()

    def parse(self, words: Sequence[str]) -> dict[str, Any]:
        """Return {field: value} of the flags on the command line, also of `--set NAME=VALUE`; a
        backend's own settings are under `settings`. `--help` raises SystemExit(0)."""
        if {"-h", "--help"} & {*words}:
            print(self.format_help(), end="")
            raise SystemExit(0)
        values = vars(self.parse_intermixed_args(words))
        explicit = {k: v for k, v in values.items() if v is not None and v != []}
        return self.flags.parse_settings(explicit)

    def run(self, values: Mapping[str, Any]) -> int:
        """Run the verb with these values of its fields; return the exit code. InputErrors
        name flags, not fields."""
        try:
            return self.flags.make(values)()
        except InputError as e:
            raise self._reworded(e, values) from None

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}{self._suggest(message)} (see {self.prog} --help)")

    def _suggest(self, message: str) -> str:
        """Return a suggestion for an unknown option, as the end of a message; "" if there is
        none."""
        if not (option := _UNKNOWN.search(message)):
            return ""
        alike = next((names for names in ALIKE if option[1] in names), ())
        if matches := [flag for flag in alike if flag in self._option_string_actions]:
            return f"; did you mean {matches[0]}?"
        if (name := option[1].strip("-").replace("-", "_")) in self.flags.settings:
            return f"; give --set {name}=VALUE"
        return did_you_mean(option[1], re.findall(r"--[\w-]+", self.format_help()))

    def _reworded(self, e: InputError, values: Mapping[str, Any]) -> InputError:
        """Return the error with flags as the user gives them: `top_p 2.0: ...` becomes `--top-p
        2.0: ...`, and `--frames 3: ...` of a setting `--set frames=3: ...`."""
        for name, flag in self.flags.names.items():
            value, text = values.get(name), str(e)
            if text.startswith((f"{name} {value}: ", f"{name} {value!r}: ")):
                e = InputError(flag + text.removeprefix(name))
            elif name in self.flags.settings and (name in values or name not in self.flags.options):
                text = re.sub(rf"(?<![\w`-]){flag_of(name)}(?![\w-])", flag, text)
                with_value = rf"{flag} {re.escape(str(value))}(?![\w.'-])"
                e = InputError(re.sub(with_value, f"{flag}={value}", text))
        return e
