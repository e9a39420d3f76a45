"""Strict YAML reader: builds frozen dataclasses from their type annotations.

The text becomes a tree of nodes with file and line, and each scalar is converted by the type of
its field: YAML 1.1 would read `1e-6` as a string and `on` as True. Anchors, aliases, tags, merge
keys and duplicate keys are refused, and size, depth and node count are limited, so that no input
makes the reader slow or exceed Python's recursion limit.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import types
import typing
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeAlias, Union, get_args, get_origin, get_type_hints

import yaml

from g4ir.errors import SpecError

MAX_BYTES = 64 * 1024
MAX_DEPTH = 12
MAX_NODES = 10_000
MAX_INT = 2**31 - 1
MAX_LINE = 10_000
MAX_QUOTED = 40  # characters of a value in an error message
MAX_ERRORS = 20  # lines of an error

NULLS = frozenset({"", "~", "null", "Null", "NULL"})
TRUES = frozenset({"true", "yes", "on"})
FALSES = frozenset({"false", "no", "off"})
INTEGER = re.compile(r"[+-]?[0-9]+(_[0-9]+)*")
REAL = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


# --- constraints, written as Annotated[...] on a field -----------------------------------------


@dataclass(frozen=True)
class Range:
    """lo <= value <= hi; lo < value <= hi with `open_low`."""

    lo: float
    hi: float = math.inf
    open_low: bool = False

    def broken(self, value: float) -> str | None:
        """Return the violated bound as a message, or None."""
        if value > self.hi:
            return f"must be at most {self.hi:g}"
        if not value >= self.lo or (self.open_low and value == self.lo):  # `not`: also NaN
            return f"must be {'above' if self.open_low else 'at least'} {self.lo:g}"
        return None


@dataclass(frozen=True)
class OneOf:
    """One of a few words; aliases are replaced by their word."""

    words: tuple[str, ...]
    aliases: tuple[tuple[str, str], ...] = ()

    def broken(self, value: str) -> str | None:
        if value in self.words or value in dict(self.aliases):
            return None
        return f"must be {' or '.join(self.words)}{did_you_mean(value, self.words)}"

    def normal(self, value: str) -> str:
        return dict(self.aliases).get(value, value)


@dataclass(frozen=True)
class Length:
    """lo <= number of items, or of characters of a text, <= hi."""

    lo: int
    hi: float = math.inf

    def broken(self, value: tuple[Any, ...] | str) -> str | None:
        if self.lo <= len(value) <= self.hi:
            return None
        bounds = f"{self.lo} to {self.hi}" if self.hi < math.inf else f"at least {self.lo}"
        want = self.lo if self.lo == self.hi else bounds
        unit = "characters" if isinstance(value, str) else "items"
        return f"must have {want} {unit}, has {len(value)}"


@dataclass(frozen=True)
class Shaped:
    """Text that matches a regular expression; `like` is an example."""

    pattern: str
    like: str

    def broken(self, value: str) -> str | None:
        return None if re.fullmatch(self.pattern, value) else f"must look like {self.like}"


class Line(str):
    """A text of up to MAX_LINE characters on one line, such as a path or a list of CPU flags."""


Count = Annotated[int, Range(1, MAX_INT)]
Index = Annotated[int, Range(0, MAX_INT)]
Positive = Annotated[float, Range(0, 1e30, open_low=True)]
Fraction = Annotated[float, Range(0, 1, open_low=True)]


# --- the tree ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Where:
    """A file and line; line 0: the file as a whole."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


@dataclass(frozen=True)
class Scalar:
    """A leaf: its text, whether it was plain (unquoted), and whether a field of type str accepts
    it."""

    text: str
    plain: bool
    where: Where
    word: bool = True


@dataclass(frozen=True)
class Seq:
    items: tuple[Node, ...]
    where: Where


@dataclass(frozen=True)
class Map:
    """A mapping; `keys` has the position of each key."""

    entries: dict[str, Node]
    keys: dict[str, Where]
    where: Where


Node: TypeAlias = Scalar | Seq | Map


def fail(where: Where, path: str, message: str) -> SpecError:
    """Return the error `file:line: key.path: message`."""
    return SpecError(f"{where}: {path}: {message}" if path else f"{where}: {message}")


def together(errors: Iterable[SpecError]) -> SpecError:
    """Return one error with the messages of several: their first MAX_ERRORS lines, and a line with
    the number of those left out."""
    lines = [line for error in errors for line in str(error).splitlines()]
    if len(lines) > MAX_ERRORS:
        lines[MAX_ERRORS:] = [f"and {len(lines) - MAX_ERRORS} more"]
    return SpecError("\n".join(lines))


def quote(text: str) -> str:
    """Return a value quoted for an error message: on one line, cut to MAX_QUOTED characters."""
    return repr(text if len(text) <= MAX_QUOTED else text[:MAX_QUOTED] + "...")


