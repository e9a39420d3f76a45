"""Renders untrusted templates in jinja2's immutable sandbox, with limits on time and memory.

The sandbox blocks access to objects and files. An operation cannot be interrupted while it runs in
C, so each must be short: every value that a template creates is measured, contents included, and
refused if its text would exceed the maximum prompt; operations that multiply values (`GROWTH`) are
checked in advance. Steps and values are charged to a budget, which also checks the time.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from datetime import datetime
from functools import lru_cache, wraps
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

#: limits of rendering: characters of the prompt and of any value, seconds, and bytes of all values
MAX_TEXT, MAX_SECONDS, MAX_MEMORY = 4 << 20, 10.0, 512 << 20
#: limits: bits of an integer; columns or digits; characters of a separator or strip set
MAX_BITS, MAX_COUNT, MAX_SHORT = 4096, 10_000, 256
#: bytes charged per list element; bytes charged between two checks of the time
ELEMENT, TICK = 64, 64 << 10
CONTAINERS: tuple[Any, ...] = (list, tuple, dict)


class LimitError(Exception):
    """A template exceeds a limit."""


class RenderError(Exception):
    """A template cannot be rendered; names its line if known."""

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


#: error type -> message, for errors without one
REASONS: Mapping[type, str] = {
    RecursionError: "it calls itself without end",
    MemoryError: "it needs too much memory",
}


def render(source: str, name: str, variables: Mapping[str, Any]) -> str:
    """Return the text of a template. RenderError if it raises or exceeds a limit, TypeError or
    ValueError for variables that are not JSON."""
    values = json.loads(json.dumps(variables, allow_nan=False))
    _THREAD.budget = Budget()
    pieces, length = list[str](), 0
    try:
        for piece in _compiled(source, name).generate(values):
            pieces.append(piece)
            length += len(piece)
            if length > MAX_TEXT:
                raise LimitError(f"it prints more than {MAX_TEXT} characters")
        return "".join(pieces)
    except Exception as e:  # a template's expressions may raise anything
        message = REASONS.get(type(e), str(e)[:400]) or type(e).__name__
        error = RenderError(message, getattr(e, "lineno", None))
    finally:
        _THREAD.budget = None
    raise error  # not above, where `e` would be its context


class Budget:
    """The remaining budget of a rendering. Sizes of containers are cached by id: templates cannot
    modify them."""

    def __init__(self) -> None:
        self.end = time.monotonic() + MAX_SECONDS
        self.spent = self.looked = 0
        self.sizes: dict[int, tuple[Any, int]] = {}

    def spend(self, nbytes: int = ELEMENT) -> None:
        """Charge bytes. LimitError if memory or time is exhausted."""
        self.spent += nbytes
        if self.spent - self.looked >= TICK:
            self.looked = self.spent
            if self.spent > MAX_MEMORY:
                raise LimitError("it needs too much memory")
            if time.monotonic() > self.end:
                raise LimitError(f"it takes more than {MAX_SECONDS:g} seconds")

    def size(self, value: Any) -> int:
        """Return an upper bound of the characters of a value as text, quotes and brackets included;
        elements that appear several times count several times."""
        if isinstance(value, str):
            return len(value) + 2
        if isinstance(value, int):
            return value.bit_length() // 3 + 3
        if not isinstance(value, CONTAINERS):
            return 32
        cached = self.sizes.get(id(value))
        if cached is None:
            self.spend(ELEMENT * len(value))
            parts: Iterable[Any] = value
            if isinstance(value, dict):
                parts = (*value.keys(), *value.values())
            cached = value, check_size(2 + sum(self.size(part) + 2 for part in parts))
            self.sizes[id(value)] = cached
        return cached[1]

    def charge(self, value: Any) -> Any:
        """Charge a new value and return it; iterators become lists."""
        if isinstance(value, str):
            self.spend(ELEMENT + check_size(len(value)) * (1 if value.isascii() else 4))
            return value
        if isinstance(value, int):
            if value.bit_length() > MAX_BITS:
                raise LimitError(f"it makes a number of more than {MAX_BITS} bits")
        elif not isinstance(value, CONTAINERS) and isinstance(value, Iterator):
            value = [*value]
        self.size(value)
        self.spend()
        return value

    def text(self, value: Any) -> Any:
        """Convert a value to text within the budget."""
        return self.charge(value if isinstance(value, str) else str(value))


def check_size(size: int) -> int:
    """Return the size; LimitError if it exceeds the maximum text."""
    if size > MAX_TEXT:
        raise LimitError(f"it makes a value of more than {MAX_TEXT} characters")
    return size


class _Thread(threading.local):
    budget: Budget | None = None


_THREAD = _Thread()


def _budget() -> Budget:
    assert _THREAD.budget is not None
    return _THREAD.budget


# --- operations that multiply values
# --------------------------------------------------------------------------


def _stripped(text: str, chars: Any = None) -> int:
    if isinstance(chars, str) and len(chars) > MAX_SHORT:
        raise LimitError(f"it strips one of more than {MAX_SHORT} characters")
    return 0


def _indented(text: str, width: Any = 4, *_: Any, **__: Any) -> int:
    return (len(text.splitlines()) + 1) * (len(width) if isinstance(width, str) else width)


def _joined(parts: Any, d: Any = "", attribute: Any = None) -> int:
    return (len(parts) if isinstance(parts, Sized) else 0) * _budget().size(d)


def _summed(values: Any, attribute: Any = None, start: Any = 0) -> int:
    if not isinstance(start, int | float):
        raise LimitError("filter sum: adds numbers alone")
    return 0


#: format widths of four digits or `*`, and attribute or element access in format fields
_LONG_WIDTH = re.compile(r"%[^%a-zA-Z]*(?:\d{4}|\*)|\{(?:[^{}:]*[.\[]|[^{}]*:[^{}]*(?:\d{4}|\{))")


def _formatted(text: str, *args: Any, **named: Any) -> int:
    if _LONG_WIDTH.search(text.replace("{{", "").replace("}}", "")):
        raise LimitError("it formats with a width of more than 999, or an attribute")
    largest = max(map(_budget().size, (*args, *named.values())), default=0)
    return (text.count("%") + text.count("{")) * (largest + 1000)


#: string method or filter -> upper bound of the characters that it adds
GROWTH: Mapping[str, Callable[..., int]] = {
    **dict.fromkeys(("strip", "lstrip", "rstrip", "trim"), _stripped),
    "expandtabs": lambda text, tabsize=8: text.count("\t") * tabsize,
    "replace": lambda text, old="", new="", *_: text.count(str(old)) * len(str(new)),
    "indent": _indented,
    "format": _formatted,
    "format_map": lambda text, mapping: _formatted(text, mapping),
    "join": _joined,
    "sum": _summed,
}
#: methods and filters with a count of columns, elements or digits
COUNTED = {"center", "ljust", "rjust", "zfill", "expandtabs", "indent", "truncate", "round"}
COUNTED |= {"batch", "slice", "tojson"}
#: attributes of strings and numbers that are refused; templates do not need them
REFUSED = frozenset(("encode", "maketrans", "translate", "to_bytes", "from_bytes", "fromkeys"))
REFUSED |= {"striptags", "unescape"}
#: refused filters: quadratic time, or HTML output
NO_FILTERS = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr", "forceescape")


def _check_growth(name: str, value: Any, args: Any, named: Mapping[str, Any]) -> None:
    """Raise LimitError if a method or filter would produce too large a value."""
    for x in (*args, *named.values()) if name in COUNTED else ():
        if isinstance(x, int) and not -MAX_COUNT < x < MAX_COUNT:
            raise LimitError(f"{name}: {x} is too large a number")
    if grown := GROWTH.get(name):
        check_size(_budget().size(value) + grown(value, *args, **named))


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter with the limits. An environment or context that jinja2 passes comes first."""
    first = int(getattr(function, "jinja_pass_arg", None) is not None)

    @wraps(function)
    def guarded(*args: Any, **named: Any) -> Any:
        budget, value, more = _budget(), args[first], args[first + 1 :]
        if name in GROWTH and name not in ("join", "sum"):
            value = budget.text(value)
        _check_growth(name, value, more, named)
        return budget.charge(function(*args[:first], value, *more, **named))

    return guarded


