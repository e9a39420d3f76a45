"""Verbs as frozen dataclasses, and the argparse flags that follow from their fields.

A field is a flag or an `argument`; its type is the parser and its default the default. A `Part`
as a field holds flags that several verbs share; `options` are fields of BuildOptions.
Help is a line of the docstring for each field, `name METAVAR: text`; a verb's line replaces that of
its parts.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from inspect import cleandoc
from itertools import chain
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
from g4ir.parallel.group import TIMEOUT_S
from g4ir.plan.gpus import find_gpu, gpu_names, parse_bytes
from g4ir.plan.options import BuildOptions
from g4ir.plan.presets import PRESETS, find_preset
from g4ir.ui.units import parse_count, parse_counts

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:
    dataclass_transform = lambda **how: lambda cls: cls  # noqa: E731

#: words in braces of help texts
WORDS = {
    "gpus": gpu_names(),
    "timeout": TIMEOUT_S,
    "presets": ", ".join(PRESETS),
    "described": "an engine directory, GGUF file, checkpoint directory, Hugging Face id or variant",
    "model": "an engine directory; or a GGUF file, checkpoint directory, Hugging Face id or\n"
    "variant, of which an engine is built on first use",
}
_HELP = re.compile(r"^(\w+)(?: (\S+))?: ", re.MULTILINE)
Help = tuple[str | None, str]


def utf8(word: str, flag: str = "") -> str:
    """Return an argument as UTF-8, whatever the locale: in that of C, Python escapes its bytes
    (PEP 383). Bytes that are no UTF-8 stay escaped."""
    try:
        return word.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # half a character that is no escaped byte
        return word


def token_ids(text: str, flag: str) -> list[int]:
    """`2,5,7` -> [2, 5, 7]"""
    words = text.replace(",", " ").split()
    for word in words or [text]:
        if not re.fullmatch(r"-?[0-9]{1,18}", word):
            raise InputError(f"{flag}: expected token ids such as 2,5,7, found {word[:40]!r}")
    return [int(word) for word in words]


# Types of fields whose flag is text: the value, and the function of text and flag that reads it.
Text = Annotated[str, utf8]
Count = Annotated[int, parse_count]
Counts = Annotated[list[int], parse_counts]
Bytes = Annotated[int, parse_bytes]
TokenIds = Annotated[list[int], token_ids]


def flag(default: Any = MISSING, **how: Any) -> Any:
    """Return a field with what its type does not say: another `name` of the flag; the `title` of
    its group in --help; `one_of`, if it is among the flags of which one must be given; `each` of
    the names of its flags, with which values come as pairs; and arguments of add_argument."""
    return field(default=default, metadata=how)


def argument(nargs: str | None = None, default: Any = None, **how: Any) -> Any:
    """Return the field of a positional argument; `?` and `*` may be left out."""
    default = {None: MISSING, "*": ()}.get(nargs, default)
    return flag(default, nargs=nargs, positional=True, **how)


def options(names: str | Mapping[str, str]) -> Any:
    """Return a field with BuildOptions: the names of its flags, by title of --help or without."""
    groups = {"": names} if isinstance(names, str) else names
    return flag(options={title: text.split() for title, text in groups.items()})


#: what a field says that is not an argument of add_argument
OURS = {"name", "title", "one_of", "each", "positional", "options", "hidden"}


@dataclass_transform(
    frozen_default=True, kw_only_default=True, field_specifiers=(flag, argument, options)
)
@dataclass(frozen=True, kw_only=True)
class Part:
    """Flags that verbs share. A subclass is a frozen dataclass; `title`: of its group in --help.

    json: print the result as JSON
    """

    #: fields that the command line gives, of the whole verb
    given: frozenset[str] = flag(frozenset(), hidden=True)
    title: ClassVar[str | None] = None

    def __init_subclass__(cls, title: str | None = None) -> None:
        cls.title = title or cls.title
        dataclass(frozen=True, kw_only=True)(cls)


class Verb(Part):
    """A verb of the command line."""

    @classmethod
    def flags(cls, parser: argparse.ArgumentParser) -> Flags:
        """Add the flags to a parser."""
        return Flags(parser, cls)

    def __call__(self) -> int:
        """Run the verb and return the exit code."""
        raise NotImplementedError


def fields_of(cls: type[Part]) -> list[tuple[Any, Any]]:
    """Return the fields of a class and their types."""
    hints = get_type_hints(cls, include_extras=True)
    return [(f, hints[f.name]) for f in fields(cls) if not f.metadata.get("hidden")]


def is_part(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Part)


def helps(cls: type) -> dict[str, Help]:
    """Return metavar and help of each field from the docstrings of a class and its bases."""
    found: dict[str, Help] = {}
    for base in reversed(cls.__mro__):
        _, *entries = _HELP.split(cleandoc(base.__doc__ or ""))
        for name, metavar, text in zip(entries[::3], entries[1::3], entries[2::3]):
            found[name] = metavar, re.sub(r"\n\s+", "\n", text.strip()).format_map(WORDS)
    return found


class Flags:
    """The flags of a verb, added to a parser."""

    def __init__(self, parser: argparse.ArgumentParser, verb: type[Verb]) -> None:
        self.verb = verb
        #: field -> its flag
        self.names: dict[str, str] = {}
        #: fields of BuildOptions
        self.options: set[str] = set()
        self._parser = parser
        self._groups: dict[str | None, Any] = {None: parser}
        self._add(verb, {}, None)

    def name(self, field: str) -> str:
        """Return the flag of a field, also of one that this verb does not have."""
        return self.names.get(field, flag_of(field))

    def _add(self, cls: type[Part], help: Mapping[str, Help], title: str | None) -> None:
        help = {**helps(cls), **help}
        for f, hint in sorted(fields_of(cls), key=_own_first):
            below = f.metadata.get("title") or title
            if is_part(hint):
                self._add(hint, help, below or hint.title)
            elif hint is BuildOptions:
                for group, names in f.metadata["options"].items():
                    for name in names:
                        self._add_option(self._group(group or title), name, help.get(name))
            else:
                self._add_field(f, hint, self._group(below), help.get(f.name, (None, "")))

    def _group(self, title: str | None) -> Any:
        if title not in self._groups:
            self._groups[title] = self._parser.add_argument_group(title)
        return self._groups[title]

    def _add_field(self, f: Any, hint: Any, group: Any, help: Help) -> None:
        told, name = f.metadata, f.metadata.get("name") or flag_of(f.name)
        how = {"help": help[1], **_reading(hint, name, f.default)}
        how |= {k: v for k, v in told.items() if k not in OURS and v is not None}
        how |= {"metavar": help[0]} if help[0] else {}
        if "positional" in told:
            group.add_argument(f.name, **{k: v for k, v in how.items() if k != "action"})
            return
        how |= {"dest": f.name, "default": argparse.SUPPRESS, "required": f.default is MISSING}
        if "one_of" in told:
            one_of = self._groups.get("one of") or group.add_mutually_exclusive_group(required=True)
            group = self._groups["one of"] = one_of
        for kind in told.get("each", ()):
            how |= {"type": partial(_of_kind, kind), "help": help[1].replace("KIND", kind)}
            group.add_argument(f"--{kind}", **how)
        if "each" not in told:
            self.names[f.name] = name
            group.add_argument(name, **how)

    def _add_option(self, group: Any, name: str, help: Help | None) -> None:
        """Add the flag of a field of BuildOptions."""
        (f,) = (f for f in fields(BuildOptions) if f.name == name)
        how = {"dest": name, "help": help[1] if help else f.metadata["help"], **f.metadata["flag"]}
        how["help"] += " (repeat)" * (how.get("action") == "append")
        self.names[name] = how.pop("name", flag_of(name))
        self.options.add(name)
        group.add_argument(self.names[name], **how, default=argparse.SUPPRESS)

    def made(self, values: Mapping[str, Any]) -> Verb:
        """Return the verb of the values that were given."""
        verb: Verb = self._made(self.verb, {**values, "given": frozenset(values)})
        return verb

    def _made(self, cls: type[Part], values: Mapping[str, Any]) -> Any:
        record = {f.name: values[f.name] for f in fields(cls) if f.name in values}
        for f, hint in fields_of(cls):
            if is_part(hint):
                record[f.name] = self._made(hint, values)
            elif hint is BuildOptions:
                record[f.name] = BuildOptions(**dict(self._options(f.metadata["options"], values)))
        return cls(**record)

    def _options(
        self, groups: Mapping[str, Sequence[str]], values: Mapping[str, Any]
    ) -> Iterator[tuple[str, Any]]:
        """Yield options of a preset and those that were given, which win. Options that are flags of
        another meaning here, as `run --draft-tokens`, are not the preset's, and another backend has
        its own targets."""
        if values.get("preset"):
            preset = find_preset(values["preset"]).options
            others = self.names.keys() - self.options
            if values.get("backend", preset["backend"]) != preset["backend"]:
                others.add("target")
            yield from ((k, v) for k, v in preset.items() if k not in others)
        for name in chain(*groups.values()):
            if name in values:
                read = _READ.get(name, lambda value, flag: value)
                yield name, read(values[name], self.names[name])


def _own_first(row: tuple[Any, Any]) -> bool:
    """Sort what has a group of its own in --help, and is not of the verb, behind the others."""
    return is_part(row[1]) and row[1].title is not None


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _reading(hint: Any, flag: str, default: Any) -> dict[str, Any]:
    """Return what argparse is told of a type."""
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


def _of_kind(kind: str, path: str) -> tuple[str, str]:
    return kind, path


def _settings(given: Sequence[str], flag: str) -> dict[str, str]:
    """`["name=value", ...]` -> {name: value}"""
    table: dict[str, str] = {}
    for text in given:
        name, sign, value = text.partition("=")
        if not (name and sign and value) or name in table:
            raise InputError(f"{flag} {text}: expected NAME=VALUE, each name once")
        table[name] = value
    return table


def _numbers(text: str, flag: str, kind: Callable[[str], Any] = int) -> list[Any]:
    """`70,280` -> [70, 280]"""
    words = text.split(",")
    for word in words:
        if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,6})?", word.strip()) or (
            kind is int and "." in word
        ):
            raise InputError(f"{flag} {word[:40]!r}: expected numbers above 0, such as 70,280")
    return [kind(word) for word in words]


#: fields of BuildOptions whose flag is text -> their value, by the text and the flag
_READ: dict[str, Callable[[Any, str], Any]] = {
    "max_seq": parse_count,
    "prefill_chunk": parse_count,
    "image_budgets": _numbers,
    "audio_seconds": partial(_numbers, kind=float),
    "settings": _settings,
    "memory": lambda text, flag: find_gpu(text).memory_bytes if text else None,
}