def to_line(text: str) -> Line:
    """Return text from outside as a `Line`: unchanged if printable and short, else quoted."""
    return Line(text if len(text) <= MAX_LINE and text.isprintable() else quote(text))


def did_you_mean(word: str, valid: Iterable[str]) -> str:
    """Return `; did you mean X?` for the nearest valid word, or "" without one: the shortest that
    starts with `word`, else the most similar (difflib). Case is ignored."""
    names = {name.lower(): name for name in sorted(valid, key=len, reverse=True)}
    prefix = word[:100].lower()
    longer = [n for n in names if n.startswith(prefix)] if len(prefix.strip("-_. ")) > 1 else []
    near = longer[-1:] or difflib.get_close_matches(prefix, list(names), n=1)
    return f"; did you mean {names[near[0]]}?" if near else ""


def read_tree(path: Path) -> Map:
    """Read the mapping in a YAML file. SpecError if it cannot be read or is not plain YAML."""
    return parse_tree(read_bytes(path, MAX_BYTES, "give a YAML file"), str(path))


def read_bytes(path: Path, max_bytes: int, advice: str) -> bytes:
    """Return up to `max_bytes` + 1 bytes of a file; SpecError, which ends with `advice`, if it
    cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(max_bytes + 1)
    except (OSError, ValueError) as err:  # ValueError: a NUL in the name
        reason = err.strerror if isinstance(err, OSError) else str(err)
        raise SpecError(f"{path}: cannot be read ({reason}); {advice}") from None


def parse_tree(data: bytes, file: str) -> Map:
    """Parse YAML bytes into a mapping; `file` is its name in errors. Raises SpecError."""
    start = Where(file, 0)
    if len(data) > MAX_BYTES:
        raise fail(start, "", f"larger than {MAX_BYTES} bytes; expected a short YAML file")
    try:
        text = data.decode("utf-8-sig")
        _check_events(yaml.parse(text, Loader=yaml.SafeLoader), file)
        composed = yaml.compose(text, Loader=yaml.SafeLoader)
    except UnicodeDecodeError as err:
        raise fail(start, "", f"is not UTF-8 text (byte {err.start}); give YAML") from None
    except yaml.MarkedYAMLError as err:
        line = err.problem_mark.line + 1 if err.problem_mark else 0
        problem = " ".join(part for part in (err.context, err.problem) if part)
        raise fail(Where(file, line), "", f"is not valid YAML ({problem}); fix it") from None
    except yaml.YAMLError as err:
        reason = str(err).splitlines()[0]
        raise fail(start, "", f"is not valid YAML ({reason}); fix it") from None
    except (ValueError, OverflowError) as err:  # PyYAML on an escape outside Unicode
        raise fail(start, "", f"is not valid YAML ({err}); fix it") from None
    root = None if composed is None else _tree(composed, file)
    if not isinstance(root, Map):
        raise fail(start, "", "must be a mapping: lines of `key: value`")
    return root


def _check_events(events: Iterable[Any], file: str) -> None:
    """Raise SpecError for unsupported YAML features and sizes, before a tree is built."""
    depth = documents = 0
    for count, event in enumerate(events, 1):
        where = Where(file, event.start_mark.line + 1)
        if count > MAX_NODES:
            raise fail(where, "", f"has more than {MAX_NODES} YAML events; expected a short file")
        documents += isinstance(event, yaml.DocumentStartEvent)
        if documents > 1:
            raise fail(where, "", "has a second document; keep one per file")
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise fail(where, "", "uses an anchor or alias; write the value out")
        if tag := getattr(event, "tag", None):
            raise fail(where, "", f"has the tag {quote(tag)}; leave tags out")
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise fail(where, "", f"is nested deeper than {MAX_DEPTH} levels")


def _tree(node: yaml.Node, file: str) -> Node:
    where = Where(file, node.start_mark.line + 1)
    if isinstance(node, yaml.ScalarNode):
        return Scalar(node.value, node.style is None, where)
    if isinstance(node, yaml.SequenceNode):
        return Seq(tuple(_tree(item, file) for item in node.value), where)
    out = Map({}, {}, where)
    for key, value in node.value:
        name = _tree(key, file)
        if not isinstance(name, Scalar):
            raise fail(name.where, "", "a key must be a plain word")
        if name.text == "<<" and name.plain:
            raise fail(name.where, "", "uses a merge key `<<`; write its keys out")
        if name.text in out.keys:
            problem = f"is given twice (first on line {out.keys[name.text].line}); keep one"
            raise fail(name.where, join("", name.text), problem)
        out.keys[name.text] = name.where
        out.entries[name.text] = _tree(value, file)
    return out


def merge(base: Map, over: Map) -> Map:
    """Return `base` overridden by `over`: mappings merge recursively, other nodes replace."""
    entries, keys = dict(base.entries), dict(base.keys)
    for key, node in over.entries.items():
        old = entries.get(key)
        both = isinstance(old, Map) and isinstance(node, Map)
        entries[key] = merge(old, node) if both else node  # type: ignore[arg-type]
        keys[key] = over.keys[key]
    return Map(entries, keys, over.where)


# --- tree -> dataclass ------------------------------------------------------------------------

Hints = dict[str, Any]


@cache
def hints_of(cls: type) -> Hints:
    """Return the resolved annotations of a dataclass, with their constraints."""
    return get_type_hints(cls, include_extras=True)


def build(cls: type, node: Node, path: str = "", hints: Hints | None = None) -> Any:
    """Build the dataclass from a mapping: check every key, convert values by field type.

    `hints` replaces annotations (for unions that another key decides); keys that the class lists in
    `unread` are ignored. Raises one SpecError with file, line and key path of the errors.
    """
    if not isinstance(node, Map):
        raise fail(node.where, path, f"expected a mapping with {_names(cls)}, found {_kind(node)}")
    hints = hints_of(cls) if hints is None else hints
    by_name, unread = {f.name: f for f in fields(cls)}, vars(cls).get("unread", ())
    errors, values = list[SpecError](), dict[str, Any]()
    for key, value in node.entries.items():
        try:
            if key in by_name:
                values[key] = convert(value, hints[key], join(path, key))
            elif key not in unread:
                raise fail(node.keys[key], join(path, key), unknown_key(key, (*by_name, *unread)))
        except SpecError as e:
            errors.append(e)
    missing = [name for name, f in by_name.items() if required(f) and name not in node.entries]
    if node.entries.keys() <= {*by_name, *unread}:  # otherwise a missing key may be a misspelt one
        errors += [fail(node.where, join(path, name), "is missing; add it") for name in missing]
    if errors:
        raise together(errors)
    return cls(**values)


def required(f: Field[Any]) -> bool:
    return f.default is MISSING and f.default_factory is MISSING


def join(path: str, key: str) -> str:
    """Return a dotted key path; a key that is too long is quoted and cut."""
    key = key if len(key) <= MAX_QUOTED and key.isprintable() else quote(key)
    return f"{path}.{key}" if path else key


def unknown_key(key: str, valid: Iterable[str]) -> str:
    """Return the message for an unknown key, with the nearest valid key or all of them."""
    valid = list(valid)
    near = did_you_mean(key, valid)
    return f"unknown key{near or '; valid keys here: ' + ', '.join(valid)}"


def _names(cls: type) -> str:
    return ", ".join(f.name for f in fields(cls))


def _kind(node: Node) -> str:
    if isinstance(node, Scalar):
        return "nothing" if is_null(node) else quote(node.text)
    return "a list" if isinstance(node, Seq) else "a mapping"


def is_null(node: Node) -> bool:
    return isinstance(node, Scalar) and node.plain and node.text in NULLS


def convert(node: Node, hint: Any, path: str) -> Any:
    """Convert a node to the annotated type. Raises SpecError."""
    if hint is Any:
        return plain_value(node)
    origin = get_origin(hint)
    if origin is Annotated:
        base, *rules = get_args(hint)
        return _constrained(convert(node, base, path), rules, node, path)
    if origin in (Union, types.UnionType):
        return _optional(node, get_args(hint), path)
    if origin is tuple:
        return _items(node, get_args(hint)[0], path)
    if origin is dict:
        key, value = get_args(hint)
        return _table(node, key, value, path)
    if is_dataclass(hint):
        return build(typing.cast(type, hint), node, path)
    return _leaf(node, hint, path)


def _constrained(value: Any, rules: list[Any], node: Node, path: str) -> Any:
    for rule in rules:
        problem = rule.broken(value)
        if problem:
            actual = f", found {quote(node.text)}" if isinstance(node, Scalar) else ""
            raise fail(node.where, path, problem + actual)
        value = rule.normal(value) if isinstance(rule, OneOf) else value
    return value


def _optional(node: Node, members: tuple[Any, ...], path: str) -> Any:
    inner = [m for m in members if m is not type(None)]
    if len(inner) < len(members) and is_null(node):
        return None
    if len(inner) > 1:  # decided by the caller through `hints`
        raise TypeError(f"{path}: a union of {inner} needs a hint")
    return convert(node, inner[0], path)


def _items(node: Node, hint: Any, path: str) -> tuple[Any, ...]:
    if not isinstance(node, Seq):
        raise fail(node.where, path, f"expected a list, found {_kind(node)}; write [a, b]")
    return tuple(convert(item, hint, f"{path}[{i}]") for i, item in enumerate(node.items))


def _table(node: Node, key: Any, value: Any, path: str) -> dict[str, Any]:
    if not isinstance(node, Map):
        raise fail(node.where, path, f"expected a mapping, found {_kind(node)}")
    names = (convert(Scalar(k, False, node.keys[k]), key, join(path, k)) for k in node.entries)
    return {k: convert(node.entries[k], value, join(path, k)) for k in names}


def _leaf(node: Node, kind: type, path: str) -> Any:
    noun, parse = LEAVES[kind]
    if not isinstance(node, Scalar) or is_null(node):
        raise fail(node.where, path, f"expected {noun}, found {_kind(node)}")
    value = parse(node)
    if value is None:
        unquoted = parse(replace(node, plain=True))
        quoted = "" if unquoted is None else " (leave the quotes out)"
        raise fail(node.where, path, f"expected {noun}, found {quote(node.text)}{quoted}")
    return value


def _to_int(node: Scalar) -> int | None:
    if not (node.plain and len(node.text) <= 24 and INTEGER.fullmatch(node.text)):
        return None
    return int(node.text)


def _to_float(node: Scalar) -> float | None:
    if not (node.plain and len(node.text) <= 64 and REAL.fullmatch(node.text)):
        return None
    value = float(node.text)
    return value if math.isfinite(value) else None


def _to_bool(node: Scalar) -> bool | None:
    word = node.text.lower()
    if not node.plain or word not in TRUES | FALSES:
        return None
    return word in TRUES


def _to_text(max_length: int) -> Callable[[Scalar], str | None]:
    def read(node: Scalar) -> str | None:
        fits = node.word and len(node.text) <= max_length and node.text.isprintable()
        return node.text if fits else None

    return read


LEAVES: dict[type, tuple[str, Callable[[Scalar], Any]]] = {
    int: ("an integer", _to_int),
    float: ("a finite number", _to_float),
    bool: ("true or false", _to_bool),
    str: ("text of at most 200 characters on one line", _to_text(200)),
    Line: (f"text of at most {MAX_LINE} characters on one line", _to_text(MAX_LINE)),
}


def json_object(raw: bytes, kind: type = dict) -> Any:
    """Parse a JSON object, or a list (`kind`). ValueError, whose message continues the file's name:
    `is no JSON object: found a list`, `key 'x' is given twice`."""
    try:
        value = json.loads(raw.decode("utf-8-sig"), object_pairs_hook=unique)
    except _DuplicateKey:
        raise
    except UnicodeDecodeError as err:
        reason = f"not UTF-8 at byte {err.start}"
    except RecursionError:
        reason = "nested too deep"
    except ValueError as err:  # also for an integer that is too long to convert
        reason = str(err)[:120]
    else:
        if isinstance(value, kind):
            return value
        names: dict[Any, str] = {dict: "an object", list: "a list"}
        reason = f"found {names.get(type(value)) or json.dumps(value)[:MAX_QUOTED]}"
    raise ValueError(f"is no JSON {'object' if kind is dict else 'list'}: {reason}")


class _DuplicateKey(ValueError):
    pass


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the dict of a JSON object's pairs; ValueError for a key that is given twice."""
    out = dict(pairs)
    if len(out) < len(pairs):
        names = Counter(k for k, _ in pairs)
        raise _DuplicateKey(f"key {quote(names.most_common(1)[0][0])} is given twice")
    return out


