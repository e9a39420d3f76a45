"""The process that renders chat templates: jinja2's immutable sandbox under limits of the system.

`sandbox` starts it. The sandbox keeps a template from objects and files, and the system ends a
template that takes too much processor time or memory, whatever it does meanwhile.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Generation(Extension):
    """`{% generation %}...{% endgeneration %}`, with which training templates mark answers: its
    body, in a scope of its own."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        """Return the body of the tag."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without the escapes for HTML that jinja2's own filter writes. The parameters, in
    this order, are those of transformers' filter: templates give them by place too."""
    form: dict[str, Any] = {"ensure_ascii": ensure_ascii, "sort_keys": sort_keys}
    return json.dumps(value, indent=indent, separators=separators, **form)


def _raise(message: Any) -> Any:
    raise TemplateError(str(message))


ENVIRONMENT = ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=["jinja2.ext.loopcontrols", Generation],
)
ENVIRONMENT.filters["tojson"] = _json
ENVIRONMENT.globals["raise_exception"] = _raise
ENVIRONMENT.globals["strftime_now"] = lambda form: datetime.now().strftime(form)


@lru_cache(maxsize=8)
def _compiled(source: str, name: str) -> Template:
    code = ENVIRONMENT.compile(source, filename=name)
    return Template.from_code(ENVIRONMENT, code, ENVIRONMENT.make_globals(None))


def serve(memory: int) -> None:
    """Answer each line of stdin, the arguments of `answer` as JSON, with a line. `memory`: most
    bytes of this process's address space."""
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), flush=True)


def answer(
    source: str, name: str, variables: Mapping[str, Any], seconds: float, most: int
) -> dict[str, Any]:
    """Return the `text` of a template, or its `error` and `line`.

    The process ends by SIGPROF after so many seconds of processor time. `most`: characters of text.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)
    pieces, length = list[str](), 0
    try:
        for piece in _compiled(source, name).generate(dict(variables)):
            pieces.append(piece)
            length += len(piece)
            if length > most:
                return {"error": f"it prints more than {most} characters"}
        return {"text": "".join(pieces)}
    except RecursionError:
        return {"error": "it calls itself without end"}
    except MemoryError:
        return {"error": "it needs too much memory"}
    except Exception as e:  # a template raises whatever its expressions do
        line = getattr(e, "lineno", None)
        return {"error": str(e)[:400] or type(e).__name__, "line": line}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
