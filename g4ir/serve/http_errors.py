"""HTTP errors: status and body of each refused request."""

from __future__ import annotations

import logging
import math
import re
import secrets
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from g4ir.errors import BusyError, G4Error, InputError, MissingError

log = logging.getLogger(__name__)

BAD, SERVER = "invalid_request_error", "server_error"
#: min and max seconds of Retry-After
RETRY_S, MAX_RETRY_S = 1, 60
#: exceptions whose messages are logged: they name indices, sizes, types and attributes, but no
#: values
_WITHOUT_TEXT = (IndexError, TypeError, AttributeError, ArithmeticError, MemoryError)
_FIELD = re.compile(r"(\w+)(?=[\[.: ])")


@dataclass
class Refused(Exception):
    """An error response. `param`: the request's field at fault, or None."""

    status: int
    message: str
    type: str = BAD
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """Return OpenAI's error object."""
        names = ("message", "type", "param", "code")
        return {"error": {name: getattr(self, name) for name in names}}


def bad(param: str, message: str) -> Refused:
    """Return the error (400) for an invalid value of the field `param`."""
    return Refused(400, f"{param}: {message}", param=param)


def missing(param: str, message: str) -> Refused:
    """Return the error for an unsupported value of a field: 400, since clients retry 5xx."""
    return Refused(400, f"{param}: {message}", param=param, code="not_supported")


@contextmanager
def named(field: str) -> Iterator[None]:
    """A context in which an InputError becomes the refusal (400) of a field."""
    try:
        yield
    except InputError as e:
        message = str(e).removeprefix(f"{field}: ")
        within = message.startswith(f"{field}[")
        raise Refused(400, message, param=field) if within else bad(field, message) from None


def later(status: int, code: str, message: str, wait_s: float = RETRY_S) -> Refused:
    """Return an error with a Retry-After header of `wait_s`, rounded up to whole seconds and within
    RETRY_S to MAX_RETRY_S."""
    seconds = min(max(math.ceil(wait_s), RETRY_S), MAX_RETRY_S)
    return Refused(status, message, code, code=code, headers={"Retry-After": str(seconds)})


def ending() -> Refused:
    """Return the error (503) for requests during shutdown."""
    return later(503, "shutting_down", "the server is shutting down; retry at another server")


def refusal(
    error: BaseException,
    fields: Collection[str],
    hidden: Sequence[str] = (),
    wait_s: float = RETRY_S,
) -> Refused:
    """Map an exception to an HTTP error; a Refused is returned unchanged. Internal errors expose
    only an id that is also logged. `fields`: names that become `param` if the message begins with
    one; `hidden`: names and paths to replace by "the engine" in messages; `wait_s`: seconds of
    Retry-After if the queue is full."""
    if isinstance(error, Refused):
        return error
    text = reduce(lambda t, name: t.replace(name, "the engine"), hidden, str(error))
    if isinstance(error, BusyError):
        return later(429, "queue_full", text, wait_s)
    match = _FIELD.match(text)
    param = match[1] if match and match[1] in fields else None
    if isinstance(error, MissingError):
        return Refused(400, text, param=param, code="not_supported")
    if isinstance(error, InputError):
        return Refused(400, text, param=param)
    number, named = secrets.token_hex(6), type(error).__name__
    # Most exceptions' messages may contain text of the request: log only the traceback.
    where = "".join(traceback.format_tb(error.__traceback__))
    if isinstance(error, (G4Error, *_WITHOUT_TEXT)):
        named = f"{named}: {error}"
    log.error("request failed, error %s: %s\n%s", number, named, where)
    # Errors of g4ir, such as NaN logits, would recur: OpenAI's clients retry unless told not to.
    headers = {"x-should-retry": "false"} if isinstance(error, G4Error) else {}
    message = f"internal server error; the server's log has it under the id {number}"
    return Refused(500, message, SERVER, headers=headers)