def tree_of(value: Any, where: Where, depth: int = MAX_DEPTH, exact: bool = False) -> Node:
    """Return a parsed JSON value as a tree, to be converted by the same rules as YAML; `exact`:
    fields of type str accept JSON strings only. SpecError if it is nested too deep."""
    if depth == 0:
        raise fail(where, "", f"is nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, dict):
        entries = {str(k): tree_of(v, where, depth - 1, exact) for k, v in value.items()}
        return Map(entries, dict.fromkeys(entries, where), where)
    if isinstance(value, (list, tuple)):
        return Seq(tuple(tree_of(v, where, depth - 1, exact) for v in value), where)
    if isinstance(value, str):
        return Scalar(value, False, where)
    words = {None: "null", True: "true", False: "false"}
    is_word = value is None or isinstance(value, bool)
    huge = isinstance(value, int) and abs(value) > 10**30  # a long repr is costly, or refused
    text = words[value] if is_word else "a huge integer" if huge else repr(value)
    return Scalar(text, True, where, word=not exact)


def plain_value(node: Node) -> Any:
    """Return a tree as JSON values, the inverse of `tree_of`; numbers that are not finite stay
    text."""
    if isinstance(node, Map):
        return {k: plain_value(v) for k, v in node.entries.items()}
    if isinstance(node, Seq):
        return [plain_value(item) for item in node.items]
    if is_null(node):
        return None
    readers = (_to_int, _to_float, _to_bool) if node.plain else ()
    values = (value for read in readers if (value := read(node)) is not None)
    return next(values, node.text)
