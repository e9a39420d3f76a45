"""Renders untrusted templates in jinja2's immutable sandbox, with limits on time and memory.

The sandbox blocks access to objects and files. Templates have the filters and methods that
published ones use; the size of a result that may be much larger than its operands is checked in
advance. Each step and each new value is charged to a budget of memory and time.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from functools import lru_cache, wraps
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.runtime import LoopContext, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.visitor import NodeTransformer

#: limits of rendering: characters of the prompt, and characters or elements of any value; seconds;
#: bytes of all values
MAX_TEXT, MAX_SECONDS, MAX_MEMORY = 4 << 20, 10.0, 512 << 20
#: maximum bits of an integer; maximum value or length of an argument of a method or filter in SHORT
MAX_BITS, MAX_SHORT = 4096, 256
SHORTEN = "shorten the conversation, or simplify the template"
#: bytes charged per step and per element
ELEMENT = 64
#: filters, and methods of strings
_FILTERS = """abs attr batch capitalize count default d dictsort e escape first float groupby indent
int items join last length list lower map max min reject rejectattr replace reverse round safe
select selectattr sort string sum title tojson trim unique upper wordcount"""
_METHODS = """capitalize count endswith find index isalnum isalpha isdecimal isdigit islower
isnumeric isspace istitle isupper join lower lstrip partition removeprefix removesuffix replace
rfind rindex rpartition rsplit rstrip split splitlines startswith strip swapcase title upper"""
FILTERS, METHODS = frozenset(_FILTERS.split()), frozenset(_METHODS.split())
#: filters whose operand is converted to text, and those whose operand stays as it is, but is
#: refused if its text would be too long
OF_TEXT = {"indent", "replace", "string", "trim", "upper", "lower", "title", "e", "escape"}
OF_VALUES = {"join", "tojson", "unique", "groupby", "wordcount"}
#: methods and filters whose arguments must be small
SHORT = {"strip", "lstrip", "rstrip", "trim", "indent", "round", "batch", "tojson"}


class LimitError(Exception):
    """Raised if a template exceeds a limit, or does what is not supported here."""


class RenderError(Exception):
    """Raised if a template cannot be rendered; has the line if known. `refused`: the template
    itself called `raise_exception`."""

    def __init__(self, message: str, line: int | None, refused: bool) -> None:
        super().__init__(message)
        self.line, self.refused = line, refused


class Budget(threading.local):
    """Bytes charged to the rendering of the current thread, and its deadline."""

    spent, end = 0, 0.0

    def start(self) -> None:
        self.spent, self.end = 0, time.monotonic() + MAX_SECONDS

    def spend(self, nbytes: int = ELEMENT) -> None:
        """Charge a step that allocates this many bytes. LimitError if memory or time is
        exhausted."""
        self.spent += nbytes
        if self.spent > MAX_MEMORY:
            raise LimitError(f"rendering needs more than {MAX_MEMORY >> 20} MiB; {SHORTEN}")
        if time.monotonic() > self.end:
            raise LimitError(f"rendering takes more than {MAX_SECONDS:g} seconds; {SHORTEN}")


BUDGET = Budget()


def render(source: str, name: str, variables: Mapping[str, Any]) -> str:
    """Return the text of a template. RenderError if it raises or exceeds a limit, TypeError or
    ValueError for variables that are not JSON."""
    values = json.loads(json.dumps(variables, allow_nan=False))
    BUDGET.start()
    pieces, length = list[str](), 0
    try:
        for piece in _compiled(source, name).generate(values):
            pieces.append(piece)
            length = check_size(length + len(piece))
        return "".join(pieces)
    except Exception as e:  # a template's expressions may raise anything
        message = str(e)[:400] or type(e).__name__
        error = RenderError(message, getattr(e, "lineno", None), type(e) is TemplateError)
    raise error  # outside of the handler, so that `e` is not its context


def check_size(size: int) -> int:
    """Return the size (characters of a text, elements of a list or object); LimitError if it
    exceeds MAX_TEXT."""
    if size > MAX_TEXT:
        problem = f"a text or a list would have more than {MAX_TEXT} characters or elements"
        raise LimitError(f"{problem}; {SHORTEN}")
    return size


def charged(value: Any) -> Any:
    """Charge a new value to the budget and return it. LimitError if it is too large."""
    size = 0
    if isinstance(value, str):
        size = check_size(len(value)) * (1 if value.isascii() else 4)
    elif isinstance(value, (list, tuple, dict)):
        size = ELEMENT * check_size(len(value))
    elif isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise LimitError(f"a number has more than {MAX_BITS} bits; simplify the template")
    BUDGET.spend(ELEMENT + size)
    return value


def text_of(value: Any) -> Any:
    """Convert a value to text. LimitError for one that would be too long, computed before the
    conversion, and for objects that are not data."""
    size, pending = 0, [value]
    while pending:
        x = pending.pop()
        size = check_size(size + (len(x) if isinstance(x, str) else 8))
        if isinstance(x, dict):
            pending += (*x.keys(), *x.values())
        elif isinstance(x, (list, tuple)):
            pending += x
        elif not isinstance(x, str | int | float | Undefined | None):
            raise LimitError(f"an object of type {type(x).__name__} cannot be written as text")
    return charged(value if isinstance(value, str) else str(value))


def _check_growth(name: str, value: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Raise LimitError if a method or filter would return too large a value, or take too long."""
    first, second = (*args, *named.values(), "", "")[:2]
    if name in SHORT:
        for x in (*args, *named.values()):
            if (x if isinstance(x, int) else len(str(x))) > MAX_SHORT:
                raise LimitError(f"{name}: an argument has a value or length above {MAX_SHORT}")
        if name == "indent":
            check_size(len(value) + value.count("\n") * MAX_SHORT)
    elif name == "replace":
        check_size(len(value) + value.count(str(first)) * len(str(second)))
    elif name == "join":
        check_size(len(value) * sum(len(str(x)) for x in (first, second) if x))
    elif name == "sum" and (args[1:] or "start" in named):
        raise LimitError("sum: a start value is not supported")


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that checks and charges operand and result. An environment or context that
    jinja2 passes is the first argument, before the operand."""
    first = int(getattr(function, "jinja_pass_arg", None) is not None)

    @wraps(function)
    def guarded(*args: Any, **named: Any) -> Any:
        value, more = args[first], args[first + 1 :]
        if name in ("join", "list", "sort") and isinstance(value, Iterator):
            value = charged([*value])
        if name in OF_TEXT:
            value = text_of(value)
        elif name in OF_VALUES:
            text_of(value)
        _check_growth(name, value, more, named)
        return charged(function(*args[:first], value, *more, **named))

    return guarded


class _Counted:
    """A loop's iterable that charges each step to the budget. `text`: number of characters of
    literal text in the loop's body, charged per step too."""

    def __init__(self, values: Any, text: int = 0) -> None:
        BUDGET.spend()
        self.values, self.steps, self.text = values, iter(values), text

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[Any]:
        for x in self.steps:
            BUDGET.spend(ELEMENT + self.text)
            yield x


