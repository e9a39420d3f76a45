"""Verbs as frozen dataclasses: a field is a flag, with its type, default, metavar and help.

A field of type `Part` holds flags that several verbs share, a field `options` build options.
A `setting` has no flag of its own: `--set NAME=VALUE` sets it.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from types import NoneType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    get_args,
    get_origin,
    get_type_hints,
)

from g4ir.errors import InputError
from g4ir.plan.gpus import find_gpu, parse_bytes
from g4ir.plan.options import BuildOptions, flag_of
from g4ir.plan.presets import find_preset
from g4ir.ui.units import parse_count, parse_counts
from g4ir.weights.origin import given_model

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:
    dataclass_transform = lambda **how: lambda cls: cls  # noqa: E731

ANY_MODEL = "engine, GGUF file, checkpoint, hub id or variant"
PRESET = "named build options and backend; flags win (see `g4ir presets`)"
SWITCHES = {"on": True, "off": False}


def size(text: str, flag: str) -> int:
    """Parse a size: `4GiB` -> bytes; unlike `parse_bytes` this accepts 0."""
    return 0 if text.strip() == "0" else parse_bytes(text, flag)


def token_ids(text: str, flag: str) -> list[int]:
    """`2,5,7` -> [2, 5, 7]"""
    words = text.replace(",", " ").split()
    for word in words or [text]:
        if not re.fullmatch(r"-?[0-9]{1,18}", word):
            raise InputError(f"{flag}: expected token ids such as 2,5,7, found {word[:40]!r}")
    return [int(word) for word in words]


# Types of flags: the type of the value, and its parser, called with the text and the flag's name.
Count = Annotated[int, parse_count]
Counts = Annotated[list[int], parse_counts]
Bytes = Annotated[int, parse_bytes]
Size = Annotated[int, size]
TokenIds = Annotated[list[int], token_ids]


def flag(help: str, default: Any = None, metavar: str | None = None, /, **kwargs: Any) -> Any:
    """Return the field of a flag. `kwargs`: `name`, if not the field's; `short`: further names;
    `title` of its group in --help; `one_of`: exactly one of such flags is required; `each`: names
    of several flags that share the field, whose values are pairs (name, value); and arguments of
    add_argument."""
    default = MISSING if kwargs.get("required") else default
    return field(default=default, metadata={"help": help, "metavar": metavar, **kwargs})


def setting(help: str, default: Any = None, metavar: str | None = None, /) -> Any:
    """Return a field that `--set NAME=VALUE` sets."""
    return flag(help, default, metavar, setting=True)


def argument(
    help: str, metavar: str | None, nargs: str | None = None, default: Any = None, **kwargs: Any
) -> Any:
    """Return the field of a positional argument; optional if `nargs` is `?` or `*`."""
    default = {None: MISSING, "*": ()}.get(nargs, default)
    return flag(help, default, metavar, nargs=nargs, positional=True, **kwargs)


def json_flag() -> Any:
    return flag("print the result as JSON", False)


def options(names: str | Mapping[str, str], settings: str = "", **help: str) -> Any:
    """Return the field `options: BuildOptions` of a verb. names: the options that have flags,
    separated by spaces, or {title of their group in --help: such names}; settings: those that
    `--set` sets; help: option=text instead of its help in options.yaml."""
    groups = {"": names} if isinstance(names, str) else names
    rows = {n: (title, help.get(n), False) for title, text in groups.items() for n in text.split()}
    return field(metadata={"options": rows | dict.fromkeys(settings.split(), ("", None, True))})


#: keys of a field's metadata that are not arguments of add_argument
METADATA = {"name", "short", "title", "one_of", "each", "positional", "setting"}


@dataclass_transform(
    frozen_default=True, kw_only_default=True, field_specifiers=(flag, setting, argument, options)
)
@dataclass(frozen=True, kw_only=True)
class Part:
    """Flags that verbs share. A subclass is a frozen dataclass; `title`: of its group in --help."""

    #: names of the fields that the command line, the environment or the file of --config sets, over
    #: all parts of the verb
    explicit: frozenset[str] = field(default=frozenset(), metadata={"hidden": True})
    title: ClassVar[str | None] = None

    def __init_subclass__(cls, title: str | None = None) -> None:
        cls.title = title or cls.title
        dataclass(frozen=True, kw_only=True)(cls)


class Verb(Part):
    """A verb of the command line. `from_environment`: whether environment variables and the file of
    its flag --config set its flags too; `epilog`: last lines of its help."""

    from_environment: ClassVar[bool] = False
    epilog: ClassVar[str] = ""

    def __call__(self) -> int:
        """Run the verb and return the exit code."""
        raise NotImplementedError


def fields_of(cls: type[Part]) -> list[tuple[Any, Any]]:
    """Return (field, type) of the flags of a class, with `Annotated` kept in the types."""
    hints = get_type_hints(cls, include_extras=True)
    return [(f, hints[f.name]) for f in fields(cls) if "hidden" not in f.metadata]


def is_part(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Part)


class Flags:
    """Adds the flags of a verb to a parser, and builds the verb from parsed values."""

    def __init__(self, parser: argparse.ArgumentParser, verb: type[Verb]) -> None:
        self.verb = verb
        #: field -> its flag
        self.names: dict[str, str] = {}
        #: fields of BuildOptions that the verb has, with flags or by --set
        self.options: set[str] = set()
        #: name that --set sets -> parser of its text
        self.settings: dict[str, Callable[[str], Any]] = {}
        self._parser = parser
        self._groups: dict[str | None, Any] = {None: parser}
        parser.epilog = verb.epilog
        self._add(verb, None)
        if self.settings:
            (action,) = (a for a in parser._actions if a.dest == "settings")
            action.help = f"{', '.join(self.settings)}; {action.help}"

    def _add(self, cls: type[Part], title: str | None) -> None:
        for f, hint in fields_of(cls):
            group = f.metadata.get("title") or title
            if is_part(hint):
                self._add(hint, group or hint.title)
            elif hint is BuildOptions:
                for name, (heading, help, is_setting) in f.metadata["options"].items():
                    self._add_option(name, help, heading or group, is_setting)
            else:
                self._add_field(f, hint, group)

    def _group(self, title: str | None) -> Any:
        if title not in self._groups:
            self._groups[title] = self._parser.add_argument_group(title)
        return self._groups[title]

    def _add_field(self, f: Any, hint: Any, title: str | None) -> None:
        metadata, group = f.metadata, self._group(title)
        is_setting = "setting" in metadata
        flag = f"--set {f.name}" if is_setting else metadata.get("name") or flag_of(f.name)
        kwargs = _parser_kwargs(hint, flag, f.default)
        kwargs |= {k: v for k, v in metadata.items() if k not in METADATA and v is not None}
        if "positional" in metadata:
            kwargs.pop("action", None)
            if kwargs.get("metavar") in ("MODEL", "ENGINE"):
                kwargs["type"] = given_model
            group.add_argument(f.name, **kwargs)
            return
        kwargs |= {"required": True} if f.default is MISSING else {}
        if "one_of" in metadata:
            one_of = self._groups.get("one of") or group.add_mutually_exclusive_group(required=True)
            group = self._groups["one of"] = one_of
        for kind in metadata.get("each", ()):
            text = kwargs["help"].replace("KIND", kind)
            kind_kwargs = {**kwargs, "type": lambda path, kind=kind: (kind, path), "help": text}
            self._add_flag(f.name, [f"--{kind}"], kind_kwargs, group)
        if "each" not in metadata:
            self._add_flag(f.name, [*metadata.get("short", ()), flag], kwargs, group, is_setting)

    def _add_option(self, name: str, help: str | None, title: str | None, is_setting: bool) -> None:
        """Add the flag of a field of BuildOptions, or register the field as a setting."""
        (f,) = (f for f in fields(BuildOptions) if f.name == name)
        kwargs = {"help": help or f.metadata["help"], **f.metadata["flag"]}
        self.options.add(name)
        flag, is_setting = kwargs.pop("name", flag_of(name)), kwargs.pop("setting", is_setting)
        self._add_flag(name, [flag], kwargs, self._group(title), is_setting)

    def _add_flag(
        self,
        name: str,
        flags: Sequence[str],
        kwargs: Mapping[str, Any],
        group: Any,
        is_setting: bool = False,
    ) -> None:
        self.names[name] = f"--set {name}" if is_setting else flags[-1]
        if is_setting:
            self.settings[name] = partial(_parse_setting, self.names[name], kwargs)
            return
        help = kwargs["help"] + " (repeat)" * (kwargs.get("action") == "append")
        how = {**kwargs, "dest": name, "default": argparse.SUPPRESS, "help": help}
        group.add_argument(*flags, **how)

    def parse_settings(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values with --set parsed: settings of the verb become fields, those of a
        backend stay in `settings`."""
        pairs = parse_pairs(values.get("settings", ()), "--set", "NAME=VALUE")
        parsed = {k: v for k, v in values.items() if k != "settings"}
        for name in [*pairs]:
            if name in self.settings:
                parsed[name] = self.settings[name](pairs.pop(name))
            elif name in self.names:
                raise InputError(f"--set {name}: give {self.names[name]}")
        return {**parsed, "settings": pairs} if pairs else parsed

    def make(self, values: Mapping[str, Any]) -> Verb:
        """Return the verb with these values of its fields; the others have their defaults."""
        return self._make(self.verb, {**values, "explicit": frozenset(values)})

    def _make(self, cls: type[Part], values: Mapping[str, Any]) -> Any:
        record = {f.name: values[f.name] for f in fields(cls) if f.name in values}
        for f, hint in fields_of(cls):
            if is_part(hint):
                record[f.name] = self._make(hint, values)
            elif hint is BuildOptions:
                record[f.name] = BuildOptions(**dict(self._options(f.metadata["options"], values)))
        return cls(**record)

    def _options(self, names: Iterable[str], args: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield the preset's options, then those of the command line, which take precedence.
        Options of the preset are skipped if their flag has another meaning in this verb (`run
        --draft-tokens`); so is `target` with another backend."""
        if args.get("preset"):
            preset = find_preset(args["preset"]).options
            skipped = self.names.keys() - self.options
            if args.get("backend", preset["backend"]) != preset["backend"]:
                skipped.add("target")
            yield from ((k, v) for k, v in preset.items() if k not in skipped)
        for name in names:
            if name in args:
                parse = _PARSERS.get(name, lambda value, flag: value)
                yield name, parse(args[name], self.names[name])


def _parser_kwargs(hint: Any, flag: str, default: Any) -> dict[str, Any]:
    """Return the arguments of add_argument that a field's type and default determine."""
    if NoneType in get_args(hint):
        (hint,) = (h for h in get_args(hint) if h is not NoneType)
    if get_origin(hint) is Annotated:
        return {"type": lambda text: hint.__metadata__[0](text, flag)}
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint)}
    if hint is bool:
        return {"action": "store_true" if default is False else "store_false"}
    if get_args(hint):
        return {"action": "append"}
    return {"type": hint} if hint in (int, float) else {}


