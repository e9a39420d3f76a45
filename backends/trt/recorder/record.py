"""Classes that write down how they are used, and check the kinds of what they are given."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache, wraps
from typing import Any, ClassVar, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class RuleError(ValueError):
    """A rule of TensorRT that a network breaks: the layer, what it was given, and the rule."""


def need(condition: Any, message: str) -> None:
    """Raise RuleError with the message where the condition does not hold."""
    if not condition:
        raise RuleError(message)


@dataclass(frozen=True)
class Call:
    """One use of a member: `kind` is call, get or set."""

    owner: str
    member: str
    kind: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None


class Recorded:
    """A class of the module. The uses of its `api` and `Attribute` members go to `_calls`."""

    #: the class's name in the real module, where this one has a version of its own
    _api_name: ClassVar[str] = ""
    _calls: list[Call]

    def _record(self, member: str, kind: str, args: Any = (), kwargs: Any = None) -> None:
        owner = type(self)._api_name or type(self).__name__
        self._calls.append(Call(owner, member, kind, tuple(args), kwargs or None))

    def _changed(self, member: str) -> None:
        """Note that a member was set."""


def _is_whole(x: Any) -> bool:
    return isinstance(x, int | Enum) and not isinstance(x, bool)


def _is_dims(x: Any) -> bool:
    return isinstance(x, Sequence) and not isinstance(x, str) and all(map(_is_whole, x))


#: annotation -> whether a value is of that kind; other annotations name classes, see `fits`
_KINDS: dict[str, Callable[[Any], bool]] = {
    "int": _is_whole,
    "bool": lambda x: isinstance(x, bool),
    "str": lambda x: isinstance(x, str),
    "float": lambda x: isinstance(x, int | float) and not isinstance(x, bool),
    "Dims": _is_dims,
    "Permutation": _is_dims,
    "Any": lambda x: True,
    "Callable": callable,
    "None": lambda x: x is None,
}


def fits(value: Any, kind: str) -> bool:
    """Whether a value is what the annotation says: `Dims | None`, `Sequence[ITensor]`, a class."""
    options = [k.strip() for k in kind.split("|")]
    for option in options:
        if option.startswith("Sequence["):
            inner = option.removeprefix("Sequence[").removesuffix("]")
            if isinstance(value, list | tuple) and all(fits(v, inner) for v in value):
                return True
        elif option in _KINDS:
            if _KINDS[option](value):
                return True
        elif any(option == c.__name__ for c in type(value).__mro__):
            return True
    return False


def api(f: F) -> F:
    """Return a method of the real class: its use is recorded, its arguments are checked.

    TypeError on arguments that the real binding would not take.
    """
    signature = inspect.signature(f)
    kinds = {n: str(p.annotation) for n, p in signature.parameters.items() if n != "self"}

    @wraps(f)
    def called(self: Recorded, *args: Any, **kwargs: Any) -> Any:
        self._record(f.__name__, "call", args, kwargs)
        for name, value in signature.bind(self, *args, **kwargs).arguments.items():
            if name != "self" and not fits(value, kinds[name]):
                raise TypeError(
                    f"{type(self).__name__}.{f.__name__}: {name}={value!r} is no {kinds[name]}"
                )
        return f(self, *args, **kwargs)

    return called  # type: ignore[return-value]


class Attribute:
    """A property of the real class. `kind` None makes it read-only; `read` works its value out,
    else it is what was set last, at first `default`."""

    def __init__(
        self, kind: str | None, default: Any = None, read: Callable[[Any], Any] | None = None
    ) -> None:
        self.kind, self.default, self.read = kind, default, read

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Recorded | None, owner: type) -> Any:
        if instance is None:
            return self
        instance._record(self.name, "get")
        return self.read(instance) if self.read else self.held(instance)

    def __set__(self, instance: Recorded, value: Any) -> None:
        instance._record(self.name, "set", (value,))
        where = f"{type(instance).__name__}.{self.name}"
        if self.kind is None:
            raise AttributeError(f"{where} cannot be set")
        if not fits(value, self.kind):
            raise TypeError(f"{where} = {value!r}: expected {self.kind}")
        self.keep(instance, value)
        instance._changed(self.name)

    def held(self, instance: Recorded) -> Any:
        """Return the value, without a record of the look."""
        return instance.__dict__.get(f"attribute {self.name}", self.default)

    def keep(self, instance: Recorded, value: Any) -> None:
        instance.__dict__[f"attribute {self.name}"] = value


def held(instance: Recorded, name: str) -> Any:
    """Return the value of an `Attribute`, without a record of the look."""
    owner: Any = type(instance)
    return _attribute(owner, name).held(instance)


def keep(instance: Recorded, name: str, value: Any) -> None:
    """Set an `Attribute` without a record."""
    owner: Any = type(instance)
    _attribute(owner, name).keep(instance, value)


def was_set(instance: Recorded, name: str) -> bool:
    """Whether an `Attribute` was given a value."""
    return f"attribute {name}" in instance.__dict__


@lru_cache(maxsize=4096)
def _attribute(owner: type, name: str) -> Attribute:
    """Return the descriptor itself; its slow search happens for every look at every layer."""
    descriptor = inspect.getattr_static(owner, name)
    assert isinstance(descriptor, Attribute)
    return descriptor