class _Checked(NodeTransformer):
    """Wraps AST nodes that create values without a call (loops, slices, `~`) in charging
    filters."""

    def generic_visit(self, node: nodes.Node, *args: Any, **named: Any) -> nodes.Node:
        super().generic_visit(node)
        if isinstance(node, nodes.For):
            text = sum(len(part.data) for part in node.find_all(nodes.TemplateData))
            node.iter = _filter(node.iter, "counted", nodes.Const(text, lineno=node.lineno))
        elif isinstance(node, nodes.Concat):
            return _filter(nodes.List(node.nodes, lineno=node.lineno), "concatenated")
        elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            return _filter(node, "charged")
        return node


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
    """jinja2's immutable sandbox; filters, calls, and the operators whose values may be large are
    charged to the budget."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", Generation],
            finalize=text_of,
        )
        filters = {**self.filters, "tojson": _json}
        self.filters = {n: _guarded(n, f) for n, f in filters.items() if n in FILTERS}
        self.filters |= {"counted": _Counted, "concatenated": _concatenated, "charged": charged}
        del self.globals["lipsum"], self.globals["cycler"]
        self.globals |= {"range": safe_range, "raise_exception": _refuse}
        self.globals["strftime_now"] = lambda fmt: datetime.now().strftime(fmt)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Checked().visit(super()._parse(source, name, filename))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        is_numeric = isinstance(left, int | float) and isinstance(right, int | float)
        if operator == "%" and not is_numeric:
            raise SecurityError("texts are not formatted by %; use ~")
        if operator == "*" and not is_numeric:
            count, value = (left, right) if isinstance(left, int) else (right, left)
            check_size(len(value) * max(count, 0))
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            charged(1 << min(left.bit_length() * max(right, 0), MAX_BITS))
        return charged(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **named: Any) -> Any:
        method = getattr(__obj, "__wrapped__", __obj)  # jinja2 wraps `format`
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        BUDGET.spend()
        if isinstance(owner, str | int | float) and name not in METHODS:
            raise SecurityError(f"templates have no method {name} here")
        if name == "join" and args:
            args = ([*args[0]],)
            text_of(args[0])
            _check_growth(name, args[0], (owner,), {})
        elif isinstance(owner, str):
            _check_growth(name, owner, args, named)
        elif isinstance(__obj, LoopContext) and args:
            loop: Any = __obj._iterable
            args = (_Counted(args[0], loop.text), *args[1:])
        return charged(super().call(__context, __obj, *args, **named))


def _refuse(message: Any) -> Any:
    raise TemplateError(text_of(message))


def _concatenated(values: list[Any]) -> Any:
    texts = [*map(text_of, values)]
    check_size(sum(map(len, texts)))
    return charged("".join(texts))


def _json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Serialise to JSON without the HTML escapes of jinja2's filter. Parameters are in the order of
    transformers' filter, as templates also pass them by position."""
    options: Any = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    if len(str(separators)) > MAX_SHORT:
        raise LimitError(f"tojson: separators are longer than {MAX_SHORT} characters")
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
