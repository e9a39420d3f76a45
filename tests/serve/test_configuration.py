"""Flags of `serve` from the command line, the environment and a file; formats of its log."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from g4ir.cli import parse
from g4ir.cli.serve import Serve
from g4ir.errors import InputError
from g4ir.ui import console
from tests.cases import TABLES
from tests.cli_tools import refused

#: option -> the default of its flag, and another value; of a switch, a list, a setting, a number
OPTIONS: dict[str, tuple[Any, Any]] = {
    "max-gap": (100.0, 7.5),
    "log-requests": (False, True),
    "served-name": (["a"], ["b", "c"]),
    "drain": (60.0, 3.0),
}
MEANS = ("flag", "environment", "file", "default")


def values_of(verb: Any) -> Any:
    """The fields of a verb and its parts, but which of them were given, and where."""

    def clean(value: Any) -> Any:
        items = value.items() if isinstance(value, dict) else ()
        skip = ("explicit", "config")
        return {k: clean(v) for k, v in items if k not in skip} if items else value

    return clean(asdict(verb))


def text(value: Any) -> str:
    listed = ",".join(value) if isinstance(value, list) else value
    return str(listed).lower() if isinstance(value, bool) else str(listed)


def parsed(
    tmp_path: Path, patch: pytest.MonkeyPatch, given: dict[str, dict[str, Any]], *words: str
) -> Serve:
    """`serve` with these values by each means."""
    flags = []
    for name, value in given.get("flag", {}).items():
        if name == "drain":
            flags += ["--set", f"drain={value}"]
        elif isinstance(value, list):
            flags += [w for v in value for w in (f"--{name}", v)]
        else:
            flags += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    for name, value in given.get("environment", {}).items():
        patch.setenv(f"G4IR_{name.replace('-', '_').upper()}", text(value))
    path = tmp_path / "serve.yaml"
    path.write_text("\n".join(f"{k}: {json.dumps(v)}" for k, v in given.get("file", {}).items()))
    file = ["--config", str(path)] if given.get("file") else []
    parser, values = parse(["serve", "engine", *flags, *file, *words])
    verb = parser.flags.make(values)
    assert isinstance(verb, Serve)
    return verb


@pytest.mark.parametrize("order", [*permutations(MEANS)], ids=" ".join)
def test_every_configuration_gives_the_same_server(
    order: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each option gets its default by one of the means; all lower ones have another value."""
    names = [n for n in OPTIONS if n != "served-name" or order[2] != "default"]
    given: dict[str, dict[str, Any]] = {means: {} for means in MEANS}
    for name, means in zip(OPTIONS, order, strict=True):
        right, other = OPTIONS[name]
        switch = isinstance(right, bool) and means == "flag"  # no flag turns it off
        if means != "default" and name in names and not switch:
            given[means][name] = right
            for lower in MEANS[MEANS.index(means) + 1 : -1]:
                given[lower][name] = other
    plain = parsed(tmp_path, monkeypatch, {"flag": {"served-name": ["a"]}})
    words = () if "served-name" in names else ("--served-name", "a")
    assert values_of(parsed(tmp_path, monkeypatch, given, *words)) == values_of(plain)


def test_variables_and_keys_of_flags_and_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tested = {"host": "0.0.0.0", "max_body": "1", "page": "off", "random-weights": "7"}
    for name, value in tested.items():
        file = tmp_path / "c.yaml"
        file.write_text(f"{name}: {value}\n")
        _, by_file = parse(["serve", "engine", "--config", str(file)])
        with monkeypatch.context() as patch:
            patch.setenv(f"G4IR_{name.replace('-', '_').upper()}", value)
            _, by_variable = parse(["serve", "engine"])
        assert by_variable == {k: v for k, v in by_file.items() if k != "config"}
        assert len(by_variable) == 2


@pytest.mark.parametrize(("content", "message"), TABLES["server"]["config files"])
def test_files_that_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(content)
    assert message in refused("serve", "engine", "--config", path)


@pytest.mark.parametrize(("variable", "value", "message"), TABLES["server"]["variables"])
def test_variables_that_are_refused(
    variable: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(InputError, match=re.escape(message)):
        parse(["serve", "engine"])


def test_variables_that_are_not_ours(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that is spelled wrong is named; those of Kubernetes and of other parts are not."""
    for name in ("G4IR_ISA", "G4IR_SERVICE_HOST", "G4IR_PORT_8000_TCP", "G4IR_MAX_GPA"):
        monkeypatch.setenv(name, "1")
    _, values = parse(["serve", "engine"])
    assert values == {"models": ["engine"]}
    (line,) = [record.message for record in caplog.records]
    assert line == "G4IR_MAX_GPA: unknown key; did you mean G4IR_MAX_GAP?"


def test_formats_of_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        for name in ("text", "json", None):
            console.use_format(name)
            console.say("draining", "warning", running=2, path='a"b')
    finally:
        console.use_format(None)
    text, line, plain = capsys.readouterr().err.splitlines()
    time = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
    assert re.fullmatch(rf'{time} WARNING draining running=2 path=a"b', text)
    values = json.loads(line)
    assert re.fullmatch(time, values.pop("time"))
    assert values == {"level": "warning", "message": "draining", "running": 2, "path": 'a"b'}
    assert plain == 'g4ir: warning: draining running=2 path=a"b'
