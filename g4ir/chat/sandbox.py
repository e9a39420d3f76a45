"""Renders templates of strangers in jinja2's immutable sandbox, under limits on time and memory.

The sandbox keeps a template from objects and files. Nothing can stop an operation once it runs in
C, so each has a bounded size before it starts: operators, methods and filters that can make a large
value of small ones are checked by the tables below, and all values that a template makes are
charged to a budget, which also looks at the clock.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from datetime import datetime
from functools import lru_cache, wraps
from types import BuiltinMethodType, MethodType
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter, safe_range
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

#: characters of a prompt and of any value, seconds of a prompt, bytes of all
#: values that it makes
MAX_TEXT, MAX_SECONDS, MAX_MEMORY = 4 << 20, 10.0, 512 << 20
#: bits of a number, characters of the digits of a format, of a set of characters to strip
MAX_BITS, MAX_DIGITS, MAX_STRIPPED = 4096, 3, 256
#: spaces of a level of JSON
MAX_INDENT = 16
#: bytes of an element of a list, and between two looks at the clock
ELEMENT, TICK = 64, 64 << 10
VIEWS: tuple[Any, ...] = (type({}.keys()), type({}.values()), type({}.items()))
CONTAINERS: tuple[Any, ...] = (list, tuple, dict, set, frozenset, range, *VIEWS)


class LimitError(Exception):
    """A template exceeds a limit."""


class RenderError(Exception):
    """A template cannot be rendered, at this line of it if that is known."""

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


#: errors without a message of their own
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
    except Exception as e:  # a template raises whatever its expressions do
        message = REASONS.get(type(e), str(e)[:400]) or type(e).__name__
        raise RenderError(message, getattr(e, "lineno", None)) from None
    finally:
        _THREAD.budget = None


# --- sizes ------------------------------------------------------------------------------------


class Budget:
    """What a template may still use. Sizes of containers are kept by identity: nothing in a
    template can change one. Whatever puts containers into another measures it, so that none has
    more than MAX_TEXT elements and characters, those that appear several times included."""

    def __init__(self) -> None:
        self.end = time.monotonic() + MAX_SECONDS
        self.spent = self.looked = 0
        self.sizes: dict[int, tuple[Any, int]] = {}

    def spend(self, nbytes: int) -> None:
        """Charge bytes, each step of a template at least some. LimitError for too many, or if the
        time is over."""
        self.spent += nbytes
        if self.spent - self.looked >= TICK:
            self.looked = self.spent
            if self.spent > MAX_MEMORY:
                raise LimitError("it needs too much memory")
            if time.monotonic() > self.end:
                raise LimitError(f"it takes more than {MAX_SECONDS:g} seconds")

    def make(self, size: int) -> None:
        """Charge a value of so many characters or elements before it is made."""
        if size > MAX_TEXT:
            raise LimitError(f"it makes a value of more than {MAX_TEXT} characters")
        self.spend(size)

    def size(self, value: Any) -> int:
        """Return an upper bound of the characters of a value as text, quotes and brackets included;
        elements that appear several times count several times."""
        if isinstance(value, str):
            return len(value) + 2
        if isinstance(value, int):
            return value.bit_length() // 3 + 3
        if not isinstance(value, CONTAINERS):
            return 32
        known = self.sizes.get(id(value))
        if known is None:
            self.spend(ELEMENT * len(value))
            parts: Iterable[Any] = value
            if isinstance(value, dict):
                parts = (*value.keys(), *value.values())
            known = value, 2 + sum(self.size(part) + 2 for part in parts)
            if known[1] > MAX_TEXT:
                raise LimitError(f"it makes a value of more than {MAX_TEXT} characters")
            self.sizes[id(value)] = known
        return known[1]

    def made(self, value: Any) -> Any:
        """Charge a value that was made, and return it."""
        size = 1
        if isinstance(value, str):
            size += len(value) // (64 if value.isascii() else 16)
        elif isinstance(value, (list, tuple, dict)):
            size += len(value)
        self.spend(ELEMENT * size)
        return value

    def nested(self, value: Any) -> Any:
        """Charge a container of others that was made, and return it."""
        self.size(value)
        return self.made(value)

    def text(self, value: Any) -> str:
        """Return a value as text."""
        text = value if isinstance(value, str) else str(value)
        self.spend(len(text) * (1 if text.isascii() else 4) + ELEMENT)
        return text


class _Thread(threading.local):
    budget: Budget | None = None


_THREAD = _Thread()


def _budget() -> Budget:
    assert _THREAD.budget is not None
    return _THREAD.budget


def _check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise LimitError(f"it makes a number of more than {MAX_BITS} bits")


def _width(text: str, width: Any = 80, *_: Any, **__: Any) -> int:
    return len(text) + (abs(width) if isinstance(width, int) else 0)


def _replaced(text: str, old: Any = "", new: Any = "", *_: Any, **__: Any) -> int:
    old, new = str(old), str(new)
    return len(text) + text.count(old) * len(new)


def _stripped(text: str, chars: Any = None, *_: Any, **__: Any) -> int:
    if isinstance(chars, str) and len(chars) > MAX_STRIPPED:
        raise LimitError(f"it strips one of more than {MAX_STRIPPED} characters")
    return len(text)


def _indented(text: str, width: Any = 4, *_: Any, **__: Any) -> int:
    lines = len(text.splitlines()) + 1
    return len(text) + lines * (len(width) if isinstance(width, str) else _width("", width))


def _joined(parts: Any, separator: Any) -> int:
    budget = _budget()
    length = len(parts) if isinstance(parts, Sized) else 0
    return budget.size(parts) + length * budget.size(separator)


def _formatted(text: str, *args: Any, **named: Any) -> int:
    """Return a bound for a text in which each conversion may take the largest argument."""
    if re.search(rf"%[^%a-zA-Z]*(?:\d{{{MAX_DIGITS + 1}}}|\*)", text):
        raise LimitError("it formats with a width of more than 999")
    largest = max(map(_budget().size, (*args, *named.values())), default=0)
    return len(text) + text.count("%") * (largest + 10**MAX_DIGITS)


#: methods of text, and filters, that make a larger one: a bound of its characters by the arguments
TEXTS: Mapping[str, Callable[..., int]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill", "truncate"), _width),
    **dict.fromkeys(("strip", "lstrip", "rstrip", "trim"), _stripped),
    "expandtabs": lambda text, size=8: len(text) + text.count("\t") * _width("", size),
    "replace": _replaced,
    "indent": _indented,
    "format": _formatted,
}
#: attributes of text and numbers that templates do without
REFUSED = frozenset(("encode", "maketrans", "translate", "to_bytes", "from_bytes", "fromkeys"))
REFUSED |= {"striptags", "unescape"}
#: filters likewise: they search quadratically, or write HTML
NO_FILTERS = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr", "forceescape")
#: filters whose first argument becomes text, and those whose result holds lists of the items
TEXT_FILTERS = frozenset((*TEXTS, "capitalize", "e", "escape", "lower", "string", "title", "upper"))
TEXT_FILTERS |= {"urlencode", "wordcount"}
NESTING = frozenset(("batch", "groupby", "slice"))


def _counted(value: Any, *counts: Any, **named: Any) -> int:
    for x in (*counts, *named.values()):
        if isinstance(x, int) and not -300 < x < 10_000:
            raise LimitError(f"it gives a filter {x}, which is too large a number")
    return 0


def _summed(values: Any, attribute: Any = None, start: Any = 0) -> int:
    if not isinstance(start, int | float):
        raise LimitError("filter sum: adds numbers alone")
    return 0


#: filters likewise, and those that take numbers of elements or digits
FILTERS: Mapping[str, Callable[..., int]] = {
    **TEXTS,
    **dict.fromkeys(("batch", "slice", "round"), _counted),
    "join": lambda parts, d="", attribute=None: _joined(parts, d),
    "sum": _summed,
}


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter within the limits. An argument that jinja2 gives to it is the first."""
    first = int(getattr(function, "jinja_pass_arg", None) is not None)
    bound = FILTERS.get(name)

    @wraps(function)
    def guarded(*args: Any, **named: Any) -> Any:
        budget, value = _budget(), args[first]
        if isinstance(value, Iterator):
            value = budget.made(list(value))
        if name in TEXT_FILTERS and getattr(value, "__html__", None) is None:
            value = budget.text(value)
        more = args[first + 1 :]
        if bound:
            budget.make(bound(value, *more, **named))
        made = function(*args[:first], value, *more, **named)
        if name in NESTING:
            return budget.nested(list(made))
        if isinstance(made, int):
            _check_bits(made.bit_length())
        return budget.made(made)

    return guarded