#: attributes of dicts, which take precedence over keys
_OF_DICTS = frozenset(dir(dict))


class _Counted:
    """A loop's iterable that charges each step, including the `text` of the loop's body."""

    def __init__(self, values: Any, text: int = 0) -> None:
        _budget().spend()
        self.values, self.steps, self.text = values, iter(values), text

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[Any]:
        budget = _budget()
        for x in self.steps:
            budget.spend(ELEMENT + self.text)
            yield x


class _Plain(Namespace):
    """A namespace with a constant repr: printing its values could recurse without bound."""

    def __repr__(self) -> str:
        return "<Namespace>"


class _Checked(NodeTransformer):
    """Wraps AST nodes that create values without a call (loops, lists, slices, `~`) in charging
    filters."""

    def generic_visit(self, node: nodes.Node, *args: Any, **named: Any) -> nodes.Node:
        super().generic_visit(node)
        if isinstance(node, nodes.For):
            text = sum(len(part.data) for part in node.find_all(nodes.TemplateData))
            node.iter = _filter(node.iter, "counted", nodes.Const(text, lineno=node.lineno))
        elif isinstance(node, nodes.Concat):
            return _filter(nodes.List(node.nodes, lineno=node.lineno), "concatenated")
        elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            return _filter(node, "sliced")
        stored = isinstance(node, nodes.Tuple) and node.ctx != "load"
        makes = isinstance(node, (nodes.List, nodes.Dict, nodes.Tuple)) and not stored
        return _filter(node, "made") if makes else node


