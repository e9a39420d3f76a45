"""Runs the template of a stranger: jinja2's immutable sandbox, and limits around it.

The sandbox keeps a template from the program's objects, not from its time and memory. Here every
turn of a loop, every call and every text that grows is counted, so that one that loops or prints
without end becomes an error. Needs jinja2, so it is imported when a template is opened.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, ItemsView, Iterable, KeysView, Mapping, ValuesView
from datetime import datetime
from functools import lru_cache, wraps
from itertools import chain
from string import Formatter
from types import CodeType
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.filters import FILTERS
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

#: characters of a prompt, and those that may be made on the way to it
MOST_TEXT, MOST_MADE = 4 << 20, 64 << 20
#: turns of loops and calls, and seconds, of one rendering
MOST_STEPS, MOST_SECONDS = 10_000_000, 10.0

#: filters that a template may use: those that make a text of what they are given, and others
_OF_VALUES = """
    capitalize e escape float forceescape int lower safe string title trim truncate upper wordcount
"""
_OTHERS = """
    abs attr count d default dictsort first groupby items last length list map max min reject
    rejectattr reverse round select selectattr sort sum unique
"""
_METHODS = """
    capitalize casefold center count endswith find index isalnum isalpha isascii isdecimal
    isdigit islower isnumeric isprintable isspace istitle isupper join ljust lower lstrip
    partition removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip
    split splitlines startswith strip swapcase title upper zfill