# --- operators --------------------------------------------------------------------------------


def _repeated(left: Any, right: Any) -> int:
    sequence, count = (right, left) if isinstance(left, int) else (left, right)
    if not isinstance(sequence, (str, *CONTAINERS)) or not isinstance(count, int):
        return 0
    each = len(sequence) if isinstance(sequence, str) else _budget().size(sequence)
    return each * max(count, 0)


def _added(left: Any, right: Any) -> int:
    if isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
        return _budget().size(left) + _budget().size(right)
    return 0


def _power(left: Any, right: Any) -> int:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * right)
    return 0


def _percent(left: Any, right: Any) -> int:
    args = right if isinstance(right, tuple) else (right,)
    return _formatted(left, *args) if isinstance(left, str) else 0


OPERATORS: Mapping[str, Callable[[Any, Any], int]] = {
    "+": _added,
    "*": _repeated,
    "**": _power,
    "%": _percent,
    "//": lambda left, right: 0,
}


#: attributes of dicts, which go before their keys
_OF_DICTS = frozenset(dir(dict))


class _Counted:
    """An iterable of a loop: each step is charged, the `text` of the loop's body included."""

    def __init__(self, values: Any, text: int = 0) -> None:
        _budget().spend(ELEMENT)
        self.values, self.steps, self.text = values, iter(values), text

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[Any]:
        budget = _budget()
        for x in self.steps:
            budget.spend(ELEMENT + self.text)
            yield x