def _parse_setting(flag: str, kwargs: Mapping[str, Any], text: str) -> Any:
    """Parse the value of a setting by `kwargs`, the arguments of add_argument of its flag."""
    if kwargs.get("action") == "append":
        return text.split(",")
    expected = SWITCHES if kwargs.get("action") else kwargs.get("choices") or ()
    if expected and text not in expected:
        raise InputError(f"{flag}={text}: expected one of {', '.join(expected)}")
    try:
        return SWITCHES[text] if kwargs.get("action") else kwargs.get("type", str)(text)
    except ValueError:
        number = "a whole number" if kwargs.get("type") is int else "a number"
        raise InputError(f"{flag}={text}: expected {number}") from None


def parse_pairs(words: Sequence[str], flag: str, expected: str) -> dict[str, str]:
    """`["name=value", ...]` -> {name: value}; InputError, which says what is `expected`, for other
    words and a name given twice."""
    table: dict[str, str] = {}
    for text in words:
        name, sign, value = text.partition("=")
        if not (name and sign and value) or name in table:
            raise InputError(f"{flag} {text}: expected {expected}, each name once")
        table[name] = value
    return table


def _parse_seconds(text: str, flag: str) -> list[float]:
    """`5,10.5` -> [5.0, 10.5]"""
    words = text.split(",")
    if wrong := [w for w in words if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,6})?", w.strip())]:
        raise InputError(f"{flag} {wrong[0][:40]!r}: expected seconds, such as 5,10.5")
    return [float(word) for word in words]


#: field of BuildOptions -> parser of its flag's text, called with the text and the flag's name
_PARSERS: dict[str, Callable[[Any, str], Any]] = {
    "max_seq": parse_count,
    "prefill_chunk": parse_count,
    "image_budgets": parse_counts,
    "audio_seconds": _parse_seconds,
    "memory": lambda text, flag: find_gpu(text).memory_bytes if text else None,
}