"""
_GLOBALS = ("range", "dict", "namespace", "joiner", "cycler")
#: methods of a text that a template may call
_OF_TEXTS = frozenset(_METHODS.split())
#: those whose first argument is a width
_PADDING = frozenset({"center", "ljust", "rjust", "zfill"})
_DATE = re.compile(r"(%-?[A-Za-z%]|[^%]){0,100}")
#: one conversion of `text % values`: its key, flags and numbers, and its type
_CONVERSION = re.compile(r"%(?:\(([^)]*)\))?([-#0 +*.0-9]*)[hlL]?([A-Za-z%])")
_NUMBER = re.compile("[0-9]+")
#: characters of a repr for one of the text
_REPR = 10


class LimitError(TemplateError):
    """A template takes more than it may."""


class Generation(Extension):
    """`{% generation %}...{% endgeneration %}`, with which training templates mark answers: its
    body, in a scope of its own."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        """Return the body of the tag."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Counted(NodeTransformer):
    """Puts a step into each turn of a loop and each macro, and counts what is put together."""

    def _step(self, node: Any) -> Any:
        self.generic_visit(node)
        # What stands in the template itself is made again in each turn.
        made = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        length = [nodes.Const(made)]
        call = nodes.Call(nodes.EnvironmentAttribute("step"), length, [], None, None)
        node.body.insert(0, nodes.ExprStmt(call))
        return node

    visit_For = visit_Macro = visit_CallBlock = _step

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Call(nodes.EnvironmentAttribute("joined"), node.nodes, [], None, None)

    def visit_List(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        if getattr(node, "ctx", "load") != "load":  # the names that a loop sets
            return nodes.Tuple(node.items, node.ctx)
        return nodes.Call(nodes.EnvironmentAttribute("bounded"), [node], [], None, None)

    visit_Tuple = visit_Dict = visit_List


class Sandbox(ImmutableSandboxedEnvironment):
    """One environment for one rendering: the counters are its own."""

    intercepted_binops = frozenset(["+", "*", "%", "**"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", Generation],
            optimized=False,
            cache_size=0,
        )
        self.steps, self.made, self.end = 0, 0, time.monotonic() + MOST_SECONDS
        self.filters = {
            **{name: FILTERS[name] for name in _OTHERS.split()},
            **{name: self._counting(FILTERS[name]) for name in _OF_VALUES.split()},
            "tojson": self._json,
            "join": self._join,
            "format": lambda text, *args, **named: self._percent(str(text), named or args),
            "indent": self._indent,
            "replace": self._replace,
        }
        kept = {name: self.globals[name] for name in _GLOBALS}
        self.globals = {**kept, "raise_exception": _raise, "strftime_now": _now}
        self.finalize = self.sized

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        found: nodes.Template = _Counted().visit(super()._parse(source, name, filename))
        return found

    # --- counting -----------------------------------------------------------------------------

    def step(self, made: int = 0) -> str:
        """Count one step and characters made in it; LimitError where there were too many, or they
        took too long."""
        self.steps += 1
        self.made += made
        if self.steps > MOST_STEPS:
            raise LimitError(f"it takes more than {MOST_STEPS} steps")
        if time.monotonic() > self.end:
            raise LimitError(f"it takes more than {MOST_SECONDS:g} seconds")
        if self.made > MOST_MADE:
            raise LimitError(f"it makes more than {MOST_MADE} characters")
        return ""

    def make(self, characters: int) -> None:
        """Count characters of a text that is about to be made."""
        self.step(characters)
        if characters > MOST_TEXT:
            raise LimitError(f"it makes texts of more than {MOST_TEXT} characters")

    def sized(self, value: Any) -> Any:
        """Return a value, its size as a text counted."""
        self.make(len(value) if isinstance(value, str) else _size(value))
        return value

    def bounded(self, value: Any) -> Any:
        """Return a value of parts, which are not too many, those in them counted."""
        self.step()
        if _size(value) > MOST_TEXT:
            raise LimitError(f"it makes lists of more than {MOST_TEXT} characters")
        return value

    def joined(self, *parts: Any) -> str:
        """Return `a ~ b`."""
        return "".join(str(self.sized(part)) for part in parts)

    def _counting(self, made: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter that counts its value before it looks at it."""

        @wraps(made)
        def counted(*args: Any, **options: Any) -> Any:
            # Some are given the environment before it.
            for value in args[:2]:
                self.sized(value)
            return made(*args, **options)

        return counted

    def _join(self, value: Iterable[Any], d: str = "", attribute: Any = None) -> str:
        parts = list(value)
        if attribute is not None:
            parts = [self.getitem(part, attribute) for part in parts]
        self.make(len(d) * len(parts))
        return d.join(str(self.sized(part)) for part in parts)

    def _replace(self, value: Any, old: str, new: str, count: int = -1) -> str:
        text = str(self.sized(value))
        self.make(len(text) + text.count(old) * len(new))
        return text.replace(old, new, -1 if count is None else count)

    def _json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        """Return JSON as it is, without the escapes that HTML would need."""
        depth = 1 if indent is None else 1 + min(max(int(indent), 0), 16)
        self.make(_size(value) * (6 if ensure_ascii else 2) * depth)
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=None if indent is None else depth - 1,
            separators=separators,
            sort_keys=sort_keys,
        )

    def _percent(self, text: str, values: Any) -> str:
        """Return `text % values`, its size checked first."""
        found = _CONVERSION.findall(text)
        most = _REPR if any(kind in "ra" for _, _, kind in found) else 1
        size = len(text) + (0 if isinstance(values, Mapping) else _size(values) * most)
        for key, numbers, _ in found:
            if "*" in numbers:
                raise LimitError("it formats a text by % with a width that is a value")
            size += sum(map(int, _NUMBER.findall(numbers)))
            if isinstance(values, Mapping) and key in values:
                size += _size(values[key]) * most
        self.make(size)
        return text % values

    def _check_fields(self, text: str, size: int) -> None:
        """Count the result of `text.format(...)` with values of this size in each field."""
        total = len(text)
        for _, name, spec, conversion in Formatter().parse(text):
            if "{" in (spec or ""):
                raise LimitError("it formats a text with a width that is a value")
            total += sum(map(int, _NUMBER.findall(spec or "")))
            total += size * (_REPR if conversion else 1) * (name is not None)
        self.make(total)

    def _indent(
        self, value: Any, width: int | str = 4, first: bool = False, blank: bool = False
    ) -> str:
        text = str(self.sized(value))
        each = len(width) if isinstance(width, str) else width
        self.make(len(text) + each * (1 + text.count("\n")))
        return str(FILTERS["indent"](text, width, first, blank))

    # --- what the sandbox asks ----------------------------------------------------------------

    def call(self, __context: Context, __obj: Any, *args: Any, **options: Any) -> Any:
        """Call what a template may call, its texts counted."""
        self.step()
        text = getattr(__obj, "__self__", None)
        if isinstance(text, str):
            if __obj.__name__ == "join" and args:
                return self._join(args[0], text)
            if __obj.__name__ == "replace" and len(args) >= 2:
                return self._replace(text, *args)
            self.make(len(text))
            if __obj.__name__ in _PADDING and args:
                self.make(int(args[0]))
        made = super().call(__context, __obj, *args, **options)
        return self.bounded(made) if isinstance(made, dict) else made

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Calculate what could grow, after a look at its size."""
        self.step()
        if operator == "+":
            self.make(_length(left) + _length(right))
        elif operator == "*":
            self._check_times(left, right)
        elif operator == "%" and isinstance(left, str):
            return self._percent(left, right)
        elif operator == "**" and not (abs(left) <= 1 << 32 and abs(right) <= 64):
            raise LimitError("it raises to a power beyond 64")
        return super().call_binop(context, operator, left, right)

    def _check_times(self, left: Any, right: Any) -> None:
        for many, times in ((left, right), (right, left)):
            if isinstance(many, str | list | tuple) and isinstance(times, int):
                self.make(_length(many) * max(times, 0))
            elif isinstance(many, int) and many.bit_length() > 1 << 12:
                raise LimitError("it multiplies numbers of more than 4096 bits")

    def wrap_str_format(self, value: Any) -> Any:
        """Return `format` of a text as the sandbox has it, the size of its result checked first."""
        made = super().wrap_str_format(value)
        if made is None:
            return None

        @wraps(made)
        def checked(*args: Any, **named: Any) -> Any:
            self._check_fields(value.__self__, sum(map(_size, (*args, *named.values()))))
            return made(*args, **named)

        return checked

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may see an attribute: of texts only what cannot grow unseen."""
        if isinstance(obj, str):
            return attr in _OF_TEXTS
        return super().is_safe_attribute(obj, attr, value)


def render(source: str, name: str, variables: Mapping[str, Any]) -> str:
    """Return the text of a template. LimitError and other exceptions say what is wrong with it."""
    box = Sandbox()
    template = Template.from_code(box, _compiled(source, name), box.make_globals(None))
    out, length = list[str](), 0
    for piece in template.generate(dict(variables)):
        length += len(piece)
        if length > MOST_TEXT:
            raise LimitError(f"it prints more than {MOST_TEXT} characters")
        out.append(piece)
    return "".join(out)


@lru_cache(maxsize=8)
def _compiled(source: str, name: str) -> CodeType:
    """Return the code of a template, which takes longer to make than to run."""
    return Sandbox().compile(source, filename=name)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str) else 8 * len(value) if _listed(value) else 8


def _listed(value: Any) -> bool:
    return isinstance(value, list | tuple | set | KeysView | ValuesView | ItemsView)


def _size(value: Any) -> int:
    """Return about how long a value is as a text; more than the most, and no exact number, where
    its parts are too many."""
    found, left = 0, [iter((value,))]
    while left:
        for item in left[-1]:
            found += len(item) + 2 if isinstance(item, str) else 8
            if found > MOST_TEXT:
                return found
            if isinstance(item, Namespace):  # one may hold others, and is no text
                return MOST_TEXT + 1
            if isinstance(item, Mapping):
                left.append(chain(item.keys(), item.values()))
                break
            if _listed(item):
                left.append(iter(item))
                break
        else:
            left.pop()
    return found


def _raise(message: Any) -> Any:
    raise TemplateError(str(message)[:400])


def _now(form: str) -> str:
    if not _DATE.fullmatch(form):
        raise LimitError("its format of the time is too long, or has widths")
    return datetime.now().strftime(form)