class _Plain(Namespace):
    """A namespace; as text, its values would be read without end."""

    def __repr__(self) -> str:
        return "<Namespace>"


class _Formatter(SandboxedFormatter):
    """`str.format` with widths of at most three digits."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if re.search(rf"\d{{{MAX_DIGITS + 1}}}", format_spec):
            raise LimitError("it formats with a width of more than 999")
        budget = _budget()
        budget.make(budget.size(value))
        text: str = budget.made(super().format_field(value, format_spec))
        return text

    def convert_field(self, value: Any, conversion: Any) -> Any:
        _budget().make(_budget().size(value))
        return super().convert_field(value, conversion)


class _Checked(NodeTransformer):
    """Puts filters of ours around what makes values without a call: loops, lists, slices, `~`."""

    def generic_visit(self, node: nodes.Node, *args: Any, **named: Any) -> nodes.Node:
        super().generic_visit(node)
        if isinstance(node, nodes.For):
            text = sum(len(part.data) for part in node.find_all(nodes.TemplateData))
            node.iter = _filter(node.iter, "counted", nodes.Const(text, lineno=node.lineno))
        elif isinstance(node, nodes.Concat):
            return _filter(nodes.List(node.nodes, lineno=node.lineno), "concatenated")
        elif isinstance(node, (nodes.List, nodes.Dict, nodes.Tuple)):
            stored = isinstance(node, nodes.Tuple) and node.ctx != "load"
            return node if stored else _filter(node, "built")
        elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            none, part = nodes.Const(None, lineno=node.lineno), node.arg
            ends = [x or none for x in (part.start, part.stop, part.step)]
            return _filter(node.node, "sliced", *ends)
        return node


def _filter(node: Any, name: str, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, [*args], [], None, None, lineno=node.lineno)


class Generation(Extension):
    """`{% generation %}...{% endgeneration %}`, with which training templates mark answers: its
    body, in a scope of its own."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class Environment(ImmutableSandboxedEnvironment):
    """jinja2's immutable sandbox within a budget."""

    intercepted_binops = frozenset(OPERATORS)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", Generation],
            finalize=lambda value: _budget().text(value),
        )
        shared = {n: f for n, f in self.filters.items() if n not in NO_FILTERS}
        self.filters = {n: _guarded(n, f) for n, f in (shared | {"tojson": _json}).items()}
        self.filters |= {"counted": _Counted, "concatenated": _concatenated}
        self.filters |= {"built": lambda value: _budget().nested(value), "sliced": _sliced}
        del self.globals["lipsum"]
        self.globals |= {"range": safe_range, "namespace": _Plain, "raise_exception": _refuse}
        self.globals["strftime_now"] = _now

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Checked().visit(super()._parse(source, name, filename))
        return tree

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in REFUSED and super().is_safe_attribute(obj, attr, value)

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute in obj and attribute not in _OF_DICTS:
            return obj[attribute]
        return super().getattr(obj, attribute)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if (
            not isinstance(value, (BuiltinMethodType, MethodType))
            or super().wrap_str_format(value) is None
        ):
            return None
        text: Any = value.__self__
        mapping = value.__name__ == "format_map"

        def formatted(*args: Any, **named: Any) -> str:
            given = args[0] if mapping else named
            return _Formatter(self).vformat(text, () if mapping else args, given)

        return formatted

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        for x in (left, right):
            _check_bits(x.bit_length() if isinstance(x, int) else 0)
        budget = _budget()
        budget.make(OPERATORS[operator](left, right))
        return budget.made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **named: Any) -> Any:
        budget = _budget()
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str) and name == "join" and args:
            args = ([*args[0]] if isinstance(args[0], Iterator) else args[0], *args[1:])
            budget.make(_joined(args[0], owner))
        elif isinstance(owner, str) and name in TEXTS:
            budget.make(TEXTS[name](owner, *args, **named))
        elif isinstance(__obj, LoopContext) and args:
            loop: Any = __obj._iterable
            args = (_Counted(args[0], loop.text), *args[1:])
        elif isinstance(__obj, Macro) and not (__obj.catch_varargs or __obj.catch_kwargs):
            named.pop("_loop_vars", None)  # of jinja2's context, which a macro does not need
            return budget.made(__obj(*args, **named))
        elif len(args) + len(named) > 1:
            budget.size((*args, *named.values()))
        return budget.made(super().call(__context, __obj, *args, **named))


