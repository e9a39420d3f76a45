"""Errors that a user can act on. After a colon a class lists what its messages name, if it
applies."""

from __future__ import annotations

from collections.abc import Callable


class G4Error(Exception):
    """Base of every expected error; the command line prints its traceback only with --trace.

    `exit_code` is what the command line returns: 1 a check failed or a queue is full, 2 wrong usage
    or bad input, 3 the environment lacks something, 4 another rank ended or does not answer.
    """

    exit_code = 2


class SpecError(G4Error):
    """A spec or config is wrong: file, line, key path, the value found and the expected one."""


class ParseError(G4Error):
    """The text of a graph cannot be parsed: line number, what was found and expected."""


class VerifyError(G4Error):
    """A graph breaks a rule of the IR. The message names the node or value, and of a type mismatch
    the declared and the inferred type."""


class PassError(G4Error):
    """A pass failed or broke its contract: pass, value, passes that ran before."""


class PlanError(G4Error):
    """An engine does not fit into its device's memory: what it needs, and what would fit."""


class WeightsError(G4Error):
    """A checkpoint or adapter is wrong: file and tensor, expected and found."""


class LowerError(G4Error):
    """A backend cannot lower an op, or its compiler refuses a graph: op, value and reason."""


class EngineError(G4Error):
    """An engine cannot be written, loaded or run, for example since its directory is damaged: file,
    reason, and the fix."""


class TrustError(EngineError):
    """Native code that this user did not build, or a folder that other users can write to; says how
    to trust it."""


class InputError(G4Error):
    """A flag, an argument or a request is wrong: which, its value, and what was expected."""


class BusyError(G4Error):
    """A queue is full (the message has its length), or the server is shutting down."""

    exit_code = 1


class CheckError(G4Error):
    """Computed values are NaN or infinite: which, and the fix."""

    exit_code = 1


class RankError(G4Error):
    """A rank ended, or does not answer: which, if that is known."""

    exit_code = 4


class MissingError(G4Error):
    """The environment lacks something: what, and the way to get it."""

    exit_code = 3


def check_all(*checks: Callable[[], object]) -> None:
    """Run every check. If one raised an InputError or MissingError, raise that; if several did, a
    MissingError that lists the errors in the order of the checks."""
    errors: list[G4Error] = []
    for check in checks:
        try:
            check()
        except (InputError, MissingError) as e:
            errors.append(e)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        listed = "".join(f"\n  {i}. {e}" for i, e in enumerate(errors, 1))
        raise MissingError(f"{len(errors)} requirements are not met here:{listed}")
