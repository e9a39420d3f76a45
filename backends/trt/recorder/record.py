"""Classes that write down how they are used. Arguments are not looked at: every use is compared
with the signatures of the real bindings by the tests."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar


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


def api(f: Any) -> Any:
    """Return a method of the real class, whose use is recorded."""

    @wraps(f)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._record(f.__name__, "call", args, kwargs)
        return f(self, *args, **kwargs)

    return called


class Recorded:
    """A class of the module. The uses of its public methods and `Attribute`s go to `_calls`;
    `_name` is the value of an attribute `name`, without a record of the look."""

    #: the class's name in the real module, where this one has a version of its own
    _api_name: ClassVar[str] = ""
    _calls: list[Call]

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def __init_subclass__(cls) -> None:
        """Have public methods recorded; not those of classes that derive from the module's."""
        if cls.__module__.startswith(f"{__package__}."):
            for name, f in [*vars(cls).items()]:
                if not name.startswith("_") and inspect.isfunction(f):
                    setattr(cls, name, api(f))

    def _record(self, member: str, kind: str, args: Any = (), kwargs: Any = None) -> None:
        owner = type(self)._api_name or type(self).__name__
        self._calls.append(Call(owner, member, kind, tuple(args), kwargs or None))

    def _changed(self, member: str) -> None:
        """Note that a member was set."""


def method(name: str, parameters: Sequence[str], run: Callable[..., Any]) -> Any:
    """Return a method of the real class, which calls `run(self, **arguments)`."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([inspect.Parameter(n, kind) for n in parameters])

    def called(self: Recorded, *args: Any, **kwargs: Any) -> Any:
        self._record(name, "call", args, kwargs)
        return run(self, **signature.bind(*args, **kwargs).arguments)

    return called


class Attribute:
    """A property of the real class: what was set last, at first `default`; read-only where `read`
    works it out."""

    def __init__(self, default: Any = None, read: Callable[[Any], Any] | None = None) -> None:
        self.default, self.read = default, read

    def __set_name__(self, owner: type, name: str) -> None:
        self.name, self.place = name, f"_{name}"
        if not self.read:
            setattr(owner, self.place, self.default)

    def __get__(self, instance: Recorded | None, owner: type) -> Any:
        if instance is None:
            return self
        instance._record(self.name, "get")
        return self.read(instance) if self.read else getattr(instance, self.place)

    def __set__(self, instance: Recorded, value: Any) -> None:
        instance._record(self.name, "set", (value,))
        if self.read:
            raise AttributeError(f"{type(instance).__name__}.{self.name} cannot be set")
        setattr(instance, self.place, value)
        instance._changed(self.name)