def _filter(node: Any, name: str, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, [*args], [], None, None, lineno=node.lineno)


class Generation(Extension):
    """`{% generation %}...{% endgeneration %}`, which marks answers in training templates: renders
    its body in a scope."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class Environment(ImmutableSandboxedEnvironment):
    """jinja2's immutable sandbox with a budget."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", Generation],
            finalize=lambda value: _budget().text(value),
        )
        shared = {n: f for n, f in self.filters.items() if n not in NO_FILTERS}
        self.filters = {n: _guarded(n, f) for n, f in (shared | {"tojson": _json}).items()}
        self.filters |= {"counted": _Counted, "concatenated": _concatenated, "sliced": _sliced}
        self.filters["made"] = lambda value: _budget().charge(value)
        del self.globals["lipsum"]
        self.globals |= {"range": safe_range, "namespace": _Plain, "raise_exception": _refuse}
        self.globals["strftime_now"] = lambda fmt: datetime.now().strftime(fmt)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Checked().visit(super()._parse(source, name, filename))
        return tree

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in REFUSED and super().is_safe_attribute(obj, attr, value)

    def handle_exception(self, source: str | None = None) -> NoReturn:
        """Keep the traceback of a runtime error: jinja2's copy of it is a cycle, and would hold the
        template's values beside those of the next rendering."""
        if isinstance(sys.exc_info()[1], TemplateSyntaxError):
            super().handle_exception(source)
        raise

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute in obj and attribute not in _OF_DICTS:
            return obj[attribute]  # fast path: most reads of templates
        return super().getattr(obj, attribute)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        budget = _budget()
        if operator == "%" and isinstance(left, str):
            check_size(_formatted(left, *(right if isinstance(right, tuple) else (right,))))
        for x, count in ((left, right), (right, left)):
            if isinstance(count, int) and operator == "*":
                check_size(budget.size(x) * count if isinstance(x, (str, *CONTAINERS)) else 0)
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            budget.charge(1 << min(left.bit_length() * max(right, 0), MAX_BITS))
        return budget.charge(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **named: Any) -> Any:
        method = getattr(__obj, "__wrapped__", __obj)  # jinja2 wraps `format`
        budget, owner = _budget(), getattr(method, "__self__", None)
        if isinstance(owner, str) and args and method.__name__ == "join":
            _check_growth("join", args[0], (owner,), {})
        elif isinstance(owner, str):
            _check_growth(method.__name__, owner, args, named)
        elif isinstance(__obj, LoopContext) and args:
            loop: Any = __obj._iterable
            args = (_Counted(args[0], loop.text), *args[1:])
        elif isinstance(__obj, Macro) and not (__obj.catch_varargs or __obj.catch_kwargs):
            named.pop("_loop_vars", None)  # passed by jinja2's context; macros do not accept it
            return budget.charge(__obj(*args, **named))
        elif len(args) + len(named) > 1:
            check_size(sum(map(budget.size, (*args, *named.values()))))
        return budget.charge(super().call(__context, __obj, *args, **named))


def _refuse(message: Any) -> Any:
    raise TemplateError(_budget().text(message))


def _sliced(part: Any) -> Any:
    """Charge a slice. It is at most as large as its operand, so it is not measured again."""
    _budget().spend(ELEMENT + (1 if isinstance(part, str) else 8) * len(part))
    return part


def _concatenated(values: list[Any]) -> Any:
    texts = [*map(_budget().text, values)]
    check_size(sum(map(len, texts)))
    return _budget().charge("".join(texts))


def _json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Serialise to JSON without the HTML escapes of jinja2's filter. Parameters are in the order of
    transformers' filter, as templates also pass them by position."""
    if _budget().size((indent, separators)) > MAX_SHORT:
        raise LimitError("filter tojson: a long indent or separator")
    options: Any = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    pieces, length = list[str](), 0
    for piece in json.JSONEncoder(ensure_ascii=ensure_ascii, **options).iterencode(value):
        pieces.append(piece)
        length = check_size(length + len(piece))
    return "".join(pieces)


@lru_cache(maxsize=1)
def _environment() -> Environment:
    return Environment()


@lru_cache(maxsize=8)
def _compiled(source: str, name: str) -> Template:
    env = _environment()
    code = env.compile(source, filename=name)
    return Template.from_code(env, code, env.make_globals(None))