def _refuse(message: Any) -> Any:
    raise TemplateError(_budget().text(message))


def _now(form: str) -> str:
    if len(form) > MAX_STRIPPED or re.search(rf"\d{{{MAX_DIGITS}}}", form):
        raise LimitError("strftime_now: the format is too long")
    return datetime.now().strftime(form)


def _sliced(value: Any, *ends: Any) -> Any:
    """Return a slice, whose size is at most that of the whole."""
    budget = _budget()
    part = budget.made(value[slice(*ends)])
    if isinstance(part, list | tuple):
        budget.sizes[id(part)] = part, budget.size(value)
    return part


def _concatenated(values: list[Any]) -> str:
    budget = _budget()
    texts = [*map(budget.text, values)]
    budget.make(sum(map(len, texts)))
    return "".join(texts)


def _json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without the escapes for HTML that jinja2's own filter writes. The parameters, in
    this order, are those of transformers' filter: templates give them by place too."""
    budget = _budget()
    if separators and budget.size(separators) > 2 * MAX_INDENT:
        raise LimitError("filter tojson: long separators")
    if budget.size(indent if indent is not None else "") > 2 * MAX_INDENT or (
        isinstance(indent, int) and indent > MAX_INDENT
    ):
        raise LimitError(f"filter tojson: indent of more than {MAX_INDENT}")
    form: Any = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    pieces, length = list[str](), 0
    for piece in json.JSONEncoder(ensure_ascii=ensure_ascii, **form).iterencode(value):
        pieces.append(budget.made(piece))
        length += len(piece)
        if length > MAX_TEXT:
            raise LimitError(f"it makes a value of more than {MAX_TEXT} characters")
    return "".join(pieces)


@lru_cache(maxsize=1)
def _environment() -> Environment:
    return Environment()


@lru_cache(maxsize=8)
def _compiled(source: str, name: str) -> Template:
    env = _environment()
    code = env.compile(source, filename=name)
    return Template.from_code(env, code, env.make_globals(None))
